"""Residual blocks with a `Slot` at every site, and their shortcuts (arXiv 1512.03385).

Attribute names are torchvision's.

Shapes: b batch, c y x channels, rows and columns; a dash where the block changes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vision.slots import Slot
from zoo.layers import DropPath

SHORTCUTS = ("conv", "pad")


class PadShortcut(nn.Module):
    """Shortcut without parameters: every `stride`-th pixel, zeros for the added channels.

    Option A of section 4.1 in arXiv 1512.03385, which its networks for CIFAR-10 use.
    """

    def __init__(self, in_chans: int, out_chans: int, stride: int) -> None:
        super().__init__()
        if out_chans < in_chans:
            raise ValueError(
                f"shortcut 'pad' cannot go from {in_chans} channels to {out_chans}: it only adds; "
                f"take 'conv', or widths that do not fall"
            )
        self.added, self.stride = out_chans - in_chans, stride

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c' y' x')"""
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.added))

    def extra_repr(self) -> str:
        return f"added={self.added}, stride={self.stride}"


class ResidualBlock(nn.Module):
    """A branch and a shortcut, added, then the activation; sites in brackets.

        x ─┬─ [pre] ─ conv1 ─ bn1 ─ relu ─ [conv1] ─ ... ─ [standard] ─ drop path ─┐
           │                                                                       +
           └─ downsample ─ [identity] ─────────────────────────────────────────────┘
                                                          + ─ [post_add] ─ relu ─ [post]

    The last convolution has no activation, so that its own site ([conv2] in a `BasicBlock`,
    [conv3] in a `Bottleneck`) lies just before [standard]. Nothing is changed in place: a module
    in a slot may keep what it saw.

    Args:
        in_chans: Channels of the input.
        width: Channels of the 3x3 convolutions; the output has `expansion` times as many.
        stride: Of the first 3x3 convolution and of the shortcut.
        shortcut: One of `SHORTCUTS`, for where the shape changes: a 1x1 convolution with a norm, or
            `PadShortcut`.
        drop_path: Chance that a sample's branch is dropped in training.
    """

    expansion = 1

    def __init__(
        self,
        in_chans: int,
        width: int,
        stride: int = 1,
        shortcut: str = "conv",
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        out_chans = width * self.expansion
        self.slot_pre = Slot("pre")
        self._add_branch(in_chans, width, stride)
        self.slot_standard = Slot("standard")
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()
        self.downsample = _shortcut(in_chans, out_chans, stride, shortcut)
        self.slot_identity = Slot("identity")
        self.slot_post_add = Slot("post_add")
        self.relu = nn.ReLU()
        self.slot_post = Slot("post")

    def _add_branch(self, in_chans: int, width: int, stride: int) -> None:
        """Adds the layers of `branch`."""
        raise NotImplementedError

    def branch(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c' y' x')"""
        raise NotImplementedError

    @property
    def last_norm(self) -> nn.Module:
        """The norm that ends the branch."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c' y' x')"""
        shortcut = x if self.downsample is None else self.downsample(x)
        shortcut = self.slot_identity(shortcut)
        branch = self.slot_standard(self.branch(self.slot_pre(x)))
        x = self.slot_post_add(self.drop_path(branch) + shortcut)
        return self.slot_post(self.relu(x))


class BasicBlock(ResidualBlock):
    """Two 3x3 convolutions."""

    def _add_branch(self, in_chans: int, width: int, stride: int) -> None:
        self.conv1 = nn.Conv2d(in_chans, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.slot_conv1 = Slot("conv1")
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.slot_conv2 = Slot("conv2")

    def branch(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c' y' x')"""
        x = self.slot_conv1(self.relu(self.bn1(self.conv1(x))))
        return self.slot_conv2(self.bn2(self.conv2(x)))

    @property
    def last_norm(self) -> nn.Module:
        return self.bn2


class Bottleneck(ResidualBlock):
    """1x1, 3x3, 1x1 convolutions; the stride lies in the 3x3 ("version 1.5"), as in torchvision."""

    expansion = 4

    def _add_branch(self, in_chans: int, width: int, stride: int) -> None:
        self.conv1 = nn.Conv2d(in_chans, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.slot_conv1 = Slot("conv1")
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.slot_conv2 = Slot("conv2")
        self.conv3 = nn.Conv2d(width, width * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.slot_conv3 = Slot("conv3")

    def branch(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c' y' x')"""
        x = self.slot_conv1(self.relu(self.bn1(self.conv1(x))))
        x = self.slot_conv2(self.relu(self.bn2(self.conv2(x))))
        return self.slot_conv3(self.bn3(self.conv3(x)))

    @property
    def last_norm(self) -> nn.Module:
        return self.bn3


BLOCKS: dict[str, type[ResidualBlock]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


def _shortcut(in_chans: int, out_chans: int, stride: int, kind: str) -> nn.Module | None:
    if stride == 1 and in_chans == out_chans:
        return None
    if kind == "pad":
        return PadShortcut(in_chans, out_chans, stride)
    return nn.Sequential(
        nn.Conv2d(in_chans, out_chans, 1, stride, bias=False), nn.BatchNorm2d(out_chans)
    )


def checkpoint_block(block: nn.Module, x: Tensor) -> Tensor:
    """`block(x)`, whose activations are computed again in the backward pass."""
    if torch.compiler.is_compiling():
        return checkpoint(block, x, use_reentrant=False)

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _recomputing(block)

    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


@contextmanager
def _recomputing(block: nn.Module) -> Iterator[None]:
    """The block works on copies of its running statistics: they count the batch once."""
    kept = [(module, dict(module._buffers)) for module in block.modules()]
    for module, buffers in kept:
        copies = {name: value.clone() for name, value in buffers.items() if value is not None}
        module._buffers.update(copies)
    try:
        yield
    finally:
        for module, buffers in kept:
            module._buffers.update(buffers)
