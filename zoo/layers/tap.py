"""Taps: named places in a model where attention weights, gates or norms can be observed.

Without an observer a tap costs one attribute look-up and changes nothing. With one, it computes
what is asked for in addition to the model's own work, so that outputs stay the same bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Observer = Callable[[Tensor], None]


class Tap(nn.Module):
    """A parameter-free identity that shows what passes through it to its observers.

    Args:
        kind: What passes: "attention" for softmax weights (b h i j); others are free names.
    """

    def __init__(self, kind: str = "attention") -> None:
        super().__init__()
        self.kind = kind
        self._observers: list[Observer] = []

    @property
    def active(self) -> bool:
        return bool(self._observers)

    @contextmanager
    def observe(self, callback: Observer) -> Iterator[None]:
        """Calls `callback` with every detached value that passes, inside the context."""
        if "torch._dynamo" in sys.modules:  # a compiled model runs it, but does not trace it
            callback = torch.compiler.disable(callback)
        self._observers.append(callback)
        try:
            yield
        finally:
            self._observers.remove(callback)

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> the same tensor."""
        if self.active:
            self.record(lambda: x)
        return x

    def record(self, compute: Callable[[], Tensor]) -> None:
        """Shows `compute()` to the observers; does nothing without any.

        Gradient checkpointing runs a block again inside the backward pass. That is not a new
        forward pass, so nothing is recorded there.
        """
        if not self.active or torch._C._current_graph_task_id() != -1:
            return
        with torch.no_grad():
            value = compute().detach()
            for observer in tuple(self._observers):
                observer(value)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no observers: a recorder belongs to one model."""
        return {**self.__dict__, "_observers": []}

    def extra_repr(self) -> str:
        return self.kind
