"""Gates of modules of other libraries, which have no tap: found by how they are built.

Their last activation is a module by itself, called `gate` (timm), `scale_activation` (torchvision)
or `sigmoid` (many others), and puts out the gate. It is observed by a hook, which a compiled model
that has run before does not see: record the model that was compiled (`unwrap`) instead.

Shapes: b samples, c channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from zoo.layers.tap import Observer, Tap

NAMES = ("gate", "scale_activation", "sigmoid")
RANGES = {"sigmoid": (0.0, 1.0), "hardsigmoid": (0.0, 1.0), "tanh": (-1.0, 1.0)}


class ForeignGate:
    """The output of an activation that computes a gate, for observers.

    Args:
        activation: One of those in `RANGES`, by the name of its class.
        name: What the module that it belongs to calls it.
    """

    def __init__(self, activation: nn.Module, name: str) -> None:
        self.activation, self.name = activation, name
        self.gate_range = RANGES[_kind(activation)]

    @contextmanager
    def observe(self, callback: Observer) -> Iterator[None]:
        """Calls `callback` with every gate, as a tap does."""
        tap = Tap("gate")

        def show(module: nn.Module, inputs: Any, gate: Tensor) -> None:
            tap.record(lambda: _by_channel(gate))

        handle = self.activation.register_forward_hook(show)
        try:
            with tap.observe(callback):
                yield
        finally:
            handle.remove()


def find_foreign_gate(module: nn.Module) -> ForeignGate | None:
    """The child of a module that computes its gate, if it has one."""
    for name in NAMES:
        child = getattr(module, name, None)
        if isinstance(child, nn.Module) and _kind(child) in RANGES:
            return ForeignGate(child, name)
    return None


def _kind(activation: nn.Module) -> str:
    return type(activation).__name__.lower()


def _by_channel(gate: Tensor) -> Tensor:
    """Gates that all places share as (b c), where (b c 1 1), ECA's (b 1 c) and (b 1 1 c) come."""
    shared = gate.ndim == 3 or sum(size > 1 for size in gate.shape[1:]) <= 1
    return gate.flatten(1) if shared else gate
