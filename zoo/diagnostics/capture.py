"""Records the attention weights of a model's layers, without changing its outputs.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from functools import partial

import torch
from torch import Tensor, nn

from zoo.layers.tap import Tap

Records = dict[str, list[Tensor]]

_WRAPPERS = {"module", "_orig_mod"}  # parallel and compiled models


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

    Args:
        layers: Names of attention modules, with wildcards: "blocks.*", ["blocks.0.attn", "*.3.*"].
        samples: Keeps only the first samples of each batch; by default all.
        max_bytes: Bound on the memory of all records.
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)
    taps = _matching(attention_taps(model), patterns)
    records: Records = {}
    with ExitStack() as stack:
        for name, tap in taps.items():
            keep = partial(_keep, records, name, samples, max_bytes)
            stack.enter_context(tap.observe(keep))
        yield records
    if not records:
        raise RuntimeError(
            f"no attention was captured: none of {list(taps)} ran a forward pass inside the context"
        )


def attention_taps(model: nn.Module) -> dict[str, Tap]:
    """The taps of a model's attention modules, by the names of those modules."""
    return {
        _layer_name(path): module
        for path, module in model.named_modules()
        if isinstance(module, Tap) and module.kind == "attention"
    }


def _layer_name(path: str) -> str:
    """`module.blocks.0.attn.tap` -> `blocks.0.attn`"""
    parts = [part for part in path.split(".") if part not in _WRAPPERS]
    return ".".join(parts[:-1] if parts[-1] == "tap" and len(parts) > 1 else parts)


def _matching(taps: dict[str, Tap], patterns: Sequence[str]) -> dict[str, Tap]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in taps):
            raise ValueError(f"layers={pattern!r} matches no attention; there is {list(taps)}")
    return {n: tap for n, tap in taps.items() if any(fnmatchcase(n, p) for p in patterns)}


def _keep(
    records: Records, name: str, samples: int | None, max_bytes: int, weights: Tensor
) -> None:
    weights = weights[:samples]
    held = sum(maps.nbytes for layer in records.values() for maps in layer)
    needed = held + weights.numel() * 4
    if needed > max_bytes:
        raise MemoryError(
            f"attention of {name} {tuple(weights.shape)} would bring the records to {needed:,} "
            f"bytes, over max_bytes={max_bytes:,}; name fewer layers or pass samples="
        )
    records.setdefault(name, []).append(weights.to("cpu", torch.float32, copy=True))
