"""report.html: read by a parser, complete, escaped, and loading nothing."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pytest
from page_reader import Reader

from zoo.ablation import Plan, Variant, report, seconds_of_cell
from zoo.ablation.html import Scale, verdicts
from zoo.ablation.results import environments, learning_curves
from zoo.ablation.stats import Comparison

EVIL = '<script>alert(1)</script> & "x"'


def cells(plan: Plan, out: Path, missing: int = 0) -> None:
    """Finished run folders, as a recipe leaves them."""
    rng = np.random.default_rng(0)
    names = [(variant, seed) for seed in plan.seeds for variant in plan.variants]
    for variant, seed in names[: len(names) - missing]:
        folder = out / "cells" / variant.folder / f"seed{seed}"
        folder.mkdir(parents=True)
        top = 60 + 3 * len(variant.baselines) + seed + 0.3 * rng.normal()
        summary = {
            "status": "completed", "metrics": {"val/top1": top}, "data": "emoji", "epochs": 3,
            "wall_seconds": 9.0,
        }  # fmt: skip
        rows = [{"epoch": e, "step": e, "val/top1": top * e / 3} for e in (1, 2, 3)]
        rows.insert(1, {"epoch": 1.5, "step": 1, "train/loss": 2.0})
        config = {"versions": {"torch": "2.14"}, "hardware": {"cpu": "Z80"}, "commit": "abc"}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "config.json").write_text(json.dumps(config))


def plan_of(seeds: int = 4, evil: str = EVIL) -> Plan:
    own = {"constant": "constant@pre"}
    variants = [Variant("none"), Variant("constant@pre"), Variant("se@pre", {"k": "v"}, own)]
    variants.append(Variant(evil, {"insert": [evil]}, own))
    return Plan(
        "recipe.py", variants, range(seeds), flags={"data": "emoji"},
        baselines=["none", "constant"], question=f"Worth it? {evil}",
    )  # fmt: skip


def page(out: Path, plan: Plan, **more) -> tuple[str, Reader]:
    pytest.importorskip("matplotlib")
    report(plan, out, **more)
    text = (out / "report.html").read_text(encoding="utf-8")
    return text, Reader(text)


def test_the_page_is_well_formed_complete_and_self_contained(tmp_path):
    plan = plan_of()
    cells(plan, tmp_path)
    extra = {"se@pre": {"parameters": 12345}}
    text, read = page(tmp_path, plan, extra=extra, figure=plan.baselines, note="Timed in turn.")
    loads = [v for _, name, v in read.attributes if name in ("src", "href", "srcset", "data")]
    assert [value.partition(",")[0] for value in loads] == ["data:image/png;base64"]
    assert base64.b64decode(loads[0].partition(",")[2]) == (tmp_path / "effects.png").read_bytes()
    assert not re.search(r"https?:|url\(|@import", text)
    assert read.text["h1"] == [f"Worth it? {EVIL}"]
    assert {"Verdicts", "Differences", "Table", "Seed by seed", "Learning curves"} <= {
        *read.text["h2"]
    }
    body = " ".join(part for parts in read.text.values() for part in parts)
    for part in (
        "12,345", "Timed in turn.", "16 of 16 cells", "Z80", "2.14", "abc", "--k v",
        "no difference shown at n = 4", "corrected (Holm) for all 5 comparisons",
        "--resume auto --seed 0", "val/top1, variant minus constant", "minus constant@pre",
    ):  # fmt: skip
        assert part in body, part
    assert len(read.text["table"]) == 2
    assert "prefers-color-scheme: dark" in text
    assert 'name="viewport"' in text


def test_more_pictures_are_embedded_under_their_titles(tmp_path):
    plan = plan_of()
    cells(plan, tmp_path)
    picture = tmp_path / "curves.png"
    picture.write_bytes(b"any bytes")
    _, read = page(tmp_path, plan, pictures={"Curves <by norm>": picture})
    assert "Curves <by norm>" in read.text["h2"]
    loads = [value for tag, name, value in read.attributes if (tag, name) == ("img", "src")]
    assert base64.b64encode(b"any bytes").decode() in [value.partition(",")[2] for value in loads]


def test_names_are_escaped_everywhere(tmp_path):
    plan = plan_of()
    cells(plan, tmp_path)
    text, read = page(tmp_path, plan)
    assert len(read.text["script"]) == 1, "ours only"
    assert "alert(1)</script>" not in text
    assert any(EVIL in value for value in read.text["td"])


def test_verdicts_say_what_the_comparisons_do(tmp_path):
    plan = plan_of(evil="cbam@pre")
    cells(plan, tmp_path)
    _, read = page(tmp_path, plan)
    lists = [" ".join(text.split()) for text in read.text["li"]]
    assert "se@pre, cbam@pre" in lists
    assert "Better:" in read.text["strong"]
    found = [Comparison("a", "z", 3, verdict="worse"), Comparison("b", "z", 3, verdict="nothing")]
    found += [Comparison("c", "z", 3, verdict="better"), Comparison("d", "z", 3, verdict="nothing")]
    assert list(verdicts(found).items()) == [
        ("better", ["c"]), ("worse", ["a"]), ("nothing", ["b", "d"]),
    ]  # fmt: skip


@pytest.mark.parametrize("seeds", [1, 2])
def test_few_seeds_and_unfinished_cells(tmp_path, seeds):
    plan = plan_of(seeds)
    cells(plan, tmp_path, missing=1)
    text, read = page(tmp_path, plan)
    assert f"{4 * seeds - 1} of {4 * seeds} cells" in text
    bars = [value for tag, name, value in read.attributes if (name, value) == ("class", "bar")]
    if seeds == 1:
        assert "One seed: no verdict" in text.replace("\n", "")
        assert not bars, "no interval"
    else:
        assert len(bars) == 3, "two to none, one to constant; the last variant has one seed"


def test_without_curves_and_versions_the_page_says_so(tmp_path):
    plan = plan_of(2)
    cells(plan, tmp_path)
    for path in (*tmp_path.rglob("metrics.jsonl"), *tmp_path.rglob("config.json")):
        path.unlink()
    _, read = page(tmp_path, plan)
    assert "Learning curves" not in read.text["h2"]
    assert "not recorded" in read.text["dt"]


def test_curves_and_environments_come_from_the_run_folders(tmp_path):
    plan = plan_of(2)
    cells(plan, tmp_path, missing=1)
    curves = learning_curves(plan, tmp_path)
    assert [x for x, _ in curves["none"][1]] == [1.0, 2.0, 3.0]
    assert list(curves[EVIL]) == [0]
    other = tmp_path / "cells/none/seed0/config.json"
    other.write_text(json.dumps({"versions": {"torch": "2.9"}}))
    assert environments(plan, tmp_path)["torch"] == ["2.9", "2.14"]


def test_scales_hold_zero_and_round_ticks():
    scale = Scale.over([-0.31, 0.0, 2.2])
    assert scale.ticks() == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
    assert scale.at(scale.low) == "0.00%"
    assert scale.at(scale.high) == "100.00%"
    flat = Scale.over([0.0, 0.0])
    assert flat.at(0.0) == "50.00%"
    for size in (1e-3, 0.07, 3.0, 41.0, 1e5):
        assert 2 <= len(Scale.over([0.0, size]).ticks()) <= 7


def test_seconds_of_cell_grow_with_its_steps():
    def step() -> None:
        sum(range(200_000))

    one, many = seconds_of_cell(step, 1), seconds_of_cell(step, 10_000)
    assert many - one > 5, "10,000 steps of milliseconds"
