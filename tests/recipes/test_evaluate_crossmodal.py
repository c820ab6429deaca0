"""Evaluates small models on a file of pairs, against numbers computed here from their outputs."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import binomtest

import zoo
from crossmodal.data import load_pairs
from crossmodal.generate import generate
from crossmodal.training import PairOptions, PairTask
from recipes.evaluate_crossmodal import Config, main

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"text_tower": "text_bag", "tokenizer": "bytes", "context_length": 64, "embed_dim": 16}
EVALUATED = {"rerank": 8, "rerank_similarity": True, "beams": 2}
WORDS = ["red", "green", "blue", "one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("evaluate")


@pytest.fixture(scope="module")
def data(folder) -> str:
    """30 images to validate on, every third with two captions, and 12 others."""
    rng, lines = np.random.default_rng(0), []
    for index in range(42):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(folder / f"{index}.png")
        captions = [" ".join(rng.choice(WORDS, 1 + index % 5)) + f" {index}"]
        captions += [f"number {index}"] if index % 3 == 0 else []
        split = "val" if index < 30 else "train"
        lines.append({"image": f"{index}.png", "caption": captions, "split": split})
    file = folder / "pairs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"pairs:{file}"


def make_run(folder: Path, data: str, name: str, seed: int = 0, **options) -> Path:
    """A run folder as training leaves it, of an untrained model."""
    torch.manual_seed(seed)
    zoo.save_pretrained(zoo.create_model(name, **options), folder / "model")
    flags = {
        field.name: getattr(PairOptions(data=data), field.name) for field in fields(PairOptions)
    }
    (folder / "config.json").write_text(json.dumps({"options": {**flags, **EVALUATED}}))
    return folder


@pytest.fixture(scope="module")
def dual(folder, data) -> Path:
    return make_run(folder / "dual", data, "dual_micro", **SMALL)


@pytest.fixture(scope="module")
def matcher(folder, data) -> Path:
    options = {"fusion_dim": 32, "fusion_depth": 1, "gated": False}
    return make_run(folder / "matcher", data, "matcher_micro", 1, **SMALL, **options)


@pytest.fixture(scope="module")
def captioner(folder, data) -> Path:
    return make_run(folder / "captioner", data, "captioner_micro", context_length=40, dim=32)


def encoded(run: Path, data: str):
    """Similarities (images captions), and each caption's image, one model call a part."""
    model = zoo.create_model(f"local-dir:{run / 'model'}").eval()
    pairs = load_pairs(data).val
    task = PairTask(model, load_pairs(data), PairOptions(data=data), 0)
    images, (texts, owners) = task.pairs(pairs), pairs.texts()
    batch = images.__getitems__([(0, index) for index in range(len(pairs))])
    with torch.no_grad():
        image = model.encode_image(task.inputs(batch)).double()
        text = model.encode_text(*task.tokenizer(texts)).double()
    return model, (image @ text.T).numpy(), owners.numpy()


def plain_ranks(scores: np.ndarray, right: np.ndarray) -> np.ndarray:
    """One loop a query: the irrelevant candidates before the best relevant one."""
    return np.array([1 + np.sum(s[~r] >= s[r].max()) for s, r in zip(scores, right, strict=True)])


def wilson(hits: int, n: int) -> tuple[float, float]:
    z, p = 1.959963984540054, hits / n
    centre, spread = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return 100 * (centre - spread) / (1 + z * z / n), 100 * (centre + spread) / (1 + z * z / n)


def expected_ranks(run: Path, data: str) -> dict[str, np.ndarray]:
    _, scores, owners = encoded(run, data)
    right = np.arange(len(scores))[:, None] == owners
    return {"i2t": plain_ranks(scores, right), "t2i": plain_ranks(scores.T, right.T)}


def test_recall_of_a_dual_encoder_and_its_intervals(dual, data, capsys):
    report = main(Config(model=str(dual), batch_size=7))
    for way, ranks in expected_ranks(dual, data).items():
        assert report["metrics"][f"val/{way}_median_rank"] == np.median(ranks)
        for k in (1, 5, 10):
            name = f"val/{way}_recall@{k}"
            assert report["metrics"][name] == pytest.approx(100 * np.mean(ranks <= k))
            low, high = wilson(int(np.sum(ranks <= k)), len(ranks))
            assert report["intervals"][name] == pytest.approx((low, high), abs=1e-6)
    assert (report["images"], report["captions"]) == (30, 40)
    assert "95 % interval" in capsys.readouterr().out


def test_two_models_are_compared_on_the_same_queries(dual, matcher, data, folder, capsys):
    other = make_run(folder / "other", data, "dual_micro", 5, **SMALL)
    report = main(Config(model=str(dual), compare=str(other)))
    first, second = expected_ranks(dual, data), expected_ranks(other, data)
    for way in ("i2t", "t2i"):
        found = report["compared"]["differences"][f"val/{way}_recall@5"]
        a, b = first[way] <= 5, second[way] <= 5
        assert found["difference"] == pytest.approx(100 * (a.mean() - b.mean()))
        assert (found["only_first"], found["only_second"]) == (sum(a & ~b), sum(b & ~a))
        p_value = binomtest(int(sum(a & ~b)), int(sum(a ^ b))).pvalue
        assert found["p_value"] == pytest.approx(p_value)
        assert found["low"] <= found["difference"] <= found["high"]
    assert "McNemar" in capsys.readouterr().out


def test_a_run_is_compared_with_its_own_best_checkpoint(dual, data, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(dual, run)
    other = zoo.create_model(f"local-dir:{run / 'model'}")
    for parameter in other.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    position = {"epoch": 1, "step": 9, "update": 0, "best": 1.0, "best_epoch": 1}
    state = {"model": other.state_dict(), "ema": None, "position": position, "metrics": {}}
    (run / "checkpoints").mkdir()
    torch.save(state, run / "checkpoints" / "best.pt")
    report = main(Config(model=str(run), compare=str(run), compare_checkpoint="best"))
    assert report["model"] == str(run)
    assert report["compared"]["with"] == f"{run} (best)"
    best = main(Config(model=str(run), checkpoint="best"))
    assert best["model"] == f"{run} (best)"
    assert best["metrics"] == report["compared"]["metrics"] != report["metrics"]


@pytest.mark.parametrize("similarity", [True, False])
def test_a_matcher_is_measured_before_and_after(matcher, data, similarity):
    """The eight nearest, as its run has it, reordered by the matcher."""
    report = main(Config(model=str(matcher), rerank_similarity=similarity))
    model, scores, owners = encoded(matcher, data)
    before = expected_ranks(matcher, data)["t2i"]
    pairs = load_pairs(data).val
    task = PairTask(model, load_pairs(data), PairOptions(data=data), 0)
    batch = task.pairs(pairs).__getitems__([(0, index) for index in range(len(pairs))])
    after = []
    with torch.no_grad():
        image = model.image_tower(task.inputs(batch))
        text = model.text_tower(*task.tokenizer(pairs.texts()[0]))
        for caption, owner in enumerate(owners):
            nearest = list(np.argsort(-scores[:, caption])[:8])
            if owner not in nearest:
                after.append(before[caption])
                continue
            rows = image._replace(tokens=image.tokens[nearest], pooled=image.pooled[nearest])
            same = torch.full((8,), caption)
            words = text._replace(
                tokens=text.tokens[same], pooled=text.pooled[same], mask=text.mask[same]
            )
            odds = model.match(rows, words).double()
            if similarity:
                odds += model.logit_scale.exp() * scores[nearest, caption]
            after.append(1 + int((odds > odds[nearest.index(owner)]).sum()))
    after = np.array(after)
    for k in (1, 5, 10):
        now, then = 100 * np.mean(after <= k), 100 * np.mean(before <= k)
        assert report["metrics"][f"val/t2i_recall@{k}"] == pytest.approx(now)
        assert report["metrics"][f"val/dual_t2i_recall@{k}"] == pytest.approx(then)
        changed = report["matching"][f"val/t2i_recall@{k}"]["difference"]
        assert changed == pytest.approx(now - then)
    assert not np.array_equal(before, after)


def test_zero_shot_classes_by_the_mean_of_their_templates(dual, data):
    templates = ("{}", "a drawn {}")
    flags = {"model": f"local-dir:{dual / 'model'}", "data": data, "templates": templates}
    found = main(Config(**flags, zero_shot="digits"))["zero_shot"]
    model, *_ = encoded(dual, data)
    from vision import load_dataset, make_source
    from zoo.preprocess import normalize

    val, preprocessing = load_dataset("digits").val, model.card.preprocessing
    source = make_source(val, preprocessing, train=False)
    batch = source.__getitems__([(0, index) for index in range(len(val))])
    with torch.no_grad():
        image = model.encode_image(normalize(batch["images"], preprocessing))
        texts = [model.encode_text(*model.make_tokenizer()([str(i), f"a drawn {i}"])).mean(0)
                 for i in range(10)]  # fmt: skip
        classes = torch.nn.functional.normalize(torch.stack(texts), dim=-1)
    guessed = (image @ classes.T).argmax(1)
    hits = guessed == batch["targets"]
    assert found["metrics"]["top1"] == pytest.approx(100 * hits.float().mean().item())
    for i, row in enumerate(found["classes"]):
        assert (row["name"], row["n"]) == (str(i), int((batch["targets"] == i).sum()))
        assert row["recall"] == pytest.approx(100 * hits[batch["targets"] == i].float().mean())


def test_zero_shot_on_emoji_takes_the_part_that_is_evaluated(dual):
    flags = {"model": f"local-dir:{dual / 'model'}", "data": "emoji", "zero_shot": "emoji"}
    report = main(Config(**flags))
    assert report["zero_shot"]["metrics"]["n"] == report["images"] == len(load_pairs("emoji").val)


def test_captions_are_scored_by_length_and_shown(captioner, data, capsys):
    report = main(Config(model=str(captioner)))
    pairs = load_pairs(data).val
    assert sum(row["n"] for row in report["by_length"]) == len(pairs)
    assert [row["shortest"] for row in report["by_length"]] == [2, 3, 4, 6]
    for name in ("bleu4", "chrf", "exact", "token_accuracy", "loss"):
        assert report["metrics"][f"val/{name}"] >= 0
    model = zoo.create_model(f"local-dir:{captioner / 'model'}")
    task = PairTask(model, load_pairs(data), PairOptions(data=data), 0)
    indices = list(range(0, 30, 3))
    batch = task.pairs(pairs).__getitems__([(0, index) for index in indices])
    ids, mask = generate(model, task.inputs(batch), method="beam", num_beams=2)
    assert [x["written"] for x in report["samples"]] == task.tokenizer.decode(ids, mask)
    assert [x["references"] for x in report["samples"]] == [
        list(pairs.captions[i]) for i in indices
    ]
    assert pairs.captions[27][0] in capsys.readouterr().out


def test_a_registered_name_with_weights_and_a_whole_file(dual, data, folder, tmp_path):
    """Without splits, and all of it."""
    lines = [json.loads(x) for x in (folder / "pairs.jsonl").read_text().splitlines()]
    for line in lines:
        line["image"], line["text"] = str(folder / line["image"]), line.pop("caption")
        del line["split"]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def dual_with_weights(**options):
        return zoo.create_model("dual_micro", **{**SMALL, **options})

    zoo.register_model(dual_with_weights, weights=f"local-dir:{dual / 'model'}")
    flags = {"model": "dual_with_weights", "data": f"pairs:{file}", "caption_column": "text"}
    report = main(Config(**flags, val_share=1.0, out=str(tmp_path / "new/report.json")))
    assert (report["images"], report["captions"]) == (42, 56)
    saved = json.loads((tmp_path / "new/report.json").read_text())
    assert saved["metrics"] == report["metrics"]
    own = main(Config(model=str(dual)))["metrics"]
    assert own["val/t2i_median_rank"] < report["metrics"]["val/t2i_median_rank"]


def test_two_processes_count_each_pair_once(matcher, tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words += [str(ROOT / "recipes/evaluate_crossmodal.py"), "--model", str(matcher)]
    words += ["--batch-size", "7", "--out", str(tmp_path / "report.json")]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("ACCELERATE_")}
    environ |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *words], env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["metrics"] == main(Config(model=str(matcher)))["metrics"]
    assert done.stdout.count("matching less dual encoder") == 1


def test_what_cannot_be_followed_is_named(dual, captioner, data, folder, tmp_path):
    local = f"local-dir:{dual / 'model'}"
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps({"image": str(folder / "1.png"), "caption": "alone"}) + "\n")
    zoo.save_pretrained(zoo.create_model("vit_micro_patch4_32"), tmp_path / "vit")
    cases = [
        ({"model": local}, "--data is needed with --model local-dir:"),
        ({"model": str(tmp_path)}, "run folder with a trained model: it has no model/model.json"),
        ({"model": str(tmp_path / "no")}, "run folder with a trained model: no such folder"),
        ({"model": str(dual / "model")}, "did you mean local-dir:"),
        ({"model": "dual_micr"}, "dual_micro"),
        ({"model": f"local-dir:{tmp_path / 'vit'}", "data": data}, "is a VisionTransformer"),
        ({"model": str(captioner), "compare": str(dual)}, "--compare is for a DualEncoder"),
        ({"model": str(dual), "compare_checkpoint": "best"}, "best needs --compare RUN"),
        ({"model": str(dual), "checkpoint": "best"}, "--checkpoint best is none of"),
        ({"model": str(captioner), "zero_shot": "digits"}, "--zero-shot is for a DualEncoder"),
        ({"model": str(dual), "rerank": 4}, "--rerank is for a Matcher"),
        ({"model": str(dual), "beams": 4}, "--beams is for a Captioner"),
        ({"model": str(dual), "part": "style"}, "--part style: pairs:"),
        ({"model": str(dual), "compare": str(captioner)}, "must be a DualEncoder"),
        ({"model": local, "data": f"pairs:{one}", "val_share": 1.0}, "recall needs 2 candidates"),
        ({"model": str(dual), "zero_shot": "digit"}, "did you mean digits?"),
    ]
    for flags, message in cases:
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            main(Config(**flags))
        assert message in str(error.value), flags
