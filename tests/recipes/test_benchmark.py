from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("suite", "names"), [("vit", {"zoo", "torchvision"}), ("input", {"zoo", "bare loop"})]
)
def test_the_benchmark_gives_ratios_with_intervals(tmp_path, suite, names):
    """That it runs and reports; the figures themselves are no test."""
    out = tmp_path / "report.json"
    model = "vit_micro_patch4_32" if suite == "vit" else "vit_micro_patch2_8"
    flags = ["--suite", suite, "--model", model, "--repeats", "3", "--batch-size", "32"]
    done = subprocess.run(
        [sys.executable, ROOT / "recipes/benchmark.py", *flags, "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(out.read_text())
    assert names <= {row["candidate"] for row in report["rows"]}
    for row in report["rows"]:
        low, high = row["interval"]
        assert 0 < low <= row["ratio"] * 1.0001
        assert row["ratio"] <= high * 1.0001
        assert row["n"] == 3
        if row["candidate"] == "zoo":
            assert row["ratio"] == 1
    assert report["versions"]["torch"]


def test_the_attention_suite_times_kinds_over_lengths(tmp_path):
    out = tmp_path / "report.json"
    flags = ["--suite", "attention", "--lengths", "32", "64", "--repeats", "3"]
    flags += ["--kinds", "full", "window", "linformer"]
    done = subprocess.run(
        [sys.executable, ROOT / "recipes/benchmark.py", *flags, "--out", out],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())["rows"]
    for kind in ("full", "window", "linformer"):
        own = [(r["task"], r["n"]) for r in found if r["candidate"] == kind]
        assert sorted(own) == [("infer", 32), ("infer", 64), ("train", 32), ("train", 64)]
    assert all(r["median_ms"] > 0 and r["kept_mib"] > 0 for r in found)
    assert out.with_suffix(".png").stat().st_size > 10_000
