"""Vision Transformer (arXiv 2010.11929) and its variants.

Attribute names are timm's, so weights move between the two without a key map.

Shapes: b batch, n tokens (prefix tokens first, then the grid row by row), d width, c y x channels,
rows and columns of an image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vision.checks import check_choice, pair, take_indices
from zoo.card import ModelCard
from zoo.layers import (
    AttentionPool,
    Block,
    PriorBias,
    RelativeBiasGrid,
    Rope,
    checkpoint_block,
    create_attention,
    sincos_2d,
)
from zoo.layers.factory import geometry
from zoo.layers.multihead import head_width
from zoo.registry import records_options

POOLS = ("token", "avg", "map", "")
POSITIONS = ("learned", "sincos", "none", "relative", "rope", "prior")


class QuickGelu(nn.Module):
    """x sigmoid(1.702 x): OpenAI's weights of CLIP (arXiv 2103.00020) were trained with it."""

    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... d)"""
        return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Any] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGelu,
}


class PatchEmbed(nn.Module):
    """Cuts images into patches and projects each: (b c y x) -> (b n d).

    The weight is kept in a convolution's shape, as in timm, but applied as one matrix product:
    a train step on a CPU is faster that way, most of all with large patches.
    """

    def __init__(
        self,
        img_size: tuple[int, int],
        patch_size: tuple[int, int],
        in_chans: int,
        embed_dim: int,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if any(size % patch for size, patch in zip(img_size, patch_size, strict=True)):
            raise ValueError(
                f"img_size {img_size} must be divisible by patch_size {patch_size}; "
                f"nearest: {_nearest_size(img_size, patch_size)}"
            )
        self.img_size, self.patch_size, self.in_chans = img_size, patch_size, in_chans
        self.grid_size = (img_size[0] // patch_size[0], img_size[1] // patch_size[1])
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, patch_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b n d)."""
        wanted = (self.in_chans, *self.img_size)
        if x.ndim != 4 or tuple(x.shape[1:]) != wanted:
            raise ValueError(
                f"images have shape {tuple(x.shape)}, but the model takes "
                f"(b, {', '.join(map(str, wanted))}): build it with in_chans and img_size to suit, "
                f"or resize the images (zoo.transforms(model))"
            )
        rows, cols = self.patch_size
        patches = rearrange(x, "b c (y r) (x s) -> b (y x) (c r s)", r=rows, s=cols)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


OF_THE_MODEL = {  # options of attention that follow from the model's own
    "dim": "embed_dim",
    "num_heads": "num_heads",
    "head_dim": "head_dim",
    "qkv_bias": "qkv_bias",
    "qk_norm": "qk_norm",
    "attn_drop": "attn_drop_rate",
    "proj_drop": "proj_drop_rate",
    "norm_layer": "norm_eps",
    "temperature": "temperature",
    "bias": "position",
    "rope": "position",
}


class VisionTransformer(nn.Module):
    """Vision Transformer for images of one fixed size.

    Args:
        img_size: Side, or rows and columns, of the images.
        patch_size: Side, or rows and columns, of a patch; divides `img_size`.
        in_chans: Channels of the images.
        num_classes: Outputs; 0 leaves the classifier out and gives pooled features.
        global_pool: `token` (the class token), `avg` (mean over the grid), `map` (attention
            pooling, as in SigLIP), or `""` (no pooling: an output a token).
        embed_dim: Width.
        depth: Number of blocks.
        num_heads: Attention heads.
        head_dim: Width of a head; `embed_dim / num_heads` where None.
        mlp_ratio: Hidden width of the MLP over `embed_dim`.
        qkv_bias: Whether the projections to queries, keys and values have biases.
        qk_norm: Whether queries and keys are normalised by head (arXiv 2302.05442).
        init_values: Initial LayerScale (arXiv 2103.17239); None leaves it out.
        class_token: Whether a class token goes first.
        reg_tokens: Number of register tokens after it (arXiv 2309.16588).
        no_embed_class: Whether positions are added to the grid only, not to the prefix tokens.
        pre_norm: Norm before the first block, and no bias in the patch embedding, as in CLIP.
        fc_norm: Whether the final norm comes after pooling; where None, with `avg` only.
        norm_eps: Epsilon of the norms.
        act: One of `ACTIVATIONS`.
        attention: Attention kind, one of `zoo.layers.list_attention()`.
        attention_options: Further options of that kind. What follows from the model is filled in:
            the grid, the prefix tokens as global ones, the longest sequence.
        position: `learned`, `sincos` (fixed, on the grid only), `none`, or one in each block:
            `relative` (a bias by offset), `rope` (axial rotation), `prior` (a bias by place).
        temperature: Divides the attention scores: a number, or "learned" (one per head).
        drop_rate: Dropout before the classifier.
        proj_drop_rate: Dropout after the projections of attention and MLP.
        attn_drop_rate: Dropout of attention weights.
        drop_path_rate: Stochastic depth (arXiv 1603.09382) at the last block, rising linearly.
    """

    card: ModelCard
    first_conv = "patch_embed.proj"  # reads the image's channels; zoo.weights adapts it

    @records_options
    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        patch_size: int | Sequence[int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        class_token: bool = True,
        reg_tokens: int = 0,
        no_embed_class: bool = False,
        pre_norm: bool = False,
        fc_norm: bool | None = None,
        norm_eps: float = 1e-6,
        act: str = "gelu",
        attention: str = "full",
        attention_options: dict[str, Any] | None = None,
        position: str = "learned",
        temperature: float | str = 1.0,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        _check_pool(global_pool, class_token)
        check_choice("position", position, POSITIONS)
        check_choice("act", act, ACTIVATIONS)
        if depth < 1 or num_classes < 0:
            raise ValueError(f"depth ({depth}) must be at least 1, num_classes ({num_classes}) 0")
        norm_layer = partial(nn.LayerNorm, eps=norm_eps)
        mlp = {"mlp_ratio": mlp_ratio, "norm_layer": norm_layer, "act_layer": ACTIVATIONS[act]}
        self.num_classes, self.global_pool = num_classes, global_pool
        self.num_features = self.embed_dim = embed_dim
        self.no_embed_class, self.grad_checkpointing = no_embed_class, False

        self.patch_embed = PatchEmbed(
            pair(img_size, "img_size"),
            pair(patch_size, "patch_size"),
            in_chans,
            embed_dim,
            bias=not pre_norm,
        )
        self._add_tokens(class_token, reg_tokens)
        self._add_positions(position)
        self.norm_pre = norm_layer(embed_dim) if pre_norm else nn.Identity()
        make_attention = partial(
            create_attention,
            attention,
            embed_dim,
            num_heads,
            head_dim=head_dim,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            norm_layer=norm_layer,
            **({} if temperature == 1.0 else {"temperature": temperature}),
        )
        self.blocks = nn.Sequential(
            *(
                Block(
                    embed_dim,
                    num_heads,
                    init_values=init_values,
                    proj_drop=proj_drop_rate,
                    drop_path=drop_path_rate * layer / max(1, depth - 1),
                    attn=make_attention(
                        **self._attention_options(attention, attention_options, layer),
                        **self._position_option(position, num_heads, head_dim),
                    ),
                    **mlp,
                )
                for layer in range(depth)
            )
        )
        self._add_pooling(num_heads, norm_layer, mlp, after_pool=fc_norm)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.init_weights()

    def _add_tokens(self, class_token: bool, reg_tokens: int) -> None:
        """Adds the tokens that go before those of the grid."""
        width = self.embed_dim
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.reg_token = nn.Parameter(torch.empty(1, reg_tokens, width)) if reg_tokens else None
        self.has_class_token, self.num_prefix_tokens = class_token, int(class_token) + reg_tokens

    def _add_pooling(
        self,
        num_heads: int,
        norm_layer: Callable[[int], nn.Module],
        mlp: dict[str, Any],
        after_pool: bool | None,
    ) -> None:
        """Adds the final norm, before pooling or after it, and the pooling that has weights."""
        if after_pool is None:
            after_pool = self.global_pool == "avg"
        pools = self.global_pool == "map"
        self.norm = nn.Identity() if after_pool else norm_layer(self.embed_dim)
        self.attn_pool = AttentionPool(self.embed_dim, num_heads, **mlp) if pools else None
        self.fc_norm = norm_layer(self.embed_dim) if after_pool else nn.Identity()

    def _add_positions(self, position: str) -> None:
        """Adds `pos_embed`: a parameter, or a buffer that is computed again and never saved."""
        self.pos_embed: Tensor | None
        if position == "learned":
            prefix = 0 if self.no_embed_class else self.num_prefix_tokens
            length = prefix + self.patch_embed.num_patches
            self.pos_embed = nn.Parameter(torch.empty(1, length, self.embed_dim))
        elif position == "sincos":
            grid = sincos_2d(self.patch_embed.grid_size, self.embed_dim)
            self.register_buffer("pos_embed", grid.reshape(1, -1, self.embed_dim), persistent=False)
            self.no_embed_class = True
        else:
            self.pos_embed = None

    def _attention_options(
        self, kind: str, options: dict[str, Any] | None, layer: int
    ) -> dict[str, Any]:
        """The options of a kind, with those that follow from the model's geometry filled in."""
        for name in options or {}:
            if name in OF_THE_MODEL:
                raise TypeError(
                    f"attention_options has {name!r}, which the model sets: give the model "
                    f"{OF_THE_MODEL[name]} instead"
                )
        known = geometry(kind, self.patch_embed.grid_size, self.num_prefix_tokens, layer)
        return {**known, **(options or {})}

    def _position_option(
        self, position: str, num_heads: int, head_dim: int | None
    ) -> dict[str, Any]:
        """A position inside the attention of one block."""
        grid, prefix = self.patch_embed.grid_size, self.num_prefix_tokens
        if position == "relative":
            return {"bias": RelativeBiasGrid(num_heads, grid, prefix)}
        if position == "prior":
            return {"bias": PriorBias(num_heads, grid, prefix)}
        if position == "rope":
            width = head_width(self.embed_dim, num_heads, head_dim)
            return {"rope": Rope(width, grid=grid, num_prefix_tokens=prefix)}
        return {}

    def init_weights(self) -> None:
        """timm's initialisation: its truncation at 100 deviations never bites, so it is normal."""
        if isinstance(self.pos_embed, nn.Parameter):
            nn.init.normal_(self.pos_embed, std=0.02)
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                nn.init.normal_(token, std=1e-6)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                _init_linear(module)

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> logits (b num_classes), or features (b d) without a classifier."""
        return self.forward_head(self.norm(self._run_blocks(x, keep=self._tokens_read())))

    def _tokens_read(self) -> int | None:
        """How many of the last block's tokens the head reads, where it does not read all.

        The others need not pass the last MLP and norm. Whoever hooks these gets all tokens.
        """
        if self.global_pool != "token":
            return None
        watched = [self.blocks, *self.blocks[-1].modules(), self.norm]
        hooked = any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks
            for m in watched
        )
        return 1 if isinstance(self.blocks[-1], Block) and not hooked else None

    def forward_features(self, x: Tensor) -> Tensor:
        """(b c y x) -> tokens after the last block and the norm (b n d)."""
        return self.norm(self._run_blocks(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Tokens (b n d) -> logits, or the features before the classifier (b d)."""
        x = self.head_drop(self.fc_norm(self._pool(x)))
        return x if pre_logits else self.head(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Features of several blocks, as timm returns them.

        Args:
            x: (b c y x).
            indices: The last so many blocks, the blocks of a list (negative from the end), or all.
            return_prefix_tokens: Gives pairs of the grid and the prefix tokens (b p d).
            norm: Whether the final norm is applied to each.
            stop_early: Whether blocks after the last one asked for are left out.
            output_fmt: `NCHW` (b d y x) or `NLC` (b n d).
            intermediates_only: Leaves out the final tokens.

        Returns:
            `(tokens, intermediates)`, or the intermediates alone.
        """
        check_choice("output_fmt", output_fmt, ("NCHW", "NLC"))
        take = take_indices(len(self.blocks), indices)
        blocks = list(self.blocks)[: max(take) + 1 if stop_early else None]
        x = self._embed(x)
        taken = []
        for index, block in enumerate(blocks):
            x = self._run(block, x)
            if index in take:
                taken.append(self.norm(x) if norm else x)
        prefix = self.num_prefix_tokens
        outputs: list[Any] = [tokens[:, prefix:] for tokens in taken]
        if output_fmt == "NCHW":
            rows = self.patch_embed.grid_size[0]
            outputs = [rearrange(t, "b (y x) d -> b d y x", y=rows).contiguous() for t in outputs]
        if return_prefix_tokens and prefix:
            outputs = [(grid, t[:, :prefix]) for grid, t in zip(outputs, taken, strict=True)]
        return outputs if intermediates_only else (self.norm(x), outputs)

    def _embed(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b n d): patches, prefix tokens, positions."""
        x = self.patch_embed(x)
        if self.pos_embed is not None and self.no_embed_class:
            x = x + self.pos_embed
        prefix = [
            token.expand(x.shape[0], -1, -1)
            for token in (self.cls_token, self.reg_token)
            if token is not None
        ]
        if prefix:
            x = torch.cat([*prefix, x], dim=1)
        if self.pos_embed is not None and not self.no_embed_class:
            x = x + self.pos_embed
        return self.norm_pre(x)

    def _run_blocks(self, x: Tensor, keep: int | None = None) -> Tensor:
        x = self._embed(x)
        if keep is None and not self.grad_checkpointing:
            return self.blocks(x)
        *blocks, last = self.blocks
        for block in blocks:
            x = self._run(block, x)
        return self._run(last, x, keep)

    def _run(self, block: nn.Module, x: Tensor, keep: int | None = None) -> Tensor:
        if self.grad_checkpointing and torch.is_grad_enabled():
            return checkpoint_block(block, x, None, keep)
        return block(x) if keep is None else block(x, None, keep)

    def _pool(self, x: Tensor) -> Tensor:
        if self.attn_pool is not None:
            return self.attn_pool(x[:, self.num_prefix_tokens :])
        if self.global_pool == "token":
            return x[:, 0]
        if self.global_pool == "avg":
            return x[:, self.num_prefix_tokens :].mean(dim=1)
        return x

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for `num_classes` (0: none), on the model's device and in its dtype.

        Raises:
            ValueError: the pooling is unknown or needs weights that the model lacks.
        """
        if global_pool is not None:
            _check_pool(global_pool, self.has_class_token)
            if global_pool == "map" and self.attn_pool is None:
                raise ValueError("global_pool 'map' needs a model built with it: it has weights")
            if global_pool != "map":
                self.attn_pool = None
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.head = nn.Identity()
        if num_classes:
            like = self.patch_embed.proj.weight
            head = nn.Linear(self.embed_dim, num_classes, device=like.device, dtype=like.dtype)
            _init_linear(head)
            self.head = head
        self.head.train(self.training)
        after_pool = not isinstance(self.fc_norm, nn.Identity)  # the norm stays where it was built
        self.card = self.card.with_options(
            num_classes=num_classes,
            global_pool=self.global_pool,
            fc_norm=None if after_pool == (self.global_pool == "avg") else after_pool,
        )

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass instead of kept."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Names of the positions and tokens, which weight decay leaves alone."""
        alone = ("pos_embed", "cls_token", "reg_token", "latent")
        biases = ("relative_position_bias_table", "prior")
        return {
            name for name, _ in self.named_parameters() if name.split(".")[-1] in alone + biases
        }

    @property
    def num_layers(self) -> int:
        """Index of the last layer, the head: see `layer_index`."""
        return len(self.blocks) + 1

    def layer_index(self, name: str) -> int:
        """Layer of a parameter: 0 embeddings, 1 to depth the blocks, depth + 1 norm and head."""
        if match := re.match(r"blocks\.(\d+)\.", name):
            return int(match[1]) + 1
        top = name.split(".")[0]
        if top in ("patch_embed", "cls_token", "reg_token", "pos_embed", "norm_pre"):
            return 0
        if top in ("norm", "attn_pool", "fc_norm", "head"):
            return self.num_layers
        raise ValueError(f"{name!r} is no parameter of {type(self).__name__}")

    def position_grids(self) -> dict[str, tuple[int, int]]:
        """Grid of each learned position embedding, for resampling; see `zoo.weights`."""
        tables = ("pos_embed", "relative_position_bias_table", "prior")
        return {
            name: self.patch_embed.grid_size
            for name, _ in self.named_parameters()
            if name.split(".")[-1] in tables
        }


def _init_linear(linear: nn.Linear) -> None:
    nn.init.normal_(linear.weight, std=0.02)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def _nearest_size(size: tuple[int, int], patch: tuple[int, int]) -> tuple[int, ...]:
    return tuple(max(1, round(s / p)) * p for s, p in zip(size, patch, strict=True))


def _check_pool(global_pool: str, class_token: bool) -> None:
    check_choice("global_pool", global_pool, POOLS)
    if global_pool == "token" and not class_token:
        raise ValueError("global_pool 'token' needs class_token=True; or take 'avg' or 'map'")
