"""What gates do: recorded, and summed up by class.

The means by class are those of Squeeze-and-Excitation Networks (arXiv 1709.01507, "Role of
Excitation"). A layer is a module with a `Tap("gate")`, which may say the limits of its gate as
`gate_range`, or a module of another library that computes one (`zoo.diagnostics.foreign_gates`).

Shapes: b samples, k classes, c channels; a gate (b c ...) is averaged over further axes, such as
places.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from zoo.diagnostics.capture import Observable, Records, capture, layer_names
from zoo.diagnostics.foreign_gates import find_foreign_gate
from zoo.layers.check import integer
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
    taps = {name: tap for name, (tap, _) in _gates(model).items()}
    with capture(taps, "gate", layers, samples, max_bytes) as records:
        yield records


@dataclass(frozen=True)
class GateStatistics:
    """Five numbers on the gates of a layer; NaN where one is not defined, or a gate is NaN.

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
    _check_types(gates, targets)
    num_classes = int(targets.max()) + 1 if targets.numel() else 1
    moments = GateMoments(max(1, num_classes), gate_range)
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
        num_classes = integer("num_classes", num_classes)
        self.gate_range = _checked_range(gate_range)
        self.counts = torch.zeros(num_classes, dtype=torch.float64)
        self._sums = self._squares = torch.empty(0)
        self._shift: Tensor | None = None  # of the values, so that squares lose no digits
        self._saturated, self._values = 0.0, 0

    def add(self, gates: Tensor, targets: Tensor) -> None:
        """Gates (b c ...) and class indices (b,)."""
        _check_types(gates, targets)
        gates, targets = gates.detach().cpu().double(), targets.cpu().long()
        self._check(gates, targets)
        self._saturated += float(_saturated(gates, self.gate_range).sum())
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
        fit = gates.ndim >= 2 and targets.ndim == 1 and len(gates) == len(targets)
        if not fit or not gates.numel():
            raise ValueError(
                f"gates {tuple(gates.shape)} must be (b, c, ...), none of them 0, with targets "
                f"(b,) of the same samples; targets are {tuple(targets.shape)}"
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
        still = (total / n).sqrt() <= CONSTANT * largest  # False of NaN, which is to stay
        return float(torch.where(still, 0.0, explained).mean().clamp(0, 1))


def _saturated(gates: Tensor, gate_range: Range | None) -> Tensor:
    low, high = gate_range or (-math.inf, math.inf)
    margin = SATURATED * (high - low) if math.isfinite(high - low) else 0.0
    near = (gates <= low + margin) | (gates >= high - margin)
    return torch.where(gates.isnan(), gates, near.to(gates.dtype))


def _check_types(gates: Tensor, targets: Tensor) -> None:
    if gates.is_complex():
        raise TypeError(f"gates ({gates.dtype}) must be real")
    if targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool:
        raise TypeError(f"targets ({targets.dtype}) must be class indices, integers")


def _checked_range(limits: Range | None) -> Range | None:
    if limits is None:
        return None
    message = f"gate_range ({limits!r}) must be (low, high), two numbers with low <= high, or None"
    pair = isinstance(limits, Sequence) and len(limits) == 2
    if not pair or not all(isinstance(end, Real) and not isinstance(end, bool) for end in limits):
        raise TypeError(message)
    low, high = map(float, limits)
    if not low <= high:
        raise ValueError(message)
    return low, high


def gate_ranges(model: nn.Module) -> dict[str, Range | None]:
    """The layers with gates, and their limits; None where a layer does not say them."""
    return {name: limits for name, (_, limits) in _gates(model).items()}


def _gates(model: nn.Module) -> dict[str, tuple[Observable, Range | None]]:
    """Layer -> where its gate is observed, and its limits; parts of a layer are none."""
    modules = dict(model.named_modules())
    taps = {path for path, m in modules.items() if isinstance(m, Tap) and m.kind == "gate"}
    layers = tuple(path[: path.rfind(".") + 1] for path in taps)
    gates: dict[str, tuple[Observable, Range | None]] = {}
    name = layer_names(model)
    for path, module in modules.items():
        if path in taps and isinstance(module, Tap):
            limits = _limits(modules[path.rpartition(".")[0]], module)
            gates[name(path)] = (module, limits)
        elif not f"{path}.".startswith(layers) and (found := find_foreign_gate(module)):
            own = name(f"{path}.{found.name}".lstrip("."))
            gates[own.rpartition(".")[0] or own] = (found, found.gate_range)
    return gates


def _limits(layer: nn.Module, tap: Tap) -> Range | None:
    """What a layer says, or what its tap makes of it where it shows something else."""
    limits: Range | None = getattr(layer, "gate_range", None)
    shown = getattr(tap, "shown_range", None)
    return limits if limits is None or shown is None else shown(*limits)


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
