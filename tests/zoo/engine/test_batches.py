from __future__ import annotations

import pytest
import torch

from zoo.engine.batches import BatchPlan, Loader


class Numbers:
    """Sample i is the number i; remembers nothing, so it can be read by workers."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitems__(self, keys):
        return {
            "ids": torch.tensor([i for _, i in keys]),
            "epochs": torch.tensor([e for e, _ in keys]),
        }


def plans(n: int, batch: int, world: int, accumulation: int = 1) -> list[BatchPlan]:
    return [
        BatchPlan(n, batch, grad_accumulation=accumulation, world=world, rank=rank, seed=3)
        for rank in range(world)
    ]


@pytest.mark.parametrize(
    ("n", "batch", "world", "accumulation"),
    [(10, 2, 1, 4), (29, 8, 2, 1), (17, 4, 4, 2), (1, 8, 2, 1), (9, 8, 1, 1), (64, 8, 2, 4)],
)
def test_each_sample_counts_once_per_epoch(n, batch, world, accumulation):
    seen = [
        i
        for plan in plans(n, batch, world, accumulation)
        for window in plan.windows(epoch=1)
        for micro in window
        for i in micro.ids[: micro.size]
    ]
    assert sorted(seen) == list(range(n))


@pytest.mark.parametrize(
    ("n", "batch", "world", "accumulation"),
    [(10, 2, 1, 4), (29, 8, 2, 1), (17, 4, 4, 2), (5, 8, 4, 1)],
)
def test_weights_make_the_mean_over_the_window(n, batch, world, accumulation):
    """Summed over processes and micro-batches: weight * mean / world is the window's mean."""
    values = torch.rand(n, dtype=torch.float64)
    per_rank = [list(plan.windows(0)) for plan in plans(n, batch, world, accumulation)]
    order = plans(n, batch, world, accumulation)[0].order(0)
    width = batch * world * accumulation
    for update, windows in enumerate(zip(*per_rank, strict=True)):
        total = sum(
            micro.weight * values[micro.ids].mean() / world
            for window in windows
            for micro in window
        )
        expected = values[order[update * width : (update + 1) * width]].mean()
        torch.testing.assert_close(total, expected)
        assert len({len(window) for window in windows}) == 1, "all processes run as often"


def test_two_processes_share_the_batch_of_one():
    one = list(BatchPlan(29, 8, seed=3).windows(2))
    two = [list(BatchPlan(29, 4, world=2, rank=rank, seed=3).windows(2)) for rank in range(2)]
    for update, window in enumerate(one):
        shared = [i for rank in range(2) for i in two[rank][update][0].ids]
        assert shared == window[0].ids


def test_order_depends_on_seed_and_epoch_only():
    plan = BatchPlan(50, 8, seed=1)
    state = torch.get_rng_state()
    assert plan.order(3) == BatchPlan(50, 4, world=2, rank=1, seed=1).order(3)
    assert plan.order(3) != plan.order(4)
    assert plan.order(3) != BatchPlan(50, 8, seed=2).order(3)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_starts_anywhere_with_the_same_batches(workers):
    loader = Loader(Numbers(23), BatchPlan(23, 3, grad_accumulation=2, seed=5), workers=workers)

    def read(epoch, start):
        return [
            [batch["ids"].tolist() for _, batch in window]
            for window in loader.windows(epoch, start)
        ]

    whole = read(1, 0)
    assert read(1, 2) == whole[2:]
    assert read(0, 0) != whole
    assert read(1, 0) == whole, "persistent workers serve every epoch"
    assert read(1, len(whole)) == []


class Together(Numbers):
    at_once = 8


@pytest.mark.parametrize("lead", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_fetched_together_are_the_same(lead, workers):
    plan = BatchPlan(23, 3, grad_accumulation=2, seed=5)

    def read(source):
        loader = Loader(source, plan, lead=lead, workers=workers)
        return [[b["ids"].tolist() for _, b in window] for window in loader.windows(1, 1)]

    assert read(Together(23)) == read(Numbers(23))
    if not workers:
        sizes = []
        source = Together(23)
        fetch = source.__getitems__
        source.__getitems__ = lambda keys: (sizes.append(len(keys)), fetch(keys))[1]
        list(map(list, Loader(source, plan).windows(0)))
        assert max(sizes) == 6, "two micro-batches of 3 fit into 8 samples"


def test_each_batch_is_prepared_once_and_knows_its_place():
    seen = []

    def prepare(batch):
        seen.append((batch["epoch"], batch["index"], batch["ids"].tolist()))
        return {"doubled": 2 * batch["ids"]}

    plan = BatchPlan(10, 2, seed=0)
    loader = Loader(Together(10), plan, prepare=prepare)
    doubled = [b["doubled"].tolist() for window in loader.windows(3) for _, b in window]
    assert [index for _, index, _ in seen] == list(range(5))
    assert {epoch for epoch, _, _ in seen} == {3}
    assert doubled == [[2 * i for i in ids] for _, _, ids in seen]


def test_loader_leaves_the_global_generator_alone():
    loader = Loader(Numbers(8), BatchPlan(8, 2), workers=0)
    state = torch.get_rng_state()
    list(map(list, loader.windows(0)))
    assert torch.equal(state, torch.get_rng_state())


def test_lead_is_the_sample_before_cyclically():
    n, world = 12, 2
    for rank in range(world):
        plan = BatchPlan(n, 3, world=world, rank=rank, seed=0)
        order = plan.order(0)
        loader = Loader(Numbers(n), plan, lead=True)
        for update, window in enumerate(loader.windows(0)):
            part = order[update * 6 : (update + 1) * 6]
            (_, batch) = next(iter(window))
            expected = [part[rank * 3 - 1], *part[rank * 3 : rank * 3 + 3]]
            assert batch["ids"].tolist() == expected


@pytest.mark.parametrize("name", ["num_samples", "batch_size", "grad_accumulation"])
def test_sizes_must_be_positive(name):
    sizes = {"num_samples": 4, "batch_size": 2, "grad_accumulation": 1, name: 0}
    with pytest.raises(ValueError, match=name):
        BatchPlan(**sizes)
