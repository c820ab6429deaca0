"""Classifiers of every kind on data of their classes, or of some of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image

import vision
import zoo
from recipes.evaluate import Config, main
from zoo.imagenet import imagenet_classes

KNOWN = ["dog", "cat", "owl", "fox", "bee"]


def save_images(root: Path, classes: dict[str, int], parts: tuple[str, ...] = ("val",)) -> Path:
    rng = np.random.default_rng(0)
    for part in parts:
        for name, count in classes.items():
            (root / part / name).mkdir(parents=True)
            for index in range(count):
                colour = rng.integers(0, 200, 3)  # so that not all look alike
                pixels = (colour + rng.integers(0, 56, (12, 12, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(root / part / name / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    made: Any = zoo.create_model("vit_micro_patch2_8", class_names=KNOWN)
    torch.nn.init.normal_(made.head.weight)
    return zoo.save_pretrained(made, tmp_path_factory.mktemp("run") / "model")


def logits(model: Any, root: Path, classes: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets of all images, one by one."""
    found, targets = [], []
    for index, name in enumerate(classes):
        for file in sorted((root / "val" / name).iterdir()):
            image = zoo.transforms(model)(vision.decode(file))
            with torch.no_grad():
                found.append(model.eval()(image[None])[0])
            targets.append(index)
    return torch.stack(found), torch.tensor(targets)


def test_data_of_some_of_the_classes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = save_images(tmp_path / "data", {"bee": 7, "cat": 5, "fox": 6})
    out = tmp_path / "new" / "r.json"
    main(Config(f"local-dir:{model}", data=f"folder:{root}", batch_size=4, out=str(out)))
    report = json.loads(out.read_text())
    outputs, targets = logits(zoo.create_model(f"local-dir:{model}"), root, ["bee", "cat", "fox"])
    outputs = outputs[:, [KNOWN.index(name) for name in ("bee", "cat", "fox")]]
    assert report["metrics"]["val/n"] == 18
    right = (outputs.argmax(1) == targets).double().mean()
    assert report["metrics"]["val/top1"] == pytest.approx(100 * float(right))
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    assert report["metrics"]["val/loss"] == pytest.approx(float(loss), abs=1e-4)
    assert [row["name"] for row in report["classes"]] == ["bee", "cat", "fox"]
    assert "only the 3 of 5 classes in" in capsys.readouterr().out


def test_a_class_without_validation_images_still_competes(model: Path, tmp_path: Path) -> None:
    root = save_images(tmp_path / "data", dict.fromkeys(KNOWN, 1), ("train",))
    save_images(root, {"cat": 8, "dog": 8})
    (model.parent / "config.json").write_text(json.dumps({"options": {"data": f"folder:{root}"}}))
    own = main(Config(str(model.parent)))
    given = main(Config(str(model.parent), data=f"folder:{root}"))
    assert len(own["classes"]) == len(given["classes"]) == 5
    assert own["metrics"] == pytest.approx(given["metrics"], abs=1e-4)
    outputs, targets = logits(zoo.create_model(f"local-dir:{model}"), root, KNOWN[:2])
    right = (outputs.argmax(1) == targets).double().mean()
    assert 0 < right < 1
    assert own["metrics"]["val/top1"] == pytest.approx(100 * float(right))


def test_the_best_checkpoint_of_a_run(model: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    best: Any = zoo.create_model("vit_micro_patch2_8", class_names=KNOWN)
    torch.nn.init.normal_(best.head.weight)
    position = {"epoch": 1, "step": 9, "update": 0, "best": 1.0, "best_epoch": 1}
    state = {"model": best.state_dict(), "ema": None, "position": position, "metrics": {}}
    (run / "checkpoints").mkdir()
    torch.save(state, run / "checkpoints" / "best.pt")
    root = save_images(tmp_path / "data", dict.fromkeys(KNOWN, 4))
    report = main(Config(str(run), checkpoint="best", data=f"folder:{root}"))
    outputs, targets = logits(best, root, KNOWN)
    loss = torch.nn.functional.cross_entropy(outputs, targets)
    assert report["metrics"]["val/loss"] == pytest.approx(float(loss), abs=1e-4)
    assert report["checkpoint"] == str(run / "checkpoints" / "best.pt")
    assert main(Config(str(run), data=f"folder:{root}"))["metrics"] != report["metrics"]


def test_a_model_of_timm_on_folders_named_by_synset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = timm.create_model

    def create(name: str, pretrained: bool = False, **options: Any) -> Any:
        torch.manual_seed(int(pretrained))  # stands for the trained weights
        return original(name, **options)

    monkeypatch.setattr(timm, "create_model", create)
    root = save_images(tmp_path / "data", {"n02124075": 2, "n02123045": 2})
    report = main(Config("timm:mobilenetv3_small_050", data=f"folder:{root}"))
    assert [row["name"] for row in report["classes"]] == ["tabby", "Egyptian cat"]
    assert report["outputs"] == len(imagenet_classes())
    assert report["pretrained"] == "timm:mobilenetv3_small_050"


def test_other_weights_and_names_of_the_outputs(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Any = zoo.create_model("timm:mobilenetv3_small_050")
    torch.save(made.state_dict(), tmp_path / "weights.pt")
    root = save_images(tmp_path / "data", {"tabby": 2, "daisy": 3})
    config = Config(
        "timm:mobilenetv3_small_050",
        pretrained=f"file:{tmp_path / 'weights.pt'}",
        class_names="imagenet-1k",
        data=f"folder:{root}",
    )
    assert [row["name"] for row in main(config)["classes"]] == ["daisy", "tabby"]
    assert "100.0 % of the values matched" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--data is needed with --model local-dir:"),
        ({"data": "digits"}, "the model knows the classes dog, cat, .*, but digits has 0, 1"),
        (
            {"data": "folder:{}/other"},
            "has 1 of 2 classes that --model .* does not know: cow; it knows owl",
        ),
        ({"data": "folder:{}/gone"}, "no folder .*gone"),
        ({"model": "vit_micro_patch2_8", "data": "digits"}, "has no weights of its own"),
        ({"model": "{}/features", "data": "digits"}, "did you mean local-dir:"),
        ({"model": "local-dir:{}/features", "data": "digits"}, "has no classifier"),
        (
            {"model": "local-dir:{}/unnamed", "data": "digits"},
            "--model local-dir:.*unnamed has 4 outputs, digits 10 classes",
        ),
    ],
)
def test_what_cannot_be_evaluated_is_told(
    model: Path, tmp_path: Path, flags: dict[str, str], message: str
) -> None:
    save_images(tmp_path / "other", {"cat": 1, "cow": 1})
    for name, classes in (("features", 0), ("unnamed", 4)):
        made = zoo.create_model("vit_micro_patch2_8", num_classes=classes)
        zoo.save_pretrained(made, tmp_path / name)
    flags = {key: value.format(tmp_path) for key, value in flags.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(Config(**{"model": f"local-dir:{model}", **flags}))
