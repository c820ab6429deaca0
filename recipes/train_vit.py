"""Trains a Vision Transformer (arXiv 2010.11929) on one or many devices through Accelerate.

Command:
    accelerate launch recipes/train_vit.py
    accelerate launch recipes/train_vit.py --data folder:PATH --model vit_micro_patch4_32 --epochs 5
    accelerate launch recipes/train_vit.py --data folder:PATH --model timm:vit_tiny_patch16_224 \
        --pretrained timm:vit_tiny_patch16_224 --freeze stages=8 --layer-decay 0.75 --head-lr 0.01

Expected of the first: val/top1 98.5 % on the digits' held-out fifth (mean of 10 seeds, standard
deviation 0.53, range 97.5 to 99.2) after 60 s on one thread of an Intel Xeon, torch 2.14.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

import vision
import zoo
from vision.classify import Classification, ImageOptions, create_classifier
from vision.evaluate import metrics
from vision.inspection.fixed_images import fixed_images
from vision.inspection.training_watch import closing_look, watch_training
from vision.samples import write_samples
from zoo import engine
from zoo.freezing import freeze_by_rule
from zoo.pages import add_samples, reported
from zoo.penalties import PenaltyOptions


@dataclass(frozen=True)
class Config(PenaltyOptions, ImageOptions, engine.TrainOptions):
    """Trains a Vision Transformer and writes a run folder."""

    epochs: int = 100
    lr: float = 2e-3
    attention: str | None = None
    """Attention kind, see `zoo.layers.list_attention()`; the model's own by default."""
    attention_options: dict[str, int | float | str] | None = None
    """Options of that kind as names and values: --attention-options window 2,3 shift true."""
    position: Literal["learned", "sincos", "none", "relative", "rope", "prior"] | None = None
    """Positions; the model's own by default."""
    num_heads: int | None = None
    """Attention heads; the model's own by default."""
    head_dim: int | None = None
    """Width of a head; the model's width over the number of heads by default."""
    temperature: str = "1"
    """Divides attention scores: a number (1: the model's own), START:END over the run (2:0.5),
    or learned (by head).
    With START:END, checkpoints/best.pt was measured at its own epoch's; model/ has END's."""
    qk_norm: bool | None = None
    """Normalise queries and keys by head (arXiv 2302.05442); the model's own by default."""
    attn_drop: float | None = None
    """Dropout of attention weights; the model's own by default."""

    def __post_init__(self) -> None:
        PenaltyOptions.__post_init__(self)
        engine.TrainOptions.__post_init__(self)
        ImageOptions.__post_init__(self)
        if self.compile and ":" in self.temperature:
            raise ValueError(
                f"temperature {self.temperature!r} changes in each update, for which compile would "
                "translate the model anew: drop one of the two"
            )


def main(config: Config) -> None:
    temperature, schedule_fn = engine.temperature_schedule(config.temperature)
    run = engine.start_run(__file__, config)
    data = vision.load_dataset(config.data, bad_images=config.bad_images)
    kind = config.attention_options
    model = create_classifier(
        config.model,
        config.pretrained,
        run.accelerator.print,
        class_names=data.class_names,
        in_chans=data.in_chans,
        attention=config.attention,
        attention_options=kind and {name: spelled(value) for name, value in kind.items()},
        position=config.position,
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        temperature=None if schedule_fn is None and temperature == 1 else temperature,
        qk_norm=config.qk_norm,
        attn_drop_rate=config.attn_drop,
        **config.model_options,
    )
    freeze_by_rule(model, config.freeze)
    mix = engine.Mixing(model.num_classes, config.mixup, config.cutmix, config.seed)
    task = Classification(model, data, config, mix, config.seed)
    task.check_smallest_batch(model, config.batch_size, run.accelerator.num_processes)
    val_loader = engine.evaluation_loader(
        run.accelerator, task.val, 2 * config.batch_size, config.workers
    )
    watch = None
    if config.save_attention_every:
        options = engine.watch_options(run, model, len(task.train))
        images = fixed_images(model, task.val, class_names=data.class_names)
        watch = watch_training(model, images, **options)

    def step_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(batch["images"])
        return F.cross_entropy(logits, batch["targets"], label_smoothing=config.label_smoothing)

    def evaluate_fn(model: nn.Module) -> dict[str, float] | None:
        sums = engine.evaluate(run.accelerator, model, val_loader, task.count, run.stopping)
        return None if sums is None else metrics(sums)

    def save_model(model: nn.Module, folder: Path) -> None:
        zoo.save_pretrained(model, folder)
        how = {"batch_size": 2 * config.batch_size, "workers": config.workers}
        add_samples(run, lambda to: write_samples(to, model, task.val, data.class_names, **how))

    run.notes["images"] = data.report
    with reported(run), closing_look(watch):
        engine.fit(
            run,
            model,
            config.penalized(step_fn),
            task.train,
            evaluate_fn,
            prepare_fn=task.prepare,
            schedule_fn=schedule_fn,
            after_update=watch,
            lead=mix.active,
            head_lr=config.head_lr,
            save_model=save_model,
        )


def spelled(value: int | float | str) -> Any:
    """What a word of a command line means: true, false, or numbers joined by commas."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    parts = value.split(",")
    numbers = len(parts) > 1 and all(part.strip().isdigit() for part in parts)
    return [int(part) for part in parts] if numbers else value


if __name__ == "__main__":
    engine.cli(main, Config)
