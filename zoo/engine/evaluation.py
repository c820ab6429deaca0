"""Sums and rows over a data set, each sample exactly once, on any number of processes.

Shapes: b samples of a process's batch, n samples of the data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn

from zoo.engine.batches import Batch, BatchPlan, Loader, Source, move

if TYPE_CHECKING:
    from accelerate import Accelerator

Sums = dict[str, torch.Tensor]
CountFn = Callable[[nn.Module, Batch], Sums]
Rows = dict[str, torch.Tensor]
RowFn = Callable[[nn.Module, Batch], Rows]


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
    sums: Sums = {}
    with _evaluating(model):
        for micro, batch in chain.from_iterable(loader.windows(0)):
            if accelerator.num_processes == 1 and should_stop():
                return None
            with accelerator.autocast():
                counts = count_fn(model, move(batch, accelerator.device))
            for name, value in counts.items():
                share = value.double().cpu() if micro.size else torch.zeros(value.shape).double()
                sums[name] = sums[name] + share if name in sums else share
    if accelerator.num_processes > 1:
        for name, value in sums.items():
            sums[name] = accelerator.reduce(value.to(accelerator.device), "sum").cpu()
    return sums


def collect(
    accelerator: Accelerator,
    model: nn.Module,
    loader: Loader,
    fn: RowFn,
    should_stop: Callable[[], bool] = lambda: False,
) -> Rows | None:
    """What `fn(model, batch)` gives for every sample (n ...), in their order, on all processes.

    Args:
        accelerator, model, loader, should_stop: As for `evaluate`.
        fn: Tensors (b ...), a row for each sample of the batch, under any names. A name's rows have
            one shape in all batches and on all processes.

    Returns:
        Tensors on the CPU, in the precision that `fn` gave them; a batch is the most that the
        device holds.
    """
    parts: dict[str, list[torch.Tensor]] = {}
    order: list[torch.Tensor] = []
    with _evaluating(model):
        for micro, batch in chain.from_iterable(loader.windows(0)):
            if accelerator.num_processes == 1 and should_stop():
                return None
            with accelerator.autocast():
                rows = fn(model, move(batch, accelerator.device))
            ids = torch.tensor(micro.ids[: micro.size], dtype=torch.long, device=accelerator.device)
            most = math.ceil(micro.part / accelerator.num_processes)
            ids = _from_all(accelerator, ids, most, fill=-1)
            order.append(ids[ids >= 0].cpu())
            for name, value in rows.items():
                seen = parts.setdefault(name, [])
                _check_rows(name, value, len(micro.ids), seen)
                value = _from_all(accelerator, value, most)
                seen.append(value[ids >= 0].cpu())
    places = torch.cat(order).argsort()
    return {name: torch.cat(seen)[places] for name, seen in parts.items()}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def _from_all(
    accelerator: Accelerator, rows: torch.Tensor, most: int, fill: int = 0
) -> torch.Tensor:
    """Rows of all processes, each process's filled up to `most`: a gather needs equal sizes."""
    filled = rows.new_full((most, *rows.shape[1:]), fill)
    filled[: len(rows)] = rows
    return accelerator.gather(filled)


def _check_rows(name: str, value: torch.Tensor, size: int, seen: list[torch.Tensor]) -> None:
    if value.ndim == 0 or len(value) != size:
        raise ValueError(f"{name} {tuple(value.shape)} must have a row for each of {size} samples")
    if seen and value.shape[1:] != seen[0].shape[1:]:
        raise ValueError(
            f"rows of {name} {tuple(value.shape[1:])} must have one shape in all batches, and were "
            f"{tuple(seen[0].shape[1:])} before"
        )
