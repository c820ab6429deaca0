"""What a run folder holds, read for a page; any of it may be missing or cut short."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from zoo.engine.tracking import read_rows

Row = dict[str, Any]


@dataclass(frozen=True)
class RunRecord:
    """A run folder as it was found.

    Attributes:
        folder: Where it is.
        config, summary: The content of config.json and summary.json; empty where they are missing.
        rows: Of metrics.jsonl.
        alarms: Of alarms.jsonl.
        classes: Of samples/classes.csv.
        samples: The content of samples/predictions.json.
    """

    folder: Path
    config: Row
    summary: Row
    rows: list[Row]
    alarms: list[Row]
    classes: list[dict[str, str]]
    samples: Row

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Reads a run folder.

        Raises:
            FileNotFoundError: it has neither config.json nor metrics.jsonl.
        """
        if not any((folder / name).exists() for name in ("config.json", "metrics.jsonl")):
            raise FileNotFoundError(
                f"folder {folder} is no run folder: it holds neither config.json nor metrics.jsonl"
            )
        return cls(
            folder=folder,
            config=_json(folder / "config.json"),
            summary=_json(folder / "summary.json"),
            rows=[row for row in _rows(folder / "metrics.jsonl") if row.get("step") is not None],
            alarms=_rows(folder / "alarms.jsonl"),
            classes=_table(folder / "samples" / "classes.csv"),
            samples=_json(folder / "samples" / "predictions.json"),
        )

    @property
    def options(self) -> Row:
        return self.config.get("options") or {}

    @property
    def best_metric(self) -> str | None:
        """Name of the metric that marks the best epoch."""
        return next((name for name in self.summary.get("best") or {} if name != "epoch"), None)

    @property
    def watched(self) -> int:
        """Updates between two looks at attention; 0 for none."""
        return int(self.options.get("save_attention_every") or 0)

    @property
    def looks(self) -> int:
        """Rows with numbers of a look at attention or gates."""
        return sum(any(name.startswith(("attn/", "gates/")) for name in row) for row in self.rows)

    @cached_property
    def series(self) -> dict[str, list[tuple[float, float]]]:
        """Name of a number -> (step, value), in the order in which names appear."""
        found: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            for name, value in row.items():
                if name not in ("step", "epoch") and isinstance(value, int | float):
                    found.setdefault(name, []).append((row["step"], float(value)))
        return found

    def metrics_of(self, epoch: float | None) -> Mapping[str, Any]:
        """Validation metrics after an epoch."""
        rows = [row for row in self.rows if row.get("epoch") == epoch and validation(row)]
        return validation(rows[-1]) if rows else {}


def validation(row: Mapping[str, Any]) -> Row:
    return {name: value for name, value in row.items() if name.startswith("val/")}


def _rows(path: Path) -> list[Row]:
    return [row for row in read_rows(path) if isinstance(row, dict)]


def _json(path: Path) -> Row:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _table(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except OSError:
        return []
