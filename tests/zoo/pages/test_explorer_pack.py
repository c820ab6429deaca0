"""Packed weights, unpacked by another reader, against those that went in."""

from __future__ import annotations

import base64
import zlib

import numpy as np
import pytest
import torch
from torch import Tensor

from zoo.pages.explorer_pack import Maps, Packed, Side, decode, encode, pack, pooled

PATCHES = Side([("class",)] * 2, (5, 6), 1)


def some_weights(heads: int = 3, sharp: float = 2.0, side: Side = PATCHES) -> Tensor:
    assert side.grid is not None
    n = side.start + side.grid[0] * side.grid[1]
    generator = torch.Generator().manual_seed(0)
    return (sharp * torch.randn(2, heads, n, n, generator=generator)).softmax(-1)


def unpacked(packed: Packed, layer: int, image: int, heads: int) -> np.ndarray:
    """(h i j) in float64"""
    data = zlib.decompress(base64.b64decode(packed.chunks[layer][image]))
    codes = np.frombuffer(data, np.uint8).reshape(heads, *packed.sizes[layer]).astype(np.float64)
    squares = (codes / packed.top) ** 2
    return squares / squares.sum(-1, keepdims=True)


def test_weights_come_back_and_small_ones_are_seen() -> None:
    weights = some_weights(sharp=4.0)
    codes = encode(weights)
    assert codes.dtype == torch.uint8
    found = decode(codes)
    assert float((found - weights).abs().sum(-1).max()) / 2 < 0.01  # total variation
    largest = weights.amax(-1, keepdim=True)
    assert bool((codes[weights > 1e-5 * largest] > 0).all())
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 3, 31))


def test_empty_rows_stay_empty_and_broken_ones_become_so() -> None:
    weights = some_weights()
    weights[0, 0, 0] = 0
    weights[0, 0, 1] = torch.nan
    found = decode(encode(weights))
    assert not found[0, 0, :2].any()
    assert found[0, 0, 2].sum() == pytest.approx(1)


def test_pooled_queries_are_means_of_squares_at_edges_too() -> None:
    weights = some_weights()[0].double()
    found = pooled(weights, PATCHES, 4)
    grid = weights[:, 1:].reshape(3, 5, 6, 31)
    expected = [weights[:, :1]] + [
        grid[:, y : y + 4, x : x + 4].flatten(1, 2).mean(1, keepdim=True)
        for y in (0, 4)
        for x in (0, 4)
    ]
    torch.testing.assert_close(found, torch.cat(expected, 1))
    assert pooled(weights, Side([("a",)]), 4) is weights


def test_what_fits_is_stored_exactly() -> None:
    weights = some_weights()
    packed = pack([Maps("a", encode(weights), PATCHES, PATCHES)], 10**6)
    assert (packed.top, packed.pool, packed.sizes) == (255, 1, [(31, 31)])
    for image in range(2):
        error = np.abs(unpacked(packed, 0, image, 3) - weights[image].numpy()).sum(-1) / 2
        assert error.max() < 0.01


@pytest.mark.parametrize("budget", [6_000, 4_500, 3_000, 2_000, 1_500])
def test_what_does_not_fit_is_made_coarser_until_it_does(budget: int) -> None:
    weights = some_weights()
    packed = pack([Maps("a", encode(weights), PATCHES, PATCHES)], budget)
    assert packed.bytes <= budget
    assert (packed.top, packed.pool) != (255, 1)
    expected = pooled(weights[1].double(), PATCHES, packed.pool).numpy()
    error = np.abs(unpacked(packed, 0, 1, 3) - expected).sum(-1).mean() / 2
    assert error < {255: 0.01, 63: 0.03, 31: 0.05, 15: 0.1}[packed.top]


def test_what_never_fits_is_refused() -> None:
    layers = [Maps(name, encode(some_weights()), PATCHES, PATCHES) for name in "ab"]
    with pytest.raises(ValueError, match=r"2 layers on 2 images take .* name fewer images or"):
        pack(layers, 500)


def test_twelve_layers_of_twelve_heads_on_eight_images_take_less_than_10_mb() -> None:
    """At 224 pixels and patches of 16, of weights without order, which are the hardest; a part."""
    side = Side([("class",)] * 2, (14, 14), 1)
    part = (3 * 2) / (12 * 8)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1, 12, 197, 197, generator=generator).softmax(-1)
    codes = encode(weights).expand(2, -1, -1, -1)
    packed = pack([Maps(str(n), codes, side, side) for n in range(3)], int(9_500_000 * part))
    assert 4_000_000 * part < packed.bytes <= 9_500_000 * part
    assert packed.pool <= 2
