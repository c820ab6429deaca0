"""Pairs through `datasets`, from folders on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from crossmodal.data import load_pairs
from crossmodal.rows import PairError

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def image(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8))


def table(first: int, captions: list, name: str = "caption"):
    pictures = [image(first + i) for i in range(len(captions))]
    features = datasets.Features(
        {
            "image": datasets.Image(),
            name: datasets.List(datasets.Value("string"))
            if isinstance(captions[0], list)
            else datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_dict({"image": pictures, name: captions}, features=features)


def is_image(pairs, index: int, seed: int) -> bool:
    return np.array_equal(np.asarray(pairs.images.image(index, 3)), np.asarray(image(seed)))


def test_saved_splits_are_the_two_parts(tmp_path):
    saved = datasets.DatasetDict(
        train=table(0, [["zero", "null"], ["one"]]),
        test=table(9, [["not read"]]),
        validation=table(5, [["five"]]),
    )
    saved.save_to_disk(tmp_path / "data")
    data = load_pairs(f"hf:{tmp_path}/data")
    assert data.train.captions == (("zero", "null"), ("one",))
    assert data.val.captions == (("five",),)
    assert is_image(data.train, 0, 0)
    assert is_image(data.train, 1, 1)
    assert is_image(data.val, 0, 5)
    other = table(7, ["seven"])
    other.save_to_disk(tmp_path / "other")
    data = load_pairs(f"hf:{tmp_path}/data", val=f"hf:{tmp_path}/other")
    assert (len(data.train), data.val.captions) == (2, (("seven",),))


def test_a_single_split_is_divided(tmp_path):
    table(0, [f"caption {i}" for i in range(10)], "text").save_to_disk(tmp_path / "data")
    data = load_pairs(f"hf:{tmp_path}/data", val_share=0.3, caption_column="text")
    assert (len(data.train), len(data.val)) == (7, 3)
    for part in (data.train, data.val):
        for i, (text,) in enumerate(part.captions):
            assert is_image(part, i, int(text.split()[1]))


def test_a_folder_of_images_with_metadata_is_read(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    lines = []
    for i in range(3):
        image(i).save(folder / f"{i}.png")
        lines.append(json.dumps({"file_name": f"{i}.png", "caption": f"caption {i}"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    data = load_pairs(f"hf:{folder}", val_share=0)
    assert sorted(data.train.captions) == [(f"caption {i}",) for i in range(3)]
    assert all(is_image(data.train, i, int(t[-1])) for i, (t,) in enumerate(data.train.captions))


def bad_table(path: Path) -> str:
    rows = table(0, ["fine", "", "cut", "none"])
    cells = [dict(row["image"]) for row in rows.cast_column("image", datasets.Image(decode=False))]
    cells[2]["bytes"] = cells[2]["bytes"][:60]
    cells[3] = None
    features = rows.features
    captions = rows["caption"][:]
    broken = datasets.Dataset.from_dict({"image": cells, "caption": captions}, features=features)
    broken.save_to_disk(path)
    return f"hf:{path}"


def test_bad_rows_are_named_by_split_and_number(tmp_path):
    spec = bad_table(tmp_path / "data")
    with pytest.raises(PairError) as caught:
        load_pairs(spec)
    said = str(caught.value)
    for number, problem in {
        1: "caption is empty",
        2: f"{tmp_path}/data all[2]: 60 bytes: ",
        3: f"{tmp_path}/data all[3]: 0 bytes: empty file",
    }.items():
        assert f"{spec} split all row {number}: {problem}" in said
    data = load_pairs(spec, bad_rows="skip", val_share=0)
    assert data.train.captions == (("fine",),)
    assert data.report["skipped"] == 3


def test_other_columns_and_splits_are_refused(tmp_path):
    table(0, ["zero"]).save_to_disk(tmp_path / "data")
    with pytest.raises(PairError, match="split all has no column title; it has image, caption"):
        load_pairs(f"hf:{tmp_path}/data", caption_column="title")
    with pytest.raises(PairError, match=r"column caption holds .*, not images"):
        load_pairs(f"hf:{tmp_path}/data", image_column="caption")
    saved = datasets.DatasetDict(train=table(0, ["zero"]), dev=table(1, ["one"]))
    saved.save_to_disk(tmp_path / "dev")
    with pytest.raises(PairError, match="has the splits train, dev; needed are train and one of"):
        load_pairs(f"hf:{tmp_path}/dev")


def test_without_datasets_the_extra_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r"attention-zoo\[streaming\]"):
        load_pairs("hf:somewhere")


def test_what_datasets_cannot_read_is_told_with_its_cause(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.jsonl").write_text("{no json")
    with pytest.raises(PairError, match=r"hf:.*data cannot be read by datasets: \w+: .+; look at"):
        load_pairs(f"hf:{tmp_path / 'data'}")
