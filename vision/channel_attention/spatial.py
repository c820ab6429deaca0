"""Channel attention that looks at places too: CBAM, BAM, coordinate and triplet attention.

Shapes: b batch, c channels, y/x rows and columns. `w` is the bottleneck's width, `C` the number of
channels.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vision.channel_attention.base import (
    Bottleneck,
    ChannelAttention,
    GateNorm,
    max_pool,
    mean_pool,
    odd,
    pointwise,
    reduced_width,
)
from vision.channel_attention.registry import register_channel_attention
from zoo.layers.check import flag, integer


@register_channel_attention("cbam")
class CBAM(Bottleneck):
    """CBAM (Woo et al., arXiv 1807.06521): channels first, then places, each with its own gate.

    M_c = σ(mlp(mean) + mlp(max)) over positions, one mlp for both; M_s = σ(BN(conv(mean, max)))
    over the channels of x * M_c. The gate is M_c M_s.
    Parameters: 2 C w, w + C with bias, 2 k² + 2 for the places. With bias, ResNet-50 has the
    28.09 M that the paper states; timm has none: `bias=False`. The norm is in the authors' code and
    in timm; the paper's formula does not mention it.

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r).
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
        bias: Gives both layers of the mlp a bias.
        kernel_size: k, odd.
    """

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 16,
        min_width: int = 1,
        round_to: int | None = None,
        bias: bool = True,
        kernel_size: int = 7,
    ) -> None:
        super().__init__(channels, reduced_width(channels, rd_ratio, min_width, round_to), bias)
        self.place = _PooledConv(kernel_size)

    def gate(self, x: Tensor) -> Tensor:
        channel = (self.excite(mean_pool(x)) + self.excite(max_pool(x))).sigmoid()
        weighed = x * channel
        place = self.place(weighed.mean(1, keepdim=True), weighed.amax(1, keepdim=True))
        return channel * place.sigmoid()


@register_channel_attention("bam")
class BAM(Bottleneck):
    """BAM (Park et al., arXiv 1807.06514): x + x * σ(M_c + M_s), so the gate lies in (1, 2).

    M_c = BN(W2 relu(W1 z)) with the means z; M_s = BN of a 1x1 convolution to w channels, two
    dilated 3x3 and a 1x1 to one channel. As in the paper's formulas, branches are added and a norm
    ends each; the authors' code multiplies the branches and norms their hidden layers. The ReLUs
    between layers are theirs.
    Parameters: 2 C w + w + 3 C, and C w + 18 w² + 4 w + 3 for the places.

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r).
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
        dilation: Of the two 3x3 convolutions.
    """

    gate_range = (1.0, 2.0)

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 16,
        min_width: int = 1,
        round_to: int | None = None,
        dilation: int = 4,
    ) -> None:
        dilation = integer("dilation", dilation)
        width = reduced_width(channels, rd_ratio, min_width, round_to)
        super().__init__(channels, width, bias=True)
        self.norm = GateNorm(channels)
        self.place = nn.Sequential(
            pointwise(channels, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation),
            nn.ReLU(),
            pointwise(width, 1),
            GateNorm(1),
        )

    def gate(self, x: Tensor) -> Tensor:
        return 1 + torch.sigmoid(self.norm(self.excite(mean_pool(x))) + self.place(x))


@register_channel_attention("coord")
class CoordinateAttention(ChannelAttention):
    """Coordinate attention (Hou et al., arXiv 2103.02907): x * g_y * g_x.

    A gate for each row times one for each column. The means of rows and of columns, side by side,
    pass a 1x1 convolution, BN and hard swish; then each has a 1x1 convolution and a sigmoid.
    Parameters: 3 C w + 2 w, and w + 2 C with bias.
    r = 32 and w >= 8 are the authors'; timm has `bias=False, rd_ratio=1/24, round_to=8`.

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r).
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
        bias: Gives the three convolutions a bias.
    """

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 32,
        min_width: int = 8,
        round_to: int | None = None,
        bias: bool = True,
    ) -> None:
        super().__init__(channels)
        bias = flag("bias", bias)
        width = reduced_width(channels, rd_ratio, min_width, round_to)
        self.reduce = pointwise(channels, width, bias)
        self.norm = GateNorm(width)
        self.to_rows = pointwise(width, channels, bias)
        self.to_columns = pointwise(width, channels, bias)

    def gate(self, x: Tensor) -> Tensor:
        rows = x.mean(3, keepdim=True)
        columns = rearrange(x.mean(2, keepdim=True), "b c 1 x -> b c x 1")
        z = F.hardswish(self.norm(self.reduce(torch.cat([rows, columns], 2))))
        rows, columns = z.split([x.shape[2], x.shape[3]], 2)
        g_x = rearrange(self.to_columns(columns), "b c x 1 -> b c 1 x")
        return self.to_rows(rows).sigmoid() * g_x.sigmoid()


@register_channel_attention("triplet")
class TripletAttention(ChannelAttention):
    """Triplet attention (Misra et al., arXiv 2010.03045): the mean of three gates times x.

    Each pools one of the axes c, y, x by max and mean and has a k x k convolution with BN and a
    sigmoid over the plane of the other two. Parameters: 3 (2 k² + 2), whatever C.

    Args:
        channels: Channels of the feature map.
        kernel_size: k, odd.
    """

    def __init__(self, channels: int, kernel_size: int = 7) -> None:
        super().__init__(channels)
        self.over_c = _PooledConv(kernel_size)
        self.over_y = _PooledConv(kernel_size)
        self.over_x = _PooledConv(kernel_size)

    def gate(self, x: Tensor) -> Tensor:
        yx = self.over_c(x.amax(1, keepdim=True), x.mean(1, keepdim=True))
        by_columns = rearrange(x, "b c y x -> b y c x")
        cx = self.over_y(by_columns.amax(1, keepdim=True), by_columns.mean(1, keepdim=True))
        by_rows = rearrange(x, "b c y x -> b x y c")
        yc = self.over_x(by_rows.amax(1, keepdim=True), by_rows.mean(1, keepdim=True))
        cx = rearrange(cx, "b 1 c x -> b c 1 x")
        cy = rearrange(yc, "b 1 y c -> b c y 1")
        return (yx.sigmoid() + cx.sigmoid() + cy.sigmoid()) / 3


class _PooledConv(nn.Module):
    """Two pooled planes (b 1 i j) -> logits (b 1 i j) by a convolution without bias and BN."""

    def __init__(self, kernel_size: int) -> None:
        super().__init__()
        kernel_size = odd("kernel_size", kernel_size)
        self.conv = nn.Conv2d(2, 1, kernel_size, padding=kernel_size // 2, bias=False)
        self.norm = GateNorm(1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """(b 1 i j), (b 1 i j) -> (b 1 i j)"""
        return self.norm(self.conv(torch.cat([first, second], 1)))
