"""Cross-attention of two modalities: each is normalised by itself, then one attends to the other.

A block's queries come from one modality. Their keys are the other modality's tokens (`cross`), or
the tokens of both side by side (`merged`), where the share of weight that each modality gets can be
read off: `modality_share`.

Shapes: b batch, h heads, i/j query/key positions, n tokens, d width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vision.checks import check_choice
from zoo.layers import (
    Core,
    Mask,
    MaskLike,
    Mlp,
    NormLayer,
    RelativeBias1d,
    SelfAttention,
    create_attention,
    layer_norm,
)
from zoo.layers.block import ActLayer
from zoo.layers.check import flag, integer
from zoo.layers.mask import check_broadcast

NORMS = ("per_modality", "shared", "none", "qk")
LAYOUTS = ("cross", "merged")


class Gate(nn.Module):
    """A learned factor tanh(alpha), at first 0, on a branch (Flamingo, arXiv 2204.14198)."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... d)"""
        return x * self.alpha.tanh()


class CrossBlock(nn.Module):
    """Tokens of one modality attend to those of another, then pass an MLP.

    `x + gate(attn(norm_q(x), norm_kv(context)))`, and the same for the MLP with a norm of its own.

    Args:
        dim: Width of the queries' tokens.
        dim_context: Width of the other modality's tokens.
        num_heads: Attention heads.
        norm: `per_modality` (a LayerNorm for each), `shared` (one for both), `none`, or `qk`
            (tokens as they are; queries and keys are normalised per head, arXiv 2302.05442).
        layout: `cross`, or `merged`: keys are the queries' own tokens and then the context's, as
            in METER's merged attention (arXiv 2111.02387).
        gated: Whether each branch has a `Gate`; the block then starts as the identity.
        self_attention: Whether the queries' tokens attend to one another first. Always exact, and
            with a norm of its own: `norm` is about what two modalities share.
        attention: Kind of the cross-attention, one of `zoo.layers.list_attention()` that does not
            go by the place of a key beside the query's: two modalities have no common places.
        attention_options: Further options of `zoo.layers.create_attention` for it.
        mlp_ratio: Hidden width of the MLP over `dim`.
        proj_drop: Dropout after the projections of attention and MLP.
    """

    def __init__(
        self,
        dim: int,
        dim_context: int,
        num_heads: int = 8,
        *,
        norm: str = "per_modality",
        layout: str = "cross",
        gated: bool = True,
        self_attention: bool = False,
        attention: str = "full",
        attention_options: dict[str, Any] | None = None,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        norm_layer: NormLayer = layer_norm,
        act_layer: ActLayer = nn.GELU,
    ) -> None:
        super().__init__()
        self.dim, self.dim_context = integer("dim", dim), integer("dim_context", dim_context)
        _check_layout(layout, dim, dim_context, flag("self_attention", self_attention))
        self.layout = layout
        self.norm_q, self.norm_kv = norms_of_two(norm, dim, dim_context, norm_layer)
        given = {"qk_norm": norm == "qk", "norm_layer": norm_layer, "proj_drop": proj_drop}
        self.attn = create_attention(
            attention,
            dim,
            num_heads,
            dim_context=dim_context,
            **{**given, **(attention_options or {})},
        )
        _check_places(attention, self.attn, layout)
        self.norm_mlp = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop)
        gate = Gate if flag("gated", gated) else nn.Identity
        self.gate_attn, self.gate_mlp = gate(), gate()
        self.self_attn: nn.Module | None = None
        if self_attention:
            self.norm_self, self.gate_self = norm_layer(dim), gate()
            self.self_attn = SelfAttention(dim, num_heads, proj_drop=proj_drop)

    def forward(
        self, x: Tensor, context: Tensor, mask: MaskLike = None, context_mask: MaskLike = None
    ) -> Tensor:
        """x (b i d), context (b j d_context) -> (b i d)

        Args:
            mask: Which tokens of `x` its queries may see, for (b h i i); True = may attend.
            context_mask: Which tokens of the context they may see, for (b h i j).
        """
        check_tokens("x", x, "dim", self.dim)
        check_tokens("context", context, "dim_context", self.dim_context)
        if self.self_attn is not None:
            x = x + self.gate_self(self.self_attn(self.norm_self(x), mask=mask))
        x = x + self.gate_attn(self._attend(x, context, mask, context_mask))
        return x + self.gate_mlp(self.mlp(self.norm_mlp(x)))

    def _attend(self, x: Tensor, context: Tensor, mask: MaskLike, context_mask: MaskLike) -> Tensor:
        x, context = self.norm_q(x), second_of(self.norm_q, self.norm_kv)(context)
        if self.layout == "merged":
            context_mask = _side_by_side((mask, x), (context_mask, context), x)
            context = torch.cat([x, context], dim=1)
        return self.attn(x, context, context_mask)


def modality_share(weights: Tensor, num_first: int) -> Tensor:
    """The share of each query's weight that goes to the first keys: (b h i j) -> (b h i).

    In layout `merged` the first keys are the queries' own modality. `zoo.capture_attention` gives
    the weights. Padding has none, so shares count real tokens; a query that sees nothing gives 0.
    """
    if not 0 <= integer("num_first", num_first, minimum=None) <= weights.shape[-1]:
        raise ValueError(f"num_first ({num_first}) must lie in [0, {weights.shape[-1]}], the keys")
    return weights[..., :num_first].sum(-1)


def norms_of_two(
    norm: str, dim: int, dim_context: int, norm_layer: NormLayer
) -> tuple[nn.Module, nn.Module | None]:
    """The norms of two modalities; None for the second where it is the first."""
    check_choice("norm", norm, NORMS)
    if norm == "per_modality":
        return norm_layer(dim), norm_layer(dim_context)
    if norm != "shared":
        return nn.Identity(), nn.Identity()
    if dim != dim_context:
        raise ValueError(
            f"norm 'shared' needs one width for both modalities, got dim ({dim}) and dim_context "
            f"({dim_context}): project one first, or take norm 'per_modality'"
        )
    return norm_layer(dim), None


def second_of(first: nn.Module, second: nn.Module | None) -> nn.Module:
    # A module under two names would have its parameters twice in the state dict.
    return first if second is None else second


def _check_layout(layout: str, dim: int, dim_context: int, self_attention: bool) -> None:
    check_choice("layout", layout, LAYOUTS)
    if layout == "merged" and dim != dim_context:
        raise ValueError(
            f"layout 'merged' puts the tokens of both modalities side by side, so dim ({dim}) and "
            f"dim_context ({dim_context}) must be equal: project one first, or take layout 'cross'"
        )
    if layout == "merged" and self_attention:
        raise ValueError(
            "self_attention must be False with layout 'merged', whose queries see their own tokens"
        )


def _check_places(kind: str, attn: nn.Module, layout: str) -> None:
    """Refuses attention that goes by places, which padding of either modality would move."""
    place, merged = torch.zeros(1, dtype=torch.long), layout == "merged"
    cores = [module for module in attn.modules() if isinstance(module, Core)]
    if any(core.sees(place, place, 1) is not None for core in cores):
        raise ValueError(
            f"attention kind {kind!r} picks keys by their place beside the query's, but two "
            "modalities have no common places; take full, dot, additive, linear, performer, mean, "
            f"uniform{'' if merged else ', linformer'}"
        )
    if merged and kind in ("linformer", "adaptive"):
        raise ValueError(
            f"attention kind {kind!r} goes by the places of keys, which layout 'merged' moves with "
            "the length of the first modality; take layout 'cross'"
        )
    if getattr(attn, "rope", None) is not None or isinstance(
        getattr(attn, "bias", None), RelativeBias1d
    ):
        raise ValueError(
            "attention_options has a position by distance (rope, or a RelativeBias1d), but two "
            "modalities have no common places; add positions to the tokens of each"
        )


def check_tokens(name: str, x: Tensor, option: str, width: int) -> None:
    """Refuses what is not (b n width); `option` is the argument that set the width."""
    if x.ndim != 3 or x.shape[-1] != width:
        raise ValueError(
            f"{name} must be (b, n, {width}), as {option} ({width}) says, got {tuple(x.shape)}"
        )


def _side_by_side(
    own: tuple[MaskLike, Tensor], other: tuple[MaskLike, Tensor], x: Tensor
) -> Mask | None:
    """One rule for the keys of both, from a rule and the tokens (b n d) of each."""
    if own[0] is None and other[0] is None:
        return None
    parts = []
    for mask, tokens in (own, other):
        rule, n = Mask.of(mask), tokens.shape[1]
        if rule is None:
            allowed = torch.ones(1, 1, 1, n, dtype=torch.bool, device=x.device)
        else:
            allowed = rule.lower(x.shape[1], n, x.device)
            check_broadcast(allowed, (len(x), allowed.shape[1], x.shape[1], n))
        parts.append(allowed.expand(*allowed.shape[:3], n))
    axes = torch.broadcast_shapes(*(part.shape[:3] for part in parts))
    return Mask.dense(torch.cat([part.expand(*axes, -1) for part in parts], dim=-1))
