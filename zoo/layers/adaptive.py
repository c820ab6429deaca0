"""One kind of attention in training, others at inference, by length."""

from __future__ import annotations

import functools
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zoo.layers.check import integer
from zoo.layers.core import Core
from zoo.layers.factory import build_core, check_known, register_attention
from zoo.layers.mask import Mask
from zoo.layers.tap import Tap


@register_attention("adaptive")
class Adaptive(Core):
    """Cheap in training, exact where it is cheap, sparse where it is long.

    The kinds are of the same projections and must have no weights of their own.

    Args:
        train: Kind in training.
        short: Kind at inference of samples with fewer than `threshold` keys, padding left out.
        long: Kind at inference of the others.
        threshold: Number of keys.
    """

    unsteady = "it takes another kind from a number of keys on"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        train: str = "block",
        short: str = "full",
        long: str = "strided",
        threshold: int = 512,
    ) -> None:
        super().__init__(num_heads, head_dim)
        self.threshold = integer("threshold", threshold, minimum=0)
        self.in_training, self.when_short, self.when_long = (
            _build(name, kind, num_heads, head_dim)
            for name, kind in (("train", train), ("short", short), ("long", long))
        )
        cores = (self.in_training, self.when_short, self.when_long)
        self.biases = all(core.biases for core in cores)
        self.drops = all(core.drops for core in cores)
        self.scores = all(core.scores for core in cores)
        self.tempers = "queries" if all(core.tempers for core in cores) else ""

    def check_mask(self, mask: Mask | None) -> None:
        for core in (self.in_training, self.when_short, self.when_long):
            core.check_mask(mask)

    def check_bias(self) -> None:
        for core in (self.in_training, self.when_short, self.when_long):
            core.check_bias()

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Mask | None = None,
        *,
        bias: Any = None,
        dropout_p: float = 0.0,
        tap: Tap | None = None,
    ) -> Tensor:
        given = {"bias": bias, "dropout_p": dropout_p, "tap": tap}
        if self.training:
            return self.in_training(q, k, v, mask, **given)
        j = k.shape[-2]
        padding = [
            rule for rule in ([] if mask is None else mask.rules()) if rule.kind == "padding"
        ]
        if j < self.threshold or not padding:  # nothing to look into
            core = self.when_short if j < self.threshold else self.when_long
            return core(q, k, v, mask, **given)
        short = _lengths(padding, j, k.device) < self.threshold  # b|1
        if bool(short.all()):
            return self.when_short(q, k, v, mask, **given)
        if not bool(short.any()):
            return self.when_long(q, k, v, mask, **given)
        return _by_sample(short, self.when_short, self.when_long, q, k, v, mask, given)

    def sees(self, rows: Tensor, cols: Tensor, j: int) -> Tensor | None:
        cores = [self.in_training] if self.training else [self.when_short, self.when_long]
        seen = [core.sees(rows, cols, j) for core in cores]
        known = [pattern for pattern in seen if pattern is not None]
        return functools.reduce(torch.logical_or, known) if len(known) == len(seen) else None


def _lengths(padding: list[Mask], j: int, device: torch.device) -> Tensor:
    """Keys of each sample up to the last that the rules leave: (b|1)."""
    places = torch.arange(1, j + 1, device=device)
    seen = [rule.lower(1, j, device)[:, 0, 0] for rule in padding]  # b|1 j|1
    return functools.reduce(torch.minimum, [(each * places).amax(-1) for each in seen])


def _by_sample(
    short: Tensor,
    when_short: Core,
    when_long: Core,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    given: dict[str, Any],
) -> Tensor:
    """Both kinds, each for its samples; what the tap is shown is put together likewise."""
    tap: Tap | None = given["tap"]
    watched = {} if tap is None else tap.watched()
    outputs: list[Tensor] = []
    shown: dict[str, list[Tensor]] = {what: [] for what in watched}
    for core in (when_short, when_long):
        own = Tap()
        with ExitStack() as stack:
            for what, grad in watched.items():
                stack.enter_context(own.observe(shown[what].append, what, grad=grad))
            outputs.append(core(q, k, v, mask, **{**given, "tap": own}))
    chosen = short[:, None, None, None]
    for what, parts in shown.items():
        if tap is not None and len(parts) == 2:
            tap.show(what, partial(_choose, chosen, parts))
    return _choose(chosen, outputs)


def _choose(first: Tensor, parts: list[Tensor]) -> Tensor:
    return torch.where(first, parts[0], parts[1])


def _build(name: str, kind: str, num_heads: int, head_dim: int) -> Core:
    check_known(kind, name)
    core = build_core(kind, num_heads, head_dim)
    if isinstance(core, Adaptive) or any(True for _ in core.parameters()):
        raise ValueError(
            f"{name} ({kind!r}) must be a kind without weights of its own, and not adaptive"
        )
    return core
