"""Alarms of a run: printed, kept in alarms.jsonl, and a reason to stop where that is asked for."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zoo.diagnostics.alarms import Alarm, Alarms, blocks
from zoo.diagnostics.looks import GateLook, LayerLook
from zoo.engine.batches import BatchPlan
from zoo.engine.checkpoint import write_atomically
from zoo.engine.run import Run
from zoo.engine.tracking import read_rows

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class AlarmLog:
    """Takes what was seen at a step, on the main process.

    Each alarm is a row of alarms.jsonl; those of one kind and step are printed as one. All but
    numbers that are not finite need two looks in a row. A resumed run tells no alarm twice: rows up
    to its step are kept, later ones dropped, as those of metrics.jsonl are.

    Args:
        run: Its folder, options and how to stop it.
        num_samples: Training samples, for the length of the run.
        attention_dropout: As for `Alarms`.
    """

    def __init__(self, run: Run, num_samples: int, *, attention_dropout: float = 0.0) -> None:
        options, world = run.options, run.accelerator.num_processes
        plan = BatchPlan(num_samples, options.batch_size, options.grad_accumulation, world)
        self.run, self.path = run, run.folder / "alarms.jsonl"
        self.total = options.epochs * plan.updates_per_epoch
        self.alarms = Alarms(
            self.total,
            attention_dropout=attention_dropout,
            dtype=DTYPES.get(run.accelerator.mixed_precision, torch.float32),
            flags=options.to_json(),
            defaults=type(options)().to_json(),
        )

    def resume(self, step: int, before: Iterable[tuple[int, Mapping[str, Any]]] = ()) -> None:
        """Goes on after a step.

        Args:
            step: Of the checkpoint, 0 for a run from the start.
            before: Steps and what was seen at each, as for a call: alarms that need several looks
                come when they would have come without the interruption.
        """
        rows = [row for row in read_rows(self.path) if row["step"] <= step]
        if self.path.exists():
            text = "".join(json.dumps(row) + "\n" for row in rows)
            write_atomically(self.path, lambda file: file.write_text(text))
        self.alarms.restore(rows)
        for earlier, seen in before:
            self.alarms.check(earlier, **seen)

    def __call__(
        self,
        step: int,
        layers: Mapping[str, LayerLook] | None = None,
        gates: Mapping[str, GateLook] | None = None,
        shares: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        if found := self.alarms.check(step, layers, gates, shares, self.training):
            self._tell(found)

    @property
    def training(self) -> dict[str, float]:
        """Loss and gradient norm of the last update that is known."""
        return self.run.last

    def _tell(self, alarms: Sequence[Alarm]) -> None:
        from tqdm import tqdm

        with self.path.open("a") as file:
            file.writelines(json.dumps(alarm.to_json()) + "\n" for alarm in alarms)
        for text in blocks(alarms):
            tqdm.write(f"alarm at {text}", file=sys.stderr)  # above a progress bar
        if self.run.options.stop_on_alarm:
            self.run.stop("alarm")


def watch_options(run: Run, model: nn.Module, num_samples: int) -> dict[str, Any]:
    """How a run's looks inside are made: for `vision.inspection` and `crossmodal.looks`.

    Args:
        run: Its options say how often, and whether alarms stop it.
        model: That is trained.
        num_samples: Training samples.
    """
    report = AlarmLog(run, num_samples, attention_dropout=attention_dropout(model))
    return {
        "folder": run.folder / "attention",
        "every": run.options.save_attention_every,
        "last": report.total,
        "main": run.accelerator.is_main_process,
        "autocast": run.accelerator.autocast,
        "report": report,
        "step": run.resumed_step,
    }


def attention_dropout(model: nn.Module) -> float:
    """The largest dropout rate of attention weights, as our layers and other libraries' name it."""
    rates = [0.0]
    for module in model.modules():
        found = getattr(module, "attn_drop", None)
        if isinstance(module, nn.MultiheadAttention):
            found = module.dropout
        rate = getattr(found, "p", found)
        rates += [float(rate)] if isinstance(rate, int | float) else []
    return max(rates)
