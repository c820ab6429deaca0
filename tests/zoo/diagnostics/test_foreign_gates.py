"""Gates of timm's and torchvision's networks, against what their modules multiply by."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import zoo
from vision import create_channel_attention
from zoo.diagnostics import NothingCapturedError, capture_gates, gate_profile, gate_ranges

HOSTS = [
    ("timm:lcnet_050", 2, "blocks.5.0.se"),
    ("timm:regnety_002", 13, "s1.b1.se"),
    ("timm:efficientnet_b0", 16, "blocks.0.0.se"),
    ("timm:seresnet18", 8, "layer1.0.se"),
    ("timm:legacy_seresnet18", 8, "layer1.0.se_module"),
    ("timm:ecaresnet26t", 8, "layer1.0.se"),
    ("timm:ese_vovnet19b_dw", 4, "stages.0.blocks.0.attn"),
    ("torchvision:mobilenet_v3_small", 9, "features.1.block.1"),
    ("torchvision:efficientnet_b0", 16, "features.1.0.block.1"),
]


def network(name: str) -> Any:
    library, _, own = name.partition(":")
    build = timm.create_model if library == "timm" else torchvision.models.get_model
    torch.manual_seed(0)
    return build(own).eval()


def factors(layer: nn.Module, seen: dict[str, Tensor], name: str) -> Any:
    """A hook that finds the factor of each channel from a layer's input and output alone."""

    def keep(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen[name] = (output * inputs[0]).sum((2, 3)) / inputs[0].square().sum((2, 3))

    return layer.register_forward_hook(keep)


@pytest.mark.parametrize(("name", "count", "first"), HOSTS)
def test_gates_are_what_the_features_are_multiplied_by(name: str, count: int, first: str) -> None:
    model, seen = network(name), {}
    ranges = gate_ranges(model)
    assert next(iter(ranges)) == first
    assert list(ranges.values()) == [(0.0, 1.0)] * count
    x = torch.randn(2, 3, 64, 64)
    with torch.inference_mode():
        expected = model(x)
        hooks = [factors(model.get_submodule(layer), seen, layer) for layer in ranges]
        with capture_gates(model) as records:
            assert torch.equal(model(x), expected)
        for hook in hooks:
            hook.remove()
    assert list(records) == list(ranges)
    for layer, (gates,) in records.items():
        shown = seen[layer].isfinite()  # no factor follows from features that are all zero
        torch.testing.assert_close(gates[shown], seen[layer][shown], rtol=1e-4, atol=1e-4)


def test_layers_are_chosen_by_name_and_forgotten_afterwards() -> None:
    model, x = network("timm:lcnet_050"), torch.randn(3, 3, 64, 64)
    with capture_gates(model, "*.1.se", samples=2) as records:
        model(x)
        model(x)
    assert {k: [g.shape for g in v] for k, v in records.items()} == {
        "blocks.5.1.se": [(2, 256), (2, 256)]
    }
    assert not any(module._forward_hooks for module in model.modules())


def test_profile_of_classes() -> None:
    """Without a model in training mode: the profile is one in evaluation, which it restores."""
    model = network("torchvision:mobilenet_v3_small").train()
    x, targets = torch.randn(6, 3, 64, 64), torch.tensor([0, 0, 1, 1, 2, 2])
    profile = gate_profile(model, [(x[:4], targets[:4]), (x[4:], targets[4:])], 3)
    assert model.training
    assert len(profile) == 9
    with capture_gates(model.eval()) as records:
        model(x)
    for name, moments in profile.items():
        means = torch.stack([records[name][0][targets == k].mean(0) for k in range(3)])
        torch.testing.assert_close(moments.class_means.float(), means, rtol=0, atol=1e-5)
        assert moments.gate_range == (0.0, 1.0)


def test_recomputation_in_the_backward_pass_is_not_recorded_again() -> None:
    model = network("timm:lcnet_050").train()
    model.set_grad_checkpointing()
    with capture_gates(model) as records:
        model(torch.randn(2, 3, 64, 64)).sum().backward()
    assert [len(gates) for gates in records.values()] == [1, 1]


def test_compiled_networks_show_their_gates_before_they_first_run() -> None:
    torch._dynamo.reset()
    model, x = SmallGate(), torch.randn(2, 4, 5, 5)
    compiled = torch.compile(model, backend="eager")
    with capture_gates(compiled) as records:
        compiled(x)
    torch.testing.assert_close(records["gate"][0], model.values(x).flatten(1).detach())


def test_compiled_networks_that_have_run_are_recorded_as_the_model_inside() -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(SmallGate(), backend="eager"), torch.randn(2, 4, 5, 5)
    compiled(x)
    late = pytest.raises(NothingCapturedError, match="no gate was captured")
    with late, capture_gates(compiled):
        compiled(x)
    inside = zoo.weights.unwrap(compiled)
    with capture_gates(inside) as records:
        inside(x)
    assert [gates.shape for gates in records["gate"]] == [(2, 4)]


class SmallGate(nn.Module):
    """Squeeze-and-excitation of a user's own."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.fc, self.gate = nn.Conv2d(4, 4, 1), activation or nn.Sigmoid()

    def values(self, x: Tensor) -> Tensor:
        return self.gate(self.fc(x.mean((2, 3), keepdim=True)))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.values(x)


@pytest.mark.parametrize(
    ("activation", "limits"),
    [(nn.Sigmoid(), (0.0, 1.0)), (nn.Hardsigmoid(), (0.0, 1.0)), (nn.Tanh(), (-1.0, 1.0))],
)
def test_limits_are_the_activations(activation: nn.Module, limits: tuple[float, float]) -> None:
    assert gate_ranges(nn.Sequential(SmallGate(activation))) == {"0": limits}


@pytest.mark.parametrize("part", [nn.ReLU(), nn.Linear(4, 4), nn.Identity(), None])
def test_what_is_called_gate_and_has_no_limits_is_none(part: nn.Module | None) -> None:
    model = SmallGate()
    model.gate = part
    assert gate_ranges(model) == {}


@pytest.mark.parametrize("name", ["timm:resnet18", "timm:eva02_tiny_patch14_224"])
def test_networks_without_gates(name: str) -> None:
    model = network(name)
    assert gate_ranges(model) == {}
    with pytest.raises(ValueError, match="matches no gate: the model has none"):
        gate_profile(model, [], 2)


def test_a_gate_that_does_not_run_is_an_error() -> None:
    model = SmallGate()
    model.forward = partial(torch.mul, other=2)  # type: ignore[method-assign]
    with pytest.raises(NothingCapturedError, match="no gate was captured"), capture_gates(model):
        model(torch.randn(1, 4, 3, 3))


@pytest.mark.parametrize("kind", ["se", "cbam", "timm:se", "timm:cbam"])
def test_parts_of_our_layers_are_no_layers_of_their_own(kind: str) -> None:
    layer = create_channel_attention(kind, 64)
    assert list(gate_ranges(nn.Sequential(layer))) == ["0"]


def test_gates_over_places_stay_maps() -> None:
    spatial = timm.layers.cbam.SpatialAttn()
    with capture_gates(nn.Sequential(spatial)) as records:
        spatial(torch.randn(2, 4, 5, 6))
    assert records["0"][0].shape == (2, 1, 5, 6)
