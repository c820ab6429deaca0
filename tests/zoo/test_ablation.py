"""The runner on a fake recipe that takes a moment, and the statistics against simulations."""

from __future__ import annotations

import csv
import doctest
import json
import math
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from zoo.ablation import (
    CellsFailed,
    Plan,
    Summary,
    Variant,
    compare,
    describe,
    holm,
    plan,
    report,
    run_cells,
    smallest_difference,
    summarise,
)
from zoo.ablation.forecast import difference_line

RECIPE = '''
"""Counts to --steps and saves each; the result depends on seed and effect only."""
import argparse, json, os, pathlib, random, signal, sys, time

parser = argparse.ArgumentParser()
for name in ("--out", "--resume", "--fail", "--data"):
    parser.add_argument(name, default="")
for name in ("--seed", "--steps", "--size"):
    parser.add_argument(name, type=int, nargs="+" if name == "--size" else None, default=2)
parser.add_argument("--effect", type=float, default=0.0)
for name in ("--ema", "--report"):
    parser.add_argument(name, action=argparse.BooleanOptionalAction)
args = parser.parse_args()
out = pathlib.Path(args.out)
out.mkdir(parents=True, exist_ok=True)
with (out / "starts").open("a") as file:
    file.write(f"{os.getpid()} {args.resume} {os.environ['OMP_NUM_THREADS']}\\n")
asked = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: asked.append(number))
if args.fail == str(args.seed):
    raise ValueError(f"cannot do seed {args.seed}")
saved = out / "step"
step = int(saved.read_text()) if saved.exists() and args.resume == "auto" else 0
while step < args.steps and not asked:
    step += 1
    saved.write_text(str(step))
    time.sleep(0.02)
status = "interrupted" if asked and step < args.steps else "completed"
noise = random.Random(args.seed).gauss(0, 1)
metrics = {"val/top1": 90 + noise + args.effect * (1 + 0.1 * noise**2)}
(out / "summary.json").write_text(json.dumps({
    "status": status, "metrics": metrics, "data": "nothing", "epochs": 1, "params": 7,
    "samples_per_second": 5.0, "wall_seconds": 0.1,
}))
(out / "asked").write_text(" ".join(map(str, asked)))
sys.exit(128 + asked[0] if status == "interrupted" else 0)
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "fake_recipe.py"
    path.write_text(RECIPE)
    return path


def small(recipe: Path, *, seeds=(0, 1), flags=None, **more) -> Plan:
    variants = [Variant("plain"), Variant("up by 2", {"effect": 2.0, "ema": True, "size": (8, 8)})]
    variants += [Variant(name, given) for name, given in more.pop("added", {}).items()]
    settings = {"baselines": ["plain"], **more}
    return Plan(recipe, variants, list(seeds), flags=flags or {}, **settings)


def starts(out: Path) -> dict[str, int]:
    """How often each cell was started."""
    return {
        str(path.parent.relative_to(out / "cells")): len(path.read_text().splitlines())
        for path in out.glob("cells/*/*/starts")
    }


def test_cells_are_runs_with_paired_seeds_and_rows(recipe, tmp_path):
    out = tmp_path / "out"
    rows = run_cells(small(recipe), out, workers=2)
    assert [(row["variant"], row["seed"]) for row in rows] == [
        ("plain", 0), ("up by 2", 0), ("plain", 1), ("up by 2", 1),
    ]  # fmt: skip
    assert rows == [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {"metrics", "params", "samples_per_second", "wall_seconds"} <= rows[0].keys()
    assert rows[1]["flags"] == {"effect": 2.0, "ema": True, "size": [8, 8]}
    assert (out / rows[1]["folder"] / "summary.json").is_file()
    assert rows[1]["folder"] == "cells/up_by_2/seed0"
    assert (out / "cells/plain/seed0/starts").read_text().split()[1:] == ["auto", "1"]
    log = (out / "logs/up_by_2-seed1.log").read_text()
    assert "--effect 2.0 --ema --size 8 8 --out" in log
    assert "--resume auto --seed 1" in log


def test_finished_cells_are_skipped_and_added_ones_run(recipe, tmp_path):
    run_cells(small(recipe), tmp_path / "out")
    (tmp_path / "out/cells/plain/seed1/summary.json").unlink()
    more = small(recipe, seeds=(0, 1, 2), added={"third": {"effect": 1.0}})
    assert len(run_cells(more, tmp_path / "out")) == 9
    counts = starts(tmp_path / "out")
    assert counts.pop("plain/seed1") == 2
    assert set(counts.values()) == {1}


def test_another_plan_is_refused_and_the_difference_named(recipe, tmp_path):
    out = tmp_path / "out"
    first = small(recipe, flags={"steps": 1}, added={"third": {"effect": 1.0}})
    run_cells(first, out)
    before = (out / "plan.json").read_text()
    other = small(recipe, seeds=(0, 2), flags={"steps": 3}, added={"new": {}}, metric="val/loss")
    with pytest.raises(ValueError, match="only seeds, variants and baselines") as error:
        run_cells(other, out)
    for part in (
        "metric: val/top1 -> val/loss", "flag steps: 1 -> 3", "seed 1 is left out",
        "variant third is left out",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"variant third, flag effect: 1\.0 -> 1\.5"):
        run_cells(small(recipe, flags={"steps": 1}, added={"third": {"effect": 1.5}}), out)
    assert (out / "plan.json").read_text() == before
    (out / "plan.json").unlink()
    with pytest.raises(FileExistsError, match=r"exists without .*plan\.json"):
        run_cells(first, out)


def test_a_failing_cell_stops_no_other_and_is_named(recipe, tmp_path):
    out = tmp_path / "out"
    failing = small(recipe, added={"bad": {"fail": "1"}, "wrong": {"nonsense": 3}})
    with pytest.raises(CellsFailed) as error:
        run_cells(failing, out, workers=3)
    text = str(error.value)
    assert "3 of 8 cells failed" in text
    assert "ValueError: cannot do seed 1" in text
    assert "unrecognized arguments: --nonsense 3" in text
    assert f"bad, seed 1 (exit status 1): {out / 'logs/bad-seed1.log'}" in text
    assert len((out / "results.jsonl").read_text().splitlines()) == 5
    table = report(failing, out)
    assert [each.n for each in table.summaries] == [2, 2, 1, 0]
    assert table.comparisons["plain"][1].verdict == "one seed: no verdict"
    assert table.comparisons["plain"][2].verdict == "no common seed: no verdict"


RUNNER = """
import sys
from zoo.ablation import Plan, Variant, run_cells
variants = [Variant(name, {"steps": 60}) for name in "abc"]
run_cells(Plan(sys.argv[1], variants, [0], baselines=["a"]), sys.argv[2], workers=2)
"""


def launch(recipe: Path, out: Path) -> subprocess.Popen[str]:
    """A runner with two cells under way."""
    script = recipe.with_name("runner.py")
    script.write_text(RUNNER)
    command = [sys.executable, str(script), str(recipe), str(out)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    wait_for(lambda: len(list(out.glob("cells/*/*/step"))) == 2, process)
    return process


def wait_for(condition, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process is None or process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def children(out: Path) -> list[int]:
    return [int(path.read_text().split()[0]) for path in out.glob("cells/*/*/starts")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_cells_and_says_how_to_continue(recipe, tmp_path, how):
    out = tmp_path / "out"
    process = launch(recipe, out)
    process.send_signal(how)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + how, errors
    assert "waiting for 2 cells" in printed
    command = printed.split("continue with:\n")[1].strip()
    assert command == f"{sys.executable} {recipe.with_name('runner.py')} {recipe} {out}"
    assert not any(map(alive, children(out)))
    assert [path.read_text() for path in out.glob("cells/*/*/asked")] == [str(int(how))] * 2
    assert sorted(starts(out)) == ["a/seed0", "b/seed0"], "no further cell was started"
    before = int((out / "cells/a/seed0/step").read_text())
    assert 0 < before < 60
    done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert starts(out) == {"a/seed0": 2, "b/seed0": 2, "c/seed0": 1}
    assert len((out / "results.jsonl").read_text().splitlines()) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux to tell the cells")
def test_a_killed_runner_takes_its_cells_along(recipe, tmp_path):
    out = tmp_path / "out"
    process = launch(recipe, out)
    pids = children(out)
    assert all(map(alive, pids))
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(alive, pids)))
    again = subprocess.run(process.args, capture_output=True, text=True, timeout=60)
    assert again.returncode == 0, again.stderr
    assert starts(out) == {"a/seed0": 2, "b/seed0": 2, "c/seed0": 1}


def test_two_runners_do_not_share_a_folder(recipe, tmp_path):
    out = tmp_path / "out"
    process = launch(recipe, out)
    with pytest.raises(FileExistsError, match="another process is running cells"):
        run_cells(small(recipe), out)
    process.terminate()
    process.communicate(timeout=60)


MISTAKES = [
    ({"seeds": (0, 0)}, "seeds must be unique; given twice: 0"),
    ({"seeds": ()}, "seeds"),
    ({"added": {"plain": {}}}, "given twice: plain"),
    ({"added": {"up/by 2": {}}}, "share the folder"),
    ({"added": {"??": {}}}, "no letter"),
    ({"baselines": []}, r"baselines \(none\)"),
    ({"baselines": ["plan"]}, r"baselines \(plan\) must be among the variants: plain, up by 2"),
    ({"flags": {"out": "x"}}, r"flags \(out\)"),
    ({"added": {"x": {"seed": 1}}}, r"flags \(seed\)"),
]


@pytest.mark.parametrize(("settings", "named"), MISTAKES)
def test_mistakes_in_a_plan_are_named(recipe, settings, named):
    with pytest.raises(ValueError, match=named):
        small(recipe, **settings)


def test_mistakes_in_a_call_are_named(recipe, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"workers \(0\)"):
        run_cells(small(recipe), tmp_path / "out", workers=0)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        run_cells(small(tmp_path / "nowhere.py"), tmp_path / "out")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="without torchrun"):
        run_cells(small(recipe), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_flags_become_words():
    assert doctest.testmod(plan).attempted
    assert doctest.testmod(plan).failed == 0
    assert plan.flag_words({"ema": False, "lr": 1e-3}) == ["--no-ema", "--lr", "0.001"]


def test_report_writes_tables_and_a_figure_without_training(recipe, tmp_path):
    out = tmp_path / "out"
    pytest.importorskip("matplotlib")
    ours = small(recipe, seeds=range(4), added={"same | again": {}}, flags={"steps": 1})
    with pytest.raises(ValueError, match="no cell in"):
        report(ours, out)
    text = describe(ours, out)
    assert "12 cells" in text
    assert "known when the first" in text
    assert not out.exists()
    run_cells(ours, out)
    found = report(ours, out, extra={"plain": {"parameters": 136010, "MFLOPs": 1.5}})
    assert report(ours, out).summaries == found.summaries
    report(ours, out, extra={"plain": {"parameters": 136010, "MFLOPs": 1.5}})
    up, same = found.comparisons["plain"]
    assert (up.verdict, same.verdict) == ("better", "no difference shown at n = 4")
    assert (same.difference, same.p, same.low) == (0.0, 1.0, None)
    rows = {row["variant"]: row for row in csv.DictReader((out / "table.csv").open())}
    assert float(rows["up by 2"]["vs plain: difference"]) == up.difference
    assert rows["plain"]["parameters"] == "136010"
    assert rows["plain"]["vs plain: verdict"] == ""
    table = (out / "table.md").read_text()
    assert "nothing, 1 epochs, n = 4 seeds" in table
    assert "136,010" in table
    assert r"same \| again" in table
    assert len({len(line) for line in table.splitlines()[2:]}) == 1, "aligned"
    assert (out / "effects.png").read_bytes().startswith(b"\x89PNG")
    assert "12 of 12" not in describe(ours, out)
    assert "4 of 4 finished" in describe(ours, out)
    with pytest.raises(ValueError, match=r"extra \(other\)"):
        report(ours, out, extra={"other": {}})
    with pytest.raises(ValueError, match="'val/loss' is None in cells/plain/seed0"):
        report(small(recipe, metric="val/loss"), out)


def test_without_matplotlib_the_tables_are_there(recipe, tmp_path, monkeypatch):
    run_cells(small(recipe), tmp_path / "out")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"attention-zoo\[plots\]"):
        report(small(recipe), tmp_path / "out")
    assert (tmp_path / "out/table.md").exists()


def test_holm_by_hand():
    """0.01 x 4, 0.02 x 3 = 0.06, 0.03 x 2 = 0.06, 0.04 x 1 raised to the one before."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.001]) == pytest.approx([0.5, 0.002])
    assert holm([0.9, 0.8, 0.7]) == [1.0, 1.0, 1.0]
    assert holm([0.2]) == [0.2]
    assert holm([]) == []


def test_statistics_against_scipy_by_formula():
    x = np.array([97.2, 98.1, 97.5, 98.4, 97.9])
    y = np.array([97.0, 97.4, 97.6, 97.7, 97.1])
    summary = summarise("x", x)
    half = stats.t.ppf(0.975, 4) * x.std(ddof=1) / math.sqrt(5)
    assert (summary.low, summary.high) == pytest.approx((x.mean() - half, x.mean() + half))
    [found] = compare({"y": dict(enumerate(y)), "x": dict(enumerate(x))}, "y")
    d = x - y
    t = d.mean() / (d.std(ddof=1) / math.sqrt(5))
    assert found.p == pytest.approx(2 * stats.t.sf(abs(t), 4))
    assert found.p_holm == found.p
    half = stats.t.ppf(0.975, 4) * d.std(ddof=1) / math.sqrt(5)
    assert (found.low, found.high) == pytest.approx((d.mean() - half, d.mean() + half))


def test_only_common_seeds_are_paired():
    values = {"base": {0: 1.0, 1: 2.0, 2: 4.0}, "x": {3: 9.0, 2: 5.0, 1: 2.5}}
    [found] = compare(values, "base")
    assert found.differences == (1.0, 0.5)
    assert found.n == 2


@pytest.mark.filterwarnings("error")
def test_no_spread_gives_neither_nan_nor_certainty():
    steps = [97.5, 97.2222222, 98.3333333, 97.7777777, 98.0555555, 97.5]
    base = dict(enumerate(steps))
    up = {seed: value + 100 / 360 for seed, value in base.items()}  # one image more, always
    constant = dict.fromkeys(base, 97.5)
    values = {"base": base, "same": dict(base), "up": up, "constant": constant}
    same, up5, _ = compare({k: dict(list(v.items())[:5]) for k, v in values.items()}, "base")
    assert (same.difference, same.p, same.low) == (0.0, 1.0, None)
    assert same.verdict == "no difference shown at n = 5"
    assert up5.p == pytest.approx(1 / 16), "the sign test's"
    assert up5.verdict == "no difference shown at n = 5"
    [up6] = compare({"base": base, "up": up}, "base")
    assert (up6.p, up6.low, up6.verdict) == (pytest.approx(1 / 32), None, "better")
    assert summarise("constant", constant.values()) == Summary("constant", 6, 97.5, 0.0)
    assert summarise("x", [0.0, 0.0]).low is None


def test_one_seed_gives_no_verdict():
    [found] = compare({"base": {0: 1.0}, "x": {0: 3.0}}, "base")
    assert (found.difference, found.low, found.p, found.p_holm) == (2.0, None, None, None)
    assert found.verdict == "one seed: no verdict"
    assert summarise("x", [3.0]).sd is None


def test_lower_can_be_better():
    values = {"base": {s: 1.0 + s for s in range(5)}, "x": {s: 0.5 + 1.01 * s for s in range(5)}}
    assert compare(values, "base")[0].verdict == "worse"
    assert compare(values, "base", higher_is_better=False)[0].verdict == "better"


def test_smallest_difference():
    """0.8 at n = 5 needs 1.682 standard deviations (G*Power's 'dz' for a two-sided paired test)."""
    assert smallest_difference(1.0, 5) == pytest.approx(1.682, abs=5e-4)
    assert smallest_difference(0.5, 30) == pytest.approx(0.5 * 0.5292, abs=1e-4)
    assert smallest_difference(0.0, 3) == 0.0
    rng = np.random.default_rng(0)
    x = rng.normal(smallest_difference(1.0, 5), 1.0, (20_000, 5))
    assert (stats.ttest_1samp(x, 0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)
    assert math.isfinite(smallest_difference(1.0, 2, alpha=0.05 / 50))
    for bad in ({"n": 1}, {"sd": -1.0}, {"alpha": 0.0}, {"power": 1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            smallest_difference(**{"sd": 1.0, "n": 5, **bad})


@pytest.mark.parametrize(
    ("metric", "scale", "said"),
    [
        ("val/top1", 1.0, r": 41 in val/top1 \("),
        ("val/top1", 8.0, r": none, n = 2 is too small .*: .* 327 points of val/top1 \("),
        ("val/loss", 8.0, r": 327 in val/loss \("),
    ],
)
def test_a_difference_beyond_the_metric_is_said_to_be_none(metric, scale, said):
    variants = [plan.Variant("base"), plan.Variant("x")]
    ours = plan.Plan("recipe.py", variants, range(2), baselines=["base"], metric=metric)
    values = {"base": (50.0, 50.0), "x": (50.0, 50.0 + scale * 5.0)}
    rows = [
        {"variant": name, "seed": seed, "metrics": {metric: value}}
        for name, pair in values.items()
        for seed, value in enumerate(pair)
    ]
    assert re.search(said, difference_line(ours, rows)), difference_line(ours, rows)


def simulated(rng, variants: int, seeds: int, effect: float = 0.0, step: float = 0.0):
    """Seeds that are good or bad for all variants, and noise of each cell; perhaps in steps."""
    common = rng.normal(97.0, 0.5, seeds)
    values = {}
    for i in range(variants):
        x = common + rng.normal(0.0, 0.4, seeds) + effect * (i > 0)
        x = np.round(x / step) * step if step else x
        values[f"v{i}"] = dict(enumerate(x))
    return values


@pytest.mark.parametrize("step", [0.0, 100 / 360])
def test_honesty_no_difference_is_rarely_claimed(step):
    """Any claim about 6 equal variants in at most 5 % of repetitions, plus two standard errors."""
    rng, repetitions = np.random.default_rng(1), 1000
    claims = 0
    for _ in range(repetitions):
        found = compare(simulated(rng, 6, 5, step=step), "v0")
        assert len(found) == 5
        claims += any(each.verdict in ("better", "worse") for each in found)
    assert claims / repetitions <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / repetitions)


def test_honesty_intervals_cover_the_true_difference():
    rng, covered = np.random.default_rng(2), []
    for _ in range(1000):
        for each in compare(simulated(rng, 4, 5, effect=0.3), "v0"):
            covered.append(each.low <= 0.3 <= each.high)
    assert 0.93 <= np.mean(covered) <= 0.97


def test_a_large_difference_is_shown():
    rng = np.random.default_rng(3)
    found = [compare(simulated(rng, 6, 5, effect=4.0), "v0") for _ in range(50)]
    assert np.mean([each.verdict == "better" for row in found for each in row]) > 0.9
