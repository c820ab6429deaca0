"""Texts to ids and back, behind one signature whatever the vocabulary.

A caption is the start token, its own tokens and the end token; one that is too long loses tokens
before the end token, never that token. What is padding follows from lengths, never from an id.

Shapes: b batch, n tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision.checks import check_choice
from zoo.layers.check import integer


class Tokenizer:
    """Called as `tokenizer(texts) -> (ids, mask)`; see `create_tokenizer`.

    Subclasses say how texts become ids (`_encode`) and ids a text (`_decode`), without start and
    end.

    Attributes:
        spec: What `create_tokenizer` makes an equal one of.
        vocab_size: Number of ids, special ones included.
        context_length: Most tokens of a caption, start and end included.
        start_id: Id of the start token.
        end_id: Id of the end token.
        pad_id: Stands where no token is; with some vocabularies also a token's id.
    """

    vocab_size: int
    start_id: int
    end_id: int
    pad_id: int

    def __init__(self, spec: str, context_length: int) -> None:
        self.spec = spec
        self.context_length = integer("context_length", context_length, minimum=2)  # start and end

    def __call__(
        self, texts: str | Sequence[str], length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Ids (b n) and mask (b n), True = a token of the caption, start and end included.

        Args:
            texts: Captions; one string is a batch of one.
            length: n; by default that of the longest caption, cut to `context_length`.
        """
        limit = self._limit(length)
        rows = [
            [self.start_id, *self._cut(ids, limit - 2), self.end_id]
            for ids in self._encode(_strings(texts))
        ]
        lengths = torch.tensor([len(row) for row in rows], dtype=torch.long)
        n = max(map(len, rows), default=2) if length is None else limit
        padded = [row + [self.pad_id] * (n - len(row)) for row in rows]
        ids = torch.tensor(padded, dtype=torch.long).view(len(rows), n)
        return ids, torch.arange(n) < lengths[:, None]

    def lengths(self, texts: str | Sequence[str]) -> list[int]:
        """Tokens of each caption before any is cut, start and end included."""
        return [len(ids) + 2 for ids in self._encode(_strings(texts))]

    def decode(
        self, ids: Tensor | Sequence[Sequence[int]], mask: Tensor | None = None
    ) -> list[str]:
        """The text of each row (b n), up to its end token, start tokens left out.

        Args:
            mask: (b n); what it leaves out is not read, as if the row had ended there.
        """
        table = torch.as_tensor(ids, dtype=torch.long)
        if table.ndim != 2 or (mask is not None and mask.shape != table.shape):
            shapes = (tuple(table.shape), None if mask is None else tuple(mask.shape))
            raise ValueError(f"ids and mask must be (b, n), got {shapes[0]} and {shapes[1]}")
        rows = table.tolist()
        if mask is not None:
            counts = mask.long().cumprod(1).sum(1).tolist()
            rows = [row[:count] for row, count in zip(rows, counts, strict=True)]
        return [self._decode(self._between(row)) for row in rows]

    def _between(self, row: list[int]) -> list[int]:
        """What stands between start and end; the two may have one id."""
        row = row[1:] if row[:1] == [self.start_id] else row
        row = row[: row.index(self.end_id)] if self.end_id in row else row
        wrong = [i for i in row if not 0 <= i < self.vocab_size]
        if wrong:
            raise ValueError(f"ids {wrong[:8]} are not in the vocabulary of {self.vocab_size}")
        return [i for i in row if i != self.start_id]

    def _limit(self, length: int | None) -> int:
        if length is None:
            return self.context_length
        if integer("length", length, minimum=2) > self.context_length:
            raise ValueError(
                f"length ({length}) must not exceed context_length ({self.context_length})"
            )
        return length

    def _cut(self, ids: list[int], size: int) -> list[int]:
        return ids[:size]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        raise NotImplementedError

    def _decode(self, ids: list[int]) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.spec!r}, context_length={self.context_length})"


class BytesTokenizer(Tokenizer):
    """Every byte of the text in UTF-8 is a token: no vocabulary to load, no text unknown."""

    start_id, end_id, pad_id = 256, 257, 258
    vocab_size = 259

    def __init__(self, spec: str, context_length: int | None = None) -> None:
        super().__init__(spec, 128 if context_length is None else context_length)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [list(_well_formed(text).encode()) for text in texts]

    def _cut(self, ids: list[int], size: int) -> list[int]:
        """Cut before the character that does not fit; its further bytes read 10xxxxxx."""
        if len(ids) > size:
            while size and ids[size] & 0xC0 == 0x80:
                size -= 1
        return ids[:size]

    def _decode(self, ids: list[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class ClipTokenizer(Tokenizer):
    """open_clip's byte-pair encoding of lower-case words; equal ids, also where it cuts.

    Padding is 0 as there, which is also the id of a "!" that more signs follow.
    """

    start_id, end_id, pad_id = 49406, 49407, 0
    vocab_size = 49408

    def __init__(self, spec: str, context_length: int | None = None) -> None:
        super().__init__(spec, 77 if context_length is None else context_length)

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [_byte_pairs().encode(text) for text in texts]

    def _decode(self, ids: list[int]) -> str:
        return _byte_pairs().decode(ids).strip()


@functools.cache
def _byte_pairs() -> Any:
    """Loaded when the first text is read, and held once: a tokenizer is cheap to make and send."""
    from open_clip.tokenizer import SimpleTokenizer

    return SimpleTokenizer()


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer of the transformers library from a local folder; nothing is downloaded.

    Start is its token for the beginning (bos), or cls, or, as T5 has it, pad; end is eos or sep;
    where it has no pad, the end token's id stands there.
    """

    def __init__(self, spec: str, context_length: int | None = None) -> None:
        folder = spec.partition(":")[2]
        self._tokenizer = tokenizer = _load(folder)
        if context_length is None:  # transformers writes a huge number where none is stated
            context_length = min(77, tokenizer.model_max_length)
        super().__init__(spec, context_length)
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1
        self.start_id = self._special(folder, "start", "bos", "cls", "pad")
        self.end_id = self._special(folder, "end", "eos", "sep")
        self.pad_id = self.end_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def _special(self, folder: str, role: str, *names: str) -> int:
        ids = [getattr(self._tokenizer, f"{name}_token_id") for name in names]
        known = [i for i in ids if i is not None]
        if not known:
            raise ValueError(
                f"tokenizer in {folder} has no {role} token: it defines none of "
                f"{', '.join(f'{name}_token' for name in names)}; add one to its "
                "tokenizer_config.json"
            )
        return known[0]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        texts = [_well_formed(text) for text in texts]
        # verbose: it warns of texts longer than its model takes, which are cut here
        return self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True).strip()


def _load(folder: str) -> Any:
    if not folder or not Path(folder).is_dir():
        raise FileNotFoundError(
            f"hf:{folder}: {folder!r} is no folder; give one that holds tokenizer.json, as "
            "save_pretrained of a transformers tokenizer writes it"
        )
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ImportError(f"hf:{folder} needs transformers: pip install transformers") from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many kinds, by what is wrong with the folder
        raise ValueError(f"hf:{folder} holds no usable tokenizer: {error}") from error


_kinds: dict[str, type[Tokenizer]] = {
    "bytes": BytesTokenizer,
    "clip": ClipTokenizer,
    "hf": HuggingFaceTokenizer,
}


def list_tokenizers() -> list[str]:
    """What `create_tokenizer` takes."""
    return ["bytes", "clip", "hf:FOLDER"]


def create_tokenizer(spec: str = "clip", context_length: int | None = None) -> Tokenizer:
    """A tokenizer by name.

    Args:
        spec: `bytes` (of UTF-8; no vocabulary), `clip` (open_clip's byte pairs), or `hf:FOLDER`
            (a Hugging Face tokenizer in a local folder; needs transformers).
        context_length: Most tokens of a caption, start and end included; by default 128 bytes,
            77 tokens of clip, and 77 of hf unless it states fewer.

    Raises:
        ValueError: an unknown name, or a folder without a usable tokenizer.
        FileNotFoundError: no such folder.
    """
    if not isinstance(spec, str):
        raise TypeError(f"tokenizer ({spec!r}) must be one of {', '.join(list_tokenizers())}")
    name, colon, _ = spec.partition(":")
    if name not in _kinds or (name == "hf") != bool(colon):
        check_choice("tokenizer", spec, list_tokenizers())
    return _kinds[name](spec, context_length)  # type: ignore[arg-type]


def _strings(texts: str | Sequence[str]) -> list[str]:
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes) or not isinstance(texts, Sequence):
        raise TypeError(f"texts must be a list of strings, got {type(texts).__name__}")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"texts[{index}] ({text!r}) must be a string")
    return list(texts)


def _well_formed(text: str) -> str:
    """Halves of surrogate pairs, as broken JSON has them, joined, or replaced where alone."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
