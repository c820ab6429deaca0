"""Attention weights in few bytes, for a page: quantised, pooled if need be, compressed.

A weight is stored as the root of its ratio to the largest of its row, in steps of 1 / `top`: with
255 steps what is shown is at least 4e-6 of the largest, with 15 steps 0.1 %. Rows sum to 1, or to
0, so that the browser needs nothing else to have the weights back.

Shapes: b images, h heads, i/j query/key tokens.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

FINEST = 255
# How coarse: steps of a weight, and patches a side of which a query's is the mean. In this order,
# because a map with few shades tells more than one of another place.
PRECISIONS = (
    *((FINEST, 1), (63, 1), (31, 1), (15, 1)),
    *(
        (FINEST, 2),
        (63, 2),
        (31, 2),
        (15, 2),
        (31, 3),
        (15, 3),
        (15, 4),
        (15, 6),
        (15, 8),
        (15, 16),
    ),
)
TRIED = 24  # chunks that are compressed to learn how much all will take


@dataclass(frozen=True)
class Side:
    """The queries, or the keys, of a layer.

    Attributes:
        names: By image, of the tokens that are no patches; fewer than the layer has where an image
            has fewer words.
        grid: Patches, rows and columns; None where there are none.
        start: How many of the named tokens come before the patches.
    """

    names: Sequence[Sequence[str]]
    grid: tuple[int, int] | None = None
    start: int = 0


@dataclass(frozen=True)
class Maps:
    """The weights of a layer on some images.

    Attributes:
        name: Of the layer.
        codes: From `encode` (b h i j).
        queries, keys: What i and j are.
    """

    name: str
    codes: Tensor
    queries: Side
    keys: Side


@dataclass(frozen=True)
class Packed:
    """Layers as text.

    Attributes:
        top: Steps of a weight.
        pool: Patches a side of which a query's weights are the mean.
        chunks: By layer and image: weights (h i j), a byte each, by zlib, in base64.
        sizes: By layer: queries i, keys j.
    """

    top: int
    pool: int
    chunks: list[list[str]] = field(repr=False)
    sizes: list[tuple[int, int]]

    @property
    def bytes(self) -> int:
        return sum(len(chunk) for layer in self.chunks for chunk in layer)


def encode(weights: Tensor, top: int = FINEST) -> Tensor:
    """Weights, not below 0 (... j) -> uint8 (... j), from 0 to `top`; NaN counts as 0."""
    weights = weights.nan_to_num(0.0).clamp(min=0)
    largest = weights.amax(-1, keepdim=True)
    return (weights / largest.where(largest > 0, 1)).sqrt().mul(top).round().to(torch.uint8)


def decode(codes: Tensor, top: int = FINEST) -> Tensor:
    """What `encode` gave (... j) -> fp32, rows that sum to 1, or to 0."""
    weights = codes.float().div(top).square()
    total = weights.sum(-1, keepdim=True)
    return weights / total.where(total > 0, 1)


def pooled(weights: Tensor, side: Side, pool: int) -> Tensor:
    """The mean over squares of `pool` x `pool` queries that are patches: (h i j) -> (h i' j)

    Squares at the right and the lower edge may have fewer.
    """
    if pool == 1 or side.grid is None:
        return weights
    rows, columns = side.grid
    before, patches, after = weights.tensor_split([side.start, side.start + rows * columns], dim=1)
    maps = rearrange(patches, "h (y x) j -> h j y x", y=rows)
    means = F.avg_pool2d(maps, pool, ceil_mode=True)
    return torch.cat([before, rearrange(means, "h j y x -> h (y x) j"), after], dim=1)


def pack(layers: Sequence[Maps], budget: int) -> Packed:
    """All layers in at most `budget` characters, as exactly as that allows.

    Raises:
        ValueError: the coarsest of `PRECISIONS` takes more.
    """
    places = [(layer, image) for layer in layers for image in range(len(layer.codes))]
    total = sum(layer.codes.numel() for layer in layers)
    some = places[:: max(1, len(places) // TRIED)]
    tried = sum(layer.codes[image].numel() for layer, image in some)
    least = 0
    for top, pool in PRECISIONS:
        least = sum(len(_chunk(*place, top, pool)) for place in some) * total // max(1, tried)
        if least > budget:
            continue
        chunks = [list(_chunks(layer, top, pool)) for layer in layers]
        packed = Packed(top, pool, chunks, [_size(layer, pool) for layer in layers])
        if packed.bytes <= budget:
            return packed
    raise ValueError(
        f"the weights of {len(layers)} layers on {len(places) // max(1, len(layers))} images take "
        f"{least / 1e6:.1f} MB at the least, and {budget / 1e6:.1f} MB are allowed: name fewer "
        "images or fewer layers"
    )


def _chunks(layer: Maps, top: int, pool: int) -> Iterator[str]:
    for image in range(len(layer.codes)):
        yield _chunk(layer, image, top, pool)


def _chunk(layer: Maps, image: int, top: int, pool: int) -> str:
    codes = layer.codes[image]
    if (top, pool) != (FINEST, 1):
        codes = encode(pooled(decode(codes), layer.queries, pool), top)
    data = codes.contiguous().numpy().tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _size(layer: Maps, pool: int) -> tuple[int, int]:
    i, j = layer.codes.shape[-2:]
    if layer.queries.grid is not None:
        rows, columns = layer.queries.grid
        i += -(-rows // pool) * -(-columns // pool) - rows * columns
    return i, j
