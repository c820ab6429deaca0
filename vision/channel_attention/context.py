"""Gates from context gathered with weights or over neighbourhoods: Gather-Excite and GCNet.

Shapes: b batch, c channels, y/x rows and columns. `w` is the bottleneck's width, `C` the number of
channels.
"""

from __future__ import annotations

from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from vision.channel_attention.base import (
    ChannelAttention,
    GateNorm,
    as_shown,
    check_choice,
    mean_pool,
    pointwise,
    reduced_width,
)
from vision.channel_attention.registry import register_channel_attention
from zoo.layers.check import flag, integer

EXTENTS = (0, 2, 4, 8, 16)


@register_channel_attention("ge")
class GatherExcite(ChannelAttention):
    """Gather-Excite (Hu et al., arXiv 1810.12348): x * σ(interpolate(excite(gather(x)))).

    Gathering takes (2e - 1)² neighbours in steps of the extent e. The paper's variants: GE-θ⁻, the
    default, averages them; GE-θ (`learned`) has log2 e depthwise 3x3 convolutions of stride 2 with
    norms, and ReLU between them; GE-θ⁺ (`learned, mlp`) adds the two layers of SE.
    Parameters: none, `learned` 11 C log2 e, `mlp` 2 C w + w + C.

    Args:
        channels: Channels of the feature map.
        extent: e, one of 2, 4, 8 and 16, or 0 for the whole map.
        learned: Gathers with convolutions; the extent must be 2 or more, since a learned gather of
            the whole map would fix the map's size.
        mlp: Adds the two layers of SE.
        rd_ratio: 1 / r of `mlp`; w = max(min_width, C // r).
        min_width: The least w.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
    """

    def __init__(
        self,
        channels: int,
        extent: int = 0,
        learned: bool = False,
        mlp: bool = False,
        rd_ratio: float = 1 / 16,
        min_width: int = 1,
        round_to: int | None = None,
    ) -> None:
        super().__init__(channels)
        extent = integer("extent", extent, minimum=0)
        learned, mlp = flag("learned", learned), flag("mlp", mlp)
        if extent not in EXTENTS:
            raise ValueError(f"extent ({extent}) must be one of {EXTENTS}, 0 for the whole map")
        if learned and extent == 0:
            raise ValueError(f"learned needs an extent of {EXTENTS[1:]}, got 0 for the whole map")
        width = reduced_width(channels, rd_ratio, min_width, round_to)
        self.extent = extent
        self.gather = _strided(channels, self.extent.bit_length() - 1) if learned else None
        self.mlp = nn.Sequential()
        if mlp:
            layers = pointwise(channels, width), nn.ReLU(), pointwise(width, channels)
            self.mlp.extend(layers)

    def gate(self, x: Tensor) -> Tensor:
        z = self.mlp(self._gathered(x))
        if self.extent:
            z = F.interpolate(z, size=x.shape[2:])
        return z.sigmoid()

    def _gathered(self, x: Tensor) -> Tensor:
        if self.gather is not None:
            return self.gather(x)
        if not self.extent:
            return mean_pool(x)
        e = self.extent
        return F.avg_pool2d(x, 2 * e - 1, stride=e, padding=e - 1, count_include_pad=False)


@register_channel_attention("gc")
class GlobalContext(ChannelAttention):
    """Global context of GCNet (Cao et al., arXiv 1904.11492): x + W2 relu(LN(W1 Σ a x)).

    a = softmax(w · x) over the positions weighs them. Parameters: C + 1 for a, and
    2 C w + 3 w + C. W2 starts at zero, as in the paper, so that `add` starts as the identity.

    LayerNorm over one channel is constant, so the width is at least 2. Its ε is 1e-5 as in the
    authors' code; timm has 1e-6, and the options of `gc` in timm are
    `fuse="scale", rd_ratio=1/8`, those of `gca` are `rd_ratio=1/8`.

    Args:
        channels: Channels of the feature map.
        rd_ratio: 1 / r; w = max(min_width, C // r).
        min_width: The least w, 2 or more.
        round_to: Rounds w to a multiple of it; see `reduced_width`.
        fuse: "add" as in the paper: the tap shows the added term, which is no factor; or "scale":
            x * σ(term), and the tap shows the gate.
    """

    min_channels = 2

    def __init__(
        self,
        channels: int,
        rd_ratio: float = 1 / 16,
        min_width: int = 2,
        round_to: int | None = None,
        fuse: str = "add",
    ) -> None:
        super().__init__(channels)
        check_choice("fuse", fuse, ("add", "scale"))
        width = reduced_width(channels, rd_ratio, min_width, round_to)
        if width < 2:
            raise ValueError(
                f"min_width ({min_width}) must be >= 2: LayerNorm over one channel is constant"
            )
        self.fuse = fuse
        self.adds = fuse == "add"
        self.gate_range = (0.0, 1.0) if fuse == "scale" else None
        self.attend = pointwise(channels, 1)
        self.fc1 = pointwise(channels, width)
        self.norm = nn.LayerNorm(width)
        self.fc2 = pointwise(width, channels)
        nn.init.zeros_(self.fc2.weight)

    def context(self, x: Tensor) -> Tensor:
        """(b c y x) -> the mean (b c 1 1), weighted by the attention over positions."""
        weights = rearrange(self.attend(x), "b 1 y x -> b (y x)").softmax(-1)
        values = rearrange(x, "b c y x -> b c (y x)")
        return einsum(values, weights.to(x.dtype), "b c n, b n -> b c")[..., None, None]

    def term(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c 1 1)"""
        z = rearrange(self.fc1(self.context(x)), "b w 1 1 -> b w")
        return self.fc2(F.relu(self.norm(z))[..., None, None])

    def gate(self, x: Tensor) -> Tensor:
        return self.term(x).sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c y x)"""
        if self.fuse == "scale":
            return super().forward(x)
        self.check(x)
        term = self.term(x).to(x.dtype)
        self.tap.record(lambda: as_shown(term, len(x)))
        return x + term


def _strided(channels: int, num_convs: int) -> nn.Sequential:
    """Depthwise 3x3 convolutions of stride 2 with norms, and ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(num_convs):
        conv = nn.Conv2d(channels, channels, 3, 2, 1, groups=channels, bias=False)
        layers += [conv, GateNorm(channels), nn.ReLU()]
    return nn.Sequential(*layers[:-1])
