"""Where captions are right: by their length, by the place of a word, by the cell of an image.

| profile | places | of the data |
|---|---|---|
| `length` | captions by number of words | any |
| `word` | the words of a caption, first to last | `strips:N`: word i is the digit in cell i |
| `cell` | the cells of an image, left to right | `needle:N`: the one cell that a caption is about |

A decoder that reads the image as one vector has to keep all of it until the last word; one that
attends can look again (arXiv 1409.0473, figure 2). Accuracies are of written captions, nothing of
which was given: chance is one word of the vocabulary, 10 % for digits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from crossmodal.data import Pairs
from crossmodal.probe import WORDS
from crossmodal.scores import References, by_length
from zoo.diagnostics.plotting import figure_class


class Place(NamedTuple):
    """Scores of what stands in one place.

    Attributes:
        name: Of the place: `3`, or a range of lengths, `4-5` or `13+`.
        n: Captions that count.
        scores: In percent, by name; the first is the one to draw.
    """

    name: str
    n: int
    scores: dict[str, float]


@dataclass(frozen=True)
class Profile:
    """What the places of a data set are.

    Attributes:
        title: Of its table and picture.
        stem: Of their files.
        axis: Says what a place is.
        score: Name of the score that is drawn.
        chance: What guessing reaches, in percent, where it is known.
    """

    title: str
    stem: str
    axis: str
    score: str
    chance: float | None = None


_CHANCE = 100 / len(WORDS)
PROFILES = {
    "length": Profile("Score by caption length", "lengths", "words of the right caption", "chrf"),
    "word": Profile(
        "Accuracy by the place of the word",
        "positions",
        "place of the word, and of its digit",
        "accuracy",
        _CHANCE,
    ),
    "cell": Profile(
        "Accuracy by the place of the informative cell",
        "positions",
        "cell of the digit",
        "accuracy",
        _CHANCE,
    ),
}
_OF_DATA = {"strips": "word", "needle": "cell"}


def profile_of(spec: str) -> str:
    """The profile that a data set is made for, one of `PROFILES`.

    >>> profile_of("strips:8"), profile_of("emoji")
    ('word', 'length')
    """
    return _OF_DATA.get(spec.partition(":")[0], "length")


def measure(
    profile: str, hypotheses: Sequence[str], references: References, pairs: Pairs
) -> list[Place]:
    """Scores of written captions by place.

    Args:
        profile: One of `PROFILES`.
        hypotheses: What was written about each image.
        references: Right captions of each.
        pairs: The images; only `cell` reads them, for their positions.
    """
    if profile == "word":
        return by_word(hypotheses, [own[0] for own in references])
    if profile == "cell":
        if pairs.position is None:
            raise ValueError("these pairs have no positions: accuracy by cell is for needle:N")
        return by_cell(hypotheses, [own[0] for own in references], pairs.position)
    return [
        Place(_range(each.shortest, each.longest), each.n, _scores(each))
        for each in by_length(hypotheses, references)
    ]


def _range(shortest: int, longest: int | None) -> str:
    if longest is None:
        return f"{shortest}+"
    return str(shortest) if shortest == longest else f"{shortest}-{longest}"


def _scores(bin_: Any) -> dict[str, float]:
    return {name: getattr(bin_, name) for name in ("chrf", "bleu", "exact")}


def by_word(hypotheses: Sequence[str], references: Sequence[str]) -> list[Place]:
    """How often the i-th word is the right one, of the captions that have so many.

    A word that is missing is wrong; words after the right caption's last do not count.
    """
    _check(hypotheses, references)
    written, right = ([text.split() for text in texts] for texts in (hypotheses, references))
    places = []
    for i in range(max(map(len, right))):
        hits = [
            words[i : i + 1] == own[i : i + 1]
            for words, own in zip(written, right, strict=True)
            if i < len(own)
        ]
        places.append(_accuracy(i, hits))
    return places


def by_cell(hypotheses: Sequence[str], references: Sequence[str], position: Tensor) -> list[Place]:
    """How often the caption is right where the informative cell is the i-th; position (n,)."""
    _check(hypotheses, references)
    if position.shape != (len(references),):
        raise ValueError(
            f"position {tuple(position.shape)} must be one cell for each of {len(references)} "
            "captions"
        )
    hits: dict[int, list[bool]] = {cell: [] for cell in sorted(set(position.tolist()))}
    for cell, text, own in zip(position.tolist(), hypotheses, references, strict=True):
        hits[cell].append(text.split() == own.split())
    return [_accuracy(cell, each) for cell, each in hits.items()]


def _accuracy(index: int, hits: list[bool]) -> Place:
    return Place(str(index + 1), len(hits), {"accuracy": 100 * sum(hits) / len(hits)})


def _check(hypotheses: Sequence[str], references: Sequence[str]) -> None:
    if not references or len(hypotheses) != len(references):
        raise ValueError(
            f"hypotheses ({len(hypotheses)}) and references ({len(references)}) must be equally "
            "many, one or more"
        )


# The picture

# Okabe and Ito's colours, told apart by the colour-blind.
STYLES = (("#595959", "o"), ("#E69F00", "s"), ("#0072B2", "^"), ("#009E73", "D"), ("#D55E00", "v"))


class Point(NamedTuple):
    """A model's score in one place over its seeds.

    Attributes:
        name: Of the place.
        n: Captions that count there.
        mean: Over the seeds.
        low, high: Interval of the mean; None where there is none.
        seeds: The score with each seed.
    """

    name: str
    n: int
    mean: float
    low: float | None
    high: float | None
    seeds: tuple[float, ...]


def draw(curves: Mapping[str, Sequence[Point]], profile: str, setting: str) -> Any:
    """A figure with a line for each model over the places: means, intervals, seeds as dots.

    Args:
        curves: Points of each model, in the same places.
        profile: One of `PROFILES`.
        setting: What was run, for the title.

    Raises:
        ImportError: matplotlib is missing.
    """
    own = PROFILES[profile]
    figure = figure_class(Path(f"{own.stem}.png"))(figsize=(9, 5), layout="constrained")
    axes = figure.subplots()
    if own.chance is not None:
        axes.axhline(own.chance, color="0.6", linestyle="--", linewidth=1, label="chance")
    shifts = [0.08 * (i - (len(curves) - 1) / 2) for i in range(len(curves))]
    for i, (name, points) in enumerate(curves.items()):
        _line(axes, name, points, shifts[i], *STYLES[i % len(STYLES)])
    _label(axes, next(iter(curves.values())), own)
    figure.suptitle(f"{own.title}\n{setting}", fontsize=11, wrap=True)
    figure.legend(
        loc="outside lower center",
        ncols=len(curves) + 1,
        frameon=False,
        title="mean with 95 % t-interval; small dots are seeds",
        title_fontsize=9,
        fontsize=9,
    )
    return figure


def _line(
    axes: Any, name: str, points: Sequence[Point], shift: float, colour: str, marker: str
) -> None:
    """Shifted a little to the side, so that the bars of several models stand beside each other."""
    places = [i + shift for i in range(len(points))]
    means = [point.mean for point in points]
    axes.plot(places, means, color=colour, marker=marker, markersize=7, linewidth=1.4, label=name)
    for x, point in zip(places, points, strict=True):
        if point.low is not None:
            axes.plot([x, x], [point.low, point.high], color=colour, linewidth=2.2)
        if len(point.seeds) > 1:
            dots = [x + 0.025] * len(point.seeds)
            axes.scatter(dots, point.seeds, s=10, color=colour, alpha=0.6, linewidths=0, zorder=3)


def _label(axes: Any, points: Sequence[Point], profile: Profile) -> None:
    alike = len({point.n for point in points}) == 1
    names = [point.name if alike else f"{point.name}\nn = {point.n}" for point in points]
    axes.set_xticks(range(len(points)), names)
    axes.set_xlabel(f"{profile.axis}; n = {points[0].n:,} each" if alike else profile.axis)
    axes.set_ylabel(f"{profile.score}, %")
    axes.set_ylim(0, 103 if profile.score == "accuracy" else None)
    for edge in ("right", "top"):
        axes.spines[edge].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
