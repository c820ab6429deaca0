"""Residual networks (arXiv 1512.03385) for ImageNet and for small images, open at every site.

Attribute names are torchvision's, so weights move between the two without a key map. The blocks
(`vision.residual`) and the network have a parameter-free `Slot` at every site where `vision.insert`
may put a module.

Shapes: b batch, c y x channels, rows and columns, d features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from vision.checks import check_choice, pair, take_indices
from vision.residual import BLOCKS, SHORTCUTS, ResidualBlock, checkpoint_block
from vision.slots import Slot
from zoo.card import ModelCard, Preprocessing
from zoo.registry import records_options, register_model

POOLS = ("avg", "max", "avgmax")
STEMS = ("7x7", "3x3")


class ResNet(nn.Module):
    """Residual network for images of any size.

    Slots of its own: `slot_stem` (between stem and first stage) and `slot_between_stages_1`, ...
    (after stage 1, ...). Stage 1 is `layer1`.

    Args:
        img_size: Side, or rows and columns, of the images it is meant for: sets the preprocessing
            in its card, nothing else.
        in_chans: Channels of the images.
        num_classes: Outputs; 0 leaves the classifier out and gives pooled features.
        global_pool: One of `POOLS`; `avgmax` is the mean of both.
        block: One of `BLOCKS`.
        depths: Blocks of each stage; stages after the first halve rows and columns.
        widths: Width of each stage's blocks; the first is the stem's too.
        stem: `7x7` (stride 2, then max-pooling: a quarter of the resolution) or `3x3` (stride 1,
            for small images).
        shortcut: One of `SHORTCUTS`, where a block changes the shape.
        zero_init_residual: Whether branches start at zero (arXiv 1706.02677).
        drop_rate: Dropout before the classifier.
        drop_path_rate: Stochastic depth (arXiv 1603.09382) at the last block, rising linearly.
    """

    card: ModelCard
    first_conv = "conv1"  # reads the image's channels; zoo.weights adapts it

    @records_options
    def __init__(
        self,
        img_size: int | Sequence[int] = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        block: str = "bottleneck",
        depths: Sequence[int] = (3, 4, 6, 3),
        widths: Sequence[int] = (64, 128, 256, 512),
        stem: str = "7x7",
        shortcut: str = "conv",
        zero_init_residual: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        pair(img_size, "img_size")
        for name, value, choices in (
            ("global_pool", global_pool, POOLS),
            ("block", block, tuple(BLOCKS)),
            ("stem", stem, STEMS),
            ("shortcut", shortcut, SHORTCUTS),
        ):
            check_choice(name, value, choices)
        _check_counts(in_chans, num_classes, depths, widths)
        self.in_chans, self.num_classes, self.global_pool = in_chans, num_classes, global_pool
        self.num_stages = len(depths)
        self.num_features = widths[-1] * BLOCKS[block].expansion
        self.reduction = 2 ** (self.num_stages - 1) * (4 if stem == "7x7" else 1)
        self.grad_checkpointing = False

        self._add_stem(in_chans, widths[0], stem)
        self._add_stages(BLOCKS[block], depths, widths, shortcut, drop_path_rate)
        self.head_drop = nn.Dropout(drop_rate)
        self.init_weights(zero_init_residual)
        self.fc = self._classifier()

    def _add_stem(self, in_chans: int, width: int, stem: str) -> None:
        wide = stem == "7x7"
        self.conv1 = (
            nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False)
            if wide
            else nn.Conv2d(in_chans, width, 3, padding=1, bias=False)
        )
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if wide else nn.Identity()
        self.slot_stem = Slot("stem")

    def _add_stages(
        self,
        block: type[ResidualBlock],
        depths: Sequence[int],
        widths: Sequence[int],
        shortcut: str,
        drop_path_rate: float,
    ) -> None:
        """Adds `layer1`, `slot_between_stages_1`, `layer2`, ..."""
        last = max(1, sum(depths) - 1)
        rates = (drop_path_rate * number / last for number in range(sum(depths)))
        chans = widths[0]
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True), 1):
            if stage > 1:
                setattr(self, f"slot_between_stages_{stage - 1}", Slot("between_stages"))
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 1 and index == 0 else 1
                blocks.append(block(chans, width, stride, shortcut, next(rates)))
                chans = width * block.expansion
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))

    def init_weights(self, zero_init_residual: bool = False) -> None:
        """He's initialisation (arXiv 1502.01852) by fan-out, as in torchvision."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if zero_init_residual:
            for block in self.blocks():
                nn.init.zeros_(block.last_norm.weight)  # type: ignore[arg-type]

    def blocks(self) -> list[ResidualBlock]:
        """All blocks, in order."""
        stages = map(self._stage, range(1, self.num_stages + 1))
        return [cast(ResidualBlock, block) for stage in stages for block in stage]

    def _stage(self, stage: int) -> nn.Sequential:
        return getattr(self, f"layer{stage}")

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> logits (b num_classes), or features (b d) without a classifier."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """(b c y x) -> the last stage's features (b d y' x')."""
        x = self.slot_stem(self.maxpool(self._stem(x)))
        for stage in range(1, self.num_stages + 1):
            x = self._run_stage(stage, x)
        return x

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (b d y x) -> logits, or the features before the classifier (b d)."""
        x = self.head_drop(self._pool(x))
        return x if pre_logits else self.fc(x)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """Features of the stem (before its pooling) and of each stage, as timm returns them.

        Args:
            x: (b c y x).
            indices: The last so many, those of a list (0 is the stem, negative from the end), or
                all.
            norm: Taken for the sake of other models; there is no final norm to apply.
            stop_early: Whether stages after the last one asked for are left out.
            output_fmt: `NCHW` (b c y x).
            intermediates_only: Leaves out the final features.

        Returns:
            `(features, intermediates)`, or the intermediates alone.
        """
        check_choice("output_fmt", output_fmt, ("NCHW",))
        take = take_indices(self.num_stages + 1, indices)
        last = max(take) if stop_early else self.num_stages
        x = self._stem(x)
        taken = [x] if 0 in take else []
        x = self.slot_stem(self.maxpool(x)) if last else x
        for stage in range(1, last + 1):
            x = self._run_stage(stage, x)
            if stage in take:
                taken.append(x)
        return taken if intermediates_only else (x, taken)

    def _stem(self, x: Tensor) -> Tensor:
        _check_images(x, self.in_chans, self._has_batch_statistics(), self.reduction)
        return self.relu(self.bn1(self.conv1(x)))

    def _has_batch_statistics(self) -> bool:
        """Whether the smallest maps are normalised by the batch of this process alone."""
        norm = self._stage(self.num_stages)[-1].last_norm
        return isinstance(norm, nn.BatchNorm2d) and norm.training

    def _run_stage(self, stage: int, x: Tensor) -> Tensor:
        if stage > 1:
            x = getattr(self, f"slot_between_stages_{stage - 1}")(x)
        if not (self.grad_checkpointing and torch.is_grad_enabled()):
            return self._stage(stage)(x)
        for block in self._stage(stage):
            x = checkpoint_block(block, x)
        return x

    def _pool(self, x: Tensor) -> Tensor:
        if self.global_pool == "avg":
            return x.mean((2, 3))
        if self.global_pool == "max":
            return x.amax((2, 3))
        return 0.5 * (x.mean((2, 3)) + x.amax((2, 3)))

    def get_classifier(self) -> nn.Module:
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new classifier for `num_classes` (0: none), on the model's device and in its dtype."""
        if global_pool is not None:
            check_choice("global_pool", global_pool, POOLS)
            self.global_pool = global_pool
        self.num_classes = num_classes
        self.fc = self._classifier().train(self.training)
        self.card = self.card.with_options(num_classes=num_classes, global_pool=self.global_pool)

    def _classifier(self) -> nn.Module:
        like = self.conv1.weight
        if self.num_classes == 0:
            return nn.Identity()
        return nn.Linear(self.num_features, self.num_classes, device=like.device, dtype=like.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass instead of kept."""
        self.grad_checkpointing = enable

    @property
    def num_layers(self) -> int:
        """Index of the last layer, the head: see `layer_index`."""
        return len(self.blocks()) + 1

    def layer_index(self, name: str) -> int:
        """Layer of a parameter: 0 the stem, 1 to n the blocks, n + 1 the head.

        What was inserted between stages belongs to the block before it.
        """
        starts = [0]
        for stage in range(1, self.num_stages + 1):
            starts.append(starts[-1] + len(self._stage(stage)))
        if match := re.match(r"layer(\d+)\.(\d+)\.", name):
            return starts[int(match[1]) - 1] + int(match[2]) + 1
        if match := re.match(r"slot_between_stages_(\d+)\.", name):
            return starts[int(match[1])]
        top = name.split(".")[0]
        if top in ("conv1", "bn1", "slot_stem"):
            return 0
        if top == "fc":
            return self.num_layers
        raise ValueError(f"{name!r} is no parameter of {type(self).__name__}")


def _check_counts(
    in_chans: int, num_classes: int, depths: Sequence[int], widths: Sequence[int]
) -> None:
    if in_chans < 1 or num_classes < 0:
        raise ValueError(f"in_chans ({in_chans}) must be at least 1, num_classes ({num_classes}) 0")
    if not depths or len(depths) != len(widths) or min(*depths, *widths) < 1:
        raise ValueError(
            f"depths ({list(depths)}) and widths ({list(widths)}) need one positive number a stage "
            f"each, for at least one stage"
        )


@torch.fx.wrap  # stays one call when the network is traced: it looks at shapes
def _check_images(x: Tensor, in_chans: int, batch_statistics: bool, reduction: int) -> None:
    if x.ndim != 4 or x.shape[1] != in_chans:
        raise ValueError(
            f"images have shape {tuple(x.shape)}, but the model takes (b, {in_chans}, rows, "
            f"columns): build it with in_chans to suit, or convert the images "
            f"(zoo.transforms(model))"
        )
    if batch_statistics and x.shape[0] == 1 and max(x.shape[2:]) <= reduction:
        raise ValueError(
            f"a batch of one {x.shape[2]}x{x.shape[3]} image leaves one value a channel in the "
            f"last stage, which has no variance to normalise by in training: use batches of 2 or "
            f"more, images larger than {reduction}x{reduction}, or model.eval()"
        )


# --- variants --------------------------------------------------------------------------------

_BASIC: dict[str, Any] = {"block": "basic"}
_SMALL: dict[str, Any] = {
    **_BASIC,
    "img_size": 32,
    "num_classes": 10,
    "widths": (16, 32, 64),
    "stem": "3x3",
    "shortcut": "pad",
}

# torchvision's for its first weights. Small images: no data set's own, values from -1 to 1.
_IMAGENET = Preprocessing(
    (224, 224),
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
    interpolation="bilinear",
    crop_pct=0.875,
)
_SMALL_IMAGES = Preprocessing((32, 32))


def _resnet(family: dict[str, Any], depths: tuple[int, ...], options: dict[str, Any]) -> ResNet:
    return ResNet(**{**family, "depths": depths, **options})


@register_model(preprocessing=_SMALL_IMAGES)
def resnet_micro(**options: Any) -> ResNet:
    """For images of 8x8 to 32x32: one block a stage."""
    return _resnet(_SMALL, (1, 1, 1), options)


@register_model(preprocessing=_SMALL_IMAGES)
def resnet20(**options: Any) -> ResNet:
    """ResNet-20 of section 4.2 in arXiv 1512.03385, for CIFAR-10."""
    return _resnet(_SMALL, (3, 3, 3), options)


@register_model(preprocessing=_SMALL_IMAGES)
def resnet32(**options: Any) -> ResNet:
    """ResNet-32 of section 4.2 in arXiv 1512.03385, for CIFAR-10."""
    return _resnet(_SMALL, (5, 5, 5), options)


@register_model(preprocessing=_SMALL_IMAGES)
def resnet44(**options: Any) -> ResNet:
    """ResNet-44 of section 4.2 in arXiv 1512.03385, for CIFAR-10."""
    return _resnet(_SMALL, (7, 7, 7), options)


@register_model(preprocessing=_SMALL_IMAGES)
def resnet56(**options: Any) -> ResNet:
    """ResNet-56 of section 4.2 in arXiv 1512.03385, for CIFAR-10."""
    return _resnet(_SMALL, (9, 9, 9), options)


@register_model(preprocessing=_IMAGENET)
def resnet18(**options: Any) -> ResNet:
    """ResNet-18 at 224."""
    return _resnet(_BASIC, (2, 2, 2, 2), options)


@register_model(preprocessing=_IMAGENET)
def resnet34(**options: Any) -> ResNet:
    """ResNet-34 at 224."""
    return _resnet(_BASIC, (3, 4, 6, 3), options)


@register_model(preprocessing=_IMAGENET)
def resnet50(**options: Any) -> ResNet:
    """ResNet-50 at 224."""
    return _resnet({}, (3, 4, 6, 3), options)


@register_model(preprocessing=_IMAGENET)
def resnet101(**options: Any) -> ResNet:
    """ResNet-101 at 224."""
    return _resnet({}, (3, 4, 23, 3), options)
