"""Looks inside during training: what is written and told, and that training is not moved."""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import vision
import zoo
from vision.data import make_source
from vision.inspection.attention_watch import AttentionPart, patch_maps
from vision.inspection.fixed_images import FixedImages, fixed_images, spread, undisturbed
from vision.inspection.gate_watch import draw_strips
from vision.inspection.image_tokens import ImageTokens
from vision.inspection.sheet import coloured
from vision.inspection.training_watch import closing_look, watch_training
from zoo.diagnostics import capture_attention, capture_gates, gate_statistics, look_at_layer


@pytest.fixture(scope="module")
def digits():
    return vision.load_dataset("digits")


def vit(**options):
    torch.manual_seed(0)
    given = {"depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 10, **options}
    return zoo.create_model("vit_micro_patch2_8", **given)


def images_of(model, digits, samples=4):
    source = make_source(digits.val, model.card.preprocessing, train=False)
    return fixed_images(model, source, samples, digits.class_names)


class Heard:
    """A report that remembers what it was told."""

    def __init__(self):
        self.training = {"loss": 1.5, "grad_norm": 2.0}
        self.resumed, self.told = [], []

    def resume(self, step, before):
        self.resumed.append((step, list(before)))

    def __call__(self, step, **seen):
        self.told.append((step, seen))


# --- what a look finds -------------------------------------------------------------------------


def test_numbers_are_those_of_the_weights_themselves(digits, tmp_path):
    model = vit(class_token=True)
    images = images_of(model, digits)
    numbers = watch_training(model, images, tmp_path, 5)(model, 5)
    with torch.no_grad(), capture_attention(model.eval()) as records:
        model(images.inputs)
    for layer, (weights,) in records.items():
        wanted = look_at_layer(weights, grid=(4, 4), num_prefix_tokens=1).numbers()
        found = {n: numbers[f"attn/{layer}/{n}"] for n in wanted}
        assert found == pytest.approx(wanted, rel=1e-5)
        assert numbers[f"attn/{layer}/logit_min"] < numbers[f"attn/{layer}/logit_max"]
    assert len(numbers) == 2 * (len(wanted) + 2)


@pytest.mark.parametrize("tokens", ["class", "none"])
def test_maps_in_the_file_are_the_weights_of_the_patches(digits, tmp_path, tokens):
    model = vit(class_token=tokens == "class")
    images = images_of(model, digits)
    watch_training(model, images, tmp_path, 1)(model, 1)
    file = tmp_path / "step000001.safetensors"
    with torch.no_grad(), capture_attention(model.eval()) as records:
        model(images.inputs)
    for layer, (weights,) in records.items():
        rows = weights[:, :, 0, 1:] if tokens == "class" else weights.mean(2)
        maps = load_file(file)[f"maps/{layer}"]
        assert maps.shape == (4, 2, 4, 4)
        torch.testing.assert_close(maps.float().flatten(2), rows, rtol=1e-3, atol=1e-5)


def test_a_map_leaves_other_tokens_out():
    """Class token, register, 2 x 3 patches, one more key."""
    weights = torch.rand(2, 4, 9, 9).softmax(-1)
    named = patch_maps(weights, ImageTokens((2, 3), 2, 1, ("class", "register")))
    torch.testing.assert_close(named.flatten(2), weights[:, :, 0, 2:8])
    registers = patch_maps(weights, ImageTokens((2, 3), 2, 1, ("register 1", "register 2")))
    torch.testing.assert_close(registers.flatten(2), weights[:, :, 2:8, 2:8].mean(2))
    pooled = patch_maps(weights[:, :, :1], ImageTokens((3, 3), 0, 0))
    torch.testing.assert_close(pooled.flatten(2), weights[:, :, 0])


def test_gates_are_told_by_layer(digits, tmp_path):
    torch.manual_seed(0)
    model = zoo.create_model(
        "resnet_micro", num_classes=10, in_chans=1, insertions=["se@standard:stages=1,2"]
    )
    images = images_of(model, digits)
    watch = watch_training(model, images, tmp_path, 1, groups={"layer1.0.slot_standard.0": "one"})
    numbers = watch(model, 1)
    with torch.no_grad(), capture_gates(model.eval()) as records:
        model(images.inputs)
    stored = load_file(tmp_path / "step000001.safetensors")
    for layer, (gates,) in records.items():
        wanted = gate_statistics(gates, torch.zeros(4, dtype=torch.long))
        assert numbers[f"gates/{layer}/mean"] == pytest.approx(wanted.mean, rel=1e-5)
        assert numbers[f"gates/{layer}/spread"] == pytest.approx(wanted.channel_spread, rel=1e-4)
        torch.testing.assert_close(stored[f"gates/{layer}"], gates.flatten(1))
    watch.finish()
    names = {path.name for path in tmp_path.glob("*.png")}
    assert names == {"gates_step000001.png", "gates_over_time.png"}


def test_strips_have_the_colours_of_the_range(tmp_path):
    gates = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
    path = tmp_path / "strips.png"
    draw_strips(path, {"a": gates, "b": gates}, {"a": (0.0, 1.0), "b": None}, {}, title="", rows="")
    picture = np.asarray(Image.open(path).convert("RGB")).astype(int)
    for gate in (0.0, 0.25, 0.5, 1.0):
        near = np.abs(picture - coloured(torch.tensor(gate)).numpy()).max(-1) < 12
        assert near.sum() >= 2 * 240 * 10, gate


def test_both_attention_and_gates_from_one_pass(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit, self.calls = vit(in_chans=3), 0
            self.gate = vision.create_channel_attention("se", 3)

        def forward(self, x):
            self.calls += 1
            return self.vit(self.gate(x))

    model, heard = Both(), Heard()
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    images = FixedImages(pixels, torch.randn(2, 3, 8, 8), ("one", "two"))
    watch = watch_training(model, images, tmp_path, 1, report=heard)
    before = model.calls
    numbers = watch(model, 1)
    assert model.calls == before + 1
    assert {name.partition("/")[0] for name in numbers} == {"attn", "gates"}
    ((step, seen),) = heard.told
    assert (step, {kind: len(looks) for kind, looks in seen.items()}) == (
        1,
        {"layers": 2, "gates": 1},
    )


# --- training ----------------------------------------------------------------------------------


def trained(model, images, watch, steps=4, *, checkpointing=False, autocast=None):
    """Losses and weights of a few updates with dropout, from torch's own random numbers."""
    if checkpointing:
        model.set_grad_checkpointing(True)
    optimizer, losses = torch.optim.SGD(model.train().parameters(), lr=0.1), []
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        with autocast() if autocast else torch.enable_grad():
            noise = torch.randn_like(images.inputs)
            loss = F.cross_entropy(model(images.inputs + noise).float(), torch.arange(4))
        loss.backward()
        optimizer.step()
        gradients = [p.grad.clone() for p in model.parameters()]
        watch(model, step)
        assert all(g.equal(p.grad) for g, p in zip(gradients, model.parameters(), strict=True))
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def bf16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("how", ["plain", "checkpointing", "bf16", "cnn"])
def test_looking_changes_nothing_of_the_training(digits, tmp_path, how):
    def make():
        torch.manual_seed(0)
        if how == "cnn":  # running statistics
            inserted = ["se@standard", "cbam@post"]
            return zoo.create_model("resnet_micro", in_chans=1, num_classes=10, insertions=inserted)
        return vit(drop_rate=0.1, attn_drop_rate=0.2, drop_path_rate=0.2)

    more = {"checkpointing": how == "checkpointing", "autocast": bf16 if how == "bf16" else None}
    options = {"autocast": bf16} if how == "bf16" else {}
    model = make()
    images = images_of(model, digits)
    losses, weights = trained(model, images, lambda model, step: None, **more)
    again = make()
    watch = watch_training(again, images, tmp_path, 2, **options)
    same, found = trained(again, images, watch, **more)
    assert losses == same
    assert len(set(losses)) == 4
    assert all(value.equal(found[name]) for name, value in weights.items())
    assert all(module.training for module in again.modules())
    assert len(list(tmp_path.glob("step*.safetensors"))) == 2


def test_a_compiled_model_is_looked_at_as_written_and_not_compiled_anew(digits, tmp_path):
    torch._dynamo.reset()
    model, plain = vit(), vit()
    images = images_of(model, digits)
    wanted = watch_training(plain, images, tmp_path / "plain", 1)(plain, 1)
    model.compile(backend="eager")
    watch = watch_training(model, images, tmp_path / "compiled", 1)
    model.train()(images.inputs)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert watch(model, 1) == pytest.approx(wanted, rel=1e-5)
    model(images.inputs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert model._compiled_call_impl is not None


@pytest.mark.parametrize(
    "name",
    [
        "timm:vit_tiny_patch16_224",
        pytest.param("torchvision:vit_b_16", marks=pytest.mark.slow),
        pytest.param("open_clip:ViT-B-32", marks=pytest.mark.slow),
    ],
)
def test_hosts_are_seen_too(tmp_path, name):
    tiny = {"depth": 2, "embed_dim": 24, "num_heads": 3, "num_classes": 4}
    options = tiny if name.startswith("timm") else {}
    model = zoo.create_model(name, img_size=64, **options)
    pixels = torch.randint(0, 256, (2, 3, 64, 64), dtype=torch.uint8)
    images = FixedImages(pixels, pixels.float() / 255, ("one", "two"), tuple("abcd"))
    watch = watch_training(model, images, tmp_path, 1)
    numbers = watch(model, 1)
    layers = 2 if name.startswith("timm") else 12
    assert sum(key.endswith("/entropy") for key in numbers) == layers
    assert sum(key.endswith("/distance") for key in numbers) == layers
    stored = load_file(tmp_path / "step000001.safetensors")
    side = 2 if "32" in name else 4
    maps = [m.shape[2:] for key, m in stored.items() if key.startswith("maps/")]
    assert maps == [(side, side)] * layers


def test_looks_hold_no_memory(digits, tmp_path):
    model = vit()
    watch = watch_training(model, images_of(model, digits), tmp_path, 1, report=Heard())

    def tensors():
        gc.collect()
        return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]

    def look(steps):
        for step in steps:
            watch(model, step)
            watch.report.told.clear()
        return len(tensors())

    look(range(1, 3))
    held = tensors()  # so that none of an earlier test is let go between the two counts
    assert look(range(3, 12)) == look(range(1, 3)) >= len(held)


# --- files, resuming, processes ----------------------------------------------------------------


def test_only_when_due_and_only_on_the_main_process(digits, tmp_path):
    model = vit()
    images = images_of(model, digits)
    other = watch_training(model, images, tmp_path / "other", 1, main=False)
    assert other(model, 1) == {}
    other.finish()
    main = watch_training(model, images, tmp_path / "main", 5, last=7)
    assert main(model, 4) == {}
    main.finish()
    assert not list(tmp_path.iterdir())
    assert [step for step in range(5, 9) if main(model, step)] == [5, 7], "the last one as well"


def test_the_small_file_is_small_and_reads_back(digits, tmp_path):
    model, heard = vit(), Heard()
    images = images_of(model, digits)
    watch = watch_training(model, images, tmp_path, 1, report=heard)
    watch(model, 1)
    again = Heard()
    resumed = watch_training(model, images, tmp_path, 1, report=again, step=1)
    resumed(model, 2)
    ((step, ((earlier, seen),)),) = again.resumed
    assert (step, earlier, seen["training"]) == (1, 1, heard.training)
    (_, told), _ = heard.told[0], again.told
    for layer, look in told["layers"].items():
        assert seen["layers"][layer].numbers() == pytest.approx(look.numbers())


def test_a_resumed_run_forgets_what_its_checkpoint_does_not_know_of(digits, tmp_path):
    model = vit()
    images = images_of(model, digits)
    watch = watch_training(model, images, tmp_path, 2)
    for step in range(1, 9):
        watch(model, step)
    watch.finish()
    others = ["step_notes.txt", "step000010 (copy).png", "step000100.txt"]
    for name in others:
        (tmp_path / name).touch()
    resumed = watch_training(model, images, tmp_path, 2, step=5)
    resumed(model, 6 - 1)
    names = sorted(path.name for path in tmp_path.glob("step*") if path.name not in others)
    assert all((tmp_path / name).exists() for name in others), "files of the user's own"
    assert names == [f"step00000{n}.{kind}" for n in (2, 4) for kind in ("png", "safetensors")]
    assert (tmp_path / "over_time.png").exists()


def test_layers_over_time_are_in_the_models_order(digits, tmp_path, monkeypatch):
    """Not as a file sorts them, with the tenth before the second."""
    drawn = []
    monkeypatch.setattr(
        "vision.inspection.attention_watch.draw_over_time",
        lambda path, image, steps, **more: drawn.extend(steps.items()),
    )
    model = vit(depth=11)
    watch = watch_training(model, images_of(model, digits), tmp_path, 1)
    for step in (1, 2):
        watch(model, step)
    watch.finish()
    assert [step for step, _ in drawn] == [1, 2]
    for _, maps in drawn:
        assert list(maps) == [f"blocks.{n}.attn" for n in range(11)]


def test_over_time_also_after_an_error(digits, tmp_path):
    model = vit()
    watch = watch_training(model, images_of(model, digits), tmp_path, 1)

    def train():
        with closing_look(watch):
            watch(model, 1)
            raise KeyError

    with pytest.raises(KeyError):
        train()
    assert (tmp_path / "over_time.png").exists()
    with closing_look(None):
        pass


def test_without_matplotlib_there_are_numbers_and_one_warning(
    digits, tmp_path, monkeypatch, capsys
):
    def missing(file):
        raise ImportError(f"{file.name} needs matplotlib")

    monkeypatch.setattr("vision.inspection.sheet.figure_class", missing)
    model = vit()
    watch = watch_training(model, images_of(model, digits), tmp_path, 1)
    assert watch(model, 1)
    assert watch(model, 2)
    watch.finish()
    assert not list(tmp_path.glob("*.png"))
    assert capsys.readouterr().err.count("step000001.png needs matplotlib") == 1


# --- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet_micro", r"save_attention_every \(3\) needs attention or gates .* it has none"),
        ("timm:resnet18", r"in timm:resnet18: it has none"),
    ],
)
def test_a_model_with_nothing_to_see_is_refused(digits, tmp_path, name, message):
    model = zoo.create_model(name, num_classes=10, in_chans=1)
    with pytest.raises(ValueError, match=message):
        watch_training(model, images_of(model, digits), tmp_path, 3)


def test_unnormalised_weights_are_refused_with_the_reason(digits):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.vit = vit()

        def forward(self, x):
            return self.vit(x)

    model = Odd()
    tap = model.vit.blocks[0].attn.tap
    shown = tap.record

    @contextmanager
    def doubled():
        tap.record = lambda compute: shown(lambda: compute() * 2)
        yield
        del tap.record

    with doubled():
        part = AttentionPart(model, images_of(model.vit, digits))
    assert list(part.refused) == ["vit.blocks.0.attn"]
    assert "sums to 2" in part.refused["vit.blocks.0.attn"]


def test_fewer_images_where_memory_is_short(digits, tmp_path, monkeypatch):
    from vision.inspection import attention_watch

    monkeypatch.setattr(
        attention_watch,
        "capture_attention",
        lambda model, *args, **more: capture_attention(model, *args, **more, max_bytes=10_000),
    )
    model = vit()
    watch = watch_training(model, images_of(model, digits), tmp_path, 1)
    assert len(watch.images.names) == 2


def test_images_are_spread_and_named(digits):
    model = vit()
    images = images_of(model, digits)
    assert spread(4, 360) == [0, 90, 180, 270]
    targets = digits.val.targets[[0, 90, 180, 270]].tolist()
    assert images.names == tuple(
        f"image {index}\nclass {target}"
        for index, target in zip(spread(4, 360), targets, strict=True)
    )
    assert images.told(F.one_hot(torch.tensor([3, 1, 2, 0]), 10))[0].endswith(", found 3")
    assert images.told(torch.zeros(4, 3)) == list(images.names)
    assert len(images_of(model, digits, 1000).names) == 360
    with pytest.raises(ValueError, match=r"samples \(5\) must not exceed 4"):
        spread(5, 4)


def test_undisturbed_leaves_modes_and_random_numbers():
    model = vit(drop_rate=0.5).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)

    def look():
        with undisturbed(model):
            assert not any(module.training for module in model.modules())
            torch.rand(5)
            raise KeyError

    with pytest.raises(KeyError):
        look()
    assert [module.training for module in model.modules()] == modes
    assert torch.rand(3).equal(wanted)


def test_the_file_of_images_is_there_once(digits, tmp_path):
    model = vit()
    images = images_of(model, digits)
    watch_training(model, images, tmp_path, 1)(model, 1)
    from safetensors import safe_open

    with safe_open(tmp_path / "images.safetensors", framework="pt") as file:
        assert file.get_tensor("pixels").equal(images.pixels)
        assert json.loads(file.metadata()["names"]) == list(images.names)
