"""The gates of a trained model as files: numbers, means by class, a figure.

The figure is that of Squeeze-and-Excitation Networks (arXiv 1709.01507, "Role of Excitation"): the
mean gate of each class over the channels of a layer.

Shapes: k classes, c channels.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from zoo.diagnostics.gates import GateMoments, GateStatistics
from zoo.diagnostics.plotting import figure_class

Profile = Mapping[str, GateMoments]
LINES = 10  # classes that a figure can tell apart
ROWS = 4  # layers of a group in a figure


def save_gates(
    folder: Path,
    profile: Profile,
    class_names: Sequence[str],
    groups: Mapping[str, str] | None = None,
) -> dict[str, float]:
    """Writes gates.json (statistics), gates.npz (means by class) and gates.png into a folder.

    In gates.npz each layer has its class means (k c) under its name, besides `class_names` and
    `class_counts`. Without matplotlib the figure is left out, with a warning.

    Args:
        folder: Made if need be.
        profile: From `gate_profile`.
        class_names: One name a class.
        groups: Layer -> name of its group, such as a stage; others are a group of their own.

    Returns:
        The statistics, mean over each group's layers, as `gates/GROUP/STATISTIC`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    members = _members(profile, groups or {})
    statistics = {name: moments.statistics() for name, moments in profile.items()}
    means = {group: _mean([statistics[name] for name in names]) for group, names in members.items()}
    report = {
        "groups": means,
        "layers": {
            name: {"group": group, "channels": len(profile[name].channel_means)}
            | {"gate_range": profile[name].gate_range, **asdict(statistics[name])}
            for group, names in members.items()
            for name in names
        },
    }
    text = json.dumps(_plain(report), indent=2, ensure_ascii=False, allow_nan=False)
    (folder / "gates.json").write_text(text + "\n", encoding="utf-8")
    _save_means(folder / "gates.npz", profile, class_names)
    try:
        draw_gates(folder / "gates.png", profile, class_names, groups)
    except ImportError as error:
        print(f"warning: {error}", file=sys.stderr)
    return {
        f"gates/{group}/{name}": value
        for group, row in means.items()
        for name, value in row.items()
    }


def _members(profile: Profile, groups: Mapping[str, str]) -> dict[str, list[str]]:
    """Group -> its layers; groups in the order of their names, layers in that of the model."""
    found: dict[str, list[str]] = {}
    for name in profile:
        found.setdefault(groups.get(name, name), []).append(name)
    return dict(sorted(found.items()))


def _mean(rows: Sequence[GateStatistics]) -> dict[str, float]:
    tables = [asdict(row) for row in rows]
    return {name: sum(table[name] for table in tables) / len(tables) for name in tables[0]}


def _plain(value: Any) -> Any:
    """With null for NaN and infinity, which JSON lacks."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _save_means(path: Path, profile: Profile, class_names: Sequence[str]) -> None:
    import numpy as np

    means = {name: moments.class_means.float().numpy() for name, moments in profile.items()}
    counts = next(iter(profile.values())).counts.long().numpy()
    arrays: dict[str, Any] = {"class_names": list(class_names), "class_counts": counts, **means}
    np.savez_compressed(path, **arrays)


def draw_gates(
    path: Path,
    profile: Profile,
    class_names: Sequence[str],
    groups: Mapping[str, str] | None = None,
) -> None:
    """Draws groups as columns and their last layers as rows: mean gates over channels by class.

    Channels are sorted by their mean over all samples, which is the black line. Of more than ten
    classes, those are drawn whose gates are furthest from it.

    Args:
        path: The PNG.
        profile, class_names, groups: As for `save_gates`.

    Raises:
        ImportError: matplotlib is missing.
    """
    columns = {group: names[-ROWS:] for group, names in _members(profile, groups or {}).items()}
    height = max(map(len, columns.values()))
    figure = figure_class(path)(
        figsize=(1 + 3.4 * len(columns), 1.5 + 2.4 * height), layout="constrained"
    )
    panels = figure.subplots(height, len(columns), squeeze=False)
    classes = _most_different(profile)
    for column, (group, names) in zip(panels.T, columns.items(), strict=True):
        for axes, name in zip(column, names, strict=False):
            _draw_layer(axes, profile[name], classes, class_names)
            axes.set_title(_title(group, name, profile[name]), fontsize=8)
        axes.set_xlabel("channel, by mean gate", fontsize=8)
        for spare in column[len(names) :]:
            spare.set_axis_off()
    _label(figure, panels, len(classes), len(class_names))
    figure.savefig(path, dpi=130)


def _most_different(profile: Profile) -> list[int]:
    """The classes to draw, in order of their indices."""
    away = sum(_distance(moments) for moments in profile.values())
    assert not isinstance(away, int)  # there is a layer
    return sorted(away.argsort(descending=True, stable=True)[:LINES].tolist())


def _distance(moments: GateMoments) -> Tensor:
    """How far the gates of each class are from the mean (k,); -1 without samples."""
    return (moments.class_means - moments.channel_means).abs().mean(1).nan_to_num(-1.0)


def _draw_layer(
    axes: Any, moments: GateMoments, classes: Sequence[int], class_names: Sequence[str]
) -> None:
    order = moments.channel_means.argsort(stable=True)
    places, marker = range(len(order)), "." if len(order) < 3 else ""
    for line, index in enumerate(classes):
        axes.plot(
            places, moments.class_means[index, order], f"C{line}", marker=marker,
            linewidth=0.9, alpha=0.8, label=class_names[index],
        )  # fmt: skip
    axes.plot(
        places, moments.channel_means[order], "black", marker=marker, linewidth=1.8,
        label="all samples",
    )  # fmt: skip
    limits = moments.gate_range
    if limits is not None and 0 < limits[1] - limits[0] < math.inf:
        room = 0.03 * (limits[1] - limits[0])
        axes.set_ylim(limits[0] - room, limits[1] + room)
    axes.tick_params(labelsize=7)
    axes.grid(axis="y", color="0.9", linewidth=0.6)


def _title(group: str, name: str, moments: GateMoments) -> str:
    found = moments.statistics()
    head = group if group == name else f"{group}: {name}"
    shut = f"{found.saturation:.0%} of gates at an end of their range"
    return f"{head}\n{shut}\n{found.class_dependence:.0%} of their variance told by the class"


def _label(figure: Any, panels: Any, drawn: int, classes: int) -> None:
    for row in panels:
        first = next(axes for axes in row if axes.axison)  # a group may have fewer layers
        first.set_ylabel("mean gate", fontsize=8)
    handles, labels = panels[0][0].get_legend_handles_labels()
    note = f"{drawn} of {classes} classes, furthest from the mean" if drawn < classes else None
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(6, len(labels)), fontsize=8,
        frameon=False, title=note, title_fontsize=8,
    )  # fmt: skip
