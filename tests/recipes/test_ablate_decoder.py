from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

import crossmodal.probe
import zoo
from crossmodal import generate
from crossmodal.captioner import DECODERS
from crossmodal.positions import Place
from recipes import ablate_decoder
from recipes.ablate_decoder import Config, main
from zoo.diagnostics.cost import count_flops
from zoo.preprocess import normalize

WORDS = ["red", "green", "blue"]


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """Twelve images; a validation caption has one, two or four words."""
    rows = ["image,caption,split"]
    for i in range(12):
        pixels = np.full((16, 16, 3), 20 * i, dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        caption = " ".join((WORDS * 2)[: (1, 2, 4)[i % 3]])
        rows.append(f"{i}.png,{caption},{'val' if i < 6 else 'train'}")
    file = tmp_path / "pairs.csv"
    file.write_text("\n".join(rows))
    return file


def test_decoders_are_compared_and_scored_by_length(tmp_path, pairs_file, capsys):
    out = tmp_path / "ablation"
    config = Config(
        out=str(out),
        data=f"pairs:{pairs_file}",
        img_size=16,
        seeds=1,
        epochs=1,
        batch_size=8,
        context_length=24,
    )
    assert main(replace(config, plan=True)) is None
    planned = capsys.readouterr().out
    assert "3 cells" in planned
    assert "lstm_fixed (baseline)" in planned
    assert not out.exists()
    main(config)
    results = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in results] == list(DECODERS)
    with (out / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    for column in ("parameters", "MFLOPs a pair", "peak MiB in training", "training steps/s"):
        assert all(float(row[column]) > 0 for row in table)
    assert all(float(row["ms to write 6 captions"]) > 0 for row in table)
    with (out / "lengths.csv").open() as file:
        lengths = [row for row in csv.DictReader(file) if row["score"] == "chrf"]
    assert [(row["variant"], row["place"], row["captions"]) for row in lengths] == [
        (name, place, "2") for name in DECODERS for place in ("1", "2", "4-5")
    ]
    assert (out / "lengths.png").stat().st_size > 10_000
    assert "Score by caption length" in (out / "report.html").read_text()


@pytest.mark.parametrize("spec", ["strips:2", "needle:2"])
def test_a_profile_is_of_what_the_model_writes_about_each_image(spec, monkeypatch):
    monkeypatch.setattr(crossmodal.probe, "SAMPLES", {"train": 4, "val": 20})
    config = Config(out="nowhere", data=spec, batch_size=4, context_length=14)
    data = config.load()
    torch.manual_seed(0)
    model = zoo.create_model("captioner_micro", **config.model_options(data))
    learn(model, data.val)
    places = ablate_decoder.profile(model, config, data)
    tokenizer, hits = model.make_tokenizer(), {"1": [], "2": []}
    pixels = torch.from_numpy(data.val.images.pixels)[:, None]
    for i, (right,) in enumerate(data.val.captions):
        image = normalize(pixels[i : i + 1], model.card.preprocessing)
        written = tokenizer.decode(*generate(model, image))[0]
        if data.val.position is None:
            for place, word in enumerate(right.split()):
                hits[str(place + 1)].append([*written.split(), "", ""][place] == word)
        else:
            hits[str(int(data.val.position[i]) + 1)].append(written == right)
    assert {place.name: place.n for place in places} == {k: len(v) for k, v in hits.items()}
    found = {place.name: place.scores["accuracy"] for place in places}
    assert found == pytest.approx({name: 100 * np.mean(each) for name, each in hits.items()})
    assert 0 < sum(found.values()) < 200, "some right, some wrong: else nothing is told apart"


def learn(model: torch.nn.Module, pairs: crossmodal.data.Pairs) -> None:
    """A few of the captions, so that some are right."""
    tokens, mask = model.make_tokenizer()([texts[0] for texts in pairs.captions[:8]])
    pixels = torch.from_numpy(pairs.images.pixels)[:8, None]
    images = normalize(pixels, model.card.preprocessing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(40):
        optimizer.zero_grad()
        ablate_decoder.caption_loss(model(images, tokens, mask), tokens, mask).backward()
        optimizer.step()


def test_places_are_averaged_over_seeds_with_intervals():
    values = {"lstm_fixed": (10.0, 20.0, 60.0), "transformer": (80.0, 80.0, 80.0)}
    profiles = {
        name: {seed: [Place("1", 9, {"accuracy": x})] for seed, x in enumerate(each)}
        for name, each in values.items()
    }
    rows = list(csv.DictReader(ablate_decoder.as_csv(profiles).splitlines()))
    assert [row["variant"] for row in rows] == list(values)
    low, high = stats.t.interval(0.95, 2, loc=30, scale=stats.sem(values["lstm_fixed"]))
    assert [float(rows[0][name]) for name in ("mean", "low", "high")] == pytest.approx(
        [30.0, low, high]
    )
    assert [float(rows[0][f"seed {seed}"]) for seed in range(3)] == [10.0, 20.0, 60.0]
    assert rows[1]["mean"] == "80.0"
    assert rows[1]["low"] == "", "no spread, no interval"
    (point,) = ablate_decoder.curves(profiles, "accuracy")["lstm_fixed"]
    assert point.seeds == values["lstm_fixed"]
    assert point.n == 9


def test_operations_of_a_recurrent_decoder_are_counted():
    """torch counts none of its fused LSTM; its definition has eight matrix products a layer."""
    b, n, dim, depth = 3, 5, 16, 2
    model = zoo.create_model(
        "captioner_micro", decoder="lstm_fixed", dim=dim, depth=depth, img_size=16
    )
    images, tokens = torch.randn(b, 3, 16, 16), torch.ones(b, n + 1, dtype=torch.long)
    batch = {"images": images, "tokens": tokens, "mask": tokens > 0}
    first = 2 * b * model.image_tower.pooled_features * 2 * depth * dim
    lstm = 2 * b * n * depth * 8 * dim * dim
    output = 2 * b * n * (dim * dim + dim * model.decoder.vocab_size)
    tower = count_flops(model.image_tower, images)
    assert ablate_decoder.flops(model, batch) == tower + first + lstm + output
    assert model.decoder.token_embed.weight.dtype == torch.float32, "the model stays as it was"


def test_defaults_suit_the_data():
    emoji, strips = (Config(out="x", data=data) for data in ("emoji", "strips:8"))
    assert (emoji.model, emoji.spatial) == ("captioner_micro", "auto")
    assert (strips.model, strips.spatial) == ("captioner_probe", "none")
    given = Config(out="x", data="strips:8", model="captioner_micro", epochs=7)
    assert (given.model, given.epochs, given.eval_every) == ("captioner_micro", 7, 7)
    plan = ablate_decoder.make_plan(strips)
    assert plan.metric == "val/exact"
    assert ablate_decoder.make_plan(emoji).metric == "val/chrf"
    assert plan.flags["spatial"] == "none"
    assert plan.flags["data"] == "strips:8"
    with pytest.raises(ValueError, match="epochs"):
        Config(out="x", epochs=-1)
