"""Which attention, where, and is it worth it? Kinds x positions x heads x seeds, with baselines.

Command:
    python recipes/ablate_attention.py --out ablations/attention
    python recipes/ablate_attention.py --out ablations/attention --plan

Trains every variant with every seed (`recipes/train_vit.py`, two at a time on one thread each) and
writes results.jsonl, table.csv, table.md, effects.png and report.html. `identity` (no token sees
another) and `mean` (average pooling) are always among the kinds: attention is worth its price where
it beats them. Interrupted, the same command goes on.

Expected: see RESULTS.md.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch

import vision
import zoo
from vision.classify import random_images, training_step
from zoo.ablation import (
    AblationOptions,
    Plan,
    Report,
    Variant,
    describe,
    report,
    run_cells,
    seconds_of_cell,
    split_commas,
)
from zoo.diagnostics.cost import count_flops, in_turn, peak_bytes
from zoo.engine import cli

BASELINES = ("mean", "identity")
BY_TOKEN = ("none", "learned", "sincos")  # positions that are added to the tokens
LISTS = ("kinds", "positions", "heads")  # flags that take a,b as well as a b
QUESTION = "Which attention, and is it worth it?"

Position = Literal["none", "learned", "sincos", "relative", "rope", "prior"]


@dataclass(frozen=True)
class Config(AblationOptions):
    """Compares kinds of attention, positions and numbers of heads."""

    model: str = "vit_micro_patch2_8"
    """A Vision Transformer of ours."""
    epochs: int = 30
    lr: float = 2e-3
    kinds: tuple[str, ...] = ("full", "additive", "window", "linear", "performer")
    """Attention kinds; the baselines are added."""
    positions: tuple[Position, ...] = ("learned",)
    """What tells the places of the tokens."""
    heads: tuple[int, ...] = ()
    """Numbers of heads; the model's own by default."""


def main(config: Config) -> Report | None:
    torch.set_num_threads(config.threads)
    data = vision.load_dataset(config.data)
    variants, models = build(config, data)
    plan = Plan(
        recipe=Path(__file__).with_name("train_vit.py"),
        variants=variants,
        seeds=range(config.seeds),
        flags=config.flags(),
        baselines=BASELINES,
        question=QUESTION,
    )
    steps = config.epochs * (len(data.train) + len(data.val) / 3) / config.batch_size
    step = training_step(models[plan.names[0]], config.batch_size)
    print(describe(plan, config.out, config.workers, lambda: seconds_of_cell(step, steps)))
    if config.plan:
        return None
    run_cells(plan, config.out, workers=config.workers, threads=config.threads)
    done = report(plan, config.out, extra=costs(models))
    print((Path(config.out) / "table.md").read_text())
    return done


def build(config: Config, data: Any) -> tuple[list[Variant], dict[str, Any]]:
    """The variants and a model of each; combinations that cannot be are left out, and said.

    Each is compared with baselines of its own positions. These have no scores, so that heads and
    positions that act on scores (rope, relative, prior) are nothing to them: they go without.
    """

    def model(flags: dict[str, Any]) -> Any:
        return zoo.create_model(
            config.model, class_names=data.class_names, in_chans=data.in_chans, **flags
        )

    wanted = [kind for kind in dict.fromkeys(config.kinds) if kind not in BASELINES]
    variants: dict[str, Variant] = {}
    models: dict[str, Any] = {}
    for kind, position, heads in product(wanted, config.positions, config.heads or (None,)):
        name = _name(config, kind, position, heads)
        flags: dict[str, Any] = {"attention": kind, "position": position}
        flags |= {"num_heads": heads} if heads else {}
        try:
            models[name] = model(flags)
        except ValueError as error:
            if kind not in zoo.layers.list_attention():
                raise
            print(f"left out: {name}: {error}", file=sys.stderr)
            continue
        own = position if position in BY_TOKEN else "none"
        names = {each: _name(config, each, own) for each in BASELINES}
        for each, known in names.items():
            if known not in variants:
                of_baseline = {"attention": each, "position": own}
                others = {other: names[other] for other in BASELINES if other != each}
                variants[known] = Variant(known, of_baseline, others)
                models[known] = model(of_baseline)
        variants[name] = Variant(name, flags, names)
    if not variants:
        raise ValueError(f"nothing is left of kinds {config.kinds}: see what was left out")
    return list(variants.values()), models


def _name(config: Config, kind: str, position: str, heads: int | None = None) -> str:
    told = set(config.positions) != {position}
    parts = [kind, *([position] if told or len(config.positions) > 1 else [])]
    return ", ".join([*parts, *([f"{heads} heads"] if heads else [])])


def costs(models: dict[str, Any], batch: int = 64) -> dict[str, dict[str, object]]:
    """Parameters, operations, memory and speed of each variant's training step, timed in turn."""
    steps = {name: training_step(model, batch) for name, model in models.items()}
    times = in_turn(steps)
    return {
        name: {
            "parameters": sum(p.numel() for p in model.parameters()),
            "MFLOPs an image": round(
                count_flops(model, random_images(model, batch)) / batch / 1e6, 2
            ),
            "peak MiB in training": round(peak_bytes(steps[name]) / 2**20, 1),
            "images/s in training": round(batch / median(times[name])),
        }
        for name, model in models.items()
    }


if __name__ == "__main__":
    cli(main, Config, split_commas(sys.argv[1:], LISTS))
