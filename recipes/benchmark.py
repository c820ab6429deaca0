"""Times our code against its peers, in turn, in one process: ratios with intervals.

Command:
    python recipes/benchmark.py
    python recipes/benchmark.py --suite input --data folder:PATH --model vit_micro_patch4_32
    python recipes/benchmark.py --suite attention --out attention.json

Takes a minute or two each on 2 CPU cores; the figures are in the README.

A ratio is a candidate's median time over ours: above 1, ours is faster. The input suite compares an
epoch of training with a bare loop on tensors in memory. Peers that are not installed are left out.
"""

from __future__ import annotations

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
from zoo.diagnostics.cost import Times, in_turn, saved_bytes, synchronize
from zoo.engine.launch import environment, keep_memory
from zoo.engine.tracking import write_json
from zoo.layers import Mask, RelativeBias1d
from zoo.preprocess import normalize


@dataclass(frozen=True)
class Config:
    """Compares speed, in turn, in one process."""

    suite: Literal["vit", "input", "attention"] = "vit"
    """vit: train step and inference against timm, torchvision and transformers. input: an epoch of
    training against a bare loop of forward, backward and step. attention: every kind over lengths
    n, against SDPA and the packages that are installed."""
    model: str = "vit_tiny_patch16_224"
    """Name of the model."""
    data: str = "digits"
    """Data of the input suite."""
    batch_size: int = 16
    """Images per step."""
    repeats: int = 15
    """Timed rounds; in each one every candidate has its turn."""
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Numbers of tokens of the attention suite (dim 192, 3 heads, batch 1)."""
    kinds: tuple[str, ...] = ()
    """Attention kinds of that suite; all by default."""
    threads: int | None = None
    """CPU threads; torch's choice by default."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to run."""
    out: str | None = None
    """A JSON file for the numbers; the attention suite adds a .png of the same name."""


def main(config: Config) -> dict[str, Any]:
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(0)
    keep_memory()
    suites = {"vit": vit_suite, "input": input_suite, "attention": attention_suite}
    rows = suites[config.suite](config)
    from accelerate import Accelerator

    report = {"suite": config.suite, "rows": rows, **environment(Accelerator())}
    (show_attention if config.suite == "attention" else show)(config, rows)
    if config.out:
        write_json(Path(config.out), report)
        if config.suite == "attention":
            plot(rows, Path(config.out).with_suffix(".png"))
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
        print("transformers is not installed and left out: pip install 'attention-zoo[bench]'")
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
                run, model, step_fn, source, lambda m: {},
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


DIM, HEADS = 192, 3
SQUARE = ("full", "dot", "additive", "uniform")  # quadratic, so not timed on the longest
RIVALS = {  # which of our kinds does the same work as a package
    "linformer": "package linformer", "performer": "performer-pytorch",
    "longformer": "local-attention",
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {  # the same keys a query as local-attention's window of 128
    "longformer": {"window": 256, "num_global": 0}, "window": {"window": 128},
}  # fmt: skip


def attention_suite(config: Config) -> list[dict[str, Any]]:
    """Forward, and forward and backward, of every kind and of its rivals for each length."""
    rows = []
    for n in config.lengths:
        x = torch.randn(1, n, DIM, device=config.device, requires_grad=True)
        models = {name: m.to(config.device) for name, m in attentions(config, n).items()}
        steps = {f"train {name}": attention_step(m, x, True) for name, m in models.items()}
        steps |= {f"infer {name}": attention_step(m, x, False) for name, m in models.items()}
        rounds = max(3, config.repeats if n <= 4096 else config.repeats // 3)
        times = in_turn(steps, rounds, config.device)
        rows += [
            {
                "task": task,
                "n": n,
                "candidate": name,
                "rounds": rounds,
                "median_ms": 1e3 * float(np.median(times[f"{task} {name}"])),
                "kept_mib": saved_bytes(model, x) / 2**20,
            }
            for task in ("train", "infer")
            for name, model in models.items()
        ]
    return rows


def attentions(config: Config, n: int) -> dict[str, nn.Module]:
    """Our kinds at length n, and the packages that are installed."""
    found: dict[str, nn.Module] = {}
    for kind in config.kinds or zoo.layers.list_attention():
        if kind in SQUARE[1:] and n > (1024 if kind == "additive" else 4096):
            continue
        options = {"max_len": n} if kind == "linformer" else OPTIONS.get(kind, {})
        found[kind] = zoo.layers.create_attention(kind, DIM, HEADS, **options)
    if "full" in found:
        full = zoo.layers.create_attention("full", DIM, HEADS)
        mask = Mask.padding([n - n // 8]) & Mask.causal()
        found["full, padding & causal"] = Masked(full, mask)
        if n <= 4096:
            bias = RelativeBias1d(HEADS)
            found["full, relative bias"] = zoo.layers.create_attention(
                "full", DIM, HEADS, bias=bias
            )
    for kind, package in RIVALS.items():
        if kind in found:
            try:
                found[package] = rival(package, n)
            except ImportError:
                print(f"{package} is not installed and left out: pip install {package.split()[-1]}")
    return found


class Masked(nn.Module):
    """Attention that is always given the same mask."""

    def __init__(self, attn: nn.Module, mask: Mask) -> None:
        super().__init__()
        self.attn, self.mask = attn, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, mask=self.mask)


def rival(package: str, n: int) -> nn.Module:
    """Self-attention of another package, with its own defaults and our width and heads."""
    if package == "package linformer":
        from linformer import LinformerSelfAttention

        return LinformerSelfAttention(DIM, n, k=256, heads=HEADS)
    if package == "performer-pytorch":
        from performer_pytorch import SelfAttention

        return SelfAttention(DIM, heads=HEADS, dim_head=DIM // HEADS, causal=False)
    return LocalAttention()


class LocalAttention(nn.Module):
    """local-attention (window 128, one window to either side) between projections like ours."""

    def __init__(self) -> None:
        super().__init__()
        from local_attention import LocalAttention as Core

        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.core = Core(
            window_size=128, causal=False, look_backward=1, look_forward=1, autopad=True,
            exact_windowsize=True, use_rotary_pos_emb=False, dim=DIM // HEADS,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous()
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


def attention_step(model: nn.Module, x: Tensor, train: bool) -> Callable[[], None]:
    def step() -> None:
        if train:
            model(x).sum().backward()
        else:
            with torch.inference_mode():
                model(x)

    return step


def exponent(rows: list[dict[str, Any]], value: str = "median_ms") -> float:
    """Slope of log(value) over log(n), fitted from 1,024 tokens on."""
    long = [r for r in rows if r["n"] >= 1024]
    if len(long) < 2:
        return float("nan")
    n, y = (np.log([r[key] for r in long]) for key in ("n", value))
    return float(np.polyfit(n, y, 1)[0])


def show_attention(config: Config, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"ms to train, batch 1, dim {DIM}, {HEADS} heads, {config.device}")
    columns = [*map(str, config.lengths), "exponent", "exponent of memory", "rival's time / ours"]
    for column in ("candidate", *columns):
        table.add_column(column, justify="left" if column == "candidate" else "right")
    train = [r for r in rows if r["task"] == "train"]
    for name in dict.fromkeys(r["candidate"] for r in train):
        own = [r for r in train if r["candidate"] == name]
        by_n = {r["n"]: r["median_ms"] for r in own}
        last = max(by_n)
        theirs = next(
            (r for r in train if r["candidate"] == RIVALS.get(name) and r["n"] == last), None
        )
        table.add_row(
            name,
            *(f"{by_n[n]:.4g}" if n in by_n else "" for n in config.lengths),
            f"{exponent(own):.2f}",
            f"{exponent(own, 'kept_mib'):.2f}",
            f"{theirs['median_ms'] / by_n[last]:.2f}" if theirs else "",
        )
    Console().print(table)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Training time and memory over n, both on logarithmic axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True)
    labels = {"median_ms": "forward + backward, ms", "kept_mib": "kept for the backward pass, MiB"}
    train = [r for r in rows if r["task"] == "train"]
    names = list(dict.fromkeys(r["candidate"] for r in train))
    for axes, (value, label) in zip(panels, labels.items(), strict=True):
        for number, name in enumerate(names):
            own = [r for r in train if r["candidate"] == name]
            style = "--" if name in RIVALS.values() else "-"
            axes.plot(
                [r["n"] for r in own], [r[value] for r in own], style,
                marker="osv^D"[number // 10], color=f"C{number % 10}", label=name,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=label)
        lengths = sorted({r["n"] for r in train})
        axes.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axes.grid(alpha=0.3)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    figure.savefig(path, dpi=130)


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
