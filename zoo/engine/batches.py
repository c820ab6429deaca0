"""Which samples every process sees in every optimizer update, decided by arithmetic alone.

Accelerate's samplers pad the last batches with repeated samples and cannot restart inside an epoch
with the same order. Here the order of an epoch is a permutation keyed by (seed, epoch); each
process takes its own slice of it. So every sample is seen once per epoch, any update of any epoch
can be found again without reading what came before, and all processes agree without talking.

Terms: an *update* is one optimizer step; its *window* of samples is cut into up to
`grad_accumulation` *micro-batches*, each of which is split over the processes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zoo.rng import generator

Key = tuple[int, int]  # epoch, sample index
Batch = dict[str, Any]


class Source(Protocol):
    """A map-style data set that fetches whole batches by (epoch, index) keys.

    An attribute `at_once` may tell how many samples are best fetched in one call (see `Loader`).
    """

    def __len__(self) -> int: ...

    def __getitems__(self, keys: list[Key]) -> Batch: ...


@dataclass(frozen=True)
class MicroBatch:
    """One process's share of one forward and backward.

    Attributes:
        ids: Sample indices of this process; never empty (see `size`).
        lead: The sample before `ids[0]` in the micro-batch over all processes, cyclically.
        window: Samples of the whole update, on all processes and in all its micro-batches.
        part: Samples of this micro-batch on all processes.
        size: How many of `ids` count: 0 for a process that got none of a short last
            micro-batch and runs a stand-in so that collective operations match.
        weight: Factor on this process's mean loss so that the gradient that
            DistributedDataParallel averages is the mean over the samples of the window.
        index: Number of the micro-batch in its epoch, the same on all processes.
    """

    ids: list[int]
    lead: int
    part: int
    size: int
    window: int
    weight: float
    index: int


@dataclass(frozen=True)
class BatchPlan:
    """The batches of all epochs for one process.

    Args:
        num_samples: Size of the data set.
        batch_size: Samples per process and micro-batch.
        grad_accumulation: Micro-batches per update.
        world, rank: Number of processes and the number of this one.
        seed: Keys the order together with the epoch.
        shuffle: False keeps the order of the data set (evaluation).
    """

    num_samples: int
    batch_size: int
    grad_accumulation: int = 1
    world: int = 1
    rank: int = 0
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("num_samples", "batch_size", "grad_accumulation", "world"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def updates_per_epoch(self) -> int:
        return math.ceil(self.num_samples / (self.batch_size * self.world * self.grad_accumulation))

    def order(self, epoch: int) -> list[int]:
        """Sample indices of an epoch in the order in which they are used."""
        if not self.shuffle:
            return list(range(self.num_samples))
        return torch.randperm(
            self.num_samples, generator=generator(self.seed, "order", epoch)
        ).tolist()

    def windows(self, epoch: int, start: int = 0) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each update of an epoch from update `start` on."""
        order = self.order(epoch)
        micro = self.batch_size * self.world
        width = micro * self.grad_accumulation
        for update in range(start, self.updates_per_epoch):
            window = order[update * width : (update + 1) * width]
            parts = [window[i : i + micro] for i in range(0, len(window), micro)]
            first = update * self.grad_accumulation
            yield [self._share(part, len(window), first + i) for i, part in enumerate(parts)]

    def _share(self, part: list[int], window: int, index: int) -> MicroBatch:
        start = len(part) * self.rank // self.world
        stop = len(part) * (self.rank + 1) // self.world
        ids = part[start:stop] or part[:1]
        weight = (stop - start) * self.world / window
        return MicroBatch(ids, part[start - 1], len(part), stop - start, window, weight, index)


class Loader:
    """Reads the batches of a plan, in worker processes if asked, from any update on.

    Micro-batches smaller than the source's `at_once` are fetched and prepared several in a row:
    one by one, between the matrix products of training, their many small operations would each run
    on cold caches, at two to five times the cost.

    Args:
        source: The data.
        plan: Which samples, in which order.
        workers: Worker processes; 0 reads in this process.
        lead: Also read each micro-batch's `lead` sample, in front (for `Mixing`).
        pin_memory: Page-locked batches, for copies to a GPU.
        prepare: What is done to each batch in this process; it gets `epoch`, `index` and `size` of
            the micro-batch too, and may run some batches ahead.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        *,
        workers: int = 0,
        lead: bool = False,
        pin_memory: bool = False,
        prepare: Callable[[Batch], Batch] | None = None,
    ) -> None:
        from torch.utils.data import DataLoader

        self.source, self.plan, self.lead = source, plan, lead
        self._prepare = prepare or _identity
        self._together = max(1, getattr(source, "at_once", 1) // plan.batch_size)
        self._micros: list[MicroBatch] = []
        self._epoch = 0
        # A generator of its own: a DataLoader draws a seed each time it is iterated, which would
        # shift the global generator, and with it dropout, whenever a run is resumed.
        self._loader: Any = DataLoader(
            source,  # type: ignore[arg-type]
            batch_sampler=_Keys(self._keys),
            collate_fn=_identity,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=pin_memory,
            generator=torch.Generator(),
            worker_init_fn=_own_group,
        )

    def windows(self, epoch: int, start: int = 0) -> Iterator[Iterator[tuple[MicroBatch, Batch]]]:
        """Per update of the epoch from `start` on: its micro-batches with their tensors."""
        windows = list(self.plan.windows(epoch, start))
        self._epoch, self._micros = epoch, [micro for window in windows for micro in window]
        if not windows:
            return
        batches = self._batches()
        for window in windows:
            yield zip(window, batches, strict=False)

    def _batches(self) -> Iterator[Batch]:
        for group, fetched in zip(self._groups(), self._loader, strict=True):
            sizes = [self.lead + len(micro.ids) for micro in group]
            parts = {name: values.split(sizes) for name, values in fetched.items()}
            yield from [
                self._prepare(
                    {name: values[i] for name, values in parts.items()}
                    | {"epoch": self._epoch, "index": micro.index, "size": micro.size}
                )
                for i, micro in enumerate(group)
            ]

    def _groups(self) -> list[list[MicroBatch]]:
        """Micro-batches that are fetched in one call."""
        firsts = range(0, len(self._micros), self._together)
        return [self._micros[i : i + self._together] for i in firsts]

    def _keys(self) -> Iterator[list[Key]]:
        for group in self._groups():
            ids = [i for m in group for i in ([m.lead, *m.ids] if self.lead else m.ids)]
            yield [(self._epoch, i) for i in ids]


class _Keys:
    """A batch sampler over whatever the loader currently points at.

    It stays in the main process, so that persistent workers serve any epoch.
    """

    def __init__(self, keys: Callable[[], Iterator[list[Key]]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        return self.keys()


def _own_group(_worker: int) -> None:
    """Keeps Ctrl-C and signals to the process group from taking workers away from the last step."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def _identity(batch: Any) -> Any:
    return batch


def move(batch: Batch, device: torch.device) -> Batch:
    """Copies a batch to a device, without waiting where its memory is page-locked."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
    }
