"""What the training of models of pairs needs besides the model and its loss.

Shapes: b batch, n tokens, c y x channels, rows and columns of an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

import zoo
from crossmodal.data import (
    CaptionSource,
    PairDataset,
    Pairs,
    PairSource,
    load_pairs,
    make_caption_source,
    make_pair_source,
    trim,
)
from vision.augment import Augment
from zoo.preprocess import normalize


@dataclass(frozen=True)
class PairOptions:
    """Flags that recipes for images and captions share: what is read and what is done to it."""

    data: str = "emoji"
    """emoji (1,636 drawings of 32x32 and their names; emoji:bases holds out variants too),
    pairs:FILE (JSONL, CSV or TSV of image and caption), wds:PATTERN (tar shards), hf:NAME, strips:N
    or needle:N (digits in a row)."""
    val_data: str | None = None
    """Validation pairs in a file of their own; else the data's own, or a share of its images."""
    val_share: float = 0.1
    """That share."""
    languages: tuple[str, ...] = ("en",)
    """Of the emoji's names (ar de en es fa fr id it ja ko pt ru tr zh): one caption of each."""
    image_column: str = "image"
    """Of files, shards' JSON and hf:."""
    caption_column: str = "caption"
    """Of files, shards' JSON and hf:."""
    img_size: int | tuple[int, int] | None = None
    """Rows and columns, or one number for both; the data's or the model's own by default."""
    spatial: Literal["auto", "none", "affine", "crop"] = "auto"
    """auto: affine for data in memory, random resized crops otherwise."""
    hflip: float | None = None
    """Chance of a horizontal flip; by default the data set's (emoji and probes 0, others 0.5)."""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """Automatic augmentation per image, by torchvision."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Pairs that cannot be used: stop and name them, or skip and count them."""
    image_tower: str | None = None
    """An image model: ours, timm:NAME, torchvision:NAME, open_clip:ARCH; the model's by default."""
    text_tower: str | None = None
    """A text tower: text_bag, text_micro, ..., open_clip:ARCH; the model's by default."""
    image_weights: str | None = None
    """Weights that the image tower starts from: timm:NAME, torchvision:NAME, local-dir:FOLDER."""
    tokenizer: str | None = None
    """clip, bytes or hf:FOLDER; the text tower's by default."""
    context_length: int | None = None
    """Most tokens of a caption; the tokenizer's by default."""
    freeze: tuple[str, ...] = ()
    """Parts that do not learn: image, text (all of it), image:2 (its stem and first 2 stages)."""

    def __post_init__(self) -> None:
        self.frozen()

    def load(self) -> PairDataset:
        return load_pairs(
            self.data,
            languages=self.languages,
            val=self.val_data,
            val_share=self.val_share,
            bad_rows=self.bad_rows,
            image_column=self.image_column,
            caption_column=self.caption_column,
        )

    @property
    def augment(self) -> Augment:
        return Augment(spatial=self.spatial, hflip=self.hflip, policy=self.policy)

    def frozen(self) -> dict[str, int | str]:
        """`freeze` as options of a model.

        >>> PairOptions(freeze=("image:2", "text")).frozen()
        {'freeze_image': 2, 'freeze_text': 'all'}
        """
        found: dict[str, int | str] = {}
        for word in self.freeze:
            part, colon, blocks = word.partition(":")
            if part not in ("image", "text") or (
                colon and blocks != "all" and not blocks.isdigit()
            ):
                raise ValueError(
                    f"freeze {word!r} must be image or text, or with a number of blocks, image:2"
                )
            found[f"freeze_{part}"] = int(blocks) if blocks.isdigit() else "all"
        return found

    def model_options(self, data: PairDataset) -> dict[str, Any]:
        """Options of the model that these flags and the data set; what nobody set is left out."""
        given = {
            "img_size": self.img_size or data.size,
            "in_chans": data.in_chans,
            **{
                name: getattr(self, name)
                for name in ("image_tower", "text_tower", "tokenizer", "context_length")
            },
            **self.frozen(),
        }
        return {name: value for name, value in given.items() if value is not None}


def check_validation(data: PairDataset, least: int) -> None:
    """Refuses data without training pairs or with too few of validation, before training."""
    if not len(data.train):
        raise ValueError(
            f"{data.name} has no training pairs: all are of val; give --val-data, a --val-share "
            "below 1, or a split column with rows of train"
        )
    if len(data.val) < least:
        raise ValueError(
            f"{data.name} has {len(data.val)} validation pairs, and {least} or more are needed"
            f"{': recall of the only one says nothing' if least > 1 else ''}; give --val-data, a "
            f"larger --val-share, or a split column with more rows of val"
        )


def build(options: PairOptions, name: str, data: PairDataset, **own: Any) -> Any:
    """The model of a run, on the CPU.

    Args:
        options: Flags.
        name: Of the model.
        data: Decides size and channels where the flags do not.
        own: More options of `zoo.create_model`; they win.
    """
    model: Any = zoo.create_model(name, **{**options.model_options(data), **own})
    if options.image_weights:
        report = zoo.load_pretrained(model.image_tower.trunk, options.image_weights)
        print(f"image tower from {options.image_weights}: {report}")
    return model


class PairTask:
    """A data set as one model takes it: sources of batches, and what is done to a batch.

    Args:
        model: Has a card, which says how images become inputs, and a tokenizer.
        data: The pairs.
        options: What is done to the images in training.
        seed: Keys augmentation and the choice of captions, with epoch and sample.

    Attributes:
        train: A source of pairs, augmented.
        preprocessing, tokenizer: The model's.
    """

    def __init__(self, model: Any, data: PairDataset, options: PairOptions, seed: int) -> None:
        self.preprocessing, self.tokenizer = model.card.preprocessing, model.make_tokenizer()
        self.data = data
        self._made: dict[tuple[str, int], tuple[Pairs, Any]] = {}
        self.train = make_pair_source(
            data.train,
            self.preprocessing,
            self.tokenizer,
            train=True,
            augment=options.augment,
            seed=seed,
        )

    def pairs(self, pairs: Pairs) -> PairSource:
        """Images, each with its first caption, in order."""
        return self._once(
            pairs,
            "pairs",
            lambda length: make_pair_source(
                pairs, self.preprocessing, self.tokenizer, train=False, length=length
            ),
        )

    def captions(self, pairs: Pairs) -> CaptionSource:
        """All captions, image by image; the rows of all batches have one length."""
        return self._once(
            pairs,
            "captions",
            lambda length: make_caption_source(pairs, self.tokenizer, length=length),
        )

    def _once(self, pairs: Pairs, kind: str, make: Callable[[int], Any]) -> Any:
        """A source, made when first asked for; its pairs are kept so that their id stays theirs."""
        key = (kind, id(pairs))
        if key not in self._made:
            self._made[key] = (pairs, make(self._length(pairs)))
        return self._made[key][1]

    def _length(self, pairs: Pairs) -> int:
        longest = int(max(self.tokenizer.lengths(pairs.texts()[0])))
        return min(longest, self.tokenizer.context_length)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A batch of the training source as the model takes it."""
        return {**trim(batch), "images": self.inputs(batch)}

    def inputs(self, batch: Mapping[str, Any]) -> Tensor:
        """Pixels of a batch -> what the model takes (b c y x)."""
        return normalize(batch["images"], self.preprocessing)
