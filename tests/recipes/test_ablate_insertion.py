"""The grid of ablate_insertion.py, the pairing of its seeds, and a run with train_cnn.py."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import zoo
from recipes import ablate_attention
from recipes.ablate_insertion import Config, costs, grid, legal, make_plan

ROOT = Path(__file__).resolve().parents[2]


def ablate(out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "recipes/ablate_insertion.py", "--out", out, *flags],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )


def host(seed: int = 0, **options) -> torch.nn.Module:
    torch.manual_seed(seed)
    return zoo.create_model("resnet_micro", num_classes=10, in_chans=1, img_size=8, **options)


def config(**settings) -> Config:
    given = {"kinds": ("se", "eca"), "sites": ("standard", "pre"), **settings}
    return Config(out="unused", **given)


def names(**settings) -> list[str]:
    return make_plan(config(**settings), legal(list(grid(config(**settings))), host())).names


def test_the_default_grid_has_both_baselines():
    plan = make_plan(Config(out="unused"), legal(list(grid(Config(out="unused"))), host()))
    assert len(plan.names) == 1 + 4 * 3
    assert plan.names[:4] == ["none", "constant@standard", "se@standard", "eca@standard"]
    assert plan.variants[0].flags == {}
    assert plan.variants[2].flags == {"insert": ["se@standard"]}
    pairs = plan.pairs()
    assert [name for name, _ in pairs["none"]] == plan.names[1:]
    assert all(own == f"constant@{name.split('@')[1]}" for name, own in pairs["constant"])
    assert len(pairs["constant"]) == 8
    assert plan.seeds == range(3)
    assert plan.flags["data"] == "digits"


def test_ratios_go_to_the_kinds_that_have_one():
    assert names(sites=("pre",), rd_ratios=("1/4", "0.0625"), stages=("all", "1+3")) == [
        "none",
        "constant@pre:rd_ratio=0.25", "se@pre:rd_ratio=0.25", "eca@pre",
        "constant@pre:rd_ratio=0.0625", "se@pre:rd_ratio=0.0625",
        "constant@pre:stages=1,3,rd_ratio=0.25", "se@pre:stages=1,3,rd_ratio=0.25",
        "eca@pre:stages=1,3",
        "constant@pre:stages=1,3,rd_ratio=0.0625", "se@pre:stages=1,3,rd_ratio=0.0625",
    ]  # fmt: skip


def test_baselines_among_the_kinds_are_not_doubled():
    assert names(kinds=("none", "se", "constant", "se")) == names(kinds=("se",))
    with pytest.raises(ValueError, match="beside the baselines"):
        names(kinds=("constant", "none"))


def test_what_the_host_has_no_place_for_is_left_out_and_said(capsys):
    found = names(sites=("standard", "conv3"), stages=("1", "4"))
    assert found == [
        "none", "constant@standard:stages=1", "se@standard:stages=1", "eca@standard:stages=1",
    ]  # fmt: skip
    said = capsys.readouterr().err
    assert "left out: se@conv3:stages=1, constant@conv3:stages=1, eca@conv3:stages=1" in said
    assert "pre, conv1, conv2, standard, post_add, post, identity" in said
    assert "has 3 stages, numbered from 1; there is no stage 4" in said
    with pytest.raises(ValueError, match="nothing is left to compare"):
        names(sites=("conv3",))


def test_one_channel_is_nothing_to_weigh(capsys):
    thin = zoo.create_model("resnet_micro", in_chans=1, img_size=8, widths=(1, 4, 8))
    kept = legal(list(grid(config(sites=("stem", "standard"), stages=("1", "2")))), thin)
    assert {str(module) for module, _ in kept} == {"se@standard:stages=2", "eca@standard:stages=2"}
    assert "1 channel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"kinds": ("ecca",)}, "did you mean 'eca'"),
        ({"sites": ("standrad",)}, "did you mean standard"),
        ({"stages": ("1,2",)}, r"stages \(1,2\) must be all, a number, or numbers as in 1\+2"),
        ({"rd_ratios": ("16",)}, r"rd_ratios \(16\)"),
        ({"rd_ratios": ("1/0",)}, r"rd_ratios \(1/0\)"),
        ({"rd_ratios": ("half",)}, r"rd_ratios \(half\)"),
    ],
)
def test_mistakes_are_named(settings, named):
    with pytest.raises(ValueError, match=named):
        names(**settings)


@pytest.mark.parametrize("name", ["seeds", "epochs", "batch_size", "workers", "threads"])
@pytest.mark.parametrize("config", [Config, ablate_attention.Config])
def test_counts_are_at_least_one(config, name):
    for value in (0, -2):
        with pytest.raises(ValueError, match=rf"^{name} \({value}\) must be at least 1$"):
            config(out="unused", **{name: value})


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("seed", [0, 3])
def test_the_host_starts_the_same_in_every_variant(name, seed):
    plain = host(seed).state_dict()
    insertions = [] if name == "none" else [name]
    found = host(seed, insertions=insertions).state_dict()
    assert (len(found) > len(plain)) == (name != "none")
    for key, value in plain.items():
        assert torch.equal(found[key], value), key


def test_costs_against_counts_by_hand():
    settings = config(sites=("standard",))
    plan = make_plan(settings, legal(list(grid(settings)), host()))
    table = costs(plan, host)
    base = table["none"]["parameters"]
    assert base == sum(p.numel() for p in host().parameters())
    # 2 C C / 16 weights and C / 16 + C biases at the three widths of resnet_micro
    se = sum(2 * c * (c // 16) + c // 16 + c for c in (16, 32, 64))
    assert table["se@standard"]["parameters"] == base + se
    assert table["constant@standard"]["parameters"] == base + se
    assert table["eca@standard"]["parameters"] < base + 20
    flops = {name: row["MFLOPs an image"] for name, row in table.items()}
    weights = sum(2 * c * (c // 16) for c in (16, 32, 64))
    assert flops["se@standard"] - flops["none"] == pytest.approx(2 * weights / 1e6, abs=1.1e-3)
    assert "latency vs none" not in table["none"]
    ratio, interval = (table["se@standard"][f"latency {what}"] for what in ("vs none", "interval"))
    low, high = map(float, interval.split(" to "))
    assert 0 < low <= ratio <= high


def test_plan_prints_and_writes_nothing(tmp_path):
    flags = ["--img-size", "8", "--sites", "pre", "--plan"]
    commas = ablate(tmp_path / "a", *flags, "--kinds", "se,eca", "--stages", "all,1+2")
    assert commas.returncode == 0, commas.stderr[-2000:]
    for part in ("21 cells", "constant@pre (baseline)", "--insert se@pre:stages=1,2", "--img-size"):
        assert part in commas.stdout
    assert "from a timed step" in commas.stdout
    assert "smallest difference shown at n = 3" in commas.stdout
    assert not (tmp_path / "a").exists()


def test_a_grid_is_run_with_paired_seeds_and_reported(tmp_path):
    """With a learning rate of 0 hosts end as they began, and their norms saw the same images."""
    out = tmp_path / "ablation"
    flags = ["--kinds", "se", "--sites", "standard", "--seeds", "1", "--epochs", "1"]
    flags += ["--img-size", "8", "--lr", "0", "--threads", "1", "--workers", "2"]
    done = ablate(out, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "3 cells in 0:" in done.stdout
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    folders = {row["variant"]: out / row["folder"] for row in results}
    assert list(folders) == ["none", "constant@standard", "se@standard"]
    plain = load_file(folders["none"] / "model/model.safetensors")
    for name in ("constant@standard", "se@standard"):
        other = load_file(folders[name] / "model/model.safetensors")
        assert len(other) > len(plain)
        for key in ("conv1.weight", "layer1.0.conv1.weight", "layer3.0.conv2.weight", "fc.weight"):
            assert torch.equal(other[key], plain[key]), f"{name}: initial {key}"
        for key in ("bn1.running_mean", "bn1.running_var", "layer1.0.bn2.running_mean"):
            assert torch.equal(other[key], plain[key]), f"{name}: images before {key}"
    with (out / "table.csv").open() as file:
        rows = {row["variant"]: row for row in csv.DictReader(file)}
    assert rows["se@standard"]["vs constant: verdict"] == "one seed: no verdict"
    assert rows["se@standard"]["vs none: low"] == ""
    assert rows["constant@standard"]["vs constant: verdict"] == ""
    assert (out / "effects.png").stat().st_size > 10_000
    page = (out / "report.html").read_text()
    assert "Learning curves" in page
    assert "threads: 1" in page
    other = ablate(out, *[flag if flag != "0" else "0.1" for flag in flags])
    assert other.returncode != 0
    assert "another plan" in other.stderr
    assert "flag lr: 0.0 -> 0.1" in other.stderr
