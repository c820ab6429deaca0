"""What a run says where it cannot be continued."""

from __future__ import annotations

from pathlib import Path

import pytest

from zoo.engine.run import _compare


@pytest.mark.parametrize("finished", [True, False])
def test_more_epochs_than_the_run_had_are_refused_with_a_way_on(
    tmp_path: Path, finished: bool
) -> None:
    weights = tmp_path / ("model" if finished else "checkpoints/step_00000030.pt")
    weights.parent.mkdir(exist_ok=True)
    weights.mkdir() if finished else weights.touch()
    before = {"options": {"epochs": 30}, "recipe": "train_vit", "processes": 1}
    _compare(tmp_path / "config.json", before, before)
    now = {**before, "options": {"epochs": 40}}
    prefix = "local-dir" if finished else "file"
    with pytest.raises(ValueError, match="epochs: 30 -> 40") as caught:
        _compare(tmp_path / "config.json", before, now)
    assert f"--pretrained {prefix}:{weights} with another --out" in str(caught.value)
