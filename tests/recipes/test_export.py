from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

import zoo
from recipes.export import Config, main
from zoo.exported import card_of_export, open_export


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run folder as training leaves it."""
    model = zoo.create_model(
        "resnet_micro", img_size=(8, 16), in_chans=1, class_names=["cat", "dog"]
    )
    zoo.save_pretrained(model, tmp_path / "run" / "model")
    options = {"options": {"data": "digits"}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(options))
    return tmp_path / "run"


@pytest.fixture
def model(run_folder: Path) -> Any:
    return zoo.create_model(f"local-dir:{run_folder / 'model'}").eval()


def test_run_folder_becomes_onnx(
    run_folder: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_folder.parent / "model.onnx"
    report = main(Config(model=str(run_folder), out=str(out), opset=18))
    session = onnxruntime.InferenceSession(out)
    x = torch.randn(4, 1, 8, 16)
    (logits,) = session.run(None, {"images": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(logits), model(x), rtol=1e-4, atol=1e-5)
    assert card_of_export(out).class_names == ("cat", "dog")
    printed = capsys.readouterr().out
    for batch in (1, 2, 5):
        assert f"batch {batch}: largest difference" in printed
    assert f"{report.size / 1e6:.2f} MB" in printed
    assert "ms by model.onnx" in printed


def test_folder_becomes_a_program_for_one_image(
    run_folder: Path, model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run_folder.parent / "model.pt2"
    name = f"local-dir:{run_folder / 'model'}"
    report = main(Config(model=name, out=str(out), static_batch=True))
    assert not report.dynamic_batch
    x = torch.randn(1, 1, 8, 16)
    torch.testing.assert_close(open_export(out)(x), model(x))
    assert "for a batch of 1" in capsys.readouterr().out


def test_weights_for_a_named_model(run_folder: Path, model: Any) -> None:
    model = zoo.create_model("resnet_micro").eval()
    torch.save(model.state_dict(), run_folder.parent / "weights.pt")
    out = run_folder.parent / "named.pt2"
    weights = f"file:{run_folder.parent / 'weights.pt'}"
    main(Config(model="resnet_micro", pretrained=weights, out=str(out)))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(open_export(out)(x), model(x))


def test_what_is_missing_is_told_before_a_model_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zoo.exported.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"ONNX needs onnx, onnxscript, onnxruntime"):
        main(Config(model="nowhere", out="model.onnx"))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"out": "model.bin"}, r"--out model.bin must end with .onnx or .pt2"),
        ({"out": "model.pt2", "opset": 18}, r"--opset 18 is for .onnx only"),
        ({"out": "model.pt2", "model": "nowhere"}, "--model nowhere is no run folder"),
        ({"out": "model.pt2", "checkpoint": "best"}, "--checkpoint best is of a run folder"),
    ],
)
def test_flags_that_are_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=says):
        main(Config(**{"model": "resnet_micro", **flags}))
