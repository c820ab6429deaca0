"""Optimizer, learning-rate curve and weight averaging."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from zoo.depth import layer_indices
from zoo.freezing import classifier_parameters


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    layer_decay: float | None = None,
    head_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """Groups trainable parameters by weight decay and learning-rate scale.

    No decay for vectors (norms, biases, LayerScale) and for the names, or wildcards, in the model's
    `no_weight_decay()` (positions, tokens). With `layer_decay` a parameter of layer l of L learns
    at `layer_decay ** (L - l)` of the rate (ELECTRA, arXiv 2003.10555; BEiT, 2106.08254), by
    `zoo.depth.layer_indices`. The classifier learns at `head_scale` of it.

    Raises:
        ValueError: nothing is trainable, or the model does not tell its layers, or its head.
    """
    skip = set(getattr(model, "no_weight_decay", set)())
    scales = _lr_scales(model, layer_decay, head_scale)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        if param.requires_grad:
            exempt = param.ndim <= 1 or any(fnmatchcase(name, pattern) for pattern in skip)
            key = (0.0 if exempt else weight_decay, scales.get(name, 1.0))
            groups.setdefault(key, []).append(param)
    if not groups:
        raise ValueError(f"{type(model).__name__} has no trainable parameter")
    return [
        {"params": params, "weight_decay": decay, "lr_scale": scale}
        for (decay, scale), params in groups.items()
    ]


def _lr_scales(model: nn.Module, layer_decay: float | None, head_scale: float) -> dict[str, float]:
    """Factors on the learning rate by name; 1 for those left out."""
    scales: dict[str, float] = {}
    if layer_decay is not None:
        layers, last = layer_indices(model)
        scales = {name: layer_decay ** (last - layer) for name, layer in layers.items()}
    if head_scale != 1:
        head = {id(param) for param in classifier_parameters(model)}
        own = (name for name, param in model.named_parameters() if id(param) in head)
        scales |= dict.fromkeys(own, head_scale)
    return scales


def adamw(
    model: nn.Module,
    lr: float,
    weight_decay: float = 0.05,
    layer_decay: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    head_lr: float | None = None,
) -> torch.optim.AdamW:
    """AdamW (arXiv 1711.05101) over `parameter_groups`, with torch's fused kernel.

    `head_lr` is the classifier's rate, where it differs.
    """
    if head_lr is not None and lr == 0:
        raise ValueError(
            f"head_lr ({head_lr}) is a multiple of lr, which is 0; freeze the rest instead"
        )
    head_scale = 1.0 if head_lr is None else head_lr / lr
    groups = parameter_groups(model, weight_decay, layer_decay, head_scale)
    for group in groups:
        group["lr"] = lr * group["lr_scale"]
    device = groups[0]["params"][0].device.type
    return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=device in ("cpu", "cuda"))


def warmup_cosine(update: int, total: int, warmup: int = 0, floor: float = 0.0) -> float:
    """Factor on the learning rate of update `update` (0-based) of `total`.

    Rises linearly to 1 over `warmup` updates, then falls along half a cosine that reaches `floor`
    exactly at the last update (SGDR, arXiv 1608.03983, without restarts).
    """
    if not 0 <= update < total:
        raise ValueError(f"update ({update}) must be in [0, total = {total})")
    if update < warmup:
        return (update + 1) / (warmup + 1)
    progress = (update - warmup) / max(1, total - 1 - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Sets the learning rate of each parameter group to `lr` times the group's `lr_scale`."""
    for group in groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


class EMA(AveragedModel):
    """Exponential moving average of a model's weights and buffers.

    After n updates the decay is min(decay, (1 + n) / (10 + n)), so that the random start is
    forgotten. Floating-point buffers (running statistics) are averaged as the weights are; counters
    are copied.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        if not 0 < decay < 1:
            raise ValueError(f"ema decay ({decay}) must lie between 0 and 1")
        self.decay = decay
        super().__init__(model, multi_avg_fn=self._average, use_buffers=True)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def _average(
        self,
        averaged: tuple[torch.Tensor, ...] | list[torch.Tensor],
        current: tuple[torch.Tensor, ...] | list[torch.Tensor],
        count: torch.Tensor | int,
    ) -> None:
        if not averaged[0].is_floating_point():
            torch._foreach_copy_(averaged, current)
            return
        n = int(self.n_averaged)  # not `count`, its copy on the device: reading that would wait
        decay = min(self.decay, (1 + n) / (10 + n))
        torch._foreach_lerp_(averaged, current, 1 - decay)
