"""How other libraries name the weights of our models.

A layout recognises weights by their names, or by the network they come from, and translates them:
the names into ours, and what the library does not store with the tensors (activation, epsilon of
the norms, pooling, preprocessing) into the options of our card, so that `zoo.weights` can compare
them with the model's. Layouts are registered where the models are; a model may have several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from zoo.sources import Source

_layouts: list[Layout] = []


@dataclass(frozen=True)
class Layout:
    """A library's way to name weights.

    Attributes:
        name: What an error or a report calls it, such as "torchvision's ViT".
        fits: Whether it can be translated for this model.
        recognises: Whether these weights have it.
        translate: The weights under the model's names, and a card of what they imply.
    """

    name: str
    fits: Callable[[nn.Module], bool]
    recognises: Callable[[Source], bool]
    translate: Callable[[Source, nn.Module], Source]


def register_layout(layout: Layout) -> Layout:
    """Adds a layout; one of the same name is replaced."""
    _layouts[:] = [known for known in _layouts if known.name != layout.name]
    _layouts.append(layout)
    return layout


def find_layout(source: Source, model: nn.Module) -> Layout | None:
    """The layout that these weights have, among those that fit the model."""
    return next((x for x in _layouts if x.fits(model) and x.recognises(source)), None)


def layout_of(source: Source) -> Layout | None:
    """The layout that these weights have, whatever the model."""
    return next((x for x in _layouts if x.recognises(source)), None)
