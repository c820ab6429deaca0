"""Channel attention against timm with copied weights, plain float64 formulas and published figures.

Values and all gradients are compared in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.fft
import torch
import torchvision
from timm.layers import EcaModule, EffectiveSEModule, GatherExcite, GlobalContext, SEModule
from timm.layers.cbam import CbamModule
from timm.layers.coord_attn import CoordAttn
from timm.layers.helpers import make_divisible
from timm.layers.mlp import ConvMlp
from torch import Tensor, nn
from torch.nn import functional as F

from vision.channel_attention import (
    ChannelAttention,
    create_channel_attention,
    list_channel_attention,
    reduced_width,
)

RESNET50 = [(256, 3), (512, 4), (1024, 6), (2048, 3)]  # channels and number of blocks, by stage


def shaken(kind: str, channels: int, **options: Any) -> ChannelAttention:
    """In float64, with random parameters and running statistics."""
    torch.manual_seed(0)
    module = create_channel_attention(kind, channels, **options).double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in module.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer))
    return module


def assert_same(ours: nn.Module, theirs: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Equal outputs, and equal gradients of the input and all parameters of `ours`."""
    results = []
    for function in (ours, theirs):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        inputs = [leaf, *ours.parameters()]
        results.append([y, *torch.autograd.grad((y * weights).sum(), inputs, allow_unused=True)])
    for ours_, theirs_ in zip(*results, strict=True):
        torch.testing.assert_close(ours_, theirs_, atol=1e-9, rtol=1e-9)


def share(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> nn.Module:
    """Puts the parameters and buffers of `ours` into `theirs`, under the names given."""
    for mine, their in names.items():
        parent, _, child = their.rpartition(".")
        setattr(theirs.get_submodule(parent), child, ours.get_submodule(mine))
    return theirs


def ge_with_mlp(channels: int, **options: Any) -> nn.Module:
    """timm 1.0.31 cannot build the mlp of its GatherExcite itself."""
    module = GatherExcite(channels, use_mlp=False, **options)
    module.mlp = ConvMlp(channels, channels // 16)
    return module


TWO = {"fc1": "fc1", "fc2": "fc2"}
TIMM: list[tuple[str, dict[str, Any], Callable[[int], nn.Module], dict[str, str]]] = [
    ("se", {"round_to": 8}, SEModule, TWO),
    ("se", {}, lambda c: SEModule(c, rd_channels=c // 16), TWO),
    ("se", {"round_to": 8, "squeeze": "both"}, lambda c: SEModule(c, add_maxpool=True), TWO),
    ("se", {"round_to": 8, "bias": False}, lambda c: SEModule(c, bias=False), TWO),
    *(
        ("se", {"round_to": 8, "gate": gate}, lambda c, g=gate: SEModule(c, gate_layer=g), TWO)
        for gate in ("hard_sigmoid", "tanh", "relu")
    ),
    ("ese", {"gate": "hard_sigmoid"}, EffectiveSEModule, {"fc": "fc"}),
    ("ese", {}, lambda c: EffectiveSEModule(c, gate_layer="sigmoid"), {"fc": "fc"}),
    ("eca", {"min_kernel": 3}, EcaModule, {"conv": "conv"}),
    (
        "cbam",
        {"bias": False},
        CbamModule,
        {
            "fc1": "channel.fc1",
            "fc2": "channel.fc2",
            "place.conv": "spatial.conv.conv",
            "place.norm": "spatial.conv.bn",
        },
    ),
    *(
        ("ge", {"extent": e}, lambda c, e=e: GatherExcite(c, extent=e, use_mlp=False), {})
        for e in (0, 2, 4)
    ),
    (
        "ge",
        {"extent": 2, "mlp": True},
        lambda c: ge_with_mlp(c, extent=2),
        {"mlp.0": "mlp.fc1", "mlp.2": "mlp.fc2"},
    ),
    (
        "coord",
        {"bias": False, "rd_ratio": 1 / 24, "min_width": 1, "round_to": 8},
        CoordAttn,
        {"reduce": "conv1", "norm": "bn1", "to_rows": "conv_h", "to_columns": "conv_w"},
    ),
]


@pytest.mark.parametrize(("kind", "options", "theirs", "names"), TIMM)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("channels", [48, 100])
def test_equals_timm_with_the_same_weights(
    kind: str,
    options: dict[str, Any],
    theirs: Callable[[int], nn.Module],
    names: dict[str, str],
    training: bool,
    channels: int,
) -> None:
    ours = shaken(kind, channels, **options).train(training)
    other = theirs(channels).double().train(training)
    shapes = {k: v.shape for k, v in other.state_dict().items()}
    share(ours, other, names)
    assert {k: v.shape for k, v in other.state_dict().items()} == shapes
    assert_same(ours, other, torch.randn(2, channels, 9, 7, dtype=torch.float64))


@pytest.mark.parametrize("fuse", ["add", "scale"])
def test_global_context_equals_timm_with_the_same_epsilon(fuse: str) -> None:
    ours = shaken("gc", 48, fuse=fuse, rd_ratio=1 / 8)
    theirs = GlobalContext(48, fuse_add=fuse == "add", fuse_scale=fuse == "scale").double()
    mlp = theirs.get_submodule(f"mlp_{fuse}")
    share(ours, theirs, {"attend": "conv_attn"})
    share(ours, mlp, TWO)
    mlp.norm.weight, mlp.norm.bias, mlp.norm.eps = ours.norm.weight, ours.norm.bias, 1e-5
    assert_same(ours, theirs, torch.randn(2, 48, 9, 7, dtype=torch.float64))


def test_rounding_equals_timms() -> None:
    for channels in range(1, 1025):
        for ratio in (1 / 16, 1 / 4, 1 / 24):
            expected = make_divisible(channels * ratio, 8, round_limit=0.0)
            assert reduced_width(channels, ratio, round_to=8) == expected


# Plain formulas, written position by position where that is short.


def bn(z: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """(b c y x), the training mode's normalisation."""
    mean = z.mean((0, 2, 3), keepdim=True)
    var = (z - mean).pow(2).mean((0, 2, 3), keepdim=True)
    scale, shift = norm.weight.view(1, -1, 1, 1), norm.bias.view(1, -1, 1, 1)
    return (z - mean) / (var + norm.eps).sqrt() * scale + shift


def mlp(m: Any, z: Tensor) -> Tensor:
    """(b c) -> (b c) by the two layers as matrices."""
    hidden = (z @ m.fc1.weight.flatten(1).T + m.fc1.bias).clamp(min=0)
    return hidden @ m.fc2.weight.flatten(1).T + m.fc2.bias


def se(m: Any, x: Tensor) -> Tensor:
    z = x.flatten(2).sum(-1) / x[0, 0].numel()
    return x * (1 / (1 + torch.exp(-mlp(m, z))))[:, :, None, None]


def se_max(m: Any, x: Tensor) -> Tensor:
    return x * torch.sigmoid(mlp(m, x.flatten(2).max(-1).values))[:, :, None, None]


def constant(m: Any, x: Tensor) -> Tensor:
    return x * torch.sigmoid(mlp(m, torch.ones(1, x.shape[1], dtype=x.dtype)))[:, :, None, None]


def nosqueeze(m: Any, x: Tensor) -> Tensor:
    rows = [[mlp(m, x[:, :, i, j]) for j in range(x.shape[3])] for i in range(x.shape[2])]
    logits = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return x * torch.sigmoid(logits)


def eca(m: Any, x: Tensor) -> Tensor:
    z, taps = x.mean((2, 3)), m.conv.weight.flatten()
    reach = len(taps) // 2
    mixed = []
    for c in range(x.shape[1]):
        near = [(k, c + k - reach) for k in range(len(taps)) if 0 <= c + k - reach < x.shape[1]]
        mixed.append(sum(taps[k] * z[:, at] for k, at in near))
    return x * torch.sigmoid(torch.stack(mixed, 1))[:, :, None, None]


def scse(m: Any, x: Tensor) -> Tensor:
    by_channel = x * torch.sigmoid(mlp(m, x.mean((2, 3))))[:, :, None, None]
    place = (x * m.place.weight).sum(1, keepdim=True) + m.place.bias
    return by_channel + x * torch.sigmoid(place)


def bam(m: Any, x: Tensor) -> Tensor:
    channel = bn(mlp(m, x.mean((2, 3)))[:, :, None, None], m.norm)
    z = x
    for layer in (0, 2, 4, 6):
        conv = m.place[layer]
        dilation = 4 if conv.weight.shape[-1] == 3 else 1
        padded = F.pad(z, [dilation] * 4) if conv.weight.shape[-1] == 3 else z
        z = F.conv2d(padded, conv.weight, conv.bias, dilation=dilation)
        z = z.clamp(min=0) if layer < 6 else z
    return x + x * torch.sigmoid(channel + bn(z, m.place[7]))


def cbam(m: Any, x: Tensor) -> Tensor:
    channel = torch.sigmoid(mlp(m, x.mean((2, 3))) + mlp(m, x.flatten(2).max(-1).values))
    x = x * channel[:, :, None, None]
    planes = torch.stack([x.mean(1), x.max(1).values], 1)
    return x * torch.sigmoid(bn(F.conv2d(planes, m.place.conv.weight, padding=3), m.place.norm))


def gct(m: Any, x: Tensor) -> Tensor:
    s = m.alpha.flatten() * torch.sqrt((x**2).sum((2, 3)) + 1e-5)
    share = math.sqrt(x.shape[1]) * s / torch.sqrt((s**2).sum(1, keepdim=True) + 1e-5)
    return x * (1 + torch.tanh(m.gamma.flatten() * share + m.beta.flatten()))[:, :, None, None]


def srm(m: Any, x: Tensor) -> Tensor:
    mean = x.mean((2, 3))
    std = torch.sqrt(((x - mean[:, :, None, None]) ** 2).mean((2, 3)) + 1e-5)
    z = m.weight[:, 0] * mean + m.weight[:, 1] * std
    return x * torch.sigmoid(bn(z[:, :, None, None], m.norm))


def simam(m: Any, x: Tensor) -> Tensor:
    d = (x - x.mean((2, 3), keepdim=True)) ** 2
    v = d.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3] - 1)
    return x * torch.sigmoid(d / (4 * (v + 1e-4)) + 0.5)


def triplet(m: Any, x: Tensor) -> Tensor:
    """Each branch turns the map so that its axis comes second, and back."""
    branches = ((m.over_c, (0, 1, 2, 3)), (m.over_y, (0, 2, 1, 3)), (m.over_x, (0, 3, 2, 1)))
    total = torch.zeros_like(x)
    for branch, order in branches:
        turned = x.permute(order)
        planes = torch.stack([turned.max(1).values, turned.mean(1)], 1)
        logits = bn(F.conv2d(planes, branch.conv.weight, padding=3), branch.norm)
        total = total + (turned * torch.sigmoid(logits)).permute(order)
    return total / 3


def coord(m: Any, x: Tensor) -> Tensor:
    means = torch.cat([x.mean(3), x.mean(2)], 2)[..., None]
    z = bn(F.conv2d(means, m.reduce.weight, m.reduce.bias), m.norm)
    z = z * (z + 3).clamp(0, 6) / 6
    rows, columns = z[:, :, : x.shape[2]], z[:, :, x.shape[2] :]
    g_y = torch.sigmoid(F.conv2d(rows, m.to_rows.weight, m.to_rows.bias))
    g_x = torch.sigmoid(F.conv2d(columns, m.to_columns.weight, m.to_columns.bias))
    return x * g_y * g_x.permute(0, 1, 3, 2)


def gc(m: Any, x: Tensor) -> Tensor:
    scores = torch.exp((x * m.attend.weight).sum(1) + m.attend.bias)
    weights = scores / scores.sum((1, 2), keepdim=True)
    z = (x * weights[:, None]).sum((2, 3)) @ m.fc1.weight.flatten(1).T + m.fc1.bias
    mean, var = z.mean(1, keepdim=True), z.var(1, keepdim=True, correction=0)
    z = (z - mean) / torch.sqrt(var + 1e-5) * m.norm.weight + m.norm.bias
    return x + (z.clamp(min=0) @ m.fc2.weight.flatten(1).T + m.fc2.bias)[:, :, None, None]


def ge_theta(m: Any, x: Tensor) -> Tensor:
    """GE-θ⁺ with extent 4; each gathered value serves the positions nearest to it."""
    z = F.conv2d(F.pad(x, [1] * 4), m.gather[0].weight, stride=2, groups=x.shape[1])
    z = bn(z, m.gather[1]).clamp(min=0)
    z = F.conv2d(F.pad(z, [1] * 4), m.gather[3].weight, stride=2, groups=x.shape[1])
    z = F.conv2d(bn(z, m.gather[4]), m.mlp[0].weight, m.mlp[0].bias).clamp(min=0)
    z = torch.sigmoid(F.conv2d(z, m.mlp[2].weight, m.mlp[2].bias))
    rows = torch.arange(x.shape[2]) * z.shape[2] // x.shape[2]
    columns = torch.arange(x.shape[3]) * z.shape[3] // x.shape[3]
    return x * z[:, :, rows][:, :, :, columns]


FORMULAS: list[tuple[str, dict[str, Any], Callable[[Any, Tensor], Tensor]]] = [
    ("none", {}, lambda m, x: x),
    ("se", {"rd_ratio": 1 / 4}, se),
    ("se", {"rd_ratio": 1 / 4, "squeeze": "max"}, se_max),
    ("constant", {"rd_ratio": 1 / 4}, constant),
    ("nosqueeze", {"rd_ratio": 1 / 4}, nosqueeze),
    ("ese", {}, lambda m, x: x * torch.sigmoid(m.fc(x.mean((2, 3))[:, :, None, None]))),
    ("eca", {}, eca),
    ("eca", {"kernel_size": 7}, eca),
    ("scse", {}, scse),
    ("bam", {"rd_ratio": 1 / 4}, bam),
    ("cbam", {"rd_ratio": 1 / 4}, cbam),
    ("gct", {}, gct),
    ("srm", {}, srm),
    ("simam", {}, simam),
    ("triplet", {}, triplet),
    ("coord", {}, coord),
    ("gc", {"rd_ratio": 1 / 4}, gc),
    ("ge", {}, lambda m, x: x * torch.sigmoid(x.mean((2, 3), keepdim=True))),
    ("ge", {"extent": 4, "learned": True, "mlp": True, "rd_ratio": 1 / 4}, ge_theta),
]


@pytest.mark.parametrize(("kind", "options", "formula"), FORMULAS)
def test_equals_the_papers_formula(
    kind: str, options: dict[str, Any], formula: Callable[[Any, Tensor], Tensor]
) -> None:
    module = shaken(kind, 12, **options).train()
    x = torch.randn(3, 12, 8, 5, dtype=torch.float64)
    assert_same(module, lambda x: formula(module, x), x)


def fca_gate(m: Any, x: Tensor, size: int, frequencies: list[tuple[int, int]]) -> np.ndarray:
    """(c) for one sample, whose channels have one of the frequencies each."""
    averaged = F.adaptive_avg_pool2d(x, size)[0].numpy()
    z = [
        scipy.fft.dctn(plane, norm="ortho")[f]
        for plane, f in zip(averaged, frequencies, strict=True)
    ]
    first, second = (layer.weight.detach().flatten(1).numpy() for layer in (m.fc1, m.fc2))
    return 1 / (1 + np.exp(-second @ np.maximum(first @ np.array(z), 0)))


@pytest.mark.parametrize(
    ("dct_size", "size"), [(7, (7, 7)), (7, (16, 9)), (14, (14, 14)), (7, (3, 2))]
)
def test_frequencies_are_those_of_scipys_dct(dct_size: int, size: tuple[int, int]) -> None:
    module = shaken("fca", 8, rd_ratio=1 / 2, num_freq=4, dct_size=dct_size)
    step = dct_size // 7
    frequencies = [(u * step, v * step) for u, v in ((0, 0), (0, 1), (6, 0), (0, 5)) for _ in "ab"]
    x = torch.randn(1, 8, *size, dtype=torch.float64)
    gate = torch.from_numpy(fca_gate(module, x, dct_size, frequencies))
    with torch.no_grad():
        y = module(x)
    # The basis is kept in float32.
    torch.testing.assert_close(y, x * gate[:, None, None], atol=1e-6, rtol=1e-6)


def test_gradients_of_the_frequencies() -> None:
    module = shaken("fca", 4, rd_ratio=1 / 2)
    x = torch.randn(1, 4, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(module, x)


def test_frequency_zero_alone_is_squeeze_and_excitation() -> None:
    fca = shaken("fca", 12, num_freq=1)
    se = create_channel_attention("se", 12, bias=False).double()
    se.load_state_dict(fca.state_dict())
    with torch.no_grad():
        se.fc1.weight.mul_(7)  # the frequency (0, 0) of 7x7 values is 7 times their mean
    x = torch.randn(2, 12, 14, 14, dtype=torch.float64)
    torch.testing.assert_close(fca(x), se(x), atol=1e-6, rtol=1e-6)


def test_channels_are_split_evenly_among_frequencies() -> None:
    for channels, num_freq in ((7, 16), (36, 16), (24, 5)):
        basis = create_channel_attention("fca", channels, num_freq=num_freq).basis
        _, sizes = basis.flatten(1).unique_consecutive(dim=0, return_counts=True)
        assert len(sizes) == min(channels, num_freq)
        assert sizes.max() - sizes.min() <= 1


def test_a_constant_map_leaves_simam_and_gct_at_their_start() -> None:
    x = torch.full((2, 4, 5, 5), 3.0)
    simam = create_channel_attention("simam", 4)
    torch.testing.assert_close(simam(x), x * torch.sigmoid(torch.tensor(0.5)))
    assert torch.equal(create_channel_attention("gct", 4)(x), x)
    assert torch.equal(create_channel_attention("gc", 4)(x), x)


@pytest.mark.parametrize(("channels", "taps"), [(7, 1), (8, 3), (127, 3), (128, 5), (2048, 7)])
def test_the_kernel_of_eca_grows_with_the_channels(channels: int, taps: int) -> None:
    module = create_channel_attention("eca", channels)
    assert module.get_submodule("conv").weight.shape == (1, 1, taps)


def resnet50_with(kind: str, places: list[tuple[int, int]]) -> tuple[int, int]:
    """Parameters that a kind adds, and those of ResNet-50 with it."""
    with torch.device("meta"):
        host = sum(p.numel() for p in torchvision.models.resnet50().parameters())
    extra = 0
    for channels, blocks in places:
        module = create_channel_attention(kind, channels)
        extra += blocks * sum(p.numel() for p in module.parameters())
    return extra, host + extra


def test_se_in_resnet50_has_the_published_parameters() -> None:
    extra, total = resnet50_with("se", RESNET50)
    assert (extra, total) == (2_530_992, 28_088_024)
    assert (round(extra / 1e6, 2), round(total / 1e6, 1)) == (2.53, 28.1)
    for places, published in zip(RESNET50[:3], (25.6, 25.7, 26.4), strict=True):
        assert resnet50_with("se", [places])[1] / 1e6 == pytest.approx(published, abs=0.051)


@pytest.mark.parametrize(
    ("kind", "places", "published"),
    [
        ("cbam", RESNET50, 28.09),
        ("fca", RESNET50, 28.07),
        ("bam", [(256, 1), (512, 1), (1024, 1)], 25.92),  # between stages
    ],
)
def test_resnet50_has_the_published_parameters(
    kind: str, places: list[tuple[int, int]], published: float
) -> None:
    assert round(resnet50_with(kind, places)[1] / 1e6, 2) == published


def test_triplet_attention_adds_the_published_parameters_to_resnet50() -> None:
    assert resnet50_with("triplet", RESNET50)[0] == 4800


def test_every_kind_has_a_reference() -> None:
    compared = {kind for kind, *_ in (*TIMM, *FORMULAS)} | {"fca"}
    assert compared == set(list_channel_attention())
