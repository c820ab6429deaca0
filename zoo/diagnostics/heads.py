"""Whether the heads of a layer look at the same: similarity by pairs, and how many there are in it.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import Tensor

from zoo.diagnostics.captured import checked, queries_that_see

KINDS = ("js", "cosine")


def head_similarity(weights: Tensor, kind: str = "js") -> Tensor:
    """How alike each two heads look, mean over samples and queries: (b h i j) -> (h h).

    From 0, no key in common, to 1, the same weights; symmetric. arXiv 1906.04341, section 6,
    compares heads by their Jensen-Shannon divergence. A query counts for two heads where it sees
    something in both; NaN where there is none.

    Args:
        weights: As `capture_attention` gives them.
        kind: `js`: 1 less the Jensen-Shannon divergence over ln 2, its largest value; `cosine`: the
            cosine of the angle between the two rows, a matrix product and so far cheaper.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} must be one of {', '.join(map(repr, KINDS))}")
    weights = checked(weights)
    similar = _shannon(weights) if kind == "js" else _cosine(weights)  # b i h h
    sees = queries_that_see(weights).transpose(1, 2)  # b i h
    both = sees[..., None] & sees[..., None, :]
    return similar.clamp(0, 1).masked_fill(~both, 0).sum((0, 1)) / both.sum((0, 1))


def _cosine(weights: Tensor) -> Tensor:
    rows = weights.transpose(1, 2)  # b i h j
    products = rows @ rows.mT
    norms = products.diagonal(dim1=-2, dim2=-1).sqrt()
    return products / (norms[..., None] * norms[..., None, :])  # NaN for empty rows


def _shannon(weights: Tensor) -> Tensor:
    own = _entropy(weights)  # b h i
    similar = torch.diag_embed(1 + 0 * own.transpose(1, 2))  # b i h h, and NaN stays NaN
    for one, other in combinations(range(weights.shape[1]), 2):
        mixed = _entropy((weights[:, one] + weights[:, other]) / 2)
        divergence = mixed - (own[:, one] + own[:, other]) / 2
        similar[..., one, other] = similar[..., other, one] = 1 - divergence / math.log(2)
    return similar


def _entropy(rows: Tensor) -> Tensor:
    return torch.special.entr(rows).sum(-1)


def effective_heads(similarity: Tensor) -> float:
    """How many different heads there are: 1, all alike, to h, no two with anything in common.

    Exponential of the entropy of the eigenvalues of `similarity / h`, which is the Vendi score of
    the heads (arXiv 2210.02410). NaN where a similarity is NaN.

    Args:
        similarity: From `head_similarity` (h h).
    """
    _check_similarity(similarity)
    if similarity.isnan().any():
        return math.nan
    # Pairs that count different queries can give values a little below 0.
    values = torch.linalg.eigvalsh(similarity.double()).clamp(min=0)
    return float(_entropy(values / values.sum()).exp())


def _check_similarity(similarity: Tensor) -> None:
    shape = tuple(similarity.shape)
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise ValueError(f"similarity {shape} must be (h, h), as head_similarity gives it")
    if not torch.allclose(similarity, similarity.mT, atol=1e-4, equal_nan=True):
        raise ValueError(f"similarity {shape} must be symmetric")
    if ((similarity.diagonal() - 1).abs() > 1e-4).any():
        raise ValueError(f"similarity {shape} must be 1 of a head with itself")
    if (similarity < -1e-4).any() or (similarity > 1 + 1e-4).any():
        raise ValueError(f"similarity {shape} must lie in [0, 1]")
