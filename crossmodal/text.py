"""A Transformer that reads captions, and the bag of words it is compared with.

Padding comes last and never counts: neither its ids nor its amount change an output, no gradient
passes through it, and a sample that is nothing else gives zeros.

Shapes: b batch, n tokens, d width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from crossmodal.encoded import Encoded
from crossmodal.tokenizer import Tokenizer, create_tokenizer
from vision.checks import check_choice
from vision.vit import ACTIVATIONS
from zoo.card import ModelCard
from zoo.layers import (
    AttentionPool,
    Block,
    Mask,
    RelativeBias1d,
    Rope,
    checkpoint_block,
    core_options,
    create_attention,
    kinds_with_mask,
    sincos_1d,
    supported_masks,
)
from zoo.layers.check import integer
from zoo.layers.core import Full
from zoo.layers.factory import check_own
from zoo.layers.multihead import head_width
from zoo.registry import records_options, register_model

POOLS = ("last", "mean", "attention")
POSITIONS = ("learned", "sincos", "rope", "relative", "none")


class TextTower(nn.Module):
    """Pre-norm Transformer over token ids, as in CLIP (arXiv 2103.00020).

    Args:
        tokenizer: Makes the ids, see `create_tokenizer`; its vocabulary is the tower's.
        context_length: Most tokens of a caption; by default the tokenizer's.
        embed_dim: Width of tokens and of the pooled vector.
        depth: Number of blocks; without any, each token is read by itself.
        num_heads: Attention heads.
        head_dim: Width of a head; `embed_dim / num_heads` where None.
        mlp_ratio: Hidden width of the MLP over `embed_dim`.
        act: One of `ACTIVATIONS`.
        pool: `last` (the last token of the caption, its end token), `mean`, or `attention`
            (a learned query reads the tokens).
        causal: Whether a token sees only those before it.
        position: `learned`, `sincos` (fixed), `none`, or one in each block: `rope` (rotation),
            `relative` (a bias by distance).
        attention: Attention kind, one of `zoo.layers.list_attention()`.
        attention_options: Further options of that kind.
        norm_eps: Epsilon of the norms.
        qk_norm: Whether queries and keys are normalised by head (arXiv 2302.05442).
        init_values: Initial LayerScale (arXiv 2103.17239); None leaves it out.
        embed_drop_rate: Dropout of the embedded tokens.
        proj_drop_rate: Dropout after the projections of attention and MLP.
        attn_drop_rate: Dropout of attention weights.
        drop_path_rate: Stochastic depth (arXiv 1603.09382) at the last block, rising linearly.
    """

    card: ModelCard

    @records_options
    def __init__(
        self,
        tokenizer: str = "clip",
        context_length: int | None = None,
        embed_dim: int = 512,
        depth: int = 12,
        num_heads: int = 8,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        act: str = "gelu",
        pool: str = "last",
        causal: bool = True,
        position: str = "learned",
        attention: str = "full",
        attention_options: dict[str, Any] | None = None,
        norm_eps: float = 1e-5,
        qk_norm: bool = False,
        init_values: float | None = None,
        embed_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        check_choice("pool", pool, POOLS)
        check_choice("position", position, POSITIONS)
        check_choice("act", act, ACTIVATIONS)
        _check_attention(attention, attention_options, causal)
        made = create_tokenizer(tokenizer, context_length)
        self.tokenizer, self.context_length = tokenizer, made.context_length
        self.vocab_size, self.pad_id = made.vocab_size, made.pad_id
        self.num_features = self.embed_dim = integer("embed_dim", embed_dim)
        self.pooled_features = self.num_features
        self.pool, self.causal, self.grad_checkpointing = pool, causal, False
        norm_layer = partial(nn.LayerNorm, eps=norm_eps)
        mlp = {"mlp_ratio": mlp_ratio, "norm_layer": norm_layer, "act_layer": ACTIVATIONS[act]}

        self.token_embed = nn.Embedding(self.vocab_size, embed_dim)
        self._add_positions(position)
        self.embed_drop = nn.Dropout(embed_drop_rate)
        make_attention = partial(
            create_attention,
            attention,
            embed_dim,
            num_heads,
            head_dim=head_dim,
            qk_norm=qk_norm,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            norm_layer=norm_layer,
        )
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                num_heads,
                init_values=init_values,
                drop_path=drop_path_rate * layer / max(1, depth - 1),
                proj_drop=proj_drop_rate,
                attn=make_attention(
                    **self._attention_options(attention, attention_options, layer),
                    **self._position_option(position, num_heads, head_dim),
                ),
                **mlp,
            )
            for layer in range(integer("depth", depth, minimum=0))
        )
        self.norm = norm_layer(embed_dim)
        pools = pool == "attention"
        self.attn_pool = AttentionPool(embed_dim, num_heads, **mlp) if pools else None
        self.init_weights()

    def _add_positions(self, position: str) -> None:
        """Adds `pos_embed`: a parameter, or a buffer that is computed again and never saved."""
        self.pos_embed: Tensor | None
        if position == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, self.context_length, self.embed_dim))
        elif position == "sincos":
            # Token embeddings start at a deviation of 0.02 and not of 1.
            table = 0.02 * sincos_1d(self.context_length, self.embed_dim)[None]
            self.register_buffer("pos_embed", table, persistent=False)
        else:
            self.pos_embed = None

    def _attention_options(
        self, kind: str, options: dict[str, Any] | None, layer: int
    ) -> dict[str, Any]:
        """The options of a kind, with those that follow from the tower filled in."""
        known = {"max_len": self.context_length, "shift": bool(layer % 2)}
        known = {name: value for name, value in known.items() if name in core_options(kind)}
        return {**known, **(options or {})}

    def _position_option(
        self, position: str, num_heads: int, head_dim: int | None
    ) -> dict[str, Any]:
        """A position inside the attention of one block."""
        if position == "relative":
            return {"bias": RelativeBias1d(num_heads, bidirectional=not self.causal)}
        if position == "rope":
            return {"rope": Rope(head_width(self.embed_dim, num_heads, head_dim))}
        return {}

    def init_weights(self) -> None:
        """CLIP's initialisation: what is added to the residual stream shrinks with the depth."""
        nn.init.normal_(self.token_embed.weight, std=0.02)
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.normal_(self.pos_embed, std=0.01)
        std = self.embed_dim**-0.5
        added = std * (2 * max(1, len(self.blocks))) ** -0.5
        deviations = {"qkv": std, "proj": added, "fc1": std * 0.5**0.5, "fc2": added}
        for name, module in self.blocks.named_modules():
            part = name.split(".")[-1]
            if isinstance(module, nn.Linear) and part in deviations:
                nn.init.normal_(module.weight, std=deviations[part])
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor, mask: Tensor) -> Encoded:
        """(b n) ids, (b n) True = a token of the caption -> tokens (b n d), pooled (b d)"""
        self._check(tokens, mask)
        lengths, padding = mask.sum(1), ~mask[..., None]
        x = self._embed(tokens, mask)
        rule = self._rule(lengths)
        for block in self.blocks:
            x = self._run(block, x, rule)
        x = self.norm(x).masked_fill(padding, 0)
        pooled = self._pool(x, lengths).masked_fill((lengths == 0)[:, None], 0)
        return Encoded(x, pooled, mask)

    def _embed(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """(b n) -> (b n d); ids of padding are not looked at."""
        x = self.token_embed(tokens.masked_fill(~mask, 0))
        if self.pos_embed is not None:
            x = x + self.pos_embed[:, : x.shape[1]]
        return self.embed_drop(x)

    def _rule(self, lengths: Tensor) -> Mask:
        """Which token sees which.

        Padding comes last, so that under a causal rule no token sees it, and exact attention has a
        fast kernel for that rule alone. Other kinds may scale by what no query sees.
        """
        if not self.causal:
            return Mask.padding(lengths)
        cores = [getattr(block.attn, "core", None) for block in self.blocks]
        exact = all(isinstance(core, Full) for core in cores)
        return Mask.causal() if exact else Mask.causal() & Mask.padding(lengths)

    def _run(self, block: nn.Module, x: Tensor, mask: Mask) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint_block(block, x, mask)
        return block(x, mask)

    def _pool(self, x: Tensor, lengths: Tensor) -> Tensor:
        """(b n d), zeros at padding -> (b d)"""
        if self.attn_pool is not None:
            return self.attn_pool(x, Mask.padding(lengths))
        if self.pool == "mean":
            return x.sum(1) / lengths.clamp(min=1)[:, None]
        return x[torch.arange(len(x), device=x.device), (lengths - 1).clamp(min=0)]

    def _check(self, tokens: Tensor, mask: Tensor) -> None:
        if tokens.is_floating_point() or tokens.dtype == torch.bool or mask.dtype != torch.bool:
            raise TypeError(
                f"tokens must hold integers and mask truth values, got {tokens.dtype} and "
                f"{mask.dtype}"
            )
        if tokens.ndim != 2 or tokens.shape != mask.shape or not tokens.shape[1]:
            raise ValueError(
                f"tokens and mask must both be (b, n) with n of at least 1, got "
                f"{tuple(tokens.shape)} and {tuple(mask.shape)}"
            )
        if tokens.shape[1] > self.context_length:
            raise ValueError(
                f"captions have {tokens.shape[1]} tokens, but context_length is "
                f"{self.context_length}: cut them with the tower's make_tokenizer(), or build the "
                f"tower with context_length={tokens.shape[1]}"
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_content(tokens, mask)

    def _check_content(self, tokens: Tensor, mask: Tensor) -> None:
        """On the CPU only: another device would have to be waited for."""
        if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
            raise ValueError("mask must be True for the first tokens: padding comes last")
        wrong = tokens[mask & ((tokens < 0) | (tokens >= self.vocab_size))].unique().tolist()
        if wrong:
            raise ValueError(
                f"tokens {wrong[:8]} are not in the vocabulary of {self.vocab_size} of tokenizer "
                f"{self.tokenizer!r}: take the tower's make_tokenizer()"
            )

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids the tower reads."""
        return create_tokenizer(self.tokenizer, self.context_length)

    def position_lengths(self) -> set[str]:
        """Names of the learned positions, for resampling; see `zoo.merge`."""
        return {"pos_embed"} if isinstance(self.pos_embed, nn.Parameter) else set()

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass instead of kept."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of the positions and of the pooling's query, which weight decay leaves alone."""
        alone = ("pos_embed", "latent", "relative_attention_bias.weight")
        return {name for name, _ in self.named_parameters() if name.endswith(alone)}


def _check_attention(kind: str, options: dict[str, Any] | None, causal: bool) -> None:
    check_own(kind, options or {})
    if causal and "causal" not in supported_masks(kind):
        raise ValueError(
            f"attention kind {kind!r} cannot be causal: give causal=False, or one of "
            f"{', '.join(kinds_with_mask('causal'))}"
        )


# --- variants --------------------------------------------------------------------------------


@register_model
def text_bag(**options: Any) -> TextTower:
    """The mean of word vectors, in any order: no token sees another."""
    bag = {"embed_dim": 128, "depth": 0, "position": "none", "pool": "mean", "causal": False}
    return TextTower(**{**bag, **options})


@register_model
def text_micro(**options: Any) -> TextTower:
    """Two layers, 128 wide."""
    return TextTower(**{"embed_dim": 128, "depth": 2, "num_heads": 4, **options})


@register_model
def text_small(**options: Any) -> TextTower:
    """Six layers, 384 wide."""
    return TextTower(**{"embed_dim": 384, "depth": 6, "num_heads": 6, **options})


@register_model
def text_base(**options: Any) -> TextTower:
    """The text tower of CLIP's ViT-B models (arXiv 2103.00020): twelve layers, 512 wide."""
    return TextTower(**options)
