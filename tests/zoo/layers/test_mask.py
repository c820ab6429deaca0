"""Masks lower to the right booleans and combine like them."""

from __future__ import annotations

import doctest

import pytest
import torch

import zoo.layers.mask
from zoo.layers import Mask

LENGTHS = torch.tensor([0, 2, 9])
IDS_Q = torch.tensor([[0, 0, 1, 2]] * 3)
IDS_K = torch.tensor([[0, 1, 1, 5, 0]] * 3)
DENSE = torch.rand(3, 2, 4, 5, generator=torch.Generator().manual_seed(0)) > 0.5

RULES = {
    "padding": (Mask.padding(LENGTHS), lambda b, h, i, j: j < LENGTHS[b]),
    "causal": (Mask.causal(), lambda b, h, i, j: j - 5 <= i - 4),
    "segment": (Mask.segment(IDS_Q, IDS_K), lambda b, h, i, j: IDS_Q[b, i] == IDS_K[b, j]),
    "dense": (Mask.dense(DENSE), lambda b, h, i, j: DENSE[b, h, i, j]),
}


def table(rule) -> torch.Tensor:
    """A rule, evaluated cell by cell for 3 samples, 2 heads, 4 queries and 5 keys."""
    cells = [
        [[[bool(rule(b, h, i, j)) for j in range(5)] for i in range(4)] for h in range(2)]
        for b in range(3)
    ]
    return torch.tensor(cells)


def lower(mask: Mask) -> torch.Tensor:
    lowered = mask.lower(4, 5)
    assert lowered.dtype == torch.bool
    assert lowered.ndim == 4
    return lowered.expand(3, 2, 4, 5)


@pytest.mark.parametrize("name", RULES)
def test_rule_by_rule(name: str) -> None:
    mask, rule = RULES[name]
    assert torch.equal(lower(mask), table(rule))


@pytest.mark.parametrize("left", RULES)
@pytest.mark.parametrize("right", RULES)
def test_combined(left: str, right: str) -> None:
    (mask, rule), (other_mask, other_rule) = RULES[left], RULES[right]
    assert torch.equal(lower(mask & other_mask), table(rule) & table(other_rule))
    assert torch.equal(lower(mask | other_mask), table(rule) | table(other_rule))


def test_combines_with_tensors_and_none() -> None:
    causal = Mask.causal()
    assert torch.equal(lower(causal & DENSE), lower(causal) & DENSE)
    assert torch.equal(lower(causal | DENSE), lower(causal) | DENSE)
    assert (causal & None) is causal
    with pytest.raises(TypeError, match="allows everything"):
        causal | None


def test_of_passes_masks_and_none_through() -> None:
    causal = Mask.causal()
    assert Mask.of(causal) is causal
    assert Mask.of(None) is None
    assert torch.equal(Mask.of(DENSE[0, 0]).lower(4, 5), DENSE[:1, :1])


def test_segment_of_one_sequence() -> None:
    allowed = Mask.segment(IDS_Q).lower(4, 4)
    assert torch.equal(allowed[0, 0], IDS_Q[0][:, None] == IDS_Q[0][None])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Mask.of(torch.zeros(3, 3)), TypeError, "mask must be bool.*float32"),
        (lambda: Mask.of(torch.ones(3, 3, dtype=torch.int64)), TypeError, "bool.*int64"),
        (lambda: Mask.of([[True]]), TypeError, "got list"),
        (lambda: Mask.causal() & 3, TypeError, "got int"),
        (lambda: Mask.of(torch.ones(1, 1, 1, 2, 2).bool()), ValueError, "at most 4 axes"),
        (lambda: Mask.padding(torch.tensor([1.0])), TypeError, "lengths must hold integers"),
        (lambda: Mask.padding(DENSE), TypeError, "lengths must hold integers, got torch.bool"),
        (lambda: Mask.padding(IDS_Q), ValueError, r"lengths must be \(b\), got shape \(3, 4\)"),
        (lambda: Mask.segment(LENGTHS), ValueError, r"ids_q must be \(b i\)"),
        (lambda: Mask.segment(IDS_Q, LENGTHS), ValueError, r"ids_k must be \(b j\)"),
        (lambda: Mask.segment(IDS_Q).lower(4, 5), ValueError, "4 queries and 5 keys"),
    ],
)
def test_refused(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_documentation_example_runs() -> None:
    result = doctest.testmod(zoo.layers.mask)
    assert result.attempted
    assert not result.failed


def test_lowers_to_the_device_that_is_asked_for() -> None:
    combined = (Mask.padding(LENGTHS) & Mask.segment(IDS_Q, IDS_K)) | Mask.dense(DENSE)
    assert (combined & Mask.causal()).lower(4, 5, device="meta").device.type == "meta"


def test_a_tensor_on_the_left_combines_too():
    square = torch.tensor([[True, False], [True, True]])
    for combined in (square & Mask.causal(), Mask.causal() & square):
        assert torch.equal(combined.lower(2, 2)[0, 0], square.tril())
    assert (~square | Mask.causal()).lower(2, 2).all()
