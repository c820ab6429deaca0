"""Line charts for pages: from series of numbers to places that a template draws as SVG.

A chart's drawing is stretched to the reader's width, its text is not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[float, float]]  # (x, y), x rising

WIDTH, HEIGHT = 100.0, 56.0  # of a drawing, in its own units
MOST_POINTS = 400  # of a series; a screen shows no more
DOTS = 30  # points of a series that are marked
SPREAD = 20.0  # largest over median value above which a scale is logarithmic
COLOURS = ("better", "worse", "open")


@dataclass(frozen=True)
class Scale:
    """From numbers to per cent of a length."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float]) -> Scale:
        """Holds all values and a margin."""
        known = list(values)
        low, high = min(known), max(known)
        margin = 0.05 * (high - low) or abs(high) / 2 or 1.0
        return cls(low - margin, high + margin)

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def at(self, value: float) -> str:
        return f"{100 * self.share(value):.2f}%"

    def ticks(self, most: int = 6) -> list[float]:
        """Some round numbers, at most so many."""
        size = self.high - self.low
        unit = 10.0 ** math.floor(math.log10(size / 5))
        step = next(unit * factor for factor in (1, 2, 5, 10, 20) if size / (unit * factor) <= most)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        return [step * i for i in range(first, last + 1)]


@dataclass(frozen=True)
class Line:
    """One series of a chart.

    Attributes:
        name: For the legend.
        points: Of a polyline.
        dots: Path of the marked points; empty for many.
        colour: A class of the style, or a CSS colour.
        first, last: Its values, as text.
    """

    name: str
    points: str
    dots: str
    colour: str
    first: str
    last: str


@dataclass(frozen=True)
class Chart:
    """What the template draws.

    Attributes:
        title: What is on the vertical axis.
        lines: Its series.
        x, y: The bounds of both axes; of a logarithmic one their logarithms to base 10.
        x_ticks, y_ticks: Places in per cent from left and from top, with their text.
        log: Whether the vertical axis is logarithmic.
        least, greatest: Of the numbers themselves; `x` and `y` have a margin around them.
        ordered: Whether the series have an order, such as layers, which their colours show.
    """

    title: str
    lines: tuple[Line, ...]
    x: Scale
    y: Scale
    least: float
    greatest: float
    x_ticks: tuple[tuple[str, str], ...]
    y_ticks: tuple[tuple[str, str], ...]
    log: bool = False
    ordered: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(line.name for line in self.lines)

    @property
    def lone(self) -> bool:
        """Whether each series has one point only, and nothing is to be drawn."""
        return all(" " not in line.points for line in self.lines)

    @property
    def told(self) -> str:
        """The chart in words, for those who do not see it."""
        ends = [f"{line.name} from {line.first} to {line.last}" for line in self.lines]
        return f"{self.title}: {'; '.join(ends)}"


def chart(
    title: str, series: Mapping[str, Curve], *, ordered: bool = False, until: float = 0.0
) -> Chart | None:
    """A chart of series by name; None where no finite number is left.

    Args:
        title: Its caption.
        series: What is not finite is left out.
        ordered: See `Chart`.
        until: The least end of the horizontal axis, so that charts have the same.
    """
    kept = {name: finite(curve) for name, curve in series.items()}
    kept = {name: thinned(curve) for name, curve in kept.items() if curve}
    if not kept:
        return None
    values = [value for curve in kept.values() for _, value in curve]
    log = _spread_out(values)
    if log:
        kept = {name: [(x, math.log10(y)) for x, y in curve] for name, curve in kept.items()}
    steps = [step for curve in kept.values() for step, _ in curve]
    x = Scale(min(0.0, min(steps)), max(*steps, until) or 1.0)
    y = Scale.over(value for curve in kept.values() for _, value in curve)
    lines = [
        _line(name, curve, x, y, _colour(place, len(kept), ordered), log)
        for place, (name, curve) in enumerate(kept.items())
    ]
    ticks = _powers(y) if log else [(tick, number(tick)) for tick in y.ticks(5)]
    return Chart(
        title,
        tuple(lines),
        x,
        y,
        min(values),
        max(values),
        tuple((x.at(tick), number(tick)) for tick in x.ticks(5)),
        tuple((f"{100 - 100 * y.share(tick):.2f}%", text) for tick, text in ticks),
        log,
        ordered and len(kept) > len(COLOURS),
    )


def finite(curve: Curve) -> list[tuple[float, float]]:
    return [(x, y) for x, y in curve if math.isfinite(x) and math.isfinite(y)]


def thinned(curve: Curve, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most so many points: of each stretch the first, the least, the greatest and the last."""
    if len(curve) <= most:
        return list(curve)
    size = math.ceil(len(curve) / (most // 4))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(curve), size):
        part = range(start, min(start + size, len(curve)))
        low, high = (extreme(part, key=lambda i: curve[i][1]) for extreme in (min, max))
        kept += [curve[i] for i in sorted({part[0], low, high, part[-1]})]
    return kept


def polyline(curve: Curve, x: Scale, y: Scale) -> str:
    """Points in a drawing's units."""
    return " ".join(f"{a},{b}" for a, b in _places(curve, x, y))


def number(value: float) -> str:
    """Short, with four digits where it has more.

    >>> [number(x) for x in (0.00012345, 98.46666, 1500.0, 123456.0, -0.0)]
    ['0.0001234', '98.47', '1,500', '123,456', '0']
    """
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}".replace("e-0", "e-") if value else "0"


def _places(curve: Curve, x: Scale, y: Scale) -> list[tuple[str, str]]:
    return [(f"{WIDTH * x.share(a):.2f}", f"{HEIGHT - HEIGHT * y.share(b):.2f}") for a, b in curve]


def _line(name: str, curve: Curve, x: Scale, y: Scale, colour: str, log: bool) -> Line:
    places = _places(curve, x, y)
    marked = places if len(places) <= DOTS else []
    ends = [10**value if log else value for _, value in (curve[0], curve[-1])]
    return Line(
        name,
        " ".join(f"{a},{b}" for a, b in places),
        "".join(f"M{a} {b}h0" for a, b in marked),
        colour,
        *map(number, ends),
    )


def _colour(place: int, of: int, ordered: bool) -> str:
    if of <= len(COLOURS) and not (ordered and of > 1):
        return f"var(--{COLOURS[place]})"
    share = round(100 * place / max(1, of - 1))
    return f"color-mix(in oklch longer hue, var(--worse) {share}%, var(--better))"


def _spread_out(values: Sequence[float]) -> bool:
    """Whether few of the values, all positive, would press the others flat."""
    if min(values) <= 0:
        return False
    return max(values) > SPREAD * sorted(values)[len(values) // 2]


def _powers(y: Scale) -> list[tuple[float, str]]:
    """Ticks of a logarithmic scale."""
    whole = range(math.ceil(y.low), math.floor(y.high) + 1)
    step = math.ceil(len(whole) / 4) or 1
    return [(float(power), number(10.0**power)) for power in whole[::step]]
