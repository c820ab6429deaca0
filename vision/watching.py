"""What a forward does besides its result, which a graph of it would not do again.

A graph holds tensors and steps. Random numbers that Python reads, gradients switched off, a change
of precision, gradient checkpointing and what the forward writes into its module happen while it is
traced, and never again.
"""

from __future__ import annotations

import pickle
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
    frame = sys._getframe(1)
    while frame.f_back is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            raise SideEffect("the forward computes a part again for its gradients (checkpoint)")
        frame = frame.f_back
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise SideEffect("the forward switches gradients off for a part of it")


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
        state = numpy.random.get_state() if numpy is not None else None
        return torch.get_rng_state(), random.getstate(), state

    def compare(self) -> None:
        now, python, numpy = self._read()
        same = torch.equal(now, self.torch) and python == self.python
        if same and numpy is not None and self.numpy is not None:
            same = pickle.dumps(numpy) == pickle.dumps(self.numpy)
        if not same:
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
        buffers = [tensor for tensor in module._buffers.values() if tensor is not None]
        self.tensors = [(t, _version(t), t.detach().clone()) for t in buffers]
        self.buffers = dict(module._buffers)

    def _own(self) -> dict[str, Any]:
        hidden = ("training", "_parameters", "_buffers", "_modules")
        return {name: v for name, v in self.module.__dict__.items() if name not in hidden}

    def compare(self) -> None:
        changed = sorted({*self._written_attributes(), *self._written_buffers()})
        if changed:
            owner = type(self.module).__name__
            raise SideEffect(f"the forward changes {', '.join(changed)} of {owner}")

    def _written_attributes(self) -> Iterator[str]:
        now = self._own()
        for name in now.keys() | self.attributes.keys():
            value, inside = self.attributes.get(name, (_Same(None), None))
            if name not in now or now[name] is not value or _inside(now[name]) != inside:
                yield name

    def _written_buffers(self) -> Iterator[str]:
        versions = {id(tensor): version for tensor, version, _ in self.tensors}
        for name, tensor in self.module._buffers.items():
            replaced = self.buffers.get(name) is not tensor
            if replaced or (tensor is not None and versions[id(tensor)] != _version(tensor)):
                yield name

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
                if _version(tensor) != version:
                    tensor.copy_(value)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # one of inference mode has none


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
