"""Which of a layer's tokens are the patches of an image, in our models and in other libraries'.

Shapes: b batch, n tokens, d width, c y x channels, rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from vision.checks import pair
from zoo.layers.check import integer
from zoo.merge import describe

BEFORE = {  # parameters (1 n d) or (d) that stand before the patches, in this order
    "class": ("cls_token", "class_token", "class_embedding"),
    "distillation": ("dist_token", "distillation_token"),
    "register": ("reg_token", "register_tokens"),
}
AFTER = ("detection_tokens",)
ADDED = 2  # keys at the end that nn.MultiheadAttention may add: add_bias_kv, add_zero_attn


class ImageTokens(NamedTuple):
    """The tokens of a layer: some before the patches, the patches by rows, some after.

    Attributes:
        grid: Patches, rows and columns.
        prefix: Tokens before them, such as a class token and registers.
        suffix: Tokens after them.
        names: Of those before.
    """

    grid: tuple[int, int]
    prefix: int
    suffix: int
    names: tuple[str, ...] = ()


def image_tokens(model: nn.Module, image_size: int | Sequence[int], num_tokens: int) -> ImageTokens:
    """Which of `num_tokens` are patches of an image of this size.

    The first module that cuts images into patches tells the grid: an embedding of timm, or a
    convolution whose stride is its kernel. Class token, registers and the like are counted by the
    parameters that hold them (`BEFORE`, `AFTER`).

    Args:
        model: Ours, timm's, torchvision's, open_clip's, transformers', also wrapped or as part of
            another.
        image_size: Side, or rows and columns, of the images it is given.
        num_tokens: As a layer has them, queries or keys.

    Raises:
        ValueError: the model cuts no image into patches, or has another number of them: in windows,
            pooled stages, text, and where keys are projected (linformer).
    """
    size = pair(image_size if isinstance(image_size, int) else tuple(image_size), "image_size")
    num_tokens = integer("num_tokens", num_tokens)
    grid = patch_grid(model, size)
    patches = grid[0] * grid[1]
    names, after = _around(model)
    if num_tokens == patches:  # pooling, and blocks before a class token comes in
        return ImageTokens(grid, 0, 0)
    suffix = num_tokens - patches - len(names)
    if patches and suffix in range(after, after + ADDED + 1):
        return ImageTokens(grid, len(names), suffix, names)
    raise ValueError(
        f"num_tokens ({num_tokens}) are not the patches of {describe(model)}: an image of "
        f"{size[0]}x{size[1]} has {grid[0]}x{grid[1]} = {patches}, with {len(names)} tokens before "
        f"and {after} after them"
    )


def patch_grid(model: nn.Module, image_size: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of patches.

    Raises:
        ValueError: the model cuts no image into patches.
    """
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if hasattr(module, "dynamic_feat_size"):  # timm's embeddings, with padding and backbones
            rows, columns = module.dynamic_feat_size(image_size)
            return int(rows), int(columns)
        if isinstance(module, nn.Conv2d) and _cuts(module):
            rows, columns = (
                max(0, (edge + 2 * int(padding) - kernel) // kernel + 1)
                for edge, padding, kernel in zip(
                    image_size, _padding(module), module.kernel_size, strict=True
                )
            )
            return rows, columns
    raise ValueError(
        f"{describe(model)} cuts no image into patches: it has no convolution whose stride is its "
        "kernel"
    )


def _cuts(module: nn.Conv2d) -> bool:
    return module.kernel_size == module.stride and max(module.kernel_size) > 1


def _padding(module: nn.Conv2d) -> tuple[int, ...]:
    return (0, 0) if isinstance(module.padding, str) else tuple(module.padding)


def _around(model: nn.Module) -> tuple[tuple[str, ...], int]:
    """Names of the tokens before the patches, and the number of those after."""
    sizes: dict[str, int] = {}
    for path, parameter in model.named_parameters():
        sizes.setdefault(path.rpartition(".")[2], _tokens(parameter))
    names: list[str] = []
    for kind, parameters in BEFORE.items():
        count = max(sizes.get(name, 0) for name in parameters)
        names += [kind] if count == 1 else [f"{kind} {place + 1}" for place in range(count)]
    return tuple(names), sum(sizes.get(name, 0) for name in AFTER)


def _tokens(parameter: Any) -> int:
    assert isinstance(parameter, Tensor)
    return 1 if parameter.ndim == 1 else parameter.shape[-2] if parameter.ndim > 1 else 0
