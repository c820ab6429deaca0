"""Places of a chart against the numbers they came from."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zoo.pages.charts import HEIGHT, MOST_POINTS, WIDTH, Chart, Scale, chart, number, thinned


def values_of(drawn: Chart, line: int = 0) -> list[tuple[float, float]]:
    """Read back from the drawing."""
    points = [tuple(map(float, pair.split(","))) for pair in drawn.lines[line].points.split()]
    x, y = drawn.x, drawn.y
    found = [
        (x.low + a / WIDTH * (x.high - x.low), y.high - b / HEIGHT * (y.high - y.low))
        for a, b in points
    ]
    return [(a, 10**b if drawn.log else b) for a, b in found]


@pytest.mark.parametrize("top", [3.0, 3000.0])
def test_points_are_where_their_numbers_are(top: float) -> None:
    curve = [(20.0, 2.0), (40.0, top), (60.0, 2.5), (80.0, 2.25)]
    drawn = chart("loss", {"train": curve})
    assert drawn is not None
    assert drawn.log == (top > 100)
    np.testing.assert_allclose(values_of(drawn), curve, rtol=0.01)
    assert drawn.x_ticks[0] == ("0.00%", "0")


def test_ticks_stand_at_their_numbers() -> None:
    drawn = chart("x", {"a": [(0.0, -3.0), (900.0, 12.0)]})
    assert drawn is not None
    for place, text in drawn.y_ticks:
        share = 1 - float(place.rstrip("%")) / 100
        assert drawn.y.low + share * (drawn.y.high - drawn.y.low) == pytest.approx(
            float(text), abs=0.01
        )


@pytest.mark.parametrize("seed", range(20))
def test_ticks_are_few_and_inside(seed: int) -> None:
    low, size = np.random.default_rng(seed).normal(size=2) * 10.0 ** (seed - 10)
    scale = Scale(low, low + abs(size))
    for most in (4, 6):
        ticks = scale.ticks(most)
        assert 1 <= len(ticks) <= most + 1
        assert all(scale.low - 1e-9 * abs(size) <= tick <= scale.high * 1.000001 for tick in ticks)


@pytest.mark.parametrize("top", [3.0, 3000.0])
def test_least_and_greatest_are_those_of_the_numbers(top: float) -> None:
    drawn = chart("x", {"a": [(1.0, 2.0), (2.0, top), (3.0, 2.5)], "b": [(1.0, 1.5), (2.0, 2.0)]})
    assert drawn is not None
    assert (drawn.least, drawn.greatest, drawn.lone) == (1.5, top, False)
    still = chart("x", {"a": [(1.0, 0.0)], "b": [(1.0, 0.0)]})
    assert still is not None
    assert (still.least, still.greatest, still.lone) == (0.0, 0.0, True)


def test_what_is_not_finite_is_left_out() -> None:
    curve = [(1.0, math.nan), (2.0, 1.0), (3.0, math.inf), (4.0, 2.0)]
    drawn = chart("x", {"a": curve, "b": [(1.0, math.nan)]})
    assert drawn is not None
    assert [line.name for line in drawn.lines] == ["a"]
    assert len(values_of(drawn)) == 2
    assert chart("x", {"b": [(1.0, math.nan)]}) is None
    assert chart("x", {}) is None


def test_one_point_is_seen() -> None:
    drawn = chart("x", {"a": [(7.0, 5.0)]})
    assert drawn is not None
    assert drawn.lines[0].dots == f"M{drawn.lines[0].points.replace(',', ' ')}h0"


def test_long_series_keep_their_extremes_and_ends() -> None:
    values = np.random.default_rng(0).normal(size=100_000)
    values[54_321], values[12_345] = 50, -50
    curve = list(enumerate(values.tolist()))
    short = thinned(curve)
    assert len(short) <= MOST_POINTS + 4
    assert {curve[0], curve[-1], (54_321, 50.0), (12_345, -50.0)} <= set(short)
    assert [x for x, _ in short] == sorted(x for x, _ in short)
    assert thinned(curve[:100]) == curve[:100]


def test_charts_share_an_end_and_layers_have_their_own_colours() -> None:
    lines = {f"layer{i}": [(1.0, float(i)), (2.0, i + 1.0)] for i in range(12)}
    drawn = chart("x", lines, ordered=True, until=50)
    assert drawn is not None
    assert drawn.x.high == 50
    assert len({line.colour for line in drawn.lines}) == 12
    assert "layer3 from 3 to 4" in drawn.told


def test_numbers_are_short() -> None:
    assert [number(x) for x in (0.1 + 0.2, 1e-5, 2e7)] == ["0.3", "1e-5", "20,000,000"]
