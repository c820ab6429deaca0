"""Freezing: a tower, whole or from its first blocks on, or a classifier by a rule of fine-tuning.

What is frozen asks for no gradient and stays in eval mode, so that the statistics of its batch
norms do not move and its dropout is off. Copies (`copy.deepcopy`) are frozen alike, and the keys of
the state dict stay.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

from torch import nn

from zoo.layers.check import integer, is_integer

RULES = ("none", "backbone", "stages=N", "but-norms", "but-biases")

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
        found = parts(tower)
        if int(blocks) > len(found.blocks):
            raise ValueError(
                f"blocks ({blocks}) must be at most {len(found.blocks)}, the depth of this tower, "
                f"or 'all'"
            )
        _freeze_first(tower, found, int(blocks))


def freeze_by_rule(model: nn.Module, rule: str, keep: Iterable[str] = ()) -> None:
    """Freezes what a rule of fine-tuning does not train.

    The classifier trains under every rule, and so do the modules in `keep`. The model itself keeps
    its mode, and with it what it does in its own `forward` (dropout before the classifier, in some
    of timm's).

    Args:
        model: A classifier, with `get_classifier()`.
        rule: `none` freezes nothing.
            `backbone` freezes all else: a linear probe.
            `stages=N` freezes the stem and the first N blocks or stages, counted as in `freeze`.
            `but-norms` trains the norm layers as well; those with running statistics go on to
            count, everything else is in eval mode.
            `but-biases` trains the biases as well (BitFit, arXiv 2106.10199), those of norms too,
            whose running statistics stay.
        keep: Names of modules that train whatever the rule, such as inserted ones.

    Raises:
        ValueError: the rule is not one of `RULES`, or the model has nothing that it speaks of.
    """
    check_rule(rule)
    if rule == "none":
        return
    kept = {*_classifiers(model), *(model.get_submodule(name) for name in keep)}
    if rule.startswith("stages="):
        _freeze_stages(model, rule, kept)
    else:
        _freeze_all_but(model, rule, kept)


def check_rule(rule: str) -> None:
    """Refuses what is no rule of `freeze_by_rule`."""
    fixed = [name for name in RULES if name != "stages=N"]
    if rule not in fixed and not re.fullmatch(r"stages=[1-9]\d*", rule):
        raise ValueError(f"freeze {rule!r} must be one of {', '.join(RULES)}, with N from 1")


def classifier_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the module, or modules, that give the classes.

    Raises:
        ValueError: the model does not tell them.
    """
    return [parameter for module in _classifiers(model) for parameter in module.parameters()]


def _classifiers(model: nn.Module) -> list[nn.Module]:
    get: Any = getattr(model, "get_classifier", None)
    if not callable(get):
        raise ValueError(f"{type(model).__name__} has no get_classifier() that tells its head")
    found = get()
    return [found] if isinstance(found, nn.Module) else list(found)  # two with distillation in timm


def _freeze_stages(model: nn.Module, rule: str, kept: set[nn.Module]) -> None:
    count, found = int(rule.removeprefix("stages=")), parts(model)
    if count > len(found.blocks):
        raise ValueError(
            f"freeze {rule!r} must be at most stages={len(found.blocks)}, the depth of "
            f"{type(model).__name__}, or backbone"
        )
    _freeze_first(model, found, count, kept)


def _freeze_all_but(model: nn.Module, rule: str, kept: set[nn.Module]) -> None:
    """Freezes everything that is neither kept nor what the rule names."""
    norms = {m for m in model.modules() if _is_norm(m)} if rule == "but-norms" else set()
    named = {id(p) for norm in norms for p in norm.parameters()}
    if rule == "but-biases":
        named = {id(p) for name, p in model.named_parameters() if _is_bias(name, p)}
    trained = {id(p) for module in kept for p in module.parameters()}
    if rule != "backbone" and not named - trained:
        raise ValueError(
            f"freeze {rule!r}: {type(model).__name__} has no {rule[len('but-') :]} before its "
            f"classifier; take backbone"
        )
    for parameter in model.parameters():
        if id(parameter) not in trained and id(parameter) not in named:
            parameter.requires_grad_(False)
    for child in model.children():
        _hold(child, kept | norms)


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters(recurse=False))
    named = "norm" in type(module).__name__.lower()
    return named and bool(own) and all(parameter.ndim == 1 for parameter in own)


def _is_bias(name: str, parameter: nn.Parameter) -> bool:
    return parameter.ndim == 1 and re.search(r"(^|[._])bias$", name) is not None


def _freeze_first(
    tower: nn.Module, found: Parts, count: int, kept: Collection[nn.Module] = ()
) -> None:
    trained = {id(p) for module in kept for p in module.parameters()}
    frozen = {id(p) for group in (found.stem, *found.blocks[:count]) for p in group} - trained
    for parameter in tower.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    _hold_frozen(tower, frozen, trained, kept)


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


def _hold_frozen(
    module: nn.Module, frozen: set[int], trained: set[int], kept: Collection[nn.Module]
) -> None:
    """Holds the outermost modules whose parameters are all frozen, those aside that train anyway.

    A module without any, such as dropout, goes with what comes before it.
    """
    own = _own(module)
    before = bool(own) and all(id(p) in frozen for p in own)
    for child in module.children():
        parameters = list(child.parameters())
        inside = [id(p) in frozen for p in parameters if id(p) not in trained]
        before = all(inside) and bool(inside) if parameters else before
        if before:
            _hold(child, kept)
        elif any(inside):
            _hold_frozen(child, frozen, trained, kept)


def _hold(module: nn.Module, kept: Collection[nn.Module] = ()) -> None:
    """Holds a module in eval mode and all that is inside it, but those that are kept."""
    if module in kept:
        return
    for child in module.children():
        _hold(child, kept)
    module.train = _InEval(module)  # type: ignore[method-assign]
    module.training = False


class _InEval:
    """Stands for a module's `train`: whatever is asked for, the module itself stays in eval mode.

    What is inside it has a mode of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, mode: bool = True) -> nn.Module:
        self.module.training = False
        for child in self.module.children():
            child.train(mode)
        return self.module
