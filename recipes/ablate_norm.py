"""What are the norms of a fusion for? Norms x scales of the image's features x seeds.

Command:
    python recipes/ablate_norm.py --out ablations/norm
    python recipes/ablate_norm.py --out ablations/norm --plan
    python recipes/ablate_norm.py --out ablations/two --norms per_modality,none --scales 1,100

Trains a matcher of images and captions (`recipes/train_crossmodal.py --task match`, several at a
time on one thread each) whose text queries attend to text and image tokens side by side, with every
norm, factor on the image's tokens and seed. Writes results.jsonl, table.csv, table.md, effects.png,
curves.png and report.html. Interrupted, the same command goes on.

Each norm is compared with `per_modality` (a LayerNorm for either modality) at the same scale:
    shared  one LayerNorm for both. It too normalises each token by itself, so a factor on a
            modality is nothing to it either: what can differ is that both share gain and bias
    none    tokens as they are; the larger ones have the larger scores and values
    qk      tokens as they are, queries and keys normalised per head: scores know no factor, values
            carry it

The factor is on the image's tokens as the fusion gets them, so that the towers and the dual encoder
start alike; what its gradient then does to the image tower is part of the effect. At factor 1 the
image's tokens of the default model start at about half the text's root mean square. Whatever the
norm, the MLPs of the fusion and the matching head read normalised tokens. Branches have no gates
unless asked for: a gate that starts at 0 is itself a remedy for large values, and would be tested
along with the norms. Recall is that of the matcher's log-odds alone, over the candidates that the
dual encoder finds.

Expected: see RESULTS.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from crossmodal.balance import watched
from crossmodal.loss import contrastive_loss
from crossmodal.matcher import Matcher, match_loss
from crossmodal.training import PairOptions, PairTask, build
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
from zoo.ablation.results import Curve, learning_curves
from zoo.diagnostics.plotting import figure_class
from zoo.engine import cli
from zoo.engine.checkpoint import write_atomically

BASELINE = "per_modality"
LISTS = ("norms", "scales")  # flags that take a,b as well as a b
QUESTION = "What are the norms of a fusion for?"
METRIC, SHARE, ENTROPY = "val/t2i_recall@5", "val/attn_image_share", "val/attn_entropy"
ROWS = {
    METRIC: "text to image recall@5, %",
    SHARE: "share of weight on the image",
    ENTROPY: "entropy of the weights, 0 to 1",
}
COLUMNS = {
    "recall@5 of the dual encoder": "val/dual_t2i_recall@5",
    "share on the image": SHARE,
    "entropy": ENTROPY,
}
# Okabe and Ito's colours, told apart by the colour-blind; dashes where lines may coincide.
STYLES = {
    "per_modality": ("#0072B2", "-"),
    "shared": ("#009E73", (0, (4, 2))),
    "none": ("#D55E00", "-"),
    "qk": ("#CC79A7", (0, (1, 1))),
}

Norm = Literal["per_modality", "shared", "none", "qk"]


@dataclass(frozen=True)
class Config(AblationOptions):
    """Compares norms of cross-attention where one modality's features are larger."""

    model: str = "matcher_micro"
    """A matcher."""
    data: str = "emoji"
    epochs: int = 12
    lr: float = 2e-3
    batch_size: int = 128
    image_tower: str | None = None
    """As for train_crossmodal.py; the model's by default."""
    text_tower: str | None = "text_bag"
    """As for train_crossmodal.py."""
    norms: tuple[Norm, ...] = ("per_modality", "shared", "none", "qk")
    """Norms of the fusion; the baseline per_modality is added."""
    scales: tuple[float, ...] = (1.0, 10.0, 100.0)
    """Factors on the image's tokens."""
    gated: bool = False
    """Whether the fusion's branches have gates that start at 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.scales or min(self.scales) <= 0:
            raise ValueError(f"scales {self.scales} must be one number or more, all above 0")


def main(config: Config) -> Report | None:
    torch.set_num_threads(config.threads)
    plan, out = make_plan(config), Path(config.out)
    model, task = make_task(config)
    print(describe(plan, out, config.workers, lambda: seconds(config, model, task)))
    if config.plan:
        return None
    rows = run_cells(plan, out, workers=config.workers, threads=config.threads)
    even = even_share(model, task)
    note = (
        "Share and entropy: of the text queries' weights in some validation pairs, after the last "
        f"epoch, mean over seeds; weights that are all alike put {even:.3f} on the image."
    )
    pictures = {}
    with suppress(ImportError):  # report says so, after it has written the tables
        pictures["Epoch by epoch"] = draw_curves(plan, config, even)
    done = report(plan, out, extra=means(plan, rows), note=note, pictures=pictures)
    print((out / "table.md").read_text(encoding="utf-8"))
    return done


def make_plan(config: Config) -> Plan:
    """Scale by scale, the baseline and the norms that are compared with it."""
    variants = []
    for scale in dict.fromkeys(config.scales):
        for norm in dict.fromkeys((BASELINE, *config.norms)):
            own = {} if norm == BASELINE else {BASELINE: variant_name(BASELINE, scale)}
            flags = {"fusion_norm": norm, "image_scale": scale}
            variants.append(Variant(variant_name(norm, scale), flags, own))
    shared: dict[str, object] = {"task": "match", "fusion_layout": "merged"}
    shared |= {"gated": str(config.gated), "rerank_similarity": False, "eval_every": 1}
    return Plan(
        recipe=Path(__file__).with_name("train_crossmodal.py"),
        variants=variants,
        seeds=range(config.seeds),
        flags={**shared, **config.flags("image_tower", "text_tower")},
        baselines=(BASELINE,),
        metric=METRIC,
        question=QUESTION,
    )


def variant_name(norm: str, scale: float) -> str:
    """
    >>> variant_name("none", 100.0)
    'none x100'
    """
    return f"{norm} x{scale:g}"


def means(plan: Plan, rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, object]]:
    """`COLUMNS` of each variant, mean over its seeds."""
    found: dict[str, dict[str, object]] = {}
    for name in plan.names:
        metrics = [row["metrics"] for row in rows if row["variant"] == name]
        found[name] = {
            column: sum(each[metric] for each in metrics) / len(metrics)
            for column, metric in COLUMNS.items()
        }
    return found


# The model, for what it costs and how many tokens it has


def make_task(config: Config) -> tuple[Matcher, PairTask]:
    """A model of the variants' shape, and their data."""
    options = PairOptions(
        data=config.data, image_tower=config.image_tower, text_tower=config.text_tower
    )
    data = options.load()
    model = build(options, config.model, data, fusion_layout="merged", gated=config.gated)
    return model, PairTask(model, data, options, seed=0)


def seconds(config: Config, model: Matcher, task: PairTask) -> float:
    """Of a cell, from a timed step; evaluation costs about a step for as many pairs."""
    pairs = len(task.data.train) + len(task.data.val)
    keys = [(0, i % len(task.data.train)) for i in range(config.batch_size)]
    batch = task.prepare(task.train.__getitems__(keys))

    def step() -> None:
        found = model(batch["images"], batch["tokens"], batch["mask"], key=(0,))
        near = contrastive_loss(found.image, found.text, found.scale, found.bias, kind=model.loss)
        (near + match_loss(found)).backward()

    return seconds_of_cell(step, config.epochs * pairs / config.batch_size)


def even_share(model: Matcher, task: PairTask) -> float:
    """The share on the image of weights that are all alike, in the pairs that are watched."""
    val, tower = task.data.val, model.image_tower
    captions = [val.captions[i][0] for i in watched(len(val)).tolist()]
    words = task.tokenizer(captions)[1].sum(1).double()
    cells = tower.num_prefix_tokens + math.prod(tower.grid)
    return float((words * cells / (words + cells)).sum() / words.sum())  # words are the queries too


# curves.png


def draw_curves(plan: Plan, config: Config, even: float) -> Path:
    """Draws recall, share and entropy by epoch: scales as columns, a line for each norm.

    Lines are means over seeds, bands their range.

    Raises:
        ImportError: matplotlib is missing.
    """
    path, scales = Path(config.out) / "curves.png", list(dict.fromkeys(config.scales))
    figure = figure_class(path)(figsize=(1.5 + 3.2 * len(scales), 8), layout="constrained")
    panels = figure.subplots(len(ROWS), len(scales), squeeze=False, sharex=True, sharey="row")
    for row, metric in zip(panels, ROWS, strict=True):
        curves = learning_curves(replace(plan, metric=metric), config.out)
        for axes, scale in zip(row, scales, strict=True):
            if metric == SHARE:
                axes.axhline(even, color="0.5", linewidth=1, linestyle=":", label="even weights")
            for norm in dict.fromkeys((BASELINE, *config.norms)):
                _draw(axes, curves[variant_name(norm, scale)], norm)
    _label(figure, panels, scales)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))
    return path


def _label(figure: Any, panels: Any, scales: Sequence[float]) -> None:
    for axes in panels.flat:
        axes.grid(color="0.92", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    for axes, label in zip(panels[:, 0], ROWS.values(), strict=True):
        axes.set_ylabel(label)
    for top, bottom, scale in zip(panels[0], panels[-1], scales, strict=True):
        top.set_title(f"image tokens x{scale:g}", fontsize=10)
        bottom.set_xlabel("epoch")
        bottom.xaxis.get_major_locator().set_params(integer=True)
    lines = {each.get_label(): each for axes in panels[:, 0] for each in axes.get_lines()}
    figure.legend(
        handles=list(lines.values()), loc="outside lower center", ncols=len(lines),
        frameon=False, title="mean of seeds, and their range", title_fontsize=9, fontsize=9,
    )  # fmt: skip


def _draw(axes: Any, curves: dict[int, Curve], norm: str) -> None:
    by_epoch: dict[float, list[float]] = {}
    for epoch, value in (point for curve in curves.values() for point in curve):
        by_epoch.setdefault(epoch, []).append(value)
    epochs = sorted(by_epoch)
    values = [by_epoch[epoch] for epoch in epochs]
    colour, dashes = STYLES[norm]
    low, high = [min(each) for each in values], [max(each) for each in values]
    axes.fill_between(epochs, low, high, color=colour, alpha=0.15, linewidth=0)
    marker = "o" if len(epochs) == 1 else ""
    middle = [sum(each) / len(each) for each in values]
    axes.plot(epochs, middle, color=colour, linestyle=dashes, marker=marker, label=norm)


if __name__ == "__main__":
    cli(main, Config, split_commas(sys.argv[1:], LISTS))
