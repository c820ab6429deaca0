"""What channel attention must beat: no gate, a gate that ignores its input, a gate without pooling.

Shapes: b batch, c channels, y/x rows and columns.
"""

from __future__ import annotations

from torch import Tensor

from vision.channel_attention.base import ChannelAttention
from vision.channel_attention.registry import register_channel_attention
from vision.channel_attention.squeeze import SqueezeExcite


@register_channel_attention("none")
class NoAttention(ChannelAttention):
    """The input itself. Its tap shows a gate of ones. Parameters: none."""

    gate_range = (1.0, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> the same tensor."""
        self.check(x)
        self.tap.record(lambda: x.new_ones(x.shape[:2]))
        return x


@register_channel_attention("constant")
class ConstantGate(SqueezeExcite):
    """The two layers of `se` fed with ones instead of the pooled input: a learned constant gate.

    The parameters are those of `se` with the same options, in number, names and first values, so a
    difference between the two is due to the input alone. `squeeze` is accepted, so that one set of
    options fits both, and has no effect. All samples have the same gate.
    """

    def squeeze(self, x: Tensor) -> Tensor:
        """(b c y x) -> ones (1 c 1 1)"""
        return x.new_ones(1, self.channels, 1, 1)


@register_channel_attention("nosqueeze")
class NoSqueeze(SqueezeExcite):
    """SE without pooling (Hu et al., arXiv 1709.01507, table "NoSqueeze"): a gate per position.

    The two layers of `se` are 1x1 convolutions over the whole map. Parameters as `se`.

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r).
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
        bias: Gives both layers a bias.
        gate: "sigmoid", "hard_sigmoid", "tanh" or "relu".
    """

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 16,
        min_width: int = 1,
        round_to: int | None = None,
        bias: bool = True,
        gate: str = "sigmoid",
    ) -> None:
        super().__init__(channels, rd_ratio, min_width, round_to, bias, gate=gate)

    def squeeze(self, x: Tensor) -> Tensor:
        """(b c y x) -> the same."""
        return x
