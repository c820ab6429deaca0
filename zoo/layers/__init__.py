"""Layers that know no modality: the attention core, masks, positions, blocks and taps."""

from __future__ import annotations

from zoo.layers.attention import attend, attention_weights, explicit_attention
from zoo.layers.block import Block, DropPath, LayerScale, Mlp, checkpoint_block
from zoo.layers.factory import create_attention, list_attention, register_attention
from zoo.layers.mask import Mask, MaskLike
from zoo.layers.multihead import CrossAttention, NormLayer, SelfAttention, layer_norm
from zoo.layers.pool import AttentionPool
from zoo.layers.position import resample_1d, resample_grid, sincos_1d, sincos_2d
from zoo.layers.tap import Tap

__all__ = [
    "AttentionPool",
    "Block",
    "CrossAttention",
    "DropPath",
    "LayerScale",
    "Mask",
    "MaskLike",
    "Mlp",
    "NormLayer",
    "SelfAttention",
    "Tap",
    "attend",
    "attention_weights",
    "checkpoint_block",
    "create_attention",
    "explicit_attention",
    "layer_norm",
    "list_attention",
    "register_attention",
    "resample_1d",
    "resample_grid",
    "sincos_1d",
    "sincos_2d",
]
