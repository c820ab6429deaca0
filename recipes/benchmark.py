"""Times our code against its peers, in turn, in one process: ratios with intervals.

Command:
    python recipes/benchmark.py
    python recipes/benchmark.py --suite input --data folder:PATH --model vit_micro_patch4_32

Takes a minute or two each on 2 CPU cores; the figures are in the README.

A ratio is a candidate's median time over ours: above 1, ours is faster. The input suite compares an
epoch of training with a bare loop on tensors in memory. Peers that are not installed are left out.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import vision
import zoo
from zoo import engine
from zoo.engine.launch import environment
from zoo.engine.tracking import write_json
from zoo.preprocess import normalize

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Config:
    """Compares speed, in turn, in one process."""

    suite: Literal["vit", "input"] = "vit"
    """vit: train step and inference against timm, torchvision and transformers. input: an epoch of
    training against a bare loop of forward, backward and step."""
    model: str = "vit_tiny_patch16_224"
    """Name of the model."""
    data: str = "digits"
    """Data of the input suite."""
    batch_size: int = 16
    """Images per step."""
    repeats: int = 15
    """Timed rounds; in each one every candidate has its turn."""
    threads: int | None = None
    """CPU threads; torch's choice by default."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to run."""
    out: str | None = None
    """A JSON file for the numbers."""


def main(config: Config) -> dict[str, Any]:
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(0)
    suite = vit_suite if config.suite == "vit" else input_suite
    rows = suite(config)
    from accelerate import Accelerator

    report = {"suite": config.suite, "rows": rows, **environment(Accelerator())}
    show(config, rows)
    if config.out:
        write_json(Path(config.out), report)
    return report


def vit_suite(config: Config) -> list[dict[str, Any]]:
    """Train step and inference of a ViT and of its peers of the same shape."""
    ours: Any = zoo.create_model(config.model)
    models = {"zoo": ours, **peers(config.model, ours)}
    params = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    images = torch.randn(config.batch_size, 3, *ours.card.preprocessing.size, device=config.device)
    targets = torch.randint(ours.num_classes, (config.batch_size,), device=config.device)
    rows = []
    for task, make in (("train", train_step), ("infer", inference)):
        steps = {
            name: make(model.to(config.device), images, targets) for name, model in models.items()
        }
        times = in_turn(steps, config.repeats, config.device)
        rows += [row(task, name, times, params=params[name]) for name in times]
    return rows


def peers(name: str, ours: Any) -> dict[str, nn.Module]:
    """The same shape in timm, torchvision and transformers, where they are installed."""
    width, depth = ours.embed_dim, len(ours.blocks)
    heads, hidden = ours.blocks[0].attn.num_heads, ours.blocks[0].mlp.fc1.out_features
    (rows, cols), patch = ours.patch_embed.img_size, ours.patch_embed.patch_size[0]
    found: dict[str, nn.Module] = {}
    import timm
    from torchvision.models import VisionTransformer

    if timm.is_model(name):
        found["timm"] = timm.create_model(name, num_classes=ours.num_classes)
    if rows == cols:
        found["torchvision"] = VisionTransformer(
            rows, patch, depth, heads, width, hidden, num_classes=ours.num_classes
        )
    try:
        from transformers import ViTConfig, ViTForImageClassification
    except ImportError:
        return found
    shape = ViTConfig(  # type: ignore[call-arg]
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=hidden,
        image_size=rows,
        patch_size=patch,
        num_labels=ours.num_classes,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    found["transformers"] = Logits(ViTForImageClassification(shape))
    return found


class Logits(nn.Module):
    """A transformers classifier that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def train_step(model: nn.Module, images: Tensor, targets: Tensor) -> Callable[[], None]:
    """Forward, backward and AdamW step, the same optimizer for all."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        F.cross_entropy(model(images), targets).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def inference(model: nn.Module, images: Tensor, targets: Tensor) -> Callable[[], None]:
    model.eval()

    def step() -> None:
        with torch.inference_mode():
            model(images)

    return step


def in_turn(steps: dict[str, Callable[[], None]], repeats: int, device: str) -> Times:
    """Seconds of each candidate in each round; the order is drawn anew in every round."""
    times: Times = {name: [] for name in steps}
    names, order = list(steps), np.random.default_rng(0)
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats + 2):  # two rounds to warm up
            for name in order.permutation(names):
                synchronize(device)
                start = time.perf_counter()
                steps[name]()
                synchronize(device)
                if turn >= 2:
                    times[name].append(time.perf_counter() - start)
    finally:
        gc.enable()
    return times


def synchronize(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def row(task: str, name: str, times: Times, ours: str = "zoo", **extra: Any) -> dict[str, Any]:
    """Median milliseconds; ratio of medians to ours with a 95 % interval, bootstrapped by round."""
    mine, theirs = np.array(times[ours]), np.array(times[name])
    draws = np.random.default_rng(0).integers(len(mine), size=(2000, len(mine)))
    ratios = np.median(theirs[draws], axis=1) / np.median(mine[draws], axis=1)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return {
        "task": task,
        "candidate": name,
        "n": len(theirs),
        "median_ms": 1e3 * float(np.median(theirs)),
        "ratio": float(np.median(theirs) / np.median(mine)),
        "interval": [float(low), float(high)],
        **extra,
    }


def input_suite(config: Config) -> list[dict[str, Any]]:
    """A training epoch of the recipe's loop against a bare loop on tensors in memory."""
    data = vision.load_dataset(config.data)
    options: dict[str, Any] = {"num_classes": len(data.class_names), "in_chans": data.in_chans}
    card: Any = zoo.create_model(config.model, **options).card
    preprocessing = card.preprocessing
    source = vision.make_source(
        data.train, preprocessing, train=True, augment=vision.Augment(), seed=0
    )
    mix = engine.Mixing(len(data.class_names), mixup=0.2)
    steps = len(source) // config.batch_size
    images = normalize(
        source.__getitems__([(0, i) for i in range(config.batch_size)])["images"], preprocessing
    )
    targets = torch.randint(len(data.class_names), (config.batch_size,))

    def prepare_fn(batch: dict[str, Any]) -> dict[str, Any]:
        x = normalize(batch["images"], preprocessing)
        x, y = mix(x, batch["targets"], batch["epoch"], batch["index"])
        return {"images": x, "targets": y}

    def step_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return F.cross_entropy(model(batch["images"]), batch["targets"], label_smoothing=0.1)

    def whole() -> None:
        with tempfile.TemporaryDirectory() as folder:
            flags = engine.TrainOptions(
                model=config.model, data=config.data, out=f"{folder}/run", epochs=1,
                batch_size=config.batch_size, warmup_epochs=0,
            )  # fmt: skip
            run = engine.start_run(__file__, flags)
            model = zoo.create_model(config.model, **options)
            summary = engine.fit(
                run, model, step_fn, source, lambda m: {"val/top1": 0.0},
                prepare_fn=prepare_fn, lead=True,
            )  # fmt: skip
            speeds["zoo"].append(1 / summary["samples_per_second"])

    def bare() -> None:
        step = train_step(zoo.create_model(config.model, **options).to(config.device), x, y)
        start = time.perf_counter()
        for _ in range(steps):
            step()
        synchronize(config.device)
        speeds["bare loop"].append((time.perf_counter() - start) / (steps * config.batch_size))

    speeds: Times = {"zoo": [], "bare loop": []}
    x, y = images.to(config.device), targets.to(config.device)
    for turn in range(config.repeats + 1):  # the first round warms up
        for candidate in (whole, bare) if turn % 2 else (bare, whole):
            candidate()
    return [row("epoch", name, {k: v[1:] for k, v in speeds.items()}) for name in speeds]


def show(config: Config, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{config.model}, batch {config.batch_size}, {config.device}")
    for column in ("task", "candidate", "n", "median ms", "ratio to ours", "95 % interval"):
        table.add_column(column, justify="right" if column != "candidate" else "left")
    for r in rows:
        low, high = r["interval"]
        table.add_row(
            r["task"], r["candidate"], str(r["n"]), f"{r['median_ms']:.3g}", f"{r['ratio']:.3f}",
            "" if r["ratio"] == 1 else f"{low:.3f} to {high:.3f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Config))
