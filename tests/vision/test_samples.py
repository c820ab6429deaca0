"""Samples of a classifier against scikit-learn and against the model itself."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

import vision
import zoo
from vision.data import make_source
from vision.samples import SHOWN, class_table, save_thumbnail, write_samples
from zoo.preprocess import normalize


@pytest.fixture(scope="module")
def data() -> Any:
    return vision.load_dataset("digits")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return zoo.create_model("vit_micro_patch2_8", depth=1, num_classes=10, in_chans=1).train()


def source_of(data: Any, model: Any) -> Any:
    return make_source(data.val, model.card.preprocessing, train=False)


def read(folder: Path) -> tuple[list[dict[str, str]], dict[str, Any]]:
    with (folder / "classes.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    return table, json.loads((folder / "predictions.json").read_text())


@pytest.mark.parametrize("seed", range(3))
def test_the_table_is_scikit_learns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    targets, predicted = rng.integers(0, 5, 200), rng.integers(0, 6, 200)
    names = [f"class{i}" for i in range(7)]  # nobody is a 5 or 6, nobody is taken for a 6
    table = class_table(torch.from_numpy(targets), torch.from_numpy(predicted), names)
    labels = list(range(7))
    columns = precision_recall_fscore_support(
        targets, predicted, labels=labels, zero_division=np.nan
    )
    for row, precision, recall, f1, n in zip(table, *columns, strict=True):
        assert row.n == n
        for found, wanted in ((row.precision, precision), (row.recall, recall), (row.f1, f1)):
            assert (found is None) == bool(np.isnan(wanted))
            assert found is None or found == pytest.approx(100 * wanted)
    matrix = confusion_matrix(targets, predicted, labels=labels)
    np.fill_diagonal(matrix, 0)
    assert [row.confused for row in table] == matrix.max(1).tolist()
    for row, mistakes in zip(table, matrix, strict=True):
        assert row.confused_with == (names[mistakes.argmax()] if mistakes.any() else "")


def test_samples_are_what_the_model_says(data: Any, model: Any, tmp_path: Path) -> None:
    source = source_of(data, model)
    write_samples(tmp_path, model, source, data.class_names, batch_size=50)
    table, told = read(tmp_path)
    assert sum(int(row["n"]) for row in table) == told["images"] == len(source)
    batch = source.__getitems__([(0, i) for i in range(len(source))])
    with torch.no_grad():
        shares = model.eval()(normalize(batch["images"], model.card.preprocessing)).softmax(1)
    model.train()
    right = shares.argmax(1) == batch["targets"]
    assert told["mistakes"] == int((~right).sum())
    assert len(told["wrong"]) == SHOWN
    for kind in ("wrong", "right"):
        for row in told[kind]:
            i = row["index"]
            assert bool(right[i]) == (kind == "right")
            assert row["truth"] == data.class_names[int(batch["targets"][i])]
            named = {data.class_names[k]: float(p) for k, p in enumerate(shares[i])}
            for name, share in row["found"]:
                assert share == pytest.approx(named[name], abs=1e-4)
            pixels = np.asarray(Image.open(tmp_path / row["image"]))
            assert (pixels == batch["images"][i, 0].numpy()).all()
    surest = shares.amax(1)[~right].topk(SHOWN).values.tolist()
    assert [row["found"][0][1] for row in told["wrong"]] == pytest.approx(surest, abs=1e-4)


def test_training_goes_on_as_before(data: Any, model: Any, tmp_path: Path) -> None:
    state, modes = torch.random.get_rng_state(), [m.training for m in model.modules()]
    write_samples(tmp_path, model, source_of(data, model), data.class_names, most=40)
    assert torch.equal(state, torch.random.get_rng_state())
    assert modes == [m.training for m in model.modules()]


def test_of_many_images_some_are_taken(data: Any, model: Any, tmp_path: Path) -> None:
    write_samples(tmp_path, model, source_of(data, model), data.class_names, most=7)
    table, told = read(tmp_path)
    assert told["images"] == sum(int(row["n"]) for row in table) == 7
    with pytest.raises(ValueError, match="most"):
        write_samples(tmp_path, model, source_of(data, model), data.class_names, most=0)


def test_earlier_samples_are_replaced_and_other_files_stay(
    data: Any, model: Any, tmp_path: Path
) -> None:
    (tmp_path / "wrong99.png").touch()
    (tmp_path / "notes.txt").touch()
    write_samples(tmp_path, model, source_of(data, model), data.class_names, most=40)
    assert not (tmp_path / "wrong99.png").exists()
    assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("right", [True, False])
def test_a_model_that_is_always_or_never_right(
    data: Any, model: Any, tmp_path: Path, right: bool
) -> None:
    class Told:
        """Calls every image what the model calls it, or something else."""

        def __init__(self, source: Any) -> None:
            self.source = source

        def __len__(self) -> int:
            return 20

        def __getitems__(self, keys: Any) -> dict[str, Any]:
            batch = self.source.__getitems__(keys)
            with torch.no_grad():
                found = model.eval()(normalize(batch["images"], model.card.preprocessing))
            return {**batch, "targets": (found.argmax(1) + (not right)) % 10}

    write_samples(tmp_path, model, Told(source_of(data, model)), data.class_names)
    _, told = read(tmp_path)
    assert (len(told["right"]), len(told["wrong"])) == ((SHOWN, 0) if right else (0, SHOWN))


@pytest.mark.parametrize(
    ("shape", "size"), [((1, 8, 8), (8, 8)), ((3, 224, 112), (64, 128)), ((3, 30, 200), (128, 19))]
)
def test_thumbnails(tmp_path: Path, shape: tuple[int, ...], size: tuple[int, int]) -> None:
    save_thumbnail(tmp_path / "a.png", torch.zeros(shape, dtype=torch.uint8))
    assert Image.open(tmp_path / "a.png").size == size
