"""How the attention of a fusion is spread: over few keys or many, over text or image.

Shapes: b batch, h heads, i/j query/key positions, n/m text/image tokens, d width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from crossmodal.encoded import Encoded
from crossmodal.fusion import modality_share
from crossmodal.matcher import Matcher
from zoo.diagnostics import capture_attention
from zoo.diagnostics.measures import entropy


def watched(count: int, most: int = 64) -> Tensor:
    """Indices of pairs to look at, spread over `count` of them: always the same ones."""
    return torch.linspace(0, count - 1, min(most, count)).round().long()


def evenness(weights: Tensor, keys: Tensor) -> Tensor:
    """Entropy over the most there can be, 0 to 1: weights (b h i j), keys (b) -> (b h i).

    Unlike `entropy(weights, normalized=True)` it counts the keys of each sample that are no
    padding, so that a caption's number does not depend on those it is batched with.

    Args:
        weights: As `zoo.capture_attention` gives them.
        keys: How many keys the queries of each sample can see; 0 for a sample with a single one.
    """
    if keys.shape != weights.shape[:1]:
        raise ValueError(
            f"keys {tuple(keys.shape)} must have a number for each sample of weights "
            f"{tuple(weights.shape)}"
        )
    return entropy(weights) / keys.clamp(min=2).log()[:, None, None]


@torch.no_grad()
def attention_balance(model: Matcher, image: Encoded, text: Encoded) -> dict[str, float]:
    """What a matcher's text queries look at in pairs of an image (b m d) and a text (b n d).

    Means over layers, heads and the queries of all pairs, without padding:

    - `attn_entropy`: `evenness`, 0 where a query takes one key and 1 where it takes all alike;
    - `attn_image_share`: the share of weight on the image's keys, in layout `merged` only: in
      `cross` there are no others.

    Empty where no text attends (`image_to_text`).
    """
    blocks = model.fusion.blocks_text
    if not len(blocks):
        return {}
    with capture_attention(model, "fusion.blocks_text.*.attn") as records:
        model.match(image, text)
    layers = [weights for maps in records.values() for weights in maps]
    queries, keys = _counted(text), _counted(image)
    merged = blocks[0].layout == "merged"
    keys = torch.cat([queries, keys], dim=1) if merged else keys
    if layers[0].shape[-1] != keys.shape[1]:  # linformer's keys are mixtures, none is padding
        keys = torch.ones(len(keys), layers[0].shape[-1])
    found = {"attn_entropy": _mean([evenness(each, keys.sum(1)) for each in layers], queries)}
    if merged:
        share = [1 - modality_share(each, queries.shape[1]) for each in layers]
        found["attn_image_share"] = _mean(share, queries)
    return found


def _counted(encoded: Encoded) -> Tensor:
    """Which tokens are no padding (b n), on the CPU as captured weights are."""
    if encoded.mask is None:
        return torch.ones(encoded.tokens.shape[:2], dtype=torch.bool)
    return encoded.mask.cpu()


def _mean(layers: list[Tensor], queries: Tensor) -> float:
    """Over layers, heads and the queries that count: (b h i) of each layer, (b i)"""
    values = torch.stack(layers).double().mean(dim=(0, 2))  # b i
    return float(values[queries].mean())
