from __future__ import annotations

import random
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from zoo.engine import checkpoint
from zoo.engine.checkpoint import (
    CheckpointError,
    list_checkpoints,
    load_checkpoint,
    load_latest,
    rng_state,
    save_checkpoint,
    set_rng_state,
)


def save(folder, step, *, keep=2, best=False):
    return save_checkpoint(folder, step, {"value": torch.tensor(step)}, keep=keep, best=best)


def test_keeps_the_last_and_the_best(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, best=step == 2)
    assert [p.name for p in list_checkpoints(tmp_path)] == ["step_00000004.pt", "step_00000005.pt"]
    assert load_checkpoint(tmp_path / "best.pt")["value"] == 2
    assert not list(tmp_path.glob(".*")), "no temporary file stays behind"


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_file_cut_short_is_named_and_the_one_before_is_used(tmp_path, cut):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=path.name):
        load_checkpoint(path)
    warnings = []
    found, state = load_latest(tmp_path, warnings.append)
    assert found.name == "step_00000001.pt"
    assert state["value"] == 1
    assert path.name in warnings[0]
    found.write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of the checkpoints"):
        load_latest(tmp_path, warnings.append)


def test_nothing_to_load(tmp_path):
    assert load_latest(tmp_path, print) is None
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "step_00000001.pt")


def test_an_object_is_refused(tmp_path):
    """Case F2: a checkpoint is data, never code."""
    path = tmp_path / "step_00000001.pt"
    torch.save({"format": checkpoint.FORMAT, "model": torch.nn.Linear(1, 1)}, path)
    with pytest.raises(CheckpointError, match="Linear"):
        load_checkpoint(path)
    torch.save({"model": {}}, path)
    with pytest.raises(CheckpointError, match="format"):
        load_checkpoint(path)


SAVE_FOREVER = """
import sys, torch
from pathlib import Path
from zoo.engine.checkpoint import save_checkpoint
for step in range(1, 10**6):
    state = {"value": torch.full((300_000,), step)}
    save_checkpoint(Path(sys.argv[1]), step, state, keep=2, best=True)
"""


@pytest.mark.parametrize("delay", [0.05, 0.11, 0.2])
def test_a_kill_at_any_moment_leaves_a_usable_checkpoint(tmp_path, delay):
    process = subprocess.Popen([sys.executable, "-c", SAVE_FOREVER, str(tmp_path)])
    deadline = time.monotonic() + 60
    while not list_checkpoints(tmp_path):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(delay)
    process.kill()
    process.wait()
    found = list_checkpoints(tmp_path)
    assert found
    for path in (*found, tmp_path / "best.pt"):
        value = load_checkpoint(path)["value"]
        assert (value == value[0]).all()


def test_random_generators_continue(tmp_path):
    path = save_checkpoint(tmp_path, 1, {"rng": rng_state()}, keep=1, best=False)
    first = (torch.rand(3), random.random(), np.random.rand())  # noqa: NPY002
    set_rng_state(load_checkpoint(path)["rng"])
    again = (torch.rand(3), random.random(), np.random.rand())  # noqa: NPY002
    assert torch.equal(first[0], again[0])
    assert first[1:] == again[1:]
