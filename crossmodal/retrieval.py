"""Retrieval among many candidates: ranks, recall and its intervals, reordering by a matcher.

Similarity is the dot product, computed in float64 for a block of queries and candidates at a time:
100,000 x 100,000 fit in memory, and the size of the blocks changes no rank. Ties count against the
model: one that gives everything the same features ranks last, not first.

Shapes: q queries, c candidates, e width of their features, k candidates that are reordered,
p pairs of a query and a candidate, m images, t texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vision.evaluate import interval
from zoo.layers.check import integer, is_integer

Relevant = Tensor | Sequence[int] | Sequence[Sequence[int]]
MatchFn = Callable[[Tensor, Tensor], Tensor]
KS = (1, 5, 10)


@torch.no_grad()
def ranks(queries: Tensor, candidates: Tensor, relevant: Relevant, *, chunk: int = 2048) -> Tensor:
    """Rank, from 1, of each query's best relevant candidate among all that are not relevant.

    Args:
        queries: Features (q e), of any floating-point precision, on any device with float64.
        candidates: Features (c e), on the same device.
        relevant: Index of the relevant candidate for each query, or a list of indices for each.
        chunk: Queries, and candidates, that are compared at a time.

    Returns:
        (q,) long. Irrelevant candidates as similar as the relevant one stand before it; other
        relevant candidates do not.

    Raises:
        ValueError: widths that differ, features that are not finite, indices out of range, a query
            without a relevant candidate.
    """
    return _Search(queries, candidates, relevant, chunk).ranks()


@torch.no_grad()
def rerank(
    queries: Tensor,
    candidates: Tensor,
    relevant: Relevant,
    match_fn: MatchFn,
    *,
    k: int = 10,
    pairs: int = 256,
    chunk: int = 2048,
) -> Tensor:
    """Ranks, as `ranks` gives them, once a matcher has reordered the `k` nearest candidates.

    The features find the `k` nearest candidates of each query, and `match_fn` orders them by
    looking at each pair (as ALBEF is evaluated, arXiv 2107.07651). All others keep their places
    behind these. Ties count against the relevant candidates here too: at the border of the `k`,
    those that are irrelevant and equally near come first; which of these enter is not defined.

    Args:
        queries, candidates, relevant, chunk: As for `ranks`.
        match_fn: Scores (p,) for query indices (p,) and candidate indices (p,), higher for a
            better match. Queries with no relevant candidate among the `k` are not asked about:
            their rank is known.
        k: Candidates to reorder; all of them where there are fewer.
        pairs: Pairs per call of `match_fn`, its last call having fewer.
    """
    k, pairs = min(integer("k", k), len(candidates)), integer("pairs", pairs)
    search = _Search(queries, candidates, relevant, chunk)
    found, nearest = search.ranks(), search.nearest(k)
    right = search.is_relevant(nearest)
    asked = right.any(dim=1).nonzero()[:, 0]
    if len(asked):
        right, columns = right[asked], nearest[asked]
        scores = _match(match_fn, asked.repeat_interleave(k), columns.flatten(), pairs)
        scores = scores.view(-1, k)
        best = scores.masked_fill(~right, -math.inf).amax(dim=1, keepdim=True)
        found[asked] = 1 + ((scores >= best) & ~right).sum(dim=1)
    return found


def retrieval_ranks(
    image: Tensor, text: Tensor, image_of_text: Tensor | Sequence[int], *, chunk: int = 2048
) -> dict[str, Tensor]:
    """Ranks both ways: `i2t` (m,) of each image's best caption, `t2i` (t,) of each caption's image.

    Args:
        image: Features (m e).
        text: Features (t e) of their captions, one or several for each image.
        image_of_text: Index of each caption's image (t,).
        chunk: As for `ranks`.
    """
    owners = torch.as_tensor(image_of_text)
    if owners.shape != (len(text),):
        raise ValueError(
            f"image_of_text {tuple(owners.shape)} must name an image for each of {len(text)} texts"
        )
    found = {"t2i": ranks(text, image, owners, chunk=chunk)}  # checks the range of owners
    captions: list[list[int]] = [[] for _ in range(len(image))]
    for caption, owner in enumerate(owners.tolist()):
        captions[owner].append(caption)
    without = next((i for i, own in enumerate(captions) if not own), None)
    if without is not None:
        raise ValueError(f"image {without} has no caption: leave it out")
    return {"i2t": ranks(image, text, captions, chunk=chunk), **found}


def retrieval_metrics(
    image: Tensor,
    text: Tensor,
    image_of_text: Tensor | Sequence[int],
    *,
    ks: Sequence[int] = KS,
    chunk: int = 2048,
) -> dict[str, float]:
    """`i2t_recall@K`, `i2t_median_rank`, `t2i_recall@K` and `t2i_median_rank`; recall in percent.

    A K above the number of candidates is left out. Arguments as for `retrieval_ranks`.

    Raises:
        ValueError: fewer than two candidates, among others.
    """
    candidates = {"i2t": len(text), "t2i": len(image)}
    for direction, number in candidates.items():
        _check_choice(number, f"{direction} ")
    found = retrieval_ranks(image, text, image_of_text, chunk=chunk)
    return {
        f"{direction}_{name}": value
        for direction, number in candidates.items()
        for name, value in rank_metrics(found[direction], number, ks=ks).items()
    }


def rank_metrics(ranks: Tensor, num_candidates: int, *, ks: Sequence[int] = KS) -> dict[str, float]:
    """`recall@K` in percent for each K of at most `num_candidates`, and `median_rank`."""
    _check_choice(num_candidates)
    values = {f"recall@{k}": _recall(ranks, k) for k in ks if integer("k", k) <= num_candidates}
    return {**values, "median_rank": float(ranks.double().quantile(0.5))}


def recall_interval(ranks: Tensor, k: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of recall@k over independent queries, in percent."""
    return interval(int(_hits(ranks, k).sum()), len(ranks), confidence)


class PairedRecall(NamedTuple):
    """Two models' recall on the same queries.

    Attributes:
        difference: Recall of the first less that of the second, in points.
        low, high: Its interval.
        only_first, only_second: Queries that one of them gets right and the other does not.
        p_value: Of the exact test that both kinds of query are equally likely (McNemar's).
    """

    difference: float
    low: float
    high: float
    only_first: int
    only_second: int
    p_value: float


def compare_recall(first: Tensor, second: Tensor, k: int, confidence: float = 0.95) -> PairedRecall:
    """Compares recall@k of two models from their ranks (q,) for the same independent queries.

    The interval is Newcombe's for paired shares (method 10 of PMID 9839354), which also holds for
    few queries and for models that hardly differ.
    """
    from scipy.stats import binomtest

    if first.shape != second.shape:
        raise ValueError(
            f"ranks {tuple(first.shape)} and {tuple(second.shape)} must be of the same queries"
        )
    a, b = _hits(first, k).cpu(), _hits(second, k).cpu()
    only_a, only_b = int((a & ~b).sum()), int((b & ~a).sum())
    both, neither = int((a & b).sum()), int((~a & ~b).sum())
    unequal = only_a + only_b
    p_value = float(binomtest(only_a, unequal).pvalue) if unequal else 1.0
    low, high = _newcombe(both, only_a, only_b, neither, confidence)
    return PairedRecall(100 * (only_a - only_b) / len(a), low, high, only_a, only_b, p_value)


def _newcombe(
    both: int, only_a: int, only_b: int, neither: int, confidence: float
) -> tuple[float, float]:
    """Interval of the share right in a less that in b, in points: both Wilson intervals, joined."""
    n = both + only_a + only_b + neither
    a, b = 100 * (both + only_a) / n, 100 * (both + only_b) / n
    low_a, high_a = interval(both + only_a, n, confidence)
    low_b, high_b = interval(both + only_b, n, confidence)
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    excess: float = both * neither - only_a * only_b
    if excess > 0:
        excess = max(excess - n / 2, 0)  # Newcombe's correction for continuity
    phi = excess / math.sqrt(margins) if margins else 0.0

    def joined(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))

    return a - b - joined(a - low_a, high_b - b), a - b + joined(high_a - a, b - low_b)


def _hits(ranks: Tensor, k: int) -> Tensor:
    if ranks.ndim != 1 or not len(ranks):
        raise ValueError(f"ranks {tuple(ranks.shape)} must be (q,), of one query or more")
    return ranks <= integer("k", k)


def _recall(ranks: Tensor, k: int) -> float:
    hits = _hits(ranks, k)
    return 100 * int(hits.sum()) / len(hits)


def _check_choice(num_candidates: int, prefix: str = "") -> None:
    if num_candidates < 2:
        raise ValueError(
            f"{prefix}recall needs 2 candidates or more, and there are {num_candidates}: "
            "the only one ranks first whatever the model does; evaluate on more pairs"
        )


def _match(match_fn: MatchFn, rows: Tensor, columns: Tensor, pairs: int) -> Tensor:
    """Scores of all pairs (p,) in float64, `pairs` per call."""
    scores = []
    for row, column in zip(rows.split(pairs), columns.split(pairs), strict=True):
        part = match_fn(row, column)
        if part.shape != row.shape:
            raise ValueError(f"match_fn gave {tuple(part.shape)} scores for {len(row)} pairs")
        if not part.isfinite().all():
            raise ValueError("match_fn gave scores that are not finite")
        scores.append(part.to(rows.device).double())
    return torch.cat(scores)


class _Search:
    """Queries against candidates, block by block, with the pairs that are relevant."""

    def __init__(self, queries: Tensor, candidates: Tensor, relevant: Relevant, chunk: int) -> None:
        self.chunk = integer("chunk", chunk)
        self.queries, self.candidates = queries, candidates
        lengths = self._lengths("queries", queries), self._lengths("candidates", candidates)
        if queries.shape[1] != candidates.shape[1]:
            raise ValueError(
                f"queries {tuple(queries.shape)} and candidates {tuple(candidates.shape)} "
                "must have one width"
            )
        self.rows, self.columns = _pairs(relevant, len(queries), len(candidates), queries.device)
        # Two sums of the same e products differ by less than this in whatever order they are
        # added up, so that equal features tie wherever they stand; it is above 0 for zeros too.
        limits = torch.finfo(torch.float64)
        width = queries.shape[1]
        self.slack = 2 * width * limits.eps * lengths[0] * lengths[1].max() + limits.tiny

    def _lengths(self, name: str, features: Tensor) -> Tensor:
        """Length of each row; refuses what is no finite matrix."""
        if features.ndim != 2 or not len(features) or not features.is_floating_point():
            raise ValueError(
                f"{name} {tuple(features.shape)} {features.dtype} must be floating-point rows, "
                "one or more (n e)"
            )
        lengths = torch.cat([part.double().norm(dim=1) for part in features.split(self.chunk)])
        if not lengths.isfinite().all():
            row = int(lengths.isfinite().logical_not().nonzero()[0])
            raise ValueError(f"{name} must be finite; row {row} is not")
        return lengths

    def ranks(self) -> Tensor:
        ahead = torch.zeros(len(self.queries), dtype=torch.long, device=self.queries.device)
        level = (self._best() - self.slack)[:, None]
        for rows, _, scores, own in self._blocks():
            before = scores >= level[rows]
            before[own] = False
            ahead[rows] += before.sum(dim=1)
        return ahead + 1

    def nearest(self, k: int) -> Tensor:
        """Columns of the k nearest candidates (q k), relevant ones last among equals."""
        shape, device = (len(self.queries), k), self.queries.device
        top = torch.full(shape, -math.inf, dtype=torch.float64, device=device)
        found = torch.zeros(shape, dtype=torch.long, device=device)
        for rows, columns, scores, own in self._blocks():
            scores[own] -= self.slack[rows][own[0]]
            top[rows], places = torch.cat([top[rows], scores], dim=1).topk(k)
            new = torch.arange(columns.start, columns.stop, device=device)
            known = torch.cat([found[rows], new.expand_as(scores)], dim=1)
            found[rows] = known.gather(1, places)
        return found

    def is_relevant(self, columns: Tensor) -> Tensor:
        """Whether candidates (q k) are relevant to their row's query."""
        width = len(self.candidates)
        rows = torch.arange(len(columns), device=columns.device)[:, None]
        return torch.isin(rows * width + columns, self.rows * width + self.columns)

    def _best(self) -> Tensor:
        """Similarity of each query to its best relevant candidate (q,)."""
        best = self.slack.new_full((len(self.queries),), -math.inf)
        parts = self.rows.split(self.chunk), self.columns.split(self.chunk)
        for rows, columns in zip(*parts, strict=True):
            products = self.queries[rows].double() * self.candidates[columns].double()
            best.scatter_reduce_(0, rows, products.sum(dim=1), "amax")
        return best

    def _blocks(self) -> Iterator[tuple[slice, slice, Tensor, tuple[Tensor, Tensor]]]:
        """Rows, columns, their similarities, and where among them the relevant pairs are."""
        for rows in _slices(len(self.queries), self.chunk):
            queries = self.queries[rows].double()
            border = self.rows.new_tensor([rows.start, rows.stop])
            first, last = torch.searchsorted(self.rows, border).tolist()
            row, column = self.rows[first:last] - rows.start, self.columns[first:last]
            for columns in _slices(len(self.candidates), self.chunk):
                here = (column >= columns.start) & (column < columns.stop)
                scores = queries @ self.candidates[columns].double().T
                yield rows, columns, scores, (row[here], column[here] - columns.start)


def _slices(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, length)) for start in range(0, length, chunk))


def _pairs(
    relevant: Relevant, num_queries: int, num_candidates: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The relevant pairs as query indices (p,), in order, and candidate indices (p,)."""
    given: Sequence[Any] = relevant.tolist() if isinstance(relevant, Tensor) else relevant
    lists = [[item] if is_integer(item) else list(item) for item in given]
    if len(lists) != num_queries:
        raise ValueError(f"relevant is of {len(lists)} queries and must be of {num_queries}")
    empty = next((i for i, own in enumerate(lists) if not own), None)
    if empty is not None:
        raise ValueError(f"query {empty} has no relevant candidate: leave it out")
    flat = [index for own in lists for index in own]
    wrong = next((x for x in flat if not (is_integer(x) and 0 <= x < num_candidates)), None)
    if wrong is not None:
        raise ValueError(
            f"relevant ({wrong!r}) must be indices of {num_candidates} candidates, from 0"
        )
    counts = torch.tensor([len(own) for own in lists], device=device)
    rows = torch.arange(num_queries, device=device).repeat_interleave(counts)
    return rows, torch.tensor(flat, device=device)
