"""What counts as wrong in what a look shows: one rule a kind, with its limit and its grounds.

The limits rest on small trainings with looks at 20 to 40 steps, each at 4 validation samples: 26
healthy ones, of ViTs on digits (16 tokens; class token, registers, average and map pooling, several
positions, qk-norm, 2 to 8 heads, depth 4 and 8, width 64 and 128, 3 to 100 epochs: 66 to 2,200
updates) and emoji (64 tokens), of CNNs with squeeze-and-excitation and of a matcher; and broken
ones, named with each limit. The tests train others, with other seeds. One large model was looked at
as well, a fine-tuned DINOv2 ViT-S/14 of 257 tokens. What the limits say of other models is an
extrapolation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from zoo.diagnostics.looks import GateLook, LayerLook

LEAST_KEYS = 4  # with fewer, little can be said of how a query chooses
LEAST_HEADS = 3


@dataclass(frozen=True)
class Moment:
    """What `Alarms.check` was given, and what is known from before.

    Attributes:
        progress: Share of the run that is over, 0 to 1.
        dtype: Of the scores.
        training: What was told of the update at each look, the last one at the end.
        first_scores: By layer, the largest absolute score of each head (h) at the first look.
        updates: Since the start; None for a model that is trained.
    """

    progress: float
    dtype: torch.dtype = torch.float32
    layers: Mapping[str, LayerLook] = field(default_factory=dict)
    gates: Mapping[str, GateLook] = field(default_factory=dict)
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    training: Sequence[Mapping[str, float]] = ()
    first_scores: Mapping[str, Tensor] = field(default_factory=dict)
    updates: int | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, of a head or of a layer as a whole.

    Attributes:
        value: What was measured.
        limit: Where the rule begins.
        what: The modality, or the number, where a kind is about several.
    """

    kind: str
    layer: str
    head: int | None
    value: float
    limit: float
    what: str = ""

    @property
    def key(self) -> tuple[str, str, int | None]:
        return self.kind, self.layer, self.head

    @property
    def severity(self) -> float:
        """How far beyond the limit, to compare heads of one layer."""
        away = abs(self.value - self.limit)
        return math.inf if math.isnan(away) else away


Rule = Callable[[Moment], Iterator[Finding]]


def largest_scores(look: LayerLook) -> Tensor | None:
    """The largest absolute score of each head (h); None where scores are not known."""
    return None if look.logits is None else look.logits.abs().amax(-1)


def uniform(
    moment: Moment, limit: float = 0.995, since: float = 0.5, least: int = 60
) -> Iterator[Finding]:
    """A layer whose heads all give every key the same, in the second half of a run.

    The entropy of the head with the least: at most 0.94 in healthy runs from there on, but 0.989 in
    one of 66 updates and 0.997 in one of 22, so that there have to be `least`; 0.999 to 1 in layers
    of all 5 runs with temperatures 10 to 200. A single even head is common in healthy layers. In
    the first half even layers are: all of a fresh ViT.
    """
    for name, look in _choosing(moment):
        value = _least(look.entropy)
        early = moment.updates is not None and moment.updates < least
        if moment.progress >= since and value >= limit and not early:
            yield Finding("uniform", name, None, value, limit)


def collapse(moment: Moment, limit: float = 0.85, since: float = 0.5) -> Iterator[Finding]:
    """A layer whose heads all look at one key, whatever the query, in the second half of a run.

    `top_key_share`, mean over heads: at most 0.66 in healthy runs from there on (0.80 before), 0.90
    with unscaled scores of heads as wide as the model, 0.95 to 1 with learning rates of 0.03 to 1.
    Of single heads it is up to 0.91 in healthy runs, and 0.90 of a head in DINOv2: they are sinks
    (arXiv 2309.17453). In language models whole layers may be: none was looked at.
    """
    for name, look in _choosing(moment):
        value = float(look.top_key_share.nanmean())
        if look.queries > 1 and moment.progress >= since and value >= limit:
            yield Finding("collapse", name, None, value, limit)


def alike_heads(
    moment: Moment, limit: float = 0.97, since: float = 0.5, even: float = 0.95
) -> Iterator[Finding]:
    """Three heads or more that look at the same, in the second half of a run, but not everywhere.

    Mean similarity over pairs: at most 0.94 in healthy runs from there on; 1 where heads started as
    copies of one, 0.98 with a learning rate of 0.03. 32 heads of width 2 were not alike (0.83). The
    only two heads of a layer had 0.978 in one of 2 healthy runs, and say nothing. Layers with a
    mean entropy above `even` are left to `uniform`.
    """
    for name, look in _choosing(moment):
        value = look.numbers().get("head_similarity", math.nan)
        if moment.progress < since or look.num_heads < LEAST_HEADS:
            continue
        if value >= limit and look.entropy.nanmean() < even:
            yield Finding("alike_heads", name, None, value, limit)


def stiff(moment: Moment, limit: float = 0.96, since: float = 0.1) -> Iterator[Finding]:
    """Heads whose rows are nearly one-hot: the softmax passes on next to no gradient.

    The largest weight of a query, mean: at most 0.92 in any head of healthy runs, and 0.91 in
    DINOv2; 0.99 with unscaled scores of heads of width 64 and 256, 1 with a learning rate of 0.03.
    Unscaled heads of width 16 (0.96 at most) and a learning rate of 0.01 (0.95) stayed below.
    """
    for name, look in _choosing(moment):
        for head, value in enumerate(look.max_weight.tolist()):
            if moment.progress >= since and value >= limit:
                yield Finding("stiff", name, head, value, limit)


def large_logits(
    moment: Moment, limit: float = 100.0, growth: float = 3.0, always: float = 1000.0
) -> Iterator[Finding]:
    """Heads whose scores have grown large, as they do before training diverges (arXiv 2302.05442).

    The largest absolute score: at most 25 in healthy runs and 94 with a learning rate of 0.01; 184
    with unscaled scores of heads of width 256, 300 to 4,000 with learning rates of 0.03 and 0.1.
    DINOv2, which trained well, has 313: so a score counts only where it grew by `growth` since the
    first look, or from `always` on.
    """
    for name, look in moment.layers.items():
        scores = largest_scores(look)
        if scores is None:
            continue
        first = moment.first_scores.get(name, scores)
        for head, (value, before) in enumerate(zip(scores.tolist(), first.tolist(), strict=True)):
            if value >= always or (value >= limit and value >= growth * before):
                yield Finding("large_logits", name, head, value, limit)


def dead_gates(moment: Moment, limit: float = 0.5, since: float = 0.1) -> Iterator[Finding]:
    """A layer whose gates shut half of its channels for every sample.

    At most 0.11 in 4 healthy runs and 0.41 with a learning rate of 0.1; 0.6 to 1 with gates that
    start at sigmoid(-6), and with a learning rate of 1 without warm-up.
    """
    for name, look in moment.gates.items():
        if moment.progress >= since and look.dead >= limit:
            yield Finding("dead_gates", name, None, look.dead, limit)


def saturated_gates(
    moment: Moment, limit: float = 0.95, still: float = 0.02, since: float = 0.1
) -> Iterator[Finding]:
    """A layer whose gates stand at an end of their range, whatever the sample.

    Share of such values: at most 0.80 in healthy runs, where they also follow the sample (deviation
    over samples 0.15); 1 with gates that start at sigmoid(6) (deviation below 0.002).
    """
    for name, look in moment.gates.items():
        if moment.progress < since or look.dead >= 0.5:
            continue
        if look.saturated >= limit and look.sample_spread <= still:
            yield Finding("saturated_gates", name, None, look.saturated, limit)


def dominant_modality(
    moment: Moment, limit: float = 0.99, entropy: float = 0.5, since: float = 0.1
) -> Iterator[Finding]:
    """A layer over several modalities of which one decides where the weight goes.

    Either it draws nearly all, or weights fall on single tokens: scores by far larger features need
    not be large for all their tokens, so that the share tells little. The mean normalised entropy
    was 0.82 to 0.98 in 9 cells of `recipes/ablate_norm.py` (3 seeds each) where no modality was
    larger or norms took its scale away; 0.36 and 0.05 without norms and image features 10 and 100
    times as large. Their share of the weight was 0.87 and 0.80 then, and 0.86 with norms.
    """
    for name, shares in moment.shares.items():
        if len(shares) < 2 or moment.progress < since:
            continue
        modality = max(shares, key=lambda each: shares[each])
        look = moment.layers.get(name)
        even = math.nan if look is None else float(look.entropy.nanmean())
        if shares[modality] >= limit:
            yield Finding("dominant_modality", name, None, shares[modality], limit, modality)
        elif even <= entropy:
            yield Finding("dominant_modality", name, None, even, entropy, "entropy")


def not_finite(moment: Moment) -> Iterator[Finding]:
    """NaN or infinity in weights, scores, gates, the loss or the gradient.

    In fp16 not of the gradient: the scale of the loss is searched by gradients that overflow.
    """
    for looks in (moment.layers, moment.gates):
        for name, look in looks.items():
            if not look.finite:
                yield Finding("not_finite", name, None, math.nan, math.nan)
    for what, value in (moment.training[-1] if moment.training else {}).items():
        searched = what == "grad_norm" and moment.dtype == torch.float16
        if not math.isfinite(value) and not searched:
            yield Finding("not_finite", "", None, value, math.nan, what)


def nan_ahead(
    moment: Moment, loss: float = 1.5, gradient: float = 50.0, score: float = 1e4
) -> Iterator[Finding]:
    """Numbers on their way out: before they overflow, they grow.

    - the loss: 1 more than `loss` times that of the first look (healthy: at most 1.1 times);
    - the gradient's norm: `gradient` times the median of the looks before, and above 10;
    - a score: from `score` on, where training diverges in arXiv 2309.14322, or a quarter of the
      largest number of the type.
    """
    yield from _losses(moment, loss)
    yield from _gradients(moment, gradient)
    limit = min(score, torch.finfo(moment.dtype).max / 4)
    for name, look in moment.layers.items():
        scores = largest_scores(look)
        value = math.nan if scores is None else float(scores.nan_to_num(0).amax())
        if value >= limit:
            yield Finding("nan_ahead", name, None, value, limit, "scores")


def _losses(moment: Moment, factor: float) -> Iterator[Finding]:
    values = [row["loss"] for row in moment.training if math.isfinite(row.get("loss", math.nan))]
    if values and "loss" in moment.training[-1]:
        limit = factor * abs(values[0]) + 1
        if values[-1] >= limit:
            yield Finding("nan_ahead", "", None, values[-1], limit, "loss")


def _gradients(moment: Moment, factor: float) -> Iterator[Finding]:
    name = "grad_norm"
    values = [row[name] for row in moment.training if math.isfinite(row.get(name, math.nan))]
    if len(values) > 1 and name in moment.training[-1]:
        limit = max(10.0, factor * median(values[:-1]))
        if values[-1] >= limit:
            yield Finding("nan_ahead", "", None, values[-1], limit, name)


def _choosing(moment: Moment) -> Iterator[tuple[str, LayerLook]]:
    """Layers whose queries have keys to choose from."""
    for name, look in moment.layers.items():
        if look.keys >= LEAST_KEYS and look.finite and not look.empty:
            yield name, look


def _least(values: Tensor) -> float:
    return float(values[~values.isnan()].amin())


RULES: dict[str, Rule] = {
    "uniform": uniform,
    "collapse": collapse,
    "alike_heads": alike_heads,
    "stiff": stiff,
    "dead_gates": dead_gates,
    "saturated_gates": saturated_gates,
    "large_logits": large_logits,
    "dominant_modality": dominant_modality,
    "not_finite": not_finite,
    "nan_ahead": nan_ahead,
}


def find(moment: Moment) -> list[Finding]:
    """All that is wrong at a moment."""
    return [finding for rule in RULES.values() for finding in rule(moment)]
