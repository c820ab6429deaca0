"""Rollout against the paper's product written out in loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from zoo.diagnostics.flow import rollout
from zoo.layers import Mask, attention_weights

FUSED = {"mean": np.mean, "max": np.max, "min": np.min}


def layers_of(depth: int = 3, n: int = 6, mask: Mask | None = None) -> list[Tensor]:
    """(2 h n n) in float64, with a number of heads that differs by layer"""
    return [
        attention_weights(
            torch.randn(2, 2 + layer, n, 8) * 2, torch.randn(2, 2 + layer, n, 8), mask
        ).double()
        for layer in range(depth)
    ]


def looped(layers: list[Tensor], residual: float, fusion: str, discard: float) -> np.ndarray:
    b, _, n, _ = layers[0].shape
    found = np.empty((b, n, n))
    for sample in range(b):
        product = np.eye(n)
        for weights in layers:
            mixed = np.empty((n, n))
            for query in range(n):
                row = FUSED[fusion](weights[sample, :, query].numpy(), axis=0)
                seen = np.flatnonzero(row)
                for key in sorted(seen, key=lambda key: row[key])[: int(discard * len(seen))]:
                    row[key] = 0
                row = row / row.sum() if row.any() else np.eye(n)[query]
                mixed[query] = (1 - residual) * row + residual * np.eye(n)[query]
            product = mixed @ product
        found[sample] = product
    return found


@pytest.mark.parametrize("discard", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("fusion", FUSED)
@pytest.mark.parametrize("residual", [0.5, 0.2])
@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.padding([4, 0])])
def test_rollout_is_the_product_of_the_layers(residual, fusion, discard, mask):
    layers = layers_of(mask=mask)
    found = rollout(layers, residual=residual, fusion=fusion, discard=discard)
    np.testing.assert_allclose(found, looped(layers, residual, fusion, discard), atol=1e-6)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 6).double())
    single = rollout([w.float() for w in layers], residual=residual, fusion=fusion, discard=discard)
    torch.testing.assert_close(single, found.float(), atol=1e-5, rtol=1e-4)


def test_causal_layers_stay_causal_and_padding_is_reached_by_itself_alone():
    causal = rollout(layers_of(mask=Mask.causal()))
    assert causal.triu(1).abs().max() == 0
    padded = rollout(layers_of(mask=Mask.padding([4, 6])))
    assert padded[0, :4, 4:].abs().max() == 0
    assert (padded[0, 4:, 4:].diagonal() > 0.12).all()  # 0.5 to the third


def test_closed_forms():
    alike, shift = torch.full((1, 2, 4, 4), 0.25), torch.eye(4).roll(1, 0).expand(1, 2, 4, 4)
    own = torch.eye(4)[None]
    torch.testing.assert_close(rollout([alike] * 3, residual=1.0), own)
    torch.testing.assert_close(rollout([alike] * 3, residual=0.0), alike[:, 0])
    torch.testing.assert_close(rollout([own[:, None]] * 3), own)
    torch.testing.assert_close(rollout([shift] * 4, residual=0.0), own)
    torch.testing.assert_close(rollout([shift, shift], residual=0.0), own.roll(2, 1))
    torch.testing.assert_close(rollout([alike]), 0.5 * own + 0.125)


def test_the_first_layer_comes_first():
    first, last = torch.eye(3)[[0, 0, 2]], torch.eye(3)[[1, 2, 2]]  # rows of keys
    found = rollout([first[None, None], last[None, None]], residual=0.0)
    assert found[0].argmax(-1).tolist() == [0, 2, 2]  # 0 looks at 1, which looked at 0


def test_what_changes_no_rollout():
    layers, order = layers_of(), torch.tensor([3, 0, 5, 1, 4, 2])
    found = rollout(layers)
    torch.testing.assert_close(rollout([w.flip(1) for w in layers]), found)
    torch.testing.assert_close(rollout([w.flip(0) for w in layers]), found.flip(0))
    moved = rollout([w[:, :, order][..., order] for w in layers])
    torch.testing.assert_close(moved, found[:, order][..., order])
    masked = [torch.nn.functional.pad(w, (0, 1, 0, 1)) for w in layers]  # a token out of all sight
    torch.testing.assert_close(
        rollout(masked, discard=0.5)[:, :6, :6], rollout(layers, discard=0.5)
    )
    assert rollout(masked)[:, 6].tolist() == [[0, 0, 0, 0, 0, 0, 1]] * 2


def test_without_a_residual_what_sees_nothing_has_nothing():
    layers = layers_of(mask=Mask.padding([4, 0]))
    found = rollout(layers, residual=0.0)
    torch.testing.assert_close(found[0].sum(-1), torch.ones(6).double())
    assert found[1].abs().max() == 0


def test_discarding_keeps_one_key_and_the_first_of_equal_ones():
    alike = torch.full((1, 1, 4, 4), 0.25)
    assert rollout([alike], residual=0.0, discard=0.5)[0, 0].tolist() == [0.5, 0.5, 0, 0]
    assert rollout([alike], residual=0.0, discard=0.99)[0, 3].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("discard", [0.0, 0.5])
def test_nan_does_not_go_unseen(discard):
    layers = layers_of()
    layers[1][0, 0, 2] = math.nan
    found = rollout(layers, discard=discard)
    assert found[0, 2].isnan().any()
    assert not found[1].isnan().any()


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ([], "layers is empty"),
        ([(1, 2, 4, 4), (1, 2, 5, 5)], r"layers\[1\] \(1, 2, 5, 5\) .*\(1, any, 4, 4\)"),
        ([(1, 2, 4, 5)], r"layers\[0\] \(1, 2, 4, 5\)"),
        ([(1, 2, 4, 4), (1, 2, 4, 3)], r"layers\[1\]"),
        ([(1, 2, 4, 4), (2, 2, 4, 4)], "the same samples"),
    ],
)
def test_layers_that_do_not_fit_are_refused(shapes, says):
    layers = [torch.full(shape, 1 / shape[-1]) for shape in shapes]
    with pytest.raises(ValueError, match=says):
        rollout(layers)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"fusion": "sum"}, "fusion 'sum' must be one of 'mean', 'max', 'min'"),
        ({"residual": 1.5}, r"residual \(1.5\) must lie in \[0, 1\]"),
        ({"discard": 1.0}, r"discard \(1\) must be below 1"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        rollout([torch.full((1, 1, 4, 4), 0.25)], **options)
