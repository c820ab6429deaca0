"""Times our code against its peers, in turn, in one process: ratios with intervals.

Command:
    python recipes/benchmark.py
    python recipes/benchmark.py --suite input --data folder:PATH --model vit_micro_patch4_32
    python recipes/benchmark.py --suite attention --out attention.json
    python recipes/benchmark.py --suite crossmodal --shape ViT-B-32
    python recipes/benchmark.py --suite loading --model vit_base_patch16_224
    python recipes/benchmark.py --suite loading --model vit_base_patch16_224 --threads 1
    python recipes/benchmark.py --suite looks --batch-size 32

vit, input, crossmodal and loading take a minute or two each on 2 CPU cores, looks five, attention
far longer, most of it for full attention at 32,768 tokens; the figures are in the README.

A ratio is a candidate's median time over ours: above 1, ours is faster. The input suite compares an
epoch of training with a bare loop on tensors in memory. Peers that are not installed are left out.

Peak memory is the most that torch's allocator holds during a step beyond parameters and input, with
gradients and the insides of kernels: read from the allocator itself, not from the process, whose
size also tells what earlier steps left behind (`zoo.diagnostics.cost.peak_bytes`).
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import crossmodal
import vision
import zoo
from zoo import engine
from zoo.diagnostics.cost import Times, in_turn, ratio_of_medians, synchronize
from zoo.diagnostics.rivals import RIVALS, SDPA, rival
from zoo.diagnostics.scaling import Build, Scaling, exponents, plot, print_tables
from zoo.engine.launch import environment, keep_memory
from zoo.engine.tracking import write_json
from zoo.layers import Mask, RelativeBias1d
from zoo.preprocess import normalize
from zoo.sources import sha256_of


@dataclass(frozen=True)
class Config:
    """Compares speed, in turn, in one process."""

    suite: Literal["vit", "input", "attention", "crossmodal", "loading", "looks"] = "vit"
    """vit: train step and inference against timm, torchvision and transformers. input: an epoch of
    training against a bare loop of forward, backward and step. attention: time and peak memory of
    every kind over lengths n, against SDPA and the packages that are installed. crossmodal: train
    step of a dual encoder against open_clip's, and writing captions with a cache and without.
    loading: saved weights into a model, against safetensors' own loader (load_model). looks: what
    --save-attention-every adds to a training, in time and memory."""
    model: str = "vit_tiny_patch16_224"
    """Name of the model."""
    data: str = "digits"
    """Data of the input suite."""
    batch_size: int = 16
    """Images per step."""
    repeats: int = 15
    """Timed rounds; in each one every candidate has its turn."""
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384, 32768)
    """Numbers of tokens of the attention suite (dim 192, 3 heads, batch 1)."""
    kinds: tuple[str, ...] = ()
    """Attention kinds of that suite; all by default."""
    shape: Literal["small", "ViT-B-32"] = "small"
    """Of the crossmodal suite's dual encoders: 256 wide with 6 layers each, or CLIP's ViT-B/32."""
    looks: int = 500
    """Looks of the looks suite, to see whether memory grows."""
    threads: int | None = None
    """CPU threads; torch's choice by default. The loading suite, where ours has threads of its own,
    also keeps to as many cores."""
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    """Where to run."""
    out: str | None = None
    """A JSON file for the numbers; the attention suite adds a .png of the same name."""


def main(config: Config) -> dict[str, Any]:
    check(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(0)
    keep_memory()
    suites = {
        "vit": vit_suite, "input": input_suite, "attention": attention_suite,
        "crossmodal": crossmodal_suite, "loading": loading_suite, "looks": looks_suite,
    }  # fmt: skip
    found = suites[config.suite](config)
    from accelerate import Accelerator

    report = {"suite": config.suite, **found, **environment(Accelerator())}
    if config.out:
        write_json(Path(config.out), report)
        if config.suite == "attention" and found["rows"]:
            plot(found["rows"], Path(config.out).with_suffix(".png"), baseline=SDPA)
    return report


def check(config: Config) -> None:
    """Ends with one line where the flags cannot be followed."""
    kind = config.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise SystemExit(f"--device {config.device} must be cpu, cuda or cuda:NUMBER")
    if kind == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {config.device}: torch sees no GPU here; use --device cpu")
    if min(config.repeats, config.batch_size, config.looks - 1, *config.lengths) < 1:
        raise SystemExit("--repeats, --batch-size and --lengths must be at least 1, --looks 2")
    unknown = set(config.kinds) - set(zoo.layers.list_attention())
    if unknown:
        legal = ", ".join(zoo.layers.list_attention())
        raise SystemExit(f"--kinds {' '.join(sorted(unknown))} must be among {legal}")


def vit_suite(config: Config) -> dict[str, Any]:
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
    show(f"{config.model}, batch {config.batch_size}, {config.device}", rows)
    return {"rows": rows}


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
    """Median milliseconds; ratio of medians to ours with its 95 % interval."""
    ratio, interval = ratio_of_medians(times[name], times[ours])
    return {
        "task": task,
        "candidate": name,
        "n": len(times[name]),
        "median_ms": 1e3 * float(np.median(times[name])),
        "ratio": ratio,
        "interval": interval,
        **extra,
    }


def input_suite(config: Config) -> dict[str, Any]:
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
    rows = [row("epoch", name, {k: v[1:] for k, v in speeds.items()}) for name in speeds]
    show(f"{config.model}, batch {config.batch_size}, {config.device}", rows)
    return {"rows": rows}


DIM, HEADS = 192, 3
LONGEST = {"additive": 1024, "dot": 4096, "uniform": 4096, "full, relative bias": 4096}  # quadratic
OPTIONS: dict[str, dict[str, Any]] = {  # the same keys a query as local-attention's window of 128
    "longformer": {"window": 256, "num_global": 0}, "window": {"window": 128},
}  # fmt: skip


def attention_suite(config: Config) -> dict[str, Any]:
    """Time and peak memory, forward and training, of every kind and of its rivals."""
    kinds = config.kinds or tuple(zoo.layers.list_attention())
    builds: dict[str, Build] = {}
    for kind in kinds:
        builds[kind] = partial(attention, kind)
        if kind == "full":
            builds["full, padding & causal"] = masked
            builds["full, relative bias"] = biased
        for name in [name for name, ours in RIVALS.items() if ours == kind]:
            try:
                rival(name, 256, DIM, HEADS)
                builds[name] = partial(rival, name, dim=DIM, num_heads=HEADS)
            except ImportError as error:
                package = name.split()[-1]
                print(f"{name} is left out ({error}): pip install {package}")
    scaling = Scaling(
        builds, DIM, config.repeats, config.device, longest=LONGEST, rivals=RIVALS, baseline=SDPA
    )
    rows, skipped = scaling.measure(config.lengths)
    setting = f"batch 1, dim {DIM}, {HEADS} heads, {config.device}"
    print_tables(rows, skipped, baseline=SDPA, setting=setting)
    return {"rows": rows, "skipped": skipped, "exponents": exponents(rows)}


def attention(kind: str, n: int) -> nn.Module:
    options = {"max_len": n} if kind == "linformer" else OPTIONS.get(kind, {})
    return zoo.layers.create_attention(kind, DIM, HEADS, **options)


def masked(n: int) -> nn.Module:
    """Full attention with the last eighth of the keys as padding, and causal."""
    return Masked(attention("full", n), Mask.padding([n - n // 8]) & Mask.causal())


def biased(n: int) -> nn.Module:
    return zoo.layers.create_attention("full", DIM, HEADS, bias=RelativeBias1d(HEADS))


class Masked(nn.Module):
    """Attention that is always given the same mask."""

    def __init__(self, attn: nn.Module, mask: Mask) -> None:
        super().__init__()
        self.attn, self.mask = attn, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, mask=self.mask)


SHAPES = {  # width and depth of the image tower, of the text tower, width of the shared space
    "small": ((256, 6), (256, 6), 256), "ViT-B-32": ((768, 12), (512, 12), 512),
}  # fmt: skip


def crossmodal_suite(config: Config) -> dict[str, Any]:
    """Train step of a dual encoder and of open_clip's; writing with a cache and without."""
    rows = dual_rows(config) + writing_rows(config)
    show(f"{config.shape}, batch {config.batch_size}, {config.device}", rows)
    return {"shape": config.shape, "rows": rows}


def dual_rows(config: Config) -> list[dict[str, Any]]:
    """Forward, contrastive loss and backward; the captions are the emoji's names.

    open_clip takes captions padded to 77 tokens; ours also goes without padding.
    """
    ours, shape = dual_encoder(config.shape).to(config.device), (config.batch_size, 3, 224, 224)
    names = [row[0] for row in crossmodal.load_pairs("emoji").train.captions][: config.batch_size]
    images, tokenizer = torch.randn(shape, device=config.device), ours.make_tokenizer()

    def step(length: int | None) -> Callable[[], None]:
        tokens, mask = (x.to(config.device) for x in tokenizer(names, length))

        def run() -> None:
            crossmodal.contrastive_loss(*ours(images, tokens, mask)).backward()
            ours.zero_grad()

        return run

    theirs, their_step = open_clip_step(config, images, tokenizer(names, 77)[0])
    steps = {"zoo": step(77), "open_clip": their_step, "zoo, captions not padded": step(None)}
    params = {
        name: sum(p.numel() for p in (theirs if name == "open_clip" else ours).parameters())
        for name in steps
    }
    times = in_turn(steps, config.repeats, config.device)
    return [row("train", name, times, params=params[name]) for name in times]


def dual_encoder(shape: str) -> Any:
    (width, depth), (text_width, text_depth), embed_dim = SHAPES[shape]
    image: dict[str, Any] = {"embed_dim": width, "depth": depth, "num_heads": width // 64}
    text = {"embed_dim": text_width, "depth": text_depth, "num_heads": text_width // 64}
    image |= {"pre_norm": True, "norm_eps": 1e-5}
    return zoo.create_model(
        "dual_base", image_options=image, text_options=text, embed_dim=embed_dim
    )


def open_clip_step(
    config: Config, images: Tensor, tokens: Tensor
) -> tuple[nn.Module, Callable[[], None]]:
    """The same shape, loss and captions by open_clip."""
    from open_clip.loss import ClipLoss
    from open_clip.model import CLIP

    (width, depth), (text_width, text_depth), embed_dim = SHAPES[config.shape]
    image = {"width": width, "layers": depth, "patch_size": 32, "image_size": 224}
    text = {"width": text_width, "layers": text_depth, "heads": text_width // 64}
    model = CLIP(embed_dim, image, text).to(config.device).train()
    loss, tokens = ClipLoss(), tokens.to(config.device)

    def step() -> None:
        loss(*model(images, tokens)).backward()
        model.zero_grad()

    return model, step


def writing_rows(config: Config) -> list[dict[str, Any]]:
    """Greedy captions by a Transformer decoder that keeps keys and values, or computes them anew.

    Untrained, so that captions are as long as the context.
    """
    model: Any = zoo.create_model("captioner_micro", dim=256, depth=4, context_length=64).to(
        config.device
    )
    images = torch.randn(config.batch_size, 3, 32, 32, device=config.device)
    written = crossmodal.generate(model, images)[1].sum(1).double().mean().item()

    def write(use_cache: bool) -> Callable[[], object]:
        return lambda: crossmodal.generate(model, images, use_cache=use_cache)

    times = in_turn(
        {"zoo": write(True), "zoo, no cache": write(False)}, config.repeats, config.device
    )
    return [row("write", name, times, tokens=written) for name in times]


def loading_suite(config: Config) -> dict[str, Any]:
    """Weights into a model that exists, with the file in the system's cache and without.

    Ours reads each value twice, as all must be finite before the first is copied. A folder's file
    is also read for its sha256; its peer is safetensors after the same hash.
    """
    from safetensors.torch import load_model

    if config.threads:
        keep_to_cores(config.threads)
    model = zoo.create_model(config.model).to(config.device)
    with tempfile.TemporaryDirectory() as folder:
        saved = zoo.save_pretrained(model, f"{folder}/model")
        file = saved / "model.safetensors"

        def peer() -> None:
            load_model(model, file, device=config.device)

        def hashed_peer() -> None:
            sha256_of(file)
            peer()

        loads: dict[str, dict[str, Callable[[], object]]] = {
            "file": {
                "zoo": lambda: zoo.load_pretrained(model, f"file:{file}"),
                "safetensors": peer,
            },
            "folder": {
                "zoo, local-dir": lambda: zoo.load_pretrained(model, f"local-dir:{saved}"),
                "safetensors, hash": hashed_peer,
                "hash alone": lambda: sha256_of(file),
            },
        }
        every = {name: load for group in loads.values() for name, load in group.items()}
        times = in_turn(every, config.repeats, config.device)
        size = file.stat().st_size
        peaks = {name: peak_memory(load) for name, load in every.items()}
        cold: Times = {}
        if hasattr(os, "posix_fadvise"):
            cold = in_turn(loads["file"], config.repeats, config.device, partial(uncache, file))
    rows = [
        row(f"load {task}", name, times, next(iter(group)), bytes=size, peak_bytes=peaks[name])
        for task, group in loads.items()
        for name in group
    ]
    rows += [row("load from disk", name, cold, bytes=size) for name in cold]
    show(f"{config.model}, {size / 1e6:.0f} MB, {config.device}", rows)
    held = ", ".join(f"{peak / 1e6:.1f} MB ({name})" for name, peak in peaks.items())
    print(f"most memory beyond the model and the mapped file: {held}")
    return {"rows": rows}


def uncache(file: Path) -> None:
    """Has the system forget what it keeps of a file in memory."""
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def looks_suite(config: Config) -> dict[str, Any]:
    """A training step, and a look at 4 images with maps, numbers and a picture of all heads."""
    import psutil

    from vision.inspection.fixed_images import FixedImages
    from vision.inspection.training_watch import watch_training

    model: Any = zoo.create_model(config.model).to(config.device)
    shape = (3, *model.card.preprocessing.size)
    images = torch.randn(config.batch_size, *shape, device=config.device)
    targets = torch.randint(model.num_classes, (config.batch_size,), device=config.device)
    pixels = torch.randint(256, (4, *shape), dtype=torch.uint8)
    fixed = FixedImages(
        pixels, normalize(pixels, model.card.preprocessing), tuple(f"image {i}" for i in range(4))
    )
    with tempfile.TemporaryDirectory() as folder:
        watch = watch_training(model, fixed, Path(folder), every=1)
        step, look = train_step(model, images, targets), partial(watch, model, 1)
        steps: dict[str, Callable[[], object]] = {"step": step, "look": look}
        times = in_turn(steps, config.repeats, config.device)
        process, held = psutil.Process(), []
        for number in range(2, config.looks + 1):
            watch(model, number)
            held.append(process.memory_info().rss / 2**20)
    rows = [row("train", name, times, ours="step") for name in times]
    share, interval = ratio_of_medians(times["look"], times["step"])
    show(f"{config.model}, batch {config.batch_size}, {config.device}", rows)
    print(
        f"every 50 updates looks add {2 * share:.2f} % "
        f"({2 * interval[0]:.2f} to {2 * interval[1]:.2f}) to the time of training; memory after "
        f"{len(held[:9]) + 1} looks {held[:9][-1]:.0f} MiB, after {config.looks} {held[-1]:.0f} MiB"
    )
    return {"rows": rows, "percent_at_50": 2 * share, "resident_mib": held}


def peak_memory(step: Callable[[], object]) -> int:
    """Most bytes of memory of its own that the process gets during a step; 0 where there is no
    /proc to ask. Looks every millisecond; pages of a mapped file are not counted."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0

    def anonymous() -> int:
        lines = status.read_text().splitlines()
        return next(1024 * int(x.split()[1]) for x in lines if x.startswith("RssAnon"))

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(anonymous())

    seen, done = [anonymous()], threading.Event()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        step()
    finally:
        done.set()
        thread.join()
    return max(seen) - seen[0]


def keep_to_cores(number: int) -> None:
    """Keeps all threads of this process to as many cores, where the system can (Linux)."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:number])


def show(title: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
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
    engine.cli(main, Config)
