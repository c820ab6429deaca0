"""Image and text towers: any network of the zoo, read for its tokens and its pooled vector.

Shapes: b batch, n tokens (prefix tokens first, then the grid row by row), d width of a token, p
width of the pooled vector, c y x channels, rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

import zoo
from crossmodal.encoded import Encoded
from crossmodal.text import TextTower
from vision.checks import pair
from zoo import freezing
from zoo.card import Preprocessing
from zoo.freezing import freeze

__all__ = ["ImageTower", "freeze", "text_tower"]

_SET_BY_THE_TOWER = ("num_classes", "img_size", "in_chans", "class_names")
_AFTER_THE_MAP = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Flatten, nn.Dropout)


class ImageTower(nn.Module):
    """An image network without its classifier, for images of one size.

    Its tokens are what the network's own pooling reads: the last feature map, or the last tokens
    after the final norm (before it, where the network pools first).

    Args:
        name: A registered image model, `timm:NAME`, `torchvision:NAME`, `open_clip:ARCH`, or
            `local-dir:FOLDER`.
        img_size: Side, or rows and columns, of the images; by default the network's own.
        in_chans: Channels of the images.
        freeze: How many blocks or stages do not train: see `zoo.freezing.freeze`.
        options: Further options of `zoo.create_model`.

    Attributes:
        trunk: The network.
        num_features: Width of a token, d.
        pooled_features: Width of the pooled vector, p.
        grid: Rows and columns of the tokens in space, the last of all.
        num_prefix_tokens: How many (class token, registers) come before.
        preprocessing: From an image to an input.
    """

    trunk: Any

    def __init__(
        self,
        name: str,
        *,
        img_size: int | Sequence[int] | None = None,
        in_chans: int = 3,
        freeze: int | str = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.trunk = _create(name, img_size, in_chans, options or {})
        self.preprocessing: Preprocessing = self.trunk.card.preprocessing
        self.in_chans = self.preprocessing.in_chans
        self._tap: str | None = None
        self._look()
        freezing.freeze(self, freeze)

    def forward(self, images: Tensor) -> Encoded:
        """(b c y x) -> tokens (b n d), pooled (b p)"""
        wanted = (self.in_chans, *self.preprocessing.size)
        if images.ndim != 4 or tuple(images.shape[1:]) != wanted:
            raise ValueError(
                f"images have shape {tuple(images.shape)}, but the tower {self.name} takes "
                f"(b, {', '.join(map(str, wanted))}): build it with in_chans and img_size to suit, "
                f"or resize the images"
            )
        features, pooled = self._run(images)
        return Encoded(self._as_tokens(features), pooled)

    def _run(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Features as the network gives them, and pooled (b p)."""
        if self._tap is None:
            features = self.trunk.forward_features(images)
            return features, self.trunk.forward_head(features, pre_logits=True)
        kept: list[Tensor] = []
        tapped = self.trunk.get_submodule(self._tap)
        hook = tapped.register_forward_hook(lambda module, args, output: kept.append(output))
        try:
            pooled = self.trunk(images)
        finally:
            hook.remove()
        return kept[0], pooled

    def _as_tokens(self, features: Tensor) -> Tensor:
        if features.ndim == 3:
            return features
        pattern = "b y x d -> b (y x) d" if _channels_last(self.trunk) else "b d y x -> b (y x) d"
        return rearrange(features, pattern)

    @torch.no_grad()
    def _look(self) -> None:
        """Finds widths and grid in one pass of an empty image."""
        rows, cols = self.preprocessing.size
        image = next(self.trunk.parameters()).new_zeros(1, self.in_chans, rows, cols)
        self.trunk.eval()
        try:
            if not hasattr(self.trunk, "forward_features"):
                self._tap = _last_map(self.trunk, image)
            features, pooled = self._run(image)
        except (AssertionError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"{self.name} does not run on images of {rows}x{cols}, give another img_size: "
                f"{error}"
            ) from error
        self.trunk.train()
        self._measure(features, pooled)

    def _measure(self, features: Any, pooled: Tensor) -> None:
        if not isinstance(features, Tensor) or features.ndim not in (3, 4):
            found = tuple(features.shape) if isinstance(features, Tensor) else type(features)
            raise ValueError(
                f"{self.name} has no tokens in space: its features are {found}, and a tower needs "
                f"a map (b d y x) or tokens (b n d)"
            )
        if pooled.ndim != 2:
            raise ValueError(
                f"{self.name} does not pool: its output is {tuple(pooled.shape)}, and a tower "
                f"needs (b p); give options another global_pool"
            )
        tokens = self._as_tokens(features)
        self.num_features, self.pooled_features = tokens.shape[2], pooled.shape[1]
        if features.ndim == 4:
            sides = features.shape[1:3] if _channels_last(self.trunk) else features.shape[2:]
            self.num_prefix_tokens, self.grid = 0, (sides[0], sides[1])
            return
        self.num_prefix_tokens = _num_prefix_tokens(self.trunk)
        self.grid = self._grid_of(tokens.shape[1] - self.num_prefix_tokens)

    def _grid_of(self, cells: int) -> tuple[int, int]:
        """Rows and columns of so many cells, in the shape of the image where nothing tells."""
        told = getattr(_patch_embed(self.trunk), "grid_size", None)
        if told is not None and math.prod(told) == cells:
            return told[0], told[1]
        rows, cols = self.preprocessing.size
        side = round(math.sqrt(max(0, cells) * rows / cols))
        if side < 1 or side * (cells // side) != cells:
            raise ValueError(
                f"{self.name} has no tokens in space: {cells} of them do not fill a grid of "
                f"{rows}x{cols} shape"
            )
        return side, cells // side

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass instead of kept."""
        try:
            self.trunk.set_grad_checkpointing(enable)
        except (AttributeError, AssertionError) as error:
            raise ValueError(f"{self.name} has no gradient checkpointing") from error

    def no_weight_decay(self) -> set[str]:
        """Names of the positions and tokens, which weight decay leaves alone."""
        return {f"trunk.{name}" for name in getattr(self.trunk, "no_weight_decay", set)()}


def text_tower(name: str, **options: Any) -> nn.Module:
    """A text tower by name: `forward(tokens, mask) -> Encoded`.

    Args:
        name: A registered one (`zoo.list_models("text_*")`), or `open_clip:ARCH` for open_clip's,
            see `crossmodal.open_clip_text`.
        **options: Options of the tower.
    """
    prefix, colon, arch = name.partition(":")
    if colon and prefix == "open_clip":
        from crossmodal.open_clip_text import OpenClipText

        return OpenClipText(arch, **options)
    tower = zoo.create_model(name, **options)
    if not isinstance(tower, TextTower):
        raise ValueError(
            f"{name} is a {type(tower).__name__} and no text tower; there are "
            f"{', '.join(zoo.list_models('text_*'))}, and open_clip:ARCH"
        )
    return tower


def _create(
    name: str, img_size: int | Sequence[int] | None, in_chans: int, options: dict[str, Any]
) -> Any:
    wrong = [option for option in options if option in _SET_BY_THE_TOWER]
    if wrong:
        raise TypeError(
            f"options of an image tower has {wrong[0]!r}: img_size and in_chans are the tower's "
            f"own, and it has no classes"
        )
    size = None if img_size is None else pair(img_size, "img_size")
    trunk = zoo.create_model(name, num_classes=0, img_size=size, in_chans=in_chans, **options)
    if size is not None:
        _check_patches(name, size, _patch_embed(trunk))
    return trunk


def _patch_embed(trunk: Any) -> Any:
    """A ViT's, also of one of timm's inside a tower of open_clip."""
    inner = getattr(getattr(trunk, "visual", trunk), "trunk", trunk)
    return getattr(inner, "patch_embed", None)


def _check_patches(name: str, size: tuple[int, int], patch_embed: Any) -> None:
    patch = getattr(patch_embed, "patch_size", None)
    if not isinstance(patch, tuple) or getattr(patch_embed, "dynamic_img_pad", False):
        return
    if size[0] % patch[0] or size[1] % patch[1]:
        raise ValueError(
            f"img_size {size} must be divisible by the patches of {name}, {patch[0]}x{patch[1]}: "
            f"it would not see the border"
        )


def _channels_last(trunk: nn.Module) -> bool:
    return getattr(trunk, "output_fmt", "NCHW") == "NHWC"  # timm's Swin and some others


def _num_prefix_tokens(trunk: Any) -> int:
    own_token = any(getattr(trunk, name, None) is not None for name in ("cls_token", "class_token"))
    return getattr(trunk, "num_prefix_tokens", int(own_token))


def _last_map(trunk: Any, image: Tensor) -> str:
    """Name of the module whose output the pooling of a torchvision network reads."""
    calls: list[tuple[str, nn.Module, Tensor]] = []
    hooks = [
        module.register_forward_hook(
            lambda module, args, output, name=name: calls.append((name, module, output))
        )
        for name, module in _steps(trunk)
    ]
    try:
        trunk(image)
    finally:
        for hook in hooks:
            hook.remove()
    head = trunk.classifier_name.split(".")[0]
    maps = [
        name
        for name, module, output in calls
        if name != head and output.ndim in (3, 4) and not isinstance(module, _AFTER_THE_MAP)
    ]
    return maps[-1]


def _steps(trunk: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules a network calls itself: its children, and those of its lists."""
    steps = []
    for name, child in trunk.named_children():
        inner = child.named_children() if isinstance(child, nn.ModuleList) else None
        steps += [(name, child)] if inner is None else [(f"{name}.{key}", m) for key, m in inner]
    return steps
