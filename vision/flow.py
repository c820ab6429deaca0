"""A traced forward as images flow through it, and slots put into it.

A node through which every path from the arguments passes is called a waypoint here.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from vision.tracing import Traced

_ORDER = ("pre", "conv1", "conv2", "conv3", "standard", "post_add", "identity", "post")
ADDS = {operator.add, operator.iadd, torch.add, "add", "add_"}
MULS = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_ACTIVATION = re.compile(r"relu|elu|silu|swish|mish|sigmoid|tanh|act(?![a-z])|^identity$")
_DROP = re.compile(r"drop|stochastic_?depth|layer_?scale|^identity$")


@dataclass(frozen=True)
class Edge:
    """A place in a graph: the value of `node` on its way to `users`; None is all of them.

    `inside` names a child that hides the place and must be followed inside first; the node is one
    of the child's graph then.
    """

    node: fx.Node
    shape: tuple[int, ...]
    users: tuple[fx.Node, ...] | None = None
    inside: str | None = None


class Flow:
    """A checked graph as images flow in it: sizes, parameters and constants left out."""

    def __init__(self, module: nn.Module, traced: Traced, training: bool = False) -> None:
        self.module = module
        self.graph = traced.graphs[training]
        self.shapes = traced.shapes
        self.maps = traced.maps
        self.nodes = self._flowing()
        self.waypoints = self._waypoints()

    def _flowing(self) -> set[fx.Node]:
        found: set[fx.Node] = set()
        for node in self.graph.nodes:
            source = node.op == "placeholder" or any(n in found for n in node.all_input_nodes)
            if source and self.shapes[node] is not None and node.op != "output":
                found.add(node)
        return found

    def inputs(self, node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in self.nodes]

    def _waypoints(self) -> dict[fx.Node, list[fx.Node]]:
        """The nodes that every path from the arguments to a node passes, itself the last."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.graph.nodes:
            if node in self.nodes:
                ways = [found[n] for n in self.inputs(node)]
                shared = [n for n in ways[0] if all(n in way for way in ways)] if ways else []
                found[node] = [*shared, node]
        return found

    def fork(self, nodes: Iterable[fx.Node]) -> fx.Node | None:
        """The last node that all paths to all of the nodes pass; None where there is none."""
        first, *others = (self.waypoints[node] for node in nodes)
        shared = [n for n in first if all(n in way for way in others)]
        return shared[-1] if shared else None

    def between(self, start: fx.Node | None, *ends: fx.Node) -> frozenset[fx.Node]:
        """Nodes on the paths from start, which is not one of them, to the ends, which are."""
        found: set[fx.Node] = set()
        waiting = list(ends)
        while waiting:
            node = waiting.pop()
            if node is not start and node not in found:
                found.add(node)
                waiting += self.inputs(node)
        return frozenset(found)

    def child(self, node: fx.Node) -> nn.Module | None:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def is_map(self, node: fx.Node | None) -> bool:
        return node in self.maps

    def edge(self, node: fx.Node, users: tuple[fx.Node, ...] | None = None) -> Edge:
        return Edge(node, self.shapes[node] or (), users)

    @property
    def output(self) -> fx.Node:
        return next(node for node in self.graph.nodes if node.op == "output")

    @property
    def result(self) -> fx.Node | None:
        """The value that the forward returns, if it is one image."""
        returned = self.output.args[0]
        return returned if isinstance(returned, fx.Node) and self.is_map(returned) else None

    @property
    def first_result(self) -> fx.Node | None:
        """That, or the first of the images that it returns."""
        returned = self.output.args[0]
        several = returned if isinstance(returned, list | tuple) else (returned,)
        return next((n for n in several if isinstance(n, fx.Node) and self.is_map(n)), None)


def calls(node: fx.Node, functions: set[Any]) -> bool:
    return node.op in ("call_function", "call_method") and node.target in functions


def is_sum(flow: Flow, node: fx.Node) -> bool:
    """Whether a node adds two images of one size that both come from the input."""
    if node not in flow.nodes or not calls(node, ADDS) or not flow.is_map(node):
        return False
    inputs = flow.inputs(node)
    return len(inputs) == 2 and flow.shapes[inputs[0]] == flow.shapes[inputs[1]]


def terms(flow: Flow, add: fx.Node) -> Iterable[tuple[fx.Node, fx.Node]]:
    """The values of a sum of sums, each with the add that takes it."""
    for node in flow.inputs(add):
        if is_sum(flow, node) and len(node.users) == 1:
            yield from terms(flow, node)
        else:
            yield node, add


def before_weighing(flow: Flow, node: fx.Node, activation: bool = False) -> fx.Node:
    """Back over drop path, layer scale and fixed factors, on request over activations too."""
    while True:
        child = flow.child(node)
        inputs = flow.inputs(node)
        weighing = calls(node, MULS) or _DROP.search(_name(node, child)) is not None
        if activation and _is_activation(node, child):
            weighing = True
        if not weighing or len(inputs) != 1 or not flow.is_map(inputs[0]):
            return node
        node = inputs[0]


def after_norm(flow: Flow, node: fx.Node, following: list[fx.Node]) -> fx.Node:
    """On over norms and activations that take nothing else."""
    last = node
    for after in following:
        child = flow.child(after)
        part = _is_activation(after, child) or (child is not None and is_norm(child))
        if not part or flow.inputs(after) != [node] or len(node.users) > 1:
            break
        node = after
        last = last if isinstance(child, nn.Identity) else node
    return last


def _name(node: fx.Node, child: nn.Module | None) -> str:
    """What a step is called: its class, function or method, in small letters."""
    if child is not None:
        return type(child).__name__.lower()
    return getattr(node.target, "__name__", str(node.target)).lower()


def is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not list(module.parameters())[2:]


def _is_activation(node: fx.Node, child: nn.Module | None) -> bool:
    if child is not None:
        return _is_activation_module(child)
    called = node.op in ("call_function", "call_method")
    return called and _ACTIVATION.search(_name(node, None)) is not None


def _is_activation_module(module: nn.Module) -> bool:
    home, name = type(module).__module__, type(module).__name__.lower()
    small = len(list(module.parameters())) <= 1 and not list(module.children())
    known = home.startswith(("torch.nn.modules.activation", "timm.layers.activations"))
    return small and (known or _ACTIVATION.search(name) is not None)


def is_norm_or_activation(module: nn.Module) -> bool:
    return is_norm(module) or _is_activation_module(module)


_IN_PLACE: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.imul: operator.mul,
    "add_": "add",
    "mul_": "mul",
}


def edit(graph: fx.Graph, edges: Mapping[str, Edge], sites: Iterable[str]) -> None:
    """Lets the values at the sites of a graph pass through children named `slot_SITE`."""
    newest: dict[fx.Node, fx.Node] = {}  # of two slots at one place the later site stands later
    for site in sorted(sites, key=_ORDER.index):
        edge = edges[site]
        source = newest.get(edge.node, edge.node)
        users = tuple(source.users) if edge.users is None else edge.users
        with graph.inserting_after(source):
            slot = graph.call_module(f"slot_{site}", (source,))
        for user in users:
            user.replace_input_with(source, slot)
            if user.args and user.args[0] is slot:  # writes into no tensor of an inserted module
                user.target = _IN_PLACE.get(user.target, user.target)
        if edge.users is None:
            newest[edge.node] = slot
