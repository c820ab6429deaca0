"""The few numbers on a layer's attention that a training log keeps.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from torch import Tensor

from zoo.diagnostics.captured import checked, queries_that_see
from zoo.diagnostics.heads import effective_heads, head_similarity
from zoo.diagnostics.measures import Pair, attention_distance, entropy
from zoo.layers.mask import MaskLike


def summary(
    weights: Tensor,
    *,
    mask: MaskLike = None,
    grid: Pair | None = None,
    num_prefix_tokens: int = 0,
    patch_size: int | Pair | None = None,
) -> dict[str, float]:
    """Numbers on one layer's weights (b h i j); means are over samples and queries.

    - `entropy`, `entropy_min`, `entropy_max`: mean, least and most over heads of the normalised
      entropy, 0 (each query takes one key) to 1 (all that it may see alike);
    - `max_weight`: the largest weight of a query, mean over heads, up to 1;
    - `top_key_share`: of the head that is nearest to looking at one key whatever the query, the
      share of weight that this key of a sample draws, up to 1;
    - `head_similarity`: mean over pairs of heads, by cosine, 0 to 1; with 2 heads or more;
    - `effective_heads`: from it, 1 to h;
    - `distance`: see `attention_distance`, mean over samples and heads; with a grid.

    Queries and heads that see nothing are left out. NaN where nothing is left, or weights are NaN.

    Args:
        weights: As `capture_attention` gives them.
        mask: That of the attention, for the number of keys each query may see.
        grid: As `num_prefix_tokens` and `patch_size`, for `attention_distance`.
    """
    weights = checked(weights)
    sees = queries_that_see(weights)
    heads = sees.any(0).any(-1)
    heads = heads if heads.any() else ~heads  # with none all numbers come out as 0 / 0
    by_head = _mean(_evenness(weights, mask), sees)[heads]
    found = {
        "entropy": by_head.mean(),
        "entropy_min": by_head.amin(),
        "entropy_max": by_head.amax(),
        "max_weight": _mean(weights.amax(-1), sees)[heads].mean(),
        "top_key_share": _top_key_share(weights, sees)[heads].amax(),
    }
    similarity = head_similarity(weights, "cosine")[heads][:, heads]
    h = len(similarity)
    if h > 1:
        found["head_similarity"] = (similarity.sum() - similarity.trace()) / (h * (h - 1))
    if grid is not None:
        distances = attention_distance(
            weights, grid, num_prefix_tokens=num_prefix_tokens, patch_size=patch_size
        )
        broken = found["max_weight"].isnan()  # or NaN is of a head that looks at no patch
        found["distance"] = distances.mean() if broken else distances.nanmean()
    numbers = {name: float(value) for name, value in found.items()}
    return numbers | {"effective_heads": effective_heads(similarity)}


def _evenness(weights: Tensor, mask: MaskLike) -> Tensor:
    """(b h i j) -> (b h i)"""
    if weights.shape[-1] < 2:  # no choice
        return weights.sum(-1) * 0
    return entropy(weights, normalized=True, mask=mask)


def _mean(values: Tensor, sees: Tensor) -> Tensor:
    """Over samples and the queries that see something: (b h i) -> (h)."""
    return values.masked_fill(~sees, 0).sum((0, 2)) / sees.sum((0, 2))


def _top_key_share(weights: Tensor, sees: Tensor) -> Tensor:
    """(b h i j) -> (h), mean over the samples that see something"""
    queries = sees.sum(2)  # b h
    top = weights.sum(2).amax(-1) / queries.clamp(min=1)
    return top.sum(0) / (queries > 0).sum(0)
