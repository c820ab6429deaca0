"""Where a model looks on given pairs: as a file, as a picture, and again and again as it trains.

Shapes: b batch, n tokens, w words, c channels, y x rows and columns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossmodal.captioner import Captioner
from crossmodal.data import Pairs, make_pair_source
from crossmodal.generate import generate
from crossmodal.look_numbers import PairLooks, look_at_pairs
from crossmodal.matcher import Matcher
from crossmodal.overlay import attention_layers, word_maps
from crossmodal.overlay_figure import draw
from crossmodal.tokenizer import Tokenizer
from vision.inspection.fixed_images import FixedImages, spread, undisturbed
from vision.inspection.training_watch import Watch, looks_over_time, step_of, watch_training
from zoo.diagnostics.look_files import pack
from zoo.layers.check import integer
from zoo.preprocess import normalize
from zoo.surgery import evaluating

TEXTS = ("words", "captions", "remarks")


@dataclass(frozen=True)
class Look:
    """What a picture shows of some pairs.

    Attributes:
        pixels: The images before they were normalised, uint8 (b c y x).
        words: Of each caption.
        maps: (b w y x), in cells of the tower's grid.
        captions: As the model reads them.
        remarks: What it says of each pair: log-odds of a match, or the caption that it writes.
    """

    pixels: Tensor
    words: list[list[str]]
    maps: Tensor
    captions: list[str]
    remarks: list[str]

    def save(
        self,
        path: Path,
        tensors: Mapping[str, Tensor] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes `pixels` and `maps` as safetensors, the texts as JSON in their metadata.

        Args:
            path: Of the file.
            tensors: To write beside them.
            more: To tell beside the texts.
        """
        from safetensors.torch import save_file

        told = {name: getattr(self, name) for name in TEXTS} | dict(more or {})
        arrays = {"pixels": self.pixels.contiguous(), "maps": self.maps.contiguous()}
        one = {"told": json.dumps(told)}  # the order of several would be another each time
        save_file({**arrays, **(tensors or {})}, path, metadata=one)

    @classmethod
    def load(cls, path: Path) -> Look:
        """What `save` wrote."""
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            read = json.loads(file.metadata()["told"])
            told = {name: read[name] for name in TEXTS}
            return cls(pixels=file.get_tensor("pixels"), maps=file.get_tensor("maps"), **told)


def fixed_pairs(
    model: Any, pairs: Pairs, indices: Sequence[int], captions: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Some pairs as one batch: images (b c y x) before they are normalised, tokens, mask (b n).

    Args:
        model: Says by its card and tokenizer how pairs are read.
        pairs: The first caption of each image is taken.
        indices: Which images.
        captions: Other ones: one for each index, or one for all.

    Raises:
        ValueError: an index that is not there, a number of captions that does not fit, a caption
            that is empty or longer than the context.
    """
    wrong = [index for index in indices if not 0 <= index < len(pairs)]
    if wrong or not indices:
        raise ValueError(f"indices ({wrong or 'none'}) must be some from 0 to {len(pairs) - 1}")
    tokenizer = model.make_tokenizer()
    texts = [pairs.captions[index][0] for index in indices]
    if captions:
        texts = _for_all(captions, len(indices), tokenizer)
    source = make_pair_source(
        Pairs(pairs.images.subset(indices), tuple((text,) for text in texts)),
        model.card.preprocessing,
        tokenizer,
        train=False,
    )
    return source.__getitems__([(0, row) for row in range(len(texts))])


def _for_all(captions: Sequence[str], number: int, tokenizer: Tokenizer) -> list[str]:
    if len(captions) not in (1, number):
        raise ValueError(f"captions must be 1 or {number}, one for each image, not {len(captions)}")
    for caption, length in zip(captions, tokenizer.lengths(captions), strict=True):
        if not caption.strip():
            raise ValueError(f"caption {caption!r} has no words")
        if length > tokenizer.context_length:
            raise ValueError(
                f"caption {caption[:60]!r} has {length} tokens, start and end included, and the "
                f"model reads {tokenizer.context_length}: shorten it"
            )
    return list(captions) * (number // len(captions))


def look_at(
    model: Any,
    pairs: dict[str, Tensor],
    *,
    layer: int | None = None,
    head: int | None = None,
    written: bool = False,
) -> Look:
    """Where a model looks on a batch of `fixed_pairs`; weights, mode and random state stay as is.

    Args:
        model: A `Matcher` or a `Captioner`.
        pairs: From `fixed_pairs`.
        layer: As for `token_maps`, and so is `head`.
        written: For the words that a captioner writes itself, instead of those of the captions.
    """
    attention_layers(model)
    if written and not isinstance(model, Captioner):
        raise ValueError(f"written needs a model that writes, and {type(model).__name__} does not")
    device = next(model.parameters()).device
    images = normalize(pairs["images"].to(device), model.card.preprocessing)
    tokens, mask = pairs["tokens"].to(device), pairs["mask"].to(device)
    tokenizer = model.make_tokenizer()
    captions = tokenizer.decode(tokens, mask)
    if isinstance(model, Captioner):
        own = generate(model, images)
        remarks = [f"writes: {text}" for text in tokenizer.decode(*own)]
        tokens, mask = own if written else (tokens, mask)
    else:
        remarks = [f"log-odds {odds:+.1f}" for odds in _log_odds(model, images, tokens, mask)]
    words, maps = word_maps(model, images, tokens, mask, layer=layer, head=head)
    return Look(pairs["images"], words, maps, captions, remarks)


@torch.no_grad()
def _log_odds(model: Matcher, images: Tensor, tokens: Tensor, mask: Tensor) -> list[float]:
    with evaluating(model):
        return model.match(model.image_tower(images), model.text_tower(tokens, mask)).tolist()


class AttentionSaver(Watch):
    """Looks at pairs again and again as a model trains: `engine.fit(after_update=saver)`.

    Every so many updates it writes stepNNNNNN.safetensors and .png of the same pairs, and returns
    numbers on the layers between the modalities and the image tower's own; `finish` draws
    over_time.png. Nothing of the training is changed.

    Args:
        model: A `Matcher` or a `Captioner`.
        pairs: Pairs to look at, at even distances over all.
        folder, every: As for `Watch`, and so are `options`.
        samples: How many pairs; all, where there are fewer.
    """

    def __init__(
        self, model: Any, pairs: Pairs, folder: Path, every: int, samples: int = 4, **options: Any
    ) -> None:
        super().__init__(folder, every, **options)
        attention_layers(model)  # a model that cannot be looked at is refused before it trains
        if self.main:
            indices = spread(min(integer("samples", samples), len(pairs)), len(pairs))
            self.pairs = fixed_pairs(model, pairs, indices)
            self.captions = [pairs.captions[index][0] for index in indices]

    def _look(self, model: Any, step: int) -> dict[str, float]:
        with undisturbed(model), self.autocast():
            look, seen = look_at(model, self.pairs), self._numbers(model)
        look = replace(look, captions=self.captions)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step{step:06d}"
        more = {"training": self._training, "shares": seen.shares}
        look.save(path.with_suffix(".safetensors"), pack(seen.layers), more)
        self._draw(lambda: draw(look, path.with_suffix(".png")))
        if self.report is not None:
            self.report(step, layers=seen.layers, shares=seen.shares)
        return seen.numbers()

    def _numbers(self, model: Any) -> PairLooks:
        device = next(model.parameters()).device
        images = normalize(self.pairs["images"].to(device), model.card.preprocessing)
        return look_at_pairs(
            model, images, self.pairs["tokens"].to(device), self.pairs["mask"].to(device)
        )

    def finish(self) -> None:
        """Draws the first pair at all steps, of an interrupted and resumed training too."""
        look = over_time(self.folder) if self.main else None
        if look is not None:
            self._draw(lambda: draw(look, self.folder / "over_time.png", one_scale=True))


class TowerWatch:
    """The same for the image tower alone, of a model without attention between words and patches.

    Args:
        model: Whose `image_tower` is looked at.
        pairs, folder, every, samples: As for `AttentionSaver`.
        **options: Of `vision.inspection.training_watch.TrainingWatch`.

    Raises:
        ValueError: The tower has neither attention nor gates that can be seen.
    """

    def __init__(
        self, model: Any, pairs: Pairs, folder: Path, every: int, samples: int = 4, **options: Any
    ) -> None:
        indices = spread(min(integer("samples", samples), len(pairs)), len(pairs))
        pixels = fixed_pairs(model, pairs, indices)["images"]
        names = tuple(f"image {index}\n{pairs.captions[index][0]}" for index in indices)
        images = FixedImages(pixels, normalize(pixels, model.card.preprocessing), names)
        self.watch = watch_training(model.image_tower, images, folder, every, **options)

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        """The numbers of a look, where one is due."""
        return self.watch(model.image_tower, step)

    def finish(self) -> None:
        self.watch.finish()


def over_time(folder: Path) -> Look | None:
    """The first pair at each step that an `AttentionSaver` wrote, as if steps were pairs.

    Of those that `looks_over_time` chooses; None where there is none.
    """
    files = looks_over_time(folder)
    if not files:
        return None
    looks = [Look.load(file) for file in files]
    first = looks[0].words[0]
    return Look(
        pixels=torch.stack([look.pixels[0] for look in looks]),
        words=[first] * len(looks),
        maps=torch.stack([look.maps[0, : len(first)] for look in looks]),
        captions=[f"step {step_of(file)}" for file in files],
        remarks=[look.remarks[0] for look in looks],
    )
