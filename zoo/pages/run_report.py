"""report.html of a run: what was trained, how it went, what it gets right, and how to go on.

It is written from the run folder alone, loads nothing, and may be written again at any time:

    zoo.pages.write_run_report("runs/mine")
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from zoo.engine import NonFiniteError, Run
from zoo.engine.checkpoint import write_atomically
from zoo.pages.commands import commands, differing
from zoo.pages.pictures import Picture, embedded
from zoo.pages.run_curves import attention_curves, training_curves
from zoo.pages.run_facts import classes, facts, metrics, shown, status, title
from zoo.pages.run_record import RunRecord
from zoo.pages.style import MACROS, SCROLLING, SORTING, STYLE

REPORT = "report.html"
THUMBNAIL = 24_000  # bytes of a sample
ALARM = dict.fromkeys(
    ("kind", "step", "layer", "head", "value", "limit", "message", "causes", "remedies")
)


@contextmanager
def reported(run: Run) -> Iterator[None]:
    """Writes the report of a run when its training ends: done, stopped, or not finite.

    On the main process, unless its options say no; what goes wrong with the report is a warning.
    """
    try:
        yield
    except (SystemExit, NonFiniteError):
        _report(run)
        raise
    _report(run)


def _report(run: Run) -> None:
    if run.options.report and run.accelerator.is_main_process:
        with attempted("the report"):
            run.accelerator.print(f"report: {write_run_report(run.folder)}")


def add_samples(run: Run, write: Callable[[Path], object]) -> None:
    """Has `write` fill the folder samples/ of a run that ends by itself, for its report.

    What goes wrong with it is a warning.
    """
    if run.options.report and not run.stopping():
        with attempted("samples"), run.accelerator.autocast():
            write(run.folder / "samples")


@contextmanager
def attempted(what: str) -> Iterator[None]:
    """Turns an error inside into a warning: of what comes after training, none is worth a run."""
    try:
        yield
    except Exception as error:
        message = f"warning: {what} could not be written: {type(error).__name__}: {error}"
        print(message, file=sys.stderr, flush=True)


def write_run_report(folder: str | Path) -> Path:
    """Writes report.html into a run folder, from what the folder holds, and returns its path.

    Args:
        folder: As a recipe leaves it; all but config.json or metrics.jsonl may be missing.

    Raises:
        FileNotFoundError: it is no run folder.
        ImportError: jinja2 is missing.
    """
    record = RunRecord.read(Path(folder))
    text = as_html(record)
    path = record.folder / REPORT
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"))
    return path


def as_html(record: RunRecord) -> str:
    """The page."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError(f"{REPORT} needs jinja2: pip install 'attention-zoo[plots]'") from error
    pages = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters["number"] = shown
    pages.filters["value"] = _value
    return pages.from_string(MACROS + _part("html")).render(
        style=STYLE + _part("css"),
        script=SORTING + SCROLLING + _part("js"),
        record=record,
        title=title(record),
        status=status(record),
        facts=facts(record),
        alarms=[{**ALARM, **alarm} for alarm in record.alarms],
        metrics=metrics(record),
        curves=training_curves(record),
        classes=classes(record),
        samples=_samples(record),
        attention=_attention(record),
        attention_curves=attention_curves(record),
        changed=differing(record.config),
        commands=commands(record.config, record.folder),
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _part(kind: str) -> str:
    """The template, or its own style or script."""
    return files(__package__).joinpath(f"run_report.{kind}").read_text(encoding="utf-8")


def _value(value: Any) -> str:
    """An option as a reader would write it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return " ".join(map(_value, value)) or "none"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(each)}" for name, each in value.items())
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _samples(record: RunRecord) -> dict[str, Any]:
    """predictions.json with its pictures embedded."""
    pictures: dict[str, Picture | None] = {}

    def with_pictures(value: Any) -> Any:
        if isinstance(value, list):
            return [with_pictures(each) for each in value]
        if not isinstance(value, dict):
            return value
        found = {name: with_pictures(each) for name, each in value.items()}
        if isinstance(file := value.get("image"), str):
            if file not in pictures:
                path = record.folder / "samples" / Path(file).name
                pictures[file] = embedded(path, THUMBNAIL)
            found["image"] = pictures[file]
        return found

    return with_pictures(record.samples)


def _attention(record: RunRecord) -> list[tuple[str, Picture]]:
    """What is seen -> the picture."""
    folder = record.folder / "attention"
    files = {"Attention over time": folder / "over_time.png"}
    files |= _ends("Attention", sorted(folder.glob("step*.png")))
    files["Gates over time"] = folder / "gates_over_time.png"
    files |= _ends("Gates", sorted(folder.glob("gates_step*.png")))
    files["Gates on the validation images, after training"] = folder / "gates.png"
    pictures = ((what, embedded(path)) for what, path in files.items() if path.exists())
    return [(what, picture) for what, picture in pictures if picture is not None]


def _ends(what: str, looks: list[Path]) -> dict[str, Path]:
    """The first and the last of the pictures of steps."""
    ends = {"first": looks[:1], "last": looks[1:][-1:]}
    return {
        f"{what}, {which} look, step {int(re.sub('[^0-9]', '', path.stem) or 0):,}": path
        for which, paths in ends.items()
        for path in paths
    }
