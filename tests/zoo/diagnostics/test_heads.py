"""Similarity of heads against scipy's distances, pair by pair, and how many heads it comes to."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import cosine, jensenshannon
from torch import Tensor

from zoo.diagnostics.heads import effective_heads, head_similarity
from zoo.layers import Mask, attention_weights

KINDS = ["js", "cosine"]
REFERENCE = {
    "js": lambda p, q: 1 - jensenshannon(p, q, base=2) ** 2,
    "cosine": lambda p, q: 1 - cosine(p, q),
}


def random_weights(*shape: int, mask: Mask | None = None) -> Tensor:
    """(b h i j), float64"""
    b, h, i, j = shape
    q, k = torch.randn(b, h, i, 4) * 3, torch.randn(b, h, j, 4)
    weights = attention_weights(q, k, mask).double()
    return weights / weights.sum(-1, keepdim=True).clamp(min=0.5)


def mask_by_head(b: int, h: int, i: int, j: int) -> Mask:
    """Half of the keys of each head hidden, and some rows empty in some heads, not the first."""
    allowed = torch.rand(b, h, i, j) < 0.5
    allowed[torch.rand(b, h, i) < 0.3] = False
    allowed[:, :, 0, 0] = True
    return Mask.dense(allowed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_similarity_is_the_mean_over_queries_that_see_something_in_both(kind, masked):
    shape = (2, 4, 5, 6)
    weights = random_weights(*shape, mask=mask_by_head(*shape) if masked else None)
    expected = np.empty((4, 4))
    for one, other in np.ndindex(4, 4):
        pairs = [
            (weights[b, one, i].numpy(), weights[b, other, i].numpy()) for b, i in np.ndindex(2, 5)
        ]
        found = [REFERENCE[kind](p, q) for p, q in pairs if p.any() and q.any()]
        expected[one, other] = np.mean(found)
    np.testing.assert_allclose(head_similarity(weights, kind), expected, atol=1e-9)
    np.testing.assert_allclose(head_similarity(weights.float(), kind), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_are_alike_have_1_and_heads_without_a_common_key_0(kind):
    alike = random_weights(2, 1, 5, 6).expand(2, 3, 5, 6)
    torch.testing.assert_close(head_similarity(alike, kind), torch.ones(3, 3).double())
    apart = torch.eye(6)[[0, 2, 4]][None, :, None].expand(2, 3, 5, 6)
    torch.testing.assert_close(head_similarity(apart, kind), torch.eye(3))
    halves = torch.tensor([[0.5, 0.5, 0], [0, 0.5, 0.5]])[None, :, None]  # one key of two in common
    torch.testing.assert_close(head_similarity(halves, kind)[0, 1], torch.tensor(0.5))


@pytest.mark.parametrize("kind", KINDS)
def test_what_changes_no_similarity(kind):
    weights, order = random_weights(2, 4, 5, 6, mask=mask_by_head(2, 4, 5, 6)), [2, 0, 3, 1]
    found = head_similarity(weights, kind)
    torch.testing.assert_close(head_similarity(weights[:, order], kind), found[order][:, order])
    for same in (
        weights.flip(0),
        weights[:, :, [4, 1, 0, 2, 3]],
        weights[..., [5, 1, 0, 2, 4, 3]],
        torch.cat([weights, torch.zeros(2, 4, 5, 1)], -1),  # a key that nobody sees
        torch.cat([weights, torch.zeros(2, 4, 1, 6)], 2),  # a query that sees nothing
        torch.cat([weights, torch.zeros(1, 4, 5, 6)], 0),  # a sample of such
    ):
        torch.testing.assert_close(head_similarity(same, kind), found)
    assert torch.equal(found, found.mT)
    assert ((found >= 0) & (found <= 1)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_never_see_something_together_cannot_be_compared(kind):
    weights = random_weights(1, 3, 4, 6)
    weights[:, 0, :2], weights[:, 1, 2:] = 0, 0
    found = head_similarity(weights, kind)
    assert found.isnan().int().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert math.isnan(effective_heads(found))


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_of_the_head_that_has_it(kind):
    weights = random_weights(1, 3, 4, 6)
    weights[0, 1, 0] = math.nan
    expected = [[0, 1, 0], [1, 1, 1], [0, 1, 0]]
    assert head_similarity(weights, kind).isnan().int().tolist() == expected


def test_the_kind_is_one_of_two():
    with pytest.raises(ValueError, match="kind 'kl' must be one of 'js', 'cosine'"):
        head_similarity(torch.ones(1, 2, 3, 1), "kl")


def test_heads_that_are_alike_count_once():
    assert effective_heads(torch.ones(8, 8)) == pytest.approx(1)
    assert effective_heads(torch.eye(8)) == pytest.approx(8)
    assert effective_heads(torch.ones(1, 1)) == pytest.approx(1)
    groups = torch.block_diag(*[torch.ones(2, 2)] * 4)
    assert effective_heads(groups) == pytest.approx(4)
    uneven = torch.block_diag(torch.ones(5, 5), torch.eye(3))  # groups of 5/8, 1/8, 1/8, 1/8
    assert effective_heads(uneven) == pytest.approx(2 ** (5 / 8 * math.log2(8 / 5) + 3 / 8 * 3))


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_heads_is_that_of_the_eigenvalues_in_any_order_of_heads(kind):
    similarity = head_similarity(random_weights(2, 6, 5, 8), kind)
    values = np.linalg.eigvals(similarity.numpy() / 6)
    expected = math.exp(-sum(value * math.log(value) for value in values.real))
    assert effective_heads(similarity) == pytest.approx(expected)
    order = torch.randperm(6)
    assert effective_heads(similarity[order][:, order]) == pytest.approx(expected)
    assert 1 <= expected <= 6


@pytest.mark.parametrize(
    ("similarity", "says"),
    [
        (torch.ones(2, 3), r"\(2, 3\) must be \(h, h\)"),
        (torch.ones(1, 2, 2), r"must be \(h, h\)"),
        (torch.tensor([[1.0, 0.2], [0.4, 1.0]]), "symmetric"),
        (torch.full((2, 2), 0.5), "1 of a head with itself"),
        (torch.tensor([[1.0, -0.5], [-0.5, 1.0]]), r"lie in \[0, 1\]"),
    ],
)
def test_what_is_no_similarity_is_refused(similarity, says):
    with pytest.raises(ValueError, match=says):
        effective_heads(similarity)
