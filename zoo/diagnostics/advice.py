"""What to say about what was found: a sentence, likely causes in order, options to try.

The order is that of practice: first the range of the values, then regularisation, then the rest; a
learning rate far above the recipe's own comes before all. What a run's options contradict is left
out. Attention dropout is named from 0.3 on, as practice has it; alone it did not make attention
even in 5 trainings of a ViT on digits (at 0.3 to 0.9): entropies were those of other runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zoo.diagnostics.alarm_rules import Finding, Moment, uniform

Advice = tuple[str, tuple[str, ...], tuple[str, ...]]
Pairs = list[tuple[str, str]]  # cause, and what to try against it; either may be empty

HIGH_DROPOUT = 0.3
HIGH_LR = 5.0  # times the recipe's own
SLOWER = "a lower --lr or a longer --warmup-epochs"
FLAG = re.compile(r"--([a-z][a-z-]*)")


@dataclass(frozen=True)
class Settings:
    """What is known of how a run was set.

    Attributes:
        flags: Options of the run by name, as `TrainOptions.to_json` gives them; None where they
            are not known: then nothing is contradicted.
        defaults: The same of the recipe as it is.
        attention_dropout: Dropout rate of the attention weights.
    """

    flags: Mapping[str, Any] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    attention_dropout: float = 0.0

    def get(self, name: str) -> Any:
        """An option; None where it is not known, or not there."""
        return None if self.flags is None else self.flags.get(name)

    def offers(self, remedy: str) -> bool:
        """Whether the recipe has the options that a remedy names, and inserts where it is told."""
        names = [name.replace("-", "_") for name in FLAG.findall(remedy)]
        missing = [name for name in names if name not in (self.flags or {})]
        return self.flags is None or not (missing or ("insert" in names and not self.get("insert")))

    @property
    def own_model(self) -> bool:
        """Whether options that were not given are a stored model's, and so not known."""
        return str(self.get("model") or "").startswith(("local-dir:", "hf-hub:"))

    @property
    def lr_factor(self) -> float:
        """The learning rate in multiples of the recipe's own; 1 where either is not known."""
        lr, own = self.get("lr"), self.defaults.get("lr")
        return lr / own if lr and own else 1.0

    @property
    def may_be_unscaled(self) -> bool:
        """Whether scores may lack their scale: attention of kind dot, or of a kind not known."""
        kinds = {self.get("attention"), self.get("fusion_attention")}
        return self.flags is None or "dot" in kinds or (self.own_model and kinds == {None})

    @property
    def may_lack_qk_norm(self) -> bool:
        return not self.get("qk_norm") and self.get("fusion_norm") != "qk"

    @property
    def may_grow_unclipped(self) -> bool:
        clip = self.get("clip_grad")
        return self.flags is None or clip is None or clip > 1

    def temperature(self) -> float | None:
        """Where it ends; None where it is learned or not known."""
        try:
            return float(str(self.get("temperature")).split(":")[-1])
        except ValueError:
            return None


def advise(
    group: Sequence[Finding], worst: Finding, moment: Moment, settings: Settings | None = None
) -> Advice:
    """The message, causes and remedies of an alarm.

    Args:
        group: What was found of one kind in one layer: several, if of several heads.
        worst: The one of them that is farthest beyond its limit.
        moment: When it was found.
        settings: Of the run; without them all is told.
    """
    settings = settings or Settings()
    pairs = _PAIRS[worst.kind](worst, moment, settings)
    if settings.lr_factor >= HIGH_LR:  # stable: the others keep their order
        pairs = sorted(pairs, key=lambda pair: "learning rate" not in pair[0])
    message = f"{_place(group)} {_SENTENCES[worst.kind](worst)}"
    if worst.kind == "uniform" and moment.updates is not None:
        message += ", past half of the run"
    causes = tuple(cause for cause, _ in pairs if cause)
    remedies = [remedy for _, remedy in pairs if remedy and settings.offers(remedy)]
    return message, causes, tuple(dict.fromkeys(remedies))


def _place(group: Sequence[Finding]) -> str:
    layer, heads = group[0].layer, [finding.head for finding in group if finding.head is not None]
    if not layer:
        return "training:"
    if not heads:
        return f"{layer}:"
    return f"{layer}, {'head' if len(heads) == 1 else 'heads'} {', '.join(map(str, heads))}:"


def _limited(finding: Finding) -> str:
    return f"{finding.value:.4g} (limit {finding.limit:.4g})"


_NAMES = {"loss": "loss", "grad_norm": "gradient norm", "scores": "largest score"}

_SENTENCES: dict[str, Callable[[Finding], str]] = {
    "uniform": lambda f: f"all heads look everywhere alike, entropy {_limited(f)} of 1",
    "collapse": lambda f: f"all queries look at one token, which draws {_limited(f)} of the weight",
    "alike_heads": lambda f: f"the heads look at the same, similarity {_limited(f)} of 1",
    "stiff": lambda f: (
        f"rows are nearly one-hot, largest weight {_limited(f)}: hardly any gradient passes"
    ),
    "dead_gates": lambda f: f"gates shut {_limited(f)} of the channels for every sample",
    "saturated_gates": lambda f: (
        f"gates stand at the end of their range, {_limited(f)} of them, whatever the sample"
    ),
    "large_logits": lambda f: f"scores have grown to {_limited(f)}",
    "dominant_modality": lambda f: (
        f"weights over several modalities fall on single tokens, entropy {_limited(f)} of 1"
        if f.what == "entropy"
        else f"the {f.what} draws {_limited(f)} of the weight"
    ),
    "not_finite": lambda f: (
        f"{_NAMES.get(f.what, f.what)} is {f.value}" if f.what else "NaN or infinite values"
    ),
    "nan_ahead": lambda f: (
        f"{_NAMES.get(f.what, f.what)} is {_limited(f)} and may soon be NaN or infinite"
    ),
}


def _too_fast(known: Settings, cause: str = "the learning rate is too high") -> Pairs:
    if known.lr_factor < HIGH_LR:
        return [(cause, SLOWER)]
    lr, own = known.get("lr"), known.defaults["lr"]
    told = f"{cause}: {lr:g} is {known.lr_factor:.3g} times the recipe's {own:g}"
    return [(told, f"--lr {own:g}")]


def _unclipped(known: Settings) -> Pairs:
    return [("updates are not clipped", "--clip-grad 1")] if known.may_grow_unclipped else []


def _unscaled(known: Settings) -> Pairs:
    if not known.may_be_unscaled:
        return []
    remedy = "--fusion-attention full" if known.get("fusion_attention") else "--attention full"
    return [("scores are not scaled by 1 / sqrt(head width)", remedy)]


def _unbounded(known: Settings, cause: str = "nothing bounds queries and keys") -> Pairs:
    return [(cause, "--qk-norm True")] if known.may_lack_qk_norm else []


def _evener(known: Settings, cause: str = "") -> Pairs:
    weight = known.get("entropy_bonus") or 0
    return [(cause, "--entropy-bonus 0.01" if weight < 0.01 else "")]


def _starts(known: Settings, cause: str) -> Pairs:
    identity = known.get("init") == "identity" or "init=identity" in str(known.get("insert"))
    return [] if identity else [(cause, "init=identity in --insert")]


def _of_uniform(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    look, ended = moment.layers[finding.layer], known.temperature()
    told, pairs = "", []
    if look.logits is not None:
        low, high = float(look.logits[:, 0].amin()), float(look.logits[:, 1].amax())
        told = f" (they lie in {low:.2g} to {high:.2g})"
    if moment.updates is None and len([*uniform(moment)]) == len(moment.layers):
        pairs += [("the weights look untrained: all layers are so", "")]
    if ended is None or ended > 1:
        cause = f"scores are divided by too much{told}: a temperature, or the scale applied twice"
        pairs += [(cause, "--temperature 1, or falling, --temperature 1:0.5")]
    if known.attention_dropout >= HIGH_DROPOUT:
        cause = f"attention dropout ({known.attention_dropout:g}) is high"
        pairs += [(cause, "--attn-drop 0.1")]
    if known.lr_factor < HIGH_LR:
        cause = "queries and keys have not grown: learning is too slow, or short"
        pairs += [(cause, "a higher --lr")]
    else:
        pairs += _too_fast(known)
    if ended == 1:
        pairs += [("", "--temperature 1:0.5 (sharper in the end)")]
    return [*pairs, ("the layer needs no choice: it averages", "")]


def _of_collapse(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    return [
        *_unscaled(known),
        *_unbounded(known, "scores grew, and one key wins everywhere"),
        *_too_fast(known),
        *_evener(known, "one token is a sink: its norm is far above the others'"),
    ]


def _of_alike_heads(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    heads = moment.layers[finding.layer].num_heads
    penalty = "" if (known.get("head_penalty") or 0) >= 0.1 else "--head-penalty 0.1"
    return [
        (f"{heads} heads are more than the task needs, or too thin",
         f"--num-heads {max(1, heads // 2)} with a larger --head-dim"),
        ("the heads started alike: weights were copied from one", penalty),
    ]  # fmt: skip


def _of_stiff(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    ended = known.temperature()
    cold = "the temperature is too low" if ended is None or ended < 1 else ""
    smooth = "" if ":" in str(known.get("temperature")) else "--temperature 2:1 (smooth at first)"
    first = [(cold, smooth)] if cold else []
    last = [] if cold else [("", smooth)]
    grew = _too_fast(known, "queries and keys grew: the learning rate is too high")
    bound = [("", remedy) for _, remedy in _unbounded(known)]
    return [*_unscaled(known), *first, *grew, *bound, *last, *_evener(known)]


def _of_dead_gates(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    relu = known.get("insert") is None or "relu" in str(known.get("insert"))
    cause = "a relu gate never opens where no input lifts it above 0"
    return [
        *_too_fast(known),
        *_starts(known, "the gates started shut"),
        *([(cause, "gate=sigmoid in --insert")] if relu else []),
    ]


def _of_saturated_gates(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    return [
        *_starts(known, "the gates started at an end of their range"),
        *_too_fast(known),
        ("the layer has no use for a gate", "--insert without this stage"),
    ]


def _of_large_logits(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    clip = [("", remedy) for _, remedy in _unclipped(known)]
    return [*_unbounded(known), *_too_fast(known), *clip, *_unscaled(known)]


def _of_dominant_modality(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    shares = moment.shares[finding.layer]
    modality = "one modality" if finding.what == "entropy" else f"the {finding.what}"
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    normed = known.get("fusion_norm") == "per_modality" or (
        known.flags is not None and known.get("fusion_norm") is None and not known.own_model
    )
    cause = f"features of {modality} are far larger and not normalised by themselves"
    pairs = [] if normed else [(f"{cause} (weight: {told})", "--fusion-norm per_modality")]
    pairs += _too_fast(known, "scores grew: the learning rate is too high")
    if finding.what != "entropy":
        pairs += [(f"the other modality adds nothing to {modality}", "")]
    return pairs


def _of_not_finite(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    clip = [("", remedy) for _, remedy in _unclipped(known)]
    overflow = _unbounded(known, "scores overflow")
    return [*_too_fast(known), *clip, *overflow, ("an image or a weight was NaN before", "")]


def _of_nan_ahead(finding: Finding, moment: Moment, known: Settings) -> Pairs:
    if finding.what == "scores":
        return _of_large_logits(finding, moment, known)
    grow = _unbounded(known, "attention scores grow")
    return [*_too_fast(known), *_unclipped(known), *grow]


_PAIRS: dict[str, Callable[[Finding, Moment, Settings], Pairs]] = {
    "uniform": _of_uniform,
    "collapse": _of_collapse,
    "alike_heads": _of_alike_heads,
    "stiff": _of_stiff,
    "dead_gates": _of_dead_gates,
    "saturated_gates": _of_saturated_gates,
    "large_logits": _of_large_logits,
    "dominant_modality": _of_dominant_modality,
    "not_finite": _of_not_finite,
    "nan_ahead": _of_nan_ahead,
}
