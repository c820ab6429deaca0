"""Validation images at which a model is looked at again and again as it trains.

Shapes: b images, c y x channels, rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zoo.layers.check import integer
from zoo.preprocess import normalize
from zoo.surgery import evaluating


class Images(Protocol):
    """A source of batches by (epoch, index) keys, as `vision.data.make_source` makes them."""

    def __len__(self) -> int: ...

    def __getitems__(self, keys: list[tuple[int, int]]) -> dict[str, Any]: ...


@dataclass(frozen=True)
class FixedImages:
    """Some images, as they are and as a model takes them.

    Attributes:
        pixels: Before they are normalised: uint8 (b c y x).
        inputs: (b c y x)
        names: A line or two on each.
        class_names: What the model may call them.
    """

    pixels: Tensor
    inputs: Tensor
    names: tuple[str, ...]
    class_names: tuple[str, ...] = ()

    def first(self, number: int) -> FixedImages:
        """So many of them."""
        return FixedImages(
            self.pixels[:number], self.inputs[:number], self.names[:number], self.class_names
        )

    def told(self, output: Any) -> list[str]:
        """Names, with the class that a model's output finds for each, where it is one of these."""
        if not isinstance(output, Tensor) or output.shape[1:] != (len(self.class_names),):
            return list(self.names)
        found = output.argmax(1).tolist()
        return [
            f"{name}, found {self.class_names[index]}"
            for name, index in zip(self.names, found, strict=True)
        ]


def fixed_images(
    model: Any, source: Images, samples: int = 4, class_names: Sequence[str] = ()
) -> FixedImages:
    """Images at even distances over all; all of them, where there are fewer.

    Args:
        model: Says by its card how images become inputs.
        source: Images that are not augmented.
        samples: How many.
        class_names: To name the images by.
    """
    indices = spread(min(integer("samples", samples), len(source)), len(source))
    batch = source.__getitems__([(0, index) for index in indices])
    targets = batch["targets"].tolist()
    names = tuple(
        f"image {index}" + (f"\nclass {class_names[target]}" if class_names else "")
        for index, target in zip(indices, targets, strict=True)
    )
    inputs = normalize(batch["images"], model.card.preprocessing)
    return FixedImages(batch["images"], inputs, names, tuple(class_names))


def spread(number: int, total: int) -> list[int]:
    """So many indices, at even distances over all.

    >>> spread(4, 277)
    [0, 69, 138, 207]
    """
    if integer("samples", number) > total:
        raise ValueError(f"samples ({number}) must not exceed {total}, the number there are")
    return [total * index // number for index in range(number)]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """For a forward pass that leaves no trace in a training.

    Everything is in evaluation, without gradients, and runs as it was written where it is compiled;
    afterwards modes and random numbers are as before.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices))
        stack.enter_context(_as_written(model))
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Modules that were compiled in place, by `module.compile()`, run their own code."""
    compiled = {m: m._compiled_call_impl for m in model.modules() if m._compiled_call_impl}
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call
