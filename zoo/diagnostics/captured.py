"""What measures of captured attention have in common: checks of weights, and what could be seen.

A row of weights sums to 1, or is 0 for a query that sees nothing: such empty rows count in no mean.
A NaN among the weights makes a measure NaN, as in a log it should; measures that answer by counts
or truth values refuse it.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.layers.mask import Mask, MaskLike, check_broadcast

ROUNDING = 1e-2  # by which a row's sum may miss 1: that of weights in bf16


def checked(weights: Tensor, *, nan: bool = True) -> Tensor:
    """Weights (b h i j) in fp32, float64 as it is; refused unless rows sum to 1 or are empty.

    Args:
        nan: Whether a NaN may be among them.
    """
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        found = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"weights must be a tensor of floating-point numbers, got {found}")
    if weights.ndim != 4 or not weights.numel():
        raise ValueError(
            f"weights {tuple(weights.shape)} must be (b, h, i, j), none of them 0, as "
            "capture_attention gives them"
        )
    weights = weights if weights.dtype == torch.float64 else weights.float()
    sums = weights.sum(-1)
    if not nan and bool(sums.isnan().any()):
        raise ValueError(f"weights {tuple(weights.shape)} hold NaN, which has no place here")
    if weights.amin() < 0:
        raise ValueError(f"weights go down to {float(weights.amin()):.3g}, but must not be below 0")
    wrong = ((sums - 1).abs() > ROUNDING) & (sums != 0)
    if wrong.any():
        raise ValueError(
            f"weights have a row that sums to {float(sums[wrong][0]):.3g}; each must sum to 1 over "
            "the last axis, or to 0 for a query that sees nothing"
        )
    return weights


def queries_that_see(weights: Tensor) -> Tensor:
    """Which rows are not empty: (b h i j) -> bool (b h i)."""
    return weights.sum(-1) != 0


def visible_keys(weights: Tensor, mask: MaskLike) -> Tensor:
    """Which keys a query may see: bool (b h i j), or with 1 for any axis but the last.

    Args:
        weights: To be 0 on keys that may not be seen.
        mask: As the attention had it; None allows every key.
    """
    b, h, i, j = weights.shape
    rule = Mask.of(mask)
    if rule is None:
        return torch.ones(1, 1, 1, j, dtype=torch.bool, device=weights.device)
    rule.check((b, h, i, j))
    allowed = rule.lower(i, j, weights.device)
    check_broadcast(allowed, (b, h, i, j))
    allowed = allowed.expand(*allowed.shape[:3], j)
    forbidden = float(weights.masked_fill(allowed, 0).amax())
    if forbidden > 1e-6:  # what a finite fill, such as -100, leaves is less
        raise ValueError(
            f"mask forbids keys (False) that weights give up to {forbidden:.3g}; it must be the "
            "one that the attention had, with True = may attend"
        )
    return allowed
