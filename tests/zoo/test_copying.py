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
from zoo import copying
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


# --- every kind of number and of layout --------------------------------------------------------

FLOATS = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64,
]  # fmt: skip
LAYOUTS = {
    "plain": lambda x: x,
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2],
    "one row again and again": lambda x: x[:1].expand(6, 8),
    "one number": lambda x: x[0, 0],
    "nothing": lambda x: x[:0],
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three threads, also for small tensors on few cores; torch has one or two of its own."""
    monkeypatch.setattr(copying, "_cores", lambda: 3)
    monkeypatch.setattr(copying, "_WORTH_A_THREAD", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8, torch.bool])
def test_copies_are_those_of_torch(dtype: torch.dtype, layout: str) -> None:
    """Bit for bit, from and to every layout, also where the model has another dtype."""
    generator = torch.Generator().manual_seed(0)
    values, state = {}, {}
    for index, (there, here) in enumerate([("plain", layout), (layout, "plain"), (layout, layout)]):
        for other in (dtype, torch.float32, torch.complex64):
            if here.startswith("one row") or (dtype.is_complex and not other.is_complex):
                continue  # such a tensor is no model's
            value = LAYOUTS[there](torch.randn(6, 8, generator=generator).to(dtype))
            target = LAYOUTS[here](torch.randn(6, 8, generator=generator).to(other))
            if value.shape == target.shape:
                values[f"{index} {other}"], state[f"{index} {other}"] = value, target
    expected = {key: state[key].clone().copy_(value) for key, value in values.items()}
    copying.copy_all(state, values)
    for key, value in expected.items():
        assert state[key].dtype == value.dtype
        assert torch.equal(state[key].to(torch.complex128), value.to(torch.complex128)), key


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_value_that_is_not_finite_is_found_anywhere(dtype: torch.dtype, layout: str) -> None:
    values = {f"{i}": LAYOUTS[layout](torch.ones(6, 8).to(dtype)) for i in range(5)}
    state = {key: torch.empty(value.shape, dtype=dtype) for key, value in values.items()}
    copying.refuse_infinite("x", state, values)
    if layout == "nothing":
        return
    for number in ("nan", "inf", "-inf"):
        if dtype == torch.float8_e4m3fn and number != "nan":
            continue  # it has no infinity
        for place in ((0, 0), (0, 7), (0, 3)):
            damaged = torch.ones(6, 8).to(dtype)
            damaged[place] = float(number)
            bad = LAYOUTS[layout](damaged)
            if not bool(bad.to(torch.complex64).isfinite().all()):
                with pytest.raises(WeightsError, match=r"in 2 tensors: 1, 4$"):
                    copying.refuse_infinite("x", state, {**values, "1": bad, "4": bad})


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_values_pass(dtype: torch.dtype) -> None:
    """Their sum would overflow."""
    largest = torch.full((64,), torch.finfo(dtype).max, dtype=torch.float64)
    values = {"large": largest.to(dtype), "and small": torch.cat([largest, -largest]).to(dtype)}
    copying.refuse_infinite("x", values, values)


@pytest.mark.parametrize("number", [1, 3, 10**4, 2 * 10**6, 2 * 10**7])
def test_shares_are_all_tensors_once_and_alike_in_size(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_cores", lambda: 4)
    tensors = {f"{index}": torch.empty(number) for index in range(11)}
    shares: list[list[str]] = []
    copying._share_out(shares.append, tensors)
    assert sorted(key for share in shares for key in share) == sorted(tensors)
    total = 44 * number
    assert len(shares) == max(1, min(4, total // copying._WORTH_A_THREAD))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.usefixtures("threads")
def test_loading_between_forward_and_backward_is_noticed(tmp_path: Path) -> None:
    """As after any change in place: gradients of the old weights would be wrong."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    source = saved(snapshot(model), tmp_path)
    loss = model(torch.ones(1, 2)).sum()
    zoo.load_pretrained(model, source)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("threads")
def test_parameters_stay_what_they_are(tmp_path: Path) -> None:
    """The same objects in the same memory, for optimizers, wrappers and views of them."""
    model = randomized()
    source, other = saved(snapshot(model), tmp_path), make()
    before = {name: (p, p.data_ptr(), p.requires_grad) for name, p in other.named_parameters()}
    other.norm.weight.requires_grad_(False)
    zoo.load_pretrained(other, source)
    for name, parameter in other.named_parameters():
        assert parameter is before[name][0]
        assert parameter.data_ptr() == before[name][1]
        assert parameter.requires_grad == (name != "norm.weight")
        assert torch.equal(parameter, dict(model.named_parameters())[name])


def test_all_bad_tensors_are_named_and_nothing_has_changed(tmp_path: Path) -> None:
    """The last one of a file as well as the first."""
    state = snapshot(randomized())
    first, *_, last = sorted(state)
    state[first].view(-1)[0] = torch.nan
    state[last].view(-1)[-1] = -torch.inf
    model = make()
    before = snapshot(model)
    with pytest.raises(WeightsError, match=r"in 2 tensors: [\w.]+, [\w.]+$") as error:
        zoo.load_pretrained(model, saved(state, tmp_path))
    assert {first, last} == set(str(error.value).rpartition(": ")[2].split(", "))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_tensors_of_another_shape_are_not_taken_for_alike() -> None:
    """As many numbers in another order would be other weights."""
    state, values = {"x": torch.zeros(2, 3)}, {"x": torch.arange(6.0).view(3, 2)}
    with pytest.raises(RuntimeError, match="must match"):
        copying.copy_all(state, values)
    assert not state["x"].any()


def test_nan_is_refused_where_whole_numbers_would_hide_it() -> None:
    state, values = {"x": torch.zeros(3, dtype=torch.int64)}, {"x": torch.tensor([1, torch.nan, 2])}
    with pytest.raises(WeightsError, match="in 1 tensors: x"):
        copying.refuse_infinite("x", state, values)
