"""Attention pooling: a learned query reads the tokens (SigLIP, arXiv 2303.15343).

Shapes: b batch, n tokens, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from zoo.layers.attention import attend
from zoo.layers.block import ActLayer, Mlp
from zoo.layers.mask import MaskLike
from zoo.layers.multihead import NormLayer, head_width, layer_norm, merge_heads, split_heads
from zoo.layers.tap import Tap


class AttentionPool(nn.Module):
    """One latent query attends to all tokens, followed by a residual MLP.

    Attribute names are those of timm's AttentionPoolLatent.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        *,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_drop: float = 0.0,
        norm_layer: NormLayer = layer_norm,
        act_layer: ActLayer = nn.GELU,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        head_dim = head_width(dim, num_heads)
        self.latent = nn.Parameter(torch.empty(1, 1, dim))
        self.q = nn.Linear(dim, dim, bias=qkv_bias)
        self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias)
        self.q_norm = norm_layer(head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(head_dim) if qk_norm else nn.Identity()
        self.tap = Tap()
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(proj_drop)
        self.norm = norm_layer(dim)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer)
        nn.init.trunc_normal_(self.latent, std=dim**-0.5)

    def forward(self, x: Tensor, mask: MaskLike = None) -> Tensor:
        """(b n d) -> (b d)"""
        (q,) = split_heads(self.q(self.latent.expand(x.shape[0], -1, -1)), 1, self.num_heads)
        k, v = split_heads(self.kv(x), 2, self.num_heads)
        out = attend(self.q_norm(q), self.k_norm(k), v, mask, tap=self.tap)
        self.tap.show("outputs", lambda: out)
        x = self.proj_drop(self.proj(merge_heads(out)))
        return (x + self.mlp(self.norm(x)))[:, 0]
