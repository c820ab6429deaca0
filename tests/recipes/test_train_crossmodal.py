"""Launches the recipe as a user would: its tasks, on one and two processes, stopped, mistyped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import zoo

ROOT = Path(__file__).resolve().parents[2]
WORDS = ("red", "green", "blue", "dark", "light", "large", "small", "square", "dot", "star")
TINY = ["--image-tower", "vit_micro_patch4_32", "--img-size", "16", "--tokenizer", "bytes"]
SHORT = ["--epochs", "2", "--batch-size", "16", "--eval-every", "1", "--log-every", "1"]


def environ(**more: str) -> dict[str, str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC"))
    }
    return {**clean, "OMP_NUM_THREADS": "1", **more}


RANKS = """
import json, os, runpy, sys
from zoo import engine

checksums = []
collect = engine.collect

def watched(accelerator, model, *rest):
    checksums.append([value.double().sum().item() for value in model.state_dict().values()])
    return collect(accelerator, model, *rest)

engine.collect = watched
out = sys.argv[sys.argv.index("--out") + 1]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
with open(f"{out}/rank{os.environ['RANK']}.json", "w") as file:
    json.dump(checksums, file)
"""


def launch(*args: str | Path, processes: int = 1, ok: bool = True, script: Path | None = None):
    recipe = str(ROOT / "recipes/train_crossmodal.py")
    words = [*([str(script)] if script else []), recipe, *map(str, args)]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    start = [] if processes == 1 else torchrun
    env = environ(**({} if processes == 1 else {"ACCELERATE_USE_CPU": "true"}))
    done = subprocess.run(
        [sys.executable, *start, *words], env=env, capture_output=True, text=True, timeout=300
    )
    if ok:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def rows(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> str:
    """45 images of 16x16 with a caption or two each; the last 9 are for validation."""
    folder = tmp_path_factory.mktemp("pairs")
    draw = np.random.default_rng(0)
    lines = []
    for i in range(45):
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).save(folder / f"{i}.png")
        first = f"{WORDS[i % 10]} {WORDS[i // 10 + 3]}"
        captions = [first, f"a {first}"] if i % 3 == 0 else first
        split = "val" if i >= 36 else "train"
        lines.append(json.dumps({"image": f"{i}.png", "caption": captions, "split": split}))
    (folder / "pairs.jsonl").write_text("\n".join(lines))
    return f"pairs:{folder / 'pairs.jsonl'}"


@pytest.mark.parametrize("task", ["contrastive", "match", "caption"])
def test_every_task_trains_and_saves_a_model_that_works(pairs, tmp_path, task):
    out = tmp_path / "run"
    more = [] if task == "caption" else ["--text-tower", "text_bag"]
    more += [] if task == "contrastive" else ["--save-attention-every", "3"]
    launch("--task", task, "--data", pairs, *TINY, *more, *SHORT, "--out", out)
    names = {path.name for path in out.glob("attention/*.png")}
    pictures = {"step000003.png", "step000006.png", "over_time.png"}
    assert names == (set() if task == "contrastive" else pictures)
    found = summary(out)
    assert (found["recipe"], found["status"]) == ("train_crossmodal", "completed")
    assert (found["epochs"], found["steps"]) == (2, 6)
    assert found["pairs"]["val"] == 9
    wanted = "val/train_exact" if task == "caption" else "val/t2i_recall@5"
    assert 0 <= found["metrics"][wanted] <= 100
    assert found["metrics"]["val/loss"] > 0
    model = zoo.create_model(f"local-dir:{out / 'model'}").eval()
    tokens, mask = model.make_tokenizer()(["red star", "a"])
    images = torch.randn(2, 3, 16, 16)
    result = model(images, tokens, mask)
    first = result if task == "caption" else result.image
    assert first.shape[0] == 2
    assert first.isfinite().all()


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("contrastive", []),
        ("contrastive", ["--loss", "sigmoid"]),
        ("match", ["--fusion-norm", "shared", "--fusion-direction", "both"]),
    ],
)
def test_two_processes_give_the_losses_of_one(pairs, tmp_path, task, more):
    """36 pairs: the last batch of 16 has 4, the last of 2 x 8 two a process."""
    one, two = tmp_path / "one", tmp_path / "two"
    # Affine augmentation draws by sample; nothing else is random.
    given = ["--task", task, "--data", pairs, *TINY, *SHORT, *more]
    launch(*given, "--out", one)
    launch(*given, "--batch-size", "8", "--out", two, processes=2)
    for name in ("train/loss", "val/loss"):
        assert rows(two, name) == pytest.approx(rows(one, name), rel=1e-4)
    names = [name for name in summary(one)["metrics"] if "recall" in name or "rank" in name]
    assert names
    for name in names:
        assert summary(two)["metrics"][name] == pytest.approx(summary(one)["metrics"][name], abs=12)


@pytest.mark.parametrize("task", ["contrastive", "match", "caption"])
def test_two_processes_agree_on_weights_and_running_statistics(pairs, tmp_path, task):
    """Case E13; the scale that is clamped after each update is one of the weights."""
    (tmp_path / "ranks.py").write_text(RANKS)
    flags = ["--task", task, "--data", pairs, "--img-size", "16", "--tokenizer", "bytes", *SHORT]
    launch(*flags, "--out", tmp_path / "run", processes=2, script=tmp_path / "ranks.py")
    ranks = [json.loads((tmp_path / f"run/rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 4, "images and captions, or two parts, twice"
    assert ranks[0][0] != ranks[0][2], "it learned"


def test_a_stopped_run_goes_on_to_the_same_weights(pairs, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = ["--task", "match", "--data", pairs, *TINY, *SHORT]
    launch(*given, "--out", whole)
    launch(*given, "--out", parts)
    for path in sorted((parts / "checkpoints").glob("*.pt"))[1:]:
        path.unlink()  # as if it had been killed after the first epoch
    (parts / "summary.json").unlink()
    launch(*given, "--out", parts, "--resume", "auto")
    first, second = (load_file(f / "model/model.safetensors") for f in (whole, parts))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_frozen_towers_stay_as_they_were(pairs, tmp_path):
    out = tmp_path / "run"
    launch("--data", pairs, *TINY, *SHORT, "--freeze", "image", "text", "--out", out)
    trained = load_file(out / "model/model.safetensors")
    torch.manual_seed(0)
    model = zoo.create_model(f"local-dir:{out / 'model'}")
    learns = [name for name, p in model.named_parameters() if p.requires_grad]
    assert learns == ["logit_scale", "image_proj.weight", "text_proj.weight"]
    assert trained.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--task", "contrastive", "--decoder", "transformer"], "decoder is for --task caption"),
        (["--fusion-norm", "none"], "fusion_norm is for --task match"),
        (["--freeze", "decoder"], "freeze 'decoder' must be image or text"),
        (["--image-tower", "resnet_mikro"], "resnet_micro"),
        (["--data", "pairs:nowhere.csv"], "no file nowhere.csv"),
        (["--data", "emojis"], "did you mean emoji"),
        (["--languages", "en", "xx"], "languages"),
        (["--img-size", "30", "--image-tower", "vit_micro_patch4_32"], "divisible"),
    ],
)
def test_mistakes_are_told_before_training(tmp_path, given, message):
    out = tmp_path / "run"
    done = launch(*given, "--out", out, ok=False)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout
    assert not out.exists()


def test_recall_of_one_pair_is_refused_before_training(pairs, tmp_path):
    folder = Path(pairs.partition(":")[2]).parent
    lines = (folder / "pairs.jsonl").read_text().splitlines()[:37]  # one of them val
    (folder / "one.jsonl").write_text("\n".join(lines))
    data = f"pairs:{folder / 'one.jsonl'}"
    done = launch("--data", data, *TINY, *SHORT, "--out", tmp_path / "run", ok=False)
    assert "1 validation pairs, and 2 or more are needed" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("task", ["match", "caption"])
def test_captions_longer_than_the_context_are_cut(pairs, tmp_path, task):
    """Their end token stays: case G1."""
    flags = ["--data", pairs, *TINY, *SHORT, "--context-length", "6", "--out", tmp_path / "run"]
    done = launch("--task", task, *flags)
    assert summary(tmp_path / "run")["status"] == "completed"
    assert "captions are cut to 6 tokens (--context-length)" in done.stderr


def test_few_candidates_have_a_best_checkpoint_too(pairs, tmp_path):
    folder = Path(pairs.partition(":")[2]).parent
    lines = (folder / "pairs.jsonl").read_text().splitlines()[:39]  # three of them val
    (folder / "three.jsonl").write_text("\n".join(lines))
    launch("--data", f"pairs:{folder / 'three.jsonl'}", *TINY, *SHORT, "--out", tmp_path / "run")
    assert "val/t2i_recall@1" in summary(tmp_path / "run")["best"]
    assert (tmp_path / "run/checkpoints/best.pt").is_file()
