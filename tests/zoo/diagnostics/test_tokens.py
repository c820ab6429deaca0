"""Sinks and places that draw weight, by loops; norms that stand out, by scipy's deviation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import median_abs_deviation
from torch import Tensor

from zoo.diagnostics.tokens import (
    attention_received,
    outlier_norms,
    position_bias,
    sink_tokens,
)
from zoo.layers import Mask, attention_weights

MASKS = {
    "none": None,
    "causal": Mask.causal(),
    "padding": Mask.padding([5, 0]),
    "by head": Mask.dense(torch.tensor([[1, 1, 0, 0, 1], [1, 0, 1, 1, 1]]).bool()[:, None]),
    "one column": Mask.dense(torch.tensor([[[[True]]], [[[False]]]])),
}
MEASURES = [position_bias, attention_received]


@pytest.fixture(params=MASKS)
def mask(request) -> Mask | None:
    return MASKS[request.param]


def weights_of(mask: Mask | None, sharp: float = 3.0) -> Tensor:
    """(2 2 4 5), float64"""
    q, k = torch.randn(2, 2, 4, 8) * sharp, torch.randn(2, 2, 5, 8)
    return attention_weights(q, k, mask).double()


def looped(weights: Tensor, mask: Mask | None) -> tuple[np.ndarray, np.ndarray]:
    """Weight of each key and what it would be if all were alike, summed over queries: (b h j)."""
    allowed = torch.ones_like(weights) > 0 if mask is None else mask.lower(4, 5) & (weights >= 0)
    got, fair = np.zeros((2, 2, 5)), np.zeros((2, 2, 5))
    for b, h, i, j in np.ndindex(*weights.shape):
        if weights[b, h, i].sum() > 0 and allowed[b, h, i, j]:
            got[b, h, j] += weights[b, h, i, j].item()
            fair[b, h, j] += 1 / allowed[b, h, i].sum().item()
    return got, fair


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_keys_draw_is_that_of_a_loop(mask):
    weights = weights_of(mask)
    got, fair = looped(weights, mask)
    np.testing.assert_allclose(attention_received(weights, mask=mask), got / fair, rtol=1e-6)
    bias = position_bias(weights, mask=mask)
    np.testing.assert_allclose(bias, got.sum((0, 1)) / fair.sum((0, 1)), rtol=1e-6)
    known = bias[~bias.isnan()]
    assert ((known >= 0) & (known <= 5 + 1e-6)).all()
    torch.testing.assert_close(position_bias(weights.float(), mask=mask), bias.float())


def test_even_attention_has_no_bias_whatever_the_mask(mask):
    bias = position_bias(weights_of(mask, sharp=0), mask=mask)
    torch.testing.assert_close(bias, torch.ones(5).double(), rtol=1e-6, atol=0)


def test_a_key_that_nobody_may_see_has_no_bias():
    mask = Mask.padding([3, 4])
    bias = position_bias(weights_of(mask), mask=mask)
    assert bias.isnan().tolist() == [False, False, False, False, True]


def test_without_the_causal_mask_the_first_keys_seem_to_draw_more():
    even = weights_of(Mask.causal(), sharp=0)
    assert position_bias(even)[0] > 1.4
    assert not sink_tokens(even, 1.1, mask=Mask.causal()).any()
    assert sink_tokens(even, 1.1).any()


@pytest.mark.parametrize("measure", MEASURES)
def test_all_weight_on_one_key_is_all_that_it_can_draw(measure):
    weights = torch.eye(5)[[2] * 4].expand(2, 2, 4, 5)
    torch.testing.assert_close(
        measure(weights).expand(2, 2, 5), torch.tensor([0, 0, 5.0, 0, 0]).expand(2, 2, 5)
    )


def test_sinks_are_found_in_the_heads_that_have_them():
    weights = torch.full((2, 3, 20, 20), 1 / 20)
    weights[1, 2] = 0.5 / 19
    weights[1, 2, :, 0] = 0.5  # ten times its fair share
    assert sink_tokens(weights, 5).nonzero().tolist() == [[1, 2, 0]]
    assert sink_tokens(weights, 9.9).nonzero().tolist() == [[1, 2, 0]]
    assert not sink_tokens(weights, 10.1).any()


@pytest.mark.parametrize("measure", [*MEASURES, lambda weights: sink_tokens(weights, 1.0)])
def test_queries_that_see_nothing_do_not_count(measure):
    weights = weights_of(None)
    taller = torch.cat([weights, torch.zeros(2, 2, 3, 5)], 2)
    torch.testing.assert_close(measure(taller), measure(weights))
    torch.testing.assert_close(measure(weights[:, :, [2, 0, 3, 1]]), measure(weights))


def test_heads_and_samples_by_themselves_and_all_together():
    weights = weights_of(None)
    received = attention_received(weights)
    torch.testing.assert_close(attention_received(weights.flip(0, 1)), received.flip(0, 1))
    torch.testing.assert_close(position_bias(weights.flip(0, 1)), received.mean((0, 1)))
    torch.testing.assert_close(position_bias(weights.flip(-1)), position_bias(weights).flip(-1))


def test_nan_shows_in_numbers_and_is_refused_where_the_answer_is_yes_or_no():
    weights = weights_of(None)
    weights[0, 1, 2] = math.nan
    assert position_bias(weights).isnan().all()
    assert attention_received(weights).isnan().any(-1).tolist() == [[False, True], [False, False]]
    with pytest.raises(ValueError, match="hold NaN"):
        sink_tokens(weights, 2)
    with pytest.raises(ValueError, match=r"threshold \(0\) must be positive"):
        sink_tokens(weights_of(None), 0)


def reference(norms: np.ndarray, threshold: float) -> np.ndarray:
    """(n) -> bool (n)"""
    deviation = median_abs_deviation(norms, scale="normal")
    return norms - np.median(norms) > threshold * deviation


@pytest.mark.parametrize("n", [20, 21])
def test_outliers_are_those_of_scipys_deviation(n):
    norms = torch.linspace(10, 11, n).double()[torch.stack([torch.randperm(n) for _ in range(4)])]
    norms[0, 3], norms[1, :2], norms[2, 5] = 100, 13, 0.1  # the last is small, and no outlier
    expected = np.stack([reference(row, 3.5) for row in norms.numpy()])
    assert expected.sum(-1).tolist() == [1, 2, 0, 0]
    assert outlier_norms(norms).tolist() == expected.tolist()
    assert outlier_norms(norms.float() * 7).tolist() == expected.tolist()
    tight = np.stack([reference(row, 1.0) for row in norms.numpy()])
    assert outlier_norms(norms, 1.0).tolist() == tight.tolist()


def test_normally_distributed_norms_are_cut_at_so_many_deviations():
    norms = 50 + torch.randn(1, 200_000)
    assert outlier_norms(norms, 2.0).float().mean() == pytest.approx(0.02275, abs=0.002)


def test_only_tokens_that_count_are_compared():
    norms = torch.linspace(10, 11, 12).repeat(2, 1)
    norms[:, 0], norms[0, 4], norms[:, 8:] = 500, 40, 0  # class token, outlier, padding
    norms[1, 11] = math.nan  # no one's affair
    counted = torch.ones(2, 12, dtype=torch.bool)
    counted[:, 0], counted[:, 8:] = False, False
    found = outlier_norms(norms, counted=counted)
    assert found.nonzero().tolist() == [[0, 4]]
    assert outlier_norms(norms, counted=counted[0]).tolist() == found.tolist()
    assert not outlier_norms(norms, counted=torch.zeros(12, dtype=torch.bool)).any()


def test_among_norms_that_are_the_same_rounding_does_not_stand_out():
    norms = torch.full((1, 12), 10.0)
    norms[0, 3] = 10.00001
    assert not outlier_norms(norms).any()
    norms[0, 3] = 11
    assert outlier_norms(norms).nonzero().tolist() == [[0, 3]]


@pytest.mark.parametrize(
    ("norms", "counted", "says"),
    [
        (torch.ones(3), None, r"\(b, n\), got torch.float32, \(3,\)"),
        (torch.ones(2, 3, dtype=torch.long), None, "got torch.int64"),
        (torch.tensor([[1.0, math.nan]]), None, "hold nan"),
        (torch.tensor([[1.0, math.inf]]), None, "hold inf"),
        (torch.tensor([[1.0, -2.0]]), None, "hold -2"),
        (torch.ones(2, 3), torch.ones(2, 1, dtype=torch.bool), r"\(b, n\) = \(2, 3\) or \(n,\)"),
        (torch.ones(2, 3), torch.ones(2, 3), "counted must be bool"),
    ],
)
def test_what_are_no_norms_is_refused(norms, counted, says):
    with pytest.raises(ValueError, match=says):
        outlier_norms(norms, counted=counted)
