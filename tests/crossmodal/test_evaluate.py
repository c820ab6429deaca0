"""Captions are scored against whole references."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from crossmodal.data import Pairs
from crossmodal.evaluate import caption_references, score_captions
from crossmodal.tokenizer import create_tokenizer
from vision.data import Split


def test_references_are_whole_where_the_context_cuts_captions():
    pytest.importorskip("sacrebleu")
    images = Split(torch.zeros(2, dtype=torch.int64), 0.0, pixels=torch.zeros(2, 4, 4, 3).numpy())
    pairs = Pairs(images, (("green right", "right"), ("blue left",)))
    task = SimpleNamespace(tokenizer=create_tokenizer("bytes", 8))
    assert caption_references(task, pairs) == [["green right", "right"], ["blue left"]]
    ids, mask = task.tokenizer(["green right", "blue left"])
    count, n = torch.zeros(2), mask.sum(1)
    rows = {"written": ids, "length": n, "loss": count, "hits": n, "tokens": n}
    assert score_captions(task, rows, pairs)["exact"] == 0  # "green " and "blue l" are written
