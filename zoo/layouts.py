"""How other libraries name the weights of our models.

A layout recognises weights by their names, or by the network they come from, and translates them:
the names into ours, and what the library does not store with the tensors (activation, epsilon of
the norms, pooling, preprocessing) into the options of our card, so that `zoo.weights` can compare
them with the model's. Layouts are registered where the models are; a model may have several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from zoo.sources import Source

_layouts: list[Layout] = []

# From what a library's folder says to one of our models: its name and options, or None.
Architecture = Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]] | None]
_architectures: dict[str, list[Architecture]] = {}


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


def register_architecture(library: str, find: Architecture) -> None:
    """Adds a function that finds the model of ours which a folder of `library` holds.

    It gets `Source.config`: the folder's config.json, with "library" and perhaps "preprocessor".
    """
    known = _architectures.setdefault(library, [])
    if find not in known:
        known.append(find)


def find_architecture(config: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Name and options of the model that a folder of another library holds, if one is known."""
    candidates = (find(config) for find in _architectures.get(config.get("library", ""), ()))
    return next((found for found in candidates if found is not None), None)
