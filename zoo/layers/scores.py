"""Scores of dot-product attention, and what is read off them: weights, and their range.

A mask becomes tensors here, once: `lower_mask` says which pairs may attend, which queries see
nothing and which keys nobody sees.

Shapes: b batch, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from zoo.layers.mask import Mask, MaskLike, check_broadcast


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: MaskLike = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The weights that `attend` gives to the values, in fp32; rows sum to 1, or 0 where empty.

    (b h i e), (b h j e) -> (b h i j)
    """
    return weights_of(*_masked(q, k, mask, bias, scale))


def score_range(
    q: Tensor,
    k: Tensor,
    mask: MaskLike = None,
    *,
    bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The least and the largest score of each query over the keys that it may see, in fp32.

    Scores are what softmax is taken of: scaled, and with the bias. Of a query that sees nothing
    they are inf and -inf, the least and the largest of no numbers, so that `amin` and `amax` over
    queries need no care; NaN is only where a score is.

    (b h i e), (b h j e) -> (b h i 2)
    """
    return range_of(*_masked(q, k, mask, bias, scale))


def weights_of(scores: Tensor, empty: Tensor | None) -> Tensor:
    """(b h i j) -> the same; zeros for the queries that are `empty` (b h i 1)."""
    weights = scores.softmax(-1)
    return weights if empty is None else weights.masked_fill(empty, 0)


def range_of(scores: Tensor, empty: Tensor | None) -> Tensor:
    """(b h i j) -> (b h i 2), where a score of -inf is one that is masked."""
    least = scores.masked_fill(scores.isneginf(), float("inf")).amin(-1, keepdim=True)
    most = scores.amax(-1, keepdim=True)
    if empty is not None:
        least, most = least.masked_fill(empty, float("inf")), most.masked_fill(empty, -float("inf"))
    return torch.cat([least, most], -1)


def _masked(
    q: Tensor, k: Tensor, mask: MaskLike, bias: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor | None]:
    """Scores (b h i j), -inf where forbidden, and the queries that see nothing (b h i 1)."""
    q, k = as_autocast(q, k)
    check_shapes(q, k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    rule = Mask.of(mask)
    if rule is None:
        return dot_scores(q, k, bias, scale), None
    allowed, empty, unseen = lower_mask(rule, q, k)
    q, k = q.masked_fill(empty, 0), k.masked_fill(unseen, 0)
    return dot_scores(q, k, added_scores(allowed, bias, q), scale), empty


def dot_scores(q: Tensor, k: Tensor, added: Tensor | None, scale: float) -> Tensor:
    """(b h i e), (b h j e) -> (b h i j) in fp32, after what is added: a bias, or a bool mask."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        scores = (q.to(dtype) * scale) @ k.to(dtype).transpose(-2, -1)  # b h i j
    if added is None:
        return scores
    if added.dtype == torch.bool:
        return scores.masked_fill(~added, float("-inf"))
    return scores + added


def added_scores(allowed: Tensor, bias: Tensor | None, q: Tensor) -> Tensor:
    """What a kernel adds to the scores: the mask alone, or the bias with -inf where forbidden."""
    return allowed if bias is None else bias.to(q.dtype).masked_fill(~allowed, float("-inf"))


def blank_unseen(q: Tensor, k: Tensor, mask: MaskLike) -> tuple[Tensor, Tensor]:
    """Zeros for queries that see nothing and keys that nobody sees: NaN there is no one's affair.

    For scores that are computed from both before they are masked.
    """
    mask = Mask.of(mask)
    if mask is None:
        return q, k
    _, empty, unseen = lower_mask(mask, q, k)
    return q.masked_fill(empty, 0), k.masked_fill(unseen, 0)


def lower_mask(mask: Mask, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mask as tensors: allowed (b h i j), empty queries (b h i 1), unseen keys (b h j 1).

    An empty query may attend to everything: the softmax over nothing would be 0 / 0, and kernels
    differ in what they make of it. The caller fills zeros into its output, which also stops its
    gradient. NaN times 0 is NaN, so zero weights alone would not keep unseen keys and values out.
    """
    shape = (*q.shape[:-1], k.shape[-2])
    allowed = mask.lower(shape[-2], shape[-1], device=q.device)
    check_broadcast(allowed, shape)
    empty = ~allowed.any(-1, keepdim=True)
    unseen = ~allowed.any(-2, keepdim=True).transpose(-2, -1)
    return allowed | empty, empty, unseen


def as_autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What autocast does to a fused kernel's inputs, for both paths (qk-norm leaves fp32)."""
    device = tensors[0].device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def without_autocast(x: Tensor) -> AbstractContextManager:
    device = x.device.type
    if not torch.amp.is_autocast_available(device):  # the meta device has none
        return nullcontext()
    return torch.autocast(device, enabled=False)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    problem = _problem(q, k, v)
    if problem:
        raise ValueError(
            f"{problem}; got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")


def _problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    if not q.ndim == k.ndim == v.ndim == 4:
        return "q, k and v must have four axes (b, h, n, e)"
    if not q.shape[:2] == k.shape[:2] == v.shape[:2]:
        return "q, k and v must agree in batch and heads"
    if q.shape[3] != k.shape[3]:
        return "q and k must have the same head width"
    if k.shape[2] != v.shape[2]:
        return "k and v must have the same number of positions"
    return None
