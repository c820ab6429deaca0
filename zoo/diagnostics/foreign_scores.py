"""What attention of other libraries makes its weights of: a reader for each class.

A reader is called as its class's `forward` is, after the module and what its parts put out: norms
and projections that are modules are not run again, so that their dropout, adapters and statistics
are the pass's own. Classes are known by the function that is their `forward`; a subclass with
another one is another class.

Shapes: b batch, n tokens, d width, h heads, i/j query/key positions, e head width, w windows.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from zoo.diagnostics import foreign_transformers
from zoo.diagnostics.foreign_reader import (
    Parts,
    Reader,
    Scores,
    causal_mask,
    mask_of_windows,
    split,
)


def reader_of(module: nn.Module) -> Reader | None:
    """The reader of a module's class; None where there is none."""
    if "forward" in vars(module):  # replaced in this one module
        return None
    forward = type(module).forward
    return READERS.get(f"{forward.__module__}.{forward.__qualname__}".removesuffix(".forward"))


def _torch(
    m: Any,
    parts: Parts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Scores:
    """nn.MultiheadAttention; `is_causal` only hints at what `attn_mask` says.

    Without a batch axis the weights get one, of size 1.
    """
    if query.ndim == 2:
        query, key, value = query[None], key[None], value[None]
        key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
    elif not m.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    biases = (None,) * 3 if m.in_proj_bias is None else m.in_proj_bias.chunk(3)
    if m.in_proj_weight is None:  # keys or values of another width
        matrices = m.q_proj_weight, m.k_proj_weight, m.v_proj_weight
    else:
        matrices = m.in_proj_weight.chunk(3)
    q, k, v = map(F.linear, (query, key, value), matrices, biases)
    if m.bias_k is not None:
        k, v = (
            torch.cat([x, more.to(x.dtype).expand(len(x), 1, -1)], 1)
            for x, more in ((k, m.bias_k), (v, m.bias_v))
        )
    if m.add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    added = k.shape[1] - key.shape[1]
    masks = [_open(mask, added) for mask in (key_padding_mask, attn_mask)]
    if masks[0] is not None:
        masks[0] = masks[0][:, None, None]
    if masks[1] is not None and masks[1].ndim == 3:
        masks[1] = masks[1].unflatten(0, (-1, m.num_heads))
    q, k, v = (split(x, m.num_heads) for x in (q, k, v))
    return Scores(q, k, tuple(masks), v=v)


def _open(mask: Tensor | None, added: int) -> Tensor | None:
    """A mask where True = may not, turned to ours, with the added keys open to all."""
    if mask is None:
        return None
    mask = F.pad(mask, (0, added))
    return ~mask if mask.dtype == torch.bool else mask


def _open_clip(m: Any, parts: Parts, x: Tensor, attn_mask: Tensor | None = None) -> Scores:
    """open_clip's own attention, in the blocks with more norms; cosines where it has a scale."""
    if attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, (-1, m.num_heads))
    masks = (_open(attn_mask, 0),)
    if m.logit_scale is None:
        return Scores(parts["ln_q"], parts["ln_k"], masks)
    q, k, _ = F.linear(x, m.in_proj_weight, m.in_proj_bias).chunk(3, -1)
    q, k = (F.normalize(split(part, m.num_heads), dim=-1) for part in (q, k))
    return Scores(q * m.logit_scale.clamp(max=m.logit_scale_max).exp(), k, masks, scale=1.0)


def _timm(
    m: Any,
    parts: Parts,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Scores:
    """Attention of timm's ViTs, and of its pooling by a learned query."""
    q, k = parts["q_norm"], parts["k_norm"]
    causal = causal_mask(q.shape[2], k.shape[2], q) if is_causal else None
    return Scores(q, k, (attn_mask, causal), _timm_scale(m))


def _timm_rope(
    m: Any,
    parts: Parts,
    x: Tensor,
    rope: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Scores:
    """Attention of timm's ViTs with rotary positions, such as EVA-02 and DINOv3."""
    plain = _timm(m, parts, x, attn_mask, is_causal)
    q, k = plain.q, plain.k
    if rope is not None:
        from timm.layers import apply_rot_embed_cat

        prefix, half = m.num_prefix_tokens, getattr(m, "rotate_half", False)
        q, k = (
            torch.cat([t[:, :, :prefix], apply_rot_embed_cat(t[:, :, prefix:], rope, half=half)], 2)
            for t in (q, k)
        )
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    return Scores(q, k, plain.masks, plain.scale)


def _timm_beit(
    m: Any, parts: Parts, x: Tensor, shared_rel_pos_bias: Tensor | None = None
) -> Scores:
    """BEiT's attention, with a bias for relative positions."""
    q, k = _timm_queries_and_keys(m, parts, x)
    own = None if m.relative_position_bias_table is None else m._get_rel_pos_bias()
    return Scores(q, k, (own, shared_rel_pos_bias), _timm_scale(m))


def _timm_swin(m: Any, parts: Parts, x: Tensor, mask: Tensor | None = None) -> Scores:
    """Attention within windows, which stand in for the batch: ((b w) h i j)."""
    q, k = _timm_queries_and_keys(m, parts, x)
    masks = (m._get_rel_pos_bias(), mask_of_windows(mask, len(q)))
    return Scores(q, k, masks, _timm_scale(m))


def _timm_swin_v2(m: Any, parts: Parts, x: Tensor, mask: Tensor | None = None) -> Scores:
    """The same with cosines, and positions by a small network (arXiv 2111.09883)."""
    q, k = (F.normalize(t, dim=-1) for t in _timm_queries_and_keys(m, parts, x))
    table = parts["cpb_mlp"].view(-1, m.num_heads)
    positions = 16 * torch.sigmoid(table[m.relative_position_index].permute(2, 0, 1))  # h i j
    scale = m.logit_scale.clamp(max=LARGEST_SCALE).exp()
    return Scores(q * scale, k, (positions, mask_of_windows(mask, len(q))), scale=1.0)


LARGEST_SCALE = 4.605170185988092  # the logarithm of 100


def _timm_queries_and_keys(m: Any, parts: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two of (b h n e), where the projection has no norms behind it."""
    qkv = parts.get("qkv")
    if qkv is None:  # its weight was used without it, with a bias made of three
        qkv = F.linear(x, m.qkv.weight, torch.cat([m.q_bias, m.k_bias, m.v_bias]))
    q, k, _ = qkv.chunk(3, -1)
    return split(q, m.num_heads), split(k, m.num_heads)


def _timm_scale(m: Any) -> float | None:
    return None if m.fused_attn else m.scale


def _torchvision_swin(m: Any, parts: Parts, x: Tensor) -> Scores:
    """Attention of torchvision's Swin within windows, ((b w) h i j), cut out of (b y x d)."""
    windows, groups = _windows(x, m.window_size, m.shift_size)
    qkv = F.linear(windows, m.qkv.weight, m.qkv.bias)
    q, k, v = (split(t, m.num_heads) for t in qkv.chunk(3, -1))
    return Scores(q, k, (m.get_relative_position_bias(), _seams(groups, q)), v=v)


def _torchvision_swin_v2(m: Any, parts: Parts, x: Tensor) -> Scores:
    """The same with cosines, and positions by a small network; keys have no bias."""
    windows, groups = _windows(x, m.window_size, m.shift_size)
    bias = m.qkv.bias
    if bias is not None:
        of_q, of_k, of_v = bias.chunk(3)
        bias = torch.cat([of_q, torch.zeros_like(of_k), of_v])
    qkv = F.linear(windows, m.qkv.weight, bias)
    q, k, v = (split(t, m.num_heads) for t in qkv.chunk(3, -1))
    q, k = (F.normalize(t, dim=-1) for t in (q, k))
    table = parts["cpb_mlp"].view(-1, m.num_heads)[m.relative_position_index]
    positions = 16 * torch.sigmoid(rearrange(table, "(i j) h -> h i j", i=windows.shape[1]))
    scale = m.logit_scale.clamp(max=LARGEST_SCALE).exp()
    return Scores(q * scale, k, (positions, _seams(groups, q)), 1.0, v)


def _seams(groups: Tensor, like: Tensor) -> Tensor | None:
    """(w n) -> ((b w) 1 n n): parts that the shift put side by side hardly see each other."""
    apart = groups[:, :, None] != groups[:, None]
    return mask_of_windows(apart.to(like.dtype) * -100.0, len(like))


def _windows(x: Tensor, size: list[int], shift: list[int]) -> tuple[Tensor, Tensor]:
    """(b y x d), padded and rolled, as ((b w) n d); and of each token (w n) which part it is of.

    A side of one window is not rolled.
    """
    rows, columns = size
    x = F.pad(x, (0, 0, 0, -x.shape[2] % columns, 0, -x.shape[1] % rows))
    sides = x.shape[1:3]
    moves = [0 if step >= side else by for side, step, by in zip(sides, size, shift, strict=True)]
    x = x.roll([-by for by in moves], (1, 2))
    of_y, of_x = (
        _parts_of(side, step, by, x.device)
        for side, step, by in zip(sides, size, moves, strict=True)
    )
    groups = rearrange(3 * of_y[:, None] + of_x, "(r y) (c x) -> (r c) (y x)", y=rows, x=columns)
    windows = rearrange(x, "b (r y) (c x) d -> (b r c) (y x) d", y=rows, x=columns)
    return windows, groups


def _parts_of(side: int, window: int, shift: int, device: torch.device) -> Tensor:
    """Of each position of a side: 0 before the last window, 1 in it, 2 where it was rolled in."""
    position = torch.arange(side, device=device)
    return (position >= side - window).long() + (position >= side - shift)


_NORMED = Reader(_timm, ("q_norm", "k_norm"), ("norm",))
_POOLED = Reader(_timm, ("q_norm", "k_norm"), ("proj",))
_ROTATED = Reader(_timm_rope, ("q_norm", "k_norm"), ("norm",))

READERS = {
    "torch.nn.modules.activation.MultiheadAttention": Reader(_torch),
    "open_clip.transformer.Attention": Reader(_open_clip, ("ln_q", "ln_k"), ("ln_inner",)),
    "timm.layers.attention.Attention": _NORMED,
    "timm.layers.attention_pool.AttentionPoolLatent": _POOLED,
    "timm.layers.attention.AttentionRope": _ROTATED,
    "timm.models.eva.EvaAttention": _ROTATED,
    "timm.models.beit.Attention": Reader(_timm_beit, ("qkv",), ("proj",)),
    "timm.models.swin_transformer.WindowAttention": Reader(_timm_swin, ("qkv",), ("proj",)),
    "timm.models.swin_transformer_v2.WindowAttention": Reader(
        _timm_swin_v2, ("qkv", "cpb_mlp"), ("proj",)
    ),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": Reader(_torchvision_swin),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": Reader(
        _torchvision_swin_v2, ("cpb_mlp",)
    ),
    **foreign_transformers.READERS,
}
