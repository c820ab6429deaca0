"""Checks of options: a wrong type is a TypeError, a wrong value a ValueError.

Both name the option, its value and what is legal.
"""

from __future__ import annotations

import math
from dataclasses import fields
from numbers import Integral, Real
from typing import Any


def is_integer(value: object) -> bool:
    """Whether it is a whole number by type: numpy's are, truth values and 8.0 are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def integer(name: str, value: int, minimum: int | None = 1) -> int:
    """`value` as a plain int; refused unless it is an integer of at least `minimum`, if any."""
    if not is_integer(value):
        legal = "an integer" if minimum is None else f"an integer of at least {minimum}"
        raise TypeError(f"{name} ({value!r}) must be {legal}")
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} ({value}) must be at least {minimum}")
    return int(value)


def positive(name: str, value: float, other: str = "") -> float:
    """`value` as a plain float; refused unless positive and finite. `other` is also legal."""
    legal = "positive and finite" + (f", or {other!r}" if other else "")
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} ({value!r}) must be a number, {legal}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} ({value}) must be {legal}")
    return float(value)


def fraction(name: str, value: float) -> float:
    """`value` as a plain float; refused unless it lies in [0, 1]."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} ({value!r}) must be a number in [0, 1]")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} ({value}) must lie in [0, 1]")
    return float(value)


def finite_fields(options: Any) -> None:
    """Refuses a dataclass with a field, or an item of one, that is NaN or infinite."""
    for field in fields(options):
        value = getattr(options, field.name)
        items = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(item, float) and not math.isfinite(item) for item in items):
            raise ValueError(f"{field.name} ({value}) must be finite")


def flag(name: str, value: bool) -> bool:
    """`value` as a plain bool; 1 and 0, which command lines pass, stand for True and False."""
    if not isinstance(value, Integral):
        raise TypeError(f"{name} ({value!r}) must be True or False")
    if value not in (0, 1):
        raise ValueError(f"{name} ({value}) must be True or False")
    return bool(value)
