"""What training of pairs refuses before it starts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import zoo
from crossmodal.data import load_pairs
from crossmodal.training import PairOptions, PairTask, check_validation


def test_data_without_training_pairs_is_refused():
    data = SimpleNamespace(name="pairs:a.jsonl", train=(), val=(1, 2, 3))
    with pytest.raises(ValueError, match=r"pairs:a.jsonl has no training pairs.*--val-share"):
        check_validation(data, least=2)


def test_sources_of_evaluation_are_made_once():
    """Each evaluation of a run reads the same images and captions."""
    data = load_pairs("strips:2")
    tower = {"image_tower": "vit_micro_patch4_32", "img_size": (8, 16), "in_chans": 1}
    model = zoo.create_model("dual_micro", tokenizer="bytes", **tower)
    task = PairTask(model, data, PairOptions(), seed=0)
    assert task.pairs(data.val) is task.pairs(data.val)
    assert task.captions(data.val) is task.captions(data.val)
    assert len(task.pairs(data.train)) == len(data.train) != len(task.pairs(data.val))
