"""Rows of a data set: each sample once and in order, on one process and on two."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from zoo.engine import BatchPlan, Loader, collect, evaluation_loader

SCRIPT = """
import json, sys
import torch
from accelerate import Accelerator
from torch import nn
from zoo.engine import collect, evaluation_loader

accelerator = Accelerator()
found = {}
for n, batch_size in [(11, 3), (1, 4), (7, 3), (8, 2)]:
    class Points:
        def __len__(self):
            return n

        def __getitems__(self, keys):
            return {"ids": torch.tensor([i for _, i in keys])}

    def rows(model, batch):
        ids = batch["ids"]
        square = (ids[:, None] * torch.tensor([1.0, 10.0])).to(torch.bfloat16)
        return {"id": ids, "square": square, "odd": ids % 2 == 1}

    loader = evaluation_loader(accelerator, Points(), batch_size)
    got = collect(accelerator, nn.Identity(), loader, rows)
    assert got["square"].dtype is torch.bfloat16 and got["odd"].dtype is torch.bool
    found[n] = [got["id"].tolist(), got["square"].tolist(), got["odd"].tolist()]
with open(f"{sys.argv[1]}/rank{accelerator.process_index}.json", "w") as file:
    json.dump([accelerator.num_processes, found], file)
accelerator.end_training()  # or the threads of the process group may abort the exit
"""


def test_two_processes_hold_each_sample_once_and_in_order(tmp_path):
    """Sizes that two processes cannot share evenly, down to one sample for both."""
    script = tmp_path / "rows.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            str(script), str(tmp_path),
        ],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        processes, found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert processes == 2
        for n in (11, 1, 7, 8):
            assert found[str(n)] == [
                list(range(n)),
                [[i, 10 * i] for i in range(n)],
                [i % 2 == 1 for i in range(n)],
            ]


class Points:
    def __init__(self, n: int = 10) -> None:
        self.x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, keys):
        ids = torch.tensor([i for _, i in keys])
        return {"x": self.x[ids], "ids": ids}


@pytest.fixture(scope="module")
def accelerator():
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def test_rows_are_those_of_the_whole_data_in_evaluation_mode(accelerator):
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
    source = Points()
    loader = evaluation_loader(accelerator, source, 4)
    found = collect(accelerator, model, loader, lambda model, batch: {"y": model(batch["x"])})
    assert model.training, "as before"
    assert not found["y"].requires_grad
    torch.testing.assert_close(found["y"], model.eval()(source.x).detach())


def test_any_order_of_reading_gives_the_order_of_the_samples(accelerator):
    source = Points(13)
    loader = Loader(source, BatchPlan(13, batch_size=4, seed=3, shuffle=True))
    found = collect(accelerator, nn.Identity(), loader, lambda _, batch: {"x": batch["x"]})
    assert torch.equal(found["x"], source.x)


def test_asked_to_stop_it_gives_nothing_and_restores_the_mode(accelerator):
    model, answers = nn.Identity(), iter([False, True])
    loader = evaluation_loader(accelerator, Points(), 4)
    rows = collect(accelerator, model, loader, lambda *_: {"x": _[1]["x"]}, lambda: next(answers))
    assert rows is None
    assert model.training


def test_what_is_no_row_per_sample_is_refused(accelerator):
    loader = evaluation_loader(accelerator, Points(), 4)
    for wrong in (torch.zeros(()), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"loss .* a row for each of 4 samples"):
            collect(accelerator, nn.Identity(), loader, lambda *_, wrong=wrong: {"loss": wrong})

    def ragged(_, batch):
        return {"words": batch["ids"][:, None].expand(-1, 2 + int(batch["ids"][0]))}

    with pytest.raises(ValueError, match=r"words \(6,\) must have one shape.*\(2,\) before"):
        collect(accelerator, nn.Identity(), loader, ragged)
