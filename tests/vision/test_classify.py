"""What the recipes for image classifiers share."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import vision
import zoo
from vision.classify import (
    Classification,
    ImageOptions,
    brings_weights,
    create_classifier,
    smallest_batch,
)
from vision.data import ImageDataset, Split
from vision.evaluate import count
from zoo.engine import BatchPlan, Mixing
from zoo.preprocess import normalize


def task(model: Any, options: ImageOptions | None = None, **mixing: float) -> Classification:
    data = vision.load_dataset("digits")
    mix = Mixing(10, **mixing, seed=3)
    return Classification(model, data, options or ImageOptions(), mix, seed=3)


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return zoo.create_model("resnet_micro", num_classes=10, in_chans=1, img_size=8)


def test_the_sources_are_the_data_sets_and_only_training_images_change(model):
    found = task(model, ImageOptions(spatial="affine"))
    assert (len(found.train), len(found.val)) == (1437, 360)
    keys = [(0, 5), (1, 5)]
    first, second = found.train.__getitems__(keys)["images"]
    assert not torch.equal(first, second), "augmented anew in each epoch"
    first, second = found.val.__getitems__(keys)["images"]
    assert torch.equal(first, second)


def test_batches_become_inputs_counts_and_mixed_targets(model):
    found = task(model, mixup=0.4)
    batch = found.val.__getitems__([(0, i) for i in range(6)])
    images = normalize(batch["images"], model.card.preprocessing)
    assert torch.equal(found.inputs(batch), images)
    model.eval()
    expected = count(model(images), batch["targets"])
    for name, value in found.count(model, batch).items():
        assert torch.equal(value, expected[name]), name
    mixed = found.prepare({**batch, "epoch": 2, "index": 7})
    by_hand = Mixing(10, mixup=0.4, seed=3)(images, batch["targets"], 2, 7)
    assert torch.equal(mixed["images"], by_hand[0])
    assert torch.equal(mixed["targets"], by_hand[1])
    assert len(mixed["images"]) == 5, "the first is there to mix with"


@pytest.mark.parametrize("field", ["label_smoothing", "drop_path_rate"])
@pytest.mark.parametrize("value", [-0.1, 1.0])
def test_shares_must_be_shares(field, value):
    with pytest.raises(ValueError, match=field):
        ImageOptions(**{field: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"freeze": "stage=2"}, r"freeze 'stage=2' must be one of none, backbone, stages=N, but-"),
        ({"head_lr": 0.0}, r"head_lr \(0.0\) must be positive"),
    ],
)
def test_wrong_options_of_fine_tuning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ImageOptions(**options)


def test_a_host_is_given_only_what_differs_from_its_own():
    assert ImageOptions().model_options == {}
    found = ImageOptions(img_size=(8, 16), drop_path_rate=0.1).model_options
    assert found == {"img_size": (8, 16), "drop_path_rate": 0.1}


def test_weights_are_loaded_and_accounted_for(tmp_path):
    source = zoo.create_model("resnet_micro", num_classes=3)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    said: list[str] = []
    weights = f"file:{tmp_path / 'weights.pt'}"
    found = create_classifier("resnet_micro", weights, said.append, num_classes=4, img_size=None)
    assert torch.equal(found.conv1.weight, source.conv1.weight)
    assert found.num_classes == 4
    assert len(said) == 1, "once"
    assert "3 classes in the source, 4 here" in said[0]
    assert not any(parameter.any() for parameter in found.fc.parameters()), "it starts at zero"
    again = create_classifier("resnet_micro", weights, said.append, num_classes=3)
    assert torch.equal(again.fc.weight, source.fc.weight)
    assert create_classifier("resnet_micro", None, said.append).fc.weight.any()
    assert len(said) == 2


def test_a_model_with_weights_takes_no_others(tmp_path):
    zoo.save_pretrained(zoo.create_model("resnet_micro"), tmp_path / "model")
    name = f"local-dir:{tmp_path / 'model'}"
    with pytest.raises(ValueError, match=r"brings its own weights; drop pretrained \(file:x\)"):
        create_classifier(name, "file:x")
    assert brings_weights(name)
    assert brings_weights("hf-hub:owner/name")
    assert not brings_weights("timm:resnet18")
    assert not brings_weights("resnet18")


def test_options_become_augmentation():
    options = ImageOptions(spatial="crop", hflip=0.25, policy="randaugment")
    assert options.augment == vision.Augment(spatial="crop", hflip=0.25, policy="randaugment")
    with pytest.raises(ValueError, match="spatial"):
        _ = ImageOptions(spatial="sideways").augment  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [1, 2, 7, 64, 65, 129, 1437])
@pytest.mark.parametrize("batch_size", [1, 3, 64])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_smallest_batch_is_that_of_the_plan(n, batch_size, world, accumulation):
    sizes = [
        len(micro.ids)
        for rank in range(world)
        for window in BatchPlan(n, batch_size, accumulation, world, rank).windows(0)
        for micro in window
    ]
    assert smallest_batch(n, batch_size, world) == min(sizes)


def test_a_last_batch_of_one_is_refused_before_training(model):
    """Case C5: 1437 = 4 * 359 + 1, and maps of 2x2 of an 8x8 image; 1x1 of a 4x4 one."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    task(model).check_smallest_batch(model, 359)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    tiny = zoo.create_model("resnet_micro", num_classes=10, in_chans=1, img_size=4)
    found = task(tiny)
    found.check_smallest_batch(tiny, 64)
    with pytest.raises(ValueError, match=r"batch_size 359 on 1 process.*1437.*take batch_size 360"):
        found.check_smallest_batch(tiny, 359)
    with pytest.raises(ValueError, match=r"batch_size 1 on 1.*take batch_size 3"):
        found.check_smallest_batch(tiny, 1)
    with pytest.raises(ValueError, match="on 2 process"):
        found.check_smallest_batch(tiny, 718, processes=2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["mixup", "cutmix", "hflip", "label_smoothing", "drop_path_rate"])
def test_numbers_must_be_finite(name, value):
    with pytest.raises(ValueError, match=rf"{name} \({value}\) must be finite"):
        ImageOptions(**{name: value})


def of_size(rows: int, cols: int) -> ImageDataset:
    pixels = np.zeros((4, rows, cols, 3), np.uint8)
    part = Split(torch.zeros(4, dtype=torch.long), 0.0, pixels=pixels)
    return ImageDataset("folder:photos", ("one",), 3, part, part)


def warned(capsys, name, rows, cols, img_size=None) -> str:
    model = zoo.create_model(name, **({} if img_size is None else {"img_size": img_size}))
    Classification(model, of_size(rows, cols), ImageOptions(img_size=img_size), Mixing(1), 0)
    return capsys.readouterr().err


def test_photos_shrunk_to_almost_nothing_are_warned_of(capsys):
    told = warned(capsys, "vit_micro_patch2_8", 96, 120)
    for part in ("WARNING", "96x120", "8x8", "vit_micro_patch2_8", "--model", "--img-size"):
        assert part in told
    named = re.search(r"\((\w+), (\w+); zoo.list_models", told)
    side = re.search(r"--img-size such as (\d+)", told)
    assert named is not None
    assert side is not None
    for name in named.groups():
        assert not warned(capsys, name, 96, 120), "what is advised helps"
    assert not warned(capsys, "vit_micro_patch2_8", 96, 120, img_size=int(side[1]))
    assert not warned(capsys, "vit_micro_patch2_8", 96, 120, img_size=(8, 8)), "wanted"
    assert warned(capsys, "vit_micro_patch4_32", 375, 500)


@pytest.mark.parametrize(
    ("name", "rows", "cols"),
    [
        ("vit_tiny_patch16_224", 375, 500),
        ("timm:resnet10t", 3000, 4000),
        ("vit_micro_patch2_8", 8, 8),
        ("vit_micro_patch2_8", 32, 32),
        ("vit_micro_patch4_32", 32, 32),
        ("vit_micro_patch4_32", 64, 64),
        ("resnet_micro", 32, 32),
    ],
)
def test_usual_sizes_are_not_warned_of(capsys, name, rows, cols):
    assert not warned(capsys, name, rows, cols)


def test_only_the_main_process_warns(capsys, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert not warned(capsys, "vit_micro_patch2_8", 96, 96)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    assert warned(capsys, "vit_micro_patch2_8", 96, 96)
