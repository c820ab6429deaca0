"""Looking inside: what a model attends to, and what its gates do."""

from __future__ import annotations

from zoo.diagnostics.capture import NothingCapturedError, capture_attention
from zoo.diagnostics.gate_report import draw_gates, save_gates
from zoo.diagnostics.gates import (
    GateMoments,
    GateStatistics,
    capture_gates,
    gate_profile,
    gate_ranges,
    gate_statistics,
)
from zoo.diagnostics.measures import entropy

__all__ = [
    "GateMoments",
    "GateStatistics",
    "NothingCapturedError",
    "capture_attention",
    "capture_gates",
    "draw_gates",
    "entropy",
    "gate_profile",
    "gate_ranges",
    "gate_statistics",
    "save_gates",
]
