"""Records what passes a model's taps, such as attention weights, without changing its outputs.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from zoo.diagnostics.foreign_attention import find_foreign_attention, unknown_attention
from zoo.layers.check import integer
from zoo.layers.core import Core
from zoo.layers.tap import Observer, Tap
from zoo.wrappers import wrapped_child

Records = dict[str, list[Tensor]]
Some = TypeVar("Some")

KINDS = {"weights": "attention", "logits": "attention with scores", "outputs": "attention"}


class Observable(Protocol):
    """A tap, or what stands for one."""

    def observe(self, callback: Observer, /) -> AbstractContextManager[None]: ...


class Attention(Protocol):
    """The tap of an attention layer, or what stands for one."""

    def observe(
        self, callback: Observer, what: str = "weights", *, grad: bool = False
    ) -> AbstractContextManager[None]: ...


class NothingCapturedError(RuntimeError):
    """No layer that was to be recorded ran, or none showed anything."""


@contextmanager
def capture_attention(
    model: nn.Module,
    layers: str | Sequence[str] = "*",
    samples: int | None = None,
    *,
    what: str = "weights",
    max_bytes: int = 2 << 30,
) -> Iterator[Records]:
    """Yields a dict that fills: layer name -> one fp32 CPU tensor a forward, by `what`.

    - `weights` (b h i j): rows sum to 1, or to 0 where a query had nothing to attend to; dropout is
      not applied. Masks and global tokens change weights and never the shape, so that maps of
      samples and processes can be gathered (of linformer, j is the number of its projected keys).
    - `logits` (b h i 2): the least and the largest score of each query over the keys that it may
      see, after scale and bias; inf and -inf where there is none. Kinds that take no softmax of
      scores, such as performer, show none.
    - `outputs` (b h i e): what each head puts out before the output projection. As the pass had it,
      with dropout, except where no module takes it (nn.MultiheadAttention, torchvision's Swin,
      BERT): there it is computed without.

    To see several of one pass, nest the contexts.

    Works on our attention and on that of other libraries: nn.MultiheadAttention wherever it is, as
    in torchvision's and open_clip's models, and the classes of timm, open_clip and transformers in
    `zoo.diagnostics.foreign_scores.READERS`. In Swin's, windows stand in for samples.

    Args:
        layers: Names of attention modules, with wildcards: "blocks.*", ["blocks.0.attn", "*.3.*"].
        samples: Keeps only the first samples of each batch; by default all.
        what: "weights", "logits" or "outputs".
        max_bytes: Bound on the memory of all records.

    Raises:
        ValueError: A pattern matches no layer of which that can be seen, `samples` is less than 1,
            `what` is unknown, or attention of another library is part of a compiled model.
        NothingCapturedError: None of the layers ran, or they are of another library and ran inside
            a compiled model that was not given itself: give and call what was compiled, unwrapped.
        MemoryError: The records would take more than `max_bytes`.
    """
    chosen = choose_attention(model, layers, what)
    taps = {name: _Part(tap, what) for name, tap in chosen.items()}
    unknown = partial(_unknown, model, what)
    with capture(taps, KINDS[what], "*", samples, max_bytes, unknown) as records:
        yield records


def attention_of(model: nn.Module, what: str = "weights") -> dict[str, Attention]:
    """The layers of which that can be captured, by name."""
    without = _without_scores(model) if what == "logits" else {}
    taps: dict[str, Attention] = {
        name: tap for name, tap in taps_of(model, "attention").items() if name not in without
    }
    name = layer_names(model)
    for path, found in find_foreign_attention(model).items():
        taps[name(path) or type(found.module).__name__] = found
    return taps


def choose_attention(
    model: nn.Module, layers: str | Sequence[str] = "*", what: str = "weights"
) -> dict[str, Attention]:
    """Those whose names match `layers`, as `capture_attention` takes it.

    Raises:
        ValueError: A pattern matches no layer of which that can be seen, or `what` is unknown.
    """
    if what not in KINDS:
        raise ValueError(f"what={what!r} must be one of {', '.join(map(repr, KINDS))}")
    taps = attention_of(model, what)
    return _matching(taps, layers, KINDS[what], partial(_unknown, model, what))


@dataclass(frozen=True)
class _Part:
    """Shows one of the things that attention shows."""

    tap: Attention
    what: str

    def observe(self, callback: Observer, /) -> AbstractContextManager[None]:
        return self.tap.observe(callback, self.what)


def _without_scores(model: nn.Module) -> dict[str, str]:
    """Layers of a kind whose weights are no softmax of scores, and that kind."""
    name = layer_names(model)
    return {
        name(f"{path}.tap".lstrip(".")): core.kind
        for path, module in model.named_modules()
        if isinstance(core := getattr(module, "core", None), Core) and not core.scores
    }


def _unknown(model: nn.Module, what: str) -> str:
    without = _without_scores(model) if what == "logits" else {}
    listed = ", ".join(f"{name} ({kind})" for name, kind in without.items())
    return (f"; these kinds have none: {listed}" if listed else "") + _unreadable(model)


def _unreadable(model: nn.Module) -> str:
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
    taps = _matching(taps, layers, kind, unknown)
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
    name = layer_names(model)
    return {
        name(path): module
        for path, module in model.named_modules()
        if isinstance(module, Tap) and module.kind == kind
    }


def layer_names(model: nn.Module) -> Callable[[str], str]:
    """From a path in a model to the name of the layer: `module.blocks.0.attn.tap`, `blocks.0.attn`.

    Left out are wrappers (`zoo.wrappers`), what modules with `bears_name_of` hold by that name, and
    a tap's own name.
    """
    wrapped = {
        f"{path}.{inner}".lstrip(".")
        for path, module in model.named_modules()
        if (inner := wrapped_child(module) or getattr(module, "bears_name_of", None))
    }

    def name(path: str) -> str:
        parts = path.split(".")
        kept = [part for i, part in enumerate(parts) if ".".join(parts[: i + 1]) not in wrapped]
        return ".".join(kept[:-1] if kept[-1:] == ["tap"] and len(kept) > 1 else kept)

    return name


def _matching(
    taps: Mapping[str, Some], layers: str | Sequence[str], kind: str, unknown: Callable[[], str]
) -> dict[str, Some]:
    patterns = [layers] if isinstance(layers, str) else list(layers)
    if not patterns:
        raise ValueError(f"layers is empty; there is {list(taps)}")
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
