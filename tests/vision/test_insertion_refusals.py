"""What insertion refuses: hosts that are no CNNs, and forwards that a graph would not do again."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from vision.insertion import insert, inserted, insertion_sites, remove_insertions


class Block(nn.Module):
    """A residual block; what is odd comes from the subclasses."""

    def __init__(self, channels: int = 4) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("seen", torch.zeros(1))
        self.steps, self.log = 0, [1.0]

    def branch(self, x: Tensor) -> Tensor:
        return self.norm(self.c1(x))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def host(*blocks: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 4, 1)
    return nn.Sequential(
        stem, nn.Sequential(*blocks), nn.Conv2d(4, 4, 2, 2), nn.Sequential(Block())
    )


def images() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))


# Channels that are not in axis 1

NO_CNN: dict[str, Callable[[], nn.Module]] = {
    "timm's Swin": lambda: timm.create_model(
        "swin_tiny_patch4_window7_224", embed_dim=24, depths=(1, 1), num_heads=(2, 2)
    ),
    "torchvision's Swin": lambda: torchvision.models.SwinTransformer(
        [4, 4], 24, [1, 1], [2, 2], [7, 7]
    ),
    "ViT": lambda: timm.create_model("vit_tiny_patch16_224", depth=1),
    "Mixer": lambda: timm.create_model("mixer_s32_224"),
    "ours": lambda: zoo.create_model("vit_micro_patch2_8"),
}


@pytest.mark.parametrize("name", NO_CNN)
def test_a_model_of_tokens_is_no_cnn(name: str) -> None:
    model = NO_CNN[name]()
    for look in (insertion_sites, lambda m: insert(m, "se@conv1")):
        with pytest.raises(ValueError, match=r"is not a CNN: no maps \(b c y x\) with convol"):
            look(model)
    assert not inserted(model)


def test_a_mixed_network_has_sites_on_maps_alone() -> None:
    model = timm.create_model("mambaout_femto", depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))
    table = insertion_sites(model, 64)
    assert all(place.resolution[0] == place.resolution[1] for place in table)
    blocks = table.select("standard").sites
    assert blocks == ()  # its blocks add maps (b y x c)
    with pytest.raises(ValueError, match=r"gives \(1, 16, 16, 8\), not known to be one"):
        insert(model, "se@stages.0.blocks.0", img_size=64)


# What a graph would not do again


class RandomWay(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(1).item() < 0.5:
            return x
        return x + self.branch(x)


class PythonRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * (random.random() if self.training else 1.0)


class NumpyRandom(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) * (float(np.random.rand()) if self.training else 1.0)  # noqa: NPY002


class NoGradients(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.branch(x)
        return x + y


class OwnPrecision(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = self.branch(x)
        return x + y


class Checkpointed(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + checkpoint(self.branch, x, use_reentrant=False)
        return x + self.branch(x)


class CheckpointedReentrant(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x + checkpoint(self.branch, x, use_reentrant=True)
        return x + self.branch(x)


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return x + self.branch(x)


class Logging(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.log.append(2.0)
        return x + self.branch(x)


class CountingBuffer(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return x + self.branch(x)


LOST: dict[type[Block], str] = {
    RandomWay: "draws random numbers",
    PythonRandom: "draws random numbers",
    NumpyRandom: "draws random numbers",
    NoGradients: "switches gradients off",
    OwnPrecision: r"sets the precision of a part of it \(autocast\)",
    Checkpointed: "checkpoint",
    CheckpointedReentrant: "checkpoint",
    Counting: "changes steps of Counting",
    Logging: "changes log of Logging",
    CountingBuffer: "changes seen of CountingBuffer",
}


def state(model: nn.Module) -> tuple[Any, ...]:
    return (
        [(m.steps, list(m.log)) for m in model.modules() if isinstance(m, Block)],
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
        torch.is_grad_enabled(),
        {name: value.tolist() for name, value in model.state_dict().items()},
    )


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("kind", LOST)
def test_what_a_graph_would_lose_is_refused(kind: type[Block]) -> None:
    model = host(kind(), kind())
    before = state(model)
    with pytest.raises(
        ValueError, match=rf"1\.0 \({kind.__name__}\) cannot .*{LOST[kind]}"
    ) as error:
        insert(model, "none@post", img_size=8)  # which draws no weights
    assert "insert after a module instead, as in site='1.0.c1'" in str(error.value)
    assert not inserted(model)
    if kind not in (Counting, Logging):  # those write in the pass that looks at the model too
        assert state(model) == before
    insert(model, "se@1.0.c1", img_size=8)
    assert list(inserted(model)) == ["1.0.c1.slot_output.0"]


class Noise(Block):
    """Random numbers that are tensors are drawn anew by the graph too."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        if self.training:
            y = F.dropout(y + torch.randn_like(y), 0.5)
        return x + y


def test_random_tensors_stay_random() -> None:
    model = host(Noise(), Noise())
    reference = copy.deepcopy(model).train()
    insert(model, "none@post", img_size=8)
    model.train()
    for seed in range(3):
        torch.manual_seed(seed)
        wanted = reference(images())
        torch.manual_seed(seed)
        assert torch.equal(model(images()), wanted)
    assert not torch.equal(model(images()), model(images()))


class OtherInTraining(Block):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return self.branch(x)
        return x + self.branch(x)


def test_a_site_that_training_lacks_is_named() -> None:
    model = host(OtherInTraining(), OtherInTraining())
    with pytest.raises(ValueError, match=r"in training it has no place identity; insert after"):
        insert(model, "se@identity", img_size=8)


# Blocks that are not followed


class Undecided(Block):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            return x
        return x + self.branch(x)


def test_no_stage_loses_a_block_silently() -> None:
    model = host(Undecided(), Block())
    for text in ("se@post", "se@post:stages=1"):
        with pytest.raises(ValueError, match=r"stages without such blocks: 2\n.*1\.0 \(Undecided"):
            insert(model, text, img_size=8)
    assert insert(model, "se@post:stages=2", img_size=8) == ["3.0.slot_post.0"]
    rows = str(insertion_sites(model, 8)).splitlines()
    assert rows[-1].startswith("1.0 (Undecided) cannot be followed: `if x.sum() > 1e9:`")
    assert len(rows) == len(insertion_sites(model, 8)) + 2


def test_a_stage_of_refused_blocks_keeps_its_number() -> None:
    model = host(Undecided(), Undecided())
    assert insert(model, "se@post:stages=2", img_size=8) == ["3.0.slot_post.0"]


def test_an_empty_table_tells_why() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1 = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.c1(x) if x.sum() < 1e9 else x

    table = insertion_sites(Alone(), 8)
    assert len(table) == 0
    assert str(table).startswith("the model (Alone) cannot be followed: `return x + self.c1(x)")


def test_mobilevit_says_which_blocks_go_without() -> None:
    model = timm.create_model("mobilevit_xxs", num_classes=3)
    with pytest.raises(ValueError, match=r"stages\.2\.1 \(MobileVitBlock\) cannot be followed"):
        insert(model, "se@standard", img_size=64)
    names = insert(model, "se@standard:stages=1,2", img_size=64)
    assert names[0] == "stages.0.0.slot_standard.0"
    assert "stages.4.1 (MobileVitBlock)" in str(insertion_sites(model, 64))


# Overwriting


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        x += y
        return self.relu(x)


def test_the_output_of_a_block_that_overwrites_its_input_is_a_place() -> None:
    model = host(InPlace(), InPlace()).eval()
    reference = copy.deepcopy(model)
    insert(model, "constant@post:stages=1", img_size=8)
    gates = inserted(model)
    for gate in gates.values():
        for parameter in gate.parameters():
            parameter.data.uniform_(-1, 1)
    for (name, gate), block in zip(gates.items(), reference[1], strict=True):
        assert name.startswith("1.")
        block.register_forward_hook(lambda m, a, out, gate=gate: gate(out))
    x = images()
    torch.testing.assert_close(model(x), reference(x))
    with pytest.raises(ValueError, match=r"post_add would change .* as in site='1\.0\.c1'"):
        insert(model, "se@post_add:stages=1", img_size=8)


# Wrapped models


def test_removal_from_a_wrapped_model_is_refused() -> None:
    model = host(Block(), Block())
    insert(model, "se@post", img_size=8)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(ValueError, match="remove insertions first, and compile the model after"):
        remove_insertions(compiled)
    with pytest.raises(ValueError, match="remove insertions before the model is wrapped in DataP"):
        remove_insertions(nn.DataParallel(model))
    assert len(inserted(model)) == 3
    remove_insertions(model)
    assert not inserted(model)
