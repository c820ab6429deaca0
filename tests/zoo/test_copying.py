"""Values are checked before they are copied, and never held twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_vit import make, randomized, saved, snapshot
from torch import nn

import zoo
from zoo.weights import WeightsError


@pytest.mark.parametrize("kind", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("strict", [True, False])
def test_nan_is_refused_from_every_kind_of_source(strict: bool, kind: str, tmp_path: Path) -> None:
    model = randomized()
    with torch.no_grad():
        model.norm.bias[3] = float(kind)
    folder = zoo.save_pretrained(model, tmp_path / "m")
    torch.save(model.state_dict(), tmp_path / "m.pt")
    for source in (f"local-dir:{folder}", f"file:{tmp_path / 'm.pt'}"):
        with pytest.raises(WeightsError, match="NaN or infinity"):
            zoo.load_pretrained(make(), source, strict=strict)


def test_running_statistics_count_and_large_sums_pass(tmp_path: Path) -> None:
    model = nn.BatchNorm2d(4)
    state = snapshot(model)
    state["weight"][:] = 3e38  # finite; the sum is not
    zoo.load_pretrained(model, saved(state, tmp_path))
    assert torch.equal(model.weight, state["weight"])
    state["running_var"][1] = -torch.inf
    with pytest.raises(WeightsError, match="in 1 tensors: running_var"):
        zoo.load_pretrained(model, saved(state, tmp_path))
    state["running_var"][1] = 1
    with pytest.raises(WeightsError, match="too large for the model's dtype, in 1 tensors: weight"):
        zoo.load_pretrained(nn.BatchNorm2d(4).half(), saved(state, tmp_path))


MEMORY = """
import sys, threading
import torch, zoo

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

model = zoo.create_model("vit_small_patch16_224", depth=10)
peak, done = [anonymous()], threading.Event()
def watch():
    while not done.wait(0.001):
        peak.append(anonymous())
zoo.load_pretrained(zoo.create_model("vit_micro_patch2_8"), sys.argv[2])  # imports
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
zoo.load_pretrained(model, sys.argv[1])
done.set()
thread.join()
size = sum(p.numel() * p.element_size() for p in model.parameters()) // 1024
print((max(peak) - before) / size)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("kind", ["safetensors", "pt", "folder"])
def test_weights_are_never_held_twice(kind: str, tmp_path: Path) -> None:
    """The file is mapped: beside the model, no second copy is in anonymous memory."""
    micro = saved(zoo.create_model("vit_micro_patch2_8").state_dict(), tmp_path)
    with torch.device("meta"):
        model = zoo.create_model("vit_small_patch16_224", depth=10)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for value in model.parameters():
            value.fill_(0.1)
    source = f"file:{tmp_path}/big.{kind}"
    if kind == "folder":
        source = f"local-dir:{zoo.save_pretrained(model, tmp_path / 'm')}"
    elif kind == "pt":
        torch.save(model.state_dict(), tmp_path / "big.pt")
    else:
        save_file(model.state_dict(), tmp_path / "big.safetensors")
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, source, micro], capture_output=True, text=True, check=True
    )
    assert float(run.stdout) < 0.5


@pytest.mark.parametrize(
    ("stored", "dtype", "value"),
    [
        (torch.float64, torch.float32, 1e300),
        (torch.float64, torch.bfloat16, 1e300),
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.float32, torch.float16, 1e5),
    ],
)
def test_what_overflows_in_the_models_dtype_is_refused(
    stored: torch.dtype, dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    state = {key: tensor.to(stored) for key, tensor in randomized().state_dict().items()}
    state["head.bias"][0] = value
    torch.save(state, tmp_path / "large.pt")
    model = make().to(dtype)
    before = snapshot(model)
    with pytest.raises(WeightsError, match=r"too large for the model's dtype, in 1 .*head\.bias"):
        zoo.load_pretrained(model, f"file:{tmp_path / 'large.pt'}")
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
