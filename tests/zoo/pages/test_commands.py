"""Commands of a run, read back by a shell's rules."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from zoo.engine import TrainOptions
from zoo.pages.commands import commands, differing

OWN = ["--data", "folder:my images", "--epochs", "3"]


def config(**changes: Any) -> dict[str, Any]:
    words = ["recipes/train_vit.py", *OWN, "--out=runs/x", "--resume", "auto", "--ema"]
    options = {"data": "folder:my images", "epochs": 3, "out": "runs/x", "ema": True, "lr": 0.1}
    found = {
        "recipe": "train_vit", "command": words, "processes": 1, "options": options,
        "hardware": {"device": "cpu", "precision": "no"},
    }  # fmt: skip
    return {**found, **changes}


def test_commands_name_the_folder_and_keep_the_flags() -> None:
    found = {what: shlex.split(line) for what, line in commands(config(), Path("runs/x y")).items()}
    start = ["accelerate", "launch", "recipes/train_vit.py", *OWN, "--ema"]
    assert found["Resume"] == [*start, "--out", "runs/x y", "--resume", "auto"]
    assert found["Repeat"] == [*start, "--out", "runs/x y-again"]
    assert found["Evaluate"][2:] == ["recipes/evaluate.py", "--model", "runs/x y"]
    assert found["Predict"][:2] == ["python", "recipes/predict.py"]
    assert found["Explore its attention"][1] == "recipes/inspect_attention.py"


def test_models_of_pairs_have_their_own_evaluation() -> None:
    words = ["recipes/train_crossmodal.py"]
    found = commands(config(recipe="train_crossmodal", command=words), Path("x"))
    assert "recipes/evaluate_crossmodal.py" in found["Evaluate"]
    assert "Predict" not in found


@pytest.mark.parametrize(
    ("processes", "device", "precision", "start"),
    [
        (1, "cuda", "bf16", "accelerate launch --mixed_precision bf16 "),
        (2, "cpu", "no", "ACCELERATE_USE_CPU=true torchrun --nproc_per_node 2 "),
        (4, "cuda", "no", "torchrun --nproc_per_node 4 "),
        (4, "cuda", "fp16", "ACCELERATE_MIXED_PRECISION=fp16 torchrun --nproc_per_node 4 "),
    ],
)
def test_launchers(processes: int, device: str, precision: str, start: str) -> None:
    hardware = {"device": device, "precision": precision}
    found = commands(config(processes=processes, hardware=hardware), Path("x"))
    for what in ("Repeat", "Resume", "Evaluate"):
        assert found[what].startswith(f"{start}recipes/")


def test_a_run_started_by_another_program_is_repeated_by_its_options() -> None:
    defaults = TrainOptions().to_json()
    options = {**defaults, "epochs": 3, "ema": True, "img_size": [32, 64], "insert": ["se@pre"]}
    own = config(command=["/usr/bin/pytest", "-q"], options=options, defaults=defaults)
    words = shlex.split(commands(own, Path("x"))["Repeat"])
    assert words[2] == "recipes/train_vit.py"
    asked = ["--epochs", "3", "--ema", "--img-size", "32", "64", "--insert", "se@pre"]
    assert words[3:-2] == asked
    assert "--lr" in shlex.split(commands({**own, "defaults": None}, Path("x"))["Repeat"])


def test_what_differs_from_the_defaults() -> None:
    assert differing(config()) == {"data": "folder:my images", "epochs": 3, "ema": True}
    assert differing(config(defaults={"data": "digits", "epochs": 3, "ema": True})) == {
        "data": "folder:my images",
        "lr": 0.1,
    }
    assert differing(config(command=["pytest"])) is None


def test_nothing_is_made_up() -> None:
    assert commands({}, Path("x")) == {}
