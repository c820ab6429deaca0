"""Multi-head self- and cross-attention: projections around the attention core.

Attribute names are timm's, so that its weights fit without a key map.

Shapes: b batch, n tokens, i/j query/key positions, h heads, d width, e head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zoo.card import ModelCard
from zoo.layers.attention import nothing
from zoo.layers.cache import KeyValues
from zoo.layers.check import flag, fraction, integer, positive
from zoo.layers.core import Core, Full
from zoo.layers.mask import Mask, MaskLike
from zoo.layers.tap import Tap

NormLayer = Callable[[int], nn.Module]

layer_norm: NormLayer = partial(nn.LayerNorm, eps=1e-6)


class MultiHead(nn.Module):
    """The options and parts that self- and cross-attention share.

    Args:
        dim: Width of the tokens.
        dim_context: Width of the context, in cross-attention; by default `dim`.
        num_heads: Heads of the queries.
        head_dim: Width of one head; by default `dim / num_heads`. Fewer, wider heads are possible.
        num_kv_heads: Heads of keys and values, each shared by a group of query heads (grouped
            queries, arXiv 2305.13245); by default `num_heads`.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        qk_norm: Normalises queries and keys per head, with `norm_layer`.
        temperature: Divides the scores, before a position bias is added: a number, or "learned"
            (one per head, starting at 1). Kinds without scores refuse it.
        core: The kind of attention; exact by default.
        bias: A position bias, added to the scores.
        rope: Rotates queries and keys by their positions.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        dim_context: int | None = None,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        temperature: float | str = 1.0,
        norm_layer: NormLayer = layer_norm,
        core: Core | None = None,
        bias: nn.Module | None = None,
        rope: nn.Module | None = None,
    ) -> None:
        super().__init__()
        _check_parts(norm_layer, core=(core, Core), bias=(bias, nn.Module), rope=(rope, nn.Module))
        self.dim, self.num_heads = integer("dim", dim), integer("num_heads", num_heads)
        self.dim_context = self.dim if dim_context is None else integer("dim_context", dim_context)
        self.head_dim = head_width(dim, num_heads, head_dim)
        self.num_kv_heads = _kv_heads(self.num_heads, num_kv_heads)
        self.width, self.kv_width = (
            heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads)
        )
        self._add_inputs(dim, dim_context, flag("qkv_bias", qkv_bias))
        qk_norm = flag("qk_norm", qk_norm)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(fraction("attn_drop", attn_drop))
        self.tap = Tap()
        self.core = Full(num_heads, self.head_dim) if core is None else core
        self.bias, self.rope = bias, rope
        if bias is not None:
            self.core.check_bias()
        if attn_drop and not self.core.drops:
            raise ValueError(
                f"attn_drop ({attn_drop}) must be 0: attention kind {self.core.kind!r} has no "
                "weights to drop"
            )
        self.proj = nn.Linear(self.width, dim, bias=flag("proj_bias", proj_bias))
        self.proj_drop = nn.Dropout(fraction("proj_drop", proj_drop))
        self._set_temperature(temperature)

    def _add_inputs(self, dim: int, dim_context: int | None, bias: bool) -> None:
        """The projections to queries, keys and values."""
        raise NotImplementedError

    def _set_temperature(self, temperature: float | str) -> None:
        self.log_temperature, self.temperature = None, 1.0
        if not isinstance(temperature, str):
            self.temperature = positive("temperature", temperature, other="learned")
        elif temperature == "learned":
            self.log_temperature = nn.Parameter(torch.zeros(self.num_heads))
        else:
            raise ValueError(f"temperature ({temperature!r}) must be a number, or 'learned'")
        if temperature != 1:
            self._check_tempers(temperature)

    def _check_tempers(self, temperature: object) -> None:
        if not self.core.tempers:
            raise ValueError(
                f"temperature ({temperature!r}) must be 1: attention kind {self.core.kind!r} has "
                "no scores that it could divide"
            )

    def _kept(self, k: Tensor, v: Tensor) -> KeyValues:
        """(b kv j e), (b kv j e): what later calls need of them, computed as far as it can be."""
        k = self.k_norm(k)
        prepared = None if self.rope is not None else self.core.prepare(k)
        return KeyValues(k, v) if prepared is None else KeyValues(prepared, v, prepared=True)

    def _mix(self, q: Tensor, kept: KeyValues, mask: MaskLike) -> Tensor:
        """(b h i e), keys and values (b kv j e) -> (b i d)"""
        k, v, prepared = kept
        mask = Mask.of(mask)
        if mask is not None:
            mask.check((*q.shape[:3], k.shape[2]))
            self.core.check_mask(mask)
        q = self.q_norm(q)
        if self.rope is not None:
            q, k = self.rope(q, k)
        q, given = self._temper(q)
        if prepared:
            given["prepared"] = True
        if self.num_kv_heads != self.num_heads:
            groups = self.num_heads // self.num_kv_heads
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        dropout_p = self.attn_drop.p if self.training else 0.0
        if 0 in (*q.shape[:3], k.shape[2]):  # no sample, no query or no key
            x = nothing(q, k, v)
        else:
            spoiled = None if mask is None else _spoiled(k, v)
            if spoiled is not None:
                k, v = (x.masked_fill(spoiled[..., None], 0) for x in (k, v))
            x = self.core(q, k, v, mask, bias=self.bias, dropout_p=dropout_p, tap=self.tap, **given)
            if spoiled is not None and mask is not None:
                x = x.masked_fill(self._sees_any(spoiled, mask, q.shape[2]), torch.nan)
        self.tap.show("outputs", lambda: x)
        return self.proj_drop(self.proj(merge_heads(x)))

    def _temper(self, q: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The queries divided by the temperature, or what the core needs to divide its scores."""
        inverse: Tensor | float = 1 / self.temperature
        if self.log_temperature is not None:
            inverse = torch.exp(-self.log_temperature).to(q.dtype)[:, None, None]
        elif self.temperature == 1.0:
            return q, {}
        if self.core.tempers == "scores":
            return q, {"scale": inverse}
        return q * inverse, {}

    def _sees_any(self, keys: Tensor, mask: Mask, i: int) -> Tensor:
        """(b h j) -> (b h i 1): queries that may see any of these keys."""
        j = keys.shape[-1]
        allowed = mask.lower(i, j, keys.device)
        rows, cols = (torch.arange(n, device=keys.device) for n in (i, j))
        pattern = self.core.sees(rows[:, None] + (j - i), cols[None], j)
        allowed = allowed if pattern is None else allowed & pattern
        return (allowed & keys[:, :, None]).any(-1, keepdim=True)


def _spoiled(k: Tensor, v: Tensor) -> Tensor | None:
    """Keys whose content is NaN or infinite: (b h j); None where all is finite.

    A weight of 0 does not keep NaN out of a sum, and kernels leave it to that. Looked for on CPUs
    only: on a GPU each layer would have to wait for the answer.
    """
    if k.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    k, v = k.detach(), v.detach()
    if bool(torch.isfinite(k.sum() + v.sum())):  # one cheap pass; large sums may overflow
        return None
    spoiled = ~(k.isfinite().all(-1) & v.isfinite().all(-1))
    return spoiled if bool(spoiled.any()) else None


class SelfAttention(MultiHead):
    """Every token attends to tokens of its own sequence (arXiv 1706.03762); see `MultiHead`."""

    def _add_inputs(self, dim: int, dim_context: int | None, bias: bool) -> None:
        if dim_context is not None:
            raise TypeError("SelfAttention takes no dim_context; use CrossAttention")
        self.qkv = nn.Linear(dim, self.width + 2 * self.kv_width, bias=bias)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: MaskLike = None) -> Tensor:
        """(b n d) -> (b n d)"""
        if context is not None:
            raise TypeError("SelfAttention takes no context; use CrossAttention(dim, num_heads)")
        q, k, v = self._project(x)
        return self._mix(q, KeyValues(self.k_norm(k), v), mask)

    def extend(
        self, x: Tensor, past: KeyValues | None = None, mask: MaskLike = None
    ) -> tuple[Tensor, KeyValues]:
        """Reads the tokens after `past`, causally: (b i d) -> (b i d), and what is kept of all.

        Equal to the last i outputs of `forward` over all j tokens under `Mask.causal() & mask`.

        Args:
            past: What the call for the tokens before returned; None at the start.
            mask: A further rule for the i queries and all j keys.

        Raises:
            ValueError: the kind's outputs are not final before all tokens are there.
        """
        self.core.check_growing()
        q, k, v = self._project(x)
        kept = self._kept(k, v)
        kept = kept if past is None else past.append(kept)
        if x.shape[1] > 1:  # a single query is the last and sees all
            mask = Mask.causal() & mask
        return self._mix(q, kept, mask), kept

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(b n d) -> (b h n e), (b kv n e), (b kv n e)"""
        _check_tokens("x", x, self.dim)
        if self.num_kv_heads == self.num_heads:
            q, k, v = split_heads(self.qkv(x), 3, self.num_heads)
            return q, k, v
        q, kv = self.qkv(x).split([self.width, 2 * self.kv_width], dim=-1)
        (q,), (k, v) = split_heads(q, 1, self.num_heads), split_heads(kv, 2, self.num_kv_heads)
        return q, k, v


class CrossAttention(MultiHead):
    """Tokens attend to the tokens of another sequence, the context; see `MultiHead`."""

    def _add_inputs(self, dim: int, dim_context: int | None, bias: bool) -> None:
        self.q = nn.Linear(dim, self.width, bias=bias)
        self.kv = nn.Linear(self.dim_context, 2 * self.kv_width, bias=bias)

    def forward(
        self, x: Tensor, context: Tensor | KeyValues | None = None, mask: MaskLike = None
    ) -> Tensor:
        """x (b i d), context (b j d_context), or what `project` made of it -> (b i d)"""
        if context is None:
            raise TypeError("CrossAttention needs a context; SelfAttention attends within x")
        _check_tokens("x", x, self.dim)
        if isinstance(context, KeyValues):
            kept, shape = context, context.values.shape
        else:
            k, v = self._split(context)
            kept, shape = KeyValues(self.k_norm(k), v), context.shape
        if x.shape[0] != shape[0]:
            raise ValueError(
                f"x and context must agree in batch; got x {tuple(x.shape)}, context {tuple(shape)}"
            )
        (q,) = split_heads(self.q(x), 1, self.num_heads)
        return self._mix(q, kept, mask)

    def project(self, context: Tensor) -> KeyValues:
        """Keys and values of a context that many calls attend to: (b j d_context)."""
        return self._kept(*self._split(context))

    def _split(self, context: Tensor) -> tuple[Tensor, Tensor]:
        """(b j d_context) -> (b kv j e), (b kv j e)"""
        _check_tokens("context", context, self.dim_context)
        k, v = split_heads(self.kv(context), 2, self.num_kv_heads)
        return k, v


def set_temperature(model: nn.Module, temperature: float) -> None:
    """Sets what divides the scores of all attention in `model`.

    Raises:
        TypeError: it is no number.
        ValueError: it is not positive, is learned, or there is no attention of ours.
    """
    layers = [module for module in model.modules() if isinstance(module, MultiHead)]
    if not layers or any(layer.log_temperature is not None for layer in layers):
        what = "learns its temperature" if layers else "has no attention of zoo.layers"
        raise ValueError(f"temperature cannot be set: {type(model).__name__} {what}")
    temperature = positive("temperature", temperature)
    for layer in layers if temperature != 1 else []:
        layer._check_tempers(temperature)  # of all before any changes
    for layer in layers:
        layer.temperature = temperature
    card = getattr(model, "card", None)
    if isinstance(card, ModelCard) and "temperature" in card.options:  # as the model is saved
        options = {**card.options, "temperature": temperature}
        model.card = replace(card, options=options)  # type: ignore[assignment]


def head_width(dim: int, num_heads: int, head_dim: int | None = None) -> int:
    """`head_dim`, or by default `dim / num_heads`."""
    dim, num_heads = integer("dim", dim), integer("num_heads", num_heads)
    if head_dim is not None:
        return integer("head_dim", head_dim)
    if dim % num_heads:
        raise ValueError(
            f"dim ({dim}) must be divisible by num_heads ({num_heads}), or head_dim be given"
        )
    return dim // num_heads


def _kv_heads(num_heads: int, num_kv_heads: int | None) -> int:
    if num_kv_heads is None:
        return num_heads
    if num_heads % integer("num_kv_heads", num_kv_heads):
        raise ValueError(
            f"num_heads ({num_heads}) must be divisible by num_kv_heads ({num_kv_heads})"
        )
    return int(num_kv_heads)


def _check_parts(norm_layer: object, **parts: tuple[object, type]) -> None:
    """Refuses modules of another type than the one that stands behind each."""
    if not callable(norm_layer):
        raise TypeError(f"norm_layer ({norm_layer!r}) must be called as norm_layer(width)")
    for name, (part, legal) in parts.items():
        if not isinstance(part, legal | None):
            raise TypeError(f"{name} ({part!r}) must be a {legal.__name__} or None")


def _check_tokens(name: str, x: Tensor, width: int) -> None:
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(f"{name} must be (b, n, {width}), got {tuple(x.shape)}")


def split_heads(x: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    """(b n (parts h e)) -> `parts` views of (b h n e)

    Unbound before the transpose: the gradients are then stacked in the projection's own layout,
    which saves a copy against `rearrange(x, "b n (p h e) -> p b h n e")`.
    """
    views = x.unflatten(-1, (parts, num_heads, -1)).unbind(2)  # b n h e
    return tuple(view.transpose(1, 2) for view in views)


def merge_heads(x: Tensor) -> Tensor:
    """(b h n e) -> (b n (h e)); a view, since the kernels lay their output out like that."""
    return x.transpose(1, 2).flatten(2)
