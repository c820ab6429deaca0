"""The numbers of a log against the measures that they come from, one head at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from zoo.diagnostics.heads import effective_heads, head_similarity
from zoo.diagnostics.looks import look_at_layer
from zoo.diagnostics.measures import attention_distance
from zoo.layers import Mask, attention_weights

NAMES = {
    *("entropy", "entropy_min", "entropy_max", "max_weight", "top_key_share"),
    *("head_similarity", "effective_heads"),
}


def summary(weights: Tensor, **options: Any) -> dict[str, float]:
    """The numbers of a look."""
    return look_at_layer(weights, **options).numbers()


def random_weights(*shape: int, mask: Mask | None = None) -> Tensor:
    """(b h i j), float64"""
    b, h, i, j = shape
    return attention_weights(torch.randn(b, h, i, 8) * 2, torch.randn(b, h, j, 8), mask).double()


def looped(weights: np.ndarray, allowed: np.ndarray) -> dict[str, float]:
    """By head, sample and query; without what has to do with pairs of heads."""
    even, largest, top = [], [], []
    for head in range(weights.shape[1]):
        rows = [
            (row, keys.sum())
            for row, keys in zip(
                weights[:, head].reshape(-1, weights.shape[-1]),
                allowed[:, head].reshape(-1, weights.shape[-1]),
                strict=True,
            )
            if row.any()
        ]
        even.append(
            np.mean([-sum(w * math.log(w) for w in r if w) / math.log(max(k, 2)) for r, k in rows])
        )
        largest.append(np.mean([row.max() for row, _ in rows]))
        samples = [[row for row in sample if row.any()] for sample in weights[:, head]]
        top.append(np.mean([np.mean(found, axis=0).max() for found in samples if found]))
    return {
        "entropy": np.mean(even),
        "entropy_min": min(even),
        "entropy_max": max(even),
        "max_weight": np.mean(largest),
        "top_key_share": max(top),
    }


@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.padding([6, 3, 0])])
def test_the_numbers_are_those_of_a_loop(mask):
    weights = random_weights(3, 4, 6, 6, mask=mask)
    found = summary(weights, mask=mask)
    assert found.keys() == NAMES
    assert all(type(value) is float for value in found.values())
    allowed = torch.ones_like(weights) if mask is None else mask.lower(6, 6).expand_as(weights)
    for name, value in looped(weights.numpy(), allowed.numpy()).items():
        assert found[name] == pytest.approx(value, rel=1e-6), name
    similarity = head_similarity(weights, "cosine")
    pairs = [similarity[one, other].item() for one in range(4) for other in range(one)]
    assert found["head_similarity"] == pytest.approx(np.mean(pairs))
    assert found["effective_heads"] == pytest.approx(effective_heads(similarity))
    assert all(0 <= found[name] <= 1 for name in NAMES - {"effective_heads"})
    single = summary(weights.float(), mask=mask)
    assert single == pytest.approx(found, rel=1e-4)


def test_distance_comes_with_a_grid():
    weights, place = random_weights(2, 3, 13, 13), {"num_prefix_tokens": 1, "patch_size": (8, 4)}
    found = summary(weights, grid=(3, 4), **place)
    assert found.keys() == {*NAMES, "distance"}
    expected = attention_distance(weights, (3, 4), **place).mean()
    assert found["distance"] == pytest.approx(expected.item())
    weights[0, 1] = torch.eye(13)[0]  # a head that looks at the class token alone
    distances = attention_distance(weights, (3, 4), **place)
    assert summary(weights, grid=(3, 4), **place)["distance"] == pytest.approx(
        distances.nanmean(0).mean().item()
    )


def test_closed_forms():
    even = summary(torch.full((2, 3, 4, 4), 0.25))
    assert [even["entropy"], even["entropy_min"]] == pytest.approx([1, 1])
    assert [even["max_weight"], even["top_key_share"]] == pytest.approx([0.25, 0.25])
    assert [even["head_similarity"], even["effective_heads"]] == pytest.approx([1, 1])
    sharp = summary(torch.eye(4)[:3, None].expand(3, 4, 4)[None])  # each head on a key of its own
    assert [sharp["entropy"], sharp["entropy_max"]] == [0, 0]
    assert [sharp["max_weight"], sharp["top_key_share"]] == [1, 1]
    assert [sharp["head_similarity"], sharp["effective_heads"]] == pytest.approx([0, 3])
    own = summary(torch.eye(4).expand(1, 2, 4, 4))
    assert [own["max_weight"], own["top_key_share"]] == [1, 0.25]


def test_a_single_head_has_no_pairs_and_a_single_key_no_choice():
    single = summary(random_weights(2, 1, 4, 5))
    assert single.keys() == NAMES - {"head_similarity"}
    assert single["effective_heads"] == pytest.approx(1)
    key = summary(torch.ones(2, 2, 4, 1))
    assert (key["entropy"], key["max_weight"], key["effective_heads"]) == pytest.approx((0, 1, 1))


def test_what_sees_nothing_changes_nothing():
    weights = random_weights(2, 3, 5, 6)
    found = summary(weights)
    for same in (
        weights.flip(0, 1),
        torch.cat([weights, torch.zeros(2, 3, 2, 6)], 2),
        torch.cat([weights, torch.zeros(1, 3, 5, 6)], 0),
        torch.cat([weights, torch.zeros(2, 1, 5, 6)], 1),
    ):
        assert summary(same) == pytest.approx(found)
    hidden = torch.nn.functional.pad(weights, (0, 1))
    mask = Mask.padding([6, 6])
    assert summary(hidden, mask=mask) == pytest.approx(found)


def test_nan_and_nothing_come_out_as_nan_rather_than_stop_a_run():
    broken = random_weights(2, 3, 4, 4)
    broken[1, 2, 0] = math.nan
    for weights in (broken, torch.zeros(2, 3, 4, 4)):
        found = summary(weights, grid=(2, 2))
        assert {name for name, value in found.items() if math.isnan(value)} == {*NAMES, "distance"}
