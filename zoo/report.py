"""What became of every tensor when weights were loaded, and its table."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass

from zoo.sources import listed

_WIDE = 10_000  # columns that the table may take: it is the same in every terminal


@dataclass(frozen=True)
class LoadReport:
    """What became of every tensor; as text, a table.

    Attributes:
        source: Where the weights came from.
        loaded: Keys whose values were taken as they are.
        resized: Position embeddings resampled to another grid, and from which to which.
        adapted: Keys taken in a changed form (stem for other channels, classifier rows by class
            name, a classifier left out), and how.
        reinitialized: Keys of the model that keep their initial values for a known reason.
        missing: Keys of the model that the source lacks, unexplained.
        unexpected: Keys of the source that the model lacks, or that do not fit, unexplained.
        matched_fraction: Part of the model's values that came from the source, those in
            `reinitialized` left out.
        layout: The library whose names the source's keys were translated from, if any.
        notes: What else one should know, in sentences.
    """

    source: str
    loaded: tuple[str, ...]
    resized: dict[str, str]
    adapted: dict[str, str]
    reinitialized: dict[str, str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    matched_fraction: float
    layout: str | None = None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        named = f" (read as {self.layout})" if self.layout else ""
        header = f"{self.source}{named}: {100 * self.matched_fraction:.1f} % of the values matched"
        return "\n".join([header, *_table(self._rows())])

    def _rows(self) -> list[tuple[str, str, str]]:
        """Title, keys, and what became of them."""
        rows = [("loaded", f"{len(self.loaded)} tensors", "")]
        for title in ("resized", "adapted", "reinitialized"):
            rows += [(title, keys, how) for keys, how in _grouped(getattr(self, title))]
        for title in ("missing", "unexpected"):
            if keys := getattr(self, title):
                rows.append((title, f"{len(keys)} tensors", listed(keys)))
        return rows + [("note", note, "") for note in self.notes]


def _grouped(changes: Mapping[str, str]) -> list[tuple[str, str]]:
    """One line for what happened alike to the same tensor of all blocks: `blocks.*.table (12)`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for key, how in changes.items():
        groups.setdefault((re.sub(r"\d+", "*", key), how), []).append(key)
    return [
        (keys[0] if len(keys) == 1 else f"{pattern} ({len(keys)})", how)
        for (pattern, how), keys in groups.items()
    ]


def _table(rows: list[tuple[str, str, str]]) -> list[str]:
    """Lines with the columns aligned, a title only where it changes."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = max((len(keys) for _, keys, how in rows if how), default=0)
    table = Table.grid(padding=(0, 2))
    above = ""
    for title, keys, how in rows:
        rest = f"{keys:<{width}}  {how}" if how else keys  # a sentence makes no column wider
        table.add_row("", Text("" if title == above else title), Text(rest))
        above = title
    console = Console(file=io.StringIO(), width=_WIDE, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(table, soft_wrap=False)
    return [line.rstrip() for line in captured.get().splitlines()]
