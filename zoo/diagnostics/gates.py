"""What gates do: recorded, and summed up by class.

The means by class are those of Squeeze-and-Excitation Networks (arXiv 1709.01507, "Role of
Excitation"). A layer is a module with a `Tap("gate")`; it may say the
limits of its gate as `gate_range`.

Shapes: b samples, k classes, c channels; a gate (b c ...) is averaged over further axes, such as
places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zoo.diagnostics.capture import Records, capture, layer_name
from zoo.layers.tap import Tap

Range = tuple[float, float]

SATURATED = 0.05  # of the range, at either end
CONSTANT = 1e-6  # deviation over the largest value, below which rounding makes up a channel's moves


@contextmanager
def capture_gates(
    model: nn.Module,
    layers: str | Sequence[str] = "*",
    samples: int | None = None,
    *,
    max_bytes: int = 2 << 30,
) -> Iterator[Records]:
    """Yields a dict that fills with gates: layer name -> one fp32 CPU tensor (b c ...) a forward.

    Args:
        layers: Names of gated modules, with wildcards: "layer3.*", ["*slot_standard*"].
        samples: Keeps only the first samples of each batch; by default all.
        max_bytes: Bound on the memory of all records. `gate_profile` needs no more for more data.
    """
    with capture(model, "gate", layers, samples, max_bytes) as records:
        yield records


@dataclass(frozen=True)
class GateStatistics:
    """Five numbers on the gates of a layer; NaN where one is not defined.

    Attributes:
        mean: Over samples and channels.
        channel_spread: Standard deviation over channels of their means: how differently the layer
            weighs its channels, whatever the input.
        sample_spread: Standard deviation over samples, mean over channels: how much the gate
            follows the input.
        saturation: Share of all values within 5 % of the range from either end, in [0, 1]; where
            one end is infinite, the share exactly at the other.
        class_dependence: Share of a channel's variance over samples that its class explains, mean
            over channels, in [0, 1]: epsilon squared (Kelley 1935, doi 10.1073/pnas.21.9.554). It
            is eta squared less what chance explains: 0 is its expectation without dependence.
            Constant channels count as 0. Needs two classes and more samples than classes.
    """

    mean: float
    channel_spread: float
    sample_spread: float
    saturation: float
    class_dependence: float


def gate_statistics(
    gates: Tensor, targets: Tensor, gate_range: Range | None = (0.0, 1.0)
) -> GateStatistics:
    """The statistics of a layer's gates.

    Args:
        gates: (b c ...).
        targets: Class indices (b,).
        gate_range: Limits of the gate; without them saturation is NaN.
    """
    moments = GateMoments(int(targets.max()) + 1 if len(targets) else 1, gate_range)
    moments.add(gates, targets)
    return moments.statistics()


class GateMoments:
    """Sums of a layer's gates by class, over any number of batches; memory for (k c) numbers.

    Args:
        num_classes: k.
        gate_range: Limits of the gate.

    Attributes:
        counts: Samples of each class (k,).
    """

    def __init__(self, num_classes: int, gate_range: Range | None = (0.0, 1.0)) -> None:
        if gate_range is not None and not gate_range[0] <= gate_range[1]:
            raise ValueError(f"gate_range must be (low, high), got {gate_range}")
        self.gate_range = gate_range
        self.counts = torch.zeros(num_classes, dtype=torch.float64)
        self._sums = self._squares = torch.empty(0)
        self._shift: Tensor | None = None  # of the values, so that squares lose no digits
        self._saturated = self._values = 0

    def add(self, gates: Tensor, targets: Tensor) -> None:
        """Gates (b c ...) and class indices (b,)."""
        gates, targets = gates.detach().cpu().double(), targets.cpu()
        self._check(gates, targets)
        self._saturated += int(_saturated(gates, self.gate_range).sum())
        self._values += gates.numel()
        values = gates.flatten(2).mean(2) if gates.ndim > 2 else gates  # b c
        if self._shift is None:
            self._shift = values[0].clone()
            self._sums = values.new_zeros(len(self.counts), values.shape[1])
            self._squares = values.new_zeros(values.shape[1])
        values = values - self._shift
        self._sums.index_add_(0, targets, values)
        self._squares += values.square().sum(0)
        self.counts += torch.bincount(targets, minlength=len(self.counts))

    def _check(self, gates: Tensor, targets: Tensor) -> None:
        if gates.ndim < 2 or targets.ndim != 1 or len(gates) != len(targets) or not len(gates):
            raise ValueError(
                f"gates {tuple(gates.shape)} must be (b, c, ...) with targets (b,) of the same "
                f"samples, at least one; targets are {tuple(targets.shape)}"
            )
        if self._shift is not None and gates.shape[1] != len(self._shift):
            raise ValueError(f"gates have {gates.shape[1]} channels, before {len(self._shift)}")
        if not 0 <= int(targets.min()) <= int(targets.max()) < len(self.counts):
            raise ValueError(
                f"targets {int(targets.min())} to {int(targets.max())} must lie in "
                f"[0, num_classes = {len(self.counts)})"
            )

    @property
    def channel_means(self) -> Tensor:
        """Mean of each channel over all samples (c,)."""
        return self._shifted() + self._sums.sum(0) / self.counts.sum()

    @property
    def class_means(self) -> Tensor:
        """Mean of each channel over the samples of a class (k c); NaN for a class without any."""
        return self._shifted() + self._sums / self.counts[:, None]

    def _shifted(self) -> Tensor:
        if self._shift is None:
            raise ValueError("no gates were added")
        return self._shift

    def statistics(self) -> GateStatistics:
        means, n = self.channel_means, float(self.counts.sum())
        total = (self._squares - self._sums.sum(0).square() / n).clamp_min(0)
        low, high = self.gate_range or (0.0, 0.0)
        return GateStatistics(
            mean=float(means.mean()),
            channel_spread=float(means.std(correction=0)),
            sample_spread=float((total / n).sqrt().mean()),
            saturation=self._saturated / self._values if low < high else math.nan,
            class_dependence=self._class_dependence(total, n),
        )

    def _class_dependence(self, total: Tensor, n: float) -> float:
        """Epsilon squared from the sums of squares about the means, `total` (c,)."""
        seen = self.counts > 0
        k = int(seen.sum())
        if k < 2 or n <= k:
            return math.nan
        between = (self._sums[seen].square() / self.counts[seen, None]).sum(0)
        within = (self._squares - between).clamp_min(0)
        explained = 1 - within / total * ((n - 1) / (n - k))
        largest = self._shifted().abs() + (self._squares / n).sqrt()
        moves = (total / n).sqrt() > CONSTANT * largest
        return float(torch.where(moves, explained, 0.0).mean().clamp(0, 1))


def _saturated(gates: Tensor, gate_range: Range | None) -> Tensor:
    low, high = gate_range or (-math.inf, math.inf)
    margin = SATURATED * (high - low) if math.isfinite(high - low) else 0.0
    return (gates <= low + margin) | (gates >= high - margin)


def gate_ranges(model: nn.Module) -> dict[str, Range | None]:
    """The layers with gates, and their limits; None where a layer does not say them."""
    return {
        layer_name(path): getattr(model.get_submodule(path.rpartition(".")[0]), "gate_range", None)
        for path, module in model.named_modules()
        if isinstance(module, Tap) and module.kind == "gate"
    }


@torch.no_grad()
def gate_profile(
    model: nn.Module, batches: Iterable[tuple[Any, Tensor]], num_classes: int
) -> dict[str, GateMoments]:
    """Sums up the gates of all layers over data, in evaluation mode.

    Args:
        model: Called with the first of each pair.
        batches: Inputs and class indices (b,).
        num_classes: k.

    Returns:
        By layer; layers that showed nothing are left out.

    Raises:
        ValueError: The model has no layer with a gate.
        NothingCapturedError: None of them showed it.
    """
    profile = {n: GateMoments(num_classes, limits) for n, limits in gate_ranges(model).items()}
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with capture_gates(model) as records:
            for inputs, targets in batches:
                model(inputs)
                for name, gates in records.items():
                    while gates:
                        profile[name].add(gates.pop(), targets)
    finally:
        for module, training in modes:
            module.training = training
    return {name: moments for name, moments in profile.items() if moments.counts.any()}
