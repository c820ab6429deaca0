"""Launches train_cnn as a user would: insertions, hosts, processes, interruptions, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import vision
import zoo
from zoo.diagnostics import gate_profile, gate_ranges
from zoo.preprocess import normalize

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--epochs", "2", "--warmup-epochs", "1", "--batch-size", "128", "--log-every", "1",
    "--img-size", "8",
]  # fmt: skip
INSERT = ["--insert", "se@standard", "eca@post:stages=2,3", "--insert", "simam@stem:init=identity"]
SAME = ("train/loss", "train/lr", "train/grad_norm", "train/epoch_loss", "val/loss", "val/top1")


def environ(**more: str) -> dict[str, str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC"))
    }
    return {**clean, "OMP_NUM_THREADS": "1", **more}


def launch(*args: str | Path, recipe: str | Path = "train_cnn.py", processes=1, ok=True):
    words = [str(ROOT / "recipes" / recipe), *map(str, args)]
    env = environ()
    if processes > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        words, env = [*torchrun, *words], environ(ACCELERATE_USE_CPU="true")
    done = subprocess.run(
        [sys.executable, *words], env=env, capture_output=True, text=True, timeout=300
    )
    if ok:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def rows(folder: Path) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in lines if name in row] for name in SAME}


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model/model.safetensors")


def same_weights(one: Path, two: Path) -> bool:
    first, second = weights(one), weights(two)
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run with three insertions and everything that draws random numbers."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    launch(*SMALL, *INSERT, *RANDOM, "--out", folder)
    return folder


RANDOM = ["--drop-path-rate", "0.2", "--cutmix", "1.0", "--ema", "--grad-accumulation", "2"]


def test_insertions_reach_the_model_and_the_record(whole):
    """Written `--insert a b --insert c`: all three, in order."""
    expected = ["se@standard", "eca@post:stages=2,3", "simam@stem:init=identity"]
    assert json.loads((whole / "config.json").read_text())["options"]["insert"] == expected
    assert json.loads((whole / "model/model.json").read_text())["options"]["insertions"] == expected
    model = zoo.create_model(f"local-dir:{whole / 'model'}")
    assert list(gate_ranges(model)) == [
        "slot_stem.0",
        "layer1.0.slot_standard.0",
        "layer2.0.slot_standard.0",
        "layer2.0.slot_post.0",
        "layer3.0.slot_standard.0",
        "layer3.0.slot_post.0",
    ]
    assert summary(whole)["recipe"] == "train_cnn"
    assert summary(whole)["model"] == "resnet_micro"
    assert summary(whole)["status"] == "completed"


def test_a_flag_for_each_insertion_is_the_same(tmp_path):
    texts = ["se@standard:stages=1", "eca@post"]
    launch(*SMALL, "--epochs", "1", "--insert", *texts, "--out", tmp_path / "one")
    flags = [word for text in texts for word in ("--insert", text)]
    launch(*SMALL, "--epochs", "1", *flags, "--out", tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "two")


def test_looking_at_gates_changes_nothing_and_is_logged(whole, tmp_path):
    launch(*SMALL, *INSERT, *RANDOM, "--save-attention-every", "5", "--out", tmp_path / "run")
    assert same_weights(whole, tmp_path / "run")
    assert rows(whole) == rows(tmp_path / "run")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    name = "gates/layer2.0.slot_post.0/mean"
    found = [row for row in map(json.loads, lines) if name in row]
    assert [row["step"] for row in found] == [5, 10, 12], "the last one as well"
    assert all(0 < row[name] < 1 for row in found)
    names = {path.name for path in (tmp_path / "run/attention").glob("*.png")}
    pictures = {f"gates_step{step:06d}.png" for step in (5, 10, 12)}
    assert names == {"gates.png", "gates_over_time.png", *pictures}


def test_a_cnn_without_gates_has_nothing_to_look_at(tmp_path):
    done = launch(*SMALL, "--save-attention-every", "5", "--out", tmp_path / "run", ok=False)
    assert "save_attention_every (5) needs attention or gates" in done.stderr
    assert not (tmp_path / "run").exists()


def test_resumed_is_the_same_run_bit_for_bit(whole, tmp_path):
    """Running statistics, insertions, the average, drop-path and CutMix included."""
    flags = [*SMALL, *INSERT, *RANDOM, "--out", tmp_path / "run"]
    launch(*flags, "--checkpoint-every", "4", "--keep", "9")
    for path in (tmp_path / "run/checkpoints").glob("*.pt"):
        if path.name > "step_00000008.pt" or path.name == "best.pt":
            path.unlink()  # as if killed in the second epoch
    launch(*flags, "--checkpoint-every", "4", "--keep", "9", "--resume", "auto")
    assert same_weights(whole, tmp_path / "run")
    assert rows(whole) == rows(tmp_path / "run")
    first, second = (
        (folder / "attention/gates.json").read_bytes() for folder in (whole, tmp_path / "run")
    )
    assert first == second


def test_the_gates_of_the_run_are_those_of_its_model(whole):
    model = zoo.create_model(f"local-dir:{whole / 'model'}")
    data = vision.load_dataset("digits")
    source = vision.make_source(data.val, model.card.preprocessing, train=False)
    batch = source.__getitems__([(0, i) for i in range(360)])
    pair = (normalize(batch["images"], model.card.preprocessing), batch["targets"])
    profile = gate_profile(model, [pair], 10)
    report = json.loads((whole / "attention/gates.json").read_text())
    means = np.load(whole / "attention/gates.npz")
    assert means["class_counts"].sum() == 360
    for name, moments in profile.items():
        layer = report["layers"][name]
        for field, value in vars(moments.statistics()).items():
            assert layer[field] == pytest.approx(value, abs=1e-4), (name, field)
        np.testing.assert_allclose(means[name], moments.class_means, atol=1e-4)
    assert {layer["group"] for layer in report["layers"].values()} == {
        "stage1", "stage2", "stage3"
    }  # fmt: skip
    found = summary(whole)
    assert found["gates/stage2/mean"] == report["groups"]["stage2"]["mean"]
    assert (whole / "attention/gates.png").stat().st_size > 10_000


def test_looking_at_gates_changes_no_number(whole, tmp_path):
    launch(*SMALL, *INSERT, *RANDOM, "--no-gates", "--out", tmp_path / "run")
    assert rows(whole) == rows(tmp_path / "run")
    assert same_weights(whole, tmp_path / "run")
    assert not (tmp_path / "run/attention").exists()


def test_variants_start_from_the_same_host(tmp_path):
    """Paired: one seed gives one host and one order, with insertions or without."""
    flags = [*SMALL, "--epochs", "1", "--lr", "0", "--batch-size", "512"]
    launch(*flags, "--out", tmp_path / "host")
    launch(*flags, "--insert", "se@standard", "--init", "identity", "--out", tmp_path / "variant")
    host, variant = weights(tmp_path / "host"), weights(tmp_path / "variant")
    assert host.keys() < variant.keys()
    for name, value in host.items():
        torch.testing.assert_close(variant[name], value, msg=name)
    assert variant["layer1.0.slot_standard.0.scale"] == 0
    assert rows(tmp_path / "host")["train/loss"] == rows(tmp_path / "variant")["train/loss"]


RANKS = """
import json, runpy, sys
from zoo import engine

checksums = []
evaluate = engine.evaluate

def watched(accelerator, model, *rest):
    checksums.append([value.double().sum().item() for value in model.state_dict().values()])
    return evaluate(accelerator, model, *rest)

engine.evaluate = watched
out = sys.argv[sys.argv.index("--out") + 1]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
import os
with open(f"{out}/rank{os.environ['RANK']}.json", "w") as file:
    json.dump(checksums, file)
"""


@pytest.mark.parametrize("ema", [[], ["--ema"]], ids=["plain", "ema"])
def test_two_processes_agree_on_weights_and_running_statistics(tmp_path, ema):
    """Case E13. Statistics are those of one process's batches; the main one's are kept."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    recipe = ROOT / "recipes/train_cnn.py"
    flags = [*SMALL, *INSERT, *ema, "--out", tmp_path / "run"]
    done = launch(recipe, *flags, recipe=script, processes=2)
    assert done.stdout.count("epoch 1/2") == 1
    ranks = [json.loads((tmp_path / f"run/rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    assert len(ranks[0]) == 2
    assert ranks[0][0] != ranks[0][1], "it learned"
    report = json.loads((tmp_path / "run/attention/gates.json").read_text())
    assert len(report["layers"]) == 6
    assert np.load(tmp_path / "run/attention/gates.npz")["class_counts"].sum() == 360
    launch("--model", tmp_path / "run", "--out", tmp_path / "r.json", recipe="evaluate.py")
    found = json.loads((tmp_path / "r.json").read_text())["metrics"]
    assert found["val/top1"] == summary(tmp_path / "run")["metrics"]["val/top1"]


@pytest.mark.parametrize(
    ("host", "own"), [("timm:mobilenetv3_small_050", {"host"}), ("torchvision:resnet18", set())]
)
def test_a_host_trains_saves_and_evaluates(tmp_path, host, own):
    flags = [
        "--model", host, "--img-size", "32", "--epochs", "1", "--batch-size", "256",
        "--insert", "se@standard:stages=2,3", "--insert", "eca@post:stages=2",
    ]  # fmt: skip
    launch(*flags, "--out", tmp_path / "run")
    report = json.loads((tmp_path / "run/attention/gates.json").read_text())
    assert {layer["group"] for layer in report["layers"].values()} == {"stage2", "stage3"} | own
    launch("--model", tmp_path / "run", "--out", tmp_path / "r.json", recipe="evaluate.py")
    found = json.loads((tmp_path / "r.json").read_text())["metrics"]
    assert found["val/loss"] == pytest.approx(summary(tmp_path / "run")["metrics"]["val/loss"])


def test_training_goes_on_from_trained_weights_into_a_variant(whole, tmp_path):
    """A host trained without insertions, then with: identity keeps what it knew."""
    launch(*SMALL, "--out", tmp_path / "host")
    flags = [*SMALL, "--epochs", "1", "--lr", "0", "--pretrained"]
    flags += [f"local-dir:{tmp_path / 'host/model'}", "--insert", "se@post:init=identity"]
    launch(*flags, "--out", tmp_path / "variant")
    host, variant = weights(tmp_path / "host"), weights(tmp_path / "variant")
    for name in (key for key in host if "running" not in key and "tracked" not in key):
        torch.testing.assert_close(variant[name], host[name], msg=name)


def test_a_run_with_insertions_goes_on_and_takes_more(whole, tmp_path):
    flags = [*SMALL, "--epochs", "1", "--model", f"local-dir:{whole / 'model'}"]
    launch(*flags, "--insert", "srm@pre", "--out", tmp_path / "more")
    options = json.loads((tmp_path / "more/model/model.json").read_text())["options"]
    stored = json.loads((whole / "model/model.json").read_text())["options"]["insertions"]
    assert options["insertions"] == [*stored, "srm@pre"]


def test_without_insertions_there_is_nothing_to_look_at(tmp_path):
    launch(*SMALL, "--epochs", "1", "--out", tmp_path / "run")
    assert not (tmp_path / "run/attention").exists()
    assert not [name for name in summary(tmp_path / "run") if name.startswith("gates/")]


def test_kinds_that_show_no_gate_are_said_and_do_no_harm(tmp_path):
    flags = ["--epochs", "1", "--insert", "timm:cbam@standard", "--out", tmp_path / "run"]
    done = launch(*SMALL, *flags)
    assert "nothing to write to attention/" in done.stderr
    assert summary(tmp_path / "run")["status"] == "completed"


@pytest.fixture(scope="module")
def halves(tmp_path_factory) -> Path:
    """The digits 0 to 4 in one folder of images, 5 to 9 in another."""
    root, data = tmp_path_factory.mktemp("halves"), vision.load_dataset("digits")
    for name, split in (("train", data.train), ("val", data.val)):
        for index, label in enumerate(split.targets.tolist()):
            folder = root / ("first" if label < 5 else "second") / name / data.class_names[label]
            folder.mkdir(parents=True, exist_ok=True)
            split.image(index, 1).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def first(halves) -> Path:
    """A model of the first half."""
    flags = [*SMALL, "--epochs", "6", "--spatial", "affine", "--hflip", "0", "--mixup", "0"]
    flags += ["--batch-size", "64"]
    launch(*flags, "--data", f"folder:{halves / 'first'}", "--out", halves / "run")
    return halves / "run/model"


def second(halves: Path) -> list[str]:
    data = f"folder:{halves / 'second'}"
    return [*SMALL, "--data", data, "--spatial", "none", "--hflip", "0", "--mixup", "0"]


def test_features_of_other_classes_beat_random_ones(halves, first, tmp_path):
    """A linear probe on five digits, over a backbone that has seen the other five, or nothing."""
    flags = [*second(halves), "--epochs", "3", "--lr", "0.03", "--freeze", "backbone"]
    flags += ["--batch-size", "64"]
    launch(*flags, "--pretrained", f"local-dir:{first}", "--out", tmp_path / "trained")
    launch(*flags, "--out", tmp_path / "random")
    trained, random = summary(tmp_path / "trained"), summary(tmp_path / "random")
    assert trained["trainable_params"] == random["trainable_params"] == 64 * 5 + 5
    assert trained["metrics"]["val/top1"] > random["metrics"]["val/top1"] + 5


def test_fine_tuning_keeps_what_is_frozen_and_resumes_bit_for_bit(halves, first, tmp_path):
    """With new modules in frozen stages, rates by layer and of the head, and an average."""
    flags = [
        *second(halves), "--pretrained", f"local-dir:{first}", "--freeze", "stages=2", "--head-lr",
        "0.02", "--layer-decay", "0.7", "--insert", "cbam@standard:stages=2", "--ema",
        "--weight-decay", "0.5", "--checkpoint-every", "4", "--keep", "9", "--batch-size", "64",
    ]  # fmt: skip
    done = launch(*flags, "--out", tmp_path / "whole")
    found = summary(tmp_path / "whole")
    assert 0 < found["trainable_params"] < found["params"]
    counts = f"{found['trainable_params']:,} of {found['params']:,} parameters"
    assert f"training {counts} in" in done.stdout
    before, after = load_file(first / "model.safetensors"), weights(tmp_path / "whole")
    saved = torch.load(tmp_path / "whole/checkpoints/best.pt", weights_only=True)
    frozen = [key for key in before if key.startswith(("conv1", "bn1", "layer1", "layer2"))]
    for state in (after, saved["model"]):
        assert all(torch.equal(state[key], before[key]) for key in frozen)
        assert not torch.equal(state["layer3.0.conv1.weight"], before["layer3.0.conv1.weight"])
        assert state["fc.weight"].shape == (5, 64)
    new = [key for key in after if ".slot_standard." in key]
    assert new
    assert all(key.startswith("layer2.0.slot_standard") for key in new)
    assert any("running_mean" in key and after[key].any() for key in new)

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    for path in (tmp_path / "cut/checkpoints").glob("*.pt"):
        if path.name > "step_00000008.pt" or path.name == "best.pt":
            path.unlink()  # as if killed early
    launch(*flags, "--out", tmp_path / "cut", "--resume", "auto")
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")
    other = [*flags, "--freeze", "stages=1", "--out", tmp_path / "cut", "--resume", "auto"]
    assert "freeze: stages=2 -> stages=1" in launch(*other, ok=False).stderr


def test_two_processes_are_one_on_a_frozen_backbone(halves, first, tmp_path):
    """Case E12. Frozen batch norms take no statistics, so that the result is the same to 1e-5."""
    shared = [
        *second(halves), "--pretrained", f"local-dir:{first}", "--freeze", "backbone", "--head-lr",
        "0.02", "--layer-decay", "0.7", "--ema", "--mixup", "0.4",
    ]  # fmt: skip
    launch(*shared, "--batch-size", "128", "--out", tmp_path / "one")
    flags = [*shared, "--batch-size", "64", "--out", tmp_path / "two"]
    done = launch(*flags, processes=2)
    assert done.stdout.count("of the values matched") == 1, "the report is printed once"
    assert "take no part in the loss" not in done.stderr
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    for name in ("train/loss", "train/grad_norm", "val/loss", "val/top1"):
        assert two[name] == pytest.approx(one[name], abs=1e-5), name
    backbone = load_file(first / "model.safetensors")
    trained = weights(tmp_path / "two")
    assert [key for key in trained if not torch.equal(trained[key], backbone[key])] == [
        "fc.bias",
        "fc.weight",
    ]


BAD = [
    (["--insert", "se"], "must look like KIND@SITE"),
    (["--insert", "see@standard"], "did you mean"),
    (["--insert", "se@standart"], "did you mean standard"),
    (["--insert", "se@conv3"], "Legal sites"),
    (["--insert", "se@standard:stages=4"], "there is no stage 4"),
    (["--insert", "se@standard", "--insert", "se@standard"], "has se already"),
    (["--insert", "se@standard:rd_rati=0.5"], "rd_rati"),
    (["--insert", "eca@post:init=zero"], "init must be one of"),
    (["--insert", "se@post", "--freeze", "stages=4"], "must be at most stages=3"),
]


@pytest.mark.parametrize(("flags", "named"), BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_a_bad_insertion_is_one_error_before_data_and_training(tmp_path, flags, named):
    """The data would be an error too, and are not reached."""
    done = launch(*flags, "--data", "folder:/nowhere", "--out", tmp_path / "run", ok=False)
    assert done.returncode != 0
    assert named in done.stderr[-1500:]
    assert "/nowhere" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_last_batch_of_one_is_refused_before_training(tmp_path):
    """Case C5: 1437 = 4 * 359 + 1, and 4x4 images leave one value a channel."""
    flags = ["--img-size", "4", "--batch-size", "359", "--out", tmp_path / "run"]
    done = launch(*flags, ok=False)
    assert done.returncode != 0
    assert "take batch_size 360" in done.stderr[-1500:]
    assert not (tmp_path / "run").exists()


def test_help_lists_its_flags():
    done = launch("--help")
    own = ("--insert", "--init", "--gates", "--mixup", "--freeze", "--head-lr")
    for flag in (*own, "--model", "--pretrained", "--resume"):
        assert flag in done.stdout, flag
