"""Pairs of the emoji, their two held-out parts, and the sources of batches."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import crossmodal.openmoji
from crossmodal.data import (
    NUM_UNSEEN,
    First,
    Pairs,
    load_pairs,
    make_caption_source,
    make_pair_source,
    trim,
)
from crossmodal.tokenizer import create_tokenizer
from vision.augment import Augment
from vision.data import Split, load_dataset
from vision.emoji import CATEGORIES, load_emoji
from zoo.card import Preprocessing

PRE = Preprocessing(size=(8, 8))
BYTES = create_tokenizer("bytes")
CAPTIONS = (("one",), ("two", "a second one", "deux"), ("three", "trois"), ("four",))


@pytest.fixture(autouse=True)
def _one_style(monkeypatch):
    """Without the second style, which test_openmoji.py looks at."""
    monkeypatch.setattr(crossmodal.openmoji, "font_file", lambda: None)


def pairs(captions=CAPTIONS) -> Pairs:
    n = len(captions)
    pixels = np.random.default_rng(0).integers(0, 256, (n, 8, 8, 3), np.uint8)
    return Pairs(Split(torch.zeros(n, dtype=torch.int64), 0.0, pixels=pixels), captions)


def keys(epoch: int, *ids: int) -> list[tuple[int, int]]:
    return [(epoch, i) for i in ids]


# --- emoji


def test_277_names_are_unseen():
    data = load_pairs("emoji")
    assert (len(data.train), len(data.val)) == (1636 - NUM_UNSEEN, NUM_UNSEEN)
    assert not set(data.train.captions) & set(data.val.captions)
    names = [caption for (caption,) in data.train.captions + data.val.captions]
    assert len(set(names)) == 1636
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    assert {name for (name,) in data.val.captions} == set(sorted(names, key=digest.get)[:277])


def test_the_bases_are_split_as_for_classification():
    data, classes = load_pairs("emoji:bases"), load_dataset("emoji")
    assert (data.in_chans, data.size, data.class_names) == (3, (32, 32), CATEGORIES)
    for part, split in ((data.train, classes.train), (data.val, classes.val)):
        assert np.array_equal(part.images.pixels, split.pixels)
        assert torch.equal(part.images.targets, split.targets)
    assert data.report == {
        "train": 1308,
        "val": 328,
        "train_captions": 1308,
        "val_captions": 328,
        "skipped": 0,
    }
    assert data.extra == {}
    emoji = load_emoji()
    name_of = {pixels.tobytes(): emoji.captions["en"][i] for i, pixels in enumerate(emoji.on())}
    for part in (data.train, data.val):
        named = [name_of[pixels.tobytes()] for pixels in part.images.pixels]
        same = np.mean([texts == (name,) for texts, name in zip(part.captions, named, strict=True)])
        assert same > 0.99, "some drawings are equal (families); all others have their own name"
    assert not set(data.train.captions) & set(data.val.captions)


def test_captions_come_in_the_languages_asked_for():
    emoji, data = load_emoji(), load_pairs("emoji", languages=("de", "en", "fr"))
    i = emoji.captions["en"].index("camel")
    (found,) = [texts for texts in data.train.captions + data.val.captions if "camel" in texts]
    assert found == tuple(emoji.captions[language][i] for language in ("de", "en", "fr"))
    both = [texts for texts in data.train.captions if len(texts) < 3]
    assert both, "a name that two languages share is one caption"
    assert all(len(set(texts)) == len(texts) for texts in data.train.captions)


@pytest.mark.parametrize("languages", [(), ("en", "xx"), "en"])
def test_languages_must_be_known(languages):
    with pytest.raises(ValueError, match=r"languages .* must be some of ar, de, en"):
        load_pairs("emoji", languages=languages)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("emojis", {}, "unknown pairs 'emojis': valid are emoji, .*did you mean emoji\\?"),
        ("stripes:3", {}, "did you mean strips:N\\?"),
        ("pairs:", {}, "what follows the colon is missing"),
        ("strips", {}, "what follows the colon is missing"),
        ("emoji:2", {}, "unknown pairs 'emoji:2'"),
        ("emoji", {"val": "pairs:x.csv"}, "emoji has a validation part of its own"),
        ("emoji", {"val_share": 1.5}, r"val_share \(1.5\) must lie in"),
        ("emoji", {"bad_rows": "keep"}, "'stop' or 'skip'"),
        ("pairs:a.csv", {"val": "emoji"}, "no file a.csv"),
    ],
)
def test_unknown_specs_and_options_are_refused(spec, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_pairs(spec, **options)


def test_a_file_or_folder_gets_a_hint(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "a.tar").write_text("")
    for path, kind in (("a.jsonl", "pairs"), ("a.tar", "wds"), ("", "hf")):
        with pytest.raises(ValueError, match=rf"did you mean {kind}:.*{path}\?"):
            load_pairs(str(tmp_path / path))


# --- pairs


def test_pairs_must_have_a_caption_for_each_image():
    with pytest.raises(ValueError, match="4 images have 1 caption lists"):
        Pairs(pairs().images, CAPTIONS[:1])
    with pytest.raises(ValueError, match="image 2 has no caption"):
        Pairs(pairs().images, (("a",), ("b",), (), ("c",)))


def test_texts_are_all_captions_with_their_images():
    texts, image_of_text = pairs().texts()
    assert len(pairs()) == 4
    assert texts == ["one", "two", "a second one", "deux", "three", "trois", "four"]
    assert image_of_text.tolist() == [0, 1, 1, 1, 2, 2, 3]


# --- sources


def test_evaluation_gives_the_first_caption_and_the_image_as_it_is():
    source = make_pair_source(pairs(), PRE, BYTES, train=False)
    assert len(source) == 4
    for epoch in (0, 1):
        batch = source.__getitems__(keys(epoch, 2, 0, 1))
        assert BYTES.decode(batch["tokens"], batch["mask"]) == ["three", "one", "two"]
        assert batch["ids"].tolist() == [2, 0, 1]
        pixels = torch.from_numpy(pairs().images.pixels[[2, 0, 1]]).permute(0, 3, 1, 2)
        assert torch.equal(batch["images"], pixels)
        assert batch["mask"].sum(1).tolist() == [7, 5, 5]  # start and end included
        assert batch["tokens"].shape == batch["mask"].shape == (3, 7)


def test_training_draws_a_caption_by_seed_epoch_and_sample_alone():
    def drawn(seed: int, epoch: int, *ids: int) -> list[str]:
        source = make_pair_source(pairs(), PRE, BYTES, train=True, seed=seed)
        batch = source.__getitems__(keys(epoch, *ids))
        return BYTES.decode(batch["tokens"], batch["mask"])

    whole = {(s, e): drawn(s, e, 0, 1, 2, 3) for s in range(2) for e in range(20)}
    for (seed, epoch), texts in whole.items():
        assert all(text in CAPTIONS[i] for i, text in enumerate(texts))
        assert drawn(seed, epoch, 3, 1) == [texts[3], texts[1]]
    assert {texts[1] for texts in whole.values()} == set(CAPTIONS[1])
    assert {texts[2] for texts in whole.values()} == set(CAPTIONS[2])
    assert len({whole[s, e][1] + whole[s, e][2] for s, e in whole}) == 6, "drawn one by one"
    assert any(whole[0, e] != whole[1, e] for e in range(20))


def test_one_batch_may_hold_several_epochs():
    source = make_pair_source(pairs(), PRE, BYTES, train=True)
    mixed = source.__getitems__([(0, 1), (7, 1), (3, 2), (0, 2)])
    alone = [source.__getitems__([key]) for key in [(0, 1), (7, 1), (3, 2), (0, 2)]]
    assert BYTES.decode(mixed["tokens"], mixed["mask"]) == [
        BYTES.decode(batch["tokens"])[0] for batch in alone
    ]


def test_an_empty_part_is_an_empty_source():
    none = Pairs(Split(torch.zeros(0, dtype=torch.int64), 0.0), ())
    assert len(make_pair_source(none, PRE, BYTES, train=False)) == 0
    assert len(make_caption_source(none, BYTES)) == 0


def test_captions_are_drawn_equally_often():
    many = pairs(tuple((f"a{i}", f"b{i}", f"c{i}") for i in range(300)))
    source = make_pair_source(many, PRE, BYTES, train=True, augment=Augment(spatial="none"))
    letters = [
        text[0]
        for epoch in range(4)
        for text in BYTES.decode(source.__getitems__(keys(epoch, *range(300)))["tokens"])
    ]
    shares = [letters.count(letter) / 1200 for letter in "abc"]
    assert all(abs(share - 1 / 3) < 0.055 for share in shares)  # four standard deviations


def test_images_are_augmented_as_for_classification():
    from vision.data import make_source

    source = make_pair_source(pairs(), PRE, BYTES, train=True, seed=3)
    images = make_source(pairs().images, PRE, train=True, seed=3)
    batch = keys(5, 1, 3)
    assert torch.equal(source.__getitems__(batch)["images"], images.__getitems__(batch)["images"])
    assert source.at_once == images.at_once


def test_a_fixed_length_pads_every_batch_and_cuts_long_captions(capsys):
    source = make_pair_source(pairs(), PRE, BYTES, train=True, length=6)
    batch = source.__getitems__(keys(0, 0, 3))
    assert batch["tokens"].shape == (2, 6)
    assert source.cut == 3, "a second one, three, trois"
    assert "3 of 7 captions are cut to 6 tokens" in capsys.readouterr().err
    assert batch["mask"].sum(1).tolist() == [5, 6]


def test_no_caption_that_just_fits_counts_as_cut(capsys):
    tokenizer = create_tokenizer("bytes", context_length=14)  # "a second one" with start and end
    source = make_pair_source(pairs(), PRE, tokenizer, train=True)
    assert (source.cut, capsys.readouterr().err) == (0, "")
    batch = source.__getitems__([(epoch, 1) for epoch in range(8)])
    assert batch["tokens"].shape[1] == 14


def test_caption_sources_give_every_caption_once():
    source = make_caption_source(pairs(), BYTES)
    batch = source.__getitems__(keys(0, *range(len(source))))
    assert BYTES.decode(batch["tokens"], batch["mask"]) == pairs().texts()[0]
    assert batch["ids"].tolist() == list(range(7))
    assert "images" not in batch


def test_trim_cuts_padding_and_nothing_else():
    ids, mask = BYTES(["ab", "abcd"])
    batch = {"tokens": F.pad(ids, (0, 9)), "mask": F.pad(mask, (0, 9)), "ids": torch.arange(2)}
    cut = trim(batch)
    assert torch.equal(cut["tokens"], ids)
    assert torch.equal(cut["mask"], mask)
    assert cut["ids"] is batch["ids"]


def test_loaders_read_pairs_in_worker_processes():
    from zoo.engine.batches import BatchPlan, Loader

    source = make_pair_source(pairs(), PRE, BYTES, train=True)
    batches = [
        [(micro.ids, batch["tokens"]) for window in loader.windows(1) for micro, batch in window]
        for loader in (
            Loader(source, BatchPlan(4, batch_size=3), workers=workers, prepare=trim)
            for workers in (0, 1)
        )
    ]
    assert [ids for ids, _ in batches[0]] == [ids for ids, _ in batches[1]]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(*batches, strict=True))


def test_the_first_samples_of_a_source():
    source = make_pair_source(pairs(), PRE, BYTES, train=False)
    first, all_of_them = First(source, 2), First(source, 100)
    assert (len(first), len(all_of_them)) == (2, len(source))
    batch, same = (each.__getitems__(keys(0, 0, 1)) for each in (first, source))
    assert all(torch.equal(batch[name], same[name]) for name in same)
