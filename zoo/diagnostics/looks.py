"""What one look at a layer finds: a few numbers a head, of which logs and alarms are made.

Shapes: b samples, h heads, i/j query/key positions, c channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.diagnostics.captured import checked, queries_that_see
from zoo.diagnostics.gates import SATURATED, Range, gate_statistics
from zoo.diagnostics.heads import effective_heads, head_similarity
from zoo.diagnostics.measures import Pair, attention_distance, entropy
from zoo.layers.mask import MaskLike


@dataclass(frozen=True)
class LayerLook:
    """The attention of one layer at one step, a number a head (h); means over samples and queries.

    NaN for a head that sees nothing, and for one with a NaN among its weights.

    Attributes:
        entropy: Normalised: 0, each query takes one key, to 1, all that it may see alike.
        max_weight: The largest weight of a query, up to 1.
        top_key_share: Of the key of a sample that draws most, its share of all weight, up to 1.
        similarity: Of each two heads (h h), by cosine, 0 to 1.
        distance: See `attention_distance`; None without a grid.
        logits: Least and largest score over all samples and queries (h 2); None where not known.
        sees: Which heads see anything, bool (h).
        finite: Whether the weights, and the scores of queries that see something, are finite.
        keys: Keys a query chooses from: at most so many, by the weights' last axis.
        queries: Queries by sample, by the weights' axis before it.
    """

    entropy: Tensor
    max_weight: Tensor
    top_key_share: Tensor
    similarity: Tensor
    distance: Tensor | None
    logits: Tensor | None
    sees: Tensor
    finite: bool
    keys: int
    queries: int

    @property
    def num_heads(self) -> int:
        return len(self.sees)

    @property
    def empty(self) -> bool:
        """Whether no head sees anything."""
        return not bool(self.sees.any())

    def numbers(self) -> dict[str, float]:
        """Those that a training log keeps, over the heads that see something.

        - `entropy`, `entropy_min`, `entropy_max`: mean, least and most over heads;
        - `max_weight`: mean over heads;
        - `top_key_share`: of the head that is nearest to looking at one key whatever the query;
        - `head_similarity`: mean over pairs of heads; with 2 heads or more;
        - `effective_heads`: from it, 1 to h;
        - `distance`: mean over heads that look at patches; with a grid;
        - `logit_min`, `logit_max`: least and most over heads; where known.

        NaN where nothing is left, or weights are NaN.
        """
        heads = self.sees if not self.empty else ~self.sees
        entropies = self.entropy[heads]
        found = {
            "entropy": entropies.mean(),
            "entropy_min": entropies.amin(),
            "entropy_max": entropies.amax(),
            "max_weight": self.max_weight[heads].mean(),
            "top_key_share": self.top_key_share[heads].amax(),
        }
        similarity = self.similarity[heads][:, heads]
        if len(similarity) > 1:
            found["head_similarity"] = _between_heads(similarity)
        if self.distance is not None:
            broken = found["max_weight"].isnan()  # or NaN is of a head that looks at no patch
            found["distance"] = self.distance.mean() if broken else self.distance.nanmean()
        if self.logits is not None:
            logits = self.logits[heads]
            found["logit_min"], found["logit_max"] = logits[:, 0].amin(), logits[:, 1].amax()
        numbers = {name: float(value) for name, value in found.items()}
        return numbers | {"effective_heads": effective_heads(similarity)}


def look_at_layer(
    weights: Tensor,
    *,
    mask: MaskLike = None,
    grid: Pair | None = None,
    num_prefix_tokens: int = 0,
    patch_size: int | Pair | None = None,
    logits: Tensor | None = None,
) -> LayerLook:
    """A look at one layer's weights (b h i j).

    Queries and samples that see nothing are left out.

    Args:
        weights: As `capture_attention` gives them.
        mask: That of the attention, for the number of keys each query may see.
        grid: As `num_prefix_tokens` and `patch_size`, for `attention_distance`.
        logits: Least and largest score of each query (b h i 2), as `capture_attention` gives them;
            those of queries that see nothing do not count.
    """
    weights = checked(weights)
    sees = queries_that_see(weights)
    distance = None
    if grid is not None:
        by_sample = attention_distance(
            weights, grid, num_prefix_tokens=num_prefix_tokens, patch_size=patch_size
        )
        distance = by_sample.nanmean(0).masked_fill(weights.isnan().any(3).any(2).any(0), math.nan)
    bounds = None if logits is None else _bounds(logits, sees)
    seeing = sees.any(0).any(-1)
    whole = weights.sum().isfinite()
    if bounds is not None:
        whole &= bounds[seeing].isfinite().all()
    return LayerLook(
        entropy=_mean(_evenness(weights, mask), sees),
        max_weight=_mean(weights.amax(-1), sees),
        top_key_share=_top_key_share(weights, sees),
        similarity=head_similarity(weights, "cosine"),
        distance=distance,
        logits=bounds,
        sees=seeing,
        finite=bool(whole),
        keys=weights.shape[-1],
        queries=weights.shape[-2],
    )


def _bounds(logits: Tensor, sees: Tensor) -> Tensor:
    """(b h i 2) -> (h 2), over samples and the queries that see something"""
    if logits.shape != (*sees.shape, 2):
        raise ValueError(
            f"logits {tuple(logits.shape)} must be (b, h, i, 2) = {(*sees.shape, 2)}, least and "
            "largest score of each query, as the weights are"
        )
    low = logits[..., 0].masked_fill(~sees, math.inf).amin((0, 2))
    high = logits[..., 1].masked_fill(~sees, -math.inf).amax((0, 2))
    unseen = ~sees.any(0).any(-1)
    return torch.stack([low, high], -1).masked_fill(unseen[:, None], math.nan)


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


def _between_heads(similarity: Tensor) -> Tensor:
    """Mean over pairs of heads: (h h) -> ()"""
    h = len(similarity)
    return (similarity.sum() - similarity.trace()) / (h * (h - 1))


@dataclass(frozen=True)
class GateLook:
    """The gates of one layer at one step; NaN where a gate is, or its range is not known.

    Attributes:
        mean: Over samples and channels.
        spread: Standard deviation over channels of their means.
        sample_spread: Standard deviation over samples, mean over channels; 0 with one sample.
        dead: Share of channels that are shut for every sample: within 5 % of the range from 0, or
            exactly 0 where it has no end. 0 where the range does not begin at 0: tanh's 0 lies in
            its middle, where it learns best.
        saturated: Share of all values within 5 % of the range from either end; where one end is
            infinite, of those exactly at the other.
        channels: c.
    """

    mean: float
    spread: float
    sample_spread: float
    dead: float
    saturated: float
    channels: int

    @property
    def finite(self) -> bool:
        return math.isfinite(self.mean) and math.isfinite(self.sample_spread)

    def numbers(self) -> dict[str, float]:
        """Those that a training log keeps: all but the number of channels."""
        names = ("mean", "spread", "sample_spread", "dead", "saturated")
        return {name: getattr(self, name) for name in names}


def look_at_gates(gates: Tensor, gate_range: Range | None = (0.0, 1.0)) -> GateLook:
    """A look at one layer's gates (b c ...), averaged over further axes such as places.

    Args:
        gates: As `capture_gates` gives them.
        gate_range: Limits of the gate, see `gate_ranges`; without them `dead` and `saturated` are
            NaN.
    """
    if gates.ndim < 2 or not gates.numel() or not gates.is_floating_point():
        raise ValueError(
            f"gates must be floating-point numbers (b, c, ...), none of them 0, got {gates.dtype}, "
            f"{tuple(gates.shape)}"
        )
    found = gate_statistics(gates, torch.zeros(len(gates), dtype=torch.long), gate_range)
    return GateLook(
        mean=found.mean,
        spread=found.channel_spread,
        sample_spread=found.sample_spread,
        dead=_dead(gates.detach(), gate_range),
        saturated=found.saturation,
        channels=gates.shape[1],
    )


def _dead(gates: Tensor, gate_range: Range | None) -> float:
    """Share of channels that are shut for all samples and places: (b c ...)."""
    low, high = gate_range or (0.0, 0.0)
    if not low < high or gates.isnan().any():
        return math.nan
    if low != 0:
        return 0.0
    margin = SATURATED * high if math.isfinite(high) else 0.0
    shut = (gates <= margin).transpose(0, 1).flatten(1).all(1)  # c
    return float(shut.double().mean())
