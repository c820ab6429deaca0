"""Which outputs of a classifier are the classes of a data set, by their names."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from vision.data import load_dataset

MOST = 5  # names in an error


class Matched(NamedTuple):
    """Classes of a data set that a model knows.

    Attributes:
        names: By the model's names, in the data's order.
        outputs: The model's output of each.
    """

    names: tuple[str, ...]
    outputs: tuple[int, ...]


def data_classes(spec: str) -> tuple[str, ...]:
    """Names of a data set's classes; of `folder:PATH` those of train and val together."""
    kind, _, path = spec.partition(":")
    return _folders(path, "train", "val") if kind == "folder" else load_dataset(spec).class_names


def _folders(path: str, *parts: str) -> tuple[str, ...]:
    places = [Path(path).expanduser() / part for part in parts]
    folders = [x for place in places if place.is_dir() for x in place.iterdir() if x.is_dir()]
    return tuple(sorted({x.name for x in folders if not x.name.startswith(".")}))


def check_known(known: Sequence[str], spec: str, model: str) -> None:
    """Refuses validation images in folders whose classes a model does not know.

    Args:
        known: The model's classes.
        spec: `folder:PATH`; other data says itself what it has.
        model: Its name, for the error.

    Raises:
        ValueError: it tells these classes, and some of the model's, those of a near name first.
    """
    kind, _, path = spec.partition(":")
    names = _folders(path, "val") if kind == "folder" else ()
    unknown = [name for name in names if not match_classes(known, [name])]
    if not unknown:
        return
    near = [found for name in unknown[:MOST] for found in get_close_matches(name, known, n=2)]
    some = list(dict.fromkeys([*near, *known]))[:MOST]
    raise ValueError(
        f"--data {spec} has {len(unknown)} of {len(names)} classes that --model {model} does not "
        f"know: {_some(unknown[:MOST], len(unknown))}; it knows {_some(some, len(known))}. Name "
        "the folders as the model names its classes"
    )


def _some(names: Sequence[str], count: int) -> str:
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")


def match_classes(known: Sequence[str], names: Sequence[str]) -> Matched | None:
    """Finds the classes `names` among those that a model knows; None unless it knows all of them
    as different classes.

    Folders named by ImageNet's synsets (n02123045) are found under the names of the classes.
    """
    place = {name: output for output, name in enumerate(known)}
    found = tuple(names)
    if found and not set(found) <= place.keys():
        from zoo.imagenet import imagenet_synsets

        found = tuple(imagenet_synsets().get(name, name) for name in found)
    if not found or not set(found) <= place.keys() or len({*found}) < len(found):
        return None
    return Matched(found, tuple(place[name] for name in found))


def read_class_names(source: str) -> tuple[str, ...]:
    """Names of a classifier's outputs: of a text file, one a line, or of a set of ImageNet.

    Raises:
        ValueError: `source` is neither.
    """
    from zoo.imagenet import SUBSETS, imagenet_classes

    if source in SUBSETS:
        return imagenet_classes(source)
    file = Path(source).expanduser()
    if not file.is_file():
        raise ValueError(
            f"class names {source!r} must be a text file of one name a line, or one of "
            f"{', '.join(SUBSETS)}"
        )
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(line.strip() for line in lines if line.strip())
