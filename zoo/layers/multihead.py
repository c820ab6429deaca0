"""Multi-head self- and cross-attention: projections around the attention core.

Attribute names are timm's, so that its weights fit without a key map.

Shapes: b batch, n tokens, i/j query/key positions, h heads, d width, e head width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from zoo.layers.attention import attend
from zoo.layers.mask import MaskLike
from zoo.layers.tap import Tap

NormLayer = Callable[[int], nn.Module]

layer_norm: NormLayer = partial(nn.LayerNorm, eps=1e-6)


class SelfAttention(nn.Module):
    """Every token attends to all tokens of its own sequence (arXiv 1706.03762).

    Args:
        head_dim: Width of one head; by default `dim / num_heads`. Fewer, wider heads are possible.
        qk_norm: Normalises queries and keys per head, with `norm_layer`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: NormLayer = layer_norm,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_width(dim, num_heads, head_dim)
        width = num_heads * self.head_dim
        self.qkv = nn.Linear(dim, 3 * width, bias=qkv_bias)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.tap = Tap()
        self.proj = nn.Linear(width, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: MaskLike = None) -> Tensor:
        """(b n d) -> (b n d)"""
        if context is not None:
            raise TypeError("SelfAttention takes no context; use CrossAttention(dim, num_heads)")
        q, k, v = split_heads(self.qkv(x), 3, self.num_heads)
        return self.proj_drop(self.proj(_attend(self, q, k, v, mask)))


class CrossAttention(nn.Module):
    """Tokens attend to the tokens of another sequence, the context.

    Args:
        dim_context: Width of the context; by default `dim`.
        head_dim: Width of one head; by default `dim / num_heads`.
        qk_norm: Normalises queries and keys per head, with `norm_layer`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        dim_context: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: NormLayer = layer_norm,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_width(dim, num_heads, head_dim)
        width = num_heads * self.head_dim
        self.q = nn.Linear(dim, width, bias=qkv_bias)
        self.kv = nn.Linear(dim_context or dim, 2 * width, bias=qkv_bias)
        self.q_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim) if qk_norm else nn.Identity()
        self.attn_drop = nn.Dropout(attn_drop)
        self.tap = Tap()
        self.proj = nn.Linear(width, dim, bias=proj_bias)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: MaskLike = None) -> Tensor:
        """x (b i d), context (b j d_context) -> (b i d)"""
        if context is None:
            raise TypeError("CrossAttention needs a context; SelfAttention attends within x")
        (q,) = split_heads(self.q(x), 1, self.num_heads)
        k, v = split_heads(self.kv(context), 2, self.num_heads)
        return self.proj_drop(self.proj(_attend(self, q, k, v, mask)))


def head_width(dim: int, num_heads: int, head_dim: int | None = None) -> int:
    """`head_dim`, or by default `dim / num_heads`."""
    if num_heads < 1:
        raise ValueError(f"num_heads ({num_heads}) must be at least 1")
    if head_dim is None and dim % num_heads:
        raise ValueError(
            f"dim ({dim}) must be divisible by num_heads ({num_heads}), or head_dim be given"
        )
    return dim // num_heads if head_dim is None else head_dim


def split_heads(x: Tensor, parts: int, num_heads: int) -> tuple[Tensor, ...]:
    """(b n (parts h e)) -> `parts` views of (b h n e)

    Unbound before the transpose: the gradients are then stacked in the projection's own layout,
    which saves a copy against `rearrange(x, "b n (p h e) -> p b h n e")`.
    """
    views = x.unflatten(-1, (parts, num_heads, -1)).unbind(2)  # b n h e
    return tuple(view.transpose(1, 2) for view in views)


def merge_heads(x: Tensor) -> Tensor:
    """(b h n e) -> (b n (h e)); a view, since the kernels lay their output out like that."""
    return x.transpose(1, 2).flatten(2)


def _attend(
    attn: SelfAttention | CrossAttention, q: Tensor, k: Tensor, v: Tensor, mask: MaskLike
) -> Tensor:
    """(b h i e), (b h j e), (b h j e) -> (b i (h e))"""
    dropout_p = attn.attn_drop.p if attn.training else 0.0
    q, k = attn.q_norm(q), attn.k_norm(k)
    return merge_heads(attend(q, k, v, mask, dropout_p=dropout_p, tap=attn.tap))
