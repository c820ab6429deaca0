"""Freezing a tower, whole or from its first blocks on.

What is frozen asks for no gradient and stays in eval mode, so that the statistics of its batch
norms do not move and its dropout is off. Copies (`copy.deepcopy`) are frozen alike, and the keys of
the state dict stay.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

from zoo.layers.check import integer, is_integer

# Where networks keep their blocks or stages: in one container of such a name, or side by side.
_CONTAINERS = ("blocks", "resblocks", "stages", "layers", "levels", "features")
_SIDE_BY_SIDE = re.compile(r"(layer|stage|block|denseblock|s|level|inception|Mixed_)\d+\w?")
_PROJECTIONS = ("proj", "text_projection")  # open_clip's, parameters that come after the blocks


class Parts(NamedTuple):
    """The parameters of a tower in the order in which data meets them.

    Attributes:
        stem: Those before the first block: embeddings, positions, class tokens, first convolution.
        blocks: Those of each block or stage.
    """

    stem: list[nn.Parameter]
    blocks: list[list[nn.Parameter]]


def freeze(tower: nn.Module, blocks: int | str) -> None:
    """Freezes the first blocks of a tower, with all that comes before them.

    A block is one of a Transformer's, or a stage of a CNN: `blocks.N`, `layerN`, `stages.N`, ...,
    and in torchvision's networks the parts of `features` after the first.

    Args:
        tower: An image or text tower, or any network whose blocks have such names.
        blocks: How many; 0 freezes nothing, "all" the whole tower.

    Raises:
        ValueError: the tower has fewer blocks.
    """
    if blocks == "all":
        tower.requires_grad_(False)
        _hold(tower)
    elif not is_integer(blocks):
        raise TypeError(f"blocks ({blocks!r}) must be an integer of at least 0, or 'all'")
    elif integer("blocks", int(blocks), minimum=0):
        _freeze_first(tower, int(blocks))


def _freeze_first(tower: nn.Module, count: int) -> None:
    found = parts(tower)
    if count > len(found.blocks):
        raise ValueError(
            f"blocks ({count}) must be at most {len(found.blocks)}, the depth of this tower, "
            f"or 'all'"
        )
    frozen = {id(p) for group in (found.stem, *found.blocks[:count]) for p in group}
    for parameter in tower.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    _hold_frozen(tower, frozen)


def parts(tower: nn.Module) -> Parts:
    """Finds the blocks of a tower and what comes before them.

    Raises:
        ValueError: its modules have no names that tell.
    """
    name, children, starts, end = _find_blocks(tower)
    stem = _before(tower, name)
    groups = [[*_own(tower.get_submodule(name))]] + [[] for _ in starts]
    for index, child in enumerate(children[:end]):
        groups[sum(start <= index for start in starts)] += child.parameters()
    return Parts(stem + groups[0], groups[1:])


def _find_blocks(tower: nn.Module) -> tuple[str, list[nn.Module], list[int], int]:
    """The module around the blocks: name, children, where blocks start, where the last one ends."""
    for name, module in sorted(tower.named_modules(), key=lambda item: item[0].count(".")):
        names = [child for child, _ in module.named_children()]
        numbered = [i for i, child in enumerate(names) if _SIDE_BY_SIDE.fullmatch(child)]
        if len(numbered) > 1:
            return name, list(module.children()), numbered, numbered[-1] + 1
        own = name.rpartition(".")[2]
        if own in _CONTAINERS and isinstance(module, nn.Sequential | nn.ModuleList):
            children = list(module.children())
            return name, children, _starts(own, children), len(children)
    raise ValueError(
        f"{type(tower).__name__}: found no blocks to count, such as {', '.join(_CONTAINERS)} or "
        f"layer1, layer2; freeze 0 or 'all' of it"
    )


def _starts(name: str, children: list[nn.Module]) -> list[int]:
    """Indices of the children with which a block starts; the others belong to the one before."""
    composed = [i for i, child in enumerate(children) if any(True for _ in child.children())]
    if not composed:  # VGG: convolutions, activations and poolings in one row
        return [i for i, child in enumerate(children) if isinstance(child, nn.Conv2d)]
    return composed[1:] if name == "features" and composed[0] == 0 else composed


def _before(tower: nn.Module, name: str) -> list[nn.Parameter]:
    """Parameters that come before the module `name`, on each level of the way to it."""
    found: list[nn.Parameter] = []
    module = tower
    for step in filter(None, name.split(".")):
        found += _own(module)
        for child_name, child in module.named_children():
            if child_name == step:
                module = child
                break
            found += child.parameters()
    return found


def _own(module: nn.Module) -> list[nn.Parameter]:
    named = module.named_parameters(recurse=False)
    return [parameter for name, parameter in named if name not in _PROJECTIONS]


def _hold_frozen(module: nn.Module, frozen: set[int]) -> None:
    """Holds the outermost modules whose parameters are all frozen.

    A module without any, such as dropout, goes with what comes before it.
    """
    own = _own(module)
    before = bool(own) and all(id(p) in frozen for p in own)
    for child in module.children():
        inside = [id(p) in frozen for p in child.parameters()]
        before = all(inside) if inside else before
        if before:
            _hold(child)
        elif any(inside):
            _hold_frozen(child, frozen)


def _hold(module: nn.Module) -> None:
    module.train = _InEval(module)  # type: ignore[method-assign]
    module.eval()


class _InEval:
    """Stands for a module's `train`: whatever is asked for, the module stays in eval mode."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        return nn.Module.train(self.module, False)
