"""Trains a CNN, with or without channel attention at any of its sites, through Accelerate.

Command:
    accelerate launch recipes/train_cnn.py
    accelerate launch recipes/train_cnn.py --data emoji --epochs 20 --insert se@standard
    accelerate launch recipes/train_cnn.py --model timm:resnet18 --insert eca@post:stages=3,4
    accelerate launch recipes/train_cnn.py --data folder:PATH --model timm:resnet18 \
        --pretrained timm:resnet18 --freeze backbone --insert eca@post:init=identity

Expected of the first: val/top1 99.3 % on the digits' held-out fifth (mean of 3 seeds, standard
deviation 0.32, range 98.9 to 99.4) in 41 s of CPU time on one thread of an Intel Xeon, torch
2.14.1. Of the second 59.9 % of 328 emoji (3 seeds, standard deviation 0.2), without --insert 61.8 %
(0.9): no difference shown, see RESULTS.md. `vision.insertion.DRAWING` shows where modules land.

On several processes BatchNorm normalises by each process's own share of a batch; the running
statistics are the main process's on all of them, and are the ones that are evaluated and saved. So
2 processes with batch 32 do not repeat 1 with batch 64 to the last digits, as they do without
BatchNorm.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

import vision
import zoo
from vision.classify import (
    Classification,
    ImageOptions,
    brings_weights,
    create_classifier,
)
from vision.evaluate import metrics
from vision.insertion import Insertion
from vision.inspection.fixed_images import fixed_images
from vision.inspection.training_watch import closing_look, watch_training
from vision.samples import write_samples
from vision.slots import slots
from zoo import engine
from zoo.diagnostics import NothingCapturedError, gate_profile, gate_ranges, save_gates
from zoo.engine.batches import move
from zoo.freezing import freeze_by_rule
from zoo.pages import add_samples, reported


@dataclass(frozen=True)
class Config(ImageOptions, engine.TrainOptions):
    """Trains a CNN and writes a run folder."""

    model: str = "resnet_micro"
    epochs: int = 10
    lr: float = 4e-3
    insert: tyro.conf.UseAppendAction[tuple[tuple[str, ...], ...]] = ()
    """Modules to add, KIND@SITE[:key=value,...]: se@standard eca@post:stages=3,4,every=2."""
    init: Literal["paper", "identity"] = "paper"
    """How inserted modules start that do not say it themselves: as published, or as the identity,
    which leaves a pretrained model's outputs as they are."""
    gates: bool = True
    """At the end, write what the gates do on the validation images to attention/."""

    def __post_init__(self) -> None:
        engine.TrainOptions.__post_init__(self)
        ImageOptions.__post_init__(self)
        self.insertions  # noqa: B018  # a mistyped one is refused

    @property
    def insertions(self) -> list[str]:
        """What `insert` asks for, with `init` where it does not say one."""
        texts = [text for group in self.insert for text in group]
        return [str(self._with_init(text)) for text in texts]

    def _with_init(self, text: str) -> Insertion:
        told = re.search("[:,]init=", text)
        insertion = Insertion.parse(text)
        return insertion if told else replace(insertion, init=self.init)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "insert": self.insertions}


def main(config: Config) -> None:
    run = engine.start_run(__file__, config)
    if config.insertions:  # a mistake shows before the data are read
        with torch.random.fork_rng(devices=[]):
            build(config)
    data = vision.load_dataset(config.data, bad_images=config.bad_images)
    model = build(
        config,
        config.pretrained,
        run.accelerator.print,
        class_names=data.class_names,
        in_chans=data.in_chans,
    )
    mix = engine.Mixing(model.num_classes, config.mixup, config.cutmix, config.seed)
    task = Classification(model, data, config, mix, config.seed)
    task.check_smallest_batch(model, config.batch_size, run.accelerator.num_processes)
    val_loader = engine.evaluation_loader(
        run.accelerator, task.val, 2 * config.batch_size, config.workers
    )
    stages = stages_of_gates(model)
    watch = None
    if config.save_attention_every:
        options = engine.watch_options(run, model, len(task.train))
        images = fixed_images(model, task.val, class_names=data.class_names)
        watch = watch_training(model, images, groups=stages, **options)

    def step_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(batch["images"])
        return F.cross_entropy(logits, batch["targets"], label_smoothing=config.label_smoothing)

    def evaluate_fn(model: nn.Module) -> dict[str, float] | None:
        sums = engine.evaluate(run.accelerator, model, val_loader, task.count, run.stopping)
        return None if sums is None else metrics(sums)

    def save_model(model: nn.Module, folder: Path) -> None:
        zoo.save_pretrained(model, folder)
        if config.gates and gate_ranges(model) and not run.stopping():
            run.notes.update(describe_gates(run, model, task, data.class_names, stages))
        how = {"batch_size": 2 * config.batch_size, "workers": config.workers}
        add_samples(run, lambda to: write_samples(to, model, task.val, data.class_names, **how))

    run.notes["images"] = data.report
    with reported(run), closing_look(watch):
        engine.fit(
            run,
            model,
            step_fn,
            task.train,
            evaluate_fn,
            prepare_fn=task.prepare,
            after_update=watch,
            lead=mix.active,
            head_lr=config.head_lr,
            save_model=save_model,
        )


def build(
    config: Config,
    weights: str | None = None,
    say: Callable[[str], object] = print,
    **more: Any,
) -> Any:
    """The model, on the CPU, with what does not train frozen."""
    stored = brings_weights(config.model)  # may have insertions: these come beside
    own = {**config.model_options, "insertions": None if stored else config.insertions or None}
    model = create_classifier(config.model, weights, say, **own, **more)
    added = [name for name, slot in slots(model) if len(slot)]
    if stored:
        added = vision.insert(model, *config.insertions) if config.insertions else []
    freeze_by_rule(model, config.freeze, keep=added)
    return model


def stages_of_gates(model: Any) -> dict[str, str]:
    """Layers with a gate -> the stage they were inserted in, or `host` for those it came with."""
    inserted = {f"{name}.": slot.stage for name, slot in slots(model) if len(slot)}
    groups = {}
    for layer in gate_ranges(model):
        stages = [stage for name, stage in inserted.items() if layer.startswith(name)]
        if not stages:
            groups[layer] = "host"
        elif stages[0]:
            groups[layer] = f"stage{stages[0]}"
    return groups


def describe_gates(
    run: engine.Run,
    model: nn.Module,
    task: Classification,
    class_names: Sequence[str],
    stages: dict[str, str],
) -> dict[str, float]:
    """Writes attention/gates.* from one pass over the validation images, on the main process."""
    options, device = run.options, run.accelerator.device
    plan = engine.BatchPlan(len(task.val), 2 * options.batch_size, shuffle=False)
    loader = engine.Loader(task.val, plan, workers=options.workers)
    batches = (move(batch, device) for window in loader.windows(0) for _, batch in window)
    pairs = ((task.inputs(batch), batch["targets"]) for batch in batches)
    try:
        with run.accelerator.autocast():
            profile = gate_profile(model, pairs, len(class_names))
    except NothingCapturedError as error:  # kinds of other libraries without one gate
        print(f"warning: nothing to write to attention/: {error}", file=sys.stderr)
        return {}
    return save_gates(run.folder / "attention", profile, class_names, stages)


if __name__ == "__main__":
    engine.cli(main, Config)
