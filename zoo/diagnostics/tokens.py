"""Tokens that stand out: those that draw weight from all queries, and those of a large norm.

Shapes: b batch, h heads, i/j query/key positions, n tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.diagnostics.captured import checked, queries_that_see, visible_keys
from zoo.layers.check import positive
from zoo.layers.mask import MaskLike

NORMAL = 0.6745  # a normal distribution's median absolute deviation, in standard deviations


def position_bias(weights: Tensor, *, mask: MaskLike = None) -> Tensor:
    """How many times its fair share each place draws: (b h i j) -> (j).

    The weight of a key, mean over samples, heads and queries, over what it would be if each query
    gave the keys it may see the same: 1 everywhere without bias, from 0 to j. Of language models
    that read the first and the last best: arXiv 2307.03172. NaN for a key that nobody may see.

    Args:
        weights: As `capture_attention` gives them.
        mask: That of the attention. Without it all keys may be seen, and under a causal mask the
            first ones, which more queries see, seem to draw more.
    """
    return _times_fair_share(checked(weights), mask, (0, 1, 2))


def attention_received(weights: Tensor, *, mask: MaskLike = None) -> Tensor:
    """How many times its fair share each key draws in each head: (b h i j) -> (b h j).

    As `position_bias`, mean over queries alone.
    """
    return _times_fair_share(checked(weights), mask, (2,))


def sink_tokens(weights: Tensor, threshold: float, *, mask: MaskLike = None) -> Tensor:
    """Keys that draw more than `threshold` times their fair share: (b h i j) -> bool (b h j).

    Attention sinks (arXiv 2309.17453): tokens that most queries look at whatever they say, often
    the first one, or the background of an image.

    Args:
        weights: As `capture_attention` gives them, without NaN.
        threshold: On `attention_received`, which is at most j.
        mask: That of the attention, such as `Mask.causal()`.
    """
    threshold = positive("threshold", threshold)
    return _times_fair_share(checked(weights, nan=False), mask, (2,)) > threshold


def _times_fair_share(weights: Tensor, mask: MaskLike, axes: tuple[int, ...]) -> Tensor:
    allowed = visible_keys(weights, mask)
    sees = queries_that_see(weights)[..., None].to(weights.dtype)  # b h i 1
    fair = sees * (allowed / allowed.sum(-1, keepdim=True).clamp(min=1))  # b h i j
    return weights.sum(axes) / fair.sum(axes)


def outlier_norms(
    norms: Tensor, threshold: float = 3.5, *, counted: Tensor | None = None
) -> Tensor:
    """Tokens whose norm is far above the others' of their sample: (b n) -> bool (b n).

    Such tokens of ViTs keep what the whole image is about in patches of little content, and go
    where there are registers (arXiv 2309.16588). That paper cuts at a norm read off a histogram;
    here a norm is an outlier by its robust z, its distance from the median over the median absolute
    deviation (Iglewicz and Hoaglin 1993, whose threshold is 3.5).

    Args:
        norms: Of the tokens, finite (b n).
        threshold: In standard deviations of normally distributed norms.
        counted: Tokens to compare (b n) or (n); others, such as padding and the class token, are no
            outliers.
    """
    threshold = positive("threshold", threshold)
    norms, counted = _checked_norms(norms, counted)
    values = norms.masked_fill(~counted, torch.nan)
    median = values.nanquantile(0.5, dim=-1, keepdim=True)
    away = values - median
    deviation = away.abs().nanquantile(0.5, dim=-1, keepdim=True) / NORMAL
    # Where most are the same, rounding is no outlier.
    return away > threshold * deviation.maximum(1e-5 * median)


def _checked_norms(norms: Tensor, counted: Tensor | None) -> tuple[Tensor, Tensor]:
    if norms.ndim != 2 or not norms.numel() or not norms.is_floating_point():
        raise ValueError(
            f"norms must be floating-point numbers (b, n), got {norms.dtype}, {tuple(norms.shape)}"
        )
    if counted is None:
        counted = torch.ones_like(norms, dtype=torch.bool)
    if counted.dtype != torch.bool or counted.shape not in (norms.shape, norms.shape[1:]):
        raise ValueError(
            f"counted must be bool, (b, n) = {tuple(norms.shape)} or (n,), got {counted.dtype}, "
            f"{tuple(counted.shape)}"
        )
    norms = norms if norms.dtype == torch.float64 else norms.float()
    counted = counted.to(norms.device).expand_as(norms)
    bad = norms[counted & ~((norms >= 0) & norms.isfinite())]
    if len(bad):
        raise ValueError(f"norms hold {float(bad[0])}, but must be finite and not below 0")
    return norms, counted
