from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*flags: object, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "recipes/benchmark.py", *map(str, flags)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("suite", "names"),
    [
        ("vit", {"zoo", "torchvision"}),
        ("input", {"zoo", "bare loop"}),
        ("loading", {"zoo", "zoo, local-dir", "safetensors", "hash alone"}),
        ("looks", {"step", "look"}),
    ],
)
def test_the_benchmark_gives_ratios_with_intervals(tmp_path, suite, names):
    """That it runs and reports; the figures themselves are no test."""
    out = tmp_path / "report.json"
    model = "vit_micro_patch4_32" if suite == "vit" else "vit_micro_patch2_8"
    flags = ["--suite", suite, "--model", model, "--repeats", "3", "--batch-size", "32"]
    flags += ["--looks", "5"]
    done = run(*flags, "--out", out)
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


def test_the_attention_suite_measures_kinds_over_lengths(tmp_path):
    """With a package that is not installed, which is named and left out."""
    out, hidden = tmp_path / "report.json", tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "linformer.py").write_text("raise ImportError('hidden by the test')")
    done = run(
        "--suite", "attention", "--lengths", 1100, 32, "--repeats", 3, "--out", out,
        "--device", "cpu", "--kinds", "full", "window", "additive", "linformer",
        PYTHONPATH=str(hidden),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "package linformer is left out (hidden by the test): pip install" in done.stdout
    report = json.loads(out.read_text())
    found = report["rows"]
    for kind in ("full", "window", "linformer", "torch SDPA", "full, relative bias"):
        own = [(r["task"], r["n"]) for r in found if r["candidate"] == kind]
        expected = [(task, n) for task in ("infer", "train") for n in (32, 1100)]
        assert sorted(own) == expected, kind
    assert "package linformer" not in {r["candidate"] for r in found}
    for r in found:
        assert r["median_ms"] > 0
        assert r["kept_mib"] > 0
        assert r["peak_mib"] > 0
        assert r["over_baseline"] > 0
        if r["task"] == "train":
            assert r["peak_mib"] > r["kept_mib"]
        if r["candidate"] == "torch SDPA":
            low, high = r["interval"]
            assert r["rival_of"] == "full"
            assert low <= r["ratio"] <= high
    skipped = [(r["candidate"], r["n"]) for r in report["skipped"]]
    assert skipped == [("additive", 1100)]
    assert "additive not run at 1,100 tokens" in done.stdout
    fitted = {(r["task"], r["candidate"]) for r in report["exponents"]}
    assert fitted == {(r["task"], r["candidate"]) for r in found}
    assert report["versions"]["torch"]
    assert out.with_suffix(".png").stat().st_size > 10_000


def test_the_crossmodal_suite_compares_equal_shapes(tmp_path):
    out = tmp_path / "report.json"
    flags = ["--suite", "crossmodal", "--batch-size", 2, "--repeats", 3, "--device", "cpu"]
    done = run(*flags, "--out", out)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = {(r["task"], r["candidate"]): r for r in json.loads(out.read_text())["rows"]}
    assert set(rows) == {
        ("train", "zoo"), ("train", "open_clip"), ("train", "zoo, captions not padded"),
        ("write", "zoo"), ("write", "zoo, no cache"),
    }  # fmt: skip
    assert rows["train", "zoo"]["params"] == rows["train", "open_clip"]["params"]
    assert rows["write", "zoo"]["tokens"] == 64
    for (_, candidate), r in rows.items():
        low, high = r["interval"]
        assert 0 < low <= r["ratio"] * 1.0001 <= high * 1.0002
        assert (r["ratio"] == 1) == (candidate == "zoo")


PACKAGES = {
    "x-transformers": "full",
    "package linformer": "linformer",
    "performer-pytorch": "performer",
    "local-attention": "longformer",
}


def test_packages_that_are_installed_are_rivals(tmp_path):
    installed = {
        package: kind
        for package, kind in PACKAGES.items()
        if importlib.util.find_spec(package.split()[-1].replace("-", "_"))
    }
    if not installed:
        pytest.skip("no package to compare with is installed")
    out = tmp_path / "report.json"
    flags = ["--suite", "attention", "--lengths", 256, "--repeats", 3, "--device", "cpu"]
    done = run(*flags, "--kinds", *installed.values(), "--out", out)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [r for r in json.loads(out.read_text())["rows"] if r["candidate"] in installed]
    assert {(r["task"], r["candidate"], r["rival_of"]) for r in rows} == {
        (task, *pair) for task in ("infer", "train") for pair in installed.items()
    }
    assert all(r["peak_mib"] > 0 and r["ratio"] > 0 for r in rows)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cuda"], "--device cuda: torch sees no GPU here; use --device cpu"),
        (["--device", "gpu"], "--device gpu must be cpu, cuda or cuda:NUMBER"),
        (["--lengths", 0, 8], "--lengths must be at least 1"),
        (["--kinds", "fulll"], "--kinds fulll must be among adaptive, "),
    ],
)
def test_flags_that_cannot_be_followed_end_in_one_line(flags, message):
    done = run("--suite", "attention", *flags, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
