"""Records what passes a model's taps, such as attention weights, without changing its outputs.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from zoo.diagnostics.foreign_attention import find_foreign_attention, unknown_attention
from zoo.layers.check import integer
from zoo.layers.tap import Observer, Tap

Records = dict[str, list[Tensor]]

_WRAPPERS = {"module", "_orig_mod"}  # parallel and compiled models


class Observable(Protocol):
    """A tap, or what stands for one."""

    def observe(self, callback: Observer, /) -> AbstractContextManager[None]: ...


class NothingCapturedError(RuntimeError):
    """No layer that was to be recorded ran, or none showed anything."""


@contextmanager
def capture_attention(
    model: nn.Module,
    layers: str | Sequence[str] = "*",
    samples: int | None = None,
    *,
    max_bytes: int = 2 << 30,
) -> Iterator[Records]:
    """Yields a dict that fills with weights: layer name -> one fp32 CPU tensor (b h i j) a forward.

    Rows sum to 1, or to 0 where a query had nothing to attend to; dropout is not applied. Masks and
    global tokens change weights and never the shape, so that maps of samples and processes can be
    gathered (of linformer, j is the number of its projected keys).

    Works on our attention and on that of other libraries: nn.MultiheadAttention wherever it is, as
    in torchvision's and open_clip's models, and the classes of timm, open_clip and transformers in
    `zoo.diagnostics.foreign_scores.READERS`. In Swin's, windows stand in for samples.

    Args:
        layers: Names of attention modules, with wildcards: "blocks.*", ["blocks.0.attn", "*.3.*"].
        samples: Keeps only the first samples of each batch; by default all.
        max_bytes: Bound on the memory of all records.

    Raises:
        ValueError: A pattern matches no layer whose weights can be seen, `samples` is less than 1,
            or attention of another library is part of a compiled model.
        NothingCapturedError: None of the layers ran, or they are of another library and ran inside
            a compiled model that was not given itself: give and call what was compiled, unwrapped.
        MemoryError: The records would take more than `max_bytes`.
    """
    taps = attention_of(model)
    with capture(
        taps, "attention", layers, samples, max_bytes, partial(_unknown, model)
    ) as records:
        yield records


def attention_of(model: nn.Module) -> dict[str, Observable]:
    """The layers whose weights can be captured, by name."""
    taps: dict[str, Observable] = dict(taps_of(model, "attention"))
    for path, found in find_foreign_attention(model).items():
        taps[layer_name(path) or type(found.module).__name__] = found
    return taps


def _unknown(model: nn.Module) -> str:
    found = unknown_attention(model)
    classes = (
        f"{name} ({paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''})"
        for name, paths in found.items()
    )
    return f"; weights of these are not known: {', '.join(classes)}" if found else ""


@contextmanager
def capture(
    taps: Mapping[str, Observable],
    kind: str,
    layers: str | Sequence[str],
    samples: int | None,
    max_bytes: int,
    unknown: Callable[[], str] = str,
) -> Iterator[Records]:
    """Records what passes the taps of one kind: by layer, one fp32 CPU tensor a forward.

    Args:
        unknown: Says for an error which further layers there are, without a tap.

    Raises:
        ValueError: A pattern matches no layer with such a tap, or `samples` is less than 1.
        NothingCapturedError: Nothing passed.
        MemoryError: The records would take more than `max_bytes`.
    """
    if samples is not None:
        samples = integer("samples", samples)
    patterns = [layers] if isinstance(layers, str) else list(layers)
    taps = _matching(taps, patterns, kind, unknown)
    records: Records = {}
    with ExitStack() as stack:
        for name, tap in taps.items():
            keep = partial(_keep, records, kind, name, samples, max_bytes)
            stack.enter_context(tap.observe(keep))
        yield records
    if not records:
        raise NothingCapturedError(
            f"no {kind} was captured: none of {list(taps)} showed one inside the context{unknown()}"
        )


def taps_of(model: nn.Module, kind: str) -> dict[str, Tap]:
    """The taps of one kind, by the names of the modules that have them."""
    return {
        layer_name(path): module
        for path, module in model.named_modules()
        if isinstance(module, Tap) and module.kind == kind
    }


def layer_name(path: str) -> str:
    """`module.blocks.0.attn.tap` -> `blocks.0.attn`"""
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    return ".".join(parts[:-1] if parts[-1] == "tap" and len(parts) > 1 else parts)


def _matching(
    taps: Mapping[str, Observable], patterns: Sequence[str], kind: str, unknown: Callable[[], str]
) -> dict[str, Observable]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in taps):
            there = f"; there is {list(taps)}" if taps else ": the model has none"
            raise ValueError(f"layers={pattern!r} matches no {kind}{there}{unknown()}")
    return {n: tap for n, tap in taps.items() if any(fnmatchcase(n, p) for p in patterns)}


def _keep(
    records: Records, kind: str, name: str, samples: int | None, max_bytes: int, values: Tensor
) -> None:
    values = values[:samples]
    held = sum(maps.nbytes for layer in records.values() for maps in layer)
    needed = held + values.numel() * 4
    if needed > max_bytes:
        raise MemoryError(
            f"{kind} of {name} {tuple(values.shape)} would bring the records to {needed:,} "
            f"bytes, over max_bytes={max_bytes:,}; name fewer layers or pass samples="
        )
    records.setdefault(name, []).append(values.to("cpu", torch.float32, copy=True))
