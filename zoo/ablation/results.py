"""The finished cells as rows: results.jsonl."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from zoo.ablation.plan import Cell, Plan, cells_of
from zoo.engine.checkpoint import write_atomically
from zoo.engine.tracking import read_rows

Values = dict[str, dict[int, float]]  # variant -> seed -> metric
Curve = list[tuple[float, float]]  # epoch, metric


def collect(plan: Plan, out: str | Path) -> list[dict[str, Any]]:
    """One row for each finished cell; `folder` is relative to `out`."""
    found = ((cell, cell.summary()) for cell in cells_of(plan, Path(out)))
    return [_row(plan, cell, summary) for cell, summary in found if summary is not None]


def _row(plan: Plan, cell: Cell, summary: dict[str, Any]) -> dict[str, Any]:
    copied = ("data", "epochs", "metrics", "params", "samples_per_second", "wall_seconds")
    row = {
        "variant": cell.variant.name,
        "seed": cell.seed,
        "flags": {**plan.flags, **cell.variant.flags},
        **{name: summary.get(name) for name in copied},
        "folder": cell.folder.relative_to(cell.out).as_posix(),
    }
    return json.loads(json.dumps(row, default=str))


def write_results(plan: Plan, out: str | Path) -> list[dict[str, Any]]:
    """Writes results.jsonl in one piece and returns its rows."""
    rows = collect(plan, out)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = Path(out) / "results.jsonl"
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
    return rows


def metric_values(plan: Plan, rows: list[dict[str, Any]]) -> Values:
    """The plan's metric by variant and seed.

    Raises:
        ValueError: a finished cell has no such number; leaving it out would flatter its variant.
    """
    values: Values = {name: {} for name in plan.names}
    for row in rows:
        value = (row["metrics"] or {}).get(plan.metric)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(
                f"metric {plan.metric!r} is {value} in {row['folder']}/summary.json, which has "
                f"{', '.join(row['metrics'] or {}) or 'no metrics'}"
            )
        values[row["variant"]][row["seed"]] = float(value)
    return values


def learning_curves(plan: Plan, out: str | Path) -> dict[str, dict[int, Curve]]:
    """Variant -> seed -> (epoch, metric) of each evaluation, from the cells' metrics.jsonl."""
    curves: dict[str, dict[int, Curve]] = {name: {} for name in plan.names}
    for cell in cells_of(plan, Path(out)):
        rows = [row for row in read_rows(cell.folder / "metrics.jsonl") if plan.metric in row]
        points = [(float(row["epoch"]), row[plan.metric]) for row in rows]
        finite = [(x, float(y)) for x, y in points if y is not None and math.isfinite(y)]
        if finite:
            curves[cell.variant.name][cell.seed] = finite
    return curves


def environments(plan: Plan, out: str | Path) -> dict[str, list[str]]:
    """What the cells' config.json say of versions, commit and hardware; all values that occur."""
    found: dict[str, dict[str, None]] = {}
    for cell in cells_of(plan, Path(out)):
        path = cell.folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        facts = {**config.get("versions", {}), **config.get("hardware", {})}
        facts |= {"commit": config["commit"]} if config.get("commit") else {}
        for name, value in facts.items():
            found.setdefault(name, {})[str(value)] = None
    return {name: list(values) for name, values in found.items()}


def seconds_left(plan: Plan, rows: list[dict[str, Any]]) -> float | None:
    """Seconds that the unfinished cells take one after the other; None before one has finished.

    A variant takes the mean of its finished cells, or of all where it has none.
    """
    times: dict[str, list[float]] = {}
    for row in rows:
        times.setdefault(row["variant"], []).append(row["wall_seconds"] or 0.0)
    everything = [seconds for each in times.values() for seconds in each]
    if not everything:
        return None
    done = {(row["variant"], row["seed"]) for row in rows}
    todo = [name for name in plan.names for seed in plan.seeds if (name, seed) not in done]
    return sum(_mean(times.get(name, everything)) for name in todo)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
