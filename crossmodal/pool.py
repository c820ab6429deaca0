"""Attentional pooling to several tokens: learned queries read what a tower gives.

Shapes: b batch, h heads, n tokens that are read, q queries, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from crossmodal.cross import check_tokens
from zoo.layers import CrossAttention, MaskLike, NormLayer, layer_norm
from zoo.layers.check import integer


class TokenPool(nn.Module):
    """A fixed number of tokens from any number: open_clip's and CoCa's pooler (arXiv 2205.01917).

    Args:
        dim: Width of the queries and of what comes out.
        dim_context: Width of the tokens that are read.
        num_queries: Tokens that come out.
        num_heads: Attention heads.
    """

    def __init__(
        self,
        dim: int,
        dim_context: int,
        num_queries: int = 256,
        num_heads: int = 8,
        *,
        norm_layer: NormLayer = layer_norm,
    ) -> None:
        super().__init__()
        self.dim_context = integer("dim_context", dim_context)
        self.query = nn.Parameter(torch.randn(integer("num_queries", num_queries), dim))
        self.norm_q, self.norm_kv = norm_layer(dim), norm_layer(dim_context)
        self.attn = CrossAttention(dim, num_heads, dim_context=dim_context)

    def forward(self, x: Tensor, mask: MaskLike = None) -> Tensor:
        """(b n d_context) -> (b q d); the mask, for (b h q n), says which tokens are read."""
        check_tokens("x", x, "dim_context", self.dim_context)
        queries = self.norm_q(self.query).expand(len(x), -1, -1)
        return self.attn(queries, self.norm_kv(x), mask)
