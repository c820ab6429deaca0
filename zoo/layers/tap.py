"""Taps: named places in a model where attention weights, gates or norms can be observed.

Without an observer a tap costs one attribute look-up and changes nothing. With one, it computes
what is asked for in addition to the model's own work, so that outputs stay the same bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Observer = Callable[[Tensor], None]


class _Watch(NamedTuple):
    what: str
    grad: bool
    callback: Observer


class Tap(nn.Module):
    """A parameter-free identity that shows what passes through it to its observers.

    Args:
        kind: What passes: "attention" for softmax weights (b h i j); others are free names.
    """

    def __init__(self, kind: str = "attention") -> None:
        super().__init__()
        self.kind = kind
        self._observers: list[_Watch] = []

    @property
    def active(self) -> bool:
        return bool(self._observers)

    def watched(self) -> dict[str, bool]:
        """What is observed, and whether any observer of it wants gradients."""
        found: dict[str, bool] = {}
        for watch in self._observers:
            found[watch.what] = found.get(watch.what, False) or watch.grad
        return found

    @contextmanager
    def observe(
        self, callback: Observer, what: str = "weights", *, grad: bool = False
    ) -> Iterator[None]:
        """Calls `callback` with every value that passes, inside the context.

        Args:
            what: Which values: "weights" are what `record` shows; attention shows "logits" and
                "outputs" too, as `zoo.capture_attention` says.
            grad: Gives values as part of the pass, to be differentiated, and none of a pass that
                is without gradients; by default they are detached.
        """
        if "torch._dynamo" in sys.modules:  # a compiled model runs it, but does not trace it
            callback = torch.compiler.disable(callback)
        watch = _Watch(what, grad, callback)
        self._observers.append(watch)
        try:
            yield
        finally:
            self._observers[:] = [other for other in self._observers if other is not watch]

    def forward(self, x: Tensor) -> Tensor:
        """(...) -> the same tensor."""
        if self.active:
            self.record(lambda: x)
        return x

    def record(self, compute: Callable[[], Tensor]) -> None:
        """Shows `compute()`, the weights, to their observers; see `show`."""
        self.show("weights", compute)

    def show(self, what: str, compute: Callable[[], Tensor]) -> None:
        """Shows `compute()` to the observers of `what`; does nothing without any.

        Gradient checkpointing runs a block again inside the backward pass. That is not a new
        forward pass, so nothing is shown there.
        """
        if not self.active or torch._C._current_graph_task_id() != -1:
            return
        chosen = [watch for watch in self._observers if watch.what == what]
        differentiated = [watch for watch in chosen if watch.grad]
        if differentiated and torch.is_grad_enabled():
            with _kept():
                value = compute()
                for watch in differentiated:
                    watch.callback(value)
        detached = [watch for watch in chosen if not watch.grad]
        if detached:
            with torch.no_grad():
                value = compute().detach()
                for watch in detached:
                    watch.callback(value)

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles have no observers: a recorder belongs to one model."""
        return {**self.__dict__, "_observers": []}

    def extra_repr(self) -> str:
        return self.kind


def _kept() -> AbstractContextManager:
    """What is computed here keeps its own tensors for the backward pass.

    Gradient checkpointing counts the tensors that a block saves, and computes them again in the
    backward pass, where nothing is shown.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _same)


def _same(x: Tensor) -> Tensor:
    return x
