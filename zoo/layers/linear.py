"""Attention in linear time without a pattern: kernel features and low rank.

Shapes: b batch, h heads, i/j query/key positions, e head width, m features, r rank.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.layers.attention import attend
from zoo.layers.check import flag, integer
from zoo.layers.core import Core
from zoo.layers.factory import register_attention
from zoo.layers.mask import Mask, keys_and_causal
from zoo.layers.scores import without_autocast
from zoo.layers.tap import Tap
from zoo.rng import generator

_CHUNK = 128  # queries that causal sums take at once


class Kernel(Core):
    """softmax(q k) replaced by phi(q) phi(k) with phi >= 0, so that keys are summed only once."""

    masks: ClassVar[tuple[str, ...]] = ("padding", "causal")
    reason: ClassVar[str] = "it sums over the keys before it meets a query and never sees pairs"
    biases = False
    drops = False
    scores = False

    def features(self, q: Tensor, k: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        """(b h i e), (b h j e) in fp32 -> (b h i m), (b h j m); `keys` (b|1 j) may be seen."""
        raise NotImplementedError

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        *,
        bias: Any = None,
        dropout_p: float = 0.0,
        tap: Tap | None = None,
    ) -> Tensor:
        keys, causal = keys_and_causal(mask, len(v), k.shape[-2], k.device)
        hidden = None if keys is None else ~keys[:, None, :, None]
        dtype = torch.promote_types(v.dtype, torch.float32)
        with without_autocast(v):
            if hidden is not None:
                k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
            phi_q, phi_k = self.features(q.to(dtype), k.to(dtype), keys)
            if hidden is not None:
                phi_k = phi_k.masked_fill(hidden, 0)
            if tap is not None:
                tap.record(lambda: _dense_weights(phi_q, phi_k, causal))
            mix = _causal if causal else _everything
            return mix(phi_q, phi_k, v.to(dtype)).to(v.dtype)


def _everything(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """(b h i m), (b h j m), (b h j e) -> (b h i e)"""
    total, norm = phi_k.transpose(-2, -1) @ v, phi_k.sum(2)[..., None]  # b h m e, b h m 1
    return _ratio(phi_q @ total, phi_q @ norm)


def _causal(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> Tensor:
    """The same over the keys up to each query, the last query aligned with the last key.

    Chunk by chunk: a running sum over the chunks before, and a triangle inside the chunk. So no
    state is kept per token.
    """
    i, j = phi_q.shape[2], phi_k.shape[2]
    early = max(0, j - i)  # keys that stand before the first query
    first, rest = (
        (phi_k[:, :, :early], v[:, :, :early]),
        (phi_k[:, :, early:], v[:, :, early:]),
    )
    tail = -max(i, j - early) % _CHUNK
    shift = max(0, i - j)  # queries before the first key
    q = F.pad(phi_q, (0, 0, 0, tail)).unflatten(2, (-1, _CHUNK))  # b h c t m
    k, values = (F.pad(x, (0, 0, shift, tail)).unflatten(2, (-1, _CHUNK)) for x in rest)
    sums, norms = k.transpose(-2, -1) @ values, k.sum(-2)[..., None]  # b h c m e, b h c m 1
    start = (first[0].transpose(-2, -1) @ first[1], first[0].sum(2)[..., None])
    before, norm = (
        torch.cat([s[:, :, None], x[:, :, :-1]], 2).cumsum(2)
        for s, x in zip(start, (sums, norms), strict=True)
    )
    local = (q @ k.transpose(-2, -1)).tril()
    out = _ratio(local @ values + q @ before, local.sum(-1, keepdim=True) + q @ norm)
    return out.flatten(2, 3)[:, :, :i]


def _ratio(total: Tensor, norm: Tensor) -> Tensor:
    """total / norm; zeros, with zero gradients, where there was nothing to see."""
    empty = norm == 0
    return (total / norm.masked_fill(empty, 1)).masked_fill(empty, 0)


def _dense_weights(phi_q: Tensor, phi_k: Tensor, causal: bool) -> Tensor:
    scores = phi_q @ phi_k.transpose(-2, -1)  # b h i j
    if causal:
        scores = scores.tril(scores.shape[-1] - scores.shape[-2])
    return _ratio(scores, scores.sum(-1, keepdim=True))


@register_attention("linear")
class Linear(Kernel):
    """Features elu(x) + 1 (Linear Transformer, arXiv 2006.16236).

    A temperature divides the queries before their features are taken.
    """

    def features(self, q: Tensor, k: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        top = q.detach().amax(-1, keepdim=True).clamp(max=0)  # a factor a query cancels
        return _elu_plus_one(q, top), _elu_plus_one(k)


def _elu_plus_one(x: Tensor, top: Tensor | float = 0.0) -> Tensor:
    """Divided by exp(top). Not as `F.elu(x) + 1`, which rounds exp(x) to nothing below -17."""
    return torch.where(x > 0, x + 1, (x.clamp(max=0) - top).exp())


@register_attention("performer")
class Performer(Kernel):
    """Random features of the softmax kernel (FAVOR+, arXiv 2009.14794), positive and orthogonal.

    Nothing is stored with the weights: `seed` gives the features. With `redraw` each training step
    draws new ones from torch's generator, and evaluation keeps those of the seed.

    Features are exponentials in fp32: where scores lie more than about 80 below the largest key's,
    causal queries that see only such keys get zeros.

    Args:
        num_features: m; by default e ln(e).
        redraw: Whether training draws new features in each forward pass.
        seed: Of the features.
    """

    directions: Tensor

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        num_features: int | None = None,
        redraw: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, head_dim)
        default = max(1, round(head_dim * math.log(head_dim)))
        num_features = default if num_features is None else num_features
        self.num_features = integer("num_features", num_features)
        self.redraw, self.seed = flag("redraw", redraw), integer("seed", seed, minimum=None)
        rng = generator(self.seed, "performer")
        directions = orthogonal_features(self.num_features, head_dim, rng)
        self.register_buffer("directions", directions, persistent=False)  # m e

    def _apply(self, fn: Any, recurse: bool = True) -> Performer:
        """Moves the features, but never rounds them, and makes them where memory is fresh."""
        super()._apply(fn, recurse)
        if self.directions.device.type != "meta":
            rng = generator(self.seed, "performer")
            made = orthogonal_features(self.num_features, self.head_dim, rng)
            self.directions = made.to(self.directions.device)
        return self

    def features(self, q: Tensor, k: Tensor, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        directions = self.directions
        if self.redraw and self.training:
            directions = orthogonal_features(self.num_features, self.head_dim)
        directions = directions.to(q)
        # log of exp(w x - |x|^2 / 2) with x scaled so that q k is q k / sqrt(e). A factor per query
        # cancels, and so does one for all keys: the largest keep exp within range.
        q, k = q * self.head_dim**-0.25, k * self.head_dim**-0.25
        log_q, log_k = q @ directions.T, k @ directions.T
        half = k.square().sum(-1, keepdim=True) / 2
        top = log_k.detach().amax(-1, keepdim=True) - half.detach()
        if keys is not None:
            top = top.masked_fill(~keys[:, None, :, None], -math.inf)
        top = top.amax(-2, keepdim=True).nan_to_num(neginf=0.0)  # nothing may be seen
        # In place: features are the largest tensors here, and nothing else needs their logarithms.
        phi_q = log_q.sub_(log_q.detach().amax(-1, keepdim=True)).exp_()
        return phi_q, log_k.sub_(half + top).exp_()


def orthogonal_features(m: int, dim: int, rng: torch.Generator | None = None) -> Tensor:
    """Rows of length as of Gaussian vectors, orthogonal in groups of `dim`: (m dim), fp32."""
    blocks = [
        torch.linalg.qr(torch.randn(dim, dim, generator=rng, dtype=torch.float64))[0].T
        for _ in range(math.ceil(m / dim))
    ]
    norms = torch.randn(m, dim, generator=rng, dtype=torch.float64).norm(dim=1, keepdim=True)
    return (torch.cat(blocks)[:m] * norms).float()


@register_attention("linformer")
class Linformer(Core):
    """Keys and values projected from j positions to r (arXiv 2006.04768), then exact attention.

    Captured weights are over the r projected positions: (b h i r).

    Args:
        max_len: Longest sequence; shorter ones use the first rows of the projections.
        rank: r.
    """

    masks: ClassVar[tuple[str, ...]] = ("padding",)
    reason: ClassVar[str] = "it mixes all positions of the keys before a query meets them"
    biases = False

    def __init__(
        self, num_heads: int, head_dim: int, *, max_len: int = 512, rank: int | None = None
    ) -> None:
        super().__init__(num_heads, head_dim)
        self.max_len = max_len = integer("max_len", max_len)
        rank = min(256, max_len) if rank is None else integer("rank", rank)
        self.key = nn.Parameter(torch.empty(max_len, rank))
        self.value = nn.Parameter(torch.empty(max_len, rank))
        for projection in (self.key, self.value):
            nn.init.uniform_(projection, -(rank**-0.5), rank**-0.5)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        *,
        bias: Any = None,
        dropout_p: float = 0.0,
        tap: Tap | None = None,
    ) -> Tensor:
        j = k.shape[-2]
        if j > self.max_len:
            raise ValueError(
                f"linformer was built for max_len={self.max_len} keys and got {j}: build it with "
                f"max_len={j}, or take a kind without a longest sequence"
            )
        keys, _ = keys_and_causal(mask, len(v), j, k.device)
        if keys is not None:
            hidden = ~keys[:, None, :, None]
            k, v = k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)
        k, v = (self._project(x, by) for x, by in ((k, self.key), (v, self.value)))
        return attend(q, k, v, dropout_p=dropout_p, tap=tap)

    def _project(self, x: Tensor, by: Tensor) -> Tensor:
        """(b h j e) -> (b h r e), with the heads side by side: one matrix product, no copy."""
        flat = by[: x.shape[2]].to(x.dtype).T @ x.transpose(1, 2).flatten(2)  # b r (h e)
        return flat.unflatten(2, (x.shape[1], -1)).transpose(1, 2)
