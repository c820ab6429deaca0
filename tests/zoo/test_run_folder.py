"""What `--model` and `--pretrained` mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import zoo
from zoo import run_folder
from zoo.layers import SelfAttention
from zoo.run_folder import find_trained
from zoo.sources import WeightsError


def micro(**options: Any) -> nn.Module:
    return zoo.create_model("vit_micro_patch2_8", **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    zoo.save_pretrained(micro(class_names=["a", "b", "c"]), tmp_path / "run" / "model")
    flags = {"options": {"data": "digits", "epochs": 2}}
    (tmp_path / "run" / "config.json").write_text(json.dumps(flags))
    return tmp_path / "run"


def test_a_run_folder_and_what_it_holds(run: Path) -> None:
    found = find_trained(str(run))
    assert found.flags == {"data": "digits", "epochs": 2}
    model: Any = found.create()
    assert model.num_classes == 3
    saved = find_trained(f"local-dir:{run / 'model'}")
    assert saved.flags == {}
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(model.eval()(x), saved.create().eval()(x))
    (run / "config.json").unlink()
    assert find_trained(str(run)).flags == {}
    (run / "config.json").write_text('{"options": 3}')
    with pytest.raises(ValueError, match=r"config.json is not as a training run writes it"):
        find_trained(str(run))


@pytest.mark.parametrize(
    ("model", "name", "pretrained"),
    [
        ("timm:resnet18.a1_in1k", "timm:resnet18.a1_in1k", True),
        ("torchvision:resnet18.IMAGENET1K_V1", "torchvision:resnet18.IMAGENET1K_V1", True),
        ("open_clip:ViT-B-32/openai", "open_clip:ViT-B-32", "open_clip:ViT-B-32/openai"),
        ("hf-hub:owner/repo@main", "hf-hub:owner/repo@main", False),
        ("vit_tiny_patch16_224", "vit_tiny_patch16_224", True),
    ],
)
def test_models_that_are_named(model: str, name: str, pretrained: bool | str) -> None:
    found = find_trained(model)
    assert (found.name, found.pretrained, found.flags) == (name, pretrained, {})
    if pretrained:
        other = find_trained(model, "file:weights.pt")
        assert (other.name, other.pretrained) == (name, "file:weights.pt")


def test_the_models_own_weights_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        run_folder, "create_model", lambda name, **given: asked.append((name, given))
    )
    find_trained("timm:resnet18").create()
    assert asked == [("timm:resnet18", {"pretrained": True})]


def test_other_weights_are_loaded_and_reported(tmp_path: Path) -> None:
    trained: Any = micro(img_size=16)
    zoo.save_pretrained(trained, tmp_path / "trained")
    told: list[str] = []
    found = find_trained("vit_micro_patch2_8", f"local-dir:{tmp_path / 'trained'}")
    model: Any = found.create(told.append)
    assert torch.equal(model.head.weight, trained.head.weight)
    assert "pos_embed" in told[0]  # resampled
    assert "images of 16x16 there, of 8x8 here" in told[0]


def test_weights_that_leave_the_classifier_untrained_are_refused(tmp_path: Path) -> None:
    torch.save(micro(num_classes=3).state_dict(), tmp_path / "three.pt")
    with pytest.raises(WeightsError, match=r"three.pt leaves the classifier of .*untrained: head"):
        find_trained("vit_micro_patch2_8", f"file:{tmp_path / 'three.pt'}").create()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nowhere", "--model nowhere is no run folder with a trained model: no such folder"),
        ("vit_tiny_patch16_225", "no such folder; models of a near name: vit_tiny_patch16_224"),
        ("{}", "it has no model/model.json"),
        ("{}/run/model", "did you mean local-dir:.*run/model?"),
        ("{}/run/config.json", "name it by --model and pass --pretrained file:.*config.json"),
        ("file:weights.pt", "pass --pretrained file:"),
        ("timn:resnet18", r"no such folder.*legal as well: .*timm:NAME"),
    ],
)
def test_what_means_no_model_is_told(run: Path, model: str, message: str) -> None:
    with pytest.raises(FileNotFoundError, match=message):
        find_trained(model.format(run.parent))


def checkpoint(
    run: Path, name: str, *, average: bool, total: int | None = 10, **position: int
) -> nn.Module:
    """Writes one as training does; returns the model that it would have evaluated."""
    torch.manual_seed(position["step"])
    trained, averaged = micro(num_classes=3), AveragedModel(micro(num_classes=3), use_buffers=True)
    state = {"format": 1, "model": trained.state_dict(), "metrics": {"val/n": 9, "val/top1": 80.0}}
    state["ema"] = averaged.state_dict() if average else None
    state["position"] = {"update": 0, "best": 80.0, "best_epoch": 1, **position}
    if total is not None:
        state["total"] = total
    (run / "checkpoints").mkdir(exist_ok=True)
    torch.save(state, run / "checkpoints" / name)
    return averaged.module if average else trained


@pytest.mark.parametrize("average", [False, True])
def test_checkpoints_of_a_run(run: Path, average: bool) -> None:
    best = checkpoint(run, "best.pt", average=average, epoch=1, step=5)
    inside = checkpoint(run, "step_00000007.pt", average=average, epoch=1, step=7, update=2)
    for wanted, right, says in (
        ("best", best, "after epoch 1 of 2, step 5, val/top1 80"),
        (str(run / "checkpoints" / "best.pt"), best, "after epoch 1 of 2"),
        ("7", inside, "in epoch 2 of 2, step 7"),
        ("step_00000007", inside, "in epoch 2 of 2, step 7"),
        ("step_00000007.pt", inside, "in epoch 2 of 2, step 7"),
    ):
        told: list[str] = []
        found = find_trained(str(run), checkpoint=wanted).create(told.append)
        assert all(torch.equal(found.state_dict()[k], v) for k, v in right.state_dict().items())
        assert says in told[0]
        assert ("averaged weights" in told[0]) is average
        assert "warning" not in told[0]
        assert getattr(found, "card").class_names == ("a", "b", "c")  # noqa: B009
    last = find_trained(str(run)).create()
    assert not torch.equal(last.state_dict()["head.weight"], best.state_dict()["head.weight"])


def temperatures(model: nn.Module) -> set[float]:
    return {core.temperature for core in model.modules() if isinstance(core, SelfAttention)}


def test_a_checkpoint_has_the_temperature_of_its_update(run: Path) -> None:
    flags = {"options": {"temperature": "2:0.5", "epochs": 2}}
    (run / "config.json").write_text(json.dumps(flags))
    checkpoint(run, "best.pt", average=False, total=9, epoch=1, step=5)
    told: list[str] = []
    assert temperatures(find_trained(str(run), checkpoint="best").create(told.append)) == {1.0}
    assert "warning" not in told[0]


def test_a_checkpoint_of_an_unknown_temperature_is_told(run: Path) -> None:
    flags = {"options": {"temperature": "2:0.5", "epochs": 2}}
    (run / "config.json").write_text(json.dumps(flags))
    checkpoint(run, "best.pt", average=False, total=None, epoch=1, step=5)
    checkpoint(run, "step_00000010.pt", average=False, total=None, epoch=2, step=10)
    told: list[str] = []
    find_trained(str(run), checkpoint="best").create(told.append)
    find_trained(str(run), checkpoint="10").create(told.append)
    assert "warning: the run had --temperature 2:0.5" in told[0]
    assert "now have the last one, 0.5" in told[0]
    assert "warning" not in told[1]


def test_checkpoints_that_are_not_there_or_of_no_run_are_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"--checkpoint best is none of .*, which has last$"
    ):
        find_trained(str(run), checkpoint="best")
    checkpoint(run, "best.pt", average=False, epoch=1, step=5)
    checkpoint(run, "step_00000007.pt", average=False, epoch=1, step=7)
    torch.save({}, tmp_path / "other.pt")
    for wanted in ("8", "bets", str(tmp_path / "other.pt")):
        with pytest.raises(FileNotFoundError, match=r"which has last, best, step_00000007$"):
            find_trained(str(run), checkpoint=wanted)
    for model in ("vit_micro_patch2_8", f"local-dir:{run / 'model'}", "timm:resnet18"):
        with pytest.raises(ValueError, match=r"--checkpoint best is of a run folder"):
            find_trained(model, checkpoint="best")
    with pytest.raises(FileNotFoundError, match=r"did you mean --model .*run --checkpoint best\?"):
        find_trained(str(run / "checkpoints" / "best.pt"))
    with pytest.raises(ValueError, match=r"drop --pretrained file:x \(--checkpoint chooses"):
        find_trained(str(run), "file:x")


def test_checkpoints_of_another_model_are_refused(run: Path) -> None:
    checkpoint(run, "best.pt", average=False, epoch=1, step=5)
    torch.save(micro().state_dict(), run / "checkpoints" / "step_00000001.pt")
    zoo.save_pretrained(micro(num_classes=4), run / "model")
    for wanted in ("best", "1"):
        with pytest.raises(WeightsError, match=r"pt is no checkpoint of this run's model"):
            find_trained(str(run), checkpoint=wanted).create()
    (run / "checkpoints" / "best.pt").write_bytes(b"PK cut")
    with pytest.raises(WeightsError, match=r"best.pt was cut short"):
        find_trained(str(run), checkpoint="best").create()


def test_weights_for_a_model_that_brings_its_own_are_refused(run: Path) -> None:
    for model in (str(run), f"local-dir:{run / 'model'}", "hf-hub:owner/repo"):
        with pytest.raises(ValueError, match=r"brings its own weights; drop --pretrained file:x"):
            find_trained(model, "file:x")
