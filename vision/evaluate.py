"""Classification counts, which add up over batches and processes, and metrics from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F


def top_k(num_classes: int) -> int:
    """The k of the second accuracy: 5, or one less than the classes where they are fewer than 6."""
    return max(1, min(5, num_classes - 1))


def count(logits: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
    """Sums over a batch.

    Args:
        logits: (b, classes).
        targets: Class indices (b,).

    Returns:
        `n`, `loss`, `top1`, `topk`; `class_n`, `class_hits`, `class_predicted` (classes,).
    """
    classes = logits.shape[1]
    ranked = logits.topk(top_k(classes), dim=1).indices
    hits = ranked == targets[:, None]
    return {
        "n": torch.tensor(len(targets)),
        "loss": F.cross_entropy(logits.float(), targets, reduction="sum"),
        "top1": hits[:, 0].sum(),
        "topk": hits.any(dim=1).sum(),
        "class_n": torch.bincount(targets, minlength=classes),
        "class_hits": torch.bincount(targets[hits[:, 0]], minlength=classes),
        "class_predicted": torch.bincount(ranked[:, 0], minlength=classes),
    }


def metrics(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """`val/loss`, `val/top1` and `val/topK` in percent, and `val/n`, from summed counts."""
    n = int(sums["n"])
    k = top_k(len(sums["class_n"]))
    values = {"val/loss": float(sums["loss"]) / n, "val/top1": 100 * int(sums["top1"]) / n}
    if k > 1:
        values[f"val/top{k}"] = 100 * int(sums["topk"]) / n
    return {**values, "val/n": n}


@dataclass(frozen=True)
class ClassRow:
    """One class of a per-class table; recall and precision in percent, NaN where undefined."""

    name: str
    n: int
    recall: float
    precision: float


def class_rows(sums: Mapping[str, torch.Tensor], names: list[str]) -> list[ClassRow]:
    """Per class: images, share of them recognised, share of its predictions that are right."""
    columns = (sums[key].tolist() for key in ("class_n", "class_hits", "class_predicted"))
    return [
        ClassRow(name, int(n), _percent(hits, n), _percent(hits, predicted))
        for name, n, hits, predicted in zip(names, *columns, strict=True)
    ]


def _percent(part: float, whole: float) -> float:
    return 100 * part / whole if whole else math.nan


def interval(hits: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's interval for a share, in percent (doi 10.1080/01621459.1927.10502953)."""
    from scipy.stats import binomtest

    found = binomtest(hits, n).proportion_ci(confidence, method="wilson")
    return 100 * float(found.low), 100 * float(found.high)
