"""Attention layers of torch and of other packages, for comparisons with our kinds.

Each has its package's own defaults; where a package has no projections, they are as ours.

Shapes: b batch, n tokens, d width, h heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

SDPA = "torch SDPA"
RIVALS = {  # which of our kinds does the same work
    SDPA: "full", "x-transformers": "full", "package linformer": "linformer",
    "performer-pytorch": "performer", "local-attention": "longformer",
}  # fmt: skip


def rival(name: str, n: int, dim: int, num_heads: int) -> nn.Module:
    """The layer of one of `RIVALS` for n tokens: (1 n d) -> (1 n d).

    Raises:
        ImportError: its package is missing.
    """
    return _BUILDS[name](n, dim, num_heads)


class Sdpa(nn.Module):
    """What one writes by hand: torch's fused attention between two projections."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(b n d) -> (b n d)"""
        pattern = "b n (three h d) -> three b h n d"
        q, k, v = rearrange(self.qkv(x), pattern, three=3, h=self.num_heads)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(rearrange(out, "b h n d -> b n (h d)"))


class LocalAttention(nn.Module):
    """local-attention (window 128, one window to either side) between projections like ours."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        from local_attention import LocalAttention as Core

        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.core = Core(
            window_size=128, causal=False, look_backward=1, look_forward=1, autopad=True,
            exact_windowsize=True, use_rotary_pos_emb=False, dim=dim // num_heads,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """(b n d) -> (b n d)"""
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2).contiguous()
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


def _x_transformers(n: int, dim: int, num_heads: int) -> nn.Module:
    from x_transformers.x_transformers import Attention

    return Attention(dim, heads=num_heads, dim_head=dim // num_heads, causal=False, flash=True)


def _linformer(n: int, dim: int, num_heads: int) -> nn.Module:
    from linformer import LinformerSelfAttention

    return LinformerSelfAttention(dim, n, k=256, heads=num_heads)


def _performer(n: int, dim: int, num_heads: int) -> nn.Module:
    from performer_pytorch import SelfAttention

    return SelfAttention(dim, heads=num_heads, dim_head=dim // num_heads, causal=False)


_BUILDS: dict[str, Callable[[int, int, int], nn.Module]] = {
    SDPA: lambda n, *shape: Sdpa(*shape),
    "x-transformers": _x_transformers,
    "package linformer": _linformer,
    "performer-pytorch": _performer,
    "local-attention": lambda n, *shape: LocalAttention(*shape),
}
