"""Residual networks, against torchvision's and timm's and by their properties."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

import zoo
from vision.checks import check_choice, pair, take_indices
from vision.residual import BasicBlock, Bottleneck, PadShortcut, checkpoint_block
from vision.resnet import ResNet
from vision.slots import Slot, slots
from zoo.engine.optim import parameter_groups
from zoo.merge import adapt_channels

SMALL = ["resnet_micro", "resnet20", "resnet32", "resnet44", "resnet56"]
IMAGENET = ["resnet18", "resnet34", "resnet50", "resnet101"]
TINY: dict[str, Any] = {
    "depths": (1, 2, 1),
    "widths": (8, 16, 24),
    "num_classes": 5,
    "img_size": 32,
}
KINDS = [
    {"block": "basic", "stem": "3x3", "shortcut": "pad"},
    {"block": "basic", "stem": "7x7", "shortcut": "conv"},
    {"block": "bottleneck", "stem": "3x3", "shortcut": "conv"},
    {"block": "bottleneck", "stem": "7x7", "shortcut": "pad"},
]


def disturb(model: nn.Module) -> nn.Module:
    """Norms and their running statistics away from their initial values."""
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.weight.uniform_(0.5, 1.5)
                norm.bias.normal_(std=0.1)
                norm.running_mean.normal_(std=0.1)
                norm.running_var.uniform_(0.5, 1.5)
    return model


def tiny(**options: Any) -> ResNet:
    torch.manual_seed(0)
    return disturb(ResNet(**{**TINY, **KINDS[0], **options}))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


# --- against torchvision and timm -------------------------------------------------------------


@pytest.mark.parametrize("name", IMAGENET)
def test_logits_equal_torchvisions(name: str) -> None:
    torch.manual_seed(0)
    theirs = disturb(getattr(torchvision.models, name)()).eval()
    ours = zoo.create_model(name).eval()
    ours.load_state_dict(theirs.state_dict())
    for size in ((64, 64), (65, 97)):
        x = torch.randn(2, 3, *size)
        with torch.inference_mode():
            assert torch.equal(ours(x), theirs(x))
    back = getattr(torchvision.models, name)().eval()
    back.load_state_dict(ours.state_dict())
    with torch.inference_mode():
        assert torch.equal(back(x), theirs(x))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_a_training_step_equals_torchvisions(name: str) -> None:
    torch.manual_seed(0)
    theirs = disturb(getattr(torchvision.models, name)()).double()
    ours = zoo.create_model(name).double()
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    for one, other in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one, other)
    for (key, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=key)


@pytest.mark.parametrize("global_pool", ["avg", "max", "avgmax"])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_logits_equal_timms(name: str, global_pool: str) -> None:
    options = {"global_pool": global_pool, "in_chans": 2, "num_classes": 7}
    torch.manual_seed(0)
    theirs = disturb(timm.create_model(name, **options)).eval()
    ours = zoo.create_model(name, **options).eval()
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 2, 65, 97)
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), theirs(x))
        features = theirs.forward_features(x)
        torch.testing.assert_close(ours.forward_features(x), features)
        for pre_logits in (False, True):
            torch.testing.assert_close(
                ours.forward_head(features, pre_logits), theirs.forward_head(features, pre_logits)
            )


@pytest.mark.parametrize("indices", [None, 2, [0, -1], (1,), [0]])
@pytest.mark.parametrize("flag", [False, True])
def test_intermediates_equal_timms(indices: Any, flag: bool) -> None:
    theirs, ours = timm.create_model("resnet18").eval(), zoo.create_model("resnet18").eval()
    ours.load_state_dict(disturb(theirs).state_dict())
    x = torch.randn(2, 3, 33, 49)
    options = {"indices": indices, "stop_early": flag, "intermediates_only": flag}
    with torch.inference_mode():
        torch.testing.assert_close(
            ours.forward_intermediates(x, **options), theirs.forward_intermediates(x, **options)
        )


def test_stopping_early_gives_the_last_features_that_were_computed() -> None:
    model, x = tiny().eval(), torch.randn(2, 3, 16, 16)
    everything = model.forward_intermediates(x, intermediates_only=True)
    for last in range(4):
        features, (taken,) = model.forward_intermediates(x, [last], stop_early=True)
        assert torch.equal(features, taken)
        assert torch.equal(taken, everything[last])


@pytest.mark.parametrize("zero_init", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_initialisation_spreads_as_torchvisions(name: str, zero_init: bool) -> None:
    torch.manual_seed(0)
    theirs = getattr(torchvision.models, name)(zero_init_residual=zero_init).state_dict()
    for key, ours in zoo.create_model(name, zero_init_residual=zero_init).state_dict().items():
        if ours.ndim > 1:
            torch.testing.assert_close(ours.std(), theirs[key].std(), rtol=0.1, atol=0, msg=key)
        elif key != "fc.bias":
            assert torch.equal(ours, theirs[key]), key


@pytest.mark.parametrize("name", IMAGENET)
def test_preprocessing_is_that_of_torchvisions_first_weights(name: str) -> None:
    pre = zoo.create_model(name).card.preprocessing
    preset = torchvision.models.get_model_weights(name)["IMAGENET1K_V1"].transforms()
    assert pre.size == (*preset.crop_size, *preset.crop_size)
    assert [pre.size[0] / pre.crop_pct] == preset.resize_size
    assert (list(pre.mean), list(pre.std)) == (preset.mean, preset.std)
    assert pre.interpolation == preset.interpolation.value


# --- networks for small images ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"),
    [("resnet20", 0.27), ("resnet32", 0.46), ("resnet44", 0.66), ("resnet56", 0.85)],
)
def test_parameters_are_those_of_the_paper(name: str, millions: float) -> None:
    """Table 6 of arXiv 1512.03385; depth counts convolutions and the classifier."""
    model = zoo.create_model(name)
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 2) == millions
    weights = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert f"resnet{len(weights)}" == name


def test_small_networks_follow_the_paper() -> None:
    """Section 4.2: 3x3 stem, maps of 32, 16 and 8 with 16, 32 and 64 channels."""
    model = zoo.create_model("resnet20").eval()
    shapes = [tuple(f.shape[1:]) for f in model.forward_intermediates(torch.zeros(1, 3, 32, 32))[1]]
    assert shapes == [(16, 32, 32), (16, 32, 32), (32, 16, 16), (64, 8, 8)]


@pytest.mark.parametrize("size", [(8, 8), (5, 7), (1, 1)])
def test_pad_shortcut_is_a_convolution_with_a_fixed_weight(size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size)
    weight = torch.eye(5, 3)[..., None, None]
    out = PadShortcut(3, 5, stride=2)(x)
    assert torch.equal(out, F.conv2d(x, weight, stride=2))
    narrow = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(PadShortcut(3, 5, stride=2)(narrow), out)


def test_micro_learns_the_digits() -> None:
    """30 updates, about a second: most of the held-out digits are right."""
    from sklearn.datasets import load_digits

    torch.manual_seed(0)
    images, targets = map(torch.from_numpy, load_digits(return_X_y=True))
    images, order = images.float().view(-1, 1, 8, 8) / 8 - 1, torch.randperm(len(targets))
    model = zoo.create_model("resnet_micro", img_size=8, in_chans=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for batch in order[:1440].split(48):
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), targets[batch]).backward()
        optimizer.step()
    held_out = order[1440:]
    with torch.inference_mode():
        right = model.eval()(images[held_out]).argmax(1) == targets[held_out]
    assert right.float().mean() > 0.8


# --- the model API ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL + IMAGENET)
def test_sweep(name: str, tmp_path: Path) -> None:
    """Any size, other channels and classes, gradients, classifiers, a round trip."""
    options = {"img_size": (40, 48), "in_chans": 1, "class_names": ["a", "b", "c"]}
    model = disturb(zoo.create_model(name, **options)).eval()
    pre = model.card.preprocessing
    assert (pre.size, pre.in_chans, model.card.architecture) == ((40, 48), 1, name)
    x = torch.randn(2, 1, *pre.size)
    logits, features = model(x), model.forward_features(x)
    assert logits.shape == (2, 3)
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    torch.testing.assert_close(model.get_classifier()(pooled), logits)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    zoo.save_pretrained(model, tmp_path / "model")
    source = f"local-dir:{tmp_path / 'model'}"
    again = zoo.create_model(source).eval()
    assert torch.equal(again(x), logits)
    assert again.card.to_dict() == {**model.card.to_dict(), "source": source}
    bare = zoo.create_model(source, num_classes=0, img_size=64).eval()
    assert torch.equal(bare(x), pooled)
    assert bare.card.preprocessing.size == (64, 64)

    model.reset_classifier(0)
    assert torch.equal(model(x), pooled)
    model.reset_classifier(7, global_pool="max")
    assert model(x).shape == (2, 7)
    assert model.card.options["num_classes"] == model.num_classes == 7
    assert model.card.options["global_pool"] == model.global_pool == "max"
    assert model.card.class_names is None


def test_reset_classifier_keeps_dtype_and_mode() -> None:
    model = tiny().bfloat16().eval()
    model.reset_classifier(0)
    assert isinstance(model.get_classifier(), nn.Identity)
    model.reset_classifier(4)
    assert model.fc.weight.dtype == torch.bfloat16
    assert not model.fc.training
    assert model(torch.randn(2, 3, 16, 16, dtype=torch.bfloat16)).shape == (2, 4)


@pytest.mark.parametrize("in_chans", [1, 2, 4, 6])
@pytest.mark.parametrize("name", ["resnet_micro", "resnet18"])
def test_file_of_other_channels_and_classes_is_adapted(
    name: str, in_chans: int, tmp_path: Path
) -> None:
    """Case B7: a bare file, as torchvision or timm write it."""
    donor = disturb(zoo.create_model(name)).eval()
    save_file(donor.state_dict(), tmp_path / "donor.safetensors")
    model = zoo.create_model(name, in_chans=in_chans, num_classes=6).eval()
    report = zoo.load_pretrained(model, f"file:{tmp_path / 'donor.safetensors'}")
    assert report.adapted == {"conv1.weight": f"3 input channels -> {in_chans}"}
    assert set(report.reinitialized) == {"fc.weight", "fc.bias"}
    assert report.matched_fraction == 1
    torch.testing.assert_close(model.conv1.weight, adapt_channels(donor.conv1.weight, in_chans))
    grey = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(
        model.forward_features(grey.expand(-1, in_chans, -1, -1)),
        donor.forward_features(grey.expand(-1, 3, -1, -1)),
        rtol=1e-3,
        atol=1e-3,
    )


def test_torchvision_file_loads_by_the_normal_path(tmp_path: Path) -> None:
    theirs = disturb(torchvision.models.resnet18()).eval()
    torch.save(theirs.state_dict(), tmp_path / "resnet18.pth")
    ours = zoo.create_model("resnet18", pretrained=f"file:{tmp_path / 'resnet18.pth'}").eval()
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(ours(x), theirs(x))


def test_old_file_without_batch_counts_loads(tmp_path: Path) -> None:
    """torch before 0.4.1 kept no `num_batches_tracked`; its own loader takes such files too."""
    model = tiny()
    state = {k: v for k, v in model.state_dict().items() if "num_batches" not in k}
    save_file(state, tmp_path / "old.safetensors")
    report = zoo.load_pretrained(other := tiny(in_chans=3), f"file:{tmp_path / 'old.safetensors'}")
    assert all(key.endswith("num_batches_tracked") for key in report.reinitialized)
    assert len(report.reinitialized) == sum(isinstance(m, nn.BatchNorm2d) for m in other.modules())
    assert not report.missing


def test_slots_add_no_key(tmp_path: Path) -> None:
    zoo.save_pretrained(zoo.create_model("resnet50"), tmp_path / "model")
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(
        torchvision.models.resnet50().state_dict()
    )


@pytest.mark.parametrize("option", ["attention", "position"])
def test_options_of_transformers_are_refused(option: str) -> None:
    with pytest.raises(TypeError, match=f"resnet20 has no option '{option}'.*valid: img_size"):
        zoo.create_model("resnet20", **{option: "full"})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"img_size": 0}, "img_size must be a positive integer"),
        ({"global_pool": "average"}, "global_pool 'average' must be one of 'avg', 'max', 'avgmax'"),
        ({"block": "bottelneck"}, "block 'bottelneck' must be one of.*nearest: 'bottleneck'"),
        ({"stem": "5x5"}, "stem '5x5' must be one of '7x7', '3x3'"),
        ({"shortcut": "A"}, "shortcut 'A' must be one of 'conv', 'pad'"),
        ({"depths": (1, 1)}, r"depths \(\[1, 1\]\) and widths \(\[8, 16, 24\]\) need one"),
        ({"depths": (1, 0, 1)}, r"depths \(\[1, 0, 1\]\).*positive"),
        ({"depths": (), "widths": ()}, "at least one stage"),
        ({"widths": (16, 8, 4)}, "'pad' cannot go from 16 channels to 8"),
        ({"num_classes": -1}, r"num_classes \(-1\) 0"),
        ({"in_chans": 0}, r"in_chans \(0\) must be at least 1"),
        ({"drop_path_rate": 1.0}, r"drop_prob \(1.0\) must be in \[0, 1\)"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        tiny(**options)


@pytest.mark.parametrize("shape", [(2, 1, 8, 8), (3, 8, 8)])
def test_wrong_images_show_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=rf"\({', '.join(map(str, shape))}\).*\(b, 3, rows, col"):
        tiny()(torch.zeros(shape))


def test_checks_name_value_and_choices() -> None:
    check_choice("pool", "avg", ["avg", "max"])
    with pytest.raises(ValueError, match="pool 'avgg' must be one of 'avg', 'max'; nearest: 'avg'"):
        check_choice("pool", "avgg", ["avg", "max"])
    assert pair(3, "size") == (3, 3)
    assert pair([4, 5], "size") == (4, 5)
    for wrong in (0, 2.5, (1, 2, 3), (4, -1), "ab"):
        with pytest.raises(ValueError, match="size must be a positive integer, or"):
            pair(wrong, "size")
    assert [take_indices(4, i) for i in (None, 2, [-1, 0])] == [[0, 1, 2, 3], [2, 3], [3, 0]]
    for wrong in (0, 5, [4], [-5], []):
        with pytest.raises(ValueError, match="indices"):
            take_indices(4, wrong)


def test_intermediates_refuse_what_there_is_not() -> None:
    model, x = tiny().eval(), torch.zeros(1, 3, 8, 8)
    with pytest.raises(ValueError, match=r"indices \(5\) must be between 1 and 4"):
        model.forward_intermediates(x, 5)
    with pytest.raises(ValueError, match="output_fmt 'NLC' must be one of 'NCHW'"):
        model.forward_intermediates(x, output_fmt="NLC")


# --- sites ------------------------------------------------------------------------------------


class Double(nn.Module):
    """Twice its input, which it remembers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return 2 * x


def bottleneck_by_hand(block: Bottleneck, x: torch.Tensor, site: str) -> torch.Tensor:
    """The block's formula with the value at one site doubled."""

    def at(name: str, value: torch.Tensor) -> torch.Tensor:
        return 2 * value if name == site else value

    y = at("conv1", F.relu(block.bn1(block.conv1(at("pre", x)))))
    y = at("conv2", F.relu(block.bn2(block.conv2(y))))
    y = at("standard", at("conv3", block.bn3(block.conv3(y))))
    y = at("post_add", y + at("identity", block.downsample(x)))
    return at("post", F.relu(y))


SITES = ["pre", "conv1", "conv2", "conv3", "standard", "identity", "post_add", "post"]


@pytest.mark.parametrize("site", SITES)
def test_a_module_lands_at_its_site(site: str) -> None:
    torch.manual_seed(0)
    block = disturb(Bottleneck(4, 4, stride=2)).eval()
    x = torch.randn(2, 4, 9, 7)
    getattr(block, f"slot_{site}").append(Double())
    torch.testing.assert_close(block(x), bottleneck_by_hand(block, x, site))


def test_blocks_have_the_sites_of_their_convolutions() -> None:
    def sites(block: nn.Module) -> set[str]:
        return {name.removeprefix("slot_") for name, _ in slots(block)}

    assert sites(Bottleneck(4, 4)) == set(SITES)
    assert sites(BasicBlock(4, 4)) == set(SITES) - {"conv3"}
    assert all(name == f"slot_{slot.site}" for name, slot in slots(BasicBlock(4, 4)))


def test_network_has_slots_around_its_stages() -> None:
    model, x = tiny(stem="7x7").eval(), torch.randn(2, 3, 64, 64)
    own = {name: slot.site for name, slot in slots(model) if "." not in name}
    assert own == {
        "slot_stem": "stem",
        "slot_between_stages_1": "between_stages",
        "slot_between_stages_2": "between_stages",
    }
    stem, first, second, _ = model.forward_intermediates(x, intermediates_only=True)
    expected = {
        "slot_stem": model.maxpool(stem),
        "slot_between_stages_1": first,
        "slot_between_stages_2": second,
    }
    for name, value in expected.items():
        double = Double()
        model.get_submodule(name).append(double)
        before = copy.deepcopy(model.get_submodule(name))
        model(x)
        assert torch.equal(double.seen, value)
        assert len(before) == 1
        del model.get_submodule(name)[0]


def test_nothing_is_changed_in_place() -> None:
    """A module in a slot may keep, or save for its gradient, what passes through it."""
    model, x = tiny(), torch.randn(2, 3, 16, 16)
    copies = {}

    def keep(slot: nn.Module, args: Any, out: torch.Tensor) -> None:
        copies[slot] = (out, out.clone())

    for _, slot in slots(model):
        slot.register_forward_hook(keep)
    model(x).sum().backward()
    assert len(copies) == len(list(slots(model)))
    assert all(torch.equal(out, copied) for out, copied in copies.values())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_empty_slots_return_the_tensor_itself(kind: dict[str, str]) -> None:
    model, x = tiny(**kind).eval(), torch.randn(2, 3, 40, 40)
    same = []
    for _, slot in slots(model):
        slot.register_forward_hook(lambda _m, args, out: same.append(args[0] is out))
    model(x)
    assert len(same) == len(list(slots(model)))
    assert all(same)


# --- training, graphs, layouts ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "limit"), [("resnet_micro", 4), ("resnet20", 4), ("resnet18", 32), ("resnet50", 32)]
)
def test_batch_of_one_in_training(name: str, limit: int) -> None:
    """Case C5: it works where the last maps have more than one pixel, and is refused elsewhere."""
    model = zoo.create_model(name)
    loss = model(torch.randn(1, 3, limit + 1, limit)).square().sum()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    x = torch.randn(1, 3, limit, limit)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=f"one {limit}x{limit} image.*2 or more, images larger than {limit}x"
    ):
        model(x)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert model(x.expand(2, -1, -1, -1)).isfinite().all()
    assert model.eval()(x).isfinite().all()


@pytest.mark.parametrize("name", ["resnet_micro", "resnet20"])
@pytest.mark.parametrize("size", [8, 32])
def test_batch_of_one_trains_at_the_sizes_of_small_networks(name: str, size: int) -> None:
    model = zoo.create_model(name, img_size=size)
    assert all(g.isfinite().all() for g in gradients(model, torch.randn(1, 3, size, size)))


def test_frozen_norms_take_a_batch_of_one() -> None:
    model = zoo.create_model("resnet18")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_checkpointing_changes_nothing(kind: dict[str, str]) -> None:
    """Neither gradients nor running statistics, which must not see a batch twice."""
    x, found = torch.randn(4, 3, 32, 32), []
    for enable in (False, True):
        model = tiny(**kind, drop_path_rate=0.3, drop_rate=0.1)
        model.layer2[0].bn1.eval()  # a frozen norm stays frozen
        model.set_grad_checkpointing(enable)
        torch.manual_seed(0)
        found.append([*gradients(model, x), *model.buffers()])
    for plain, recomputed in zip(*found, strict=True):
        assert torch.equal(plain, recomputed)


def test_checkpointed_block_restores_its_buffers_after_an_error() -> None:
    block = disturb(BasicBlock(4, 4))
    out = checkpoint_block(block, torch.randn(2, 4, 6, 6, requires_grad=True))
    buffers, values = dict(block.named_buffers()), [b.clone() for b in block.buffers()]
    block.conv2.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.sum().backward()
    assert all(buffers[name] is buffer for name, buffer in block.named_buffers())
    assert all(torch.equal(a, b) for a, b in zip(block.buffers(), values, strict=True))


def test_checkpointing_keeps_less() -> None:
    kept = []
    for enable in (False, True):
        model = tiny(depths=(4, 4, 4))
        model.set_grad_checkpointing(enable)
        total = 0

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(torch.randn(2, 3, 32, 32))
        kept.append(total)
    assert kept[1] < kept[0] / 3


def test_drop_path_rises_to_its_rate_and_spares_the_shortcut() -> None:
    model = tiny(drop_path_rate=0.3)
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in model.blocks()]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])
    block = BasicBlock(4, 4, drop_path=0.9)
    torch.manual_seed(0)
    x = torch.rand(64, 4, 6, 6)
    dropped = (block(x) == x).flatten(1).all(1)
    assert 40 < dropped.sum() < 64


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_layers_cover_every_parameter(kind: dict[str, str]) -> None:
    model = tiny(**kind)
    model.slot_stem.append(nn.Conv2d(8, 8, 1))
    model.slot_between_stages_2.append(nn.Conv2d(1, 1, 1))
    model.layer3[0].slot_post.append(nn.Conv2d(1, 1, 1))
    layers = {name: model.layer_index(name) for name, _ in model.named_parameters()}
    assert set(layers.values()) == set(range(6))
    assert layers["bn1.weight"] == layers["slot_stem.0.weight"] == 0
    assert layers["layer1.0.conv1.weight"] == 1
    assert layers["layer2.1.bn2.bias"] == layers["slot_between_stages_2.0.weight"] == 3
    assert layers["layer3.0.slot_post.0.weight"] == 4
    assert layers["fc.weight"] == model.num_layers == 5
    scales = {group["lr_scale"] for group in parameter_groups(model, 0.05, layer_decay=0.5)}
    assert scales == {0.5**power for power in range(6)}
    with pytest.raises(ValueError, match=r"'neck\.weight' is no parameter"):
        model.layer_index("neck.weight")


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_compiles_without_a_break(training: bool, checkpointing: bool) -> None:
    x, states = torch.randn(2, 3, 16, 16), []
    for compiled in (False, True):
        model = tiny().train(training)
        model.set_grad_checkpointing(checkpointing)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        out = run(x)
        out.square().sum().backward()
        states.append([out, *(p.grad for p in model.parameters()), *model.buffers()])
    for eager, translated in zip(*states, strict=True):
        torch.testing.assert_close(translated, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_export_keeps_batch_and_size_free(kind: dict[str, str]) -> None:
    model = tiny(**kind).eval()
    free = {
        0: torch.export.Dim("b", min=2, max=64),
        2: torch.export.Dim.AUTO,
        3: torch.export.Dim.AUTO,
    }
    program = torch.export.export(model, (torch.randn(3, 3, 32, 48),), dynamic_shapes=(free,))
    x = torch.randn(5, 3, 64, 32)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_can_be_traced(kind: dict[str, str]) -> None:
    model, x = tiny(**kind).eval(), torch.randn(2, 3, 32, 32)
    traced = torch.fx.symbolic_trace(model)
    assert torch.equal(traced(x), model(x))
    with pytest.raises(ValueError, match="images have shape"):
        traced(x[:, :1])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_channels_last_stays_so(kind: dict[str, str]) -> None:
    model, x = tiny(**kind), torch.randn(2, 3, 33, 40)
    expected = gradients(model, x)
    model.load_state_dict(tiny(**kind).state_dict())
    model.to(memory_format=torch.channels_last)
    x = x.contiguous(memory_format=torch.channels_last)
    assert model.forward_features(x).is_contiguous(memory_format=torch.channels_last)
    for one, other in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_copies_are_independent() -> None:
    model, x = tiny().eval(), torch.randn(2, 3, 16, 16)
    twin = copy.deepcopy(model)
    expected = model(x)
    twin.slot_stem.append(Double())
    with torch.no_grad():
        twin.fc.weight.zero_()
    assert torch.equal(model(x), expected)
    assert isinstance(model.slot_stem, Slot)
    assert len(model.slot_stem) == 0
