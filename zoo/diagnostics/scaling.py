"""How the cost of sequence layers grows with the length: time and peak memory over n.

    rows, skipped = Scaling({"full": build_full, "window": build_window}, dim=192).measure(lengths)
    print_tables(rows, skipped)

Shapes: n tokens, d width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from zoo.diagnostics.cost import free_bytes, in_turn, peak_bytes, ratio_of_medians, saved_bytes
from zoo.diagnostics.plotting import figure_class

Build = Callable[[int], nn.Module]  # the layer for n tokens: (1 n d) -> (1 n d)
Row = dict[str, Any]

TASKS = {"infer": "forward", "train": "forward + backward"}
VALUES = {"median_ms": "time, ms", "peak_mib": "peak memory, MiB"}
GUARDED_FROM = 4096  # tokens from which memory is foreseen before a layer is run


@dataclass(frozen=True)
class Scaling:
    """Candidates to compare over lengths.

    Args:
        builds: What makes each candidate's layer.
        dim: Width d.
        repeats: Rounds; in each one all candidates have their turn. Above 4,096 tokens a third of
            them, at least three.
        device: cpu or cuda.
        longest: Tokens beyond which a candidate is left out for the sake of time.
        rivals: Which candidate does the same work as another.
        baseline: The candidate that all are compared with.
    """

    builds: Mapping[str, Build]
    dim: int
    repeats: int = 7
    device: str = "cpu"
    longest: Mapping[str, int] = field(default_factory=dict)
    rivals: Mapping[str, str] = field(default_factory=dict)
    baseline: str = ""

    def measure(self, lengths: Sequence[int]) -> tuple[list[Row], list[Row]]:
        """Time and peak memory of every candidate at every length, forward and training.

        Returns:
            A row for each task, length and candidate, and the candidates that were skipped, with
            `why`: too slow, or too large for the memory that is free. A rival's row has the `ratio`
            of its time to that of `rival_of`, with a 95 % interval.
        """
        rows: list[Row] = []
        skipped: list[Row] = []
        for n in sorted(set(lengths)):
            reasons = {name: self.why_not(name, n) for name in self.builds}
            skipped += [{"candidate": c, "n": n, "why": why} for c, why in reasons.items() if why]
            rows += self._measure_at(n, [name for name, why in reasons.items() if not why])
        return rows, skipped

    def _measure_at(self, n: int, names: Sequence[str]) -> list[Row]:
        x = self._input(n)
        layers = {(task, name): self._layer(name, n, task) for task in TASKS for name in names}
        steps = {f"{t} {name}": _step(layer, x, t) for (t, name), layer in layers.items()}
        rounds = max(3, self.repeats if n <= 4096 else self.repeats // 3)
        times = in_turn(steps, rounds, self.device)
        kept = {name: saved_bytes(layers["train", name], x) / 2**20 for name in names}
        rows = []
        for (task, name), layer in layers.items():
            own, rival_of = times[f"{task} {name}"], self.rivals.get(name)
            row: Row = {"task": task, "n": n, "candidate": name, "rounds": rounds}
            row |= {"median_ms": 1e3 * median(own), "kept_mib": kept[name]}
            row["peak_mib"] = _peak(layer, x, task, self.device) / 2**20
            if rival_of in names:
                row["rival_of"] = rival_of
                row["ratio"], row["interval"] = ratio_of_medians(own, times[f"{task} {rival_of}"])
            if self.baseline in names:
                row["over_baseline"] = median(own) / median(times[f"{task} {self.baseline}"])
            rows.append(row)
        return rows

    def why_not(self, name: str, n: int) -> str:
        """Why a candidate is not run at a length; empty where it is."""
        if n > self.longest.get(name, n):
            return f"for its time, run up to {self.longest[name]:,} tokens"
        if n < GUARDED_FROM:
            return ""
        need, free = self.foreseen_bytes(name, n), free_bytes(self.device)
        if need <= 0.8 * free:
            return ""
        return f"needs about {need / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free"

    def foreseen_bytes(self, name: str, n: int) -> int:
        """Peak of a training step at n tokens, from its peaks at n / 16 and n / 8.

        Taken as a n + b n^2, which holds for layers that keep all pairs and for those that do not.
        """
        short, long = n // 16, n // 8
        low, high = (
            _peak(self._layer(name, m, "train"), self._input(m), "train", self.device) / m
            for m in (short, long)
        )
        square = max(0.0, (high - low) / (long - short))
        return math.ceil((high - square * long) * n + square * n**2)

    def _layer(self, name: str, n: int, task: str) -> nn.Module:
        return self.builds[name](n).to(self.device).train(task == "train")

    def _input(self, n: int) -> Tensor:
        return torch.randn(1, n, self.dim, device=self.device, requires_grad=True)


def _step(layer: nn.Module, x: Tensor, task: str) -> Callable[[], None]:
    def train() -> None:
        layer(x).sum().backward()

    def infer() -> None:
        with torch.inference_mode():
            layer(x)

    return train if task == "train" else infer


def _peak(layer: nn.Module, x: Tensor, task: str, device: str) -> int:
    """Peak of a step that starts without gradients, which therefore count."""
    leaves = (x, *layer.parameters())
    for leaf in leaves:
        leaf.grad = None
    peak = peak_bytes(_step(layer, x, task), device)
    for leaf in leaves:
        leaf.grad = None
    return peak


def exponent(rows: Sequence[Row], value: str = "median_ms") -> float:
    """Slope of log(value) over log(n), fitted from 1,024 tokens on; NaN below two lengths."""
    import numpy as np

    long = [row for row in rows if row["n"] >= 1024 and row[value] > 0]
    if len({row["n"] for row in long}) < 2:
        return math.nan
    n, y = (np.log([row[key] for row in long]) for key in ("n", value))
    return float(np.polyfit(n, y, 1)[0])


def exponents(rows: Sequence[Row]) -> list[Row]:
    """The exponents of time and of peak memory for each task and candidate."""
    return [
        {"task": task, "candidate": name}
        | {value: exponent(_own(rows, task, name), value) for value in VALUES}
        for task in TASKS
        for name in _names(rows)
    ]


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["candidate"] for row in rows))


def _own(rows: Sequence[Row], task: str, name: str) -> list[Row]:
    return [row for row in rows if row["task"] == task and row["candidate"] == name]


def print_tables(
    rows: Sequence[Row], skipped: Sequence[Row], *, baseline: str = "", setting: str = ""
) -> None:
    """A table for each task and quantity, and what was skipped."""
    from rich.console import Console

    console = Console()
    for task in TASKS:
        for value in VALUES:
            console.print(_table(rows, skipped, task, value, baseline, setting))
    for row in skipped:
        console.print(f"{row['candidate']} not run at {row['n']:,} tokens: {row['why']}")


def _table(
    rows: Sequence[Row],
    skipped: Sequence[Row],
    task: str,
    value: str,
    baseline: str,
    setting: str,
) -> Any:
    from rich.table import Table

    table = Table(title=f"{TASKS[task]}: {VALUES[value]} ({setting})")
    lengths = sorted({row["n"] for row in (*rows, *skipped)})
    columns = ["candidate", *(f"{n:,}" for n in lengths), "exponent"]
    columns += [f"/ {baseline}"] if baseline in _names(rows) else []
    columns += ["rival / ours"] if any("rival_of" in row for row in rows) else []
    for column in columns:
        table.add_column(column, justify="left" if column == "candidate" else "right")
    out = {(row["candidate"], row["n"]) for row in skipped}
    for name in _names([*rows, *skipped]):
        own = {row["n"]: row for row in _own(rows, task, name)}
        cells = [name]
        for n in lengths:
            cells.append(
                _short(own[n][value]) if n in own else "not run" if (name, n) in out else ""
            )
        slope = exponent(list(own.values()), value)
        cells.append("" if math.isnan(slope) else f"{slope:.2f}")
        if f"/ {baseline}" in columns:
            cells.append(_last_ratio(rows, task, name, baseline, value))
        if "rival / ours" in columns and own:
            last = own[max(own)]
            cells.append(_last_ratio(rows, task, name, last.get("rival_of", ""), value))
        table.add_row(*cells)
    return table


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _last_ratio(rows: Sequence[Row], task: str, name: str, other: str, value: str) -> str:
    """Of one candidate to another, at the longest length that both have."""
    mine = {row["n"]: row[value] for row in _own(rows, task, name)}
    theirs = {row["n"]: row[value] for row in _own(rows, task, other)}
    both = mine.keys() & theirs.keys()
    if not both or name == other:
        return ""
    return f"{mine[max(both)] / theirs[max(both)]:.2f}"


def plot(rows: Sequence[Row], path: Path, *, baseline: str = "") -> None:
    """Time and peak memory over n, all on logarithmic axes; rivals dashed in their kind's colour.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure = figure_class(path)(figsize=(14, 10), layout="constrained")
    panels = figure.subplots(len(TASKS), len(VALUES), sharex=True)
    styles = _styles(rows, baseline)
    lengths = sorted({row["n"] for row in rows})
    for line, task in zip(panels, TASKS, strict=True):
        for axes, value in zip(line, VALUES, strict=True):
            for name, style in styles.items():
                own = _own(rows, task, name)
                axes.plot([r["n"] for r in own], [r[value] for r in own], label=name, **style)
            axes.set(xscale="log", yscale="log", title=TASKS[task], ylabel=VALUES[value])
            axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
            axes.minorticks_off()
            axes.grid(alpha=0.3)
    for axes in panels[-1]:
        axes.set_xlabel("tokens")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=110)


def _styles(rows: Sequence[Row], baseline: str) -> dict[str, dict[str, Any]]:
    """Colour and marker of each candidate; a rival shares them with the kind whose work it does."""
    rival_of = {row["candidate"]: row["rival_of"] for row in rows if "rival_of" in row}
    ours = [name for name in _names(rows) if name not in rival_of and name != baseline]
    styles: dict[str, dict[str, Any]] = {}
    for name in _names(rows):
        number = ours.index(rival_of.get(name, name)) if name != baseline else 0
        styles[name] = {
            "color": "black" if name == baseline else f"C{number % 10}",
            "marker": "osv^D"[number // 10 % 5],
            "markersize": 4,
            "linestyle": "-" if name in ours else "--",
        }
    return styles
