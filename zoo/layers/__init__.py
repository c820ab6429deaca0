"""Layers that know no modality: the attention core, masks, positions, blocks and taps."""

from __future__ import annotations

from zoo.layers import adaptive, baseline, linear, sparse  # noqa: F401  they register their kinds
from zoo.layers.attention import attend, attend_scores, explicit_attention
from zoo.layers.bias import (
    PositionBias,
    PriorBias,
    RelativeBias1d,
    RelativeBiasGrid,
    resample_prior,
    resample_table,
)
from zoo.layers.block import Block, DropPath, LayerScale, Mlp, checkpoint_block
from zoo.layers.cache import KeyValues, reorder
from zoo.layers.core import Core
from zoo.layers.factory import (
    core_options,
    create_attention,
    kinds_with_mask,
    list_attention,
    register_attention,
    supported_masks,
)
from zoo.layers.mask import Mask, MaskLike
from zoo.layers.multihead import (
    CrossAttention,
    MultiHead,
    NormLayer,
    SelfAttention,
    layer_norm,
    set_temperature,
)
from zoo.layers.pool import AttentionPool
from zoo.layers.position import resample_1d, resample_grid, sincos_1d, sincos_2d
from zoo.layers.rope import Rope
from zoo.layers.scores import attention_weights, score_range
from zoo.layers.tap import Tap

__all__ = [
    "AttentionPool",
    "Block",
    "Core",
    "CrossAttention",
    "DropPath",
    "KeyValues",
    "LayerScale",
    "Mask",
    "MaskLike",
    "Mlp",
    "MultiHead",
    "NormLayer",
    "PositionBias",
    "PriorBias",
    "RelativeBias1d",
    "RelativeBiasGrid",
    "Rope",
    "SelfAttention",
    "Tap",
    "attend",
    "attend_scores",
    "attention_weights",
    "checkpoint_block",
    "core_options",
    "create_attention",
    "explicit_attention",
    "kinds_with_mask",
    "layer_norm",
    "list_attention",
    "register_attention",
    "reorder",
    "resample_1d",
    "resample_grid",
    "resample_prior",
    "resample_table",
    "score_range",
    "set_temperature",
    "sincos_1d",
    "sincos_2d",
    "supported_masks",
]
