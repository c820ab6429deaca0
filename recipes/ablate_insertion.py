"""Which channel attention, where, and is it worth it? Kinds x sites x stages x ratios x seeds.

Command:
    python recipes/ablate_insertion.py --out ablations/insertion
    python recipes/ablate_insertion.py --out ablations/insertion --plan
    python recipes/ablate_insertion.py --out ablations/emoji --data emoji --kinds se,eca,cbam
        --sites standard,pre --stages all,1,2+3 --rd-ratios 1/4,1/16 --seeds 5

Trains every variant with every seed (`recipes/train_cnn.py`, several at a time on one thread each)
and writes results.jsonl, table.csv, table.md, effects.png and report.html. Interrupted, the same
command goes on. A seed gives all variants the same first weights of the host, the same order of
images and the same augmentation: what is inserted is the only difference.

Each variant is compared with two baselines:
    none      the host alone: is it worth it?
    constant  a learned gate that ignores its input, at the same site, in the same stages and with
              the same ratio, with the parameters of `se` there: is it attention that helps? Kinds
              without a ratio are compared with the constant gate of the first ratio.

Expected of `--data emoji`: see RESULTS.md; no difference shown at n = 3.

Wall time against the same cells one after another, each on two threads: both say it at the end.
    python recipes/ablate_insertion.py --out a --workers 2 --threads 1
    python recipes/ablate_insertion.py --out b --workers 1 --threads 2
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import vision
import zoo
from vision.channel_attention import channel_attention_options
from vision.classify import random_images, training_step
from vision.insertion import Insertion, insert, remove_insertions
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
from zoo.diagnostics.cost import count_flops, in_turn, ratio_of_medians
from zoo.engine import cli

BASELINES = ("none", "constant")
LISTS = ("kinds", "sites", "stages", "rd_ratios")  # flags that take a,b as well as a b
QUESTION = "Which channel attention, where, and is it worth it?"


@dataclass(frozen=True)
class Config(AblationOptions):
    """Compares kinds and places of channel attention in a CNN."""

    model: str = "resnet_micro"
    """A CNN, as for train_cnn.py: ours, timm:NAME or torchvision:NAME."""
    epochs: int = 20
    lr: float = 4e-3
    pretrained: str | None = None
    """Weights that all variants start from, as for train_cnn.py."""
    img_size: int | None = None
    """Rows and columns of the images; the model's own by default."""
    kinds: tuple[str, ...] = ("se", "eca")
    """Kinds of channel attention; the baselines are added."""
    sites: tuple[str, ...] = ("standard", "pre", "post", "identity")
    """Places, see `vision.insertion_sites`."""
    stages: tuple[str, ...] = ("all",)
    """all, a number from 1, or several as 1+2."""
    rd_ratios: tuple[str, ...] = ()
    """Bottleneck ratios such as 1/16, for kinds that have one; each kind's own by default."""
    init: Literal["paper", "identity"] = "paper"
    """How modules start: as published, or as the identity."""


def main(config: Config) -> Report | None:
    torch.set_num_threads(config.threads)
    data = vision.load_dataset(config.data)

    def host() -> Any:
        return zoo.create_model(
            config.model,
            class_names=data.class_names,
            in_chans=data.in_chans,
            img_size=config.img_size,
        )

    modules = legal(list(grid(config)), host())
    plan = make_plan(config, modules)
    steps = config.epochs * (len(data.train) + len(data.val) / 3) / config.batch_size
    step = training_step(host(), config.batch_size)
    print(describe(plan, config.out, config.workers, lambda: seconds_of_cell(step, steps)))
    if config.plan:
        return None
    run_cells(plan, config.out, workers=config.workers, threads=config.threads)
    note = (
        "Latency: forward pass of one image, median time over that of none, measured in turn "
        f"(threads: {config.threads}, 95 % bootstrap interval)."
    )
    done = report(plan, config.out, costs(plan, host), figure=BASELINES, note=note)
    print((Path(config.out) / "table.md").read_text(encoding="utf-8"))
    return done


# What is compared

Pair = tuple[Insertion, Insertion]  # a module, and the constant gate it is compared with


def grid(config: Config) -> Iterator[Pair]:
    """Every combination that was asked for, legal or not."""
    kinds = [kind for kind in dict.fromkeys(config.kinds) if kind not in BASELINES]
    if not kinds:
        raise ValueError(f"kinds {config.kinds} must name a module beside the baselines")
    for kind, site, stages in product(kinds, config.sites, map(_stages, config.stages)):
        Insertion(kind, site)  # a name that no site has is refused, not left out
        has_ratio = "rd_ratio" in channel_attention_options(kind)
        options: list[dict[str, float]] = [{"rd_ratio": _ratio(r)} for r in config.rd_ratios]
        for each in (options or [{}])[: None if has_ratio else 1]:
            yield (
                Insertion(kind, site, stages, init=config.init, options=each if has_ratio else {}),
                Insertion("constant", site, stages, init=config.init, options=each),
            )


def _stages(text: str) -> str | tuple[int, ...]:
    if text == "all":
        return text
    parts = text.split("+")
    if not all(part.isdigit() for part in parts):
        raise ValueError(f"stages ({text}) must be all, a number, or numbers as in 1+2")
    return tuple(map(int, parts))


def _ratio(text: str) -> float:
    try:
        ratio = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ValueError(f"rd_ratios ({text}) must be numbers above 0, at most 1, such as 1/16")
    return ratio


def legal(pairs: list[Pair], host: nn.Module) -> list[Pair]:
    """The pairs that the host has a place for; the others are left out, and said."""
    reasons: dict[Insertion, str] = {}
    for each in dict.fromkeys(insertion for pair in pairs for insertion in pair):
        try:
            insert(host, each)
        except ValueError as error:
            reasons[each] = str(error).removeprefix(f"{each}: ")
        remove_insertions(host)
    for reason in dict.fromkeys(reasons.values()):
        alike = [str(each) for each, own in reasons.items() if own == reason]
        print(f"left out: {', '.join(alike)}: {reason}", file=sys.stderr)
    kept = [pair for pair in pairs if not reasons.keys() & set(pair)]
    if not kept:
        raise ValueError("nothing is left to compare: see what was left out")
    return kept


def make_plan(config: Config, modules: list[Pair]) -> Plan:
    """Host, then site by site the constant gate and the modules that are compared with it."""
    variants = {"none": Variant("none")}
    for constant in dict.fromkeys(constant for _, constant in modules):
        variants[str(constant)] = _variant(constant, {})
        for module in (module for module, own in modules if own == constant):
            variants[str(module)] = _variant(module, {"constant": str(constant)})
    return Plan(
        recipe=Path(__file__).with_name("train_cnn.py"),
        variants=list(variants.values()),
        seeds=range(config.seeds),
        flags=config.flags("pretrained", "img_size"),
        baselines=BASELINES,
        question=QUESTION,
    )


def _variant(insertion: Insertion, baselines: dict[str, str]) -> Variant:
    return Variant(str(insertion), {"insert": [str(insertion)]}, baselines)


# What it costs


def costs(plan: Plan, host: Callable[[], Any]) -> dict[str, dict[str, object]]:
    """Parameters, operations and latency of each variant; its latency in turn with the host's."""
    torch.manual_seed(0)
    plain = host().eval()
    image = random_images(plain, 1)
    found = {}
    for variant in plan.variants:
        model = host().eval()
        insert(model, *variant.flags.get("insert", ()))  # type: ignore[misc]
        found[variant.name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "MFLOPs an image": round(count_flops(model, image) / 1e6, 3),
            **(_latency(model, plain, image) if variant.name != "none" else {}),
        }
    return found


def _latency(model: nn.Module, plain: nn.Module, image: torch.Tensor) -> dict[str, object]:
    with torch.inference_mode():
        times = in_turn({"own": lambda: model(image), "none": lambda: plain(image)}, repeats=51)
    ratio, (low, high) = ratio_of_medians(times["own"], times["none"])
    return {"latency vs none": round(ratio, 3), "latency interval": f"{low:.3f} to {high:.3f}"}


if __name__ == "__main__":
    cli(main, Config, split_commas(sys.argv[1:], LISTS))
