"""Looks against loops over heads and channels in float64."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from zoo.diagnostics.heads import head_similarity
from zoo.diagnostics.looks import look_at_gates, look_at_layer
from zoo.diagnostics.measures import attention_distance
from zoo.layers import Mask, attention_weights


def scores_and_weights(mask: Mask | None = None) -> tuple[Tensor, Tensor]:
    """(b h i 2), (b h i j) of 2 samples, 3 heads and 6 tokens."""
    q, k = torch.randn(2, 3, 6, 8).double(), torch.randn(2, 3, 6, 8).double()
    scores = q @ k.mT / math.sqrt(8)
    weights = attention_weights(q, k, mask)
    seen = torch.ones_like(scores) if mask is None else mask.lower(6, 6).expand_as(scores)
    low, high = (scores.masked_fill(seen == 0, sign * math.inf) for sign in (1, -1))
    return torch.stack([low.amin(-1), high.amax(-1)], -1), weights


@pytest.mark.parametrize("mask", [None, Mask.padding([6, 4]), Mask.causal()])
def test_each_number_is_of_its_head(mask):
    logits, weights = scores_and_weights(mask)
    look = look_at_layer(weights, mask=mask, grid=(2, 3), logits=logits)
    seen = torch.ones_like(weights) if mask is None else mask.lower(6, 6).expand_as(weights)
    keys = seen.sum(-1).numpy()
    for head in range(3):
        rows = weights[:, head].numpy()
        even = [
            [
                stats.entropy(row) / math.log(max(2, keys[s, head, i]))
                for i, row in enumerate(sample)
            ]
            for s, sample in enumerate(rows)
        ]
        assert look.entropy[head] == pytest.approx(sum(map(sum, even)) / 12)
        assert look.max_weight[head] == pytest.approx(rows.max(-1).mean())
        assert look.top_key_share[head] == pytest.approx(rows.mean(1).max(-1).mean())
        low, high = logits[:, head, :, 0].min(), logits[:, head, :, 1].max()
        assert look.logits[head].tolist() == [low, high]
    assert torch.equal(look.similarity, head_similarity(weights, "cosine"))
    assert torch.allclose(look.distance, attention_distance(weights, (2, 3)).mean(0))
    assert (look.num_heads, look.keys, look.queries) == (3, 6, 6)
    assert look.finite
    assert not look.empty


def test_its_numbers_are_those_of_the_log():
    logits, weights = scores_and_weights()
    look = look_at_layer(weights, grid=(2, 3), logits=logits)
    found = look.numbers()
    assert found["entropy_min"] == look.entropy.min()
    assert found["entropy"] == look.entropy.mean()
    assert (found["logit_min"], found["logit_max"]) == (logits.min(), logits.max())
    assert "logit_max" not in look_at_layer(weights).numbers()


def test_what_sees_nothing_is_no_fault():
    """A head, a sample and a query, with the scores that capture gives for them."""
    logits, weights = scores_and_weights()
    look = look_at_layer(weights, logits=logits)
    weights[:, 1] = 0
    weights[0, 2, 3] = 0
    nothing = torch.tensor([math.inf, -math.inf]).double()
    logits[:, 1], logits[0, 2, 3] = nothing, nothing
    holes = look_at_layer(weights, logits=logits)
    assert holes.sees.tolist() == [True, False, True]
    assert holes.finite
    assert torch.equal(holes.entropy[0], look.entropy[0])
    assert holes.entropy[1].isnan()
    assert holes.logits[1].isnan().all()
    assert holes.logits[[0, 2]].isfinite().all()
    assert not any(math.isnan(value) for value in holes.numbers().values())
    assert look_at_layer(torch.zeros(1, 2, 3, 4)).empty


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_numbers_are_seen(bad):
    logits, weights = scores_and_weights()
    assert look_at_layer(weights, logits=logits).finite
    logits[1, 2, 0, 1] = bad
    assert not look_at_layer(weights, logits=logits).finite
    weights[0, 1, 2] = math.nan
    look = look_at_layer(weights, grid=(2, 3))
    assert not look.finite
    assert look.entropy[1].isnan()
    assert look.distance[1].isnan()
    assert look.entropy[[0, 2]].isfinite().all()
    assert look.distance[[0, 2]].isfinite().all()


def test_scores_of_another_shape_are_refused():
    logits, weights = scores_and_weights()
    with pytest.raises(ValueError, match=r"logits \(2, 3, 6\) must be .* \(2, 3, 6, 2\)"):
        look_at_layer(weights, logits=logits[..., 0])


def test_gates_by_loops():
    gates = torch.rand(5, 7).double()
    gates[:, 2], gates[:, 4] = 0.03, 0.97
    gates[0, 5] = 0.01  # shut for one sample, not for all
    look = look_at_gates(gates)
    columns = [column.numpy() for column in gates.T]
    means = [column.mean() for column in columns]
    assert look.mean == pytest.approx(sum(means) / 7)
    assert look.spread == pytest.approx(stats.tstd(means) * math.sqrt(6 / 7))
    assert look.sample_spread == pytest.approx(sum(column.std() for column in columns) / 7)
    assert look.dead == pytest.approx(sum((column <= 0.05).all() for column in columns) / 7)
    near = sum(((column <= 0.05) | (column >= 0.95)).sum() for column in columns)
    assert look.saturated == pytest.approx(near / 35)
    assert set(look.numbers()) == {"mean", "spread", "sample_spread", "dead", "saturated"}
    assert look.finite
    assert look.channels == 7


def test_dead_means_shut_wherever_the_gate_ends_at_0():
    shut = torch.tensor([[0.0, 0.2], [0.0, 0.0]])
    assert look_at_gates(shut, (0.0, math.inf)).dead == 0.5
    assert look_at_gates(shut, (0.0, 2.0)).dead == 0.5
    assert look_at_gates(shut, (-1.0, 1.0)).dead == 0, "tanh learns best at 0"
    assert look_at_gates(shut + 1, (1.0, 2.0)).dead == 0
    unknown = look_at_gates(shut, None)
    assert math.isnan(unknown.dead)
    assert math.isnan(unknown.saturated)
    assert unknown.finite
    places = torch.zeros(2, 3, 4, 4)
    places[0, 1, 2, 2] = 1.0
    assert look_at_gates(places).dead == pytest.approx(2 / 3)


def test_broken_gates():
    gates = torch.rand(2, 3)
    gates[1, 1] = math.nan
    assert not look_at_gates(gates).finite
    for wrong in (torch.rand(3), torch.zeros(0, 3), torch.ones(2, 3, dtype=torch.long)):
        with pytest.raises(ValueError, match="gates must be floating-point numbers"):
            look_at_gates(wrong)
