from __future__ import annotations

import json
from typing import Any

import pytest

from zoo.card import CardError, ModelCard, Preprocessing

PRE = Preprocessing((32, 48), (0.4, 0.5, 0.6), (0.1, 0.2, 0.3), "bilinear", 0.9, "squash")
CARD = ModelCard(
    "vit_x", {"img_size": (32, 48), "num_classes": 2}, PRE, ("cat", "dog"), "MIT", "here", {"a": 1}
)


def test_round_trip_through_json() -> None:
    assert ModelCard.from_dict(json.loads(json.dumps(CARD.to_dict()))) == CARD
    assert hash(Preprocessing.from_dict(json.loads(json.dumps(PRE.to_dict())))) == hash(PRE)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"size": (32,)}, r"size must be \(rows, columns\)"),
        ({"size": (0, 32)}, "size must be"),
        ({"size": (32, 1.5)}, "size must be"),
        ({"size": "32"}, "size must be a list"),
        ({"mean": (0.5,)}, "mean has 1, std has 3"),
        ({"mean": (0.5, 0.5, float("nan"))}, "mean must hold finite numbers"),
        ({"mean": (), "std": ()}, "one value a channel"),
        ({"std": (0.1, 0.1, 0.0)}, "std must be positive"),
        ({"interpolation": "cubic"}, "interpolation must be one of nearest, bilinear, bicubic"),
        ({"crop_mode": "middle"}, "crop_mode must be one of"),
        ({"crop_pct": 2.1}, r"crop_pct must be in \(0, 2\], not 2.1"),
        ({"crop_pct": 0}, r"crop_pct must be in \(0, 2\], not 0"),
        ({"crop_pct": True}, "crop_pct"),
        ({"colour": 1}, "Preprocessing has no field 'colour'; it has size, mean"),
    ],
)
def test_wrong_preprocessing_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CardError, match=said):
        Preprocessing.from_dict({**PRE.to_dict(), **change})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": ""}, "architecture must be a name"),
        ({"options": {"act": print}}, "options.act is a builtin"),
        ({"options": {"act": {1: 2}}}, "options.act may have only strings as keys"),
        ({"extra": {"x": [1, float("inf")]}}, r"extra.x\[1\] must be finite"),
        ({"class_names": "cats"}, "class_names must be a list of strings"),
        ({"class_names": ["a", "a"]}, r"repeated: \['a'\]"),
        ({"class_names": ["a", "b", "c"]}, "3 names, but num_classes is 2"),
        ({"license": 3}, "license must be a string"),
        ({"preprocessing": None}, "preprocessing must be a table"),
        ({"options": None, "weights": 1}, "ModelCard has no field 'weights'"),
    ],
)
def test_wrong_card_is_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(CardError, match=said):
        ModelCard.from_dict({**CARD.to_dict(), **change})


def test_differences_are_of_meaning_not_of_form() -> None:
    def card(**options: Any) -> ModelCard:
        return ModelCard(None, options, PRE)

    square = card(patch_size=14, act="gelu", drop_rate=0.1, context_length=77)
    assert square.differences(card(patch_size=[14, 14], drop_rate=0, context_length=9)) == {}
    assert card(patch_size=(14, 14)).differences(square) == {}
    assert square.differences(card(patch_size=[14, 16])) == {"patch_size": (14, [14, 16])}
    assert square.differences(card(act="relu", other=1)) == {"act": ("gelu", "relu")}


def test_missing_field_is_named() -> None:
    with pytest.raises(CardError, match="Preprocessing lacks mean, std"):
        Preprocessing.from_dict({"size": [8, 8]})


def test_adapted_to_size_and_channels() -> None:
    grey = PRE.adapted(size=(8, 8), in_chans=1)
    assert grey.size == (8, 8)
    assert grey.mean == pytest.approx((0.5,))
    assert grey.std == pytest.approx((0.2,))
    assert (grey.interpolation, grey.crop_pct) == (PRE.interpolation, PRE.crop_pct)
    assert PRE.adapted(in_chans=3) == PRE
    assert PRE.adapted(in_chans=5).in_chans == 5


def test_class_names_go_with_their_classes() -> None:
    assert CARD.with_options(num_classes=3).class_names is None
    assert CARD.with_options(img_size=64).class_names == ("cat", "dog")
