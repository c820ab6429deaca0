"""Ranks and what follows from them, against full matrices in numpy and scipy's statistics."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F

from crossmodal.retrieval import (
    compare_recall,
    rank_metrics,
    ranks,
    recall_interval,
    rerank,
    retrieval_metrics,
    retrieval_ranks,
)
from vision.evaluate import interval
from zoo.diagnostics.cost import peak_bytes


def features(*shape: int, seed: int = 0) -> torch.Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def grid(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: exact in any precision, with many ties."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).float()


def by_sorting(scores: np.ndarray, relevant: list[list[int]]) -> list[int]:
    """Sorts each row, irrelevant candidates before relevant ones that are equal."""
    found = []
    for row, own in zip(scores, relevant, strict=True):
        is_relevant = np.isin(np.arange(len(row)), own)
        order = np.lexsort((is_relevant, -row))
        first = int(np.flatnonzero(is_relevant[order])[0])
        found.append(first + 1)  # what stands before the first relevant one is irrelevant
    return found


def several(q: int, c: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.choice(c, rng.integers(1, 5), replace=False).tolist() for _ in range(q)]


@pytest.mark.parametrize("make", [features, grid])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_ranks_equal_sorting_the_whole_matrix(make, chunk):
    a, b = make(50, 6), make(70, 6, seed=1)
    scores = a.double().numpy() @ b.double().numpy().T
    one = np.random.default_rng(2).integers(70, size=50)
    expected = by_sorting(scores, [[int(i)] for i in one])
    assert len({*expected}) > 5
    assert ranks(a, b, torch.from_numpy(one), chunk=chunk).tolist() == expected
    assert ranks(a, b, one.tolist(), chunk=chunk).tolist() == expected
    lists = several(50, 70)
    found = ranks(a, b, lists, chunk=chunk)
    assert found.dtype is torch.long
    assert found.tolist() == by_sorting(scores, lists)


@pytest.mark.parametrize("width", [1, 5, 512])
def test_equal_features_rank_last_in_blocks_of_any_size(width):
    """One row of numbers with rounding errors in every sum; zeros; each is a tie of all."""
    for row in (features(1, width), torch.zeros(1, width), 1e-20 * features(1, width)):
        same = row.expand(33, -1)
        for chunk in (1, 3, 16, 32, 33):
            assert ranks(same, same, range(33), chunk=chunk).tolist() == [33] * 33
        lists = [[i, (i + 1) % 33, (i + 1) % 33] for i in range(33)]
        assert ranks(same, same, lists).tolist() == [32] * 33, "two of them are relevant"


def test_copies_tie_wherever_they_stand_and_other_precision_does_not():
    a, b = features(40, 384), features(40, 384, seed=1)
    doubled = torch.cat([b, b])
    alone = ranks(a, b, range(40))
    for chunk in (1, 9, 32, 80):
        assert torch.equal(ranks(a, doubled, range(40), chunk=chunk), 2 * alone)
    nearly = b * (1 - 3e-7)  # some steps of fp32 less: no tie
    positive = torch.where((a * b).sum(dim=1) > 0)[0]
    apart = ranks(a, torch.cat([b, nearly]), range(40))
    assert torch.equal(apart[positive], 2 * alone[positive] - 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_features_are_compared_in_full(dtype):
    a, b = features(30, 16).to(dtype), features(400, 16, seed=1).to(dtype)
    relevant = list(range(30))
    found = ranks(a, b, relevant)
    assert torch.equal(found, ranks(a.float(), b.float(), relevant))
    own = (a * b[:30]).sum(dim=1, keepdim=True)
    assert not torch.equal(found, ((a @ b.T) >= own).sum(dim=1)), "half precision makes ties"


def test_memory_is_that_of_a_block():
    n, chunk = 20_000, 1024
    a, b = features(n // 2, 4), features(n, 4, seed=1)
    peak = peak_bytes(lambda: ranks(a, b, range(n // 2), chunk=chunk))
    assert peak < 3 * 8 * chunk**2 + 100 * n, "the matrix would take 1.6 GB"


def test_several_captions_per_image_both_ways():
    image, text = grid(12, 5), grid(30, 5, seed=1)
    owner = torch.cat([torch.arange(12), torch.randint(12, (18,))])
    scores = (image @ text.T).numpy()
    captions = [np.flatnonzero(owner.numpy() == i).tolist() for i in range(12)]
    i2t = by_sorting(scores, captions)
    t2i = by_sorting(scores.T, [[int(i)] for i in owner])
    found = retrieval_ranks(image, text, owner, chunk=5)
    assert found["i2t"].tolist() == i2t
    assert found["t2i"].tolist() == t2i
    values = retrieval_metrics(image, text, owner.tolist(), ks=(1, 5, 12, 13))
    expected = {f"i2t_recall@{k}": 100 * np.mean(np.array(i2t) <= k) for k in (1, 5, 12, 13)}
    expected |= {f"t2i_recall@{k}": 100 * np.mean(np.array(t2i) <= k) for k in (1, 5, 12)}
    expected |= {"i2t_median_rank": np.median(i2t), "t2i_median_rank": np.median(t2i)}
    assert values == pytest.approx(expected), "13 of 12 images are left out"


def test_a_perfect_model_and_one_that_is_the_same_for_all():
    found = retrieval_metrics(torch.eye(20), torch.eye(20), range(20))
    assert found["t2i_recall@1"] == found["i2t_recall@10"] == 100
    assert found["t2i_median_rank"] == 1
    same = torch.ones(20, 8) / 8**0.5
    found = retrieval_metrics(same, same, range(20))
    assert found["t2i_recall@10"] == found["i2t_recall@10"] == 0
    assert found["i2t_median_rank"] == 20


def test_recall_of_one_pair_is_refused():
    one = features(1, 4)
    with pytest.raises(ValueError, match="recall needs 2 candidates or more, and there are 1"):
        retrieval_metrics(one, one, [0])
    with pytest.raises(ValueError, match="t2i recall needs 2 candidates"):
        retrieval_metrics(one, features(3, 4), [0, 0, 0])
    with pytest.raises(ValueError, match="more pairs"):
        rank_metrics(torch.ones(5), 1)
    assert ranks(one, one, [0]).tolist() == [1]


def test_bad_features_and_indices_are_named():
    a, b = features(4, 3), features(6, 3)
    for value in (float("nan"), float("inf")):
        broken = b.clone()
        broken[5, 1] = value
        with pytest.raises(ValueError, match="candidates must be finite; row 5"):
            ranks(a, broken, range(4), chunk=2)
        with pytest.raises(ValueError, match="queries must be finite; row 5"):
            ranks(broken, a, [0] * 6)
    for wrong, message in (
        ([0, 1, 2], "3 queries and must be of 4"),
        ([0, 1, 2, 6], r"relevant \(6\) must be indices of 6"),
        ([[0], [1], [-1], [2]], r"relevant \(-1\)"),
        ([[0], [], [1], [2]], "query 1 has no relevant candidate"),
        (torch.ones(4, 6, dtype=torch.bool), r"relevant \(True\)"),
        ([[0], [1.5], [1], [2]], r"relevant \(1.5\)"),
    ):
        with pytest.raises(ValueError, match=message):
            ranks(a, b, wrong)
    with pytest.raises(ValueError, match=r"\(4, 3\) and candidates \(6, 2\) must have one width"):
        ranks(a, b[:, :2], range(4))
    for wrong in (a[0], a.long(), a[:0]):
        with pytest.raises(ValueError, match=r"queries .* floating-point rows"):
            ranks(wrong, b, [0] * len(wrong))
    with pytest.raises(ValueError, match="chunk"):
        ranks(a, b, range(4), chunk=0)
    with pytest.raises(ValueError, match="image 2 has no caption"):
        retrieval_ranks(a[:3], b[:2], [0, 1])
    with pytest.raises(ValueError, match=r"image_of_text \(2,\).* each of 6 texts"):
        retrieval_ranks(a, b, [0, 1])


def reranked(scores: np.ndarray, match: np.ndarray, relevant: list[list[int]], k: int) -> list[int]:
    """The whole order of candidates of each query, and the first relevant one's place in it."""
    found = []
    for row, new, own in zip(scores, match, relevant, strict=True):
        late = np.isin(np.arange(len(row)), own)
        order = np.lexsort((late, -row))
        top, rest = order[:k], order[k:]
        top = top[np.lexsort((late[top], -new[top]))]
        found.append(int(np.flatnonzero(late[np.concatenate([top, rest])])[0]) + 1)
    return found


@pytest.mark.parametrize("k", [1, 4, 40, 99])
@pytest.mark.parametrize("matcher", [features, grid])
def test_reordering_equals_the_whole_matrix(k, matcher):
    a, b = features(25, 6), features(40, 6, seed=1)
    match = matcher(25, 40, seed=2)
    relevant, calls = several(25, 40, seed=3), []

    def match_fn(rows, columns):
        calls.append(list(zip(rows.tolist(), columns.tolist(), strict=True)))
        return match[rows, columns]

    found = rerank(a, b, relevant, match_fn, k=k, chunk=7, pairs=10)
    scores = (a.double() @ b.double().T).numpy()
    assert found.tolist() == reranked(scores, match.numpy(), relevant, k)
    asked = [pair for call in calls for pair in call]
    assert len({*asked}) == len(asked), "no pair twice"
    assert {len(call) for call in calls[:-1]} <= {10}
    hits = sum(rank <= k for rank in by_sorting(scores, relevant))
    assert len(asked) == hits * min(k, 40), "nothing is asked where the answer is known"


def test_reordering_counts_ties_against_the_model():
    """Where all is equal, the relevant candidate is not among the nearest, whatever the matcher."""
    for same in (torch.ones(9, 4) / 3, torch.zeros(9, 4)):
        found = rerank(same, same, range(9), lambda rows, columns: (rows == columns).float(), k=8)
        assert found.tolist() == [9] * 9
    found = rerank(
        torch.eye(9), torch.eye(9), range(9), lambda rows, _: torch.zeros(len(rows)), k=4
    )
    assert found.tolist() == [4] * 9, "a matcher that gives all the same score"
    perfect = rerank(features(9, 4), features(9, 4), range(9), lambda i, j: (i == j).float(), k=9)
    assert perfect.tolist() == [1] * 9


def test_bad_matchers_are_named():
    a = features(5, 4)
    with pytest.raises(ValueError, match=r"match_fn gave \(10, 2\) scores for 10 pairs"):
        rerank(a, a, range(5), lambda rows, _: torch.zeros(len(rows), 2), k=2)
    with pytest.raises(ValueError, match="match_fn gave scores that are not finite"):
        rerank(a, a, range(5), lambda rows, _: torch.full((len(rows),), float("nan")), k=2)
    for name in ("k", "pairs"):
        with pytest.raises(ValueError, match=name):
            rerank(a, a, range(5), lambda rows, _: torch.zeros(len(rows)), **{name: 0})


def test_recall_has_wilsons_interval():
    found = torch.tensor([1, 3, 5, 6, 2, 9])
    assert recall_interval(found, 5) == interval(4, 6)
    assert recall_interval(found, 1, confidence=0.9) == interval(1, 6, 0.9)
    with pytest.raises(ValueError, match="one query or more"):
        recall_interval(found[:0], 1)


def test_two_models_are_compared_query_by_query():
    rng = np.random.default_rng(0)
    first = torch.from_numpy(rng.integers(1, 9, 400))
    second = torch.where(torch.from_numpy(rng.random(400) < 0.6), first, first.flip(0))
    a, b = (first <= 3).numpy(), (second <= 3).numpy()
    found = compare_recall(first, second, 3)
    assert found.difference == pytest.approx(100 * (a.mean() - b.mean()))
    assert (found.only_first, found.only_second) == ((a & ~b).sum(), (b & ~a).sum())
    table = (a & ~b).sum(), (b & ~a).sum()
    # Twice the smaller tail of a fair coin, which is what McNemar's exact test is.
    tail = scipy.stats.binom.cdf(min(table), sum(table), 0.5)
    assert found.p_value == pytest.approx(min(1, 2 * tail))
    mean = scipy.stats.bootstrap(
        (a.astype(float) - b,), np.mean, n_resamples=4000, method="percentile", rng=rng
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((100 * mean.low, 100 * mean.high), abs=0.4)
    back = compare_recall(second, first, 3)
    assert (back.low, back.high) == pytest.approx((-found.high, -found.low))
    assert back.p_value == found.p_value
    with pytest.raises(ValueError, match="same queries"):
        compare_recall(first, second[:-1], 3)


@pytest.mark.parametrize("shares", [(0.2, 0.15, 0.05, 0.6), (0.02, 0.03, 0.0, 0.95)])
def test_the_interval_of_a_difference_holds_the_true_one(shares):
    """Both right, only the first, only the second, neither: 95 of 100 intervals hold it."""
    rng, inside = np.random.default_rng(0), []
    for counts in rng.multinomial(277, shares, size=400):
        right = torch.repeat_interleave(torch.arange(4), torch.from_numpy(counts))
        first, second = torch.where(right < 2, 1, 9), torch.where(right % 2 == 0, 1, 9)
        found = compare_recall(first, second, 1)
        inside.append(found.low <= 100 * (shares[1] - shares[2]) <= found.high)
    assert 0.92 <= np.mean(inside) <= 0.99


def test_models_that_never_differ():
    found = compare_recall(torch.tensor([1, 1, 9]), torch.tensor([1, 1, 9]), 1)
    assert (found.difference, found.p_value) == (0, 1)
    assert found.low < 0 < found.high
    found = compare_recall(torch.ones(30), torch.ones(30), 1)
    assert found.low < 0 < found.high
