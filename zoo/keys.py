"""Names of tensors: what wrappers put in front of them, and the part of a larger model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from zoo.sources import Source, WeightsError, listed

_PREFIXES = ("module.", "_orig_mod.")
_V = TypeVar("_V")


def clean_source(source: Source, model: nn.Module) -> Source:
    """Names without what DDP, torch.compile and averaging put in front, in any order.

    Those stay that the model has itself.
    """
    names = _cleaned(source.tensors, model)
    if all(old == new for old, new in names.items()) and len(names) == len(source.tensors):
        return source
    grids = {names.get(key, key): grid for key, grid in source.position_grids.items()}
    return replace(source, tensors=_renamed(source.tensors, names), position_grids=grids)


def _cleaned(tensors: Iterable[str], model: nn.Module) -> dict[str, str]:
    """Old name -> new name, without those that are left out."""
    averaged = hasattr(model, "n_averaged")
    names = {name: name for name in tensors if name != "n_averaged" or averaged}
    while names:
        here = names.values()
        prefix = next((p for p in _PREFIXES if all(name.startswith(p) for name in here)), None)
        if prefix is None or hasattr(model, prefix.rstrip(".")):
            break
        names = {old: new.removeprefix(prefix) for old, new in names.items()}
    # A compiled part of a model has it in the middle.
    return {old: new.replace("_orig_mod.", "") for old, new in names.items()}


def _renamed(values: Mapping[str, _V], names: Mapping[str, str]) -> dict[str, _V]:
    return {new: values[old] for old, new in names.items() if old in values}


def take_part(source: Source, part: str) -> Source:
    """What stands under a name in the source, as if that were the whole.

    Options on its card are those of the whole, and are left out.

    Raises:
        WeightsError: no tensor is under that name; those at the top are listed.
    """
    prefix = f"{part.rstrip('.')}."
    names = {key: key.removeprefix(prefix) for key in source.tensors if key.startswith(prefix)}
    if not names:
        top = dict.fromkeys(key.partition(".")[0] for key in source.tensors)
        raise WeightsError(
            f"{source.name} has nothing under part {part!r}, the name under which a larger "
            f"source would hold this model; its names start with {listed(top, 20)}: leave part out "
            f"where these are the model's own, as in a file of the network alone"
        )
    grids = {key: key.removeprefix(prefix) for key in source.position_grids if key in names}
    card = source.card and replace(source.card, architecture=None, options={})
    return replace(
        source,
        tensors=_renamed(source.tensors, names),
        card=card,
        position_grids=_renamed(source.position_grids, grids),
        network=_module(source.network, prefix[:-1]),
    )


def _module(network: nn.Module | None, name: str) -> nn.Module | None:
    return None if network is None else dict(network.named_modules()).get(name)


def prefix_that_fits(key: str, keys: Iterable[str]) -> str | None:
    """What stands before one of `keys` in `key`, if it ends with one."""
    match = next((k for k in keys if key.endswith(f".{k}")), None)
    return key.removesuffix(match) if match else None
