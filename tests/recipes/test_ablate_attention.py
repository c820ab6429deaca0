from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BASELINES = ("mean", "identity")
ROOT = Path(__file__).resolve().parents[2]


def ablate(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "recipes/ablate_attention.py", "--out", out, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def test_kinds_and_heads_are_compared_with_the_baselines(tmp_path):
    out = tmp_path / "ablation"
    flags = ["--kinds", "linear", "--heads", "2", "4", "--seeds", "2", "--epochs", "1"]
    planned = ablate(out, *flags, "--plan")
    assert planned.returncode == 0, planned.stderr[-2000:]
    assert "8 cells" in planned.stdout
    assert not out.exists()
    done = ablate(out, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert len(results) == 8
    variants = {"linear, 2 heads", "linear, 4 heads", "mean", "identity"}
    assert {row["variant"] for row in results} == variants, "baselines have no use for heads"
    with (out / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert len(table) == 4
    for column in ("parameters", "MFLOPs an image", "peak MiB in training"):
        assert all(float(row[column]) > 0 for row in table)
    assert (out / "effects.png").stat().st_size > 10_000
    times = {path: path.stat().st_mtime for path in out.glob("cells/*/*/summary.json")}
    again = ablate(out, *flags)
    assert again.returncode == 0
    assert {path: path.stat().st_mtime for path in times} == times, "finished cells are kept"


def test_combinations_that_cannot_be_are_left_out_and_said(tmp_path):
    done = ablate(
        tmp_path / "a", "--kinds", "full", "linear", "--positions", "relative", "none", "--plan"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "left out: linear, relative: " in done.stderr
    assert "linear, none" in done.stdout
    unknown = ablate(tmp_path / "b", "--kinds", "ful", "--plan")
    assert unknown.returncode != 0
    assert "did you mean 'full'" in unknown.stderr


def test_baselines_have_the_positions_of_what_they_are_compared_with(tmp_path):
    flags = ["--kinds", "full", "--positions", "learned", "relative", "--heads", "2", "4"]
    done = ablate(tmp_path / "a", *flags, "--plan")
    assert done.returncode == 0, done.stderr[-2000:]
    names = [line.split("  ")[1] for line in done.stdout.splitlines() if "of 3 finished" in line]
    baselines = [f"{kind}, {own} (baseline)" for own in ("learned", "none") for kind in BASELINES]
    assert sorted(name for name in names if "baseline" in name) == sorted(baselines)
    assert len(names) == 4 + 2 * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--positions", "typo"], "typo"),
        (["--kinds", "full", "--heads", "3"], "nothing is left of kinds"),
        (["--kinds", "mean"], "nothing is left of kinds"),
    ],
)
def test_nothing_to_compare_is_an_error(tmp_path, flags, message):
    done = ablate(tmp_path / "a", *flags, "--plan")
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
