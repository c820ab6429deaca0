"""Launches the recipes as a user would: one and two processes, interrupted, resumed, mistyped."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import zoo

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--epochs", "2", "--warmup-epochs", "1", "--batch-size", "128", "--log-every", "1"]


def environ(threads: int = 1, **more: str) -> dict[str, str]:
    clean = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "TORCHELASTIC"))
    }
    return {**clean, "OMP_NUM_THREADS": str(threads), **more}


def command(recipe: str, *args: str | Path, processes: int = 1) -> tuple[list[str], dict[str, str]]:
    words = [str(ROOT / "recipes" / recipe), *map(str, args)]
    if processes == 1:
        return [sys.executable, *words], environ()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc_per_node={processes}", *words], environ(ACCELERATE_USE_CPU="true")


def launch(recipe: str, *args: str | Path, processes: int = 1, ok: bool = True, cwd=None):
    words, env = command(recipe, *args, processes=processes)
    done = subprocess.run(words, env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
    if ok:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def rows(folder: Path, name: str) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def same_weights(one: Path, two: Path) -> bool:
    first, second = (load_file(folder / "model/model.safetensors") for folder in (one, two))
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted run, with everything that draws random numbers turned on."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    launch("train_vit.py", *SMALL, *RANDOM, "--out", folder)
    return folder


RANDOM = ["--drop-path-rate", "0.2", "--cutmix", "1.0", "--ema", "--grad-accumulation", "2"]


def test_a_run_folder_has_what_the_contract_says(whole):
    for name in ("config.json", "metrics.jsonl", "summary.json", "checkpoints/best.pt"):
        assert (whole / name).is_file(), name
    assert {p.name for p in (whole / "model").iterdir()} >= {"model.safetensors", "model.json"}
    found = summary(whole)
    assert found["recipe"] == "train_vit"
    assert found["data"] == "digits"
    assert found["status"] == "completed"
    assert (found["epochs"], found["steps"]) == (2, 12)
    assert found["metrics"]["val/n"] == 360
    assert 0 <= found["metrics"]["val/top1"] <= 100
    assert found["samples_per_second"] > 0
    assert found["images"]["skipped"] == 0
    assert len(rows(whole, "train/loss")) == 12
    card = json.loads((whole / "model/model.json").read_text())
    assert card["class_names"] == [str(i) for i in range(10)]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_and_resumed_is_the_same_run_bit_for_bit(whole, tmp_path, how):
    """Cases E5, E7, E14: stopped in the middle of the second epoch."""
    flags = [*SMALL, *RANDOM, "--out", str(tmp_path / "run")]
    words, env = command("train_vit.py", *flags)
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"step": 8' in metrics.read_text()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(how)
    out, err = process.communicate(timeout=60)
    if how == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    elif summary(tmp_path / "run")["status"] == "completed":
        pytest.skip("the run was over before the signal arrived")
    else:
        assert process.returncode == 128 + how, err
        assert f"--out {tmp_path / 'run'} --resume auto" in out
        assert summary(tmp_path / "run")["status"] == "interrupted"
        assert summary(tmp_path / "run")["steps"] in (8, 9, 10, 11)
    launch("train_vit.py", *flags, "--resume", "auto")
    assert same_weights(whole, tmp_path / "run")
    for name in ("train/loss", "train/lr", "train/grad_norm", "val/top1", "val/loss"):
        assert rows(whole, name) == rows(tmp_path / "run", name), name


@pytest.mark.parametrize(
    "flags", [[], ["--mixup", "0.4", "--cutmix", "1.0", "--grad-accumulation", "3", "--ema"]]
)
def test_two_processes_are_one_with_twice_the_batch(tmp_path, flags):
    """Cases E1, E13, E14: same losses, rates, counts, and one run."""
    shared = ["--epochs", "2", "--warmup-epochs", "1", "--log-every", "1", *flags]
    launch("train_vit.py", *shared, "--batch-size", "128", "--out", tmp_path / "one")
    done = launch(
        "train_vit.py", *shared, "--batch-size", "64", "--out", tmp_path / "two", processes=2
    )
    assert done.stdout.count("epoch 1/2") == 1, "printed once"
    for name in ("train/loss", "train/epoch_loss", "val/loss", "train/lr"):
        one, two = rows(tmp_path / "one", name), rows(tmp_path / "two", name)
        assert two == pytest.approx(one, abs=1e-5), name
    assert rows(tmp_path / "two", "val/n") == [360, 360]
    assert rows(tmp_path / "two", "val/top1") == rows(tmp_path / "one", "val/top1")
    assert summary(tmp_path / "two")["steps"] == summary(tmp_path / "one")["steps"]


def test_two_processes_resume_bit_for_bit(tmp_path):
    """Also case E12: drop-path, gradient checkpointing and compilation off the beaten track."""
    flags = [*SMALL, "--drop-path-rate", "0.2", "--grad-checkpointing", "--checkpoint-every", "7"]
    launch("train_vit.py", *flags, "--out", tmp_path / "whole", "--keep", "9", processes=2)
    launch("train_vit.py", *flags, "--out", tmp_path / "cut", "--keep", "9", processes=2)
    for path in (tmp_path / "cut/checkpoints").glob("step_*.pt"):
        if path.name > "step_00000007.pt":
            path.unlink()
    launch(
        "train_vit.py",
        *flags,
        "--out",
        tmp_path / "cut",
        "--resume",
        "auto",
        "--keep",
        "9",
        processes=2,
    )
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    steps = rows(tmp_path / "cut", "step")
    assert steps == sorted(steps)
    assert len(rows(tmp_path / "cut", "val/top1")) == 2


def test_a_timm_model_is_fine_tuned_on_two_processes_as_on_one(tmp_path):
    """Case E12: frozen blocks, rates by layer and of the head, recomputed blocks, drop-path."""
    torch.manual_seed(0)
    trained = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7).state_dict()
    torch.save(trained, tmp_path / "trained.pt")
    shared = [
        *SMALL, "--epochs", "1", "--warmup-epochs", "0", "--model", "timm:vit_tiny_patch16_224",
        "--img-size", "32", "--pretrained", f"file:{tmp_path / 'trained.pt'}", "--freeze",
        "stages=10", "--layer-decay", "0.7", "--head-lr", "0.01", "--grad-checkpointing",
    ]  # fmt: skip
    launch("train_vit.py", *shared, "--batch-size", "256", "--out", tmp_path / "one")
    done = launch("train_vit.py", *shared, "--out", tmp_path / "two", processes=2)
    assert done.stdout.count("of the values matched") == 1, "the report is printed once"
    for name in ("train/loss", "val/loss"):
        one, two = rows(tmp_path / "one", name), rows(tmp_path / "two", name)
        assert two == pytest.approx(one, abs=1e-5), name
    found = summary(tmp_path / "two")
    state = load_file(tmp_path / "two/model/model.safetensors")
    still = {key for key in state if key in trained and torch.equal(state[key], trained[key])}
    first = ("cls_token", "pos_embed", *(f"blocks.{i}." for i in range(10)))
    assert still == {key for key in state if key.startswith(first)} | {"patch_embed.proj.bias"}
    learned = sum(v.numel() for k, v in state.items() if k not in still)
    assert found["trainable_params"] == learned - state["patch_embed.proj.weight"].numel()
    again = zoo.create_model(f"local-dir:{tmp_path / 'two/model'}")
    assert isinstance(again, timm.models.VisionTransformer)
    assert again.card.class_names == tuple(str(i) for i in range(10))


LOOKS = ["--save-attention-every", "3"]


def looks(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "attention").iterdir()}


def numbers(folder: Path) -> list[dict]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in found if any(name.startswith("attn/") for name in row)]


@pytest.fixture(scope="module")
def watched(tmp_path_factory) -> Path:
    """The run of `whole`, looked at every three updates."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    launch("train_vit.py", *SMALL, *RANDOM, *LOOKS, "--checkpoint-every", "5", "--out", folder)
    return folder


def test_looking_inside_changes_nothing_and_is_logged(whole, watched):
    assert same_weights(whole, watched)
    for name in ("train/loss", "train/grad_norm", "val/loss"):
        assert rows(watched, name) == rows(whole, name)
    found = numbers(watched)
    assert [row["step"] for row in found] == [3, 6, 9, 12]
    assert 0 < found[0]["attn/blocks.0.attn/entropy"] <= 1
    steps = [f"step{step:06d}.{kind}" for step in (3, 6, 9, 12) for kind in ("png", "safetensors")]
    assert sorted(looks(watched)) == ["images.safetensors", "over_time.png", *steps]
    assert max(len(content) for content in looks(watched).values()) < 200_000


def test_looks_of_a_resumed_run_are_those_of_an_uninterrupted_one(watched, tmp_path):
    folder = tmp_path / "run"
    flags = [*SMALL, *RANDOM, "--checkpoint-every", "5", "--keep", "9", "--out", folder]
    launch("train_vit.py", *flags, *LOOKS)
    for path in (folder / "checkpoints").glob("*.pt"):
        if path.name > "step_00000005.pt":
            path.unlink()
    launch("train_vit.py", *flags, *LOOKS, "--resume", "auto")
    assert looks(folder) == looks(watched)
    assert numbers(folder) == numbers(watched)


def test_two_processes_look_once(tmp_path):
    flags = [*SMALL, "--epochs", "1", "--warmup-epochs", "0", "--grad-checkpointing"]
    done = launch("train_vit.py", *flags, *LOOKS, "--out", tmp_path / "run", processes=2)
    launch("train_vit.py", *flags, "--out", tmp_path / "plain", processes=2)
    assert same_weights(tmp_path / "run", tmp_path / "plain")
    assert [row["step"] for row in numbers(tmp_path / "run")] == [3, 6]
    assert len(list((tmp_path / "run/attention").glob("step*.png"))) == 2
    told = [line for line in done.stderr.splitlines() if line.startswith("alarm at")]
    assert len(told) == len(set(told)), "said once"


@pytest.mark.parametrize("processes", [1, 2])
def test_an_alarm_stops_a_run_that_asks_for_it_and_resuming_goes_on(tmp_path, processes):
    """Attention weights far too sharp: the temperature is a thousandth."""
    flags = [*SMALL, "--epochs", "1", "--warmup-epochs", "0", "--temperature", "0.001", "--out",
             tmp_path / "run", "--save-attention-every", "1", "--stop-on-alarm"]  # fmt: skip
    done = launch("train_vit.py", *flags, processes=processes, ok=False)
    assert "alarm at step" in done.stderr
    assert summary(tmp_path / "run")["status"] == "stopped by alarm"
    if processes == 1:
        assert done.returncode == 3
    assert "needs a new run" in done.stdout
    assert "--stop-on-alarm" not in done.stdout, "it would stop again"
    assert "--resume auto" in done.stdout
    stopped = summary(tmp_path / "run")["steps"]
    told = (tmp_path / "run/alarms.jsonl").read_text()
    launch("train_vit.py", *flags, "--resume", "auto", processes=processes, ok=False)
    again = (tmp_path / "run/alarms.jsonl").read_text()
    assert again.startswith(told)
    keys = [(row["kind"], row["layer"], row["head"]) for row in map(json.loads, again.splitlines())]
    assert len(set(keys)) == len(keys), "no alarm twice"
    assert summary(tmp_path / "run")["steps"] > stopped


def test_a_model_without_attention_is_refused_before_it_trains(tmp_path):
    flags = ["--model", "timm:resnet18", "--img-size", "32", "--out", tmp_path / "run"]
    done = launch("train_vit.py", *SMALL, *flags, *LOOKS, ok=False)
    assert done.returncode != 0
    assert "save_attention_every (3) needs attention or gates" in done.stderr
    assert "timm:resnet18: it has none" in done.stderr
    assert not (tmp_path / "run").exists()


def test_remedies_reach_the_model_and_the_loss(tmp_path):
    flags = [*SMALL, "--epochs", "1", "--warmup-epochs", "0", "--lr", "0"]
    launch(
        "train_vit.py", *flags, "--attn-drop", "0.1", "--qk-norm", "True", "--out", tmp_path / "a"
    )
    options = json.loads((tmp_path / "a/model/model.json").read_text())["options"]
    assert (options["attn_drop_rate"], options["qk_norm"]) == (0.1, True)
    launch("train_vit.py", *flags, "--out", tmp_path / "plain")
    plain = rows(tmp_path / "plain", "train/loss")
    for flag, sign in (("--head-penalty", 1), ("--entropy-bonus", -1)):
        launch("train_vit.py", *flags, flag, "0.5", "--out", tmp_path / flag)
        terms = [
            sign * (b - a) for a, b in zip(plain, rows(tmp_path / flag, "train/loss"), strict=True)
        ]
        assert all(0 < term <= 0.5 for term in terms), flag
    done = launch("train_vit.py", "--head-penalty", "-1", "--out", tmp_path / "bad", ok=False)
    assert "head_penalty (-1.0) must be at least 0" in done.stderr


def test_asking_for_two_and_getting_one_is_said(tmp_path):
    words = [
        sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2",
        str(ROOT / "recipes/train_vit.py"), "--epochs", "1", "--out", str(tmp_path / "run"),
    ]  # fmt: skip
    done = subprocess.run(words, env=environ(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 processes were asked for and 1 was started" in done.stderr


def test_processes_that_do_not_know_of_each_other_are_refused(tmp_path):
    words, env = command("train_vit.py", "--out", tmp_path / "run")
    done = subprocess.run(
        words,
        env={**env, "WORLD_SIZE": "2", "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert not (tmp_path / "run").exists()


def test_evaluate_reports_what_training_did(whole, tmp_path):
    for model, more in ((whole, []), (f"local-dir:{whole / 'model'}", ["--data", "digits"])):
        done = launch("evaluate.py", "--model", model, *more, "--out", tmp_path / "report.json")
        report = json.loads((tmp_path / "report.json").read_text())
        for name, value in summary(whole)["metrics"].items():
            assert report["metrics"][name] == pytest.approx(value, abs=1e-4), name
        low, high = report["val/top1_interval"]
        assert low < report["metrics"]["val/top1"] < high
        assert sum(row["n"] for row in report["classes"]) == 360
        assert "95 % interval" in done.stdout


def test_evaluate_on_two_processes_counts_each_image_once(whole, tmp_path):
    launch("evaluate.py", "--model", whole, "--out", tmp_path / "r.json", processes=2)
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["metrics"]["val/n"] == 360
    assert report["metrics"]["val/top1"] == summary(whole)["metrics"]["val/top1"]


def image_folder(root: Path) -> Path:
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for split, n in (("train", 12), ("val", 4)):
        for label, name in enumerate(("cat", "dog", "fox")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(n):
                noise = torch.randint(0, 80, (40, 40, 3), generator=generator, dtype=torch.uint8)
                noise[..., label] += 120
                Image.fromarray(noise.numpy()).save(folder / f"{i}.png")
    return root


def test_a_folder_of_images_with_workers_and_all_options(tmp_path):
    folder = image_folder(tmp_path / "data")
    (folder / "train/cat/broken.jpg").write_bytes(b"")
    flags = [
        "--data", f"folder:{folder}", "--model", "vit_micro_patch4_32", "--img-size", "48", "96",
        "--epochs", "2", "--warmup-epochs", "0", "--batch-size", "5", "--workers", "2",
        "--policy", "trivialaugment", "--compile", "--layer-decay", "0.7", "--bad-images", "skip",
        "--tracker", "tensorboard",
    ]  # fmt: skip
    launch("train_vit.py", *flags, "--out", tmp_path / "run")
    found = summary(tmp_path / "run")
    assert found["images"]["skipped"] == 1
    assert found["metrics"]["val/n"] == 12
    assert "val/top2" in found["metrics"]
    done = launch("evaluate.py", "--model", tmp_path / "run", "--bad-images", "skip")
    assert "fox" in done.stdout
    stop = launch("evaluate.py", "--model", tmp_path / "run", "--data", "digits", ok=False)
    assert stop.returncode != 0
    assert "cat" in stop.stderr


BAD = [
    (["--model", "vit_micro_patch2_9"], "vit_micro_patch2_8"),
    (["--data", "digit"], "digits"),
    (["--data", "folder:/nowhere"], "/nowhere"),
    (["--img-size", "9"], "patch"),
    (["--epochs", "0"], "epochs"),
    (["--lerning-rate", "1"], "lerning-rate"),
    (["--pretrained", "local-dir:/nowhere"], "/nowhere"),
    (["--tracker", "comet_ml"], "comet_ml"),
    (["--freeze", "stages=5"], "must be at most stages=4, the depth of VisionTransformer"),
    (["--freeze", "head"], "none, backbone, stages=N, but-norms, but-biases"),
    (["--model", "timm:vit_tiny_patch16_224", "--attention", "window"], "attention"),
]


@pytest.mark.parametrize(("flags", "named"), BAD, ids=[" ".join(flags) for flags, _ in BAD])
def test_a_mistake_is_named_and_leaves_nothing_behind(tmp_path, flags, named):
    done = launch("train_vit.py", *flags, "--out", tmp_path / "run", ok=False)
    assert done.returncode != 0
    said = " ".join(re.sub(r"[^ -~]", " ", done.stderr).split())  # without box and line breaks
    assert named in said[-1500:]
    assert not (tmp_path / "run").exists()


FLAGS = """--model --data --out --epochs --batch-size --lr --weight-decay --warmup-epochs --seed
    --resume --pretrained --ema --grad-accumulation --grad-checkpointing --compile --workers
    --tracker --freeze --layer-decay --head-lr"""


def test_help_lists_the_shared_flags_and_is_quick():
    start = time.perf_counter()
    done = launch("train_vit.py", "--help")
    seconds = time.perf_counter() - start
    for flag in FLAGS.split():
        assert flag in done.stdout, flag
    assert seconds < 30, "far above what it takes; the figure itself is measured, not tested"


def test_a_signal_to_the_whole_group_saves_with_workers(tmp_path):
    """As systemd, schedulers and timeout send it: the workers must outlive the last step."""
    flags = [*SMALL, "--epochs", "50", "--workers", "2", "--out", str(tmp_path / "run")]
    words, env = command("train_vit.py", *flags)
    process = subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    metrics = tmp_path / "run/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"step": 8' in metrics.read_text()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert err.count("stopping after this step") == 1
    assert summary(tmp_path / "run")["status"] == "interrupted"
    assert (tmp_path / "run/model/model.json").exists()


def test_attention_flags_reach_the_model_and_a_schedule_resumes(tmp_path):
    """Kind, position, heads and a temperature that changes with every update, bit for bit."""
    flags = [
        *SMALL,
        "--attention",
        "window",
        "--attention-options",
        "window",
        "2,3",
        "shift",
        "true",
    ]
    flags += ["--position", "rope", "--num-heads", "2", "--head-dim", "16", "--ema"]
    flags += ["--temperature", "2:0.5"]
    launch("train_vit.py", *flags, "--out", tmp_path / "whole")
    options = json.loads((tmp_path / "whole/model/model.json").read_text())["options"]
    assert (options["attention"], options["attention_options"]) == (
        "window",
        {"window": [2, 3], "shift": True},
    )
    assert (options["num_heads"], options["head_dim"], options["position"]) == (2, 16, "rope")
    assert options["temperature"] == 0.5
    launch("train_vit.py", *flags, "--out", tmp_path / "cut")
    kept = sorted((tmp_path / "cut/checkpoints").glob("step*"))
    kept[-1].unlink()  # as if killed in the second epoch
    (tmp_path / "cut/checkpoints/best.pt").unlink(missing_ok=True)
    launch("train_vit.py", *flags, "--out", tmp_path / "cut", "--resume", "auto")
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    losses = rows(tmp_path / "whole", "val/loss")
    assert losses == rows(tmp_path / "cut", "val/loss")
    first = min(path.stem for path in (tmp_path / "whole/checkpoints").glob("step*"))
    more = ["--checkpoint", first, "--out", tmp_path / "first.json"]
    launch("evaluate.py", "--model", tmp_path / "whole", *more)
    again = json.loads((tmp_path / "first.json").read_text())["metrics"]["val/loss"]
    assert again == pytest.approx(losses[0], abs=1e-5), "with the temperature of its epoch"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--attention", "windo"], "did you mean 'window'"),
        (["--attention", "window", "--attention-options", "windows", "3"], "windows"),
        (["--attention", "linear", "--position", "relative"], "no scores to add a bias to"),
        (["--temperature", "hot"], "temperature 'hot'"),
        (["--temperature", "2:1", "--compile"], "compile"),
        (["--num-heads", "3"], "num_heads (3)"),
        (["--position", "rope", "--head-dim", "6"], "head_dim (6)"),
    ],
)
def test_attention_mistakes_stop_before_training(tmp_path, flags, words):
    done = launch("train_vit.py", *flags, "--out", tmp_path / "run", ok=False)
    assert done.returncode != 0
    assert words in done.stderr
    assert not (tmp_path / "run/checkpoints").exists()
