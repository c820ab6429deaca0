"""What to say about what was found: a sentence, likely causes in order, options to try.

The order is that of practice: first the range of the values, then regularisation, then the rest.
Attention dropout is named from 0.3 on, as practice has it; alone it did not make attention even in
5 trainings of a ViT on digits (at 0.3 to 0.9): entropies were those of other runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zoo.diagnostics.alarm_rules import Finding, Moment

Advice = tuple[str, tuple[str, ...], tuple[str, ...]]
Pairs = list[tuple[str, str]]  # cause, and what to try against it; either may be empty

HIGH_DROPOUT = 0.3
SLOWER = "a lower --lr or a longer --warmup-epochs"


def advise(
    group: Sequence[Finding], worst: Finding, moment: Moment, attention_dropout: float = 0.0
) -> Advice:
    """The message, causes and remedies of an alarm.

    Args:
        group: What was found of one kind in one layer: several, if of several heads.
        worst: The one of them that is farthest beyond its limit.
        moment: When it was found.
        attention_dropout: Dropout rate of the attention weights.
    """
    pairs = _PAIRS[worst.kind](worst, moment, attention_dropout)
    message = f"{_place(group)} {_SENTENCES[worst.kind](worst)}"
    causes = tuple(cause for cause, _ in pairs if cause)
    return message, causes, tuple(dict.fromkeys(remedy for _, remedy in pairs if remedy))


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
    "uniform": lambda f: (
        f"all heads look everywhere alike, entropy {_limited(f)} of 1, past half of the run"
    ),
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


def _of_uniform(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    look = moment.layers[finding.layer]
    told = ""
    if look.logits is not None:
        low, high = float(look.logits[:, 0].amin()), float(look.logits[:, 1].amax())
        told = f" (they lie in {low:.2g} to {high:.2g})"
    pairs = [
        (f"scores are divided by too much{told}: a temperature, or the scale applied twice",
         "--temperature 1, or falling, --temperature 1:0.5"),
    ]  # fmt: skip
    if dropout >= HIGH_DROPOUT:
        pairs += [(f"attention dropout ({dropout:g}) is high", "--attn-drop 0.1")]
    pairs += [
        ("queries and keys have not grown: learning is too slow, or short", "a higher --lr"),
        ("the layer needs no choice: it averages", ""),
    ]
    return pairs


def _of_collapse(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    return [
        ("scores are not scaled, or grew, and one key wins everywhere",
         "--attention full, --qk-norm True"),
        ("the learning rate is too high", SLOWER),
        ("one token is a sink: its norm is far above the others'", "--entropy-bonus 0.01"),
    ]  # fmt: skip


def _of_alike_heads(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    heads = moment.layers[finding.layer].num_heads
    return [
        (f"{heads} heads are more than the task needs, or too thin",
         f"--num-heads {max(1, heads // 2)} with a larger --head-dim"),
        ("the heads started alike: weights were copied from one", "--head-penalty 0.1"),
    ]  # fmt: skip


def _of_stiff(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    return [
        ("scores are not scaled by 1 / sqrt(head width)", "--attention full"),
        ("the temperature is too low", "--temperature 2:1 (smooth at first)"),
        ("queries and keys grew: the learning rate is too high", f"--qk-norm True, {SLOWER}"),
        ("", "--entropy-bonus 0.01"),
    ]


def _of_dead_gates(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    return [
        ("the learning rate is too high", SLOWER),
        ("the gates started shut", "init=identity in --insert"),
        ("a relu gate never opens where no input lifts it above 0", "gate=sigmoid in --insert"),
    ]


def _of_saturated_gates(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    return [
        ("the gates started at an end of their range", "init=identity in --insert"),
        ("the learning rate is too high", SLOWER),
        ("the layer has no use for a gate", "--insert without this stage"),
    ]


def _of_large_logits(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    return [
        ("nothing bounds queries and keys", "--qk-norm True"),
        ("the learning rate is too high", f"{SLOWER}, --clip-grad 1"),
        ("scores are not scaled by 1 / sqrt(head width)", "--attention full"),
    ]


def _of_dominant_modality(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    shares = moment.shares[finding.layer]
    modality = "one modality" if finding.what == "entropy" else f"the {finding.what}"
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return [
        (f"features of {modality} are far larger and not normalised by themselves (weight: {told})",
         "--fusion-norm per_modality"),
        ("scores grew: the learning rate is too high", SLOWER),
        (f"the other modality adds nothing to {modality}" if finding.what != "entropy" else "", ""),
    ]  # fmt: skip


def _of_not_finite(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    return [
        ("the learning rate is too high", f"{SLOWER}, --clip-grad 1"),
        ("scores overflow", "--qk-norm True"),
        ("an image or a weight was NaN before", ""),
    ]


def _of_nan_ahead(finding: Finding, moment: Moment, dropout: float) -> Pairs:
    if finding.what == "scores":
        return _of_large_logits(finding, moment, dropout)
    return [
        ("the learning rate is too high", SLOWER),
        ("updates are not clipped", "--clip-grad 1"),
        ("attention scores grow", "--qk-norm True"),
    ]


_PAIRS: dict[str, Callable[[Finding, Moment, float], Pairs]] = {
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
