"""Which parts of an image the words of a caption look at, for the attention explorer.

Shapes: b pairs, n tokens, w words, h heads, i/j query/key positions, c y x channels, rows, columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from crossmodal.captioner import Captioner
from crossmodal.generate import generate
from crossmodal.matcher import Matcher
from crossmodal.overlay import attention_layers, words_of
from vision.inspection.explorer import Explored, alarms_of, joined
from zoo.diagnostics.capture import capture_attention
from zoo.diagnostics.looks import look_at_layer
from zoo.merge import describe
from zoo.pages.explorer_pack import Maps, Side, encode
from zoo.preprocess import normalize
from zoo.surgery import evaluating

ELSEWHERE = "elsewhere"  # class token, registers and, in layout `merged`, the text


@torch.no_grad()
def explore_words(
    model: Any, pairs: dict[str, Tensor], *, written: bool = False, name: str | None = None
) -> Explored:
    """Looks at the layers in which words look at the image.

    Args:
        model: A `Matcher` or a `Captioner`.
        pairs: From `crossmodal.looks.fixed_pairs`.
        written: For the words that a captioner writes itself, instead of those of the captions.
        name: What the page calls the model.
    """
    layers = attention_layers(model)
    device = next(model.parameters()).device
    images = normalize(pairs["images"].to(device), model.card.preprocessing)
    tokens, mask = pairs["tokens"].to(device), pairs["mask"].to(device)
    if written and isinstance(model, Captioner):
        tokens, mask = generate(model, images)
    with evaluating(model), capture_attention(model, layers) as records:
        if isinstance(model, Matcher):
            model.match(model.image_tower(images), model.text_tower(tokens, mask))
        else:
            model(images, tokens, mask)
    words = [
        words_of(model.make_tokenizer(), row[:length].cpu())
        for row, length in zip(tokens, mask.sum(1).tolist(), strict=True)
    ]
    maps, looks = [], {}
    for layer, parts in records.items():
        weights, keys = _image_side(_by_word(joined(parts), tokens.shape[1], words), model)
        queries = Side([[word for word, _ in each] for each in words], None, weights.shape[2])
        maps.append(Maps(layer, encode(weights), queries, keys))
        looks[layer] = look_at_layer(weights)
    return Explored(name or describe(model), maps, looks, alarms=alarms_of(looks, {}))


def _by_word(weights: Tensor, n: int, words: list[list[tuple[str, list[int]]]]) -> Tensor:
    """Mean over the tokens of each word: (b h i j) -> (b h w j), empty rows after the last.

    A captioner's first row is from before its second token is written.
    """
    weights = F.pad(weights, (0, 0, n - weights.shape[2], 0))
    b, h, _, j = weights.shape
    found = weights.new_zeros(b, h, max(1, *map(len, words)), j)
    for row, each in enumerate(words):
        for place, (_, tokens) in enumerate(each):
            found[row, :, place] = weights[row, :, tokens].mean(1)
    return found


def _image_side(weights: Tensor, model: Any) -> tuple[Tensor, Side]:
    """Keys as one for all that is no cell, where there is such, and the cells."""
    rows, columns = model.image_tower.grid  # its cells are the last keys in all layouts
    others, cells = weights.split([weights.shape[-1] - rows * columns, rows * columns], dim=-1)
    if not others.shape[-1]:
        return cells, Side([()], (rows, columns), 0)
    joint = torch.cat([others.sum(-1, keepdim=True), cells], dim=-1)
    return joint, Side([(ELSEWHERE,)], (rows, columns), 1)
