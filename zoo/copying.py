"""Tensors into a model: all are checked first, then all are copied.

Each pass takes as long as the memory needs for it. So neither makes a temporary copy; the second
goes backwards, since what the first read last is still in the processor's cache; and both run in
threads of their own with numpy, which meet once a pass, where torch's meet once a tensor and wait
for each other wherever other work holds a core.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zoo.sources import WeightsError, listed

if TYPE_CHECKING:
    import numpy as np

_MOST_THREADS = 8  # the memory is busy with fewer
_WORTH_A_THREAD = 2**23  # bytes, which take far longer than a thread to start


def refuse_infinite(source: str, state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Refuses NaN and infinity, also where a value overflows in the model's dtype.

    Raises:
        WeightsError: with the names of the tensors.
    """
    import numpy as np

    summed = {key: value for key, value in values.items() if _can_sum(value, state[key].dtype)}
    doubtful = values.keys() - summed.keys()

    def add_up(keys: list[str]) -> None:
        # NaN and infinity go on into the sum. A sum may overflow where no value did.
        with np.errstate(all="ignore"):
            doubtful.update(key for key in keys if not math.isfinite(_sum(summed[key])))

    _share_out(add_up, summed)
    bad = [k for k in values if k in doubtful and not _is_finite(values[k], state[k].dtype)]
    if bad:
        raise WeightsError(
            f"{source} holds NaN or infinity, or values too large for the model's dtype, in "
            f"{len(bad)} tensors: {listed(bad)}"
        )


def _sum(value: Tensor) -> float:
    import numpy as np

    if torch.get_num_threads() == 1:  # torch reads a tenth faster, if it starts no threads
        return float(value.sum())
    return float(np.einsum("i->", _flat(value)))


def _can_sum(value: Tensor, dtype: torch.dtype) -> bool:
    return (
        _is_plain(value) and value.dtype in (torch.float32, torch.float64) and _holds(dtype, value)
    )


def _holds(dtype: torch.dtype, value: Tensor) -> bool:
    """Whether every finite value is finite in `dtype`."""
    return dtype.is_floating_point and torch.finfo(dtype).max >= torch.finfo(value.dtype).max


def _is_finite(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether all values are finite, and still are in `dtype`."""
    if value.is_complex():
        return _is_finite(torch.view_as_real(value.resolve_conj()), dtype.to_real())
    if not value.is_floating_point() or not value.numel():
        return True
    if value.element_size() == 1:  # torch finds no extremes of these
        value = value.float()
    extremes = torch.stack(torch.aminmax(value))  # NaN, if there is one
    both = (extremes, extremes.to(dtype))
    return all(bool(each.to(torch.complex128).isfinite().all()) for each in both)


def copy_all(state: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies each value into the model's tensor, cast to its dtype and device."""
    import numpy as np

    alike = {key: value for key, value in values.items() if _are_alike(state[key], value)}

    def copy(keys: list[str]) -> None:
        for key in reversed(keys):
            np.copyto(_flat(state[key]), _flat(alike[key]))

    _share_out(copy, alike)
    torch.autograd.graph.increment_version([state[key] for key in alike])
    with torch.no_grad():
        for key in values.keys() - alike.keys():
            state[key].copy_(values[key])


def _are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether one takes the other's bytes as they are."""
    return (
        _is_plain(one)
        and _is_plain(other)
        and one.dtype == other.dtype
        and one.shape == other.shape
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its bytes in memory, one after the other."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()  # torch itself must say whether it may change
    )


def _flat(tensor: Tensor) -> np.ndarray:
    """A plain tensor's memory: float32 and float64 as they are, other dtypes as bytes."""
    flat = tensor.detach().view(-1)
    known = tensor.dtype in (torch.float32, torch.float64)
    return (flat if known else flat.view(torch.uint8)).numpy()


def _share_out(function: Callable[[list[str]], None], tensors: Mapping[str, Tensor]) -> None:
    """Calls the function with all names: at once, or in threads with about as many bytes each."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    threads = min(_MOST_THREADS, _cores(), total // _WORTH_A_THREAD)
    if threads < 2:
        return function(list(tensors))
    shares: list[list[str]] = [[] for _ in range(threads)]
    before = 0
    for name, tensor in tensors.items():
        shares[before * threads // total].append(name)
        before += tensor.nbytes
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(function, shares))


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
