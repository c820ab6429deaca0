"""Two CPU processes on a model with everything that DistributedDataParallel dislikes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import json, sys
import torch
from torch import nn
from zoo.engine import TrainOptions, evaluate, evaluation_loader, fit, start_run

N = 21
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0))


class Points:
    def __len__(self):
        return N

    def __getitems__(self, keys):
        ids = torch.tensor([i for _, i in keys])
        return {"x": X[ids], "y": X[ids].sum(1), "ids": ids}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.body = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.spare_head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.body(self.frozen(x)))[:, 0]


seen, checksums = [], []
options = TrainOptions(out=sys.argv[1], epochs=2, batch_size=4, ema=sys.argv[2] == "ema", lr=0.01)
run = start_run("toy.py", options)
loader = evaluation_loader(run.accelerator, Points(), 4)


def step_fn(model, batch):
    if model.training and isinstance(model, nn.parallel.DistributedDataParallel):
        seen.append((batch["epoch"], batch["ids"].tolist()))
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def evaluate_fn(model):
    values = [v.double().sum().item() for v in model.state_dict().values()]
    checksums.append(values)
    def counts(model, batch):
        ids = torch.bincount(batch["ids"], minlength=N)
        return {"n": torch.tensor(len(batch["y"])), "ids": ids}

    sums = evaluate(run.accelerator, model, loader, counts)
    checksums.append([int(sums["n"]), *sums["ids"].tolist()])
    return {"val/top1": 0.0}


def save_model(model, folder):
    folder.mkdir()


fit(run, Model(), step_fn, Points(), evaluate_fn, save_model=save_model)
rank = run.accelerator.process_index
with open(f"{sys.argv[1]}/rank{rank}.json", "w") as file:
    json.dump({"seen": seen, "checksums": checksums}, file)
"""


@pytest.mark.parametrize("ema", ["ema", "plain"])
def test_ranks_agree_and_each_sample_counts_once(tmp_path, ema):
    """Cases E5, E12, E13: frozen and unused parts, BatchNorm, a short last batch."""
    script, out = tmp_path / "toy.py", tmp_path / "run"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            str(script), str(out), ema,
        ],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("spare_head.weight, spare_head.bias") == 1, "unused parameters named"
    assert "frozen" not in done.stderr
    ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0]["checksums"] == ranks[1]["checksums"]
    assert ranks[0]["checksums"][1] == [21, *[1] * 21]
    for epoch in range(2):
        ids = [i for rank in ranks for e, part in rank["seen"] if e == epoch for i in part]
        assert sorted(ids) == list(range(21))
