"""Is attention worth it in a decoder? One vector of the image, attention over it, a Transformer.

Command:
    python recipes/ablate_decoder.py --out ablations/decoder
    python recipes/ablate_decoder.py --out ablations/strips --data strips:8
    python recipes/ablate_decoder.py --out ablations/needle --data needle:8 --plan

Trains the three decoders on the same image tower with every seed (`recipes/train_crossmodal.py`,
two at a time on one thread each) and writes results.jsonl, table.csv, table.md, effects.png and
report.html, and by the data a profile of what each writes about the validation images: scores by
caption length (lengths.csv, lengths.png), or accuracy by the place of the word (strips:N) or of the
informative cell (needle:N; positions.csv, positions.png). Interrupted, the same command goes on.

Expected: see RESULTS.md.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import zoo
from crossmodal.captioner import DECODERS, caption_loss
from crossmodal.data import PairDataset
from crossmodal.evaluate import caption_rows, written_captions
from crossmodal.generate import generate
from crossmodal.positions import PROFILES, Place, Point, draw, measure, profile_of
from crossmodal.training import PairOptions, PairTask
from zoo.ablation import (
    AblationOptions,
    Plan,
    Report,
    Variant,
    describe,
    report,
    run_cells,
    seconds_of_cell,
    summarise,
)
from zoo.ablation.plan import cells_of
from zoo.diagnostics.cost import count_flops, in_turn, peak_bytes
from zoo.engine import cli
from zoo.engine.checkpoint import write_atomically

BASELINE = "lstm_fixed"
QUESTION = "Is attention worth it in a decoder?"
NOTE = (
    "Costs: one batch of validation pairs, in turn; writing is greedy with a cache, by the models "
    "of the first seed."
)

# What suits each kind of data. The image's one vector must be able to hold an order, or the fixed
# vector would fail for its tower: a class token can, a mean over a CNN's map, which knows no
# places, cannot. The affine maps of `auto` would turn a strip's ends out of the image.
DEFAULTS: dict[str, dict[str, Any]] = {
    "length": {"model": "captioner_micro", "spatial": "auto", "epochs": 15},
    "word": {"model": "captioner_probe", "spatial": "none", "epochs": 6},
    "cell": {"model": "captioner_probe", "spatial": "none", "epochs": 12},
}

# The metric: chrF counts characters, so a caption of one or two words that is nearly right counts
# for something, where BLEU-4 and exact match see none; token accuracy is mostly the spelling of
# words whose first letters were given. A probe's caption is right or not.
METRICS = {"length": "val/chrf", "word": "val/exact", "cell": "val/exact"}

Profiles = dict[str, dict[int, list[Place]]]  # variant -> seed -> places
Curves = dict[str, list[Point]]


@dataclass(frozen=True)
class Config(PairOptions, AblationOptions):
    """Compares decoders of captions on the same image tower."""

    model: str = ""
    """A captioner, see `zoo.list_models()`; captioner_micro by default, for probes
    captioner_probe."""
    epochs: int = 0
    """Passes over the training pairs; by default 6 to 15, as the data has it."""
    lr: float = 2e-3
    data: str = "emoji"
    """emoji, strips:N, needle:N, pairs:FILE, ..., as for train_crossmodal.py."""
    eval_every: int = 0
    """Epochs between evaluations, for learning curves; by default only the last is evaluated."""

    def __post_init__(self) -> None:
        defaults = DEFAULTS[profile_of(self.data)]
        unset = {"model": "", "spatial": "auto", "epochs": 0}
        for name, nothing in unset.items():
            if getattr(self, name) == nothing:
                object.__setattr__(self, name, defaults[name])
        object.__setattr__(self, "eval_every", self.eval_every or self.epochs)
        PairOptions.__post_init__(self)
        AblationOptions.__post_init__(self)

    def pair_flags(self) -> list[str]:
        """Names of the flags for pairs that are not as train_crossmodal.py has them."""
        given = [
            each.name for each in fields(PairOptions) if getattr(self, each.name) != each.default
        ]
        return [name for name in given if name != "data"]


def main(config: Config) -> Report | None:
    torch.set_num_threads(config.threads)
    data = config.load()
    plan = make_plan(config)
    print(describe(plan, config.out, config.workers, lambda: seconds(config, data)))
    if config.plan:
        return None
    run_cells(plan, config.out, workers=config.workers, threads=config.threads)
    picture = write_profiles(plan, config, data)
    first = cells_of(plan, Path(config.out))[: len(plan.variants)]  # of the first seed
    models = {cell.variant.name: load(cell.folder) for cell in first}
    done = report(plan, config.out, costs(models, config, data), note=NOTE, pictures=picture)
    print((Path(config.out) / "table.md").read_text(encoding="utf-8"))
    return done


def make_plan(config: Config) -> Plan:
    return Plan(
        recipe=Path(__file__).with_name("train_crossmodal.py"),
        variants=[Variant(name, {"decoder": name}) for name in DECODERS],
        seeds=range(config.seeds),
        flags={"task": "caption", **config.flags("eval_every", *config.pair_flags())},
        baselines=(BASELINE,),
        metric=METRICS[profile_of(config.data)],
        question=QUESTION,
    )


def seconds(config: Config, data: PairDataset) -> float:
    """Of a cell, the mean of the three. Writing a batch takes about as long as learning from it."""
    models = [
        zoo.create_model(config.model, decoder=name, **config.model_options(data))
        for name in DECODERS
    ]
    batch = first_batch(models[0], config, data)
    steps = [training_step(model, batch) for model in models]
    pairs = config.epochs * len(data.train)
    pairs += config.epochs // config.eval_every * (len(data.train) + len(data.val))
    return seconds_of_cell(
        lambda: [step() for step in steps], pairs / config.batch_size / len(models)
    )


# Where captions are right


def load(folder: Path) -> Any:
    """The model that a cell has trained."""
    return zoo.create_model(f"local-dir:{folder / 'model'}")


def write_profiles(plan: Plan, config: Config, data: PairDataset) -> dict[str, Path]:
    """Writes table and picture of the profile; returns the picture by its title."""
    kind = profile_of(config.data)
    own = PROFILES[kind]
    profiles: Profiles = {name: {} for name in plan.names}
    for cell in cells_of(plan, Path(config.out)):
        profiles[cell.variant.name][cell.seed] = profile(load(cell.folder), config, data)
    stem = Path(config.out) / own.stem
    table, picture = stem.with_suffix(".csv"), stem.with_suffix(".png")
    write_atomically(table, lambda file: file.write_text(as_csv(profiles), encoding="utf-8"))
    seeds = f"n = {config.seeds} seed{'s' * (config.seeds > 1)}"
    setting = f"{config.data}, {config.epochs} epochs, {seeds}"
    figure = draw(curves(profiles, own.score), kind, setting)
    write_atomically(picture, lambda file: figure.savefig(file, format="png", dpi=150))
    return {own.title: picture}


@torch.no_grad()
def profile(model: Any, config: Config, data: PairDataset) -> list[Place]:
    """What a model writes about all validation images, by place."""
    task = PairTask(model.eval(), data, config, seed=0)
    source, write = task.pairs(data.val), caption_rows(task)
    parts = [
        write(model, source.__getitems__([(0, i) for i in indices.tolist()]))
        for indices in torch.arange(len(data.val)).split(2 * config.batch_size)
    ]
    rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    tokenizer, right = task.tokenizer, [list(texts) for texts in data.val.captions]
    plain = [tokenizer.decode(*tokenizer(texts)) for texts in right]  # as the model can write them
    return measure(profile_of(config.data), written_captions(task, rows), plain, data.val)


def curves(profiles: Profiles, score: str) -> Curves:
    """A score's mean and interval by variant and place."""
    return {
        variant: [_point(variant, places, score) for places in zip(*seeds.values(), strict=True)]
        for variant, seeds in profiles.items()
    }


def _point(variant: str, places: tuple[Place, ...], score: str) -> Point:
    values = tuple(place.scores[score] for place in places)
    found = summarise(variant, values)
    assert found.mean is not None
    return Point(places[0].name, places[0].n, found.mean, found.low, found.high, values)


def as_csv(profiles: Profiles) -> str:
    """One row for each variant, place and score, with the value of each seed."""
    seeds = list(next(iter(profiles.values())))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = ["variant", "place", "captions", "score", "mean", "low", "high"]
    writer.writerow([*header, *(f"seed {seed}" for seed in seeds)])
    writer.writerows(_rows(profiles))
    return text.getvalue()


def _rows(profiles: Profiles) -> Iterator[list[object]]:
    scores = next(iter(next(iter(profiles.values())).values()))[0].scores
    for score in scores:
        for variant, points in curves(profiles, score).items():
            for name, n, mean, low, high, values in points:
                yield [variant, name, n, score, mean, low, high, *values]


# What it costs


def first_batch(model: Any, config: Config, data: PairDataset) -> dict[str, Tensor]:
    """Validation pairs as the model takes them; all decoders take the same."""
    task = PairTask(model, data, config, seed=0)
    keys = [(0, i) for i in range(min(config.batch_size, len(data.val)))]
    return task.prepare(task.pairs(data.val).__getitems__(keys))


def training_step(model: Any, batch: dict[str, Tensor]) -> Callable[[], None]:
    """One forward and backward pass, to be timed."""
    tokens, mask = batch["tokens"], batch["mask"]
    return lambda: caption_loss(model(batch["images"], tokens, mask), tokens, mask).backward()


def costs(
    models: dict[str, Any], config: Config, data: PairDataset
) -> dict[str, dict[str, object]]:
    """Parameters, operations, memory and speed of training and writing, timed in turn."""
    batch = first_batch(next(iter(models.values())), config, data)
    steps = {name: training_step(model.train(), batch) for name, model in models.items()}
    training = in_turn(steps)
    writing = in_turn({name: partial(generate, models[name], batch["images"]) for name in models})
    size = len(batch["images"])
    return {
        name: {
            "parameters": sum(p.numel() for p in model.parameters()),
            "MFLOPs a pair": round(flops(model, batch) / size / 1e6, 2),
            "peak MiB in training": round(peak_bytes(steps[name]) / 2**20, 1),
            "training steps/s": round(1 / median(training[name]), 2),
            f"ms to write {size} captions": round(1e3 * median(writing[name])),
        }
        for name, model in models.items()
    }


def flops(model: Any, batch: dict[str, Tensor]) -> int:
    """Of a forward pass; in float64, as torch counts nothing inside oneDNN's fused LSTM."""
    double = deepcopy(model).double()

    def run(images: Tensor) -> Tensor:
        return double(images, batch["tokens"], batch["mask"])

    return count_flops(run, batch["images"].double())  # type: ignore[arg-type]


if __name__ == "__main__":
    cli(main, Config)
