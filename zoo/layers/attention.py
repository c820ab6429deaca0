"""The attention core: the only softmax(Q K^T) V of the project.

`attend` runs torch's fused kernels, or the formula written out (`fused=False`, or anywhere inside
`explicit_attention()`), with the same values. On either path a query with nothing to attend to
gives zeros and zero gradients, and what stands in a key that no query may see cannot leak.

Shapes: b batch, h heads, i/j query/key positions, e head width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.nn import functional as F

from zoo.layers.mask import Causal, Mask, MaskLike, Padding, check_broadcast
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
        tap: Shown the weights before dropout, if observed. Never changes the output.
        fused: False computes the formula step by step; by default a fused kernel.
    """
    q, k, v = as_autocast(q, k, v)
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if tap is not None and tap.active:
        tap.record(lambda: attention_weights(q, k, mask, bias=bias, scale=scale))
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
    allowed, empty, unseen = _lower(mask, q, k)
    q, k, v = q.masked_fill(empty, 0), k.masked_fill(unseen, 0), v.masked_fill(unseen, 0)
    return kernel(q, k, v, _scores(allowed, bias, q), dropout_p, scale).masked_fill(empty, 0)


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
    q, k = as_autocast(q, k)
    _check(q, k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    mask = Mask.of(mask)
    if mask is None:
        return _softmax(q, k, bias, scale)
    allowed, empty, unseen = _lower(mask, q, k)
    q, k = q.masked_fill(empty, 0), k.masked_fill(unseen, 0)
    return _softmax(q, k, _scores(allowed, bias, q), scale).masked_fill(empty, 0)


def blank_unseen(q: Tensor, k: Tensor, mask: MaskLike) -> tuple[Tensor, Tensor]:
    """Zeros for queries that see nothing and keys that nobody sees: NaN there is no one's affair.

    For scores that are computed from both before they are masked.
    """
    mask = Mask.of(mask)
    if mask is None:
        return q, k
    _, empty, unseen = _lower(mask, q, k)
    return q.masked_fill(empty, 0), k.masked_fill(unseen, 0)


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
        allowed, empty, unseen = _lower(mask, scores, v)
        scores = scores.masked_fill(~allowed, float("-inf")).masked_fill(empty, 0)
        v = v.masked_fill(unseen, 0)
    weights = scores.softmax(-1)
    if empty is not None:
        weights = weights.masked_fill(empty, 0)
    if tap is not None:
        tap.record(lambda: weights)
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
    weights = F.dropout(_softmax(q, k, scores, scale), dropout_p)
    with without_autocast(q):
        return (weights @ v.to(weights.dtype)).to(v.dtype)


def _softmax(q: Tensor, k: Tensor, added: Tensor | None, scale: float) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    with without_autocast(q):
        scores = (q.to(dtype) * scale) @ k.to(dtype).transpose(-2, -1)  # b h i j
    if added is not None and added.dtype == torch.bool:
        scores = scores.masked_fill(~added, float("-inf"))
    elif added is not None:
        scores = scores + added
    return scores.softmax(-1)


def _scores(allowed: Tensor, bias: Tensor | None, q: Tensor) -> Tensor:
    """What a kernel adds to the scores: the mask alone, or the bias with -inf where forbidden."""
    return allowed if bias is None else bias.to(q.dtype).masked_fill(~allowed, float("-inf"))


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
        return None  # `_lower` says what is wrong
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


def _lower(mask: Mask, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
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
