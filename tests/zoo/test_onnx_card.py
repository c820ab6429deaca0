"""ONNX files of ours tell what their weights need, as a folder does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch

import zoo
from zoo.sources import CARD_FILE
from zoo.weights import WeightsError

NAME = "vit_micro_patch2_8"


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Any, Path]:
    model: Any = zoo.create_model(NAME, class_names=["a", "b", "c"], norm_eps=1e-5, depth=1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    own = replace(model.card.preprocessing, mean=(0.1, 0.2, 0.3), interpolation="bilinear")
    model.card = replace(model.card, preprocessing=own, license="MIT")
    zoo.export_onnx(model, tmp_path / "x.onnx", check=False)
    return model, tmp_path / "x.onnx"


def test_the_card_of_an_export_is_read(exported: tuple[Any, Path]) -> None:
    theirs, path = exported
    model: Any = zoo.create_model(NAME, depth=1, num_classes=3, norm_eps=1e-5)
    zoo.load_pretrained(model, f"file:{path}")
    assert model.card.preprocessing == theirs.card.preprocessing
    assert (model.card.class_names, model.card.license) == (("a", "b", "c"), "MIT")
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model.eval()(x), theirs(x))
    other: Any = zoo.create_model(
        NAME, depth=1, norm_eps=1e-5, class_names=["c", "z"], pretrained=f"file:{path}"
    )
    assert torch.equal(other.head.weight[0], theirs.head.weight[2])


def test_other_options_than_those_of_the_export_are_refused(exported: tuple[Any, Path]) -> None:
    model = zoo.create_model(NAME, depth=1, num_classes=3)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match="norm_eps: 1e-05 there, 1e-06 here"):
        zoo.load_pretrained(model, f"file:{exported[1]}")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_damaged_card_is_named(exported: tuple[Any, Path]) -> None:
    file = onnx.load(exported[1])
    next(e for e in file.metadata_props if e.key == CARD_FILE).value = "{"
    onnx.save(file, exported[1])
    with pytest.raises(WeightsError, match=r"x\.onnx: the card inside cannot be read"):
        zoo.load_pretrained(zoo.create_model(NAME, depth=1), f"file:{exported[1]}")
