"""A run: its processes, its folder, its record, and how it is asked to stop."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from zoo.engine.checkpoint import CheckpointError, list_checkpoints, load_checkpoint, load_latest
from zoo.engine.launch import (
    check_processes,
    environment,
    follow_launcher,
    keep_memory,
    launcher_arguments,
    resume_command,
    set_threads,
)
from zoo.engine.options import FREE_ON_RESUME, TrainOptions
from zoo.engine.tracking import write_json

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")
LOCK_SECONDS = 10.0
STOPPED = 3  # exit code after `Run.stop`


class Run:
    """One training run; made by `start_run`.

    Attributes:
        recipe: Name of the script.
        options: Its flags.
        accelerator: Device, processes, precision, tracker.
        folder: The run folder; it is made by `open`, so that a mistake found before leaves nothing.
        checkpoint: What to continue from, or None.
        stop_signal: Number of the signal that asked to stop, or 0.
        stop_reason: What asked to stop by `stop`, or nothing.
        last: Loss and gradient norm, before clipping, of the last update that is known.
    """

    def __init__(
        self,
        recipe: str,
        options: TrainOptions,
        accelerator: Accelerator,
        folder: Path,
        checkpoint: tuple[Path, dict[str, Any]] | None,
    ) -> None:
        self.recipe, self.options, self.accelerator = recipe, options, accelerator
        self.folder, self.checkpoint = folder, checkpoint
        self.stop_signal, self.stop_reason = 0, ""
        self.last: dict[str, float] = {}
        self.notes: dict[str, Any] = {}
        self._lock: int | None = None

    @property
    def resumed_step(self) -> int:
        """Updates that the checkpoint to continue from has behind it; 0 without one."""
        return self.checkpoint[1]["position"]["step"] if self.checkpoint else 0

    @property
    def resume_command(self) -> str:
        stopped = ("--stop-on-alarm",) if self.stop_reason else ()
        return resume_command(str(self.folder), self.accelerator.num_processes, stopped)

    def stopping(self) -> bool:
        """Whether this process was asked to stop."""
        return self.stop_signal != 0 or bool(self.stop_reason)

    def stop(self, reason: str) -> None:
        """Asks all processes to stop after their next step and to save, as a signal does.

        Args:
            reason: What asks; the status of the run will be `stopped by REASON`.
        """
        self.stop_reason = reason

    @property
    def status(self) -> str:
        """How a run ends that was asked to stop."""
        by_signal = self.stop_signal or not self.stop_reason
        return "interrupted" if by_signal else f"stopped by {self.stop_reason}"

    @property
    def exit_code(self) -> int:
        """Of the process of a run that was asked to stop."""
        return 128 + self.stop_signal if self.status == "interrupted" else STOPPED

    def open(self) -> None:
        """Makes the run folder and writes config.json, or checks it against the run's to resume."""
        record = {
            "recipe": self.recipe,
            "options": self.options.to_json(),
            "defaults": type(self.options)().to_json(),
            "processes": self.accelerator.num_processes,
            "command": sys.argv,
            **environment(self.accelerator),
        }
        self._lock = on_main(self.accelerator, lambda: _record(self.folder, record))
        if self.options.tracker != "none":
            self._start_tracker()

    def close(self) -> None:
        """Lets other processes into the run folder again."""
        if self._lock is not None and self.accelerator.is_main_process:
            os.close(self._lock)
            self._lock = None

    def _start_tracker(self) -> None:
        kwargs: dict[str, dict[str, Any]] = {
            "tensorboard": {"purge_step": self.resumed_step + 1 if self.checkpoint else None},
            "wandb": {"dir": str(self.folder), "id": self.folder.name, "resume": "allow"},
        }
        config = {
            key: value
            if isinstance(value, (str, int, float, bool)) or value is None
            else str(value)
            for key, value in self.options.to_json().items()
        }
        # TensorBoard would make a second run of the flags; they are in config.json.
        keep = None if self.options.tracker == "tensorboard" else config
        self.accelerator.init_trackers(self.recipe, config=keep, init_kwargs=kwargs)

    @contextmanager
    def signals(self) -> Iterator[None]:
        """Turns Ctrl-C and SIGTERM into a wish that the loop grants after the current step.

        A second one more than five seconds later stops at once (launchers repeat signals).
        """
        asked = 0.0

        def handle(number: int, _frame: FrameType | None) -> None:
            nonlocal asked
            if self.stop_signal and time.monotonic() - asked > 5:
                raise KeyboardInterrupt
            if not self.stop_signal:
                self.stop_signal, asked = number, time.monotonic()
                if self.accelerator.is_main_process:
                    print("\nstopping after this step, then saving", file=sys.stderr, flush=True)

        previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def start_run(script: str, options: TrainOptions) -> Run:
    """Starts Accelerate, settles the run folder and what to resume, and seeds the weights.

    Args:
        script: `__file__` of the recipe.
        options: Its flags.

    Raises:
        FileExistsError: the folder holds a run, and `resume` is not set.
        CheckpointError: nothing usable where `resume` points.
        ValueError: `resume` auto without `out`, other options than the run to resume had, or a
            tracker that is not installed.
        RuntimeError: processes that do not know of each other, or a way of distributing
            other than one process per device (DDP).
    """
    from accelerate import Accelerator, PartialState
    from accelerate.utils import parse_flag_from_env, set_seed

    _check_tracker(options.tracker)
    recipe = Path(script).stem
    command, environ = launcher_arguments()
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    folder, path = on_main(state, lambda: _settle(recipe, options))
    accelerator = Accelerator(
        log_with=None if options.tracker == "none" else options.tracker,
        project_dir=str(folder) if options.tracker != "none" else None,
    )
    _check_distribution(accelerator)
    set_threads(accelerator, command, environ)
    keep_memory()
    follow_launcher(command)
    warning = check_processes(accelerator, command)
    if warning and accelerator.is_main_process:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    checkpoint = (path, load_checkpoint(path)) if path else None
    set_seed(options.seed)
    return Run(recipe, options, accelerator, folder, checkpoint)


def on_main(state: Any, function: Callable[[], T]) -> T:
    """Calls `function` on the main process and gives its result, or its error, to all."""
    from accelerate.utils import broadcast_object_list

    box: list[Any] = [None, None]
    if state.is_main_process:
        try:
            box[0] = function()
        except Exception as error:
            if state.num_processes == 1:
                raise
            box[1] = error
    if state.num_processes > 1:
        broadcast_object_list(box)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _settle(recipe: str, options: TrainOptions) -> tuple[Path, Path | None]:
    """The run folder, and the checkpoint to continue from."""
    resume = options.resume
    if resume is None:
        return _fresh_folder(recipe, options.out), None
    if resume == "auto":
        if options.out is None:
            raise ValueError("--resume auto needs --out, the folder of the run to continue")
        folder = Path(options.out)
        found = load_latest(folder / "checkpoints", _warn)
        if found is None and _status(folder) == "completed":
            raise CheckpointError(f"{folder} is a finished run whose checkpoints were removed")
        if found is None:
            if _occupied(folder) and not (folder / "config.json").exists():
                raise FileExistsError(
                    f"{folder} holds files, but no run to resume: {_some(folder)}"
                )
            _warn(f"no checkpoint in {folder / 'checkpoints'}: starting from the beginning")
            return folder, None
        return folder, found[0]
    return _resume_path(Path(resume), options.out)


def _status(folder: Path) -> str | None:
    path = folder / "summary.json"
    return json.loads(path.read_text())["status"] if path.exists() else None


def _resume_path(path: Path, out: str | None) -> tuple[Path, Path]:
    if path.is_dir():
        folder = path
        found = load_latest(folder / "checkpoints", _warn)
        if found is None:
            raise CheckpointError(f"no checkpoint to resume in {folder / 'checkpoints'}")
        path = found[0]
    else:
        load_checkpoint(path)
        folder = path.parent.parent
        if path.parent.name != "checkpoints" or not (folder / "config.json").exists():
            raise CheckpointError(
                f"{path} is not in the checkpoints/ of a run folder; for a new run from its "
                f"weights use --pretrained file:{path}"
            )
    if out is not None and Path(out).resolve() != folder.resolve():
        raise ValueError(
            f"--resume {path} continues the run in {folder}: leave out --out ({out}), or start a "
            f"new run from its weights with --pretrained local-dir:{folder}/model"
        )
    return folder, path


def _fresh_folder(recipe: str, out: str | None) -> Path:
    if out is not None:
        folder = Path(out)
        if _occupied(folder):
            raise FileExistsError(
                f"--out {folder} exists and is not empty ({_some(folder)}): continue it with "
                "--resume auto, or choose a new folder"
            )
        return folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = [f"{recipe}-{stamp}", *(f"{recipe}-{stamp}-{i}" for i in range(2, 1000))]
    return next(Path("runs", name) for name in names if not Path("runs", name).exists())


def _occupied(folder: Path) -> bool:
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file, not a run folder")
    return folder.is_dir() and any(path.name != ".lock" for path in folder.iterdir())


def _some(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:5])


def _warn(message: str) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _check_tracker(tracker: str) -> None:
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise ValueError(f"--tracker {tracker} needs the package {tracker}: pip install {tracker}")


def _check_distribution(accelerator: Accelerator) -> None:
    kind = accelerator.distributed_type.value
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU"):
        raise RuntimeError(
            f"distributed type {kind} is not supported: the checkpoints of this engine hold whole "
            "models. Use one process per device (DDP)."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps ({accelerator.gradient_accumulation_steps}) is set in "
            "Accelerate's configuration: set --grad-accumulation instead"
        )


def _record(folder: Path, record: dict[str, Any]) -> int:
    """Writes or compares config.json; returns the lock that keeps other processes out."""
    path = folder / "config.json"
    if list_checkpoints(folder / "checkpoints"):
        if not path.exists():
            raise CheckpointError(f"{path} is missing: the options of this run are not known")
        _compare(path, json.loads(path.read_text()), record)
    folder.mkdir(parents=True, exist_ok=True)
    lock = _take_lock(folder)
    for left in (*folder.glob(".model.*"), *folder.glob("checkpoints/.*.tmp")):  # by a kill
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    if not path.exists() or not list_checkpoints(folder / "checkpoints"):
        write_json(path, record)
    return lock


def _take_lock(folder: Path) -> int:
    """An advisory lock that ends with this process, however it ends.

    Worker processes of a killed run hold it for some seconds more, which are waited for.
    """
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)
    deadline = time.monotonic() + LOCK_SECONDS
    while not take_lock(lock):
        if time.monotonic() > deadline:
            os.close(lock)
            raise FileExistsError(f"another process is training in {folder}")
        time.sleep(0.2)
    return lock


def take_lock(lock: int) -> bool:
    """Whether this process now has the advisory lock of an open file; always on Windows."""
    try:
        import fcntl
    except ImportError:  # Windows
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _compare(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses to continue a run under options that would change its result."""
    old = {**before["options"], "recipe": before["recipe"], "processes": before["processes"]}
    new = {**now["options"], "recipe": now["recipe"], "processes": now["processes"]}
    new = json.loads(json.dumps(new))
    changed = [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in sorted({*old, *new} - set(FREE_ON_RESUME))
        if old.get(name) != new.get(name)
    ]
    if changed:
        raise ValueError(
            f"resuming would not continue the run recorded in {path}; these options differ: "
            f"{'; '.join(changed)}. Resume with the old values, or start a new run from these "
            f"weights: --pretrained {_weights_of(path.parent)} with another --out, without --resume"
        )


def _weights_of(folder: Path) -> str:
    """Where a run's weights are: those it ended with, or its latest checkpoint."""
    if (folder / "model").is_dir():
        return f"local-dir:{folder / 'model'}"
    return f"file:{list_checkpoints(folder / 'checkpoints')[-1]}"
