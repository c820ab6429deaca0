"""Samples of models of pairs against ranks and captions computed another way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from crossmodal import samples
from crossmodal.data import Pairs, load_pairs
from crossmodal.evaluate import image_rows, match_ranks, text_rows
from crossmodal.generate import generate
from crossmodal.retrieval import retrieval_ranks
from crossmodal.samples import NEAREST, write_samples
from crossmodal.training import PairOptions, PairTask, build
from vision.data import Split
from zoo.surgery import evaluating

NUMBER = 20


def part(pairs: Pairs) -> Pairs:
    images = pairs.images
    assert images.pixels is not None
    few = Split(images.targets[:NUMBER], 0.0, pixels=images.pixels[:NUMBER])
    return Pairs(few, tuple((own[0], own[0] + " again") for own in pairs.captions[:NUMBER]))


@pytest.fixture(scope="module")
def data() -> Any:
    found = load_pairs("emoji")
    return replace(found, train=part(found.train), val=part(found.val))


def made(name: str, data: Any) -> tuple[Any, PairTask]:
    torch.manual_seed(0)
    options = PairOptions()
    model = build(options, name, data).train()
    return model, PairTask(model, data, options, 0)


def told(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "predictions.json").read_text())


def rows_of(model: Any, task: PairTask, tokens: bool) -> tuple[Any, Any]:
    val = task.data.val
    found = []
    with evaluating(model), torch.no_grad():
        for source, fn in (
            (task.pairs(val), image_rows(task, tokens)),
            (task.captions(val), text_rows(tokens)),
        ):
            batch = source.__getitems__([(0, i) for i in range(len(source))])
            found.append(fn(model, batch))
    return found[0], found[1]


@pytest.mark.parametrize("name", ["dual_micro", "matcher_micro"])
def test_retrievals_have_the_ranks_of_evaluation(name: str, data: Any, tmp_path: Path) -> None:
    model, task = made(name, data)
    write_samples(tmp_path, model, task, rerank=2 * NUMBER, batch_size=7)
    found = told(tmp_path)
    images, texts = rows_of(model, task, tokens=name == "matcher_micro")
    captions, owners = data.val.texts()
    if name == "dual_micro":
        ranks = retrieval_ranks(images["vector"], texts["vector"], owners)
    else:
        ranks = match_ranks(model, images, texts, data.val, k=2 * NUMBER)
    assert (found["images"], found["captions"]) == (NUMBER, 2 * NUMBER)
    by_truth = {own: i for i, own in enumerate(data.val.captions)}
    for row in found["of_images"]:
        assert row["rank"] == int(ranks["i2t"][by_truth[tuple(row["truth"])]])
        assert [each["text"] in row["truth"] for each in row["found"]] == [
            each["right"] for each in row["found"]
        ]
    for row in found["of_captions"]:
        assert row["rank"] == int(ranks["t2i"][captions.index(row["text"])])
        place = [each["right"] for each in row["found"]]
        assert place == [i + 1 == row["rank"] for i in range(NEAREST)]
    for row in (*found["of_images"], *found["of_captions"]):
        scores = [each["score"] for each in row["found"]]
        assert len(scores) == NEAREST
        assert scores == sorted(scores, reverse=True)


def test_captions_are_what_the_model_writes(data: Any, tmp_path: Path) -> None:
    model, task = made("captioner_micro", data)
    write_samples(tmp_path, model, task)
    found = told(tmp_path)
    assert found["images"] == NUMBER
    batch = task.pairs(data.val).__getitems__([(0, i) for i in range(NUMBER)])
    with evaluating(model), torch.no_grad():
        written = task.tokenizer.decode(*generate(model, task.inputs(batch)))
    by_truth = {own: i for i, own in enumerate(data.val.captions)}
    for row in found["samples"]:
        assert row["written"] == written[by_truth[tuple(row["truth"])]]
        assert not row["exact"]
        assert Image.open(tmp_path / row["image"]).size == (32, 32)


def test_training_goes_on_as_before(data: Any, tmp_path: Path) -> None:
    model, task = made("dual_micro", data)
    state, modes = torch.random.get_rng_state(), [m.training for m in model.modules()]
    write_samples(tmp_path, model, task)
    assert torch.equal(state, torch.random.get_rng_state())
    assert modes == [m.training for m in model.modules()]


def test_of_many_images_the_first_are_candidates(
    data: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(samples, "MOST", 6)
    model, task = made("dual_micro", data)
    write_samples(tmp_path, model, task)
    found = told(tmp_path)
    assert (found["images"], found["captions"]) == (6, 12)
    assert len(found["of_images"]) == len(found["of_captions"]) == 6
