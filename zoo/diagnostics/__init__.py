"""Looking inside: what a model attends to, and what its gates do."""

from __future__ import annotations

from zoo.diagnostics.alarms import Alarm, Alarms
from zoo.diagnostics.capture import NothingCapturedError, capture_attention
from zoo.diagnostics.flow import rollout
from zoo.diagnostics.gate_report import draw_gates, save_gates
from zoo.diagnostics.gates import (
    GateMoments,
    GateStatistics,
    capture_gates,
    gate_profile,
    gate_ranges,
    gate_statistics,
)
from zoo.diagnostics.heads import effective_heads, head_similarity
from zoo.diagnostics.looks import GateLook, LayerLook, look_at_gates, look_at_layer
from zoo.diagnostics.measures import (
    attention_distance,
    attention_rank,
    diagonal_share,
    entropy,
    stable_rank,
    token_share,
)
from zoo.diagnostics.norms import capture_norms
from zoo.diagnostics.tokens import attention_received, outlier_norms, position_bias, sink_tokens

__all__ = [
    "Alarm",
    "Alarms",
    "GateLook",
    "GateMoments",
    "GateStatistics",
    "LayerLook",
    "NothingCapturedError",
    "attention_distance",
    "attention_rank",
    "attention_received",
    "capture_attention",
    "capture_gates",
    "capture_norms",
    "diagonal_share",
    "draw_gates",
    "effective_heads",
    "entropy",
    "gate_profile",
    "gate_ranges",
    "gate_statistics",
    "head_similarity",
    "look_at_gates",
    "look_at_layer",
    "outlier_norms",
    "position_bias",
    "rollout",
    "save_gates",
    "sink_tokens",
    "stable_rank",
    "token_share",
]
