"""Tokenizers against open_clip's and transformers' own, and against UTF-8 itself."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from crossmodal.tokenizer import Tokenizer, create_tokenizer, list_tokenizers

WORDS = ["a", "photo", "of", "cat", "dog", "red", "bird", "with", "two", "hats"]
CAPTIONS = [
    "a photo of a cat",
    "",
    "   Two  DOGS\twith\n hats!! ",
    "it's 2024 &amp; they're <b>here</b>, aren't they?",
    "naïve café — 東京タワー в Москве 👩‍👩‍👧‍👦 ﷺ",
    "a <start_of_text> b <end_of_text> c",
    "\x00\u200b\ufeff\u202e",
    "antidisestablishmentarianism " * 40,
]
HUNDRED_WORDS = " ".join(WORDS * 10)


def save_hugging_face(
    folder: Path, template: str = "", max_length: int | None = None, **special: str
) -> str:
    """A folder with a tokenizer of whole words and the special tokens asked for."""
    from tokenizers import Tokenizer as Words
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    names = list(dict.fromkeys(special.values()))
    vocab = {word: i for i, word in enumerate(["[UNK]", *names, *WORDS])}
    words = Words(WordLevel(vocab, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    if template:
        words.post_processor = TemplateProcessing(
            single=template, special_tokens=[(name, vocab[name]) for name in names]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", model_max_length=max_length, **special
    )
    made.save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}
    return save_hugging_face(tmp_path_factory.mktemp("bert"), "[CLS] $A [SEP]", **special)


@pytest.fixture(params=["bytes", "clip", "hf"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    spec = request.getfixturevalue("bert") if request.param == "hf" else request.param
    return create_tokenizer(spec)


# --- open_clip's ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def open_clip_tokenizer() -> Any:
    import open_clip

    return open_clip.get_tokenizer("ViT-B-32")


def test_clip_equals_open_clip(open_clip_tokenizer: Any) -> None:
    ids, mask = create_tokenizer()(CAPTIONS, length=77)
    assert torch.equal(ids, open_clip_tokenizer(CAPTIONS))
    ends = (ids == open_clip_tokenizer.eot_token_id).int() * torch.arange(1, 78)
    assert torch.equal(mask.sum(1), ends.amax(1).long())


@pytest.mark.parametrize("context_length", [2, 3, 5, 16])
def test_clip_cuts_as_open_clip(open_clip_tokenizer: Any, context_length: int) -> None:
    ids, _ = create_tokenizer("clip", context_length)(CAPTIONS, length=context_length)
    assert torch.equal(ids, open_clip_tokenizer(CAPTIONS, context_length=context_length))


def test_clip_ids_are_open_clips(open_clip_tokenizer: Any) -> None:
    own = create_tokenizer()
    assert own.vocab_size == open_clip_tokenizer.vocab_size
    assert own.start_id == open_clip_tokenizer.sot_token_id
    assert own.end_id == open_clip_tokenizer.eot_token_id
    assert own.context_length == open_clip_tokenizer.context_length


def test_clip_counts_a_token_that_has_the_padding_id() -> None:
    ids, mask = create_tokenizer()(["!$", "a photo of a cat"])
    assert ids[0].tolist() == [49406, 0, 259, 49407, 0, 0, 0]
    assert mask.sum(1).tolist() == [4, 7]


# --- bytes ------------------------------------------------------------------------------------


def test_bytes_are_utf8() -> None:
    ids, mask = create_tokenizer("bytes")(CAPTIONS[:5])
    for row, seen, text in zip(ids, mask, CAPTIONS, strict=False):
        assert row[seen].tolist() == [256, *text.encode("utf-8"), 257]
        assert (row[~seen] == 258).all()


def test_bytes_cut_between_characters() -> None:
    text = "aé東👩b"
    characters = [len(text[:i].encode()) for i in range(len(text) + 1)]
    for length in range(2, 14):
        tokenizer = create_tokenizer("bytes", length)
        ids, mask = tokenizer([text])
        kept = max(i for i, size in enumerate(characters) if size <= length - 2)
        assert tokenizer.decode(ids, mask) == [text[:kept]]
        assert mask.sum() == characters[kept] + 2


def test_bytes_come_back() -> None:
    rng = np.random.default_rng(0)
    points = rng.integers(0, 0x110000, (50, 20))
    texts = ["".join(chr(p) for p in row if not 0xD800 <= p < 0xE000) for row in points]
    tokenizer = create_tokenizer("bytes")
    assert tokenizer.decode(tokenizer(texts)[0]) == texts


def test_bytes_decode_what_is_no_text() -> None:
    tokenizer = create_tokenizer("bytes")
    assert tokenizer.decode([[256, 0xE6, 0x9D, 97, 258, 98, 257]]) == ["\ufffdab"]


# --- every kind -------------------------------------------------------------------------------


def test_a_long_caption_keeps_its_end(tokenizer: Tokenizer) -> None:
    text = " ".join([HUNDRED_WORDS] * 3)
    for length in (2, 9, tokenizer.context_length):
        ids, mask = tokenizer([text], length=length)
        assert ids.shape == (1, length)
        assert mask.all()
        assert ids[0, -1] == tokenizer.end_id
        assert ids[0, 0] == tokenizer.start_id
    assert tokenizer.lengths([text])[0] > tokenizer.context_length


def test_mask_follows_lengths(tokenizer: Tokenizer) -> None:
    texts = ["a cat", "", "two dogs with hats"]
    ids, mask = tokenizer(texts)
    lengths = tokenizer.lengths(texts)
    assert ids.dtype == torch.long
    assert mask.dtype == torch.bool
    assert ids.shape == mask.shape == (3, max(lengths))
    assert torch.equal(mask, torch.arange(max(lengths)) < torch.tensor(lengths)[:, None])
    assert ids[1, :2].tolist() == [tokenizer.start_id, tokenizer.end_id]
    assert (ids[~mask] == tokenizer.pad_id).all()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < tokenizer.vocab_size


def test_length_pads(tokenizer: Tokenizer) -> None:
    short, seen = tokenizer(["a cat", "a"])
    long, seen_long = tokenizer(["a cat", "a"], length=30)
    assert long.shape == (2, 30)
    assert torch.equal(long[:, : short.shape[1]], short)
    assert not seen_long[:, short.shape[1] :].any()
    assert torch.equal(seen_long[:, : short.shape[1]], seen)


def test_no_caption_at_all(tokenizer: Tokenizer) -> None:
    ids, mask = tokenizer([])
    assert ids.shape == mask.shape == (0, 2)
    assert tokenizer([], length=5)[0].shape == (0, 5)
    assert tokenizer.lengths([]) == []
    assert tokenizer.decode(ids, mask) == []


def test_one_string_is_a_batch_of_one(tokenizer: Tokenizer) -> None:
    assert torch.equal(tokenizer("a cat")[0], tokenizer(["a cat"])[0])
    assert tokenizer.lengths("a cat") == tokenizer.lengths(["a cat"])


def test_captions_come_back(tokenizer: Tokenizer) -> None:
    texts = ["a photo of a dog with two hats", "", "a cat"]
    ids, mask = tokenizer(texts)
    assert tokenizer.decode(ids, mask) == tokenizer.decode(ids) == texts
    assert tokenizer.decode(ids.tolist()) == texts
    assert tokenizer.decode(ids[:, 1:], mask[:, 1:]) == texts  # as generated: without the start


def test_decode_stops_at_the_end_and_at_the_mask(tokenizer: Tokenizer) -> None:
    ids, mask = tokenizer(["a cat"])
    body = ids[0, 1:-1].tolist()
    start, end = tokenizer.start_id, tokenizer.end_id
    assert tokenizer.decode([[start, *body, end, *body, end]]) == ["a cat"]
    assert tokenizer.decode([[start, start, *body]]) == ["a cat"]
    mask[:, -1] = False
    assert tokenizer.decode(torch.cat([ids[:, :-1], ids[:, 1:2]], 1), mask) == ["a cat"]


def test_broken_unicode(tokenizer: Tokenizer) -> None:
    """Halves of surrogate pairs, as in JSON cut within one."""
    pair, alone = "a \ud83d\udc08", "a \ud83d cat"
    assert torch.equal(tokenizer(pair)[0], tokenizer("a \U0001f408")[0])
    assert torch.equal(tokenizer(alone)[0], tokenizer("a \ufffd cat")[0])


def test_any_unicode(tokenizer: Tokenizer) -> None:
    points = np.random.default_rng(1).integers(0, 0x110000, (40, 30))
    ids, mask = tokenizer(["".join(map(chr, row)) for row in points] + CAPTIONS)
    assert int(ids.max()) < tokenizer.vocab_size
    assert (ids[torch.arange(len(ids)), mask.sum(1) - 1] == tokenizer.end_id).all()


def test_is_sent_to_workers(tokenizer: Tokenizer) -> None:
    again = pickle.loads(pickle.dumps(tokenizer))
    assert torch.equal(again(["a cat"])[0], tokenizer(["a cat"])[0])
    made = create_tokenizer(tokenizer.spec, tokenizer.context_length)
    assert repr(again) == repr(made) == repr(tokenizer)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["a", None], r"texts\[1\] \(None\) must be a string"),
        ([["a"]], r"texts\[0\] \(\['a'\]\) must be a string"),
        ([b"a"], r"texts\[0\] \(b'a'\) must be a string"),
        (b"a", "must be a list of strings, got bytes"),
        (3, "must be a list of strings, got int"),
    ],
)
def test_refuses_what_is_no_text(tokenizer: Tokenizer, texts: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        tokenizer(texts)
    with pytest.raises(TypeError, match=message):
        tokenizer.lengths(texts)


def test_refuses_lengths(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"length \(200\) must not exceed context_length"):
        tokenizer(["a"], length=200)
    with pytest.raises(ValueError, match=r"length \(1\) must be at least 2"):
        tokenizer(["a"], length=1)
    with pytest.raises(ValueError, match=r"context_length \(1\) must be at least 2"):
        create_tokenizer(tokenizer.spec, 1)


def test_decode_refuses(tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    with pytest.raises(ValueError, match=rf"ids \[{size}\] are not in the vocabulary of {size}"):
        tokenizer.decode([[size]])
    with pytest.raises(ValueError, match=r"must be \(b, n\), got \(3,\)"):
        tokenizer.decode(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match=r"got \(1, 3\) and \(1, 2\)"):
        tokenizer.decode([[1, 2, 3]], torch.ones(1, 2, dtype=torch.bool))


# --- Hugging Face -----------------------------------------------------------------------------


def test_hugging_face_equals_transformers(bert: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(bert.partition(":")[2], local_files_only=True)
    texts = ["a photo of a zebra", "", HUNDRED_WORDS]
    wanted = theirs(texts, padding=True, truncation=True, max_length=12, return_tensors="pt")
    ids, mask = create_tokenizer(bert, 12)(texts)
    assert torch.equal(ids, wanted["input_ids"])
    assert torch.equal(mask, wanted["attention_mask"].bool())
    assert create_tokenizer(bert).vocab_size == len(theirs)


def test_hugging_face_with_one_special_token(tmp_path: Path) -> None:
    """As GPT-2: it starts and ends with the same token and has no padding."""
    tokenizer = create_tokenizer(save_hugging_face(tmp_path, bos_token="<|>", eos_token="<|>"))
    assert tokenizer.start_id == tokenizer.end_id == tokenizer.pad_id == 1
    ids, mask = tokenizer(["a cat", "dog"])
    assert mask.sum(1).tolist() == [4, 3]
    assert tokenizer.decode(ids, mask) == tokenizer.decode(ids) == ["a cat", "dog"]


def test_hugging_face_without_a_start_token(tmp_path: Path) -> None:
    """As T5, whose decoders start from padding."""
    spec = save_hugging_face(tmp_path, pad_token="<pad>", eos_token="</s>")
    assert create_tokenizer(spec)(["a cat"])[0].tolist() == [[1, 3, 6, 2]]


def test_hugging_face_context_length(tmp_path: Path) -> None:
    short = save_hugging_face(tmp_path, bos_token="<s>", eos_token="</s>", max_length=9)
    assert create_tokenizer(short).context_length == 9
    assert create_tokenizer(short, 20).context_length == 20


def test_hugging_face_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"'/no/where' is no folder; give one that holds"):
        create_tokenizer("hf:/no/where")
    with pytest.raises(FileNotFoundError, match="'' is no folder"):
        create_tokenizer("hf:")
    with pytest.raises(ValueError, match=f"hf:{tmp_path} holds no usable tokenizer"):
        create_tokenizer(f"hf:{tmp_path}")
    spec = save_hugging_face(tmp_path, pad_token="<pad>")
    with pytest.raises(ValueError, match="no end token: it defines none of eos_token, sep_token"):
        create_tokenizer(spec)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        create_tokenizer(spec)


def test_names() -> None:
    assert list_tokenizers() == ["bytes", "clip", "hf:FOLDER"]
    assert create_tokenizer().spec == "clip"
    assert create_tokenizer("bytes").context_length == 128
    for spec in ("clipp", "hf", "bytes:x", ""):
        with pytest.raises(ValueError, match="must be one of 'bytes', 'clip', 'hf:FOLDER'"):
            create_tokenizer(spec)
    with pytest.raises(ValueError, match="nearest: 'clip'"):
        create_tokenizer("clipp")
    with pytest.raises(TypeError, match=r"tokenizer \(None\) must be one of bytes, clip"):
        create_tokenizer(None)  # type: ignore[arg-type]
