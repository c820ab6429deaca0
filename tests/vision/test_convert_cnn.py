"""Weights of timm, torchvision and others, renamed where need be, in models here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import vision
import zoo
from vision.convert_cnn import (
    convert_efficientnet,
    convert_lcnet,
    efficientnet_modules,
    lcnet_names,
    revert_efficientnet,
    revert_lcnet,
)
from zoo.sources import Source, WeightsError
from zoo.weights import apply_source

SIZES = [(64, 64), (65, 97)]


def disturbed(model: nn.Module) -> Any:
    """Norms and biases away from 1 and 0, which could hide a mix-up."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif tensor.ndim == 1:
                tensor.add_(0.1 * torch.randn(tensor.shape))
    return model.eval()


def equal_logits(one: nn.Module, other: nn.Module, channels: int = 3) -> None:
    torch.manual_seed(1)
    for size in SIZES:
        x = torch.randn(2, channels, *size)
        with torch.inference_mode():
            torch.testing.assert_close(one(x), other(x), rtol=1e-5, atol=1e-5)


def equal_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


# --- EfficientNet's port from TensorFlow -------------------------------------------------------


def names_of_port(blocks: int, plain: int, squeeze: bool) -> Iterator[tuple[str, bool]]:
    """The port's modules as they run, and whether each is a norm; `plain` blocks come first."""
    yield from (("_conv_stem", False), ("_bn0", True))
    for number in range(blocks):
        block = f"_blocks.{number}"
        if number >= plain:
            yield from ((f"{block}._expand_conv", False), (f"{block}._bn0", True))
        yield from ((f"{block}._depthwise_conv", False), (f"{block}._bn1", True))
        if squeeze:
            yield from ((f"{block}._se_reduce", False), (f"{block}._se_expand", False))
        yield from ((f"{block}._project_conv", False), (f"{block}._bn2", True))
    yield from (("_conv_head", False), ("_bn1", True), ("_fc", False))


def port_of(model: nn.Module, blocks: int, plain: int, squeeze: bool) -> dict[str, Tensor]:
    """A network's tensors under the port's names, matched by their order alone."""
    tensors = iter(model.state_dict().values())
    state = {}
    for name, norm in names_of_port(blocks, plain, squeeze):
        biased = name == "_fc" or "_se_" in name
        leaves = ["weight", *["bias"] * (norm or biased)]
        leaves += ["running_mean", "running_var", "num_batches_tracked"] * norm
        state |= {f"{name}.{leaf}": next(tensors) for leaf in leaves}
    assert next(tensors, None) is None
    return state


@pytest.mark.parametrize(
    ("name", "blocks", "plain", "squeeze"),
    [
        ("tf_efficientnet_lite0", 16, 1, False),
        ("tf_efficientnet_b0", 16, 1, True),
        ("tf_efficientnet_b1", 23, 2, True),
    ],
)
def test_efficientnets_port(
    name: str, blocks: int, plain: int, squeeze: bool, tmp_path: Path
) -> None:
    theirs = disturbed(timm.create_model(name, num_classes=10))
    port = port_of(theirs, blocks, plain, squeeze)
    equal_states(convert_efficientnet(port, theirs.state_dict()), theirs.state_dict())
    equal_states(revert_efficientnet(theirs.state_dict()), port)
    torch.save(port, tmp_path / "port.pth")
    source = f"file:{tmp_path / 'port.pth'}"
    ours: Any = zoo.create_model(f"timm:{name}", num_classes=10, pretrained=source)
    equal_logits(ours.eval(), theirs)
    assert ours.card.preprocessing == zoo.create_model(f"timm:{name}").card.preprocessing


def test_efficientnets_blocks_are_counted_through_the_stages() -> None:
    keys = [
        "blocks.10.0.conv_pwl.weight",
        "blocks.2.1.conv_dw.weight",
        "blocks.2.0.bn1.running_mean",
        "blocks.2.0.slot_standard.0.fc1.weight",
    ]
    modules = efficientnet_modules(keys)
    assert modules["blocks.2.0.conv_pw"] == "_blocks.0._project_conv"
    assert modules["blocks.2.1.bn2"] == "_blocks.1._bn2"
    assert modules["blocks.10.0.bn3"] == "_blocks.2._bn2"
    assert modules["blocks.10.0.se.conv_reduce"] == "_blocks.2._se_reduce"
    assert not any("slot" in name for name in modules)


@pytest.fixture(scope="module")
def port() -> dict[str, Tensor]:
    model = disturbed(timm.create_model("tf_efficientnet_lite0", num_classes=10))
    return port_of(model, 16, 1, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "efficientnet_lite0 has another padding and eps 1e-05.*: take timm:tf_eff.*_lite0"),
        ({"pad_type": "same"}, "the same padding and eps 1e-05, and would give wrong outputs"),
        ({"bn_eps": 1e-3}, r"another padding and eps 0.001, and"),
    ],
)
def test_the_variant_without_tensorflows_padding_is_refused(
    port: dict[str, Tensor], options: dict[str, Any], message: str
) -> None:
    model = zoo.create_model("timm:efficientnet_lite0", num_classes=10, **options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(WeightsError, match=message):
        apply_source(model, Source("file:x", port))
    equal_states(dict(model.state_dict()), before)


def test_the_other_variant_with_tensorflows_options_is_the_same_network(
    port: dict[str, Tensor],
) -> None:
    same = {"pad_type": "same", "bn_eps": 1e-3, "num_classes": 10}
    one: Any = zoo.create_model("timm:efficientnet_lite0", **same)
    other: Any = zoo.create_model("timm:tf_efficientnet_lite0", num_classes=10)
    for model in (one, other):
        apply_source(model.eval(), Source("file:x", port))
    equal_logits(one, other)
    assert one.card.preprocessing.mean == other.card.preprocessing.mean == (0.5, 0.5, 0.5)


def test_other_channels_and_classes_of_the_port(port: dict[str, Tensor]) -> None:
    model: Any = zoo.create_model("timm:tf_efficientnet_lite0", num_classes=0, in_chans=1)
    report = apply_source(model, Source("file:x", port))
    assert report.adapted["conv_stem.weight"] == "3 input channels -> 1"
    assert {"classifier.weight", "classifier.bias"} <= report.adapted.keys()  # left out
    model = zoo.create_model("timm:tf_efficientnet_lite0", num_classes=4)
    report = apply_source(model, Source("file:x", port))
    assert set(report.reinitialized) == {"classifier.weight", "classifier.bias"}


def test_a_port_with_too_much_is_refused(port: dict[str, Tensor]) -> None:
    model = zoo.create_model("timm:tf_efficientnet_lite0", num_classes=10)
    with pytest.raises(WeightsError, match=r"_blocks\.16\._bn0\.weight"):
        apply_source(model, Source("x", {**port, "_blocks.16._bn0.weight": torch.ones(3)}))


# --- PaddleClas' PP-LCNet ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def lcnet() -> Any:
    model = disturbed(timm.create_model("lcnet_050", num_classes=4))
    nn.init.zeros_(model.conv_head.bias)
    return model


def paddle_of(model: nn.Module) -> dict[str, Tensor]:
    """A network's tensors as PaddleClas' exporter names them, matched by their order alone.

    Its dropout's factor, 0.8, is a constant of the graph.
    """
    state: dict[str, Tensor] = {}
    counts = {"conv2d": 0, "batch_norm2d": 0, "reshape": 0}

    def add(name: str, tensor: Tensor) -> None:
        state[f"{name}_deepcopy_{len(state)}"] = tensor

    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            add(f"conv2d_{counts['conv2d']}.w_0", module.weight)
            counts["conv2d"] += 1
            if module.bias is not None and module is not model.conv_head:
                name = f"p2o.pd_op.reshape.{counts['reshape']}.0"
                state[name] = module.bias.reshape(1, -1, 1, 1)
                counts["reshape"] += 1
        elif isinstance(module, nn.BatchNorm2d):
            name = f"batch_norm2d_{counts['batch_norm2d']}"
            for leaf in ("w_0", "b_0", "w_1", "w_2"):
                part = {"w_0": "weight", "b_0": "bias", "w_1": "running_mean", "w_2": "running_var"}
                add(f"{name}.{leaf}", getattr(module, part[leaf]))
            counts["batch_norm2d"] += 1
    state["helper.constant.0"] = torch.tensor([0.8])
    state["helper.constant.3"] = torch.tensor([0])
    add("linear_0.w_0", model.classifier.weight.T / 0.8)
    add("linear_0.b_0", model.classifier.bias)
    return {name: value.detach() for name, value in state.items()}


def test_paddles_lcnet(lcnet: Any) -> None:
    paddle = paddle_of(lcnet)
    ours: Any = zoo.create_model("timm:lcnet_050", num_classes=4).eval()
    report = apply_source(ours, Source("file:x", paddle))
    equal_logits(ours, lcnet)
    assert report.matched_fraction == 1
    assert not report.unexpected
    assert ours.card.preprocessing.mean == (0.485, 0.456, 0.406)
    assert ours.card.preprocessing.crop_pct == 0.875


def test_paddles_lcnet_and_back(lcnet: Any) -> None:
    state = {k: v for k, v in lcnet.state_dict().items() if "num_batches" not in k}
    paddle = revert_lcnet(state)
    assert paddle["linear_0.w_0"].shape == (1280, 4)
    assert paddle["conv2d_24.b_0"].shape == (32,)
    assert set(lcnet_names(lcnet.state_dict()).values()) == set(paddle)
    equal_states(convert_lcnet(paddle, lcnet.state_dict()), state)


def test_what_was_inserted_is_not_counted(lcnet: Any) -> None:
    host: Any = zoo.create_model("timm:lcnet_050", num_classes=4, insertions=["se@post"])
    report = apply_source(host, Source("file:x", paddle_of(lcnet)))
    added = [key for key in report.reinitialized if "slot" in key or "fc1" in key]
    assert added
    for name, value in lcnet.state_dict().items():
        torch.testing.assert_close(host.state_dict()[name], value, msg=name)


def test_paddles_lcnet_of_another_width_is_refused(lcnet: Any) -> None:
    model = zoo.create_model("timm:lcnet_075", num_classes=4)
    with pytest.raises(WeightsError, match=r"conv_stem.weight: \(8, 3, 3, 3\) in the source"):
        apply_source(model, Source("file:x", paddle_of(lcnet)))


# --- ResNets -----------------------------------------------------------------------------------


def trained_by_timm(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    """timm's network, which `timm:NAME` finds as trained."""
    made = timm.create_model(name)
    model, original = disturbed(made), timm.create_model

    def create(asked: str, pretrained: bool = False, **options: Any) -> nn.Module:
        return model if pretrained else original(asked, **options)

    monkeypatch.setattr(timm, "create_model", create)
    return model


def trained_by_torchvision(monkeypatch: pytest.MonkeyPatch, name: str) -> Any:
    model = disturbed(torchvision.models.get_model(name))
    weights = torchvision.models.get_model_weights(name)
    monkeypatch.setattr(weights, "get_state_dict", lambda *_, **__: model.state_dict())
    return model


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets_of_both_libraries_bring_their_preprocessing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = trained_by_torchvision(monkeypatch, name)
    source = f"torchvision:{name}.IMAGENET1K_V1"
    ours: Any = zoo.create_model(name, pretrained=source).eval()
    equal_logits(ours, theirs)
    pre = ours.card.preprocessing
    assert (pre.interpolation, pre.crop_pct) == ("bilinear", 0.875)

    theirs = trained_by_timm(monkeypatch, name)
    ours = zoo.create_model(name, pretrained=f"timm:{name}.a1_in1k").eval()
    equal_logits(ours, theirs)
    config = timm.get_pretrained_cfg(f"{name}.a1_in1k")
    pre = ours.card.preprocessing
    assert (pre.interpolation, pre.crop_pct) == (config.interpolation, config.crop_pct)
    assert pre.crop_pct == 0.95
    assert zoo.transforms(ours).transforms[0].preprocessing == pre


@pytest.mark.parametrize("in_chans", [1, 4])
def test_resnets_for_other_channels_and_classes(
    in_chans: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = trained_by_timm(monkeypatch, "resnet18")
    ours: Any = zoo.create_model(
        "resnet18", pretrained="timm:resnet18", in_chans=in_chans, num_classes=7
    ).eval()
    grey = torch.randn(2, 1, 64, 64)
    with torch.inference_mode():
        torch.testing.assert_close(
            ours.forward_features(grey.expand(-1, in_chans, -1, -1)),
            theirs.forward_features(grey.expand(-1, 3, -1, -1)),
            rtol=1e-4,
            atol=1e-4,
        )
    assert ours.fc.out_features == 7


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("resnet18d", "resnet18"),  # a stem of three convolutions, pooled shortcuts
        ("seresnet18", "resnet18"),
        ("resnetblur18", "resnet18"),  # the same keys and shapes
        ("resnet34", "resnet18"),
        ("resnext50_32x4d", "resnet50"),
        ("wide_resnet50_2", "resnet50"),
        ("resnetaa50", "resnet50"),  # the same keys and shapes
    ],
)
def test_relatives_of_resnet_are_refused(
    theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_by_timm(monkeypatch, theirs)
    with pytest.raises(WeightsError, match=f"timm:{theirs} .*{ours}"):
        zoo.create_model(ours, pretrained=f"timm:{theirs}")


# --- hosts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "timm:test_efficientnet",
        "timm:test_convnext",
        "timm:test_nfnet",
        "timm:lcnet_050",
        "timm:regnety_002",
        "timm:mobilenetv3_small_050",
        "torchvision:mobilenet_v3_small",
        "torchvision:shufflenet_v2_x0_5",
        "torchvision:squeezenet1_1",
        "torchvision:mnasnet0_5",
    ],
)
def test_a_file_of_the_library_loads_into_its_host(name: str, tmp_path: Path) -> None:
    library, _, own = name.partition(":")
    build = timm.create_model if library == "timm" else torchvision.models.get_model
    theirs = disturbed(build(own))
    save_file(theirs.state_dict(), tmp_path / "weights.safetensors")
    source = f"file:{tmp_path / 'weights.safetensors'}"
    ours: Any = zoo.create_model(name, pretrained=source).eval()
    equal_states(dict(ours.state_dict()), dict(theirs.state_dict()))
    equal_logits(ours, theirs)


def fine_tune(model: Any, x: Tensor, targets: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model.train()(x), targets).backward()
        optimizer.step()
    model.eval()


def check_insertion(name: str, source: str, folder: Path, **options: Any) -> None:
    """Case C7: inserted without effect, fine-tuned, saved and made again with the same logits."""
    torch.manual_seed(0)
    plain: Any = zoo.create_model(name, pretrained=source, **options).eval()
    host: Any = zoo.create_model(
        name, pretrained=source, insertions=["se@standard:init=identity"], **options
    ).eval()
    x, targets = torch.randn(4, 3, 64, 64), torch.tensor([0, 1, 2, 0])
    with torch.no_grad():
        torch.testing.assert_close(host(x), plain(x), rtol=1e-5, atol=1e-5)
    fine_tune(host, x, targets)
    with torch.no_grad():
        logits = host(x)
        assert not torch.allclose(logits, plain(x), atol=1e-3)
    zoo.save_pretrained(host, folder)
    again: Any = zoo.create_model(f"local-dir:{folder}").eval()
    with torch.no_grad():
        assert torch.equal(again(x), logits)
    assert again.card.options["insertions"] == host.card.options["insertions"]
    vision.remove_insertions(host)
    assert host.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize("name", ["timm:regnety_002", "torchvision:mobilenet_v3_small"])
def test_insertion_into_a_pretrained_host(name: str, tmp_path: Path) -> None:
    donor = disturbed(zoo.create_model(name, num_classes=3))
    torch.save(donor.state_dict(), tmp_path / "donor.pth")
    source = f"file:{tmp_path / 'donor.pth'}"
    check_insertion(name, source, tmp_path / "model", num_classes=3)
