"""Runs the cells of a plan as processes of their own, several at once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from zoo.ablation.plan import Cell, Plan, cells_of, flag_words, keep_plan
from zoo.ablation.results import seconds_left, write_results
from zoo.engine.run import take_lock

POLL_SECONDS = 0.1
TAIL_LINES = 12  # of a failed cell's log
TAILS = 3  # failed cells whose log is shown

# Becomes the recipe, after asking Linux for SIGTERM when its parent dies (prctl 1). The runner must
# start it from its main thread: the signal comes with the end of the thread that did.
FOLLOW = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


class CellsFailed(RuntimeError):
    """Some cells did not finish; the others did, and their results are written."""


def run_cells(
    plan: Plan, out: str | Path, workers: int = 2, threads: int = 1
) -> list[dict[str, Any]]:
    """Trains every unfinished cell, and returns the rows of results.jsonl.

    A cell is finished when its summary.json says `completed`. Called again after a kill, it
    continues: each cell runs under `--resume auto`. A failing cell stops no other.

    Args:
        plan: What to run; OUT/plan.json is written first.
        out: Folder of cells/, logs/ and results.jsonl (written anew after each cell).
        workers: Cells at once.
        threads: CPU threads of each (OMP_NUM_THREADS and MKL_NUM_THREADS).

    Raises:
        CellsFailed: names the cells, the ends of their logs and where these are.
        ValueError: another plan's cells are in the folder.
        FileExistsError: another process is running cells there.
        SystemExit: 130 after Ctrl-C, 143 after SIGTERM; the cells got the signal and have ended.
    """
    out = Path(out)
    _check(plan, workers, threads)
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        keep_plan(plan, out)
        runner = _Runner(plan, out, workers, threads)
        started = time.monotonic()
        runner.run()
        runner.say_time(time.monotonic() - started)
        rows = write_results(plan, out)
    if runner.stop_signal:
        print(f"stopped; continue with:\n  {shlex.join(sys.orig_argv)}", flush=True)
        sys.exit(128 + runner.stop_signal)
    if runner.failed:
        raise CellsFailed(_failures(runner, out))
    return rows


def _check(plan: Plan, workers: int, threads: int) -> None:
    if workers < 1 or threads < 1:
        raise ValueError(f"workers ({workers}) and threads ({threads}) must be at least 1")
    if not Path(plan.recipe).is_file():
        raise FileNotFoundError(f"recipe {plan.recipe} is no file")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 or "TORCHELASTIC_RUN_ID" in os.environ:
        raise RuntimeError(
            f"the cells are processes of their own: start {sys.argv[0]} with python, without "
            "torchrun, and ask for several at once by the number of workers"
        )


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Keeps other runners out of the folder; the lock ends with this process, however it ends."""
    with (out / ".lock").open("w") as file:
        if not take_lock(file.fileno()):
            raise FileExistsError(f"another process is running cells in {out}")
        yield


class _Runner:
    """Cells waiting, running and failed, looked after by one thread."""

    def __init__(self, plan: Plan, out: Path, workers: int, threads: int) -> None:
        self.plan, self.out, self.workers, self.threads = plan, out, workers, threads
        self.total = len(plan.variants) * len(plan.seeds)
        self.waiting = deque(cell for cell in cells_of(plan, out) if cell.summary() is None)
        self.trained = 0
        self.running: list[tuple[Cell, subprocess.Popen[bytes], float]] = []
        self.failed: list[tuple[Cell, int]] = []
        self.stop_signal, self.passed_on = 0, False
        self.seconds: float | None = None  # that all unfinished cells take, one by one
        self.bar: Any = None

    def run(self) -> None:
        with self._progress(), self._signals():
            try:
                while self.running or (self.waiting and not self.stop_signal):
                    self._pass_on() if self.stop_signal else self._fill()
                    self._reap()
                    self._show()
                    time.sleep(POLL_SECONDS)
            finally:  # empty, unless something went wrong here or a second signal came
                for _, process, _ in self.running:
                    process.kill()
                    process.wait()

    def say_time(self, seconds: float) -> None:
        """What to compare with the same grid under other numbers of workers and threads."""
        if self.trained:
            print(
                f"{self.trained} cells in {timedelta(seconds=round(seconds))}, {self.workers} at "
                f"once, threads each: {self.threads}",
                flush=True,
            )

    def _fill(self) -> None:
        while self.waiting and len(self.running) < self.workers:
            cell = self.waiting.popleft()
            self.running.append((cell, _start(self.plan, cell, self.threads), time.monotonic()))

    def _pass_on(self) -> None:
        """Sends the signal that came to the cells: they save and end."""
        if not self.passed_on:
            self._say(f"stopping; waiting for {len(self.running)} cells, which save first")
            for _, process, _ in self.running:
                process.send_signal(self.stop_signal)
        self.passed_on = True

    def _reap(self) -> None:
        """Books the cells that have ended."""
        ended = [entry for entry in self.running if entry[1].poll() is not None]
        self.running = [entry for entry in self.running if entry not in ended]
        for cell, process, started in ended:
            summary = cell.summary()
            if summary is not None:
                value = (summary.get("metrics") or {}).get(self.plan.metric)
                value = f"{value:.5g}" if isinstance(value, (int, float)) else value
                seconds = time.monotonic() - started
                self._say(f"{cell.name}: {self.plan.metric} {value}, {seconds:.0f} s")
                self.bar.update()
                self.trained += 1
            elif not self.stop_signal:
                self.failed.append((cell, process.returncode))
                self._say(f"{cell.name}: FAILED ({_ending(process.returncode)}), see {cell.log}")
        if ended:
            self._estimate()

    def _estimate(self) -> None:
        self.seconds = seconds_left(self.plan, write_results(self.plan, self.out))

    @contextmanager
    def _progress(self) -> Iterator[None]:
        """A line with the cells done and the time left, on a terminal only."""
        from tqdm import tqdm

        self._estimate()
        self.bar = tqdm(
            total=self.total,
            initial=self.total - len(self.waiting),
            bar_format="{n_fmt}/{total_fmt} cells |{bar}| {elapsed} so far{postfix}",
            dynamic_ncols=True,
            disable=not sys.stderr.isatty(),
        )
        with self.bar:
            yield

    def _show(self) -> None:
        if self.seconds is not None:
            spent = sum(time.monotonic() - started for _, _, started in self.running)
            left = max(0, round((self.seconds - spent) / self.workers))
            self.bar.set_postfix_str(f"about {timedelta(seconds=left)} left", refresh=False)
        self.bar.refresh()

    def _say(self, message: str) -> None:
        self.bar.write(message, file=sys.stdout)
        sys.stdout.flush()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Passes Ctrl-C and SIGTERM on to the cells, once; a second one 5 s later kills them."""
        asked = 0.0

        def handle(number: int, _frame: FrameType | None) -> None:
            nonlocal asked
            if self.stop_signal and time.monotonic() - asked > 5:
                raise KeyboardInterrupt
            if not self.stop_signal:
                self.stop_signal, asked = number, time.monotonic()

        previous = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def _start(plan: Plan, cell: Cell, threads: int) -> subprocess.Popen[bytes]:
    """Starts a cell; its output goes to the end of its log."""
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    command = cell_command(plan, cell)
    follow = [sys.executable, "-I", "-S", "-c", FOLLOW, str(os.getpid())]
    with cell.log.open("a", encoding="utf-8") as log:
        log.write(f"$ {shlex.join(command)}\n")
        log.flush()
        return subprocess.Popen(
            [*(follow if sys.platform == "linux" else []), *command],
            env={**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C comes from the runner only, once
        )


def cell_command(plan: Plan, cell: Cell) -> list[str]:
    """The words that train a cell; given again, they continue it."""
    flags = flag_words({**plan.flags, **cell.variant.flags})
    own = ["--out", str(cell.folder), "--resume", "auto", "--seed", str(cell.seed), "--no-report"]
    return [sys.executable, str(plan.recipe), *flags, *own]


def _failures(runner: _Runner, out: Path) -> str:
    lines = [
        f"{len(runner.failed)} of {runner.total} cells failed; those that finished are in "
        f"{out / 'results.jsonl'}, and the same command tries the failed ones again"
    ]
    for i, (cell, code) in enumerate(runner.failed):
        lines.append(f"{cell.name} ({_ending(code)}): {cell.log}{' ends with' * (i < TAILS)}")
        if i < TAILS:
            lines += [f"    {line}" for line in _tail(cell.log)]
    return "\n".join(lines)


def _tail(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]


def _ending(code: int) -> str:
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}" if code else "it ended without a completed summary.json"
