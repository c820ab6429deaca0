"""Where a Vision Transformer looks in an image: its attention over the grid of patches.

The rows of attention are those of the tokens that the classifier reads: the class token's, the
pooling's query, or all of the grid, whose mean is taken. What goes to class tokens and registers is
left out and nothing is renormalised, so that a map sums to the share that the patches get. A
patch's features come from more of the image than its own square.

Shapes: b batch, h heads, i/j query/key tokens, c channels, y x rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision.vit import VisionTransformer
from zoo.diagnostics.capture import capture_attention, taps_of
from zoo.diagnostics.plotting import COLOURS, blend, enlarged, figure_class
from zoo.layers.check import integer
from zoo.layers.linear import Linformer
from zoo.merge import describe
from zoo.surgery import evaluating

POOL = "attn_pool"


def attention_layer(model: Any, layer: int | None = None) -> str:
    """The name of the module whose attention is drawn.

    Args:
        model: A `VisionTransformer`.
        layer: One of its blocks, from 0, or from the end below 0. By default what the classifier
            reads from: the attention pooling where there is one, else the last block.

    Raises:
        ValueError: the model has no attention that can be seen, or fewer blocks.
    """
    if not isinstance(model, VisionTransformer):
        raise ValueError(_no_attention(model))
    if layer is None:
        name = POOL if model.global_pool == "map" else f"blocks.{len(model.blocks) - 1}.attn"
    else:
        depth = len(model.blocks)
        if not -depth <= integer("layer", layer, minimum=None) < depth:
            raise ValueError(f"layer ({layer}) must be from {-depth} to {depth - 1}")
        name = f"blocks.{layer % depth}.attn"
    if name not in taps_of(model, "attention"):
        kind = type(model.get_submodule(name)).__name__
        raise ValueError(f"{name} is a {kind}, which shows no weights to draw")
    if any(isinstance(module, Linformer) for module in model.get_submodule(name).modules()):
        raise ValueError(
            f"{name} is of attention 'linformer', which mixes the patches before a token meets "
            "them, so that its weights are of none"
        )
    return name


def _no_attention(model: Any) -> str:
    from zoo.registry import list_models

    name = describe(model)
    ours = name.partition(":")[2].partition(".")[0]
    example = ours if ours in list_models("vit_*") else "vit_tiny_patch16_224"
    return (
        f"{name} has no attention that can be drawn: that takes a Vision Transformer of ours, "
        f"zoo.list_models('vit_*'), such as zoo.create_model('{example}', "
        f"pretrained='timm:{example}')"
    )


@torch.no_grad()
def attention_maps(model: Any, images: Tensor, layer: int | None = None) -> Tensor:
    """The weight of each patch, the mean over heads: (b y x), on the CPU.

    Args:
        model: A `VisionTransformer`.
        images: As the model takes them (b c y x).
        layer: See `attention_layer`.
    """
    name = attention_layer(model, layer)
    with evaluating(model), capture_attention(model, name) as records:
        model(images)
    weights = records[name][0].mean(1)  # b i j
    rows, columns = model.patch_embed.grid_size
    prefix = model.num_prefix_tokens
    if name != POOL:
        weights = weights[:, :1] if model.global_pool == "token" else weights[:, prefix:]
    return weights.mean(1)[:, -rows * columns :].unflatten(-1, (rows, columns))


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
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    height, width = pixels.shape[1:]
    wide = (width / height) ** 0.5
    figure = figure_of(figsize=(2 * 3.2 * wide + 1, 3.2 / wide + 0.8), layout="constrained")
    panels = figure.subplots(1, 2)
    limits = Normalize(min(0.0, float(weights.min())), float(weights.max()) or 1.0)
    scale = ScalarMappable(limits, COLOURS)
    panels[0].imshow(enlarged(pixels).numpy())
    panels[1].imshow(blend(pixels, weights, scale, smooth))
    for axes in panels:
        axes.set_axis_off()
    figure.suptitle(title, fontsize=10, parse_math=False)
    bar = figure.colorbar(scale, ax=panels.tolist(), fraction=0.05, aspect=16)
    bar.ax.tick_params(labelsize=7)
    bar.set_label(f"weight in {layer} (even: {1 / weights.numel():.2g})", fontsize=7)
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
