"""Attention of other libraries, which has no tap: its weights are computed beside its own kernel.

What its heads put out is what its output projection takes, or computed where that cannot be seen.

Hooks see what a module is called with and what its projections and norms put out; from that the
weights are computed after the module has run. Hooks are not seen by a compiled model that has run
before, so compiled models are refused; and they do not run inside nn.TransformerEncoder in
evaluation, which then hands whole layers to one kernel and cuts padding out of the batch. That
kernel is off inside the context, so that the encoder's outputs agree with those outside only up to
rounding, and are not zero in the place of padding; in training it is never used.

Shapes: b batch, h heads, i/j query/key positions.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zoo.diagnostics.foreign_reader import Reader, heads_of, split
from zoo.diagnostics.foreign_scores import reader_of
from zoo.layers.tap import Observer, Tap


class ForeignAttention:
    """The weights of an attention module, for observers.

    Args:
        module: One that `reader_of` knows.
        reader: How its scores come about.
        compiled: Whether it runs inside a compiled module, where it cannot be observed.
        in_encoder: Whether it belongs to a layer of nn.TransformerEncoder.
    """

    def __init__(
        self, module: nn.Module, reader: Reader, *, compiled: bool, in_encoder: bool
    ) -> None:
        self.module, self.reader = module, reader
        self.compiled, self.in_encoder = compiled, in_encoder

    @contextmanager
    def observe(
        self, callback: Observer, what: str = "weights", *, grad: bool = False
    ) -> Iterator[None]:
        """Calls `callback` with what every forward pass shows, as a tap does.

        Raises:
            ValueError: the module is part of a compiled one.
        """
        refuse_compiled(f"the {what} of {type(self.module).__name__}", self.compiled)
        tap, seen = Tap(), _Seen(grad)

        def show(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            parts, seen.parts = seen.parts, {}
            refuse_nested(module, (*args, *kwargs.values()))
            if module is self.module or getattr(module, "_is_replica", False):  # no deep copy
                tap.show(what, partial(self._compute, what, module, parts, args, kwargs))

        with ExitStack() as stack:
            if self.in_encoder:
                stack.enter_context(no_fast_path())
            stack.enter_context(tap.observe(callback, what, grad=grad))
            for handle in self._listen(what, seen):
                stack.callback(handle.remove)
            handle = self.module.register_forward_hook(UntracedHook(show), with_kwargs=True)
            stack.callback(handle.remove)
            yield

    def _listen(self, what: str, seen: _Seen) -> Iterator[RemovableHandle]:
        """Hooks on the parts that are needed for it."""
        takes = self.reader.takes_outputs(self.module)
        if what == "outputs" and takes is not None:
            yield takes.register_forward_pre_hook(UntracedHook(seen.keep_input))
            return
        for name in self.reader.parts:
            if isinstance(part := getattr(self.module, name), nn.Module):
                yield part.register_forward_hook(UntracedHook(seen.keeper(name)))

    def _compute(
        self, what: str, module: nn.Module, parts: dict[str, Tensor], args: Any, kwargs: Any
    ) -> Tensor:
        if _MERGED in parts:
            return split(parts[_MERGED], heads_of(module))
        scores = self.reader.scores(module, parts, *args, **kwargs)
        return getattr(scores, what)()


_MERGED = "what the heads put out, side by side"


class _Seen(threading.local):
    """What parts put out in this thread: DataParallel runs its copies side by side.

    Args:
        grad: Keeps it as part of the pass, to be differentiated.
    """

    def __init__(self, grad: bool) -> None:
        self.grad = grad
        self.parts: dict[str, Tensor] = {}

    def keeper(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self._keep(name, output)

        return keep

    def keep_input(self, module: nn.Module, args: tuple[Tensor]) -> None:
        self._keep(_MERGED, args[0])

    def _keep(self, name: str, value: Tensor) -> None:
        self.parts[name] = value if self.grad else value.detach()


def refuse_compiled(what: str, compiled: bool) -> None:
    """For what is seen by hooks.

    Raises:
        ValueError: it is part of a compiled model.
    """
    if compiled:
        raise ValueError(
            f"{what} cannot be captured in a compiled model, which does not run hooks: capture and "
            "call the model that was compiled, zoo.weights.unwrap(model), or copy.deepcopy(model) "
            "of one that was compiled in place by model.compile()"
        )


def refuse_nested(module: nn.Module, values: Iterable[Any]) -> None:
    """For what is computed from tensors of one shape.

    Raises:
        ValueError: one of the values is a nested tensor.
    """
    if any(isinstance(value, Tensor) and value.is_nested for value in values):
        raise ValueError(
            f"{type(module).__name__} is called with nested tensors, of which nothing can be "
            "captured: call it with padded ones and key_padding_mask"
        )


class UntracedHook:
    """A hook that a compiled model runs, but does not trace; in copies and pickles it does nothing.

    Args:
        hook: What it calls.
    """

    def __init__(self, hook: Callable[..., None]) -> None:
        self.hook = torch.compiler.disable(hook) if "torch._dynamo" in sys.modules else hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.hook(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _silent_hook, ()


def _silent_hook() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy of its model."""


@contextmanager
def no_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def find_foreign_attention(model: nn.Module) -> dict[str, ForeignAttention]:
    """The attention of other libraries whose weights can be computed, by path in the model."""
    modules = dict(model.named_modules())
    compiled, encoders = compiled_paths(model), encoder_paths(model)
    return {
        path: ForeignAttention(
            module, reader, compiled=within(path, compiled), in_encoder=within(path, encoders)
        )
        for path, module in modules.items()
        if (reader := reader_of(module))
    }


def compiled_paths(model: nn.Module) -> list[str]:
    """Of the modules that torch.compile compiled."""
    return [
        path
        for path, module in model.named_modules()
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
    ]


def encoder_paths(model: nn.Module) -> list[str]:
    """Of the layers of nn.TransformerEncoder."""
    layers = nn.TransformerEncoderLayer
    return [path for path, module in model.named_modules() if isinstance(module, layers)]


def within(path: str, outer: list[str]) -> bool:
    """Whether the path is one of `outer`, or leads into one."""
    return any(not name or f"{path}.".startswith(f"{name}.") for name in outer)


def unknown_attention(model: nn.Module) -> dict[str, list[str]]:
    """Classes that are called attention but have neither a tap nor a reader, and where they are."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        inside = [part for part in module.modules() if part is not module]
        seen = reader_of(module) or any(isinstance(m, Tap) or reader_of(m) for m in inside)
        if _is_called_attention(module) and not seen and not any(map(_is_called_attention, inside)):
            own = type(module)
            found.setdefault(f"{own.__module__}.{own.__qualname__}", []).append(path)
    return found


def _is_called_attention(module: nn.Module) -> bool:
    names = [base.__name__.lower() for base in type(module).__mro__]
    return any("attention" in name or "attn" in name for name in names)
