"""Gates from statistics other than the mean: energy, style, frequencies, distance to the mean.

Shapes: b batch, c channels, y/x rows and columns. `C` is the number of channels. Statistics are
computed in float32 at least.
"""

from __future__ import annotations

import math

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vision.channel_attention.base import (
    Bottleneck,
    ChannelAttention,
    GateNorm,
    mean_pool,
    reduced_width,
    widened,
)
from vision.channel_attention.registry import register_channel_attention
from zoo.layers.check import integer, positive

DCT_GRID = 7
# (row, column) frequencies on the 7x7 grid, best first: the sixteen that alone did best on
# ImageNet in the paper of FcaNet, as its code lists them.
DCT_TOP = (
    (0, 0), (0, 1), (6, 0), (0, 5), (0, 2), (1, 0), (1, 2), (4, 0),
    (5, 0), (1, 6), (3, 0), (0, 4), (0, 6), (0, 3), (3, 5), (2, 2),
)  # fmt: skip


@register_channel_attention("gct")
class GatedChannelTransform(ChannelAttention):
    """Gated Channel Transformation (Yang et al., arXiv 1909.11519): x * (1 + tanh(γ ŝ + β)).

    s = α sqrt(Σ x² + ε) is a channel's energy, ŝ = sqrt(C) s / sqrt(Σ_c s² + ε) its share.
    Parameters: 3 C. It starts as the identity, since γ = β = 0.

    Args:
        channels: Channels of the feature map.
        eps: ε, which keeps gradients finite where a map is zero.
    """

    min_channels = 2
    gate_range = (0.0, 2.0)

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels)
        self.eps = positive("eps", eps)
        self.alpha = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.gamma = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def gate(self, x: Tensor) -> Tensor:
        energy = widened(x).square().sum((2, 3), keepdim=True)
        s = self.alpha * (energy + self.eps).sqrt()
        total = (s.square().sum(1, keepdim=True) + self.eps).sqrt()
        return 1 + torch.tanh(self.gamma * (math.sqrt(self.channels) * s / total) + self.beta)


@register_channel_attention("srm")
class StyleRecalibration(ChannelAttention):
    """Style-based Recalibration (Lee et al., arXiv 1903.10829): x * σ(BN(w · (mean, std))).

    Each channel has its own two weights, which start at zero as in the authors' code. Parameters:
    2 C, and 2 C of the norm. The standard deviation is the biased one of the paper, which exists
    for a map of one position; the authors' code has the unbiased one. `GateNorm` says what holds
    for a batch of 1.

    Args:
        channels: Channels of the feature map.
        eps: Added to the variance, which keeps gradients finite where a map is constant.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__(channels)
        self.eps = positive("eps", eps)
        self.weight = nn.Parameter(torch.zeros(channels, 2))
        self.norm = GateNorm(channels)

    def gate(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(widened(x), (2, 3), correction=0)
        style = torch.stack([mean, (var + self.eps).sqrt()], -1).to(self.weight.dtype)
        z = einsum(style, self.weight, "b c s, c s -> b c")
        return self.norm(rearrange(z, "b c -> b c 1 1")).sigmoid()


@register_channel_attention("simam")
class SimAM(ChannelAttention):
    """SimAM (Yang et al., ICML 2021): x * σ(d / (4 (v + λ)) + 1/2), a gate for each position.

    d = (x - mean)² and v = Σ d / (y x - 1), over a channel's positions; a map of one position has
    v = 0. The gate lies in (0.62, 1). Parameters: none.

    Args:
        channels: Channels of the feature map.
        eps: λ.
    """

    gate_range = (1 / (1 + math.exp(-0.5)), 1.0)

    def __init__(self, channels: int, eps: float = 1e-4) -> None:
        super().__init__(channels)
        self.eps = positive("eps", eps)

    def gate(self, x: Tensor) -> Tensor:
        d = (widened(x) - mean_pool(widened(x))).square()
        v = d.sum((2, 3), keepdim=True) / max(1, x.shape[2] * x.shape[3] - 1)
        return torch.sigmoid(d / (4 * (v + self.eps)) + 0.5)


@register_channel_attention("fca")
class FrequencyChannelAttention(Bottleneck):
    """FcaNet (Qin et al., arXiv 2012.11879): SE that squeezes by several frequencies of a 2D DCT.

    Channels are split, as evenly as they can be, into consecutive groups; each is squeezed with one
    frequency, of which (0, 0) is the mean times `dct_size`. Parameters: 2 C w.

    Any size of map works, as in the authors' code: one that differs from the size of the DCT is
    averaged to it first (`adaptive_avg_pool2d`). The authors take the map's size in ImageNet
    models, 56, 28, 14 or 7 by stage, where frequencies count in steps of `dct_size / 7`. A smaller
    map is repeated instead, and one of a single position has only the frequency (0, 0).

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r).
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
        num_freq: How many of the best frequencies are used, 1 to 16, at most one per channel.
        dct_size: Side of the grid of the DCT, a multiple of 7.
    """

    min_channels = 2
    basis: Tensor

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 16,
        min_width: int = 1,
        round_to: int | None = None,
        num_freq: int = 16,
        dct_size: int = DCT_GRID,
    ) -> None:
        width = reduced_width(channels, rd_ratio, min_width, round_to)
        super().__init__(channels, width, bias=False)
        num_freq = integer("num_freq", num_freq)
        dct_size = integer("dct_size", dct_size)
        if num_freq > len(DCT_TOP):
            raise ValueError(f"num_freq ({num_freq}) must be at most {len(DCT_TOP)}")
        if dct_size % DCT_GRID:
            raise ValueError(f"dct_size ({dct_size}) must be a multiple of {DCT_GRID}")
        basis = dct_basis(channels, min(num_freq, channels), dct_size)
        self.register_buffer("basis", basis, persistent=False)  # follows from the options

    def gate(self, x: Tensor) -> Tensor:
        size = self.basis.shape[-1]
        if x.shape[2:] != (size, size):
            x = F.adaptive_avg_pool2d(x, size)
        z = einsum(x, self.basis.to(x.dtype), "b c y x, c y x -> b c")
        return self.excite(rearrange(z, "b c -> b c 1 1")).sigmoid()


def dct_basis(channels: int, num_freq: int, size: int) -> Tensor:
    """The orthonormal DCT-II functions (c y x), one for each channel."""
    position = (torch.arange(size, dtype=torch.float64) + 0.5) / size
    frequency = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(math.pi * frequency[:, None] * position) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    step = size // DCT_GRID
    group = torch.arange(channels) * num_freq // channels
    rows, columns = (torch.tensor(DCT_TOP) * step)[group].unbind(1)
    return einsum(waves[rows], waves[columns], "c y, c x -> c y x").float()
