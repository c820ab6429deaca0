"""Checkpoints that are whole or absent, and hold tensors and plain values only.

A checkpoint is one file, `checkpoints/step_00001234.pt`, written under a temporary name, flushed to
the disk and renamed: a kill at any moment leaves the ones before it usable. Files are read with
`weights_only=True`.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import torch

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be read, or does not belong to this run."""


def write_atomically(path: Path, write: Any) -> None:
    """Calls `write(temporary path)`, flushes the file to the disk and renames it to `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_checkpoint(
    folder: Path, step: int, state: dict[str, Any], *, keep: int, best: bool
) -> Path:
    """Writes `state` as the checkpoint of `step`; keeps the last `keep` and, apart, the best."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:08d}.pt"
    # The best one first: killed between the two, the run finds this epoch the best again.
    for target in (folder / "best.pt", path)[not best :]:
        write_atomically(target, lambda file: torch.save({"format": FORMAT, **state}, file))
    for old in list_checkpoints(folder)[:-keep]:
        if old != path:
            old.unlink(missing_ok=True)
    return path


def forget_after(folder: Path, step: int) -> None:
    """Removes the checkpoints that a run continued from `step` will write anew."""
    for path in list_checkpoints(folder):
        if path.name > f"step_{step:08d}.pt":
            path.unlink()


def list_checkpoints(folder: Path) -> list[Path]:
    """The step checkpoints in a folder, oldest first."""
    return sorted(folder.glob("step_*.pt"))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Reads one checkpoint on the CPU.

    Raises:
        CheckpointError: the file is missing, cut short, or holds other things than tensors and
            plain values.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"no checkpoint at {path}") from None
    except Exception as error:  # torch raises many kinds for damaged files
        raise CheckpointError(
            f"{path} cannot be read ({path.stat().st_size} bytes): cut short, damaged, or not a "
            f"checkpoint of tensors and plain values. {type(error).__name__}: {error}"
        ) from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT}: found {found}")
    return state


def load_latest(folder: Path, warn: Any) -> tuple[Path, dict[str, Any]] | None:
    """The newest readable checkpoint of a folder, or None where there is none at all.

    An unreadable newer one is named through `warn` and passed over.

    Raises:
        CheckpointError: there are checkpoints, and none can be read.
    """
    errors = []
    for path in reversed(list_checkpoints(folder)):
        try:
            return path, load_checkpoint(path)
        except CheckpointError as error:
            errors.append(str(error))
            warn(f"{error}\n  -> trying the checkpoint before it")
    if errors:
        best = folder / "best.pt"
        hint = f"\n  -> there is also {best}: --resume {best}" if best.exists() else ""
        raise CheckpointError(
            f"none of the checkpoints in {folder} can be read:\n" + "\n".join(errors) + hint
        )
    return None


def rng_state() -> dict[str, Any]:
    """The state of every random generator of this process, as tensors and plain values."""
    import numpy as np

    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Restores what `rng_state` returned."""
    import numpy as np

    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
