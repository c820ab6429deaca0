"""The grid of ablate_norm.py, its columns and curves, and a run with train_crossmodal.py."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
from matplotlib.figure import Figure
from PIL import Image

from crossmodal.balance import attention_balance, watched
from crossmodal.training import PairOptions, build
from recipes import ablate_norm, train_crossmodal
from recipes.ablate_norm import Config, draw_curves, even_share, main, make_plan, make_task, means
from zoo.ablation.plan import Plan, cells_of, flag_words

ROOT = Path(__file__).resolve().parents[2]
COLOURS = {"red": (230, 30, 30), "green": (30, 200, 40), "blue": (30, 40, 220), "grey": (90,) * 3}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    """Images of two colours, one over the other, as `--data`."""
    folder = tmp_path_factory.mktemp("pairs")
    rows = []
    for top in COLOURS:
        for bottom in COLOURS:
            image = Image.new("RGB", (16, 16), COLOURS[top])
            image.paste(COLOURS[bottom], (0, 8, 16, 16))
            image.save(folder / f"{top}-{bottom}.png")
            caption = f"{top} over {bottom}" if top != bottom else f"all {top}"
            rows.append({"image": f"{top}-{bottom}.png", "caption": caption})
    lines = [json.dumps({**row, "split": ("val", "train")[i % 2]}) for i, row in enumerate(rows)]
    (folder / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return f"pairs:{folder / 'pairs.jsonl'}"


def config(out: object = "unused", **settings) -> Config:
    return Config(out=str(out), **settings)


def test_every_norm_is_compared_with_the_baseline_at_its_scale():
    plan = make_plan(config())
    assert len(plan.names) == 4 * 3
    assert plan.names[:4] == ["per_modality x1", "shared x1", "none x1", "qk x1"]
    pairs = plan.pairs()["per_modality"]
    assert len(pairs) == plan.comparisons == 9
    for name, own in pairs:
        assert own == f"per_modality x{name.split(' x')[1]}"
    assert plan.metric == "val/t2i_recall@5"
    few = make_plan(config(norms=("none", "none"), scales=(0.5, 100.0, 0.5)))
    assert few.names == [
        f"{norm} x{r}" for r in ("0.5", "100") for norm in ("per_modality", "none")
    ]


@pytest.mark.parametrize("gated", [False, True])
def test_the_flags_are_those_of_the_recipe(gated):
    plan = make_plan(config(gated=gated, text_tower="text_micro", scales=(10.0,)))
    for variant in plan.variants:
        words = flag_words({**plan.flags, **variant.flags})
        found = tyro.cli(train_crossmodal.Config, args=words)
        assert (found.task, found.fusion_layout, found.text_tower) == (
            "match",
            "merged",
            "text_micro",
        )
        assert (found.gated, found.rerank_similarity, found.eval_every) == (gated, False, 1)
        assert f"{found.fusion_norm} x{found.image_scale:g}" == variant.name


@pytest.mark.parametrize("scales", [(), (1.0, 0.0), (-1.0,)])
def test_scales_are_positive(scales):
    with pytest.raises(
        ValueError, match=r"^scales \(.*\) must be one number or more, all above 0$"
    ):
        config(scales=scales)


def test_all_variants_start_with_the_same_towers(pairs):
    options = PairOptions(data=pairs, text_tower="text_bag")
    data, states = options.load(), []
    for variant in make_plan(config(scales=(1.0, 100.0))).variants:
        torch.manual_seed(3)
        model = build(options, "matcher_micro", data, fusion_layout="merged", **variant.flags)
        state = model.state_dict().items()
        states.append({k: v for k, v in state if not k.startswith(("fusion.", "match_head."))})
    first, *others = states
    assert len(first) > 40
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(value, first[key]) for key, value in other.items())


def test_even_share_is_that_of_uniform_attention(pairs):
    settings = config(data=pairs)
    model, task = make_task(settings)
    even = even_share(model, task)
    given = {"fusion_layout": "merged", "fusion_attention": "uniform"}
    uniform = build(
        PairOptions(data=pairs, text_tower="text_bag"), "matcher_micro", task.data, **given
    )
    rows = watched(len(task.data.val)).tolist()
    batch = task.pairs(task.data.val).__getitems__([(0, i) for i in rows])
    image = uniform.image_tower(task.inputs(batch))
    found = attention_balance(uniform, image, uniform.text_tower(batch["tokens"], batch["mask"]))
    assert even == pytest.approx(found["attn_image_share"], abs=1e-6)
    assert even < 1


def write_cells(plan: Plan, out: Path) -> dict[tuple[str, int], np.ndarray]:
    """metrics.jsonl of all cells with numbers of their own: (epochs, rows of the figure)."""
    draw, found = np.random.default_rng(0), {}
    for cell in cells_of(plan, out):
        values = found[cell.variant.name, cell.seed] = draw.random((3, len(ablate_norm.ROWS)))
        cell.folder.mkdir(parents=True)
        with (cell.folder / "metrics.jsonl").open("w") as file:
            for epoch, row in enumerate(values, start=1):
                metrics = dict(zip(ablate_norm.ROWS, row, strict=True))
                file.write(json.dumps({"step": epoch, "epoch": epoch, **metrics}) + "\n")
    return found


def test_curves_are_means_and_ranges_of_seeds(tmp_path, monkeypatch):
    drawn: list[Figure] = []

    class Kept(Figure):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            drawn.append(self)

    monkeypatch.setattr(ablate_norm, "figure_class", lambda path: Kept)
    settings = config(tmp_path, norms=("none", "qk"), scales=(1.0, 100.0), seeds=3)
    plan = make_plan(settings)
    values = write_cells(plan, tmp_path)
    path = draw_curves(plan, settings, even=0.9)
    assert path == tmp_path / "curves.png"
    assert Image.open(path).format == "PNG"
    panels = np.array(drawn[0].axes).reshape(3, 2)
    for row, axes in enumerate(panels):
        for scale, panel in zip(("1", "100"), axes, strict=True):
            lines = {line.get_label(): line for line in panel.get_lines()}
            assert ("even weights" in lines) == (row == 1)
            bands = dict(zip(("per_modality", "none", "qk"), panel.collections, strict=True))
            for norm, band in bands.items():
                seeds = np.stack([values[f"{norm} x{scale}", seed][:, row] for seed in range(3)])
                np.testing.assert_allclose(lines[norm].get_ydata(), seeds.mean(0))
                edges = band.get_paths()[0].vertices[:, 1]
                assert edges.min() == pytest.approx(seeds.min())
                assert edges.max() == pytest.approx(seeds.max())
    assert panels[1, 0].get_lines()[0].get_ydata()[0] == 0.9


def test_columns_are_means_over_seeds():
    plan = make_plan(config(norms=("none",), scales=(10.0,), seeds=2))
    names = list(ablate_norm.COLUMNS.values())
    rows = [
        {"variant": variant, "seed": seed, "metrics": dict.fromkeys(names, base + seed)}
        for base, variant in ((1.0, "per_modality x10"), (5.0, "none x10"))
        for seed in (0, 1)
    ]
    found = means(plan, rows)
    assert found["per_modality x10"] == dict.fromkeys(ablate_norm.COLUMNS, 1.5)
    assert found["none x10"] == dict.fromkeys(ablate_norm.COLUMNS, 5.5)


def test_plan_prints_and_writes_nothing(pairs, tmp_path, capsys):
    assert main(config(tmp_path / "a", data=pairs, batch_size=8, epochs=2, plan=True)) is None
    said = capsys.readouterr().out
    for part in ("36 cells", "per_modality x100 (baseline)", "--fusion-norm qk --image-scale 10.0"):
        assert part in said
    assert "from a timed step" in said
    assert not (tmp_path / "a").exists()


def test_a_grid_is_run_and_reported(pairs, tmp_path):
    out = tmp_path / "ablation"
    flags = ["--norms", "per_modality,none", "--scales", "100", "--seeds", "1", "--epochs", "2"]
    done = subprocess.run(
        [sys.executable, ROOT / "recipes/ablate_norm.py", "--out", out, "--data", pairs,
         "--batch-size", "8", *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows] == ["per_modality x100", "none x100"]
    own, other = (row["metrics"] for row in rows)
    assert own["val/attn_entropy"] > 0.9
    assert other["val/attn_entropy"] < 0.5
    with (out / "table.csv").open() as file:
        table = {row["variant"]: row for row in csv.DictReader(file)}
    for row in rows:
        for column, metric in ablate_norm.COLUMNS.items():
            assert float(table[row["variant"]][column]) == row["metrics"][metric]
    assert table["none x100"]["vs per_modality: verdict"] == "one seed: no verdict"
    page = (out / "report.html").read_text()
    assert "Epoch by epoch" in page
    assert "weights that are all alike put 0." in page
    assert (out / "curves.png").stat().st_size > 10_000
