"""Alarms: what a look during training found wrong, what it comes from and what to try.

`Alarms` keeps count over looks; what is wrong is decided in `alarm_rules`, what to say about it in
`advice`. An alarm stops nothing. All but numbers that are not finite need two looks in a row: a
single look gives no other alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from zoo.diagnostics.advice import Settings, advise
from zoo.diagnostics.alarm_rules import Finding, Moment, find, largest_scores
from zoo.diagnostics.looks import GateLook, LayerLook
from zoo.layers.check import fraction, integer

Key = tuple[str, str, "int | None"]  # kind, layer, head

MOST_NAMES = 8  # of layers, in one text
AT_ONCE = ("not_finite",)  # the others have to be so at two looks in a row


@dataclass(frozen=True)
class Alarm:
    """Something wrong at a step.

    Attributes:
        kind: A name of `zoo.diagnostics.alarm_rules.RULES`.
        step: Updates since the start.
        layer: Name of the layer; "" where it is of the training as a whole.
        head: Index of the head; None for the layer as a whole, or several of its heads.
        value: What was measured; of several heads, the worst.
        limit: Where alarms of this kind begin.
        message: One sentence with place, value and limit.
        causes: Likeliest first.
        remedies: Options of the recipes to try, in the order of the causes.
        what: The modality, or the number, where a kind is about several.
    """

    kind: str
    step: int
    layer: str
    head: int | None
    value: float
    limit: float
    message: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    what: str = ""

    def __str__(self) -> str:
        """Up to three lines, without an end of line."""
        return self.text()

    def text(self, others: Sequence[str] = ()) -> str:
        """The same, with the names of other layers of which it is as true."""
        told = ", ".join(others[:MOST_NAMES]) + (", ..." if len(others) > MOST_NAMES else "")
        more = f"{len(others)} more layer{'s' if len(others) > 1 else ''}"
        also = f"; and {more}: {told}" if others else ""
        lines = [f"step {self.step}: {self.message}{also}"]
        lines += [f"  likely: {'; or '.join(self.causes)}"] if self.causes else []
        lines += [f"  try: {', or '.join(self.remedies)}"] if self.remedies else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Plain types; not finite numbers as null."""
        row = asdict(self)
        for name in ("value", "limit"):
            row[name] = row[name] if abs(row[name]) < float("inf") else None
        return row | {"causes": list(self.causes), "remedies": list(self.remedies)}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Alarm:
        """What `to_json` gave; null comes back as NaN."""
        found = dict(row)
        for name in ("value", "limit"):
            found[name] = float("nan") if found[name] is None else float(found[name])
        for name in ("causes", "remedies"):
            found[name] = tuple(found[name])
        return cls(**found)


class Alarms:
    """Watches a run: give `check` what was seen at a step, and it answers with the new alarms.

    One alarm a kind and layer, whichever of its heads come later; what is wrong has to be so at two
    looks in a row, except for numbers that are not finite.

    Args:
        total_steps: Updates of the whole run: even attention is as it should be at the start. 1
            for looks at a model that is trained.
        attention_dropout: Dropout rate of the attention weights, for the order of the causes.
        dtype: That of the scores in training: how large they may be.
        flags: The run's options by name, all that its recipe has: causes that they contradict and
            options that are not there are not named. Without them all are.
        defaults: The recipe's own, to tell a learning rate that is far from it.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        attention_dropout: float = 0.0,
        dtype: torch.dtype = torch.float32,
        flags: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.total_steps = integer("total_steps", total_steps)
        self.attention_dropout = fraction("attention_dropout", attention_dropout)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"dtype ({dtype!r}) must be a floating-point torch.dtype")
        self.dtype = dtype
        self._settings = Settings(flags or None, defaults or {}, self.attention_dropout)
        self._before: set[Key] = set()  # found at the look before
        self._told: set[tuple[str, str]] = set()  # kind, layer
        self._training: list[Mapping[str, float]] = []
        self._first_scores: dict[str, Tensor] = {}

    def restore(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Of a resumed run: alarms as `to_json` gave them, which are not given again."""
        for row in rows:
            alarm = Alarm.from_json(row)
            self._told.add((alarm.kind, alarm.layer))

    def check(
        self,
        step: int,
        layers: Mapping[str, LayerLook] | None = None,
        gates: Mapping[str, GateLook] | None = None,
        shares: Mapping[str, Mapping[str, float]] | None = None,
        training: Mapping[str, float] | None = None,
    ) -> list[Alarm]:
        """The alarms that are new at this step.

        Args:
            step: Updates so far.
            layers: By name, looks at attention.
            gates: By name, looks at gates.
            shares: By name of a layer that attends to several modalities: modality -> its share of
                the weight, 0 to 1.
            training: `loss` and `grad_norm` of the last update, the norm before it was clipped.
        """
        progress = integer("step", step, minimum=0) / self.total_steps
        layers, gates, shares = layers or {}, gates or {}, shares or {}
        self._training.append(dict(training or {}))
        for name, look in layers.items():
            scores = largest_scores(look)
            if scores is not None:
                self._first_scores.setdefault(name, scores)
        moment = Moment(
            progress,
            self.dtype,
            layers,
            gates,
            shares,
            self._training,
            self._first_scores,
            updates=None if self.total_steps == 1 else step,
        )
        found = find(moment)
        known, self._before = self._before, {finding.key for finding in found}
        lasting = [f for f in found if f.kind in AT_ONCE or f.key in known]
        new = [f for f in lasting if (f.kind, f.layer) not in self._told]
        self._told |= {(finding.kind, finding.layer) for finding in new}
        return [self._alarm(step, group, moment) for group in _by_layer(new)]

    def _alarm(self, step: int, group: list[Finding], moment: Moment) -> Alarm:
        worst = max(group, key=lambda finding: finding.severity)
        head = worst.head if len(group) == 1 else None
        message, causes, remedies = advise(group, worst, moment, self._settings)
        return Alarm(
            worst.kind,
            step,
            worst.layer,
            head,
            worst.value,
            worst.limit,
            message,
            causes,
            remedies,
            worst.what,
        )


def _by_layer(findings: list[Finding]) -> list[list[Finding]]:
    """Heads of one layer together, so that a layer makes one alarm of a kind."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.kind, finding.layer), []).append(finding)
    return list(groups.values())


def blocks(alarms: Sequence[Alarm]) -> list[str]:
    """Alarms of one step as text: one block a kind, with the first layer's numbers and the others'
    names; without the large scores of layers of which it is said that they may soon be infinite.
    """
    overflowing = {a.layer for a in alarms if a.kind == "nan_ahead"} - {""}
    groups: dict[tuple[str, bool, str], list[Alarm]] = {}
    for alarm in alarms:
        if alarm.kind != "large_logits" or alarm.layer not in overflowing:
            key = alarm.kind, not alarm.layer, alarm.what
            groups.setdefault(key, []).append(alarm)
    return [first.text([a.layer for a in others]) for first, *others in groups.values()]
