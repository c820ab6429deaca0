"""Insertions as an option of `zoo.create_model`: recorded, saved, made again, and loaded into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import vision
import zoo

TEXTS = ["se@standard", "eca@post:stages=2,init=identity"]
HOSTS = ["resnet_micro", "timm:resnet10t", "torchvision:resnet18"]


def create(name: str, **options: Any) -> Any:
    return zoo.create_model(name, num_classes=4, **options).eval()


def images() -> torch.Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", HOSTS)
def test_a_saved_model_is_made_again_with_its_insertions(name: str, tmp_path: Path) -> None:
    model = create(name, insertions=TEXTS)
    assert model.card.options["insertions"] == TEXTS
    zoo.save_pretrained(model, tmp_path / "model")
    again = create(f"local-dir:{tmp_path / 'model'}")
    assert [str(i) for i in vision.insertion.insertions_of(again)] == TEXTS
    assert torch.equal(model(images()), again(images()))


@pytest.mark.parametrize("name", HOSTS)
def test_weights_of_the_host_load_and_identity_keeps_its_outputs(name: str, tmp_path: Path) -> None:
    host = create(name)
    folder = zoo.save_pretrained(host, tmp_path / "host")
    kept = create(
        name, insertions=["cbam@standard:init=identity"], pretrained=f"local-dir:{folder}"
    )
    assert torch.equal(kept(images()), host(images()))
    model = create(name, insertions=TEXTS)
    report = zoo.load_pretrained(model, f"local-dir:{folder}")
    added = {key for key in model.state_dict() if ".slot_" in key}
    assert set(report.reinitialized) == added
    assert set(report.reinitialized.values()) == {"the source has no such insertion"}
    assert report.matched_fraction == 1.0


def test_half_of_an_insertion_is_an_error(tmp_path: Path) -> None:
    model = create("resnet_micro", insertions=["se@standard:stages=1"])
    state = model.state_dict()
    del state["layer1.0.slot_standard.0.fc1.weight"]
    torch.save(state, tmp_path / "half.pt")
    with pytest.raises(zoo.weights.WeightsError, match=r"layer1\.0\.slot_standard\.0\.fc1\.weight"):
        zoo.load_pretrained(model, f"file:{tmp_path / 'half.pt'}")


def test_removal_is_noted_and_direct_insertion_too(tmp_path: Path) -> None:
    model = create("resnet_micro")
    options = model.card.options
    vision.insert(model, "se@pre", vision.Insertion("eca", "post"))
    vision.insert(model, "gct@conv1:stages=1")
    assert model.card.options["insertions"] == ["se@pre", "eca@post", "gct@conv1:stages=1"]
    zoo.save_pretrained(model, tmp_path / "model")
    again = create(f"local-dir:{tmp_path / 'model'}")
    assert torch.equal(model(images()), again(images()))
    vision.remove_insertions(model)
    assert model.card.options == options


def test_bad_lists_are_refused() -> None:
    with pytest.raises(TypeError, match="insertions must be a list of texts, not 'se@pre'"):
        create("resnet_micro", insertions="se@pre")
    with pytest.raises(ValueError, match="unknown site 'standart'; did you mean standard"):
        create("resnet_micro", insertions=["se@standart"])


def test_an_empty_list_is_no_insertion() -> None:
    assert "insertions" not in create("resnet_micro", insertions=[]).card.options


def test_a_card_is_never_stale(tmp_path: Path) -> None:
    model = create("resnet_micro")
    parent = torch.nn.Sequential(model)
    with pytest.raises(ValueError, match="insert into 0 itself: it has a card"):
        vision.insert(parent, "se@standard")
    vision.insert(model, "se@standard")
    vision.remove_insertions(parent)
    assert "insertions" not in model.card.options


def test_insertions_that_the_model_lacks_are_named(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(create("resnet_micro", insertions=TEXTS), tmp_path / "model")
    with pytest.raises(zoo.weights.WeightsError, match=r"insertions=\['se@standard', 'eca@post"):
        create("resnet_micro", pretrained=f"local-dir:{folder}")


def test_things_that_are_no_insertions() -> None:
    for wrong in (None, 3, ["se@pre"]):
        with pytest.raises(TypeError, match="an insertion is an Insertion or a text"):
            vision.insert(create("resnet_micro"), wrong)
