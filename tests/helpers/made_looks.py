"""Looks at weights that are made up, for tests of alarms."""

from __future__ import annotations

import torch
from torch import Tensor

from zoo.diagnostics.looks import GateLook, LayerLook, look_at_layer

B, H, N = 2, 3, 8


def look(weights: Tensor, score: float | None = None) -> LayerLook:
    logits = None if score is None else torch.tensor([-score, score]).expand(*weights.shape[:3], 2)
    return look_at_layer(weights, logits=logits)


def one_key(share: float, keys: Tensor | int = 0) -> Tensor:
    """Each query gives `share` to a key, the same for all or its own, and the others the rest."""
    weights = torch.full((B, H, N, N), (1 - share) / (N - 1))
    places = torch.as_tensor(keys).expand(N)
    return weights.scatter(3, places.expand(B, H, N)[..., None], share)


EVEN = look(torch.full((B, H, N, N), 1 / N))
OPEN = GateLook(0.5, 0.2, 0.1, 0.0, 0.1, 16)
