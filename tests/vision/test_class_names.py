"""Classes of data among those of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from vision.class_names import check_known, data_classes, match_classes, read_class_names
from zoo.imagenet import imagenet_classes, imagenet_synsets


def test_classes_of_data(tmp_path: Path) -> None:
    for folder in ("train/fox", "train/cat", "val/cat", "val/.cache", "val/owl"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "val" / "notes.txt").write_text("")
    assert data_classes(f"folder:{tmp_path}") == ("cat", "fox", "owl")
    assert data_classes(f"folder:{tmp_path / 'gone'}") == ()
    assert data_classes("digits") == tuple("0123456789")
    with pytest.raises(ValueError, match="unknown data 'digit'"):
        data_classes("digit")


def test_some_of_a_models_classes() -> None:
    known = ["fox", "owl", "cat"]
    assert match_classes(known, ["cat", "fox"]) == (("cat", "fox"), (2, 0))
    assert match_classes(known, known) == (("fox", "owl", "cat"), (0, 1, 2))
    assert match_classes(known, ["cat", "dog"]) is None
    assert match_classes(known, []) is None
    assert match_classes([], ["cat"]) is None


def test_folders_named_by_synsets() -> None:
    known = imagenet_classes()
    synsets = list(imagenet_synsets())
    assert match_classes(known, synsets) == (known, tuple(range(1000)))
    assert match_classes(known, ["n02124075", "n02123045"]) == (
        ("Egyptian cat", "tabby"),
        (285, 281),
    )
    assert match_classes(known, ["tabby", "n02123045"]) is None  # one class under two names
    assert match_classes(known, ["n00000000"]) is None


def test_classes_that_a_model_does_not_know(tmp_path: Path) -> None:
    known = imagenet_classes()
    for name in ("tabby", "n02124075", ".cache"):
        (tmp_path / "val" / name).mkdir(parents=True)
    check_known(known, f"folder:{tmp_path}", "m")
    check_known(known, "digits", "m")
    (tmp_path / "val" / "tench fish").mkdir()
    (tmp_path / "train" / "unread").mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"has 1 of 3 classes that --model m .*: tench fish; it"
    ) as e:
        check_known(known, f"folder:{tmp_path}", "m")
    assert "it knows tench, " in str(e.value)
    assert " and 995 more. Name the folders" in str(e.value)


def test_names_from_a_file_or_a_set(tmp_path: Path) -> None:
    file = tmp_path / "names.txt"
    file.write_text("cat\n\n dog \nkühl\n", encoding="utf-8")
    assert read_class_names(str(file)) == ("cat", "dog", "kühl")
    assert read_class_names("imagenet-1k") == imagenet_classes()
    with pytest.raises(ValueError, match=r"class names 'imagenet' must be .* imagenet-1k, "):
        read_class_names("imagenet")
