"""Blocks with slots: a subclass of the block's class whose forward passes through them.

`module.__class__` changes, and nothing else; `host_class` tells what it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vision.flow import Flow, edit
from vision.places import Block, Host, Place
from vision.slots import Slot
from vision.tracing import Call, Forward, TraceError, check, forward_of, run, same, trace

Installed = dict[nn.Module, dict[str, Slot]]


def forwards(host: Host, installed: Installed, chosen: list[Place]) -> dict[str, Forward]:
    """By module name, forwards with all slots that are there or come; native slots need none."""
    wanted: dict[str, set[str]] = {}
    for place in chosen:
        if place.slot not in host.model.get_submodule(place.owner)._modules:
            wanted.setdefault(place.owner, set()).add(place.slot)
    for owner, names in wanted.items():
        names |= set(installed.get(host.model.get_submodule(owner), {}))
    return {owner: _forward(host, owner, names) for owner, names in wanted.items()}


def _forward(host: Host, owner: str, names: set[str]) -> Forward:
    module = host.model.get_submodule(owner)
    if "forward" in module.__dict__:
        raise ValueError(f"{owner} has a forward of its own beside that of its class")
    block = next((b for b in host.blocks if b.module is module and b.followed), None)
    own = {f"slot_{site}" for site in block.shapes} if block is not None else set()
    forward: Forward = type(module).forward
    if names & own:
        assert block is not None
        forward = _edited(host, block, {name.removeprefix("slot_") for name in names & own})
    order = ["slot_conv1", "slot_conv2", "slot_conv3", "slot_output", "slot_between_stages"]
    after = [name for name in order if name in names - own]
    return _around(forward, "slot_stem" in names, after) if names - own else forward


def _around(forward: Forward, stem: bool, after: list[str]) -> Forward:
    """A forward whose first argument and whose output pass through slots."""

    def around(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if stem:
            args = (self.slot_stem(args[0]), *args[1:])  # type: ignore[operator]
        output = forward(self, *args, **kwargs)
        for name in after:
            output = self._modules[name](output)  # type: ignore[misc]
        return output

    return around


def _edited(host: Host, block: Block, sites: set[str]) -> Forward:
    """The forward of a block with slots in it, proved to compute what it did before."""
    module, call = block.module, host.calls[block.module]
    expand: frozenset[str] = frozenset()
    try:
        while True:
            traced = trace(module, call, expand, training=True)
            check(module, call, traced)
            edges = {
                mode: host.reader.anatomy(Flow(module, traced, mode), mate=True).edges
                for mode in traced.graphs
            }
            hidden = {e[site].inside for e in edges.values() for site in sites if site in e}
            if not hidden - {None}:
                break
            expand |= {name for name in hidden if name is not None}
    except TraceError as error:
        raise _refused(host, block, str(error)) from error
    for mode, graph in traced.graphs.items():
        missing = sorted(sites - set(edges[mode]))
        if missing:
            way = "in training" if mode else "with its children opened"
            raise _refused(host, block, f"{way} it has no place {', '.join(missing)}")
        edit(graph, edges[mode], sites)
    forward = forward_of(traced, block.kind)
    if not _is_proved(block, call, forward, sites):
        reason = (
            f"it overwrites a tensor in place that another path reads, and "
            f"{', '.join(sorted(sites))} would change what it computes"
        )
        raise _refused(host, block, reason)
    return forward


def _refused(host: Host, block: Block, reason: str) -> ValueError:
    name = block.name or "the model"
    return ValueError(
        f"{name} ({block.kind}) cannot be edited: {reason}; {host.way_out(block.name)}"
    )


class _Copy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def _is_proved(block: Block, call: Call, forward: Forward, sites: set[str]) -> bool:
    """Not where the host relies on a tensor that it overwrites being the same on both sides."""
    module = block.module
    before = run(module, call, module.forward)
    for site in sites:
        module.add_module(f"slot_{site}", _Copy())
    try:
        after = run(module, call, lambda *args: forward(module, *args))
    finally:
        for site in sites:
            del module._modules[f"slot_{site}"]
    return same(before, after)


# Classes with slots


def has_slots(module: nn.Module) -> bool:
    return "_host_class" in type(module).__dict__


def _host_class(module: nn.Module) -> type[nn.Module]:
    return type(module).__dict__["_host_class"]


def _own_slots(module: nn.Module) -> dict[str, Slot]:
    return {name: child for name, child in module._modules.items() if isinstance(child, Slot)}


@contextmanager
def without_slots(model: nn.Module) -> Iterator[Installed]:
    """The model as it is without insertions, native slots left in place; gives those taken out."""
    found = [(m, type(m), _own_slots(m)) for m in model.modules() if has_slots(m)]
    for module, _, _ in found:
        uninstall(module)
    try:
        yield {module: own for module, _, own in found}
    finally:
        for module, kind, own in found:
            module.__class__ = kind
            module._modules.update(own)


def uninstall(module: nn.Module) -> None:
    """Gives a module its own class back, and takes its slots away."""
    for name in _own_slots(module):
        del module._modules[name]
    module.__class__ = _host_class(module)


def install(module: nn.Module, forward: Forward) -> None:
    host = _host_class(module) if has_slots(module) else type(module)
    parts = {"forward": forward, "_host_class": host, "__module__": host.__module__}
    hiding: dict[str, Callable[..., Any]] = {}
    if issubclass(host, nn.Sequential):
        hiding = {"__iter__": _iterate, "__len__": _length, "__getitem__": _item}
    elif issubclass(host, nn.ModuleDict):
        hiding = {"__iter__": _keys, "__len__": _length, "keys": _keys}
        hiding |= {"items": _items, "values": _iterate}
    module.__class__ = type(host.__name__, (host,), {**parts, **hiding})


# A container runs or lists its children; slots are none of them.


def _items(self: nn.Module) -> Any:
    return {n: m for n, m in self._modules.items() if not isinstance(m, Slot)}.items()


def _keys(self: nn.Module) -> Iterator[str]:
    return iter([name for name, _ in _items(self)])


def _iterate(self: nn.Module) -> Iterator[nn.Module]:
    return iter([module for _, module in _items(self)])


def _length(self: nn.Module) -> int:
    return len(_items(self))


def _item(self: nn.Sequential, index: int | slice) -> nn.Module:
    found = list(_iterate(self))[index]
    return nn.Sequential(*found) if isinstance(found, list) else found


def slot_at(model: nn.Module, place: Place) -> Slot:
    owner = model.get_submodule(place.owner)
    slot = owner._modules.get(place.slot)
    if not isinstance(slot, Slot):
        slot = Slot(place.site)
        owner.add_module(place.slot, slot.train(owner.training))
    slot.stage = place.stage
    return slot
