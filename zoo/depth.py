"""Which layer of a network a parameter belongs to, for learning rates that fall with the depth."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.freezing import parts

Layers = dict[str, int]


def layer_indices(model: nn.Module) -> tuple[Layers, int]:
    """The layer of every parameter by name, and the index of the last layer, that of the head.

    Told by, in this order:

    - our models themselves, through `layer_index(name)` and `num_layers`;
    - timm's, through `group_matcher`, as `timm.optim.param_groups_layer_decay` reads it;
    - the names of other classifiers' blocks or stages, see `zoo.freezing.parts`: 0 is the stem, 1
      to n the blocks, n + 1 what comes after them.

    An inserted module belongs to the layer of the block in which it stands, or of the last block of
    the stage in which it stands; one in front of the first stage to the stem.

    Raises:
        ValueError: nothing of this tells.
    """
    network: Any = model
    if hasattr(model, "layer_index"):
        names = (name for name, _ in model.named_parameters())
        return {name: network.layer_index(name) for name in names}, network.num_layers
    layers = _from_timm(network) if hasattr(model, "group_matcher") else _from_parts(model)
    last = max(layers.values())
    return _with_insertions(model, layers), last


def _from_timm(model: Any) -> Layers:
    from timm.models import group_parameters

    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)


def _from_parts(model: nn.Module) -> Layers:
    untold = (
        f"layer_decay needs a model that tells its layers: {type(model).__name__} has no "
        "layer_index(name) and num_layers"
    )
    if not hasattr(model, "get_classifier"):  # of several towers, whose depths do not compare
        raise ValueError(untold)
    try:
        found = parts(model)
    except ValueError as error:
        raise ValueError(f"{untold}, and no blocks whose names tell") from error
    groups = enumerate((found.stem, *found.blocks))
    layer_of = {id(p): layer for layer, group in groups for p in group}
    rest = len(found.blocks) + 1
    return {name: layer_of.get(id(p), rest) for name, p in model.named_parameters()}


def _with_insertions(model: nn.Module, layers: Layers) -> Layers:
    """Gives inserted modules the layer of what is around them, which their names do not tell."""
    slots = {name: m for name, m in model.named_modules() if getattr(m, "may_be_absent", False)}
    added = {key for key in layers if any(key.startswith(f"{name}.") for name in slots)}
    host = {key: layer for key, layer in layers.items() if key not in added}
    found = dict(host)
    for name, slot in slots.items():
        layer = 0 if getattr(slot, "site", None) == "stem" else _around(name, host)
        own = (key for key in added if key.startswith(f"{name}."))
        found |= dict.fromkeys(own, layer)
    return {key: found[key] for key in layers}


def _around(name: str, host: Layers) -> int:
    """The deepest layer inside the innermost module around `name` that has one of its own."""
    while name:
        name = name.rpartition(".")[0]
        inside = [layer for key, layer in host.items() if not name or key.startswith(f"{name}.")]
        if inside:
            return max(inside)
    return max(host.values())
