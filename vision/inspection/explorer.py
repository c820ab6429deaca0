"""What the attention explorer shows of a model: weights, numbers and gates on some images.

Shapes: b images, h heads, i/j query/key tokens, c y x channels, rows and columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vision.inspection.image_tokens import image_tokens
from vision.predict import inputs_of
from zoo.diagnostics.alarms import Alarm, Alarms
from zoo.diagnostics.capture import attention_of, capture_attention
from zoo.diagnostics.flow import rollout
from zoo.diagnostics.gates import capture_gates, gate_ranges
from zoo.diagnostics.looks import GateLook, LayerLook, look_at_gates, look_at_layer
from zoo.diagnostics.measures import token_share
from zoo.merge import describe
from zoo.pages.explorer_pack import Maps, Side, encode
from zoo.surgery import evaluating

ROLLOUT = "rollout"
_ADDED = "added"  # keys that nn.MultiheadAttention adds at the end


@dataclass(frozen=True)
class Gates:
    """The gates of a layer.

    Attributes:
        values: Means over places (b c).
        limits: Of the gate; None where the layer does not say them.
        look: Numbers on them.
    """

    values: Tensor
    limits: tuple[float, float] | None
    look: GateLook


@dataclass(frozen=True)
class Explored:
    """What was found in a model.

    Attributes:
        name: Of the model.
        maps: Layers whose weights can be drawn, in the model's order; rollout last.
        looks: By layer, numbers on its attention.
        shares: By layer, the share of weight (h) that goes to tokens that are no patches.
        left_out: By layer, why its weights cannot be drawn.
        gates: By layer.
        alarms: What `zoo.diagnostics.alarms` says to these numbers.
    """

    name: str
    maps: list[Maps]
    looks: dict[str, LayerLook] = field(default_factory=dict)
    shares: dict[str, Tensor] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    gates: dict[str, Gates] = field(default_factory=dict)
    alarms: list[Alarm] = field(default_factory=list)


@torch.no_grad()
def explore(
    model: Any, pixels: Tensor, layers: str | Sequence[str] = "*", name: str | None = None
) -> Explored:
    """Looks at a model of images, one image after another.

    Args:
        model: With a card; it computes on its device.
        pixels: Images as `vision.predict.image_source` gives them: uint8 (b c y x).
        layers: Names of attention modules, with wildcards.
        name: What the page calls it; by default its own name.

    Raises:
        ValueError: the model has neither attention nor gates that can be seen, or no such layer.
    """
    attends, gated = bool(attention_of(model)), bool(gate_ranges(model))
    if not attends and not gated:
        raise ValueError(
            f"{describe(model)} has nothing to explore: no attention whose weights can be captured "
            f"and no gates{_hint(model)}"
        )
    device = next(model.parameters()).device
    seen: list[_Seen] = []
    with evaluating(model):
        for image in pixels:
            seen.append(_Seen.of(model, inputs_of(model, image[None].to(device)), layers, attends))
    return _explored(model, seen, name or describe(model))


def _hint(model: nn.Module) -> str:
    from zoo.diagnostics.foreign_attention import unknown_attention

    found = unknown_attention(model)
    return f"; weights of these are not known: {', '.join(found)}" if found else ""


@dataclass
class _Seen:
    """One image: by layer, what `encode` made of the weights (h i j), and the rest."""

    codes: dict[str, Tensor]
    sides: dict[str, tuple[Side, Side]]
    looks: dict[str, LayerLook]
    shares: dict[str, Tensor]
    left_out: dict[str, str]
    gates: dict[str, Tensor]

    @classmethod
    def of(cls, model: Any, inputs: Tensor, layers: str | Sequence[str], attends: bool) -> _Seen:
        records: dict[str, list[Tensor]] = {}
        gates: dict[str, list[Tensor]] = {}
        with ExitStack() as stack:
            if attends:
                records = stack.enter_context(capture_attention(model, layers))
            if gate_ranges(model):
                gates = stack.enter_context(capture_gates(model))
            model(inputs)
        means = {
            layer: parts[0].reshape(*parts[0].shape[:2], -1).mean(-1)
            for layer, parts in gates.items()
        }
        found = cls({}, {}, {}, {}, {}, means)
        for layer, parts in records.items():
            found.add(model, layer, joined(parts), (inputs.shape[2], inputs.shape[3]))
        found.add_rollout(records)
        return found

    def add(self, model: nn.Module, layer: str, weights: Tensor, size: tuple[int, int]) -> None:
        """A layer's weights: maps where keys are patches, numbers where they are weights at all."""
        try:
            found = sides(model, weights, size)
        except ValueError as error:
            self.left_out[layer], found = str(error), None
        grid, prefix = None, 0
        if found is not None and found[0] == found[1] and len(found[1].names[0]) == found[1].start:
            grid, prefix = found[1].grid, found[1].start
        try:
            self.looks[layer] = look_at_layer(weights, grid=grid, num_prefix_tokens=prefix)
        except ValueError as error:  # below 0, or rows that do not sum to 1
            self.left_out[layer] = str(error)
            return
        if found is None:
            return
        self.codes[layer], self.sides[layer] = encode(weights[0]), found
        start, others = found[1].start, len(found[1].names[0])
        if others:
            chosen = [*range(start), *range(start - others, 0)]
            self.shares[layer] = token_share(weights, chosen).mean((0, 2))

    def add_rollout(self, records: dict[str, list[Tensor]]) -> None:
        """Over the layers in which patches look at patches."""
        square = [name for name, (one, other) in self.sides.items() if one == other]
        shapes = {tuple(self.codes[name].shape[1:]) for name in square}
        if len(square) < 2 or len(shapes) > 1:
            return
        reached = rollout([joined(records[name]) for name in square])
        self.codes[ROLLOUT], self.sides[ROLLOUT] = encode(reached), self.sides[square[0]]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Several passes of a layer, queries after each other, where they fit; else the last one."""
    shapes = {(part.shape[0], part.shape[1], part.shape[3]) for part in parts}
    return torch.cat(list(parts), dim=2) if len(shapes) == 1 else parts[-1]


def sides(model: nn.Module, weights: Tensor, size: tuple[int, int]) -> tuple[Side, Side]:
    """What the queries and keys of weights (1 h i j) are.

    Raises:
        ValueError: the keys are no patches of the image.
    """
    if len(weights) != 1:
        raise ValueError(f"it attends within {len(weights)} windows, not over the image")
    i, j = weights.shape[-2:]
    keys = _side(model, size, j)
    try:
        queries = _side(model, size, i)
    except ValueError:
        names = ("query",) if i == 1 else tuple(f"query {place + 1}" for place in range(i))
        queries = Side([names], None, i)
    return queries, keys


def _side(model: nn.Module, size: tuple[int, int], tokens: int) -> Side:
    found = image_tokens(model, size, tokens)
    names = (*found.names, *[_ADDED] * found.suffix)
    return Side([names], found.grid, found.prefix)


def _explored(model: nn.Module, seen: list[_Seen], name: str) -> Explored:
    """All images together."""
    first = seen[0]
    maps = [
        Maps(
            layer,
            torch.stack([each.codes[layer] for each in seen]),
            *(replace(side, names=list(side.names) * len(seen)) for side in first.sides[layer]),
        )
        for layer in first.codes
    ]
    looks = {layer: mean_look([each.looks[layer] for each in seen]) for layer in first.looks}
    limits = gate_ranges(model)
    gates = {}
    for layer in first.gates:
        values = torch.cat([each.gates[layer] for each in seen])
        gates[layer] = Gates(values, limits[layer], look_at_gates(values, limits[layer]))
    return Explored(
        name,
        maps,
        looks,
        {k: torch.stack([each.shares[k] for each in seen]).mean(0) for k in first.shares},
        first.left_out,
        gates,
        alarms_of(looks, {layer: gate.look for layer, gate in gates.items()}),
    )


def alarms_of(looks: dict[str, LayerLook], gates: dict[str, GateLook]) -> list[Alarm]:
    """What is wrong with a trained model: as in training, at its end."""
    alarms = Alarms(total_steps=1)
    return alarms.check(1, looks, gates) + alarms.check(1, looks, gates)


def mean_look(looks: Sequence[LayerLook]) -> LayerLook:
    """One look of several, each at one image."""
    if len(looks) == 1:
        return looks[0]
    means: dict[str, Any] = {}
    for each in fields(LayerLook):
        values = [getattr(look, each.name) for look in looks]
        if isinstance(values[0], Tensor) and values[0].is_floating_point():
            means[each.name] = torch.stack(values).nanmean(0)
    sees = torch.stack([look.sees for look in looks]).any(0)
    return replace(looks[0], **means, sees=sees, finite=all(look.finite for look in looks))
