"""The table of a LoadReport."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zoo import LoadReport

REPORT = LoadReport(
    source="file:x.safetensors",
    loaded=tuple(f"blocks.{i}.weight" for i in range(30)),
    resized={
        "pos_embed": "grid 14x14 -> 16x16",
        **{f"blocks.{i}.attn.table": "grid 14x14 -> 16x16" for i in range(12)},
    },
    adapted={"stem.weight": "3 input channels -> 4"},
    reinitialized={"head.weight": "5 classes in the source, 3 here"},
    missing=("a", "b"),
    unexpected=tuple(f"c{i}" for i in range(20)),
    matched_fraction=0.987,
)

TABLE = """\
file:x.safetensors: 98.7 % of the values matched
  loaded         30 tensors
  resized        pos_embed                 grid 14x14 -> 16x16
                 blocks.*.attn.table (12)  grid 14x14 -> 16x16
  adapted        stem.weight               3 input channels -> 4
  reinitialized  head.weight               5 classes in the source, 3 here
  missing        2 tensors                 a, b
  unexpected     20 tensors                c0, c1, c2, c3, c4, c5, c6, c7, ... and 12 more"""


@pytest.mark.parametrize("columns", ["20", "80", "500"])
def test_the_table_is_aligned_in_every_terminal(
    columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert str(REPORT) == TABLE


def test_layout_and_notes_are_told() -> None:
    notes = ("4 tensors cast from torch.float32 to torch.bfloat16", "a sentence " * 20)
    lines = str(replace(REPORT, layout="torchvision's ViT", notes=notes)).splitlines()
    assert lines[0].startswith("file:x.safetensors (read as torchvision's ViT): 98.7 %")
    assert lines[1:-2] == TABLE.splitlines()[1:]  # a long note makes no column wider
    assert lines[-2] == f"  note           {notes[0]}"
    assert lines[-1] == f"                 {notes[1]}".rstrip()


def test_names_are_shown_as_they_are() -> None:
    report = replace(REPORT, adapted={"[red]x[/red]:smile:": "a [b]"}, source="file:[i].pt")
    assert "[red]x[/red]:smile:" in str(report)
    assert "a [b]" in str(report)
    assert str(report).startswith("file:[i].pt: ")


def test_blocks_that_differ_have_lines_of_their_own() -> None:
    resized = {"blocks.0.table": "grid 2x2 -> 3x3", "blocks.1.table": "grid 4x4 -> 3x3"}
    text = str(replace(REPORT, resized=resized))
    assert "blocks.0.table" in text
    assert "blocks.1.table" in text
