"""Names of ImageNet's classes, in the order of trained classifiers.

The 1,000 of ImageNet-1k have torchvision's short names ("tabby", "crane bird"). In the larger sets
those keep their names, so that a classifier of one set can take over rows of another; any other
class whose first word is not its own gets the identifier of its synset as well ("bank n08420278").
"""

from __future__ import annotations

from collections import Counter
from functools import cache

SUBSETS = {
    "imagenet-1k": 1000,
    "imagenet-12k": 11821,
    "imagenet-21k-goog": 21843,
    "imagenet-21k-miil": 11221,
    "imagenet-22k": 21841,
    "imagenet-22k-ms": 21842,
}  # timm's names of the sets, and how many classes each has


@cache
def imagenet_classes(subset: str = "imagenet-1k") -> tuple[str, ...]:
    """One name a class, all different.

    Raises:
        ValueError: `subset` is none of `SUBSETS`.
    """
    if subset not in SUBSETS:
        raise ValueError(f"imagenet subset {subset!r} must be one of {', '.join(SUBSETS)}")
    known = imagenet_synsets()
    if subset == "imagenet-1k":
        return tuple(known.values())
    from timm.data import ImageNetInfo

    info = ImageNetInfo(subset)
    first = {x: _first(info.label_name_to_description(x)) for x in info.label_names()}
    uses = Counter([*first.values(), *known.values()])
    return tuple(
        known.get(synset) or (name if uses[name] == 1 else f"{name} {synset}")
        for synset, name in first.items()
    )


@cache
def imagenet_synsets() -> dict[str, str]:
    """Names of ImageNet-1k's classes by synset, as its folders are called: n02123045 -> tabby."""
    from timm.data import ImageNetInfo
    from torchvision.models import ResNet50_Weights

    names = ResNet50_Weights.DEFAULT.meta["categories"]
    return dict(zip(ImageNetInfo("imagenet-1k").label_names(), names, strict=True))


def _first(lemmas: str) -> str:
    return lemmas.split(",")[0].strip()
