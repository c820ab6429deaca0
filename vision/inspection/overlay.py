"""Where a Vision Transformer looks in an image: its attention over the grid of patches.

The rows of attention are those of the tokens that the classifier reads: the class token's, the
pooling's query, or all of the grid, whose mean is taken. What goes to class tokens and registers is
left out and nothing is renormalised, so that a map sums to the share that the patches get. A
patch's features come from more of the image than its own square. Models of other libraries are
those that `zoo.capture_attention` and `vision.inspection.image_tokens` know.

Shapes: b batch, h heads, i/j query/key tokens, c channels, y x rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision.inspection.image_tokens import ImageTokens, image_tokens
from vision.vit import VisionTransformer
from zoo.diagnostics.capture import attention_of, capture_attention, taps_of
from zoo.diagnostics.plotting import WeightScale, enlarged, figure_class
from zoo.layers.check import integer
from zoo.layers.linear import Linformer
from zoo.merge import describe
from zoo.surgery import evaluating

POOL = "attn_pool"


def attention_layer(model: Any, layer: int | None = None) -> str:
    """The name of the module whose attention is drawn.

    Args:
        model: A `VisionTransformer`, or one of another library.
        layer: One of its blocks, from 0, or from the end below 0; of another library's model one of
            its layers with attention. By default what the classifier reads from: the attention
            pooling where there is one, else the last block.

    Raises:
        ValueError: the model has no attention that can be seen, fewer blocks, or attention that is
            not over patches.
    """
    if isinstance(model, VisionTransformer):
        return _own_layer(model, layer)
    size = model.card.preprocessing.size
    like = next(model.parameters())
    _foreign_maps(model, like.new_zeros(1, model.card.preprocessing.in_chans, *size), layer)
    return _foreign_layer(model, layer)


def _own_layer(model: VisionTransformer, layer: int | None) -> str:
    if layer is None:
        name = POOL if model.global_pool == "map" else f"blocks.{len(model.blocks) - 1}.attn"
    else:
        name = f"blocks.{_place(layer, len(model.blocks))}.attn"
    if name not in taps_of(model, "attention"):
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(f"{name} is a {kind}, which shows no weights to draw")
    if any(isinstance(module, Linformer) for module in model.get_submodule(name).modules()):
        raise ValueError(
            f"{name} is of attention 'linformer', which mixes the patches before a token meets "
            "them, so that its weights are of none"
        )
    return name


def _place(layer: int, depth: int) -> int:
    if not -depth <= integer("layer", layer, minimum=None) < depth:
        raise ValueError(f"layer ({layer}) must be from {-depth} to {depth - 1}")
    return layer % depth


def _foreign_layer(model: Any, layer: int | None) -> str:
    names = list(attention_of(model))
    if not names:
        raise ValueError(_no_attention(model))
    return names[_place(-1 if layer is None else layer, len(names))]


def _no_attention(model: Any) -> str:
    from zoo.registry import list_models

    name = describe(model)
    ours = name.partition(":")[2].partition(".")[0]
    example = ours if ours in list_models("vit_*") else "vit_tiny_patch16_224"
    return (
        f"{name} has no attention that can be drawn: that takes a Vision Transformer, such as "
        f"timm:{example}, or one of zoo.list_models('vit_*')"
    )


@torch.no_grad()
def attention_maps(model: Any, images: Tensor, layer: int | None = None) -> Tensor:
    """The weight of each patch, the mean over heads: (b y x), on the CPU.

    Args:
        model: A `VisionTransformer`, or one of another library.
        images: As the model takes them (b c y x).
        layer: See `attention_layer`.
    """
    if not isinstance(model, VisionTransformer):
        return _foreign_maps(model, images, layer)
    name = _own_layer(model, layer)
    with evaluating(model), capture_attention(model, name) as records:
        model(images)
    weights = records[name][0].mean(1)  # b i j
    rows, columns = model.patch_embed.grid_size
    prefix = model.num_prefix_tokens
    if name != POOL:
        weights = weights[:, :1] if model.global_pool == "token" else weights[:, prefix:]
    return weights.mean(1)[:, -rows * columns :].unflatten(-1, (rows, columns))


@torch.no_grad()
def _foreign_maps(model: Any, images: Tensor, layer: int | None) -> Tensor:
    name = _foreign_layer(model, layer)
    with evaluating(model), capture_attention(model, name) as records:
        model(images)
    weights = records[name][-1]  # b h i j
    if len(weights) != len(images):
        raise ValueError(
            f"{name} of {describe(model)} attends within windows, not over the image: no weights "
            "of patches can be drawn"
        )
    size = (images.shape[2], images.shape[3])
    try:
        keys = image_tokens(model, size, weights.shape[-1])
    except ValueError as error:
        raise ValueError(f"{name} of {describe(model)} cannot be drawn: {error}") from error
    rows = weights.mean(1)[:, _read_tokens(model, keys, weights.shape[-2])].mean(1)
    patches = keys.grid[0] * keys.grid[1]
    return rows[:, keys.prefix : keys.prefix + patches].unflatten(-1, keys.grid)


def _read_tokens(model: Any, keys: ImageTokens, queries: int) -> slice:
    """Which of the queries a classifier of another library reads: the first, patches, or all."""
    patches = keys.grid[0] * keys.grid[1]
    if queries != patches + keys.prefix + keys.suffix:
        return slice(None)  # those of a pooling
    pooled = getattr(model, "global_pool", getattr(model, "pool_type", None))
    if keys.names[:1] == ("class",) and not str(pooled).startswith("avg"):
        return slice(1)
    return slice(keys.prefix, keys.prefix + patches)


def draw_overlay(
    path: Path, pixels: Tensor, weights: Tensor, title: str, layer: str, *, smooth: bool = True
) -> None:
    """Draws an image, and beside it the image under the weights of its patches, as a PNG.

    Args:
        path: The PNG.
        pixels: The image as the model got it, before normalisation: uint8 (c y x).
        weights: Of each patch (rows columns).
        title: Of the picture.
        layer: Whose weights they are.
        smooth: Weights between the centres of patches are interpolated; else patches are squares.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure_of = figure_class(path)
    height, width = pixels.shape[1:]
    wide = (width / height) ** 0.5
    figure = figure_of(figsize=(2 * 3.2 * wide + 1, 3.2 / wide + 0.8), layout="constrained")
    panels = figure.subplots(1, 2)
    scale = WeightScale(weights)
    panels[0].imshow(enlarged(pixels).numpy())
    panels[1].imshow(scale.over(pixels, weights, smooth))
    for axes in panels:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10, parse_math=False)
    scale.add_to(figure, panels.tolist(), f"weight in {layer},\n", fraction=0.05, aspect=16)
    figure.savefig(path, dpi=120)


def picture_names(paths: Iterable[Path]) -> list[str]:
    """A PNG's name for each file: its own, and a number where another file is called the same."""
    taken: set[str] = set()
    names = []
    for path in paths:
        name, number = path.stem, 1
        while name in taken:
            number += 1
            name = f"{path.stem}-{number}"
        taken.add(name)
        names.append(f"{name}.png")
    return names
