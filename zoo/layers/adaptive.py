"""One kind of attention in training, others at inference, by length."""

from __future__ import annotations

from typing import Any

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
        short: Kind at inference below `threshold` keys.
        long: Kind at inference from there on.
        threshold: Number of keys.
    """

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
        long = k.shape[-2] >= self.threshold
        inference = self.when_long if long else self.when_short
        core = self.in_training if self.training else inference
        return core(q, k, v, mask, bias=bias, dropout_p=dropout_p, tap=tap)


def _build(name: str, kind: str, num_heads: int, head_dim: int) -> Core:
    check_known(kind, name)
    core = build_core(kind, num_heads, head_dim)
    if isinstance(core, Adaptive) or any(True for _ in core.parameters()):
        raise ValueError(
            f"{name} ({kind!r}) must be a kind without weights of its own, and not adaptive"
        )
    return core
