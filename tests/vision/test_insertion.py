"""Where inserted modules stand, what stays as it was, and what is refused.

The places are compared with forwards of torchvision's blocks written out by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.convnext import CNBlock
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

import vision.channel_attention
from vision.insertion import (
    DRAWING,
    Insertion,
    insert,
    inserted,
    insertion_sites,
    insertions_of,
    remove_insertions,
)
from vision.slots import SITES, FromIdentity, Slot


class Double(nn.Module):
    """Doubles its input and keeps a copy of it; the log tells the order of runs."""

    log: list[str]

    def __init__(self, kind: str, channels: int) -> None:
        super().__init__()
        self.kind, self.channels = kind, channels
        self.factor = nn.Parameter(torch.full((channels, 1, 1), 2.0))
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self.channels
        self.seen = x.clone()
        Double.log.append(self.kind)
        return x * self.factor


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind is a `Double`."""
    Double.log = []
    monkeypatch.setattr(
        vision.channel_attention,
        "create_channel_attention",
        lambda kind, channels: Double(kind, channels),
    )


def resnet(block: type[nn.Module] = BasicBlock, layers: tuple[int, ...] = (1, 2, 1, 1)) -> ResNet:
    torch.manual_seed(0)
    model = ResNet(block, list(layers), num_classes=5)
    randomize(model)
    return model.eval()


def randomize(model: nn.Module) -> None:
    """Norms that change something, in training and in evaluation."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim == 1:
            tensor.data.uniform_(0.5, 1.5, generator=generator)


def images(size: int = 32, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(2))


# Insertion as text


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("se@standard", Insertion("se", "standard")),
        ("eca@post:stages=3,4", Insertion("eca", "post", (3, 4))),
        (
            "se@standard:stages=2,rd_ratio=0.25,init=identity,every=2",
            Insertion("se", "standard", (2,), 2, "identity", {"rd_ratio": 0.25}),
        ),
        ("se@pre:stages=all,bias=false", Insertion("se", "pre", options={"bias": False})),
        ("timm:ecam@stem", Insertion("timm:ecam", "stem")),
        (
            "se@layer3.2.conv2:squeeze=max",
            Insertion("se", "layer3.2.conv2", options={"squeeze": "max"}),
        ),
        ("se@.layer3:width=8,x=none", Insertion("se", ".layer3", options={"width": 8, "x": None})),
    ],
)
def test_text_means_an_insertion_and_back(text: str, wanted: Insertion) -> None:
    parsed = Insertion.parse(text)
    assert parsed == wanted
    assert Insertion.parse(str(parsed)) == parsed
    assert len({parsed, wanted}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("se", "must look like KIND@SITE"),
        ("@standard", "must look like KIND@SITE"),
        ("se@standard:", "must look like KIND@SITE"),
        (
            "se@standart",
            r"unknown site 'standart'; did you mean standard\? sites: stem, pre",
        ),
        ("se@standard:stages=0", "numbers from 1, not"),
        ("se@standard:stages=x", "numbers from 1, not"),
        ("se@standard:stages=2,2", "names a stage twice"),
        ("se@standard:3,4", "'3' must be key=value"),
        ("se@standard:rd_ratio=0.25,4", "'4' must be key=value"),
        ("se@standard:every=0", "every must be a positive integer, not 0"),
        ("se@standard:init=zero", "init must be one of paper, identity, not 'zero'"),
        ("se@standard:bias=no,bias=no", "sets bias twice"),
        ("se@layer1.0.conv1:stages=2", "takes no stages and no every"),
        ("s e@standard", "kind must be a name"),
    ],
)
def test_a_bad_text_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Insertion.parse(text)


def test_an_option_must_fit_into_text() -> None:
    with pytest.raises(ValueError, match="option sizes"):
        Insertion("se", "standard", options={"sizes": [1, 2]})


# Where modules stand

At = Callable[[str, Tensor], Tensor]


def basic_block(block: Any, x: Tensor, at: At) -> Tensor:
    y = at("conv1", F.relu(block.bn1(block.conv1(at("pre", x)))))
    y = at("standard", at("conv2", block.bn2(block.conv2(y))))
    shortcut = x if block.downsample is None else block.downsample(x)
    return at("post", F.relu(at("post_add", y + at("identity", shortcut))))


def bottleneck(block: Any, x: Tensor, at: At) -> Tensor:
    y = at("conv1", F.relu(block.bn1(block.conv1(at("pre", x)))))
    y = at("conv2", F.relu(block.bn2(block.conv2(y))))
    y = at("standard", at("conv3", block.bn3(block.conv3(y))))
    shortcut = x if block.downsample is None else block.downsample(x)
    return at("post", F.relu(at("post_add", y + at("identity", shortcut))))


BLOCK_SITES = ["pre", "conv1", "conv2", "conv3", "standard", "post_add", "post", "identity"]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("site", BLOCK_SITES)
@pytest.mark.parametrize("kind", [BasicBlock, Bottleneck])
@pytest.mark.usefixtures("doubles")
def test_each_site_is_where_the_drawing_has_it(
    kind: type[nn.Module], site: str, training: bool
) -> None:
    if kind is BasicBlock and site == "conv3":
        pytest.skip("a basic block has two convolutions")
    model = resnet(kind)
    by_hand = bottleneck if kind is Bottleneck else basic_block
    reference = copy.deepcopy(model).train(training)
    insert(model, f"double@{site}", img_size=32)
    model.train(training)
    for name in ("layer1.0", "layer2.0", "layer2.1"):
        block, plain = model.get_submodule(name), reference.get_submodule(name)
        x = torch.randn(2, plain.conv1.in_channels, 8, 8)
        seen: dict[str, Tensor] = {}

        def at(here: str, value: Tensor, seen: dict[str, Tensor] = seen) -> Tensor:
            seen[here] = value.clone()
            return value * 2 if here == site else value

        wanted = by_hand(plain, x, at)
        torch.testing.assert_close(block(x), wanted)
        torch.testing.assert_close(block.get_submodule(f"slot_{site}")[0].seen, seen[site])


@pytest.mark.usefixtures("doubles")
def test_all_sites_together_run_in_the_order_of_the_drawing() -> None:
    model = resnet(Bottleneck, (1, 1, 1, 1))
    insert(model, *[f"{site}@{site}" for site in reversed(SITES)], img_size=32)
    Double.log = []
    model(images())
    block = ["pre", "conv1", "conv2", "conv3", "standard", "identity", "post_add", "post"]
    stages = [*block, "between_stages"] * 4
    assert Double.log == ["stem", *stages[:-1]]
    words = DRAWING.split()
    drawn = [words.index(site) for site in ("stem", *block[:5], "post_add", "post")]
    assert drawn == sorted(drawn)
    assert set(SITES) <= set(words)


@pytest.mark.usefixtures("doubles")
def test_network_sites_are_between_the_stages() -> None:
    model = resnet()
    reference = copy.deepcopy(model)
    names = insert(model, "a@stem", "b@between_stages:stages=1,3", img_size=32)
    assert names == [
        "layer1.slot_stem.0",
        "layer1.slot_between_stages.0",
        "layer3.slot_between_stages.0",
    ]
    r = reference
    x = r.layer1(2 * r.maxpool(r.relu(r.bn1(r.conv1(images())))))
    x = r.layer4(2 * r.layer3(r.layer2(2 * x)))
    torch.testing.assert_close(model(images()), r.fc(r.avgpool(x).flatten(1)))


@pytest.mark.usefixtures("doubles")
def test_standard_stands_before_layer_scale_and_drop_path() -> None:
    torch.manual_seed(0)
    block = CNBlock(8, 0.5, 0.3).eval()
    model = nn.Sequential(nn.Conv2d(3, 8, 1), block)
    insert(model, "double@standard", img_size=8)
    x = torch.randn(2, 8, 8, 8)
    torch.testing.assert_close(block(x), x + 0.5 * 2 * block.block(x))
    torch.testing.assert_close(block.slot_standard[0].seen, block.block(x))


def test_our_resnet_and_the_one_of_torchvision_have_the_same_places() -> None:
    import zoo

    ours = zoo.create_model("resnet18", num_classes=5).eval()
    theirs = ResNet(BasicBlock, [2, 2, 2, 2], num_classes=5)
    randomize(theirs)
    ours.load_state_dict(theirs.state_dict())
    theirs.eval()
    assert insertion_sites(ours, 64).sites == insertion_sites(theirs, 64).sites
    for site in insertion_sites(ours, 64).sites:
        insert(ours, f"constant@{site}:stages=1", img_size=64)
        insert(theirs, f"constant@{site}:stages=1", img_size=64)
        for mine, other in zip(inserted(ours).values(), inserted(theirs).values(), strict=True):
            for one, two in zip(mine.parameters(), other.parameters(), strict=True):
                one.data.uniform_(-1, 1)
                two.data.copy_(one)
        torch.testing.assert_close(ours(images(64)), theirs(images(64)))
        remove_insertions(ours)
        remove_insertions(theirs)


# Learning


@pytest.mark.parametrize("init", ["paper", "identity"])
def test_gradients_reach_the_module_at_every_site(init: str) -> None:
    model = resnet(Bottleneck, (1, 1, 1, 1))
    insert(model, *[Insertion("se", site, init=init) for site in SITES], img_size=32)
    model.train()
    model(images(64)).square().sum().backward()
    found = {name: p for name, p in model.named_parameters() if "slot_" in name}
    assert len(inserted(model)) == 4 * 8 + 1 + 3
    for name, parameter in found.items():
        assert parameter.grad is not None, name
        moved = init == "paper" or name.endswith(".scale")
        if name.endswith(("fc2.weight", "scale")):
            assert bool(parameter.grad.abs().sum() > 0) == moved, name


def test_two_modules_at_one_site_both_run_in_order_and_learn() -> None:
    model = resnet()
    names = insert(model, "se@standard:stages=1", "cbam@standard:stages=1", img_size=32)
    assert names == ["layer1.0.slot_standard.0", "layer1.0.slot_standard.1"]
    first, second = inserted(model).values()
    assert (first.kind, second.kind) == ("se", "cbam")
    seen: dict[str, Tensor] = {}
    first.register_forward_hook(lambda m, args, out: seen.update(out=out))
    second.register_forward_pre_hook(lambda m, args: seen.update(into=args[0]))
    model(images()).sum().backward()
    assert seen["out"] is seen["into"]
    for module in (first, second):
        assert all(p.grad is not None for p in module.parameters())


class Dropping(nn.Module):
    """A block that reads its training flag itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        y = F.dropout(F.relu(self.conv1(x)), 0.5, self.training)
        if self.training:
            y = y * 3
        return x + self.conv2(y) * scale


@pytest.mark.usefixtures("doubles")
def test_a_block_that_reads_its_flag_keeps_both_ways() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Dropping())
    reference = copy.deepcopy(model)
    state = torch.get_rng_state()
    insert(model, "double@standard", img_size=8)
    assert torch.equal(torch.get_rng_state(), state)
    x = torch.randn(2, 3, 8, 8)
    inner, head = reference[1], reference[0](x)
    for training in (True, False, True):
        model.train(training), reference.train(training)
        torch.manual_seed(1)
        out = model(x)
        torch.manual_seed(1)
        torch.testing.assert_close(out, head + 2 * (inner(head) - head))


# The host stays


def snapshot(model: nn.Module) -> tuple[Any, ...]:
    named = [(name, id(module), type(module)) for name, module in model.named_modules()]
    own = [sorted(module.__dict__) for module in model.modules()]
    return named, own, list(model.state_dict())


def test_removal_leaves_everything_as_it_was() -> None:
    model = resnet(Bottleneck)
    before, state = snapshot(model), copy.deepcopy(model.state_dict())
    logits = model(images())
    insert(model, *[f"se@{site}:init=identity" for site in SITES], img_size=32)
    insert(model, "eca@.layer2", "eca@layer3.0.conv2", "srm@pre:init=identity", img_size=32)
    assert set(state) < set(model.state_dict())
    assert isinstance(model.layer1[0], Bottleneck)
    assert type(model.layer1[0]).__name__ == "Bottleneck"
    assert len(insertions_of(model)) == len(SITES) + 3
    remove_insertions(model)
    assert snapshot(model) == before
    assert torch.equal(model(images()), logits)
    assert insertions_of(model) == ()
    model.load_state_dict(state, strict=True)


def test_identity_changes_no_bit_and_the_host_checkpoint_loads_strictly() -> None:
    model = resnet(Bottleneck)
    checkpoint, logits = copy.deepcopy(model.state_dict()), model(images())
    insert(model, *[f"se@{site}:init=identity" for site in SITES], img_size=32)
    assert torch.equal(model(images()), logits)
    with torch.no_grad():
        model.conv1.weight.zero_()
    with pytest.warns(UserWarning, match="keep their values"):
        model.load_state_dict(checkpoint, strict=True)
    assert torch.equal(model(images()), logits)


def test_paper_is_not_the_identity() -> None:
    model = resnet()
    logits = model(images())
    insert(model, "se@standard", img_size=32)
    assert not torch.allclose(model(images()), logits)


def test_the_state_goes_into_a_model_built_the_same_way() -> None:
    first, second = resnet(), resnet()
    for model in (first, second):
        insert(model, "se@standard", "eca@post:stages=3,4", img_size=32)
    assert not torch.equal(first(images()), second(images()))
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(images()), second(images()))


def test_a_deep_copy_is_whole_and_independent() -> None:
    model = resnet()
    insert(model, "se@standard", "eca@.layer2", img_size=32)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images()), model(images()))
    assert insertions_of(twin) == insertions_of(model)
    with torch.no_grad():
        for module in inserted(twin).values():
            for parameter in module.parameters():
                parameter.add_(1.0)
    assert not torch.equal(twin(images()), model(images()))
    remove_insertions(twin)
    assert len(inserted(model)) == 6
    assert not inserted(twin)


def test_an_averaged_model_follows() -> None:
    from torch.optim.swa_utils import AveragedModel

    model = resnet()
    insert(model, "se@standard", img_size=32)
    average = AveragedModel(model)
    with torch.no_grad():
        next(iter(inserted(model).values())).fc1.weight.fill_(9.0)
    average.update_parameters(model)
    assert torch.equal(average.module(images()), model(images()))


def test_a_later_insertion_keeps_the_earlier_ones() -> None:
    model = resnet()
    insert(model, "se@standard:stages=1", img_size=32)
    first = model.layer1[0].slot_standard[0]
    insert(model, "eca@pre:stages=1", "eca@standard", img_size=32)
    assert model.layer1[0].slot_standard[0] is first
    assert [m.kind for m in model.layer1[0].slot_standard] == ["se", "eca"]
    assert list(inserted(model))[:3] == [
        "layer1.0.slot_standard.0",
        "layer1.0.slot_standard.1",
        "layer1.0.slot_pre.0",
    ]


def test_hooks_on_children_and_on_blocks_still_run() -> None:
    model = resnet()
    seen: list[str] = []
    model.layer1[0].register_forward_hook(lambda *_: seen.append("block"))
    model.layer1[0].conv2.register_forward_hook(lambda *_: seen.append("conv2"))
    insert(model, "se@standard", img_size=32)
    seen.clear()
    model(images())
    assert seen == ["conv2", "block"]


def test_looking_changes_no_state() -> None:
    model = resnet().train()
    model.layer1.eval()  # a frozen stage
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    insertion_sites(model, 64)
    insert(model, "simam@standard", img_size=64)
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(torch.get_rng_state(), state)
    remove_insertions(model)
    assert [module.training for module in model.modules()] == modes
    assert model.layer1[0].bn1._forward_hooks == {}


def test_new_modules_take_type_and_mode_of_the_host() -> None:
    model = resnet().to(torch.bfloat16).train()
    model.layer1.eval()
    insert(model, "se@standard", img_size=32)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert [m.training for m in inserted(model).values()] == [False, True, True, True, True]
    assert model(images().bfloat16()).dtype == torch.bfloat16
    model.eval()
    assert not any(m.training for m in model.modules())


def test_slots_do_not_run_twice_in_containers() -> None:
    model = resnet()
    length = len(model.layer2)
    insert(model, "se@between_stages", "se@.layer1", img_size=32)
    assert len(model.layer2) == length == len(list(model.layer2))
    assert model.layer2[-1] is model.layer2[1]
    assert isinstance(model.layer2[0:], nn.Sequential)
    assert not any(isinstance(m, Slot) for m in model.layer2[0:])
    with pytest.raises(ValueError, match=r"layer1\.output has se already"):
        insert(model, "se@.layer1", img_size=32)


def test_a_compiled_forward_is_the_same() -> None:
    model = resnet()
    insert(model, "se@standard", "eca@post", "se@stem", "se@between_stages", img_size=32)
    wanted = model(images())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), wanted)
    with pytest.raises(ValueError, match="insert first, and compile the model afterwards"):
        insert(compiled, "eca@pre", img_size=32)


def test_parallel_training_comes_after_insertion(tmp_path: Any) -> None:
    from torch import distributed

    model = resnet().train()
    insert(model, "se@standard", img_size=32)
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(model)
        wrapped(images(64)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        with pytest.raises(ValueError, match="before the model is wrapped in DistributedData"):
            insert(wrapped, "eca@pre", img_size=32)
    finally:
        distributed.destroy_process_group()


# Choosing places


def test_the_table_has_names_channels_and_resolutions() -> None:
    table = insertion_sites(resnet(Bottleneck), 64)
    row = next(place for place in table if place.name == "layer2.1.conv2")
    assert (row.site, row.stage, row.channels, row.resolution) == ("conv2", 2, 128, (8, 8))
    assert table.sites == tuple(SITES)
    assert len(table.select("identity")) == 5
    assert {place.name for place in table.select("pre", stage=2)} == {
        "layer2.0.pre",
        "layer2.1.pre",
    }
    assert [p.channels for p in table.select("pre")] == [64, 256, 512, 512, 1024]
    lines = str(table).splitlines()
    assert lines[0].split() == ["name", "site", "stage", "channels", "resolution"]
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == ["layer1.stem", "stem", "1", "64", "16x16"]
    assert isinstance(table[0:2], type(table))


def test_stages_and_every() -> None:
    model = resnet(layers=(3, 4, 1, 2))
    names = insert(model, "se@standard:stages=1,2,4,every=2", img_size=32)
    blocks = ["layer1.0", "layer1.2", "layer2.0", "layer2.2", "layer4.0"]
    assert names == [f"{block}.slot_standard.0" for block in blocks]


def test_a_module_path_is_a_place_too() -> None:
    model = resnet()
    reference = copy.deepcopy(model)
    names = insert(model, "constant@layer2.0.conv2", "constant@.avgpool", img_size=32)
    assert names == ["layer2.0.conv2.slot_output.0", "avgpool.slot_output.0"]
    gates = list(inserted(model).values())
    reference.layer2[0].conv2.register_forward_hook(lambda m, a, out: gates[0](out))
    reference.avgpool.register_forward_hook(lambda m, a, out: gates[1](out))
    torch.testing.assert_close(model(images()), reference(images()))


# Bad input


@pytest.mark.parametrize(
    ("insertions", "message"),
    [
        (
            ["se@conv3"],
            r"no such place. Legal sites:\s+BasicBlock \(as layer1.0\): pre, conv1",
        ),
        (["se@standard:stages=5"], "ResNet has 4 stages, numbered from 1; there is no stage 5"),
        (["se@between_stages:stages=4"], r"no such place.*\n.*\n.*between_stages \(stage 3\)"),
        (["se@stem:stages=2"], "no such place"),
        (["se@standard", "se@standard:stages=2"], r"layer2\.0\.standard has se already"),
        (["eca@pre", "se@standard", "se@standard"], "has se already"),
        (["se@layer1.7.conv2"], r"no module 'layer1.7.conv2'; nearest: layer1.0.conv2"),
        (["se@.fc"], r"fc gives \(1, 5\); an inserted module needs one \(b c y x\)"),
        (["nonsense@standard"], "nonsense"),
    ],
)
def test_bad_insertions_change_nothing(insertions: list[str], message: str) -> None:
    model = resnet()
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        insert(model, *insertions, img_size=32)
    assert snapshot(model) == before


def test_a_failure_keeps_earlier_insertions() -> None:
    model = resnet()
    insert(model, "se@standard", img_size=32)
    before, logits = snapshot(model), model(images())
    for bad in ("se@standard", "se@conv3"):
        with pytest.raises(ValueError, match=r"has se already|no such place"):
            insert(model, bad, img_size=32)
    assert snapshot(model) == before
    assert torch.equal(model(images()), logits)


def test_one_channel_is_too_few() -> None:
    model = nn.Sequential(nn.Conv2d(3, 1, 1), nn.Conv2d(1, 4, 1))
    with pytest.raises(ValueError, match=r"0\.output has 1 channel"):
        insert(model, "simam@.0", img_size=8)


def test_an_image_that_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match=r"does not run on an image of 2x2, give another img_size"):
        insertion_sites(nn.Sequential(nn.Conv2d(3, 4, 5)), 2)
    with pytest.raises(ValueError, match="img_size must be one or two positive integers, not 0"):
        insertion_sites(resnet(), 0)
    with pytest.raises(ValueError, match="no convolution"):
        insertion_sites(nn.Linear(3, 3))


class Undecided(nn.Module):
    """A residual block whose way depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return x + self.conv(x)


def test_a_host_that_cannot_be_followed_is_named_with_the_line() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Undecided())
    with pytest.raises(ValueError, match=r"no such place") as error:
        insert(model, "se@standard", img_size=8)
    assert "1 (Undecided) cannot be followed: `if x.sum() > 1e9:`" in str(error.value)
    assert "site='1.conv'" in str(error.value)
    insert(model, "se@1.conv", img_size=8)
    assert list(inserted(model)) == ["1.conv.slot_output.0"]


class Overwriting(nn.Module):
    """The shortcut of this block is the input after the activation, by overwriting."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.relu_(x)) + x


def test_a_site_that_would_change_an_overwriting_host_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), Overwriting())
    reference = copy.deepcopy(model)
    with pytest.raises(ValueError, match=r"overwrites a tensor in place .* and pre would"):
        insert(model, "se@pre:init=identity", img_size=8)
    insert(model, "se@standard:init=identity", img_size=8)
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(model(x), reference(x))


class LongSum(nn.Module):
    """Three terms, the shortcut in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + x + self.two(x)


@pytest.mark.usefixtures("doubles")
def test_a_sum_of_three_has_no_end_of_the_branch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), LongSum())
    block = copy.deepcopy(model[1])
    assert insertion_sites(model, 8).sites == ("stem", "pre", "post_add", "post", "identity")
    insert(model, "a@pre", "b@identity", img_size=8)
    x = torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(model[1](x), block.one(2 * x) + 2 * x + block.two(2 * x))


def test_the_wrapper_of_identity_is_not_among_the_inserted() -> None:
    model = resnet()
    names = insert(model, "se@standard:stages=1,init=identity", img_size=32)
    assert isinstance(model.get_submodule(names[0]), FromIdentity)
    assert {name: m.kind for name, m in inserted(model).items()} == {f"{names[0]}.module": "se"}
