"""Names of ImageNet's classes."""

from __future__ import annotations

import pytest
from timm.data import ImageNetInfo
from torchvision.models import ResNet50_Weights

from zoo.imagenet import SUBSETS, imagenet_classes, imagenet_synsets


@pytest.mark.parametrize("subset", SUBSETS)
def test_every_class_has_a_name_of_its_own_in_timms_order(subset: str) -> None:
    names, info = imagenet_classes(subset), ImageNetInfo(subset)
    assert len(names) == len(set(names)) == info.num_classes() == SUBSETS[subset]
    for name, lemmas in list(zip(names, info.label_descriptions(), strict=True))[::97]:
        assert name.startswith(lemmas.split(",")[0])


def test_a_class_has_one_name_in_all_sets() -> None:
    short, long = imagenet_classes(), imagenet_classes("imagenet-22k")
    assert list(short) == ResNet50_Weights.DEFAULT.meta["categories"]
    synsets = ImageNetInfo("imagenet-22k").label_names()
    named = dict(zip(synsets, long, strict=True))
    shared = imagenet_synsets().keys() & named.keys()
    assert len(shared) == 999
    assert all(named[synset] == imagenet_synsets()[synset] for synset in shared)
    others = {name for synset, name in named.items() if synset not in shared}
    assert not others & set(short)  # rows by name are never another class's


def test_an_unknown_set_is_named() -> None:
    with pytest.raises(ValueError, match=r"'imagenet-2k' must be one of imagenet-1k, .*22k-ms"):
        imagenet_classes("imagenet-2k")
