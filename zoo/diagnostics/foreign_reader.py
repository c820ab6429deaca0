"""What a reader says of another library's attention: queries, keys, values, masks, scale.

Shapes: b batch, n tokens, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.layers.scores import as_autocast, attention_weights, score_range, without_autocast

Parts = Mapping[str, Tensor]  # what submodules put out, by name


@dataclass(frozen=True)
class Scores:
    """Weights before they are computed.

    Args:
        q: Queries (b h i e), with all that is done to them except the scale.
        k: Keys (b h j e).
        masks: Each None, bool with True = may attend, or floats that are added to the scores;
            broadcastable to (b h i j).
        scale: Factor on the scores; by default 1 / sqrt(e).
        v: Values (b h j e), where what heads put out cannot be seen.
    """

    q: Tensor
    k: Tensor
    masks: tuple[Tensor | None, ...] = ()
    scale: float | None = None
    v: Tensor | None = None

    def weights(self) -> Tensor:
        """(b h i j); rows of queries that may attend to nothing are zeros."""
        return self._measured(attention_weights)

    def logits(self) -> Tensor:
        """(b h i 2), the least and the largest score: `zoo.layers.score_range`."""
        return self._measured(score_range)

    def outputs(self) -> Tensor:
        """(b h i e), without dropout."""
        assert self.v is not None
        weights = self.weights()
        with without_autocast(weights):
            return weights @ self.v.to(weights.dtype)

    def _measured(self, measure: Callable[..., Tensor]) -> Tensor:
        allowed: Tensor | None = None
        bias: Tensor | None = None
        for mask in self.masks:
            if mask is None:
                continue
            mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
            may = mask if mask.dtype == torch.bool else ~mask.isneginf()
            allowed = may if allowed is None else allowed & may
            if mask.dtype != torch.bool:
                added = mask.masked_fill(~may, 0)
                bias = added if bias is None else bias + added
        if bias is not None:
            bias = self._within_reach(bias)
        return measure(self.q, self.k, allowed, bias=bias, scale=self.scale)

    def _within_reach(self, bias: Tensor) -> Tensor:
        """Masks by the least number of their type keep it finite in the type of the pass."""
        least = torch.finfo(as_autocast(self.q, self.k)[0].dtype).min
        return bias.clamp(min=least) if least > torch.finfo(bias.dtype).min else bias


@dataclass(frozen=True)
class Reader:
    """How the scores of a class come about.

    Args:
        scores: Called as `scores(module, parts, ...)`, the rest as the class's `forward`.
        parts: Submodules whose outputs it needs, where they run.
        merged: Submodules of which the first that there is takes what the heads put out, side by
            side (b n (h e)); none where that has to be computed from values.
    """

    scores: Callable[..., Scores]
    parts: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()

    def takes_outputs(self, module: nn.Module) -> nn.Module | None:
        """The submodule of `module` that takes what the heads put out."""
        found = (getattr(module, name, None) for name in self.merged)
        return next((part for part in found if isinstance(part, nn.Module)), None)


def heads_of(module: Any) -> int:
    """Number of heads, under either of its names."""
    return module.num_heads if hasattr(module, "num_heads") else module.num_attention_heads


def split(x: Tensor, num_heads: int) -> Tensor:
    """(b n (h e)) -> (b h n e)"""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def causal_mask(i: int, j: int, like: Tensor) -> Tensor:
    """As torch's kernels have it: aligned at the first query and key."""
    return torch.ones(i, j, dtype=torch.bool, device=like.device).tril()


def mask_of_windows(mask: Tensor | None, count: int) -> Tensor | None:
    """(w i j) -> ((b w) 1 i j), of `count` windows."""
    return None if mask is None else mask.repeat(count // len(mask), 1, 1)[:, None]
