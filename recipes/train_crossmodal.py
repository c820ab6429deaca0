"""Trains models of images and their captions: to find, to match and to write them.

Command:
    accelerate launch recipes/train_crossmodal.py
    accelerate launch recipes/train_crossmodal.py --task match
    accelerate launch recipes/train_crossmodal.py --task caption --decoder lstm_additive
    accelerate launch recipes/train_crossmodal.py --data pairs:captions.jsonl --img-size 64

contrastive trains a dual encoder (CLIP, arXiv 2103.00020), match adds cross-attention and decides
for each pair (ALBEF, arXiv 2107.07651), caption writes by an LSTM or a Transformer.

Expected of the first: val/t2i_recall@5 31.8 % of 277 unseen names (mean of 3 seeds, 95 % interval
29.1 to 34.5; chance 1.8) in about 3 minutes on one thread of an Intel Xeon, torch 2.14.1. Of the
second 32.9 % (31.3 to 34.4). The others: see RESULTS.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

import zoo
from crossmodal.captioner import caption_loss
from crossmodal.data import First
from crossmodal.evaluate import (
    caption_rows,
    image_rows,
    score_captions,
    score_dual,
    score_matcher,
    text_rows,
)
from crossmodal.looks import AttentionSaver, TowerWatch
from crossmodal.loss import contrastive_loss
from crossmodal.matcher import match_loss
from crossmodal.samples import write_samples
from crossmodal.scores import sacrebleu_metrics
from crossmodal.training import PairOptions, PairTask, build, check_validation
from vision.inspection.training_watch import closing_look
from zoo import engine
from zoo.layers.check import integer
from zoo.pages import add_samples, reported
from zoo.penalties import PenaltyOptions

MODELS = {"contrastive": "dual_micro", "match": "matcher_micro", "caption": "captioner_micro"}
REMEMBERED = 2000  # training images about which captions are written, at most

Metrics = dict[str, float]


@dataclass(frozen=True)
class Config(PenaltyOptions, PairOptions, engine.TrainOptions):
    """Trains a model of images and captions and writes a run folder."""

    task: Literal["contrastive", "match", "caption"] = "contrastive"
    """What is learned: one space for both, whether a pair belongs together, or writing captions."""
    model: str = ""
    """Name of a model, see `zoo.list_models()`, or local-dir:FOLDER; dual_micro, matcher_micro or
    captioner_micro by default, as the task has it."""
    data: str = "emoji"
    epochs: int = 40
    batch_size: int = 128
    lr: float = 2e-3
    eval_every: int = 10
    loss: Literal["infonce", "sigmoid"] | None = None
    """Contrastive loss (arXiv 2103.00020, 2303.15343); the model's own by default, infonce."""
    embed_dim: int | None = None
    """Width of the shared space; the model's own by default."""
    fusion_norm: Literal["per_modality", "shared", "none", "qk"] | None = None
    """match: how the modalities are normalised before they attend."""
    fusion_layout: Literal["cross", "merged"] | None = None
    """match: attend to the other modality alone, or to both (arXiv 2111.02387)."""
    fusion_direction: Literal["text_to_image", "image_to_text", "both"] | None = None
    """match: which modality attends."""
    fusion_attention: str | None = None
    """match: kind of attention, see `zoo.layers.list_attention()`."""
    gated: bool | None = None
    """match: whether the fusion's branches have gates that start at 0 (arXiv 2204.14198)."""
    image_scale: float | None = None
    """match: factor on the image's tokens before the fusion, to see what norms are for."""
    rerank: int = 16
    """match: candidates of the dual encoder that the matcher puts into order."""
    rerank_similarity: bool = True
    """match: by its log-odds plus the scaled similarity (arXiv 2201.12086), or by them alone."""
    decoder: Literal["lstm_fixed", "lstm_additive", "transformer"] | None = None
    """caption: what writes (arXiv 1411.4555, 1502.03044, 1706.03762)."""
    beams: int = 1
    """caption: captions that evaluation follows at once; 1 takes the likeliest word each time."""
    label_smoothing: float = 0.0
    """caption: share of each target spread over the vocabulary."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", self.model or MODELS[self.task])
        engine.TrainOptions.__post_init__(self)
        PairOptions.__post_init__(self)
        PenaltyOptions.__post_init__(self)
        for name, least in (("rerank", 1), ("beams", 1)):
            integer(name, getattr(self, name), least)
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing ({self.label_smoothing}) must lie in [0, 1)")
        self.options_of_the_task()

    def options_of_the_task(self) -> dict[str, Any]:
        """Options of the model that were given; those of another task are refused."""
        tasks: dict[str, list[str]] = {
            "contrastive": ["loss", "embed_dim"],
            "match": ["loss", "embed_dim", "gated", "image_scale"],
            "caption": ["decoder"],
        }
        tasks["match"] += [
            f"fusion_{name}" for name in ("norm", "layout", "direction", "attention")
        ]
        names = dict.fromkeys(name for each in tasks.values() for name in each)
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        for name in given:
            if name not in tasks[self.task]:
                of = " or ".join(task for task, own in tasks.items() if name in own)
                raise ValueError(f"{name} is for --task {of}, and the task is {self.task}")
        return given


def main(config: Config) -> None:
    if config.task == "caption":
        sacrebleu_metrics()  # before an epoch is trained for nothing
    run = engine.start_run(__file__, config)
    data = config.load()
    check_validation(data, least=1 if config.task == "caption" else 2)
    model = build(
        config,
        config.model,
        data,
        pretrained=config.pretrained or False,
        **config.options_of_the_task(),
    )
    task = PairTask(model, data, config, config.seed)
    saver = attention_saver(model, run, task, config)
    scores = {"contrastive": dual_scores, "match": match_scores, "caption": caption_scores}

    def contrastive(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found = model(batch["images"], batch["tokens"], batch["mask"])
        return pair_loss(found, batch)

    def match(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        key, size = (config.seed, batch["epoch"], batch["index"]), batch["size"]
        found = model(batch["images"], batch["tokens"], batch["mask"], key=key, size=size)
        return pair_loss(found, batch) + match_loss(found)

    def pair_loss(found: Any, batch: dict[str, Any]) -> Tensor:
        return contrastive_loss(
            found.image, found.text, found.scale, found.bias, kind=kind, size=batch["size"]
        )

    def caption(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        logits = model(batch["images"], batch["tokens"], batch["mask"])
        return caption_loss(logits, batch["tokens"], batch["mask"], config.label_smoothing)

    def evaluate_fn(model: Any) -> Metrics | None:
        found = scores[config.task](model, run, task, config)
        return None if found is None else {f"val/{name}": value for name, value in found.items()}

    def after_update(model: Any, step: int) -> dict[str, float] | None:
        if config.task != "caption":
            model.clamp_scale_()
        return saver(model, step) if saver else None

    def save_model(model: Any, folder: Path) -> None:
        zoo.save_pretrained(model, folder)
        how: dict[str, Any] = {
            "batch_size": 2 * config.batch_size,
            "rerank": config.rerank,
            "similarity": config.rerank_similarity,
            "beams": config.beams,
        }
        add_samples(run, lambda to: write_samples(to, model, task, **how))

    step_fns = {"contrastive": contrastive, "match": match, "caption": caption}
    kind = getattr(model, "loss", "")
    run.notes["pairs"] = data.report
    with reported(run), closing_look(saver):
        engine.fit(
            run,
            model,
            config.penalized(step_fns[config.task]),
            task.train,
            evaluate_fn,
            prepare_fn=task.prepare,
            after_update=after_update,
            best=best_metric(config.task, len(data.val)),
            save_model=save_model,
        )


def best_metric(task: str, candidates: int) -> str:
    """The number whose highest value marks the best checkpoint."""
    if task == "caption":
        return "val/chrf"
    return f"val/t2i_recall@{5 if candidates >= 5 else 1}"


def attention_saver(
    model: Any, run: engine.Run, task: PairTask, config: Config
) -> AttentionSaver | TowerWatch | None:
    """Looks at fixed validation pairs: where words look, or what there is in the image tower."""
    if not config.save_attention_every:
        return None
    kind = TowerWatch if config.task == "contrastive" else AttentionSaver
    options = engine.watch_options(run, model, len(task.train))
    return kind(model, task.data.val, **options)


def dual_scores(model: Any, run: engine.Run, task: PairTask, config: Config) -> Metrics | None:
    """Recall both ways over all validation pairs."""
    found = retrieval_rows(model, run, task, config)
    return None if found is None else score_dual(model, *found, task.data.val)


def match_scores(model: Any, run: engine.Run, task: PairTask, config: Config) -> Metrics | None:
    """The same after the matcher has put the nearest into order, and before it."""
    found = retrieval_rows(model, run, task, config, tokens=True)
    if found is None:
        return None
    val, similarity = task.data.val, config.rerank_similarity
    return score_matcher(model, *found, val, k=config.rerank, similarity=similarity)


def retrieval_rows(
    model: Any, run: engine.Run, task: PairTask, config: Config, tokens: bool = False
) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
    """What the towers make of all validation images and all their captions."""
    val, rows = task.data.val, {}
    for name, source, fn in (
        ("images", task.pairs(val), image_rows(task, tokens)),
        ("texts", task.captions(val), text_rows(tokens)),
    ):
        loader = engine.evaluation_loader(
            run.accelerator, source, 2 * config.batch_size, config.workers
        )
        found = engine.collect(run.accelerator, model, loader, fn, run.stopping)
        if found is None:
            return None
        rows[name] = found
    return rows["images"], rows["texts"]


def caption_scores(model: Any, run: engine.Run, task: PairTask, config: Config) -> Metrics | None:
    """What the model writes about the validation images, and about the first training ones."""
    scores: Metrics = {}
    for prefix, pairs in (("", task.data.val), ("train_", task.data.train)):
        source = task.pairs(pairs)
        loader = engine.evaluation_loader(
            run.accelerator,
            First(source, REMEMBERED) if prefix else source,
            2 * config.batch_size,
            config.workers,
        )
        fn = caption_rows(task, config.beams)
        rows = engine.collect(run.accelerator, model, loader, fn, run.stopping)
        if rows is None:
            return None
        found = score_captions(task, rows, pairs)
        scores |= {f"{prefix}{name}": value for name, value in found.items()}
    return scores


if __name__ == "__main__":
    engine.cli(main, Config)
