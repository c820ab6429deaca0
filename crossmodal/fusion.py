"""Fusion of text and image: what two towers gave, normalised each by itself, then cross-attended.

Shapes: b batch, n/m text/image tokens, d width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from crossmodal.cross import CrossBlock, check_tokens, modality_share, norms_of_two, second_of
from crossmodal.encoded import Encoded
from vision.checks import check_choice
from zoo.layers import Mask, NormLayer, layer_norm, sincos_1d
from zoo.layers.check import integer

__all__ = ["CrossBlock", "Fusion", "modality_share"]

DIRECTIONS = ("text_to_image", "image_to_text", "both")
POSITIONS = ("none", "learned", "sincos")


class Fusion(nn.Module):
    """Text and image, each projected to one width and normalised, then `CrossBlock`s.

    The norms on entry follow `norm` as those of the blocks do: with `per_modality`, and with
    `shared`, since a LayerNorm takes each token by itself, a factor on all features of a modality
    changes nothing. What a tower gave for padding is never read, and the output is 0 there.

    Args:
        dim_text: Width of the text tower's tokens.
        dim_image: Width of the image tower's tokens.
        dim: Width of the fusion.
        depth: Number of blocks, for each direction.
        num_heads: Attention heads.
        direction: `text_to_image` (text queries attend to the image), `image_to_text`, or `both`;
            in each layer of `both`, either reads what the other was before it.
        norm: As in `CrossBlock`; with `none` and `qk` nothing is normalised on entry.
        layout: As in `CrossBlock`, and so are `gated`, `self_attention`, `attention`,
            `attention_options`, `mlp_ratio` and `proj_drop`.
        position: Added to the tokens of each modality: `none`, `learned` or `sincos`.
        max_text: Most text tokens that have a position; not needed with `none`.
        max_image: Most image tokens that have one.
    """

    def __init__(
        self,
        dim_text: int,
        dim_image: int,
        dim: int,
        depth: int = 1,
        num_heads: int = 8,
        *,
        direction: str = "text_to_image",
        norm: str = "per_modality",
        layout: str = "cross",
        gated: bool = True,
        self_attention: bool = False,
        attention: str = "full",
        attention_options: dict[str, Any] | None = None,
        position: str = "none",
        max_text: int | None = None,
        max_image: int | None = None,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        norm_layer: NormLayer = layer_norm,
    ) -> None:
        super().__init__()
        check_choice("direction", direction, DIRECTIONS)
        self.dim, self.direction, self.grad_checkpointing = integer("dim", dim), direction, False
        self.dim_text = integer("dim_text", dim_text)
        self.dim_image = integer("dim_image", dim_image)
        # Without a bias, which would not grow with the features.
        self.proj_text = nn.Linear(dim_text, dim, bias=False)
        self.proj_image = nn.Linear(dim_image, dim, bias=False)
        self.norm_text, self.norm_image = norms_of_two(norm, dim, dim, norm_layer)
        self.pos_text = _Position(position, dim, "max_text", max_text)
        self.pos_image = _Position(position, dim, "max_image", max_image)
        block = partial(
            CrossBlock,
            dim,
            dim,
            num_heads,
            norm=norm,
            layout=layout,
            gated=gated,
            self_attention=self_attention,
            attention=attention,
            attention_options=attention_options,
            mlp_ratio=mlp_ratio,
            proj_drop=proj_drop,
            norm_layer=norm_layer,
        )
        layers = range(integer("depth", depth))
        text_attends, image_attends = direction != "image_to_text", direction != "text_to_image"
        self.blocks_text = nn.ModuleList(block() for _ in layers if text_attends)
        self.blocks_image = nn.ModuleList(block() for _ in layers if image_attends)
        self.out_text = norm_layer(dim) if text_attends else None
        self.out_image = norm_layer(dim) if image_attends else None

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether activations are computed again in the backward pass instead of kept."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of the positions, which weight decay leaves alone."""
        return {name for name, _ in self.named_parameters() if name.endswith(".table")}

    def forward(self, text: Encoded, image: Encoded) -> tuple[Tensor | None, Tensor | None]:
        """Tokens of the text (b n d) and the image (b m d); None for one that does not attend."""
        self._check(text, image)
        norm_image = second_of(self.norm_text, self.norm_image)
        x = self.pos_text(self.norm_text(self.proj_text(_blank(text.tokens, text.mask))))
        y = self.pos_image(norm_image(self.proj_image(_blank(image.tokens, image.mask))))
        seen_x, seen_y = _keys(text.mask), _keys(image.mask)
        for layer in range(max(len(self.blocks_text), len(self.blocks_image))):
            before = x
            if self.blocks_text:
                x = self._run(self.blocks_text[layer], x, y, seen_x, seen_y)
            if self.blocks_image:
                y = self._run(self.blocks_image[layer], y, before, seen_y, seen_x)
        return (
            None if self.out_text is None else _blank(self.out_text(x), text.mask),
            None if self.out_image is None else _blank(self.out_image(y), image.mask),
        )

    def _run(self, block: nn.Module, *inputs: Any) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint(block, *inputs, use_reentrant=False)
        return block(*inputs)

    def _check(self, text: Encoded, image: Encoded) -> None:
        check_tokens("text.tokens", text.tokens, "dim_text", self.dim_text)
        check_tokens("image.tokens", image.tokens, "dim_image", self.dim_image)
        if len(text.tokens) != len(image.tokens):
            raise ValueError(
                f"text and image must agree in batch; got text.tokens {tuple(text.tokens.shape)}, "
                f"image.tokens {tuple(image.tokens.shape)}"
            )
        for name, (tokens, _, mask) in (("text", text), ("image", image)):
            if mask is not None and (mask.dtype != torch.bool or mask.shape != tokens.shape[:2]):
                raise ValueError(
                    f"{name}.mask must be bool, (b, n) = {tuple(tokens.shape[:2])} as its tokens "
                    f"are, got {mask.dtype}, {tuple(mask.shape)}"
                )


class _Position(nn.Module):
    """What is added to the tokens of one modality by their place."""

    table: Tensor | None

    def __init__(self, position: str, dim: int, name: str, length: int | None) -> None:
        super().__init__()
        check_choice("position", position, POSITIONS)
        self.name = name
        if position == "none":
            self.table = None
            return
        if length is None:
            raise ValueError(f"position {position!r} needs {name}, the most tokens there can be")
        integer(name, length)
        if position == "learned":
            self.table = nn.Parameter(torch.randn(length, dim) * 0.02)
        else:
            self.register_buffer("table", sincos_1d(length, dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(b n d) -> (b n d)"""
        if self.table is None:
            return x
        if x.shape[1] > len(self.table):
            raise ValueError(f"{x.shape[1]} tokens, but {self.name} is {len(self.table)}")
        return x + self.table[: x.shape[1]].to(x.dtype)


def _blank(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros for padding: even NaN there is no one's affair, nor in gradients."""
    return tokens if mask is None else tokens.masked_fill(~mask[..., None], 0)


def _keys(mask: Tensor | None) -> Mask | None:
    """(b n) -> a rule about keys"""
    return None if mask is None else Mask.dense(mask[:, None, None])
