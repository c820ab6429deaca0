"""Tensors into a model: checked first, then copied, in as many threads as torch leaves idle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from zoo.sources import WeightsError, listed

_MOST_THREADS = 8  # the memory is busy with fewer
_T = TypeVar("_T")
_R = TypeVar("_R")


def refuse_infinite(source: str, state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Refuses NaN and infinity, also where a value overflows in the model's dtype.

    Raises:
        WeightsError: with the names of the tensors.
    """
    finite = _in_threads(lambda key: _is_finite(values[key], state[key].dtype), values)
    if bad := [key for key, good in zip(values, finite, strict=True) if not good]:
        raise WeightsError(
            f"{source} holds NaN or infinity, or values too large for the model's dtype, in "
            f"{len(bad)} tensors: {listed(bad)}"
        )


def _is_finite(value: Tensor, dtype: torch.dtype) -> bool:
    """By the sum, and value by value only where that overflows or is not finite."""
    if not value.is_floating_point() and not value.is_complex():
        return True
    if value.is_floating_point() and torch.finfo(dtype).max < torch.finfo(value.dtype).max:
        value = value.to(dtype)
    if value.is_floating_point() and value.element_size() < 4:
        value = value.float()
    return bool(value.sum().isfinite()) or bool(value.isfinite().all())


def copy_all(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies each value into the model's tensor, cast to its dtype and device."""

    def copy(key: str) -> None:
        with torch.no_grad():  # holds for one thread
            state[key].copy_(values[key])

    _in_threads(copy, values)


def _in_threads(function: Callable[[_T], _R], items: Iterable[_T]) -> list[_R]:
    threads = min(_MOST_THREADS, (os.cpu_count() or 1) // torch.get_num_threads())
    if threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(function, items))
