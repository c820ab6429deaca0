"""From what `explorer` found to what a page shows, and what a run folder adds to it.

Shapes: b images, h heads, c y x channels, rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vision.inspection.explorer import ROLLOUT, Explored
from vision.predict import top_classes
from zoo.diagnostics.looks import LayerLook
from zoo.merge import describe
from zoo.pages.explorer import GateStrip, Image, Measure, Panel
from zoo.pages.pictures import embedded
from zoo.pages.run_curves import attention_curves
from zoo.pages.run_record import RunRecord
from zoo.surgery import evaluating


def panel_of(
    explored: Explored,
    images: Sequence[Image],
    facts: Mapping[str, str],
    notes: Sequence[str] = (),
) -> Panel:
    """A panel of the explorer's page.

    Args:
        explored: What was found.
        images: That it was found on.
        facts: About the model.
        notes: More of them, besides why layers were left out.
    """
    return Panel(
        name=explored.name,
        images=list(images),
        maps=explored.maps,
        facts=dict(facts),
        measures=measures(explored),
        similarity={name: look.similarity for name, look in explored.looks.items()},
        gates=[
            GateStrip(name, each.values, each.limits, each.look.numbers())
            for name, each in explored.gates.items()
        ],
        health=health(explored),
        alarms=[asdict(alarm) | {"step": None} for alarm in explored.alarms],
        notes=[*notes, *_reasons(explored.left_out)],
    )


def measures(explored: Explored) -> list[Measure]:
    """Numbers by layer and head, those that some layer has."""
    looks = explored.looks
    distances = {name: look.distance for name, look in looks.items() if look.distance is not None}
    alike = {name: _alike(look) for name, look in looks.items() if look.num_heads > 1}
    one = (0.0, 1.0)
    found = [
        Measure(
            "Entropy",
            "0: one key, 1: all alike",
            {name: look.entropy for name, look in looks.items()},
            one,
        ),
        Measure("Likeness", "to the layer's other heads, 0 to 1", alike, one),
        Measure("Distance", "in patches, mean", distances),
        Measure("Other tokens", "share of what is no patch", explored.shares, one),
        Measure(
            "Top key",
            "share of the key that draws most",
            {name: look.top_key_share for name, look in looks.items()},
            one,
        ),
    ]
    return [measure for measure in found if measure.values]


def _alike(look: LayerLook) -> Tensor:
    """Mean likeness of each head to the others (h)."""
    others = look.similarity - torch.diag(look.similarity.diagonal())
    return others.sum(-1) / (look.num_heads - 1)


def health(explored: Explored) -> dict[str, dict[str, float]]:
    """A row of numbers for each layer with attention, and for each with gates."""
    return {
        **{name: look.numbers() for name, look in explored.looks.items()},
        **{name: gates.look.numbers() for name, gates in explored.gates.items()},
    }


def _reasons(left_out: Mapping[str, str]) -> list[str]:
    """A sentence for each reason, with the layers that it holds for."""
    layers: dict[str, list[str]] = {}
    for layer, reason in left_out.items():
        layers.setdefault(reason, []).append(layer)
    return [
        f"No maps of {', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}: "
        f"{reason}."
        for reason, names in layers.items()
    ]


def classified(model: Any, pixels: Tensor) -> list[str]:
    """What a classifier with class names says to each image; nothing for other models."""
    names = model.card.class_names
    if not names or not getattr(model, "num_classes", 0) or getattr(model, "global_pool", 1) == "":
        return [""] * len(pixels)
    device = next(model.parameters()).device
    with torch.no_grad(), evaluating(model):
        top = top_classes(model, pixels.to(device), 3)
    return [
        "predicts "
        + ", ".join(
            f"{names[index]} ({100 * share:.0f} %)"
            for index, share in zip(indices, shares, strict=True)
        )
        for indices, shares in zip(
            top["indices"].tolist(), top["probabilities"].tolist(), strict=True
        )
    ]


def facts_of(model: nn.Module, source: str, explored: Explored) -> dict[str, str]:
    """What the page says about a model."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    layers = [layer for layer in explored.maps if layer.name != ROLLOUT]
    heads = sorted({layer.codes.shape[1] for layer in layers})
    card: Any = getattr(model, "card", None)
    origin = getattr(card, "source", None) or ""
    told = {
        "model": describe(model),
        "weights": source,
        "origin": "" if origin == source else origin,
        "parameters": f"{parameters:,}",
        "images": " x ".join(map(str, card.preprocessing.size)) + " pixels" if card else "",
        "layers with maps": f"{len(layers)}, of {' or '.join(map(str, heads))} heads"
        if heads
        else "",
        "layers with gates": str(len(explored.gates) or ""),
    }
    return {name: text for name, text in told.items() if text}


def of_run(panel: Panel, folder: Path) -> Panel:
    """The panel with the alarms, curves and maps that a run folder has of its training.

    Without one nothing can be trained again, and alarms are left without remedies.
    """
    try:
        record = RunRecord.read(folder)
    except FileNotFoundError:
        return replace(panel, alarms=[{**alarm, "remedies": ()} for alarm in panel.alarms])
    over_time = embedded(folder / "attention" / "over_time.png")
    return replace(
        panel,
        alarms=[*record.alarms, *panel.alarms],
        charts=[each for charts in attention_curves(record).values() for each in charts],
        over_time=over_time,
    )
