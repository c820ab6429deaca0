"""Where a model looks for each word of a caption: maps of attention over the image.

A `Matcher`'s words are queries that attend to the image; a `Captioner` looks before it writes a
token. A word's map has the weight of each cell of the image tower's grid: the mean over layers,
heads, and the word's tokens. What goes to class tokens and registers is left out, and in layout
`merged` what goes to the text itself; nothing is renormalised, so that a map sums to the share that
the cells get. A cell's features come from more of the image than its own square.

Shapes: b batch, n tokens, w words, l layers, h heads, i/j query/key positions, c channels, y x rows
and columns.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from crossmodal.captioner import DECODERS, Captioner
from crossmodal.matcher import Matcher
from crossmodal.tokenizer import Tokenizer
from zoo.diagnostics.capture import capture_attention
from zoo.layers.check import integer
from zoo.layers.linear import Linformer
from zoo.surgery import evaluating


class WordMaps(NamedTuple):
    """Maps of words.

    Attributes:
        words: Of each caption.
        maps: (b w y x), zeros after a caption's last word.
    """

    words: list[list[str]]
    maps: Tensor


def attention_layers(model: Any) -> str:
    """Names, with a wildcard, of the layers in which words look at the image.

    Raises:
        ValueError: there are none.
    """
    if isinstance(model, Matcher):
        if not model.fusion.blocks_text:
            raise ValueError(
                f"fusion_direction {model.fusion.direction!r} has no words that look at the image: "
                "train with --fusion-direction text_to_image or both"
            )
        if any(isinstance(module, Linformer) for module in model.fusion.modules()):
            raise ValueError(
                "fusion_attention 'linformer' mixes the cells before a word meets them, so its "
                "weights are of none: train with another --fusion-attention"
            )
        return "fusion.blocks_text.*.attn"
    if isinstance(model, Captioner):
        if not model.decoder.looks:
            raise ValueError(
                f"{type(model.decoder).__name__} sees the image as one vector, not its patches: "
                f"train with --decoder {' or '.join(DECODERS[1:])}"
            )
        return f"decoder.{model.decoder.looks}"
    raise ValueError(
        f"{type(model).__name__} has no attention between words and patches: train with "
        "recipes/train_crossmodal.py --task match or caption"
    )


@torch.no_grad()
def token_maps(
    model: Any,
    images: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Tensor:
    """The weight of each token over the image: (b n y x), zeros for padding.

    A captioner's map of a token is from before the token is written; its start token has none.

    Args:
        model: A `Matcher` or a `Captioner`.
        images: As the model takes them (b c y x).
        tokens: (b n)
        mask: (b n)
        layer: One of the layers that look at the image, from 0; their mean by default.
        head: One of their heads; the mean by default.
    """
    layers = attention_layers(model)
    with evaluating(model), capture_attention(model, layers) as records:
        if isinstance(model, Matcher):
            model.match(model.image_tower(images), model.text_tower(tokens, mask))
        else:
            model(images, tokens, mask)
    weights = torch.stack([torch.cat(parts, dim=2) for parts in records.values()])  # l b h i j
    weights = _mean_or_one("head", weights, 2, head)
    weights = _mean_or_one("layer", weights, 0, layer)
    rows, columns = model.image_tower.grid  # its cells are the last keys in all layouts
    maps = weights[..., -rows * columns :].unflatten(-1, (rows, columns))
    maps = F.pad(maps, (0, 0, 0, 0, tokens.shape[1] - maps.shape[1], 0))
    return maps.masked_fill(~mask.cpu()[..., None, None], 0)


def _mean_or_one(name: str, weights: Tensor, dim: int, index: int | None) -> Tensor:
    if index is None:
        return weights.mean(dim)
    count = weights.shape[dim]
    if integer(name, index, minimum=0) >= count:
        raise ValueError(f"{name} ({index}) must be less than {count}, the number of {name}s")
    return weights.select(dim, index)


def words_of(tokenizer: Tokenizer, ids: Tensor) -> list[tuple[str, list[int]]]:
    """The words of a caption (n,) and the places of each one's tokens.

    Words are what spaces part in the decoded text, in any vocabulary. A token belongs to the word
    that the text goes on with when the token is read; those without text (start, end, a space)
    belong to none.
    """
    n = len(ids)
    sofar = tokenizer.decode(ids.expand(n, n), torch.ones(n, n, dtype=torch.bool).tril())
    alone = tokenizer.decode(ids[:, None])
    text = sofar[-1] if n else ""
    spans = list(re.finditer(r"\S+", text))
    ends, known = [span.end() for span in spans], 0
    places: list[list[int]] = [[] for _ in spans]
    for place in range(n if spans else 0):
        if alone[place].strip():
            places[min(bisect_right(ends, known), len(spans) - 1)].append(place)
        # Not the length: a part of a character, or what tidying moves, is not in the text yet.
        known = max(known, _in_common(sofar[place], text))
    return [(s.group(), own) for s, own in zip(spans, places, strict=True) if own]


def _in_common(one: str, other: str) -> int:
    """How many first characters two texts share."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def word_maps(
    model: Any,
    images: Tensor,
    tokens: Tensor,
    mask: Tensor,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> WordMaps:
    """The weight of each word over the image, the mean over its tokens; see `token_maps`."""
    maps = token_maps(model, images, tokens, mask, layer=layer, head=head)
    tokenizer, counts = model.make_tokenizer(), mask.sum(1).tolist()
    found = [words_of(tokenizer, row[:n].cpu()) for row, n in zip(tokens, counts, strict=True)]
    joined = maps.new_zeros(len(maps), max(map(len, found), default=0), *maps.shape[2:])
    for row, words in enumerate(found):
        for column, (_, places) in enumerate(words):
            joined[row, column] = maps[row, places].mean(0)
    return WordMaps([[word for word, _ in words] for words in found], joined)
