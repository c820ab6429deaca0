"""Gates: recorded from whole models, summed up and compared with scipy's analysis of variance."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from zoo.diagnostics import (
    GateMoments,
    NothingCapturedError,
    capture_gates,
    draw_gates,
    gate_profile,
    gate_ranges,
    gate_statistics,
    save_gates,
)
from zoo.layers.tap import Tap


class Gated(nn.Module):
    """x * sigmoid(linear(x)); shown as (b c), or (b c y) with places."""

    gate_range = (0.0, 1.0)

    def __init__(self, width: int, places: int = 0) -> None:
        super().__init__()
        self.linear, self.tap, self.places = nn.Linear(width, width), Tap("gate"), places

    def forward(self, x: Tensor) -> Tensor:
        gate = self.linear(x).sigmoid()
        shown = gate[..., None].expand(*gate.shape, self.places) if self.places else gate
        self.tap.record(lambda: shown)
        return x * gate


class Silent(nn.Module):
    """Has a tap and shows nothing; says no range."""

    def __init__(self) -> None:
        super().__init__()
        self.tap = Tap("gate")

    def forward(self, x: Tensor) -> Tensor:
        return x


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Gated(6), nn.Dropout(0.5), nn.BatchNorm1d(6), Gated(6, places=3), Silent(), Tap()
    )


@pytest.fixture
def x() -> Tensor:
    return torch.randn(40, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def targets() -> Tensor:
    return torch.randint(0, 4, (40,), generator=torch.Generator().manual_seed(2))


# --- recording -------------------------------------------------------------------------------


def test_gates_are_recorded_by_layer_and_change_nothing(x):
    net = model().eval()
    expected = net(x)
    with capture_gates(net) as records:
        out = net(x)
        net(x[:3])
    assert torch.equal(out, expected)
    assert {name: [tuple(g.shape) for g in gates] for name, gates in records.items()} == {
        "0": [(40, 6), (3, 6)],
        "3": [(40, 6, 3), (3, 6, 3)],
    }
    assert torch.equal(records["0"][0], net[0].linear(x).sigmoid().detach())


def test_names_stay_under_wrappers(x):
    net = model()
    wrapped = nn.DataParallel(net)
    assert list(gate_ranges(wrapped)) == list(gate_ranges(net)) == ["0", "3", "4"]
    assert gate_ranges(net) == {"0": (0.0, 1.0), "3": (0.0, 1.0), "4": None}
    compiled = torch.compile(net.eval(), backend="eager")
    with capture_gates(compiled, "3", samples=2) as records:
        compiled(x)
    assert [gates.shape for gates in records["3"]] == [(2, 6, 3)]


def test_nothing_to_record_is_an_error(x):
    none = pytest.raises(ValueError, match=r"layers='9' matches no gate: the model has none$")
    with none, capture_gates(nn.Linear(2, 2), "9"):
        pass
    there = r"layers='9'.*no gate; there is \['0', '3', '4'\]"
    with pytest.raises(ValueError, match=there), capture_gates(model(), "9"):
        pass
    nothing = pytest.raises(NothingCapturedError, match=r"no gate was captured.*'4'")
    net = model()
    with nothing, capture_gates(net, "4"):
        net(x)


def test_memory_is_bounded(x):
    net = model().eval()
    with (
        pytest.raises(MemoryError, match=r"gate of 3 \(40, 6, 3\).*max_bytes=960"),
        capture_gates(net, max_bytes=40 * 6 * 4),
    ):
        net(x)
    assert not any(module.active for module in net.modules() if isinstance(module, Tap))


# --- statistics ------------------------------------------------------------------------------


def naive(gates: np.ndarray, targets: np.ndarray, low: float, high: float) -> dict[str, float]:
    """By the definitions, in float64; the dependence from scipy's analysis of variance."""
    from scipy.stats import f_oneway

    edge = 0.05 * (high - low)
    saturation = np.mean((gates <= low + edge) | (gates >= high - edge))
    values = gates.reshape(*gates.shape[:2], -1).mean(2)
    k, n = len(set(targets.tolist())), len(values)
    f = f_oneway(*(values[targets == each] for each in sorted(set(targets.tolist())))).statistic
    epsilon = (f - 1) * (k - 1) / ((k - 1) * f + n - k)
    return {
        "mean": values.mean(),
        "channel_spread": values.mean(0).std(),
        "sample_spread": values.std(0).mean(),
        "saturation": saturation,
        "class_dependence": max(0.0, epsilon.mean()),
    }


@pytest.mark.parametrize("shape", [(60, 5), (60, 5, 3, 2), (60, 1, 4, 4)])
@pytest.mark.parametrize("limits", [(0.0, 1.0), (-1.0, 1.0), (1.0, 2.0)])
def test_statistics_are_their_definitions(shape, limits):
    generator = torch.Generator().manual_seed(sum(shape))
    targets = torch.randint(0, 4, (60,), generator=generator)
    steps = torch.randn(4, *shape[1:], generator=generator, dtype=torch.float64)
    noise = torch.randn(shape, generator=generator, dtype=torch.float64)
    low, high = limits
    gates = low + (high - low) * (2 * (steps[targets] + noise)).sigmoid()
    found = gate_statistics(gates, targets, limits)
    for name, value in naive(gates.numpy(), targets.numpy(), low, high).items():
        assert getattr(found, name) == pytest.approx(value, abs=1e-12), name


def test_batches_add_up_and_class_means_are_means(x, targets):
    gates = torch.rand(40, 7, dtype=torch.float64) * 1e-3 + 0.9
    moments = GateMoments(5)
    for part in (slice(0, 1), slice(1, 20), slice(20, 40)):
        moments.add(gates[part], targets[part])
    whole, parts = gate_statistics(gates, targets), moments.statistics()
    for name in ("mean", "channel_spread", "sample_spread", "saturation", "class_dependence"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), abs=1e-12), name
    assert moments.counts.tolist() == torch.bincount(targets, minlength=5).tolist()
    for k in range(4):
        torch.testing.assert_close(moments.class_means[k], gates[targets == k].mean(0))
    assert moments.class_means[4].isnan().all()
    torch.testing.assert_close(moments.channel_means, gates.mean(0))


def test_a_constant_gate_has_no_spread_and_no_dependence(targets):
    constant = torch.tensor([0.1, 0.5, 0.99]).expand(40, 3)
    found = gate_statistics(constant, targets)
    assert (found.sample_spread, found.class_dependence) == (0.0, 0.0)
    assert found.saturation == pytest.approx(1 / 3)
    assert found.channel_spread == pytest.approx(np.std([0.1, 0.5, 0.99]), abs=1e-7)
    rounding = constant * (1 + 1e-7 * targets[:, None])  # a kernel's rounding, by class by chance
    assert gate_statistics(rounding, targets).class_dependence == 0.0


def test_a_gate_that_is_the_class_depends_on_nothing_else(targets):
    found = gate_statistics(nn.functional.one_hot(targets, 4).float(), targets)
    assert found.class_dependence == pytest.approx(1.0)
    assert found.saturation == 1.0
    half = torch.stack([targets.float(), torch.full((40,), 0.3)], dim=1)
    assert gate_statistics(half, targets, None).class_dependence == pytest.approx(0.5)


def test_chance_explains_nothing():
    """Eta squared would be (k - 1) / (n - 1) = 0.23; the correction takes it to 0."""
    generator = torch.Generator().manual_seed(0)
    gates = torch.rand(40, 4000, generator=generator)
    targets = torch.arange(40) % 10
    assert gate_statistics(gates, targets).class_dependence < 0.01


@pytest.mark.parametrize("value", [0.0, 0.049, 0.051, 0.949, 0.951, 1.0])
def test_saturation_is_five_percent_of_the_range(value):
    gates, targets = torch.full((4, 2), value, dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    expected = float(value <= 0.05 or value >= 0.95)
    assert gate_statistics(gates, targets).saturation == expected
    assert gate_statistics(4 * gates - 2, targets, (-2.0, 2.0)).saturation == expected


def test_what_is_not_defined_is_nan():
    gates = torch.tensor([[0.0, 1.0], [0.5, 2.0]])
    one, two = torch.tensor([0, 0]), torch.tensor([0, 1])
    assert math.isnan(gate_statistics(gates, one).class_dependence)  # one class
    assert math.isnan(gate_statistics(gates, two).class_dependence)  # no sample to spare
    assert math.isnan(gate_statistics(gates, one, None).saturation)
    assert math.isnan(gate_statistics(gates, one, (1.0, 1.0)).saturation)
    assert gate_statistics(gates, one, (0.0, math.inf)).saturation == 0.25, "zeros of a ReLU"


def test_wrong_shapes_are_named():
    moments = GateMoments(2)
    with pytest.raises(ValueError, match=r"\(3, 2\).*\(4,\)"):
        moments.add(torch.rand(3, 2), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\(3,\) must be"):
        moments.add(torch.rand(3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="num_classes = 2"):
        moments.add(torch.rand(3, 2), torch.tensor([0, 1, 2]))
    moments.add(torch.rand(3, 2), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="5 channels, before 2"):
        moments.add(torch.rand(3, 5), torch.tensor([0, 1, 1]))
    with pytest.raises(ValueError, match="no gates"):
        _ = GateMoments(2).class_means
    with pytest.raises(ValueError, match="gate_range"):
        GateMoments(2, (1.0, 0.0))


def test_what_is_no_gate_or_target_is_named():
    gates, targets = torch.rand(4, 2), torch.tensor([0, 1, 0, 1])
    for empty in (torch.rand(4, 0), torch.rand(4, 2, 0, 3), torch.rand(0, 2)):
        with pytest.raises(ValueError, match=r"^gates \(.*\) must be .* none of them 0"):
            gate_statistics(empty, targets[: len(empty)])
    with pytest.raises(TypeError, match=r"^gates \(torch.complex64\) must be real"):
        gate_statistics(gates.to(torch.complex64), targets)
    for dtype in (torch.bool, torch.float32, torch.complex64):
        with pytest.raises(TypeError, match=rf"^targets \({dtype}\) must be class indices"):
            gate_statistics(gates, targets.to(dtype))
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert gate_statistics(gates, targets.to(dtype)) == gate_statistics(gates, targets)
    with pytest.raises(ValueError, match=r"targets -1 to -1 must lie in"):
        gate_statistics(gates, targets * 0 - 1)
    for limits in [0.5, "01", (0.0,), (0, 1, 2), ("low", "high"), (1.0, 0.0), (math.nan, 1.0)]:
        with pytest.raises((TypeError, ValueError), match=r"^gate_range \(.*low <= high, or None"):
            gate_statistics(gates, targets, limits)
    for number in (0, 2.5, "2"):
        with pytest.raises((TypeError, ValueError), match=r"^num_classes \("):
            GateMoments(number)


def test_nan_stays_nan():
    gates, targets = torch.rand(6, 2), torch.tensor([0, 1, 0, 1, 0, 1])
    gates[0, 0] = math.nan
    for name, value in vars(gate_statistics(gates, targets)).items():
        assert math.isnan(value), name


# --- whole models ----------------------------------------------------------------------------


def test_a_profile_sums_up_what_is_captured_and_leaves_the_model_alone(x, targets):
    net = model().train()
    net[2].eval()  # frozen statistics stay frozen
    before = {name: value.clone() for name, value in net.state_dict().items()}
    profile = gate_profile(net, zip(x.split(16), targets.split(16), strict=True), 4)
    assert (net.training, net[1].training, net[2].training) == (True, True, False)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert list(profile) == ["0", "3"], "the silent one is left out"
    with capture_gates(net.eval()) as records:
        net(x)
    for name, (gates,) in records.items():
        expected = gate_statistics(gates, targets)
        for field, value in vars(profile[name].statistics()).items():
            assert value == pytest.approx(getattr(expected, field), abs=1e-7), (name, field)


def test_a_profile_of_nothing_is_an_error(x, targets):
    with pytest.raises(NothingCapturedError):
        gate_profile(nn.Sequential(Silent()), [(x, targets)], 4)
    with pytest.raises(ValueError, match="no gate"):
        gate_profile(nn.Linear(6, 6), [(x, targets)], 4)


# --- files -----------------------------------------------------------------------------------


@pytest.fixture
def profile(x, targets):
    return gate_profile(model(), [(x, targets)], 5)


NAMES = ["ant", "bee", "cat", "dog", "eel"]


def test_files_hold_the_statistics_and_the_class_means(profile, tmp_path):
    groups = {"0": "stage1", "3": "stage1"}
    numbers = save_gates(tmp_path / "attention", profile, NAMES, groups)
    assert {path.name for path in (tmp_path / "attention").iterdir()} == {
        "gates.json", "gates.npz", "gates.png"
    }  # fmt: skip
    report = json.loads((tmp_path / "attention/gates.json").read_text())
    for name, moments in profile.items():
        for field, value in vars(moments.statistics()).items():
            assert report["layers"][name][field] == value
        assert report["layers"][name]["group"] == "stage1"
        assert report["layers"][name]["channels"] == 6
    means = [profile[name].statistics().mean for name in ("0", "3")]
    assert numbers["gates/stage1/mean"] == pytest.approx(sum(means) / 2)
    assert report["groups"]["stage1"]["mean"] == numbers["gates/stage1/mean"]
    arrays = np.load(tmp_path / "attention/gates.npz")
    assert arrays["class_names"].tolist() == NAMES
    assert arrays["class_counts"].tolist() == profile["0"].counts.tolist()
    np.testing.assert_array_equal(arrays["3"], profile["3"].class_means.float().numpy())


def test_undefined_numbers_are_null_in_json(tmp_path):
    moments = GateMoments(1, (0.0, math.inf))
    moments.add(torch.rand(4, 3), torch.zeros(4, dtype=torch.long))
    numbers = save_gates(tmp_path, {"layer": moments}, ["all"])
    assert math.isnan(numbers["gates/layer/class_dependence"])
    layer = json.loads((tmp_path / "gates.json").read_text())["layers"]["layer"]
    assert layer["class_dependence"] is None
    assert layer["gate_range"] == [0.0, None]


def test_the_figure_shows_layers_classes_and_sorted_channels(profile, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k))
    )
    draw_gates(tmp_path / "gates.png", profile, NAMES, {"0": "stage1", "3": "stage2"})
    (figure,) = figures
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0].startswith("stage1: 0\n")
    assert titles[1].startswith("stage2: 3\n")
    assert all("of gates at an end of their range" in title for title in titles[:2])
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    assert list(lines) == [*NAMES, "all samples"]
    overall = profile["0"].channel_means
    np.testing.assert_allclose(lines["all samples"], overall.sort().values)
    np.testing.assert_allclose(lines["bee"], profile["0"].class_means[1, overall.argsort()])


def test_every_row_of_the_figure_says_what_its_height_is(profile, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    uneven = {"0": profile["0"], "3": profile["3"], "5": profile["3"]}
    draw_gates(tmp_path / "gates.png", uneven, NAMES, {"0": "a", "3": "b", "5": "b"})
    labels = [axes.get_ylabel() for axes in figures[0].axes if axes.axison]
    assert labels == ["mean gate", "", "mean gate"], "the second row has no layer of a"


def test_many_classes_and_layers_are_cut_to_what_a_figure_holds(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(60) % 30
    gates = 0.4 + 0.01 * torch.rand(60, 2, generator=generator)
    gates[targets == 17] += 0.5
    profile = {}
    for index in range(6):
        profile[f"layer{index}"] = GateMoments(30)
        profile[f"layer{index}"].add(gates, targets)
    names = [f"class {index}" for index in range(30)]
    draw_gates(tmp_path / "gates.png", profile, names, dict.fromkeys(profile, "stage1"))
    (figure,) = figures
    assert [axes.get_title().split("\n")[0] for axes in figure.axes] == [
        f"stage1: layer{index}" for index in range(2, 6)
    ]
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert len(labels) == 11
    assert "class 17" in labels
    assert "10 of 30 classes" in figure.legends[0].get_title().get_text()


def test_without_matplotlib_the_numbers_are_written(profile, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    save_gates(tmp_path, profile, NAMES)
    assert {path.name for path in tmp_path.iterdir()} == {"gates.json", "gates.npz"}
    assert capsys.readouterr().err.count("pip install 'attention-zoo[plots]'") == 1
