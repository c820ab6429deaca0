"""What a forward does besides its result, which a graph of it would not do again.

A graph holds tensors and steps. Random numbers that Python reads, gradients switched off, a change
of precision, gradient checkpointing and what the forward writes into its module happen while it is
traced, and never again.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import checkpoint


class SideEffect(Exception):
    """Something that the graph would lose."""


def refuse_context() -> None:
    """Fails within a checkpointed part, and where gradients are switched off; see `watching`."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise SideEffect("the forward switches gradients off for a part of it")
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise SideEffect("the forward computes a part again for its gradients (checkpoint)")
        frame = frame.f_back


@contextmanager
def watching(module: nn.Module) -> Iterator[None]:
    """Gradients on; random numbers, buffers and attributes are as before when it is left.

    Raises:
        SideEffect: One of them was not, or the forward sets its own precision.
    """
    numbers, written = _RandomStates(), [_Writes(part) for part in module.modules()]
    entering = torch.autocast.__enter__
    torch.autocast.__enter__ = _refuse_autocast  # type: ignore[method-assign]
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
        numbers.compare()
        for part in written:
            part.compare()
    finally:
        torch.autocast.__enter__ = entering  # type: ignore[method-assign]
        numbers.restore()
        for part in written:
            part.restore()


def _refuse_autocast(self: torch.autocast) -> Any:
    raise SideEffect("the forward sets the precision of a part of it (autocast)")


class _RandomStates:
    """The generators of torch, Python and numpy."""

    def __init__(self) -> None:
        self.torch, self.python, self.numpy = self._read()

    @staticmethod
    def _read() -> tuple[Tensor, Any, Any]:
        numpy = sys.modules.get("numpy")
        state = numpy.random.get_state(legacy=False) if numpy is not None else None
        return torch.get_rng_state(), random.getstate(), copy.deepcopy(state)

    def compare(self) -> None:
        now, python, numpy = self._read()
        same = torch.equal(now, self.torch) and python == self.python
        if not same or repr(numpy) != repr(self.numpy):
            raise SideEffect("the forward draws random numbers outside of its tensors' steps")

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)


class _Writes:
    """The attributes and buffers of a module, without its children's."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {name: (v, _inside(v)) for name, v in self._own().items()}
        self.tensors = [(t, t._version, t.detach().clone()) for t in module._buffers.values() if
                        t is not None]
        self.buffers = dict(module._buffers)

    def _own(self) -> dict[str, Any]:
        hidden = ("training", "_parameters", "_buffers", "_modules")
        return {name: v for name, v in self.module.__dict__.items() if name not in hidden}

    def compare(self) -> None:
        now = self._own()
        changed = [
            name
            for name in {**self.attributes, **now}
            if name not in now
            or name not in self.attributes
            or now[name] is not self.attributes[name][0]
            or _inside(now[name]) != self.attributes[name][1]
        ]
        changed += [n for n, t in self.module._buffers.items() if self.buffers.get(n, 0) is not t]
        versions = {id(t): version for t, version, _ in self.tensors}
        changed += [n for n, t in self.module._buffers.items()
                    if t is not None and versions.get(id(t), t._version) != t._version]
        if changed:
            raise SideEffect(
                f"the forward changes {', '.join(sorted(set(changed)))} of {type(self.module).__name__}"
            )

    def restore(self) -> None:
        own = self._own()
        for name in set(own) - set(self.attributes):
            del self.module.__dict__[name]
        for name, (value, inside) in self.attributes.items():
            self.module.__dict__[name] = value
            if _inside(value) != inside:
                _refill(value, inside)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        with torch.no_grad():
            for tensor, version, value in self.tensors:
                if tensor._version != version:
                    tensor.copy_(value)


def _inside(value: Any) -> Any:
    """What a plain container holds, by identity; nothing of anything else."""
    if isinstance(value, dict):
        return [(key, _Same(part)) for key, part in value.items()]
    return [_Same(part) for part in value] if isinstance(value, list | set) else None


class _Same:
    """Equal to the same object alone: a comparison of tensors has no truth value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _refill(value: Any, inside: Any) -> None:
    value.clear()
    if isinstance(value, dict):
        value.update({key: same.value for key, same in inside})
    elif isinstance(value, set):
        value.update(same.value for same in inside)
    else:
        value.extend(same.value for same in inside)
