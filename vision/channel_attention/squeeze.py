"""Squeeze-and-Excitation and its descendants: pool each channel, mix the channels, gate them.

Shapes: b batch, c channels, y/x rows and columns. `w` is the bottleneck's width, `C` the number of
channels.
"""

from __future__ import annotations

import math

from einops import rearrange
from torch import Tensor, nn

from vision.channel_attention.base import (
    GATES,
    Bottleneck,
    ChannelAttention,
    check_choice,
    max_pool,
    mean_pool,
    odd,
    pointwise,
    reduced_width,
)
from vision.channel_attention.registry import register_channel_attention

SQUEEZES = ("mean", "max", "both")


@register_channel_attention("se")
class SqueezeExcite(Bottleneck):
    """Squeeze-and-Excitation (Hu et al., arXiv 1709.01507): x * σ(W2 relu(W1 z)), z the means.

    Parameters: 2 C w, and w + C with bias. The paper's own count, 2.53 M in ResNet-50, includes
    the biases. timm's rounding is `round_to=8`.

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r).
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
        bias: Gives both layers a bias.
        squeeze: "mean", "max", or "both": half their sum, as timm does.
        gate: "sigmoid", "hard_sigmoid", "tanh" or "relu".
    """

    min_channels = 2

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 16,
        min_width: int = 1,
        round_to: int | None = None,
        bias: bool = True,
        squeeze: str = "mean",
        gate: str = "sigmoid",
    ) -> None:
        super().__init__(channels, reduced_width(channels, rd_ratio, min_width, round_to), bias)
        check_choice("squeeze", squeeze, SQUEEZES)
        check_choice("gate", gate, GATES)
        self.squeeze_by = squeeze
        self.gate_by = gate
        self.gate_range = GATES[gate][1]

    def squeeze(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c 1 1)"""
        return pooled(x, self.squeeze_by)

    def gate(self, x: Tensor) -> Tensor:
        return GATES[self.gate_by][0](self.excite(self.squeeze(x)))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, squeeze={self.squeeze_by}, gate={self.gate_by}"


@register_channel_attention("ese")
class EffectiveSqueezeExcite(ChannelAttention):
    """Effective SE of VoVNetV2 (Lee and Park, arXiv 1911.06667): x * σ(W z), without a bottleneck.

    Parameters: C² + C. The paper states a sigmoid; its code, its weights and timm have
    `gate="hard_sigmoid"`.

    Args:
        channels: Channels of the feature map.
        squeeze: "mean", "max" or "both".
        gate: "sigmoid", "hard_sigmoid", "tanh" or "relu".
    """

    min_channels = 2

    def __init__(self, channels: int, squeeze: str = "mean", gate: str = "sigmoid") -> None:
        super().__init__(channels)
        check_choice("squeeze", squeeze, SQUEEZES)
        check_choice("gate", gate, GATES)
        self.fc = pointwise(channels, channels)
        self.squeeze_by = squeeze
        self.gate_by = gate
        self.gate_range = GATES[gate][1]

    def gate(self, x: Tensor) -> Tensor:
        return GATES[self.gate_by][0](self.fc(pooled(x, self.squeeze_by)))


@register_channel_attention("eca")
class EfficientChannelAttention(ChannelAttention):
    """ECA (Wang et al., arXiv 1910.03151): x * σ(conv1d(z)) along the channels, zeros outside.

    Parameters: k, the odd number nearest to (log2 C + 1) / 2, the larger of two: 1 below 8
    channels, 3 below 128, 5 from there on. timm never goes below 3: `min_kernel=3`.

    Args:
        channels: Channels of the feature map.
        kernel_size: An odd k instead of the one that follows from the channels.
        min_kernel: The least k, odd, that follows from the channels.
    """

    min_channels = 2

    def __init__(self, channels: int, kernel_size: int | None = None, min_kernel: int = 1) -> None:
        super().__init__(channels)
        min_kernel = odd("min_kernel", min_kernel)
        if kernel_size is None:
            kernel_size = max(eca_kernel(channels), min_kernel)
        kernel_size = odd("kernel_size", kernel_size)
        self.conv = nn.Conv1d(1, 1, kernel_size, padding=kernel_size // 2, bias=False)

    def gate(self, x: Tensor) -> Tensor:
        mixed = self.conv(rearrange(mean_pool(x), "b c 1 1 -> b 1 c"))
        return rearrange(mixed, "b 1 c -> b c 1 1").sigmoid()


@register_channel_attention("scse")
class ConcurrentSqueezeExcite(Bottleneck):
    """scSE (Roy et al., arXiv 1803.02579): x * (σ(W2 relu(W1 z)) + σ(w · x)), channels plus places.

    The gate lies in (0, 2). Parameters: 2 C w + w + C, and C + 1 for the places.

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r). The paper has r = 2.
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
    """

    gate_range = (0.0, 2.0)

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 2,
        min_width: int = 1,
        round_to: int | None = None,
    ) -> None:
        width = reduced_width(channels, rd_ratio, min_width, round_to)
        super().__init__(channels, width, bias=True)
        self.place = pointwise(channels, 1)

    def gate(self, x: Tensor) -> Tensor:
        return self.excite(mean_pool(x)).sigmoid() + self.place(x).sigmoid()


def pooled(x: Tensor, how: str) -> Tensor:
    """(b c y x) -> (b c 1 1) by mean, max, or both: half their sum."""
    if how == "both":
        return (mean_pool(x) + max_pool(x)) / 2
    return mean_pool(x) if how == "mean" else max_pool(x)


def eca_kernel(channels: int, gamma: float = 2, offset: float = 1) -> int:
    """The odd number nearest to (log2(channels) + offset) / gamma, the larger of two."""
    whole = int((math.log2(channels) + offset) / gamma)
    return whole if whole % 2 else whole + 1
