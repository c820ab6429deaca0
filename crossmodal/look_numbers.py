"""Numbers on the attention of a model of images and captions: a look a layer, share by modality.

Shapes: b pairs, n/m text/image tokens, h heads, i/j query/key positions, c y x channels, rows and
columns.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from crossmodal.fusion import modality_share
from crossmodal.matcher import Matcher
from vision.inspection.image_tokens import image_tokens
from zoo.diagnostics.capture import Records, attention_of, capture_attention
from zoo.diagnostics.looks import LayerLook, look_at_layer

TOWER = "image_tower."
Shares = dict[str, dict[str, float]]


@dataclass(frozen=True)
class PairLooks:
    """What was seen on some pairs.

    Attributes:
        layers: By name, looks at attention, without padding.
        shares: By name of a layer that attends to both modalities: modality -> its share of the
            weight, 0 to 1.
    """

    layers: dict[str, LayerLook]
    shares: Shares

    def numbers(self) -> dict[str, float]:
        """attn/LAYER/NAME for a log; the shares as `text_share` and `image_share`."""
        found = {name: look.numbers() for name, look in self.layers.items()}
        for name, shares in self.shares.items():
            found[name] |= {f"{modality}_share": share for modality, share in shares.items()}
        return {
            f"attn/{layer}/{name}": value
            for layer, own in found.items()
            for name, value in own.items()
        }


def watched_layers(model: Any) -> list[str]:
    """Layers between the modalities, and the image tower's own."""
    between = "fusion.blocks_*.attn" if isinstance(model, Matcher) else "decoder." + _looks(model)
    patterns = (between, f"{TOWER}*")
    return [name for name in attention_of(model) if any(fnmatchcase(name, p) for p in patterns)]


def _looks(model: Any) -> str:
    looks: str = model.decoder.looks
    return looks


@torch.no_grad()
def look_at_pairs(model: Any, images: Tensor, tokens: Tensor, mask: Tensor) -> PairLooks:
    """Looks at the `watched_layers` of a model in evaluation.

    Args:
        model: A `Matcher` or a `Captioner` whose words look at the image.
        images: As the model takes them (b c y x).
        tokens: (b n)
        mask: Which tokens are no padding (b n).
    """
    names = watched_layers(model)
    scored = [name for name in attention_of(model, "logits") if name in names]
    with ExitStack() as stack:
        records = stack.enter_context(capture_attention(model, names))
        logits: Records = {}
        if scored:
            logits = stack.enter_context(capture_attention(model, scored, what="logits"))
        if isinstance(model, Matcher):
            model.match(model.image_tower(images), model.text_tower(tokens, mask))
        else:
            model(images, tokens, mask)
    found = PairLooks({}, {})
    for name, parts in records.items():
        weights = torch.cat(parts, dim=2)
        own = torch.cat(logits[name], dim=2) if name in logits else None
        if name.startswith(TOWER):
            grid = _grid(model, weights, (images.shape[-2], images.shape[-1]))
            found.layers[name] = look_at_layer(weights, logits=own, **grid)
        else:
            _add_between(found, model, name, weights, own, mask.cpu())
    return found


def _grid(model: Any, weights: Tensor, size: tuple[int, int]) -> dict[str, Any]:
    """Where the patches are among the image tower's tokens, if they are."""
    try:
        tokens = image_tokens(model.image_tower, size, weights.shape[3])
    except ValueError:
        return {}
    if tokens.suffix or weights.shape[2] != weights.shape[3]:
        return {}
    return {"grid": tokens.grid, "num_prefix_tokens": tokens.prefix}


def _add_between(
    found: PairLooks, model: Any, name: str, weights: Tensor, logits: Tensor | None, mask: Tensor
) -> None:
    """A layer between the modalities: (b h i j), (b h i 2), mask (b n)."""
    i, j, n = weights.shape[2], weights.shape[3], mask.shape[1]
    keys: Tensor | None = None
    queries: Tensor | None = None
    merged = isinstance(model, Matcher) and model.get_submodule(_parent(name)).layout == "merged"
    if name.startswith("fusion.blocks_image."):
        keys = torch.cat([mask.new_ones(len(mask), i), mask], 1) if merged else mask
        order = ("image", "text")
    else:  # a captioner's first row is from before its second token is written
        queries = mask[:, n - i :]
        keys = torch.cat([mask, mask.new_ones(len(mask), j - n)], 1) if merged else None
        order = ("text", "image")
        weights = weights.masked_fill(~queries[:, None, :, None], 0)
    seen = None if keys is None else keys[:, None, None]
    found.layers[name] = look_at_layer(weights, mask=seen, logits=logits)
    if merged:
        share = modality_share(weights, i).mean(1)  # b i, the first keys are the queries' own
        own = float((share if queries is None else share[queries]).mean())
        found.shares[name] = dict(zip(order, (own, 1 - own), strict=True))


def _parent(name: str) -> str:
    return name.rpartition(".")[0]
