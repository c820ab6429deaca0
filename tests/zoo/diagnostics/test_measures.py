"""Measures against plain loops in float64, closed forms, and what must not change them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from zoo.diagnostics import entropy
from zoo.diagnostics.measures import (
    attention_distance,
    attention_rank,
    diagonal_share,
    stable_rank,
    token_share,
)
from zoo.layers import Mask, attention_weights

MASKS = {
    "none": None,
    "causal": Mask.causal(),
    "padding": Mask.padding([5, 0]),  # the second sample's rows are empty
    "both": Mask.causal() & Mask.padding([3, 5]),
}
BY_QUERY = [entropy, diagonal_share, lambda weights: token_share(weights, 0)]
BY_MATRIX = [attention_rank, stable_rank]


@pytest.fixture(params=MASKS)
def mask(request) -> Mask | None:
    return MASKS[request.param]


def random_weights(*shape: int, mask: Mask | None = None, sharp: float = 3) -> Tensor:
    """(b h i j), fp32"""
    b, h, i, j = shape
    return attention_weights(torch.randn(b, h, i, 8) * sharp, torch.randn(b, h, j, 8), mask)


def one_hot(*keys: int, num_keys: int) -> Tensor:
    return torch.eye(num_keys)[list(keys)][None, None]


def uniform(*shape: int) -> Tensor:
    return torch.full(shape, 1 / shape[-1])


def test_the_entropy_equals_scipy(mask):
    weights = random_weights(2, 3, 4, 5, mask=mask)
    reference = torch.from_numpy(stats.entropy(weights.double().numpy(), axis=-1)).nan_to_num(0)
    torch.testing.assert_close(entropy(weights), reference.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy(weights.double()), reference, atol=1e-6, rtol=1e-6)


def test_it_lies_between_one_key_and_all_alike():
    one, alike = torch.eye(8)[None, None], uniform(1, 1, 8, 8)
    assert entropy(one).abs().max() == 0
    torch.testing.assert_close(entropy(alike), torch.full((1, 1, 8), math.log(8)))
    torch.testing.assert_close(entropy(alike, normalized=True), torch.ones(1, 1, 8))


def test_a_query_without_weight_has_none():
    assert entropy(torch.zeros(1, 1, 2, 4), normalized=True).tolist() == [[[0.0, 0.0]]]


def test_one_key_cannot_be_normalised():
    with pytest.raises(ValueError, match=r"\(1, 1, 2, 1\) need 2 keys"):
        entropy(torch.ones(1, 1, 2, 1), normalized=True)


def test_with_a_mask_the_entropy_is_over_that_of_the_keys_each_query_may_see():
    mask = Mask.causal() & Mask.padding([4, 2])
    even = attention_weights(torch.zeros(2, 1, 4, 2), torch.zeros(2, 1, 4, 2), mask)
    found = entropy(even, normalized=True, mask=mask)
    torch.testing.assert_close(found, torch.tensor([0.0, 1, 1, 1]).expand(2, 1, 4))
    rest = entropy(even, normalized=True)[0, 0]
    torch.testing.assert_close(rest, torch.arange(1, 5).log() / math.log(4))


def test_a_mask_that_the_weights_did_not_have_is_refused():
    with pytest.raises(ValueError, match=r"forbids keys \(False\) that weights give up to 0.25"):
        entropy(uniform(1, 1, 4, 4), mask=Mask.causal())
    with pytest.raises(ValueError, match="does not broadcast"):
        entropy(uniform(2, 1, 4, 4), mask=torch.ones(3, 1, 1, 4, dtype=torch.bool))


@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.parametrize(("i", "j"), [(5, 5), (3, 5), (5, 3)])
def test_the_diagonal_share_is_that_of_a_loop(i, j, width):
    weights = random_weights(2, 3, i, j)
    expected = np.zeros((2, 3, i))
    for b, h, query, key in np.ndindex(2, 3, i, j):
        place = query + j - i
        if place >= 0 and abs(place - key) <= width:
            expected[b, h, query] += weights[b, h, query, key].item()
    found = diagonal_share(weights, width)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (found >= 0).all()
    assert (found <= 1 + 1e-6).all()


def test_the_diagonal_of_identity_shift_and_uniform():
    shifted = one_hot(1, 2, 3, 4, 4, num_keys=5)
    assert diagonal_share(torch.eye(5)[None, None]).tolist() == [[[1.0] * 5]]
    assert diagonal_share(shifted).tolist() == [[[0, 0, 0, 0, 1.0]]]
    assert diagonal_share(shifted, width=1).tolist() == [[[1.0] * 5]]
    torch.testing.assert_close(diagonal_share(uniform(1, 1, 5, 5)), torch.full((1, 1, 5), 0.2))


def test_shares_of_tokens_by_index_list_and_mask(mask):
    weights = random_weights(2, 3, 5, 5, mask=mask)
    first_two = weights[..., :2].sum(-1)
    torch.testing.assert_close(token_share(weights, 0), weights[..., 0])
    torch.testing.assert_close(token_share(weights, -1), weights[..., 4])
    for keys in ([0, 1], [1, 0, 1, -5], torch.tensor([0, 1]), torch.arange(5) < 2):
        torch.testing.assert_close(token_share(weights, keys), first_two)
    assert token_share(weights, []).abs().max() == 0
    everything = torch.ones(5, dtype=torch.bool)
    torch.testing.assert_close(token_share(weights, everything), weights.sum(-1))


def test_padding_gets_nothing_sample_by_sample():
    padding = torch.arange(5) >= torch.tensor([[3], [5]])  # b j
    weights = random_weights(2, 3, 5, 5, mask=Mask.padding([3, 5]))
    assert token_share(weights, padding).abs().max() == 0
    unmasked = random_weights(2, 3, 5, 5)
    share = token_share(unmasked, padding)
    torch.testing.assert_close(share[0], unmasked[0, :, :, 3:].sum(-1))
    assert share[1].abs().max() == 0


@pytest.mark.parametrize(
    ("keys", "error", "says"),
    [
        (5, ValueError, r"keys \(\[5\]\) must lie in \[-5, 4\]"),
        ([0, -6], ValueError, r"\[-6\]"),
        (0.5, TypeError, "indices or a bool tensor"),
        (True, ValueError, r"must be \(j\) = \(5,\)"),
        (torch.ones(3, 5, dtype=torch.bool), ValueError, r"\(b, j\) = \(2, 5\)"),
        (torch.zeros(2, 1, dtype=torch.long), ValueError, "one index or a list"),
    ],
)
def test_keys_that_there_are_not_are_refused(keys, error, says):
    with pytest.raises(error, match=says):
        token_share(uniform(2, 1, 5, 5), keys)


def looped_distance(weights: np.ndarray, grid, first: int, step) -> np.ndarray:
    b, h, n, _ = weights.shape
    places = [(y * step[0], x * step[1]) for y in range(grid[0]) for x in range(grid[1])]
    found = np.full((b, h), np.nan)
    for sample, head in np.ndindex(b, h):
        means = []
        for query in range(first, n):
            row = weights[sample, head, query, first:]
            if row.sum() > 0:
                away = [math.dist(places[query - first], place) for place in places]
                means.append(np.dot(row, away) / row.sum())
        if means:
            found[sample, head] = np.mean(means)
    return found


@pytest.mark.parametrize("patch_size", [None, 16, (8, 4)])
@pytest.mark.parametrize("first", [0, 1, 5])
@pytest.mark.parametrize("grid", [(3, 4), (5, 2), (1, 6)])
def test_the_distance_is_that_of_a_loop(grid, first, patch_size):
    n = first + grid[0] * grid[1]
    weights = random_weights(3, 2, n, n, mask=Mask.padding([n, n - 2, 0])).double()
    weights[0, 0, first] = torch.eye(n)[0]  # looks at a prefix token alone, if there is one
    step = (patch_size,) * 2 if isinstance(patch_size, int) else patch_size or (1, 1)
    found = attention_distance(weights, grid, num_prefix_tokens=first, patch_size=patch_size)
    expected = looped_distance(weights.numpy(), grid, first, step)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    assert found[2].isnan().all()  # that sample's queries see nothing
    longest = math.hypot((grid[0] - 1) * step[0], (grid[1] - 1) * step[1])
    assert ((found[:2] >= 0) & (found[:2] <= longest)).all()


def test_distances_in_closed_form():
    identity = torch.eye(12)[None, None]
    assert attention_distance(identity, (3, 4)).tolist() == [[0]]
    right = torch.arange(12).view(3, 4).roll(1, 1).flatten()  # three are 1 away, one is 3
    assert attention_distance(identity[..., right, :], (3, 4)).item() == 1.5
    assert attention_distance(identity[..., right, :], (3, 4), patch_size=16).item() == 24
    below = torch.arange(12).view(4, 3).roll(2, 0).flatten()
    assert attention_distance(identity[..., below, :], (4, 3), patch_size=(5, 9)).item() == 10


def test_what_prefix_tokens_get_and_see_does_not_move_the_distance():
    patches = random_weights(2, 3, 12, 12).double()
    weights = torch.zeros(2, 3, 14, 14).double()
    weights[..., 2:, 2:] = 0.25 * patches
    weights[..., 2:, 0], weights[..., :2, 5] = 0.75, 1
    torch.testing.assert_close(
        attention_distance(weights, (3, 4), num_prefix_tokens=2),
        attention_distance(patches, (3, 4)),
    )


def test_a_grid_that_is_not_that_of_the_tokens_is_refused():
    with pytest.raises(ValueError, match=r"must be \(b, h, 13, 13\): grid \(3, 4\) has 12 patches"):
        attention_distance(uniform(1, 1, 12, 12), (3, 4), num_prefix_tokens=1)
    with pytest.raises(ValueError, match="must be two integers, rows and columns"):
        attention_distance(uniform(1, 1, 12, 12), (3, 4, 1))
    with pytest.raises(ValueError, match=r"patch_size \(0\) must be at least 1"):
        attention_distance(uniform(1, 1, 12, 12), (3, 4), patch_size=0)


@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize(("i", "j"), [(7, 7), (4, 7), (7, 4)])
def test_ranks_are_those_of_numpys_singular_values(i, j, energy):
    weights = random_weights(2, 3, i, j, sharp=1).double()
    squares = np.linalg.svd(weights.numpy(), compute_uv=False) ** 2
    shares = squares.cumsum(-1) / squares.sum(-1, keepdims=True)
    expected = np.argmax(shares >= energy - 1e-12, axis=-1) + 1
    assert attention_rank(weights, energy).tolist() == expected.tolist()
    np.testing.assert_allclose(stable_rank(weights), squares.sum(-1) / squares[..., 0])
    assert ((stable_rank(weights) >= 1) & (stable_rank(weights) <= min(i, j))).all()


def test_ranks_in_closed_form():
    alike = random_weights(1, 1, 1, 8).expand(1, 1, 8, 8)
    assert attention_rank(alike, 1.0).item() == attention_rank(uniform(1, 1, 8, 8)).item() == 1
    torch.testing.assert_close(stable_rank(alike), torch.ones(1, 1))
    permutation = torch.eye(8)[torch.randperm(8)][None, None]
    assert attention_rank(permutation, 1.0).item() == 8
    assert attention_rank(permutation, 0.5).item() == 4
    torch.testing.assert_close(stable_rank(permutation), torch.full((1, 1), 8.0))
    empty = torch.zeros(1, 1, 3, 4)
    assert attention_rank(empty).item() == stable_rank(empty).item() == 0


def test_an_energy_of_nothing_and_nan_have_no_rank():
    with pytest.raises(ValueError, match=r"energy \(0\) must be above 0"):
        attention_rank(uniform(1, 1, 2, 2), 0)
    for rank in BY_MATRIX:
        with pytest.raises(ValueError, match="hold NaN"):
            rank(torch.full((1, 1, 2, 2), math.nan))


@pytest.mark.parametrize("measure", [*BY_QUERY, *BY_MATRIX])
def test_samples_and_heads_are_each_measured_by_themselves(measure, mask):
    weights = random_weights(2, 3, 5, 5, mask=mask)
    found, order = measure(weights), [2, 0, 1]
    torch.testing.assert_close(measure(weights[:, order]), found[:, order])
    torch.testing.assert_close(measure(weights.flip(0)), found.flip(0))
    torch.testing.assert_close(measure(weights[1:, :1]), found[1:, :1])


@pytest.mark.parametrize("measure", [entropy, *BY_QUERY[2:], *BY_MATRIX])
def test_a_key_that_nobody_sees_changes_nothing(measure, mask):
    weights = random_weights(2, 3, 5, 5, mask=mask)
    wider = torch.cat([weights, torch.zeros(2, 3, 5, 1)], -1)
    torch.testing.assert_close(measure(wider), measure(weights))


@pytest.mark.parametrize("measure", [*BY_QUERY, *BY_MATRIX])
def test_a_query_that_sees_nothing_changes_nothing_for_the_others(measure):
    weights = random_weights(2, 3, 5, 6)
    # In front, as the last query stands at the last key.
    taller = torch.cat([torch.zeros(2, 3, 1, 6), weights], 2)
    found = measure(taller)
    if found.ndim == 3:
        assert found[..., 0].abs().max() == 0
        found = found[..., 1:]
    torch.testing.assert_close(found, measure(weights))


@pytest.mark.parametrize(
    ("measure", "types"),
    [
        *((measure, (torch.float32, torch.float64)) for measure in (*BY_QUERY, stable_rank)),
        (lambda weights: attention_distance(weights, (2, 2)), (torch.float32, torch.float64)),
        (attention_rank, (torch.int64, torch.int64)),
    ],
)
def test_float64_is_kept_and_half_precision_is_measured_in_fp32(measure, types):
    weights = random_weights(1, 2, 4, 4)
    assert measure(weights).dtype == measure(weights.bfloat16()).dtype == types[0]
    assert measure(weights.double()).dtype == types[1]
    half = weights.bfloat16()
    torch.testing.assert_close(measure(half), measure(half.float()), atol=0, rtol=0)


@pytest.mark.parametrize("measure", [*BY_QUERY, lambda w: attention_distance(w, (1, 2))])
def test_nan_is_seen_in_what_it_touches_and_nowhere_else(measure):
    weights = uniform(1, 2, 2, 2)
    weights[0, 1] = math.nan
    found = measure(weights)
    assert found[0, 1].isnan().all()
    assert not found[0, 0].isnan().any()


@pytest.mark.parametrize(
    ("weights", "error", "says"),
    [
        (torch.ones(2, 4, 4), ValueError, r"\(2, 4, 4\) must be \(b, h, i, j\)"),
        (torch.ones(0, 2, 4, 4), ValueError, "none of them 0"),
        (torch.ones(1, 1, 2, 2), ValueError, "a row that sums to 2"),
        (torch.full((1, 1, 2, 2), 0.1), ValueError, "a row that sums to 0.2"),
        (torch.full((1, 1, 2, 2), math.inf), ValueError, "a row that sums to inf"),
        (torch.tensor([[[[1.5, -0.5]]]]), ValueError, "go down to -0.5"),
        (torch.ones(1, 1, 2, 1, dtype=torch.long), TypeError, "floating-point numbers, got torch"),
        ([[[[1.0]]]], TypeError, "floating-point numbers, got list"),
    ],
)
def test_what_are_no_weights_is_refused(weights, error, says):
    for measure in (*BY_QUERY, *BY_MATRIX):
        with pytest.raises(error, match=says):
            measure(weights)


@pytest.mark.parametrize("keys", [7, 197, 257])
def test_rounding_leaves_entropy_in_its_range(keys: int) -> None:
    even, one = torch.full((1, 1, 1, keys), 1 / keys), torch.zeros(1, 1, 1, keys)
    one[..., 0] = 1 + 2e-7
    assert entropy(even, normalized=True).item() <= 1
    assert entropy(one).item() == 0
