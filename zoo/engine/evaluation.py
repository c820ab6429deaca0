"""Sums over a data set in which every sample counts exactly once, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from zoo.engine.batches import Batch, BatchPlan, Loader, Source, move

if TYPE_CHECKING:
    from accelerate import Accelerator

Sums = dict[str, torch.Tensor]
CountFn = Callable[[nn.Module, Batch], Sums]


def evaluation_loader(
    accelerator: Accelerator, source: Source, batch_size: int, workers: int = 0
) -> Loader:
    """A loader that reads each sample once, in order, split over the processes."""
    plan = BatchPlan(
        num_samples=len(source),
        batch_size=batch_size,
        world=accelerator.num_processes,
        rank=accelerator.process_index,
        shuffle=False,
    )
    return Loader(source, plan, workers=workers, pin_memory=accelerator.device.type == "cuda")


@torch.no_grad()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    loader: Loader,
    count_fn: CountFn,
    should_stop: Callable[[], bool] = lambda: False,
) -> Sums | None:
    """Adds up `count_fn(model, batch)` over the data, in float64 and over all processes.

    Args:
        accelerator: Device, precision and processes.
        model: Not wrapped for distributed training: a wrapped one synchronises buffers in its
            forward pass, which blocks where processes have different numbers of batches.
        loader: From `evaluation_loader`.
        count_fn: Sums over the samples of a batch, of any shape, under any names.
        should_stop: Asked before each batch on a single process; True gives None.
    """
    training = model.training
    model.eval()
    sums: Sums = {}
    try:
        for window in loader.windows(0):
            for micro, batch in window:
                if accelerator.num_processes == 1 and should_stop():
                    return None
                with accelerator.autocast():
                    counts = count_fn(model, move(batch, accelerator.device))
                for name, value in counts.items():
                    share = (
                        value.double().cpu() if micro.size else torch.zeros(value.shape).double()
                    )
                    sums[name] = sums[name] + share if name in sums else share
    finally:
        model.train(training)
    if accelerator.num_processes > 1:
        for name, value in sums.items():
            sums[name] = accelerator.reduce(value.to(accelerator.device), "sum").cpu()
    return sums
