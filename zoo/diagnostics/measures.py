"""Measures of attention weights, as pure functions.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def entropy(weights: Tensor, *, normalized: bool = False) -> Tensor:
    """Entropy of each query's weights in nats: (b h i j) -> (b h i).

    Between 0, all weight on one key, and ln j, all keys alike. 0 for a query without any weight.

    Args:
        weights: As `capture_attention` gives them: rows sum to 1, or to 0.
        normalized: Divides by the logarithm of the number of keys: from 0 to 1. That number is all
            of j, masked keys included, so that samples of other lengths can be compared.
    """
    found = torch.special.entr(weights.float()).sum(-1)
    if not normalized:
        return found
    if weights.shape[-1] < 2:
        raise ValueError(f"weights {tuple(weights.shape)} need 2 keys or more to be normalised")
    return found / math.log(weights.shape[-1])
