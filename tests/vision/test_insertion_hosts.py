"""Insertion on networks of timm and torchvision: sites found or refused, no logit changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.densenet import DenseNet
from torchvision.models.mobilenetv2 import MobileNetV2

from vision.insertion import Insertion, insert, inserted, insertion_sites, remove_insertions
from vision.slots import SITES
from zoo.diagnostics.cost import count_flops


def randomize(model: nn.Module) -> None:
    """Norms and branch gains that are not the zeros and ones of a fresh model."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*model.parameters(), *model.buffers()):
        vector = tensor.numel() == max(tensor.shape, default=1)  # layer scale may be (c 1 1)
        if vector and tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5, generator=generator)


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(2))


# All families

RESIDUAL = {"pre", "conv1", "standard", "post_add", "post", "identity", "between_stages"}
PLAIN = {"pre", "conv1", "post", "between_stages"}
CONVS = {"conv1", "conv2", "between_stages"}  # no blocks at all

# The sites that a family must have, at least; those of the default run are small or odd.
FAMILIES: dict[str, set[str]] = {
    "convnextv2_atto": RESIDUAL | {"conv2"},
    "dla34": RESIDUAL | {"conv2"},
    "edgenext_xx_small": RESIDUAL,
    "efficientvit_b0": RESIDUAL | {"conv2", "conv3"},
    "ghostnet_100": RESIDUAL | {"conv2"},
    "hgnetv2_b0": RESIDUAL | {"conv2", "conv3"},
    "mobilenetv3_small_100": RESIDUAL | {"conv2", "conv3"},
    "mobilenetv4_conv_small": RESIDUAL | {"conv2", "conv3"},
    "selecsls42b": {"pre", "conv1", "conv2"},
    "tinynet_e": RESIDUAL | {"conv2", "conv3"},
    "torchvision:shufflenet_v2_x0_5": PLAIN,
    "torchvision:squeezenet1_1": PLAIN | {"conv2"},
}
SLOW: dict[str, set[str]] = {
    "starnet_s1": RESIDUAL | {"conv2", "conv3"},
    "rexnet_100": RESIDUAL | {"conv2", "conv3"},
    "mixnet_s": RESIDUAL | {"conv2", "conv3"},
    "hrnet_w18_small": RESIDUAL - {"between_stages"} | {"conv2"},
    "densenet121": PLAIN | {"conv2"},
    "convnext_atto": RESIDUAL | {"conv2"},
    "cspdarknet53": RESIDUAL | {"conv2"},
    "cspresnet50": RESIDUAL | {"conv2", "conv3"},
    "darknet53": RESIDUAL | {"conv2"},
    "dpn68": RESIDUAL | {"conv2", "conv3"},
    "efficientnet_b0": RESIDUAL | {"conv2", "conv3"},
    "efficientnet_lite0": RESIDUAL | {"conv2", "conv3"},
    "fastvit_t8": RESIDUAL | {"conv2", "conv3"},
    "fasternet_t0": RESIDUAL | {"conv2", "conv3"},
    "gernet_s": RESIDUAL | {"conv2", "conv3"},
    "inception_next_atto": RESIDUAL | {"conv2"},
    "inception_v3": PLAIN,
    "mnasnet_small": RESIDUAL | {"conv2", "conv3"},
    "mobileone_s0": RESIDUAL,
    "nfnet_l0": RESIDUAL | {"conv2", "conv3"},
    "regnety_016": RESIDUAL | {"conv2", "conv3"},
    "repvgg_a0": RESIDUAL,
    "repvit_m0_9": RESIDUAL | {"conv2"},
    "res2net50_26w_4s": RESIDUAL | {"conv2", "conv3"},
    "resnet50": RESIDUAL | {"conv2", "conv3"},
    "resnetv2_50": RESIDUAL | {"conv2", "conv3"},
    "resnext50_32x4d": RESIDUAL | {"conv2", "conv3"},
    "seresnet50": RESIDUAL | {"conv2", "conv3"},
    "tresnet_m": RESIDUAL | {"conv2", "conv3"},
    "vgg11_bn": CONVS,
    "wide_resnet50_2": RESIDUAL | {"conv2", "conv3"},
    "xception41": RESIDUAL | {"conv2", "conv3"},
    "torchvision:convnext_tiny": RESIDUAL,
    "torchvision:densenet121": PLAIN | {"conv2"},
    "torchvision:efficientnet_b0": RESIDUAL | {"conv2", "conv3"},
    "torchvision:googlenet": PLAIN,
    "torchvision:mobilenet_v2": RESIDUAL | {"conv2", "conv3"},
    "torchvision:mobilenet_v3_small": RESIDUAL | {"conv2", "conv3"},
    "torchvision:resnet18": RESIDUAL | {"conv2"},
    "torchvision:vgg11_bn": CONVS,
}
SIZES = {"inception_v3": 96}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    home, _, rest = name.rpartition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # googlenet's about its initialization
        model = torchvision.models.get_model(rest) if home else timm.create_model(rest)
    randomize(model)
    return model.eval()


@pytest.mark.parametrize(
    "name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_identity_at_every_site_changes_no_logit(name: str) -> None:
    model, size = build(name), SIZES.get(name, 64)
    x = images(size)
    with torch.no_grad():
        logits = model(x)
    before = [(n, id(m), type(m)) for n, m in model.named_modules()], list(model.state_dict())
    checkpoint = {key: value.clone() for key, value in model.state_dict().items()}
    table = insertion_sites(model, size)
    expected = {**FAMILIES, **SLOW}[name]
    assert expected <= set(table.sites) <= expected | {"stem", "conv2", "conv3"}
    assert {place.stage for place in table} == set(range(1, 1 + max(p.stage for p in table)))

    names = insert(model, *(f"se@{s}:init=identity" for s in table.sites), img_size=size)
    assert len(names) == len(table) == len(inserted(model))
    with torch.no_grad():
        assert torch.equal(model(x), logits)
        with pytest.warns(UserWarning, match="keep their values"):
            model.load_state_dict(checkpoint, strict=True)
        assert torch.equal(model(x), logits)
        for module in model.modules():
            if hasattr(module, "scale") and hasattr(module, "module"):
                module.scale.fill_(0.5)
        assert not torch.equal(model(x), logits)

    remove_insertions(model)
    after = [(n, id(m), type(m)) for n, m in model.named_modules()], list(model.state_dict())
    assert after == before
    with torch.no_grad():
        assert torch.equal(model(x), logits)


# Every site on every type of block

FOUR = {"layers": (1, 1, 1, 1), "channels": (16, 16, 32, 32), "num_classes": 5}
SETTING = [[1, 8, 1, 1], [3, 8, 2, 2], [3, 12, 2, 2]]
HOSTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "basic": (
        lambda: timm.models.resnet.ResNet(timm.models.resnet.BasicBlock, **FOUR),
        "pre, conv1, conv2, standard, post_add, post, identity",
    ),
    "bottleneck": (
        lambda: timm.models.resnet.ResNet(timm.models.resnet.Bottleneck, **FOUR),
        "pre, conv1, conv2, conv3, standard, post_add, post, identity",
    ),
    "inverted residual": (
        lambda: MobileNetV2(5, inverted_residual_setting=SETTING),
        "pre, conv1, conv2, conv3, standard, post_add, post, identity",
    ),
    "ConvNeXt": (  # the others of its convolutions are linear layers, channels last
        lambda: ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=5),
        "pre, conv1, standard, post_add, post, identity",
    ),
    "pre-activation": (
        lambda: timm.create_model("resnetv2_50", layers=(1, 2), channels=(32, 64), num_classes=5),
        "pre, conv1, conv2, conv3, standard, post_add, post, identity",
    ),
    "DenseNet": (
        lambda: DenseNet(8, (2, 2), 16, num_classes=5),
        "pre, conv1, conv2, post",
    ),
}


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", HOSTS)
def test_every_site_works_or_its_error_lists_the_legal_ones(name: str, site: str) -> None:
    make, legal = HOSTS[name]
    torch.manual_seed(0)
    model = make()
    randomize(model)
    model.eval()
    if site not in legal.split(", ") and site not in ("stem", "between_stages"):
        with pytest.raises(ValueError, match=rf"no such place(.|\n)*\(as .*\): {legal}\n"):
            insert(model, f"eca@{site}", img_size=64)
        return
    logits = model(images(64))
    insert(model, f"eca@{site}:init=identity", img_size=64)
    assert torch.equal(model(images(64)), logits)
    remove_insertions(model)
    insert(model, f"eca@{site}", img_size=64)
    assert not torch.equal(model(images(64)), logits)
    model.train()(images(64)).square().sum().backward()
    for module in inserted(model).values():
        assert all(parameter.grad.abs().sum() > 0 for parameter in module.parameters())


def test_blocks_without_a_shortcut_go_without_its_sites() -> None:
    model = MobileNetV2(5, inverted_residual_setting=SETTING)
    table = insertion_sites(model, 64)
    with_shortcut = [f"features.{k}.identity" for k in (3, 5)]
    assert [place.name for place in table.select("identity")] == with_shortcut
    everywhere = [f"features.{k}.standard" for k in range(1, 6)]
    assert [place.name for place in table.select("standard")] == everywhere
    with pytest.raises(ValueError, match=r"InvertedResidual \(as features.1\): pre, conv1, conv2"):
        insert(model, "se@identity:stages=1,2", img_size=64)


# Against timm's own SE networks


def test_se_at_standard_is_seresnet50() -> None:
    theirs = build("seresnet50")
    ours = timm.create_model("resnet50").eval()
    insert(ours, "se@standard", img_size=64)
    weights = {k.replace(".se.", ".slot_standard.0."): v for k, v in theirs.state_dict().items()}
    ours.load_state_dict(weights, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(ours(images(64)), theirs(images(64)), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())


# SE paper, arXiv 1709.01507: its stages 2 to 4 are ours 1 to 3.
BLOCKS = {1: (3, 256), 2: (4, 512), 3: (6, 1024), 4: (3, 2048)}


@pytest.mark.parametrize(
    ("stages", "millions"), [("all", 28.1), ((1,), 25.6), ((2,), 25.7), ((3,), 26.4)]
)
def test_parameters_are_those_of_the_paper(stages: str | tuple[int, ...], millions: float) -> None:
    model = torchvision.models.resnet50()
    host = sum(p.numel() for p in model.parameters())
    insert(model, Insertion("se", "standard", stages), img_size=64)
    count = sum(p.numel() for p in model.parameters())
    chosen = [BLOCKS[s] for s in (BLOCKS if stages == "all" else stages)]
    assert count - host == sum(n * (2 * c * c // 16 + c // 16 + c) for n, c in chosen)
    assert count / 1e6 == pytest.approx(millions, abs=0.051)  # 26.35 with biases, printed as 26.4


def test_operations_are_those_of_the_paper() -> None:
    model = torchvision.models.resnet50().eval()
    for stage in (model.layer2, model.layer3, model.layer4):  # the paper's network has its
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)  # strides in the 1x1
    x = torch.randn(1, 3, 224, 224)
    assert count_flops(model, x) / 2e9 == pytest.approx(3.86, abs=0.005)
    insert(model, "se@standard")
    places = insertion_sites(model).select("standard")
    elements = sum(p.channels * p.resolution[0] * p.resolution[1] for p in places)
    # count_flops counts products of matrices; the paper also the mean and the scaling.
    assert count_flops(model, x) / 2e9 + 2 * elements / 1e9 == pytest.approx(3.87, abs=0.005)


def test_deep_copies_of_foreign_hosts_run() -> None:
    model = build("efficientvit_b0")
    insert(model, "se@standard", "eca@stem", img_size=64)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images(64)), model(images(64)))
