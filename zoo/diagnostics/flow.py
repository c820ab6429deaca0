"""Attention through several layers: which tokens of the input reach a token of the last layer.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zoo.diagnostics.captured import checked
from zoo.layers.check import fraction

FUSIONS = ("mean", "max", "min")


def rollout(
    layers: Sequence[Tensor], *, residual: float = 0.5, fusion: str = "mean", discard: float = 0.0
) -> Tensor:
    """Attention rollout (arXiv 2005.00928): layers of (b h i j), i = j -> (b i j).

    The product of all layers' weights, each with heads fused and with the share that the residual
    branch carries past it. Row i says how much of each input token is in token i of the last layer
    if nothing but weighted sums took place: rows sum to 1. Causal layers give a causal product. A
    query that sees nothing keeps what it has, through the residual branch.

    Args:
        layers: From the first to the last; the number of heads may differ.
        residual: Share of the residual branch; the paper's is 0.5. With 0 a query that sees
            nothing has an empty row, and rows of those that look at it sum to less than 1.
        fusion: Of the heads: `mean`, `max`, or `min`.
        discard: Share of the keys that each query sees that is left out, from the least weight on,
            after fusion and before the rest is scaled to sum to 1. At least one key stays; of equal
            weights the first stay.

    Raises:
        ValueError: There is no layer, or the tokens are not the same throughout, as in
            cross-attention, in pooled stages, or with linformer.
    """
    if fusion not in FUSIONS:
        raise ValueError(f"fusion {fusion!r} must be one of {', '.join(map(repr, FUSIONS))}")
    residual, discard = fraction("residual", residual), fraction("discard", discard)
    if discard == 1:
        raise ValueError("discard (1) must be below 1, or nothing would be left")
    layers = [checked(weights) for weights in layers]
    _check_tokens(layers)
    b, _, n, _ = layers[0].shape
    own = torch.eye(n, dtype=layers[0].dtype, device=layers[0].device)
    reached = own.expand(b, n, n)
    for weights in layers:
        fused = _without_least(_fused(weights, fusion), discard)
        total = fused.sum(-1, keepdim=True)
        mixed = residual * own + (1 - residual) * fused / total.where(total != 0, 1)
        # All of a query that sees nothing is in the residual branch, if there is one.
        alone = mixed.sum(-1, keepdim=True)
        reached = (mixed / alone.where(alone != 0, 1)) @ reached
    return reached


def _check_tokens(layers: Sequence[Tensor]) -> None:
    shapes = [tuple(weights.shape) for weights in layers]
    if not shapes:
        raise ValueError("layers is empty: rollout needs the weights of one layer or more")
    b, _, n, _ = shapes[0]
    for place, shape in enumerate(shapes):
        if (shape[0], *shape[2:]) != (b, n, n):
            raise ValueError(
                f"layers[{place}] {shape} must be (b, h, i, j) = ({b}, any, {n}, {n}): rollout "
                "needs the same samples, and the same tokens as queries and keys, in all layers"
            )


def _fused(weights: Tensor, fusion: str) -> Tensor:
    """(b h i j) -> (b i j)"""
    if fusion == "mean":
        return weights.mean(1)
    return weights.amax(1) if fusion == "max" else weights.amin(1)


def _without_least(fused: Tensor, discard: float) -> Tensor:
    """Zeros for the share `discard` of each query's keys that have the least weight (b i j)."""
    if not discard:
        return fused
    seen = (fused != 0).sum(-1, keepdim=True)
    kept = seen - (discard * seen.double() + 1e-9).long()
    rank = fused.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return fused.masked_fill(rank >= kept, 0)
