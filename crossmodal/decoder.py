"""Decoders write captions token by token, behind one interface; the Transformer among them.

    logits = decoder(tokens, image, mask)  # known captions, all tokens at once (teacher forcing)
    state = decoder.start(image)  # or one token after another
    logits, state = decoder.step(token, state)

Logits at a token are of the one after it, and the two ways agree. A state is a tuple, changed by no
step; `zoo.layers.reorder(state, index)` takes samples of it, as beam search needs. What an image
costs once (projected keys and values) is in the state.

Captions come first and padding last: neither its ids nor its amount change the logits of a token,
and no gradient reaches its embeddings.

Shapes: b batch, n tokens, m image tokens, d width.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from crossmodal.encoded import Encoded
from vision.checks import check_choice
from zoo.layers import (
    CrossAttention,
    KeyValues,
    Mask,
    Mlp,
    Rope,
    SelfAttention,
    layer_norm,
    sincos_1d,
)
from zoo.layers.check import flag, fraction, integer
from zoo.layers.multihead import head_width

POSITIONS = ("learned", "sincos", "rope")


class Decoder(nn.Module):
    """What all decoders have: token embeddings, and the output over the vocabulary.

    Args:
        vocab_size: Number of token ids.
        context_length: Most tokens of a caption, start and end included.
        dim: Width.
        tie: Whether the output's weights are the embeddings (arXiv 1608.05859).
        drop: Dropout of what enters a layer and the output.
    """

    looks: ClassVar[str] = ""  # names of its attention layers over the image's tokens

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        dim: int,
        *,
        tie: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        self.vocab_size = integer("vocab_size", vocab_size)
        self.context_length = integer("context_length", context_length, minimum=2)
        self.dim = integer("dim", dim)
        self.drop = nn.Dropout(fraction("drop", drop))
        self.token_embed = nn.Embedding(vocab_size, dim)
        self.head = None if flag("tie", tie) else nn.Linear(dim, vocab_size, bias=False)
        for part in (self.token_embed, self.head):
            if part is not None:
                nn.init.normal_(part.weight, std=dim**-0.5)

    def forward(self, tokens: Tensor, image: Encoded, mask: Tensor | None = None) -> Tensor:
        """tokens (b n), mask (b n) True = a token of the caption -> logits (b n vocab)"""
        self._check(tokens, image, mask)
        return self._logits(self._read(tokens, image, mask))

    def start(self, image: Encoded) -> Any:
        """The state before the first token."""
        raise NotImplementedError

    def step(self, token: Tensor, state: Any) -> tuple[Tensor, Any]:
        """A token of each sample (b) -> logits of the next (b vocab), and the state after it."""
        raise NotImplementedError

    def _read(self, tokens: Tensor, image: Encoded, mask: Tensor | None) -> Tensor:
        """(b n) -> (b n d)"""
        raise NotImplementedError

    def _embed(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(b n) -> (b n d), zeros at padding; scaled to deviation 1, as in arXiv 1706.03762."""
        if mask is not None:
            tokens = tokens.masked_fill(~mask, 0)
        x = self.token_embed(tokens) * self.dim**0.5
        return x if mask is None else x.masked_fill(~mask[..., None], 0)

    def _logits(self, x: Tensor) -> Tensor:
        """(... d) -> (... vocab)"""
        weight = self.token_embed.weight if self.head is None else self.head.weight
        return F.linear(self.drop(x), weight)

    def _check(self, tokens: Tensor, image: Encoded, mask: Tensor | None) -> None:
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens must hold integers, got {tokens.dtype}")
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool with True = a token, got {mask.dtype}")
        shape = tuple(tokens.shape)
        if len(shape) != 2 or not shape[1] or (mask is not None and mask.shape != shape):
            raise ValueError(
                f"tokens and mask must both be (b, n) with n of at least 1, got {shape} and "
                f"{None if mask is None else tuple(mask.shape)}"
            )
        if shape[0] != len(image.tokens):
            raise ValueError(f"there are {shape[0]} captions for {len(image.tokens)} images")
        if shape[1] > self.context_length:
            raise ValueError(
                f"captions have {shape[1]} tokens, but context_length is {self.context_length}: "
                f"cut them with the model's make_tokenizer(), or build it with "
                f"context_length={shape[1]}"
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_content(tokens, mask)

    def _check_content(self, tokens: Tensor, mask: Tensor | None) -> None:
        """On the CPU only: another device would have to be waited for."""
        wrong = (tokens < 0) | (tokens >= self.vocab_size)
        if mask is not None:
            wrong = wrong & mask
            if bool((mask[:, 1:] & ~mask[:, :-1]).any()):
                raise ValueError("mask must be True for the first tokens: padding comes last")
        if bool(wrong.any()):
            raise ValueError(
                f"tokens {tokens[wrong].unique().tolist()[:8]} are not in the vocabulary of "
                f"{self.vocab_size}: take the model's make_tokenizer()"
            )


class DecoderBlock(nn.Module):
    """Pre-norm block: causal self-attention, cross-attention to the image, MLP (1706.03762)."""

    def __init__(
        self,
        dim: int,
        dim_image: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        drop: float = 0.0,
        rope: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (layer_norm(dim) for _ in range(3))
        self.attn = SelfAttention(dim, num_heads, proj_drop=drop, rope=rope)
        self.cross = CrossAttention(dim, num_heads, dim_context=dim_image, proj_drop=drop)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=drop)

    def forward(
        self, x: Tensor, image: Tensor, mask: Mask, image_mask: Tensor | None = None
    ) -> Tensor:
        """x (b n d), image (b m d_image) -> (b n d)"""
        x = x + self.attn(self.norm1(x), mask=mask)
        return self._look(x, image, image_mask)

    def extend(
        self, x: Tensor, past: KeyValues | None, image: KeyValues, image_mask: Tensor | None
    ) -> tuple[Tensor, KeyValues]:
        """The same for the tokens after `past`; see `SelfAttention.extend`."""
        attended, kept = self.attn.extend(self.norm1(x), past)
        return self._look(x + attended, image, image_mask), kept

    def _look(self, x: Tensor, image: Tensor | KeyValues, mask: Tensor | None) -> Tensor:
        x = x + self.cross(self.norm2(x), image, mask)
        return x + self.mlp(self.norm3(x))


class TransformerState(NamedTuple):
    """Keys and values by layer: of the tokens so far (None before the first), of the image."""

    past: tuple[KeyValues | None, ...]
    image: tuple[KeyValues, ...]
    mask: Tensor | None  # b 1 1 m


class TransformerDecoder(Decoder):
    """Transformer decoder (arXiv 1706.03762) with pre-norm blocks.

    The image's tokens have a norm of their own, once for all blocks.

    Args:
        dim_image: Width of the image's tokens.
        position: `learned`, `sincos` (fixed), or `rope` (rotation, in each block).
    """

    looks = "blocks.*.cross"

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        dim_image: int,
        dim: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        *,
        mlp_ratio: float = 4.0,
        position: str = "learned",
        tie: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, context_length, dim, tie=tie, drop=drop)
        check_choice("position", position, POSITIONS)
        self.grad_checkpointing = False
        self._add_positions(position)
        self.norm_image = layer_norm(dim_image)
        rope = Rope(head_width(dim, num_heads)) if position == "rope" else None
        self.blocks = nn.ModuleList(
            DecoderBlock(dim, dim_image, num_heads, mlp_ratio=mlp_ratio, drop=drop, rope=rope)
            for _ in range(integer("depth", depth))
        )
        self.norm = layer_norm(dim)
        self.init_weights()

    def _add_positions(self, position: str) -> None:
        """Adds `pos_embed`: a parameter, or a buffer that is computed again and never saved."""
        self.pos_embed: Tensor | None = None
        if position == "learned":
            self.pos_embed = nn.Parameter(torch.empty(1, self.context_length, self.dim))
        elif position == "sincos":
            del self.pos_embed
            table = sincos_1d(self.context_length, self.dim)
            self.register_buffer("pos_embed", table[None], persistent=False)

    def init_weights(self) -> None:
        """GPT-2's initialisation: what is added to the residual stream shrinks with the depth."""
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.normal_(self.pos_embed)  # the tokens' deviation
        branches = 3 * len(self.blocks)
        for name, module in self.blocks.named_modules():
            if isinstance(module, nn.Linear):
                ends = name.split(".")[-1] in ("proj", "fc2")
                std = module.in_features**-0.5 * (branches**-0.5 if ends else 1)
                nn.init.normal_(module.weight, std=std)
                nn.init.zeros_(module.bias)

    def start(self, image: Encoded) -> TransformerState:
        tokens = self.norm_image(image.tokens)
        kept = tuple(block.cross.project(tokens) for block in self.blocks)  # type: ignore[union-attr, operator]
        return TransformerState((None,) * len(kept), kept, as_keys(image.mask))

    def step(self, token: Tensor, state: TransformerState) -> tuple[Tensor, TransformerState]:
        read = 0 if state.past[0] is None else state.past[0].length
        if read >= self.context_length:
            raise ValueError(f"{read} tokens are read, as many as context_length allows")
        x, past = self._place(self._embed(token[:, None]), read), []
        for block, before, image in zip(self.blocks, state.past, state.image, strict=True):
            x, kept = block.extend(x, before, image, state.mask)  # type: ignore[operator]
            past.append(kept)
        return self._logits(self.norm(x)[:, 0]), state._replace(past=tuple(past))

    def _read(self, tokens: Tensor, image: Encoded, mask: Tensor | None) -> Tensor:
        rule: Mask = Mask.causal()
        if mask is not None:
            rule = rule & Mask.padding(mask.sum(1))
        x, keys = self._place(self._embed(tokens, mask), 0), self.norm_image(image.tokens)
        for block in self.blocks:
            x = self._run(block, x, keys, rule, as_keys(image.mask))
        return self.norm(x)

    def _run(self, block: nn.Module, *inputs: Any) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def _place(self, x: Tensor, first: int) -> Tensor:
        """(b n d), the tokens from place `first` on, with their positions"""
        if self.pos_embed is not None:
            x = x + self.pos_embed[:, first : first + x.shape[1]]
        return self.drop(x)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass instead of kept."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of the positions, which weight decay leaves alone."""
        return {name for name, _ in self.named_parameters() if name == "pos_embed"}


def as_keys(mask: Tensor | None) -> Tensor | None:
    """(b m) -> (b 1 1 m)"""
    return None if mask is None else mask[:, None, None]
