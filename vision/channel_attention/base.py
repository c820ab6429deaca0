"""What the kinds of channel attention share: the contract, the bottleneck and its width.

Shapes: b batch, c channels, y/x rows and columns. A gate has the shape (b c 1 1), (b 1 y x) or
(b c y x).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from numbers import Real
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision.channel_attention.registry import list_channel_attention, nearest
from zoo.layers.check import flag, integer
from zoo.layers.tap import Tap

GATES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[float, float]]] = {
    "sigmoid": (torch.sigmoid, (0.0, 1.0)),
    "hard_sigmoid": (F.hardsigmoid, (0.0, 1.0)),
    "tanh": (torch.tanh, (-1.0, 1.0)),
    "relu": (F.relu, (0.0, math.inf)),
}


class ChannelAttention(nn.Module):
    """A feature map times a gate that is computed from it: (b c y x) -> (b c y x).

    A kind implements `gate`. Its tap shows the gate: (b c) if all positions share it, else
    (b 1 y x) or (b c y x), so that the output is the input times what the tap shows.

    Attributes:
        kind: The name under which the class is registered.
        channels: Channels of the feature map.
        min_channels: The fewest channels at which the kind makes sense.
        gate_range: Limits of the gate, by which saturation is measured; None where the tap shows
            something other than a factor.
        adds: Whether the tap shows a term that is added to the input instead of a factor.
        tap: Shows the gate.
    """

    kind: str = ""
    min_channels: ClassVar[int] = 1
    gate_range: tuple[float, float] | None = (0.0, 1.0)
    adds: bool = False

    def __init__(self, channels: int) -> None:
        super().__init__()
        channels = integer("channels", channels)
        if channels < self.min_channels:
            legal = ", ".join(list_channel_attention(channels))
            raise ValueError(
                f"channel attention {self.kind!r} needs channels >= {self.min_channels}, got "
                f"{channels}: it weighs channels by each other; legal here: {legal}"
            )
        self.channels = channels
        self.tap = Tap("gate")

    def gate(self, x: Tensor) -> Tensor:
        """(b c y x) -> factors that broadcast to (b c y x)."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it computes its gate")

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c y x)"""
        self.check(x)
        gate = self.gate(x).to(x.dtype)
        self.tap.record(lambda: as_shown(gate, len(x)))
        return x * gate

    def check(self, x: Tensor) -> None:
        if x.ndim != 4 or x.shape[1] != self.channels:
            raise ValueError(
                f"channel attention {self.kind!r} expects (b, {self.channels}, y, x), "
                f"got {tuple(x.shape)}"
            )

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.channels}"


class Bottleneck(ChannelAttention):
    """Channel attention with the two layers of SE: channels -> width -> channels.

    Both are 1x1 convolutions named as in timm and torchvision, with He initialisation as in the
    paper of SE.

    Args:
        channels: Channels of the feature map.
        width: Channels in between; see `reduced_width`.
        bias: Gives both layers a bias.
    """

    def __init__(self, channels: int, width: int, bias: bool) -> None:
        super().__init__(channels)
        bias = flag("bias", bias)
        self.fc1 = pointwise(channels, width, bias)
        self.fc2 = pointwise(width, channels, bias)

    def excite(self, z: Tensor) -> Tensor:
        """(b c y x) -> the gate's logits (b c y x), each position on its own."""
        return self.fc2(F.relu(self.fc1(z)))


class GateNorm(nn.BatchNorm2d):
    """BatchNorm that allows a single value per channel in training.

    A gate often normalises (b c 1 1). In a batch of 1 no variance can be estimated then, so the
    running statistics serve, and are not updated.
    """

    def forward(self, input: Tensor) -> Tensor:
        if self.training and input.numel() == input.shape[1]:
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(input, mean, var, self.weight, self.bias, eps=self.eps)
        return super().forward(input)


def reduced_width(
    channels: int, rd_ratio: float, min_width: int = 1, round_to: int | None = None
) -> int:
    """Width of a bottleneck: max(min_width, channels // r) with r = 1 / rd_ratio.

    Args:
        channels: Width outside.
        rd_ratio: 1 / r, in (0, 1].
        min_width: The floor; the papers do not state any, and divide channels that are large.
        round_to: The nearest multiple of it instead of the floor division, and at least once it:
            timm's rule with `rd_divisor=round_to`.
    """
    channels = integer("channels", channels)
    min_width = integer("min_width", min_width)
    check_ratio("rd_ratio", rd_ratio)
    if round_to is None:
        return max(min_width, math.floor(channels * rd_ratio + 1e-9))  # 49 * (1 / 49) < 1
    round_to = integer("round_to", round_to)
    multiple = int(channels * rd_ratio + round_to / 2) // round_to * round_to
    return max(min_width, round_to, multiple)


def pointwise(inputs: int, outputs: int, bias: bool = True) -> nn.Conv2d:
    """A 1x1 convolution with He initialisation and zero bias."""
    layer = nn.Conv2d(inputs, outputs, 1, bias=bias)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def mean_pool(x: Tensor) -> Tensor:
    """(b c y x) -> (b c 1 1)"""
    return x.mean((2, 3), keepdim=True)


def max_pool(x: Tensor) -> Tensor:
    """(b c y x) -> (b c 1 1), the gradient shared by equal maxima."""
    return x.amax((2, 3), keepdim=True)


def widened(x: Tensor) -> Tensor:
    """At least float32, for sums of squares."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def as_shown(gate: Tensor, batch: int) -> Tensor:
    """(b c 1 1) -> (b c), others as they are; a batch of 1 stands for all samples."""
    gate = gate.expand(batch, *gate.shape[1:])
    return gate.flatten(1) if gate.shape[2:] == (1, 1) else gate


def check_ratio(name: str, value: float) -> None:
    """Refuses what is no number in (0, 1]."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} ({value!r}) must be a number in (0, 1], such as 1/16")
    if not 0 < value <= 1:
        raise ValueError(f"{name} ({value}) must be in (0, 1], such as 1/16")


def odd(name: str, value: int) -> int:
    """`value` as a plain int; refused unless odd and at least 1."""
    value = integer(name, value)
    if value % 2 == 0:
        near = f"{value - 1} or {value + 1}"
        raise ValueError(f"{name} ({value}) must be odd to keep the size, such as {near}")
    return value


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    legal = f"{name} ({value!r}) must be one of {', '.join(choices)}"
    if not isinstance(value, str):
        raise TypeError(legal)
    if value not in choices:
        raise ValueError(f"{legal}{nearest(value, choices)}")
