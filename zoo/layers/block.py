"""The transformer block and its parts, with timm's attribute names.

Shapes: b batch, n tokens, d width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.layers.mask import MaskLike
from zoo.layers.multihead import NormLayer, SelfAttention, layer_norm

ActLayer = Callable[[], nn.Module]


class Mlp(nn.Module):
    """Two linear layers with an activation between, applied to each token by itself.

    Args:
        hidden_dim: Width between the layers; by default `dim`.
        out_dim: Width after them; by default `dim`.
        norm_layer: Normalises the hidden layer, if given.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        out_dim: int | None = None,
        *,
        act_layer: ActLayer = nn.GELU,
        norm_layer: NormLayer | None = None,
        bias: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__()
        hidden_dim = hidden_dim or dim
        self.fc1 = nn.Linear(dim, hidden_dim, bias=bias)
        self.act = act_layer()
        self.drop1 = nn.Dropout(drop)
        self.norm = nn.Identity() if norm_layer is None else norm_layer(hidden_dim)
        self.fc2 = nn.Linear(hidden_dim, out_dim or dim, bias=bias)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... out)"""
        x = self.norm(self.drop1(self.act(self.fc1(x))))
        return self.drop2(self.fc2(x))


class LayerScale(nn.Module):
    """A learned factor per channel on a residual branch (arXiv 2103.17239)."""

    def __init__(self, dim: int, init_values: float = 1e-5) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((dim,), float(init_values)))

    def forward(self, x: Tensor) -> Tensor:
        """(... d) -> (... d)"""
        return x * self.gamma


class DropPath(nn.Module):
    """Drops a residual branch for whole samples in training (arXiv 1603.09382).

    Samples that are kept are scaled up, so that the expected value stays the same.
    """

    def __init__(self, drop_prob: float = 0.0) -> None:
        super().__init__()
        if not 0.0 <= drop_prob < 1.0:
            raise ValueError(f"drop_prob ({drop_prob}) must be in [0, 1)")
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        """(b ...) -> (b ...)"""
        if not self.training or self.drop_prob == 0.0:
            return x
        keep = 1.0 - self.drop_prob
        factor = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1))
        return x * factor.bernoulli_(keep).div_(keep)

    def extra_repr(self) -> str:
        return f"{self.drop_prob:.3f}"


class Block(nn.Module):
    """Pre-norm transformer block: attention and an MLP, each on a residual branch.

    Args:
        init_values: Initial value of LayerScale; None leaves it out.
        attn: A module called as `attn(x, mask=mask)`; by default `SelfAttention`, built from
            `num_heads`, `head_dim`, `qkv_bias`, `qk_norm`, `attn_drop` and `proj_drop`.
        proj_drop: Dropout after the attention's projection and inside the MLP.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        head_dim: int | None = None,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        init_values: float | None = None,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
        attn: nn.Module | None = None,
        norm_layer: NormLayer = layer_norm,
        act_layer: ActLayer = nn.GELU,
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(dim)
        if attn is None:
            attn = SelfAttention(
                dim,
                num_heads,
                head_dim=head_dim,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                attn_drop=attn_drop,
                proj_drop=proj_drop,
                norm_layer=norm_layer,
            )
        self.attn = attn
        self.ls1 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, drop=proj_drop)
        self.ls2 = nn.Identity() if init_values is None else LayerScale(dim, init_values)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, mask: MaskLike = None, keep: int | None = None) -> Tensor:
        """(b n d) -> (b n d), or (b keep d): all tokens are attended to, the first `keep` go on."""
        attended = self.attn(self.norm1(x), mask=mask)
        if keep is not None:
            x, attended = x[:, :keep], attended[:, :keep]
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


def checkpoint_block(
    block: nn.Module, x: Tensor, mask: MaskLike = None, keep: int | None = None
) -> Tensor:
    """`block(x, mask, keep)`, whose activations are computed again in the backward pass."""
    return checkpoint(block, x, mask, keep, use_reentrant=False)
