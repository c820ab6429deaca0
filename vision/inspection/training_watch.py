"""Looks inside a model of images as it trains: `engine.fit(after_update=watch)`.

Every so many updates the same validation images go through the model once, and parts of the watch
see what passes: attention (`attention_watch`) and gates (`gate_watch`). What they find is returned
as numbers for the log, reported for alarms, and written as pictures and one small file. Nothing of
the training is changed: the losses are the same bit for bit.

Shapes: b images, c y x channels, rows and columns.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from vision.inspection.attention_watch import AttentionPart
from vision.inspection.fixed_images import FixedImages, spread, undisturbed
from vision.inspection.gate_watch import GatePart
from zoo.diagnostics.capture import attention_of
from zoo.diagnostics.foreign_attention import unknown_attention
from zoo.diagnostics.gates import gate_ranges
from zoo.diagnostics.look_files import pack, unpack
from zoo.layers.check import integer
from zoo.merge import describe

MOST_STEPS = 12  # columns of over_time.png
WRITTEN = re.compile(r"(gates_)?step\d{6,}\.(png|safetensors)")
Seen = dict[str, Any]


class Report(Protocol):
    """Takes what was seen, as `zoo.engine.AlarmLog` does."""

    @property
    def training(self) -> Mapping[str, float]: ...

    def resume(self, step: int, before: Iterable[tuple[int, Seen]]) -> None: ...

    def __call__(self, step: int, **looks: Any) -> None: ...


class Closing(Protocol):
    """What has something to draw at the end."""

    def finish(self) -> None: ...


class Part(Protocol):
    """Something inside a model to look at."""

    kind: str  # under which a report takes its looks

    def capture(self, model: nn.Module) -> AbstractContextManager[Any]: ...

    def see(self, records: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Records -> looks by layer, tensors for the file."""
        ...

    def numbers(self, looks: Mapping[str, Any]) -> dict[str, float]: ...

    def draw(self, folder: Path, step: int, tensors: Mapping[str, Tensor], names: Any) -> None: ...

    def draw_over_time(self, folder: Path, steps: Mapping[int, Mapping[str, Tensor]]) -> None: ...


class Watch:
    """Looks at a model every so many updates, on the main process; subclasses say at what.

    Without matplotlib there are no pictures, with one warning.

    Args:
        folder: For pictures and files; made when there is something to write.
        every: Updates between two looks.
        last: The last update, which is looked at as well.
        main: Whether this process looks; the others do nothing.
        autocast: Makes the context of a forward pass, for its precision.
        report: Is told what was seen.
        step: Updates before this training, that is before the checkpoint it goes on from: what was
            written later is removed, it will be written again.
    """

    def __init__(
        self,
        folder: Path,
        every: int,
        *,
        last: int | None = None,
        main: bool = True,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        report: Report | None = None,
        step: int = 0,
    ) -> None:
        self.folder, self.every, self.last = Path(folder), integer("every", every), last
        self.main = main
        self.autocast, self.report, self.step = autocast, report, step
        self.started, self.draws = False, True

    def __call__(self, model: nn.Module, step: int) -> dict[str, float]:
        """The numbers of a look, where one is due."""
        if not self.main:
            return {}
        if not self.started:
            self.started = True
            resume(self.folder, self.step, self.report)
        return self._look(model, step) if step % self.every == 0 or step == self.last else {}

    def _look(self, model: Any, step: int) -> dict[str, float]:
        """Writes, draws and reports what is seen; returns its numbers."""
        raise NotImplementedError

    @property
    def _training(self) -> dict[str, float]:
        return dict(self.report.training) if self.report else {}

    def _draw(self, draw: Callable[[], object]) -> None:
        try:
            if self.draws:
                draw()
        except ImportError as error:
            self.draws = False
            print(f"warning: {error}", file=sys.stderr)


class TrainingWatch(Watch):
    """Looks at some images.

    Args:
        parts: What to look at, from one forward pass.
        images: At which.
        folder, every: As for `Watch`, and so are `options`.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        images: FixedImages,
        folder: Path,
        every: int,
        **options: Any,
    ) -> None:
        super().__init__(folder, every, **options)
        self.parts, self.images, self.shown = parts, images, False

    def _look(self, model: Any, step: int) -> dict[str, float]:
        device = next(model.parameters()).device
        with undisturbed(model), ExitStack() as stack:
            records = [stack.enter_context(part.capture(model)) for part in self.parts]
            with self.autocast():
                output = model(self.images.inputs.to(device))
        seen: Seen = {}
        numbers: dict[str, float] = {}
        tensors: dict[str, Tensor] = {}
        for part, own in zip(self.parts, records, strict=True):
            seen[part.kind], found = part.see(own)
            numbers |= part.numbers(seen[part.kind])
            tensors |= found
        self._write(step, {**tensors, **pack(**seen)})
        names = self.images.told(output)

        def draw() -> None:
            for part in self.parts:
                part.draw(self.folder, step, tensors, names)

        self._draw(draw)
        if self.report is not None:
            self.report(step, **seen)
        return numbers

    def _write(self, step: int, tensors: dict[str, Tensor]) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.shown:
            self.shown = True
            pixels = {"pixels": self.images.pixels.contiguous()}
            told = {"names": json.dumps(self.images.names)}
            save_file(pixels, self.folder / "images.safetensors", metadata=told)
        told = {"training": json.dumps(self._training)}  # of two entries the order would be random
        save_file(tensors, self.folder / f"step{step:06d}.safetensors", metadata=told)

    def finish(self) -> None:
        """Draws the pictures over time, of an interrupted and resumed training too."""
        files = looks_over_time(self.folder) if self.main else []
        if files:
            steps = {step_of(file): _load(file, ("maps/", "gates/"))[0] for file in files}

            def draw() -> None:
                for part in self.parts:
                    part.draw_over_time(self.folder, steps)

            self._draw(draw)


def resume(folder: Path, step: int, report: Report | None) -> None:
    """Removes what a watch wrote after a step, and reports what it saw up to it."""
    for file in [path for path in folder.glob("*step*") if WRITTEN.fullmatch(path.name)]:
        if step_of(file) > step:
            file.unlink()
    if report is not None:
        report.resume(step, _looks_before(folder))


def _looks_before(folder: Path) -> Iterator[tuple[int, Seen]]:
    for file in looks_in(folder):
        tensors, told = _load(file, ("look/", "gate/"))
        layers, gates = unpack(tensors)
        seen = {"layers": layers, "gates": gates, "training": told.get("training")}
        yield step_of(file), {**seen, "shares": told.get("shares")}


def looks_in(folder: Path) -> list[Path]:
    """The files of arrays that a watch wrote, in the order of steps."""
    files = Path(folder).glob("step*.safetensors")
    return sorted((file for file in files if WRITTEN.fullmatch(file.name)), key=step_of)


def looks_over_time(folder: Path) -> list[Path]:
    """At most `MOST_STEPS` of them, at even distances, the last one always."""
    files = looks_in(folder)
    kept = spread(min(MOST_STEPS, len(files)), len(files)) if files else []
    return [files[len(files) - 1 - back] for back in reversed(kept)]


def step_of(file: Path) -> int:
    """`step000050.png`, `gates_step000050.png` -> 50"""
    return int(file.stem.rpartition("step")[2])


def _load(file: Path, prefixes: tuple[str, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        told = {name: json.loads(text) for name, text in (opened.metadata() or {}).items()}
        told |= told.get("told", {})
        names = [name for name in opened.keys() if name.startswith(prefixes)]  # noqa: SIM118
        return {name: opened.get_tensor(name) for name in names}, told


def watch_training(
    model: Any,
    images: FixedImages,
    folder: Path,
    every: int,
    *,
    groups: Mapping[str, str] | None = None,
    **options: Any,
) -> TrainingWatch:
    """A watch of what there is to see in a model: attention, gates, or both.

    Args:
        model: Ours or another library's.
        images: At which to look; only the first, where their attention takes too much memory.
        folder, every: As for `TrainingWatch`, and so are `options`.
        groups: Layer with a gate -> what it is drawn under, such as a stage.

    Raises:
        ValueError: There is neither attention nor a gate that can be seen.
    """
    parts: list[Part] = []
    reasons: list[str] = []
    if attention_of(model):
        try:
            part, images = _with_memory(model, images)
            parts.append(part)
        except (ValueError, RuntimeError) as error:
            reasons.append(str(error))
    if gate_ranges(model):
        try:
            parts.append(GatePart(model, images, groups))
        except (ValueError, RuntimeError) as error:
            reasons.append(str(error))
    if not parts:
        reasons = reasons or [_none(model)]
        raise ValueError(
            f"save_attention_every ({every}) needs attention or gates that can be seen in "
            f"{describe(model)}: {'; '.join(reasons)}"
        )
    for reason in reasons:
        print(f"warning: {reason}", file=sys.stderr)
    return TrainingWatch(parts, images, folder, every, **options)


@contextmanager
def closing_look(watch: Closing | None) -> Iterator[None]:
    """Draws the pictures over time however a training ends."""
    try:
        yield
    finally:
        if watch is not None:
            watch.finish()


def _none(model: nn.Module) -> str:
    unknown = ", ".join(unknown_attention(model))
    return f"weights of {unknown} are not known" if unknown else "it has none"


def _with_memory(model: nn.Module, images: FixedImages) -> tuple[AttentionPart, FixedImages]:
    """Of as many images as the weights of all layers leave memory for."""
    while True:
        try:
            return AttentionPart(model, images), images
        except MemoryError:
            if len(images.names) == 1:
                raise
            images = images.first(len(images.names) // 2)
