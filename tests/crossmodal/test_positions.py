from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import crossmodal.probe
from crossmodal import caption_scores, load_pairs
from crossmodal.positions import PROFILES, Point, by_cell, by_word, draw, measure, profile_of


def test_words_are_right_where_they_stand():
    right = ["one two three", "four five six", "seven eight nine"]
    written = ["one two four", "five four six seven", "seven"]
    places = by_word(written, right)
    assert [place.name for place in places] == ["1", "2", "3"]
    assert [place.n for place in places] == [3, 3, 3]
    assert [place.scores["accuracy"] for place in places] == pytest.approx(
        [100 * 2 / 3, 100 / 3, 100 / 3]
    )


def test_places_that_a_caption_does_not_have_do_not_count():
    places = by_word(["one", "one nine"], ["one two", "one"])
    assert [(place.n, place.scores["accuracy"]) for place in places] == [(2, 100.0), (1, 0.0)]


def test_the_whole_caption_counts_by_cell():
    position = torch.tensor([2, 0, 2, 2])
    written = ["one", "two", "three four", " five "]
    places = by_cell(written, ["one", "one", "three", "five"], position)
    assert [(place.name, place.n) for place in places] == [("1", 1), ("3", 3)]
    assert [place.scores["accuracy"] for place in places] == pytest.approx([0.0, 200 / 3])


@pytest.mark.parametrize(("spec", "share"), [("needle:3", 3), ("strips:3", 1)])
def test_probes_are_measured_where_their_pairs_say(spec, share, monkeypatch):
    """A writer that knows the first cell alone is right there, and only there."""
    monkeypatch.setattr(crossmodal.probe, "SAMPLES", {"train": 6, "val": 60})
    pairs = load_pairs(spec).val
    references = [list(texts) for texts in pairs.captions]
    if pairs.position is not None:
        first = (pairs.position == 0).tolist()
        written = [own[0] if known else "?" for own, known in zip(references, first, strict=True)]
    else:
        written = [own[0].split()[0] for own in references]
    places = measure(profile_of(spec), written, references, pairs)
    assert [place.name for place in places] == ["1", "2", "3"]
    assert [place.n for place in places] == [60 // share] * 3
    assert [place.scores["accuracy"] for place in places] == [100.0, 0.0, 0.0]


def test_lengths_are_scored_bin_by_bin(monkeypatch):
    monkeypatch.setattr(crossmodal.probe, "SAMPLES", {"train": 2, "val": 2})
    pairs = load_pairs("strips:1").val  # not read by length
    short = (["red face", "blue hat"], [["red face"], ["red hat"]])
    longer = (["a cat with wry smile"], [["cat with a wry smile"]])
    places = measure("length", short[0] + longer[0], short[1] + longer[1], pairs)
    assert [(place.name, place.n) for place in places] == [("2", 2), ("4-5", 1)]
    for place, part in zip(places, (short, longer), strict=True):
        expected = caption_scores(*part)
        assert place.scores["chrf"] == pytest.approx(expected["chrf"])
        assert place.scores["exact"] == pytest.approx(expected["exact"])
    assert measure("length", [" ".join("a" * 14)], [["b " * 14]], pairs)[0].name == "13+"


def test_a_data_set_has_the_profile_it_is_made_for():
    specs = {
        "emoji": "length",
        "pairs:strips.csv": "length",
        "strips:4": "word",
        "needle:4": "cell",
    }
    assert {spec: profile_of(spec) for spec in specs} == specs
    assert set(specs.values()) == set(PROFILES)


def test_mistaken_input_is_named(monkeypatch):
    with pytest.raises(ValueError, match=r"hypotheses \(1\) and references \(2\)"):
        by_word(["one"], ["one", "two"])
    with pytest.raises(ValueError, match=r"references \(0\)"):
        by_cell([], [], torch.zeros(0))
    with pytest.raises(ValueError, match=r"position \(1,\) must be one cell"):
        by_cell(["one"] * 2, ["one"] * 2, torch.zeros(1))
    monkeypatch.setattr(crossmodal.probe, "SAMPLES", {"train": 2, "val": 2})
    pairs = load_pairs("strips:2").val
    with pytest.raises(ValueError, match="no positions"):
        measure("cell", ["one"] * 2, [["one"]] * 2, pairs)


def point(name: str, n: int, mean: float, spread: float | None) -> Point:
    low, high = (None, None) if spread is None else (mean - spread, mean + spread)
    return Point(name, n, mean, low, high, (mean - 1, mean + 1))


def test_the_figure_shows_every_model_and_its_intervals():
    models = {
        "lstm_fixed": [point("1", 50, 40.0, 5.0), point("2", 50, 20.0, None)],
        "transformer": [point("1", 50, 90.0, 2.0), point("2", 50, 85.0, 3.0)],
    }
    figure = draw(models, "word", "strips:2, 3 epochs")
    assert figure.get_suptitle() == "Accuracy by the place of the word\nstrips:2, 3 epochs"
    axes = figure.axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert list(lines["chance"].get_ydata()) == [10.0, 10.0]
    assert list(lines["lstm_fixed"].get_ydata()) == [40.0, 20.0]
    assert list(lines["transformer"].get_ydata()) == [90.0, 85.0]
    bars = [tuple(line.get_ydata()) for line in axes.lines if line.get_label().startswith("_")]
    assert bars == [(35.0, 45.0), (88.0, 92.0), (82.0, 88.0)], "no interval, no bar"
    assert "n = 50 each" in axes.get_xlabel()


def test_bins_of_other_sizes_say_how_many_captions_they_hold():
    models = {"lstm_fixed": [point("1", 93, 20.0, 5.0), point("13+", 1, 10.0, None)]}
    axes = draw(models, "length", "emoji").axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["1\nn = 93", "13+\nn = 1"]
    assert "chance" not in [line.get_label() for line in axes.lines]
    assert axes.get_ylabel() == "chrf, %"


def test_reading_places_needs_no_matplotlib():
    code = "import sys, crossmodal.positions; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
