"""The attention core: the only softmax(Q K^T) V of the project.

`attend` runs torch's fused kernels, or the formula written out (`fused=False`, or anywhere inside
`explicit_attention()`), with the same values. On either path a query with nothing to attend to
gives zeros and zero gradients, and what stands in a key that no query may see cannot leak.

Shapes: b batch, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.layers.mask import Causal, Mask, MaskLike, Padding
from zoo.layers.scores import (
    added_scores,
    as_autocast,
    attention_weights,
    check_shapes,
    dot_scores,
    lower_mask,
    range_of,
    score_range,
    weights_of,
    without_autocast,
)
from zoo.layers.tap import Tap

_explicit_depth = 0


@contextmanager
def explicit_attention() -> Iterator[None]:
    """Inside the context all attention is computed by the written-out formula."""
    global _explicit_depth
    _explicit_depth += 1
    try:
        yield
    finally:
        _explicit_depth -= 1


def explicit_now() -> bool:
    return _explicit_depth > 0


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: MaskLike = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    tap: Tap | None = None,
    fused: bool | None = None,
) -> Tensor:
    """(b h i e), (b h j e), (b h j e2) -> (b h i e2): scaled dot product (arXiv 1706.03762).

    Args:
        mask: None, a `Mask`, or a bool tensor broadcastable to (b h i j); True = may attend.
        bias: Added to the scaled scores; float, broadcastable to (b h i j).
        scale: Factor on the scores; by default 1 / sqrt(e).
        dropout_p: Dropout rate of the weights; 0 outside training.
        tap: Shown the weights before dropout, and the range of the scores, if observed. Never
            changes the output.
        fused: False computes the formula step by step; by default a fused kernel.
    """
    q, k, v = as_autocast(q, k, v)
    check_shapes(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if tap is not None and tap.active:
        tap.record(lambda: attention_weights(q, k, mask, bias=bias, scale=scale))
        tap.show("logits", lambda: score_range(q, k, mask, bias=bias, scale=scale))
    explicit = fused is False or explicit_now()
    mask = Mask.of(mask)
    if bias is None and not explicit:
        if isinstance(mask, Causal) and q.shape[-2] == k.shape[-2]:
            return _fused(q, k, v, None, dropout_p, scale, causal=True)
        lengths = _lengths(mask, q, k)
        if lengths is not None:
            return _by_length(q, k, v, *lengths, dropout_p, scale)
    kernel = _explicit if explicit else _fused
    if mask is None:
        return kernel(q, k, v, bias, dropout_p, scale)
    allowed, empty, unseen = lower_mask(mask, q, k)
    q, k, v = q.masked_fill(empty, 0), k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    return kernel(q, k, v, added_scores(allowed, bias, q), dropout_p, scale).masked_fill(empty, 0)


def attend_scores(
    scores: Tensor,
    v: Tensor,
    mask: MaskLike = None,
    *,
    dropout_p: float = 0.0,
    tap: Tap | None = None,
) -> Tensor:
    """(b h i j), (b h j e) -> (b h i e): the same for scores that are no dot products."""
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    mask, empty = Mask.of(mask), None
    if mask is not None:
        allowed, empty, unseen = lower_mask(mask, scores, v)
        scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0)
        v = v.masked_fill(unseen, 0)
    weights = weights_of(scores, empty)
    if tap is not None:
        tap.record(lambda: weights)
        tap.show("logits", lambda: range_of(scores, empty))
    with without_autocast(v):
        return (F.dropout(weights, dropout_p) @ v.to(weights.dtype)).to(v.dtype)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor | None,
    dropout_p: float,
    scale: float,
    causal: bool = False,
) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scores, dropout_p, is_causal=causal, scale=scale)


def _explicit(
    q: Tensor, k: Tensor, v: Tensor, scores: Tensor | None, dropout_p: float, scale: float
) -> Tensor:
    weights = F.dropout(dot_scores(q, k, scores, scale).softmax(-1), dropout_p)
    with without_autocast(q):
        return (weights @ v.to(weights.dtype)).to(v.dtype)


_RAGGED_FROM = 256  # keys; below, one masked call is faster than a call a sample


def _lengths(mask: Mask | None, q: Tensor, k: Tensor) -> tuple[list[int], bool] | None:
    """Key counts of the samples, and whether causal, where that is all that the mask says.

    On a CPU a mask tensor becomes floats (b h i j) inside the kernel; cutting each sample to its
    length needs none. On a GPU the lengths would have to be waited for.
    """
    i, j = q.shape[-2], k.shape[-2]
    rules = [] if mask is None else mask.rules()
    padding = [rule.lengths for rule in rules if isinstance(rule, Padding)]
    causal = len(rules) > len(padding)
    if not padding or q.device.type != "cpu" or j < _RAGGED_FROM or (causal and i != j):
        return None
    if not all(isinstance(rule, (Padding, Causal)) for rule in rules):
        return None
    if any(len(lengths) not in (1, len(q)) for lengths in padding):
        return None  # `lower_mask` says what is wrong
    shortest = functools.reduce(torch.minimum, padding).expand(len(q))
    return shortest.clamp(0, j).tolist(), causal


def _by_length(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: list[int],
    causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """Each sample attends to its own first keys, with no mask; queries beyond them see all."""
    if not lengths:
        return nothing(q, k, v)
    outputs = []
    for sample, length in enumerate(lengths):
        one, keys, values = (
            x[sample : sample + 1, :, :end] for x, end in ((q, None), (k, length), (v, length))
        )
        if length == 0:
            outputs.append(nothing(one, keys, values))
        elif causal:
            early = _fused(one[:, :, :length], keys, values, None, dropout_p, scale, causal=True)
            late = one[:, :, length:]
            outputs.append(
                torch.cat([early, _fused(late, keys, values, None, dropout_p, scale)], 2)
                if late.shape[2]
                else early
            )
        else:
            outputs.append(_fused(one, keys, values, None, dropout_p, scale))
    return torch.cat(outputs)


def nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros (b h i e2) whose gradients are zeros: of queries that have nothing to attend to.

    Connected to all inputs, as parallel training waits for the gradient of every parameter.
    """
    q, k, v = (x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0) for x in (q, k, v))
    return q.sum(-1, keepdim=True) + v.sum(-2, keepdim=True) + k.sum((-2, -1), keepdim=True)
