"""Finding images, and what models see in them, against plain PIL and torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import zoo
from vision.images import ImageError, decode
from vision.predict import (
    Prediction,
    check_classifier,
    find_images,
    image_source,
    logits_of,
    named,
    predict,
    readable,
    top_classes,
)
from zoo.preprocess import normalize


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Images of several kinds, files of others, and a folder inside."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    place = tmp_path / "shots"
    (place / "more").mkdir(parents=True)
    for name, shape in (
        ("2.png", (20, 30, 3)), ("10.jpg", (33, 17, 3)), ("1.PNG", (8, 8)),
        ("more/3.png", (16, 16, 4)), (".hidden.png", (8, 8)),
    ):  # fmt: skip
        Image.fromarray(rng.integers(0, 256, shape, np.uint8)).save(place / name)
    (place / "notes.txt").write_text("no image")
    return place


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_images_of_files_folders_and_wildcards(folder: Path) -> None:
    assert names(find_images([folder])) == ["1.PNG", "2.png", "10.jpg"]
    assert names(find_images(["shots/*.png"])) == ["2.png"]
    assert names(find_images(["shots/**/*"])) == ["1.PNG", "2.png", "10.jpg", "3.png"]
    twice = ["shots/10.jpg", folder / "10.jpg", "shots", "shots/../shots/1*"]
    assert names(find_images(twice)) == ["1.PNG", "2.png", "10.jpg"]
    assert names(find_images(["shots/notes.txt"])) == ["notes.txt"]  # asked for by name


def test_wildcards_in_a_files_own_name_and_the_home_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "2.png").rename(folder / "[2].png")
    assert names(find_images([folder / "[2].png"])) == ["[2].png"]
    monkeypatch.setenv("HOME", str(folder))
    assert names(find_images(["~/1.PNG"])) == ["1.PNG"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("shots/*.gif", r"no image matches shots/\*.gif \(looked from"),
        ("gone.png", "there is no file or folder gone.png"),
        ("empty", r"folder empty holds no images \(\.png, .*'empty/\*\*/\*'"),
    ],
)
def test_what_finds_nothing_is_named(folder: Path, pattern: str, message: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(FileNotFoundError, match=message):
        find_images([folder, pattern])
    with pytest.raises(FileNotFoundError, match="no images were given"):
        find_images([])


def test_bad_files_stop_or_are_skipped(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "0.jpg").write_bytes((folder / "10.jpg").read_bytes()[:300])
    (folder / "5.jpg").write_bytes(b"")
    paths = find_images([folder])
    with pytest.raises(
        ImageError, match=r"2 unreadable .*--bad-images skip(.|\n)*0.jpg(.|\n)*5.jpg"
    ):
        readable(paths)
    assert names(readable(paths, "skip")) == ["1.PNG", "2.png", "10.jpg"]
    assert "5.jpg: empty file" in capsys.readouterr().err
    with pytest.raises(ImageError, match="1 unreadable image files:"):
        readable([folder / "5.jpg"], "skip")
    with pytest.raises(ValueError, match="bad_images 'ignore' must be 'stop' or 'skip'"):
        readable(paths, "ignore")


def expected(model: Any, path: Path) -> torch.Tensor:
    image = decode(path, model.card.preprocessing.in_chans)
    with torch.no_grad():
        return model.eval()(zoo.transforms(model)(image)[None])[0].softmax(-1)


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("batch_size", [2, 32])
def test_predictions_are_the_models(folder: Path, in_chans: int, batch_size: int) -> None:
    torch.manual_seed(0)
    classes = ["cat", "dog", "fox", "owl"]
    model: Any = zoo.create_model("vit_micro_patch2_8", in_chans=in_chans, class_names=classes)
    torch.nn.init.normal_(model.head.weight)
    model.train()
    found = predict(model, [folder, folder / "more"], top_k=3, batch_size=batch_size)
    assert model.training
    assert names([prediction.path for prediction in found]) == ["1.PNG", "2.png", "10.jpg", "3.png"]
    for path, top in found:
        values, indices = expected(model, path).topk(3)
        assert [name for name, _ in top] == [classes[index] for index in indices]
        np.testing.assert_allclose([value for _, value in top], values, atol=1e-6)
    everything = predict(model, [folder / "1.PNG"], top_k=9)[0].classes
    assert len(everything) == 4
    assert sum(value for _, value in everything) == pytest.approx(1)


def test_turned_and_transparent_images_are_decoded_as_in_training(tmp_path: Path) -> None:
    upright = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(8, 6))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    upright.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "turned.png", exif=exif)
    upright.save(tmp_path / "upright.png")
    model: Any = zoo.create_model("vit_micro_patch2_8", num_classes=5)
    one, other = predict(model, [tmp_path])
    assert one.classes == other.classes
    clear = Image.new("RGBA", (8, 8), (200, 0, 0, 0))
    clear.save(tmp_path / "clear.png")
    pixels = image_source(model, [tmp_path / "clear.png"]).__getitems__([(0, 0)])["images"]
    assert pixels.unique().tolist() == [255]


def test_rows_without_names_and_more_classes_than_there_are() -> None:
    model: Any = zoo.create_model("vit_micro_patch2_8", num_classes=3).eval()
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        rows = top_classes(model, pixels, top_k=7)
        logits = model(normalize(pixels, model.card.preprocessing))
        assert torch.equal(logits_of(model, pixels), logits)
        assert logits_of(model.bfloat16(), pixels).dtype == torch.bfloat16
    assert rows["indices"].shape == rows["probabilities"].shape == (2, 3)
    torch.testing.assert_close(rows["probabilities"], logits.softmax(-1).sort(descending=True)[0])
    found = named([Path("a"), Path("b")], rows, None)
    best = f"class {int(logits[1].argmax())}"
    assert isinstance(found[1], Prediction)
    assert found[1].classes[0][0] == best
    with pytest.raises(ValueError, match=r"top_k \(0\) must be at least 1"):
        top_classes(model, pixels, top_k=0)


def test_models_that_know_no_classes_are_refused(folder: Path) -> None:
    features = zoo.create_model("vit_micro_patch2_8", num_classes=0)
    with pytest.raises(ValueError, match="vit_micro_patch2_8 has no classifier"):
        predict(features, [folder])
    tokens = zoo.create_model("vit_micro_patch2_8", global_pool="")
    with pytest.raises(ValueError, match="has an output a token"):
        check_classifier(tokens)
    with pytest.raises(ValueError, match="dual_micro has no classifier"):
        check_classifier(zoo.create_model("dual_micro", text_tower="text_bag"))
