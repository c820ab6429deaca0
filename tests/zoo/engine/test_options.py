"""The flags that all training recipes share."""

from __future__ import annotations

from dataclasses import fields
from math import inf, nan
from typing import get_type_hints

import pytest

from zoo.engine import TrainOptions

HINTS = get_type_hints(TrainOptions)
NUMBERS = [field.name for field in fields(TrainOptions) if "float" in str(HINTS[field.name])]


@pytest.mark.parametrize("value", [nan, inf, -inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_must_be_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be finite"):
        TrainOptions(**{name: value})


def test_there_are_numbers_to_check() -> None:
    assert {"lr", "weight_decay", "clip_grad"} <= {*NUMBERS}


@pytest.mark.parametrize("name", ["epochs", "batch_size", "lr", "workers", "keep"])
def test_none_is_negative(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} \(-1\) must be at least"):
        TrainOptions(**{name: -1})
