"""The gates of a model of images, for `training_watch`: numbers a layer, a strip of each.

Shapes: b images, s steps, r rows of a strip, c channels, y x rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vision.inspection.fixed_images import FixedImages, undisturbed
from vision.inspection.sheet import GREY, Sheet, coloured, text_width, wrapped
from zoo.diagnostics.capture import Records
from zoo.diagnostics.gates import Range, capture_gates, gate_ranges
from zoo.diagnostics.looks import GateLook, look_at_gates

STRIP, ROW = 480, 12  # pixels: width of a strip, height of one of its rows
EDGE, LINE, GAP = 12, 16, 6
MOST_LINES = 8  # that tell what the rows are


class GatePart:
    """All layers with a gate.

    Args:
        model: As it will train.
        images: At which it will be looked.
        groups: Layer -> what it is drawn under, such as a stage.

    Raises:
        NothingCapturedError: No layer showed a gate.
    """

    kind = "gates"

    def __init__(
        self, model: nn.Module, images: FixedImages, groups: Mapping[str, str] | None = None
    ) -> None:
        self.images, self.groups, self.ranges = images, groups or {}, gate_ranges(model)
        with undisturbed(model), self.capture(model):
            model(images.inputs.to(next(model.parameters()).device))

    def capture(self, model: nn.Module) -> AbstractContextManager[Records]:
        return capture_gates(model)

    def see(self, records: Records) -> tuple[dict[str, GateLook], dict[str, Tensor]]:
        gates = {layer: found[0] for layer, found in records.items()}
        looks = {
            layer: look_at_gates(values, self.ranges[layer]) for layer, values in gates.items()
        }
        means = {
            f"gates/{layer}": values.flatten(2).mean(2) if values.ndim > 2 else values
            for layer, values in gates.items()
        }
        return looks, means

    def numbers(self, looks: Mapping[str, GateLook]) -> dict[str, float]:
        return {
            f"gates/{layer}/{name}": value
            for layer, look in looks.items()
            for name, value in look.numbers().items()
        }

    def _gates(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By layer, in the model's order; of those that showed theirs."""
        named = {layer: f"gates/{layer}" for layer in self.ranges}
        return {layer: tensors[name] for layer, name in named.items() if name in tensors}

    def draw(self, folder: Path, step: int, tensors: Mapping[str, Tensor], names: Any) -> None:
        found = "; ".join(", ".join(name.split("\n")) for name in names)
        draw_strips(
            folder / f"gates_step{step:06d}.png",
            self._gates(tensors),
            self.ranges,
            self.groups,
            title=f"step {step}: gates of each layer's channels",
            rows=f"rows of a strip, from the top: {found}",
        )

    def draw_over_time(self, folder: Path, steps: Mapping[int, Mapping[str, Tensor]]) -> None:
        each = [self._gates(tensors) for tensors in steps.values()]
        strips = {layer: torch.stack([gates[layer].mean(0) for gates in each]) for layer in each[0]}
        draw_strips(
            folder / "gates_over_time.png",
            strips,
            self.ranges,
            self.groups,
            title="gates of each layer's channels over time",
            rows=f"rows of a strip: mean over images at steps {', '.join(map(str, steps))}",
        )


def draw_strips(
    path: Path,
    strips: Mapping[str, Tensor],
    ranges: Mapping[str, Range | None],
    groups: Mapping[str, str],
    *,
    title: str,
    rows: str,
) -> None:
    """Draws gates (r c) of every layer as a strip: channels from left to right, by index.

    Args:
        path: The PNG.
        strips: By layer.
        ranges: Limits of each layer's gate, the ends of its colours; where they are not finite,
            its least and largest gate.
        groups: Layer -> what it is drawn under.
        title: Of the picture.
        rows: What the rows of a strip are.

    Raises:
        ImportError: matplotlib is missing.
    """
    ends = {layer: _ends(gates, ranges.get(layer)) for layer, gates in strips.items()}
    same = len(set(ends.values())) == 1
    labels = {layer: _label(layer, groups) for layer in strips}
    notes = {layer: _note(gates, ends[layer], same) for layer, gates in strips.items()}
    aside = max(map(text_width, labels.values())) + 8
    heights = [len(gates) * ROW + GAP for gates in strips.values()]
    width = max(aside + STRIP + 8 + max(map(text_width, notes.values())), 520)
    told_rows = wrapped(rows, width, MOST_LINES)
    above = 2 * EDGE + (5 + len(told_rows)) * LINE
    sheet = Sheet(width + 2 * EDGE, above + sum(heights) + EDGE, path)
    sheet.write(title, EDGE, EDGE, "title")
    for line, text in enumerate(told_rows, 1):
        sheet.write(text, EDGE, EDGE + line * LINE + 6, colour=GREY)
    low, high = next(iter(ends.values())) if same else (0.0, 1.0)
    ticks = [(place, f"{low + place * (high - low):.3g}") for place in (0, 0.5, 1)]
    words = [(0.0, "least"), (1.0, "most")]
    told = "gate" if same else "gate, from least to most of a layer's range, told beside it"
    sheet.scale(EDGE + 8, above - EDGE - 3 * LINE, ticks if same else words, told)
    top = above
    for (layer, gates), height in zip(strips.items(), heights, strict=True):
        middle = top + (height - GAP) // 2
        sheet.write(labels[layer], EDGE + aside - 8, middle, anchor="rm", colour=GREY)
        sheet.put(_strip(gates, *ends[layer]), EDGE + aside, top)
        sheet.write(notes[layer], EDGE + aside + STRIP + 8, middle, anchor="lm", colour=GREY)
        top += height
    sheet.save()


def _ends(gates: Tensor, limits: Range | None) -> tuple[float, float]:
    if limits is not None and math.isfinite(limits[1] - limits[0]) and limits[0] < limits[1]:
        return limits
    low, high = float(gates.nan_to_num(0.0).min()), float(gates.nan_to_num(0.0).max())
    return (low, high) if low < high else (low, low + 1)


def _label(layer: str, groups: Mapping[str, str]) -> str:
    return f"{groups[layer]}: {layer}" if layer in groups else layer


def _note(gates: Tensor, ends: tuple[float, float], same: bool) -> str:
    channels = f"{gates.shape[1]} channel{'s' if gates.shape[1] > 1 else ''}"
    told = f"{channels}, mean {float(gates.mean()):.2f}"
    return told if same else f"{told}, {ends[0]:.2g} to {ends[1]:.2g}"


def _strip(gates: Tensor, low: float, high: float) -> Tensor:
    """(r c) -> uint8 (y x 3) of the width of a strip, a row of white between two of its rows"""
    shares = (gates.float() - low) / (high - low)
    mode = "area" if gates.shape[1] > STRIP else "nearest-exact"
    wide = F.interpolate(shares[None, None], (len(gates), STRIP), mode=mode)[0, 0]
    rows = coloured(wide)[:, None].expand(-1, ROW - 1, -1, -1)
    return F.pad(rows, (0, 0, 0, 0, 0, 1), value=255).flatten(0, 1)
