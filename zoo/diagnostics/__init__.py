"""Looking inside: what a model attends to."""

from __future__ import annotations

from zoo.diagnostics.capture import capture_attention

__all__ = ["capture_attention"]
