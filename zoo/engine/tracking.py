"""Rows of numbers for people and programs: metrics.jsonl, a tracker, a progress bar."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zoo.engine.checkpoint import write_atomically

if TYPE_CHECKING:
    from accelerate import Accelerator


def write_json(path: Path, content: Any) -> None:
    """Writes JSON in one piece; NaN and infinity become null."""
    text = json.dumps(_plain(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


class Tracking:
    """Writes rows to metrics.jsonl and to Accelerate's tracker, on the main process only.

    Args:
        accelerator: Knows the tracker.
        folder: The run folder.
        step, epoch: Where to go on: later rows are dropped, they will be written again.
    """

    def __init__(
        self, accelerator: Accelerator, folder: Path, step: int = 0, epoch: int = 0
    ) -> None:
        self.accelerator = accelerator
        self.path = folder / "metrics.jsonl"
        if accelerator.is_main_process:
            rows = [
                row
                for row in read_rows(self.path)
                if row["step"] <= step and not ("train/epoch_loss" in row and row["epoch"] > epoch)
            ]
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(self.path, lambda file: file.write_text(text))

    def log(self, values: Mapping[str, float], *, step: int, epoch: float) -> None:
        """Appends one row."""
        if not self.accelerator.is_main_process:
            return
        row = _plain({"step": step, "epoch": epoch, **values})
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.accelerator.log(dict(values), step=step)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line cut short by a kill is left out."""
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


class Progress:
    """One bar over the whole run on a terminal: images per second, time left, the last numbers.

    Elsewhere (a log file, a pipe, another process) only `say` prints.
    """

    def __init__(self, total: int, done: int, *, main: bool) -> None:
        from tqdm import tqdm

        self.main = main
        self.bar: Any = tqdm(
            total=total,
            initial=done,
            unit="img",
            unit_scale=True,
            dynamic_ncols=True,
            disable=not (main and sys.stderr.isatty()),
        )

    def advance(self, images: int, **shown: str) -> None:
        self.bar.set_postfix(shown, refresh=False)
        self.bar.update(images)

    def say(self, message: str) -> None:
        if self.main:
            self.bar.write(message, file=sys.stdout)
            sys.stdout.flush()

    def close(self) -> None:
        self.bar.close()
