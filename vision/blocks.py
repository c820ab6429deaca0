"""The parts of a block: where its branch leaves the input, its convolutions, where it joins again.

A residual unit is an add in a module's own forward of two tensors that both come from its input: a
branch with convolutions, and a shortcut without any or with a projection. Sites lie on nodes
that every path passes.

- Drop path, layer scale and the fixed factors of a normalizer-free branch weigh the branch for the
  add, so `standard` stands before them, and after an attention that the host's branch ends in.
- `conv1` to `conv3` stand after the norm and the activation that follow a convolution; parallel
  convolutions (a ghost module, split channels) count as one, an SE-like gate as none.
- A block without an add (DenseNet's layers; an inverted residual with a stride) has neither
  `post_add` nor `identity`.

Shapes: b batch, c y x channels/rows/columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx, nn

from vision.flow import (
    ADDS,
    MULS,
    Edge,
    Flow,
    after_norm,
    before_weighing,
    calls,
    is_norm,
    is_sum,
    terms,
)
from vision.tracing import Call, Traced, TraceError, check, trace

_CONVS = ("conv1", "conv2", "conv3")


@dataclass(frozen=True)
class Anatomy:
    """What was found in one module's forward.

    Attributes:
        edges: The places of the sites, by site.
        residual: Whether there is an add of a branch and a shortcut.
        parts: Names of the children on the two.
    """

    edges: dict[str, Edge]
    residual: bool
    parts: frozenset[str]


@dataclass(frozen=True)
class _Unit:
    """A residual add.

    Attributes:
        add: The node where all has been added.
        fork: The last node that branch and shortcut share; None where they are two arguments.
        shortcut: The value that the shortcut brings, and the add that takes it.
        branch: The value that the branch brings; None where it comes in several terms.
        on_branch: All nodes of the branch.
        on_shortcut: All nodes of the shortcut.
    """

    add: fx.Node
    fork: fx.Node | None
    shortcut: tuple[fx.Node, fx.Node]
    branch: fx.Node | None
    on_branch: frozenset[fx.Node]
    on_shortcut: frozenset[fx.Node]


class Reader:
    """Reads the anatomy of a model's modules from their recorded calls."""

    def __init__(self, recorded: Mapping[nn.Module, Call]) -> None:
        self.calls = recorded
        self._gates: dict[nn.Module, bool] = {}
        self._weights: dict[nn.Module, list[nn.Module]] = {}
        self._chains: dict[nn.Module, tuple[dict[int, Edge], int, bool]] = {}
        self._traced: dict[nn.Module, Traced | TraceError] = {}

    def _trace(self, module: nn.Module) -> Traced:
        if module not in self._traced:
            try:
                self._traced[module] = trace(module, self.calls[module])
            except TraceError as error:
                self._traced[module] = error
        found = self._traced[module]
        if isinstance(found, TraceError):
            raise found
        return found

    def flow(self, module: nn.Module) -> Flow:
        """The flow through a module in evaluation, checked against the module itself.

        Raises:
            TraceError: It cannot be followed.
        """
        traced = self._trace(module)
        if not traced.shapes:
            check(module, self.calls[module], traced)
        return Flow(module, traced)

    def adds(self, module: nn.Module) -> bool:
        """Whether a module's own forward adds, before more is asked of it."""
        graph = self._trace(module).graphs[False]
        return any(calls(node, ADDS) and len(node.all_input_nodes) == 2 for node in graph.nodes)

    def anatomy(self, flow: Flow, mate: bool = False) -> Anatomy:
        """The sites of a graph.

        Args:
            flow: Of the module's graph.
            mate: Without a residual add, `standard` is the end of all there is: for blocks whose
                like have a shortcut.
        """
        unit = self._unit(flow)
        if unit is None:
            return Anatomy(self._plain_edges(flow, mate), False, frozenset())
        nodes = unit.on_branch | unit.on_shortcut
        parts = frozenset(str(n.target) for n in nodes if n.op == "call_module")
        return Anatomy(self._unit_edges(flow, unit), True, parts)

    def convs(self, module: nn.Module) -> int:
        """Convolutions and linear layers in a module, outside of gates."""
        return len(self._weighted(module))

    def _weighted(self, module: nn.Module) -> list[nn.Module]:
        if module not in self._weights:
            weight = module._parameters.get("weight")
            if weight is not None and weight.ndim >= 2 and not is_norm(module):
                found = [module]
            else:
                found = [w for child in module.children() for w in self._weighted(child)]
            self._weights[module] = [] if found and self.is_gate(module) else found
        return self._weights[module]

    def is_gate(self, module: nn.Module) -> bool:
        """Whether a module multiplies its input by what it computes from it, as SE does."""
        if module not in self._gates:
            call = self.calls.get(module)
            first = next(iter(call.arguments.values()), None) if call is not None else None
            same = call is not None and isinstance(first, Tensor) and first.shape == call.shape
            self._gates[module] = (
                same and any(True for _ in module.children()) and self._multiplies(module)
            )
        return self._gates[module]

    def _multiplies(self, module: nn.Module) -> bool:
        try:
            graph = self._trace(module).graphs[False]
        except TraceError:
            return False
        node: Any = next(n for n in graph.nodes if n.op == "output").args[0]
        gates = 0
        while isinstance(node, fx.Node) and node.op == "call_module":  # a chain of gates, as CBAM
            child = module.get_submodule(str(node.target))
            if not list(child.children()) or not self.is_gate(child):
                return False
            node, gates = node.args[0], gates + 1
        if not isinstance(node, fx.Node):
            return False
        if node.op == "placeholder":
            return gates > 0
        return calls(node, MULS) and any(n.op == "placeholder" for n in node.all_input_nodes)

    def _count(self, flow: Flow, nodes: Iterable[fx.Node]) -> int:
        children = (flow.child(node) for node in nodes)
        return sum(self.convs(child) for child in children if child is not None)

    def _depth(self, flow: Flow, nodes: frozenset[fx.Node]) -> int:
        """Convolutions on the longest path through some nodes."""
        depths: dict[fx.Node, int] = {}
        for node in flow.graph.nodes:
            if node in nodes:
                before = max((depths.get(n, 0) for n in flow.inputs(node)), default=0)
                depths[node] = before + self._count(flow, [node])
        return max(depths.values(), default=0)

    # Residual adds

    def _unit(self, flow: Flow) -> _Unit | None:
        """The add around the most convolutions, outermost first, the last of equals."""
        found = [self._unit_at(flow, n) for n in flow.graph.nodes if is_sum(flow, n)]
        units = [unit for unit in found if unit is not None]
        outer = [u for u in units if not any(u.add in o.on_branch for o in units if o is not u)]
        return max(reversed(outer), key=lambda u: self._count(flow, u.on_branch), default=None)

    def _unit_at(self, flow: Flow, add: fx.Node) -> _Unit | None:
        if len(add.users) == 1 and is_sum(flow, next(iter(add.users))):
            return None  # a part of a longer sum
        one, other = flow.inputs(add)
        fork = flow.fork((one, other))
        if fork is None and "placeholder" not in (one.op, other.op):
            return None  # an argument as it came is a shortcut that the caller computed
        depth = {n: self._depth(flow, flow.between(fork, n)) for n in (one, other)}
        if depth[one] < depth[other]:
            one, other = other, one  # branch, shortcut
        on_branch, on_shortcut = flow.between(fork, one), flow.between(fork, other)
        if depth[one] == depth[other]:
            return self._long_sum(flow, add)
        if depth[other] > 2:  # more than a projection
            return None
        return _Unit(add, fork, (other, add), one, on_branch, on_shortcut)

    def _long_sum(self, flow: Flow, add: fx.Node) -> _Unit | None:
        """A sum of parallel convolutions and one shortcut without any, in any order."""
        parts = list(terms(flow, add))
        if len(parts) < 3:
            return None
        fork = flow.fork(node for node, _ in parts)
        free = [t for t in parts if not self._count(flow, flow.between(fork, t[0]))]
        if len(free) != 1:
            return None
        others = [node for node, _ in parts if node is not free[0][0]]
        on_shortcut = flow.between(fork, free[0][0])
        return _Unit(add, fork, free[0], None, flow.between(fork, *others), on_shortcut)

    # Sites

    def _unit_edges(self, flow: Flow, unit: _Unit) -> dict[str, Edge]:
        edges: dict[str, Edge] = {}
        way = [] if unit.branch is None else flow.waypoints[unit.branch]
        if unit.fork is not None:
            way = way[way.index(unit.fork) + 1 :] if way else []
        if flow.is_map(unit.fork):
            assert unit.fork is not None
            users = tuple(n for n in unit.fork.users if n in unit.on_branch)
            edges["pre"] = flow.edge(unit.fork, users)
        elif maps := [node for node in way if flow.is_map(node)]:
            edges["pre"] = flow.edge(maps[0])
        edges |= self._conv_edges(flow, unit.fork, way)
        if unit.branch is not None:
            edges["standard"] = flow.edge(before_weighing(flow, unit.branch))
        edges["post_add"] = flow.edge(unit.add)
        if flow.result is not None:
            edges["post"] = flow.edge(flow.result, (flow.output,))
        edges["identity"] = flow.edge(unit.shortcut[0], (unit.shortcut[1],))
        return edges

    def _plain_edges(self, flow: Flow, mate: bool) -> dict[str, Edge]:
        end = flow.first_result
        if end is None:
            return {}
        way = flow.waypoints[end]
        start = next(index for index, node in enumerate(way) if flow.is_map(node))
        edges = {"pre": flow.edge(way[start])} if way[start] is not end else {}
        edges |= self._conv_edges(flow, way[start], way[start + 1 :])
        if flow.result is None:
            return edges
        if mate:
            edges["standard"] = flow.edge(before_weighing(flow, flow.result, activation=True))
        edges["post"] = flow.edge(flow.result, (flow.output,))
        return edges

    def _conv_edges(self, flow: Flow, start: fx.Node | None, way: list[fx.Node]) -> dict[str, Edge]:
        found, _, _ = self._scan(flow, start, way)
        return {f"conv{k}": edge for k, edge in found.items() if f"conv{k}" in _CONVS}

    def _scan(
        self, flow: Flow, start: fx.Node | None, way: list[fx.Node]
    ) -> tuple[dict[int, Edge], int, fx.Node | None]:
        """Places after convolutions along a way: those that are images, how many in all, the last.

        A stretch between two waypoints that multiplies its own start is a gate.
        """
        edges: dict[int, Edge] = {}
        count, last = 0, None
        for index, node in enumerate(way):
            stretch = flow.between(start, node)
            gate = calls(node, MULS) and start in node.all_input_nodes
            start = node
            if gate or not self._count(flow, stretch):
                continue
            child = flow.child(node) if len(stretch) == 1 else None
            inner, inside, at_end = self._chain(child) if child is not None else ({}, 1, True)
            hidden = range(1, inside + (not at_end))
            for k in hidden:
                if k in inner:
                    edges[count + k] = replace(inner[k], inside=str(node.target))
            count += inside
            last = after_norm(flow, node, way[index + 1 :])
            if at_end and flow.is_map(last) and not self._is_channels_last(flow, stretch):
                edges[count] = flow.edge(last)
        return edges, count, last

    def _chain(self, module: nn.Module) -> tuple[dict[int, Edge], int, bool]:
        """Of a child: places after its convolutions, their number, whether it ends in the last.

        Anything else than one step after another counts as one convolution.
        """
        if module not in self._chains:
            single: tuple[dict[int, Edge], int, bool] = ({}, 1, True)
            simple = self.convs(module) == 1 and not isinstance(module, nn.Sequential)
            self._chains[module] = single
            if not simple and list(module.children()) and module in self.calls:
                self._chains[module] = self._read_chain(module) or single
        return self._chains[module]

    def _read_chain(self, module: nn.Module) -> tuple[dict[int, Edge], int, bool] | None:
        try:
            flow = self.flow(module)
        except TraceError:
            return None
        if flow.result is None or set(flow.waypoints[flow.result]) != flow.nodes:
            return None
        start, *way = flow.waypoints[flow.result]
        edges, count, last = self._scan(flow, start, way)
        return edges, count, last in (flow.result, before_weighing(flow, flow.result))

    def _is_channels_last(self, flow: Flow, stretch: Iterable[fx.Node]) -> bool:
        """Whether a stretch ends in a linear layer, which reads channels from the last axis."""
        children = [flow.child(n) for n in flow.graph.nodes if n in set(stretch)]
        weighted = [w for child in children if child is not None for w in self._weighted(child)]
        return isinstance(weighted[-1], nn.Linear)
