"""Names of the weights in an ONNX graph: which parameter of which module each constant was.

torch's exporters keep most names and lose some. Both fold what they can compute (the transpose of
a linear layer's weight, batch norm behind a convolution, resampled positions) into new, nameless
constants, and keep equal constants once. What remains to tell the name:

- the exporter of torch.export (`dynamo=True`) notes the parameters that a constant was folded
  from, and at each node the call it came from, with its parameters;
- the older exporter calls each node after its module (`/blocks/blocks.0/attn/qkv/MatMul`) and
  copies equal constants by Identity nodes;
- in both, a bias that kept its name tells the name of the weight before it.

A name that cannot be found this way is not guessed: the constant stays nameless.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    import onnx

_NORM = {1: "weight", 2: "bias"}
_ROLES: dict[str, dict[int, str]] = {
    "MatMul": {1: "weight"},
    "Gemm": _NORM,
    "Conv": _NORM,
    "ConvTranspose": _NORM,
    "LayerNormalization": _NORM,
    "GroupNormalization": _NORM,
    "InstanceNormalization": _NORM,
    "BatchNormalization": {**_NORM, 3: "running_mean", 4: "running_var"},
}
_NAMELESS = re.compile(r"onnx::.*|/.*|\d+|val_\d+|.*_output_\d+")
_RESHAPING = {
    *("Reshape", "Transpose", "Resize", "Cast", "Expand", "Unsqueeze", "Squeeze", "Slice"),
    "Identity",
}
# Positions of an older export that resamples them, by the module that cuts images into patches.
_POSITIONS = {"patch_embeddings": "position_embeddings", "patch_embed": "pos_embed"}
_DEEPEST = 32  # nodes from a constant to where it is added


@dataclass
class NamedWeights:
    """What `name_weights` found.

    Attributes:
        tensors: Weights in the order of their use, shaped as in torch.
        unnamed: Constants of several values without a name.
        added: Names of weights that are added to something as they are, as positions are.
        folded_norms: Convolutions that took in a batch norm.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    unnamed: dict[str, Tensor] = field(default_factory=dict)
    added: set[str] = field(default_factory=set)
    folded_norms: list[str] = field(default_factory=list)


class OnnxGraph:
    """An ONNX graph with what its nodes and constants are called in torch.

    Args:
        graph: The graph.
        constants: Its floating-point constants by name.
    """

    def __init__(self, graph: onnx.GraphProto, constants: dict[str, Tensor]) -> None:
        self.graph, self.constants = graph, dict(constants)
        for node in graph.node:
            if node.op_type == "Identity" and node.input[0] in self.constants:
                self.constants[node.output[0]] = self.constants[node.input[0]]
        self.nodes = [node for node in graph.node if node.op_type not in ("Identity", "Constant")]
        self.producers = {value: node for node in graph.node for value in node.output}

    @cached_property
    def targets(self) -> dict[str, str]:
        """The parameter or stored buffer behind each placeholder, where the exporter tells."""
        told = _properties(self.graph).get("graph_signature", "")
        stored = r"(\w+): (?:PARAMETER|BUFFER) target='([^']+)'(?! persistent=False)"
        return dict(re.findall(stored, told))

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(self.targets.values())

    @cached_property
    def _folded_from(self) -> dict[str, list[str]]:
        told = {v.name: _properties(v).get("folded_from", "[]") for v in self.graph.value_info}
        return {name: _listed(text) for name, text in told.items()}

    @cached_property
    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the values between nodes, where told; 0 is an edge that varies."""
        return {
            v.name: [edge.dim_value for edge in v.type.tensor_type.shape.dim]
            for v in self.graph.value_info
        }

    def own_name(self, constant: str) -> str | None:
        """The parameter that a constant was, by its name or by what it was folded from."""
        known = self._parameters
        if constant in known or not (known or _NAMELESS.fullmatch(constant)):
            return constant
        sources = known.intersection(self._folded_from.get(constant, ()))
        return next(iter(sources)) if len(sources) == 1 else None

    def module(self, node: onnx.NodeProto) -> str | None:
        """The module that a node was called in, where the exporter tells."""
        scopes = _listed(_properties(node).get("name_scopes", "[]"))
        if scopes:
            return scopes[-2] if len(scopes) > 1 else ""
        if not node.name.startswith("/"):
            return None
        path: list[str] = []
        for part in node.name.split("/")[1:-1]:
            if path and part.startswith(f"{path[-1]}."):  # an item of a sequence: blocks, blocks.0
                path[-1] = part
            else:
                path.append(part)
        return ".".join(path)

    def call(self, node: onnx.NodeProto) -> tuple[str, list[str]]:
        """The call in torch that a node came from, and the parameters it was given."""
        text = _properties(node).get("fx_node", "")
        placeholders = re.findall(r"%(\w+)", text)
        return text, [self.targets[name] for name in placeholders if name in self.targets]

    def used(self, node: onnx.NodeProto) -> Iterator[tuple[int, str, Tensor]]:
        """Constants that a node takes: position, name, value."""
        for position, name in enumerate(node.input):
            if name in self.constants:
                yield position, name, self.constants[name]

    @cached_property
    def readers(self) -> dict[str, list[onnx.NodeProto]]:
        found: dict[str, list[onnx.NodeProto]] = {}
        for node in self.nodes:
            for value in node.input:
                found.setdefault(value, []).append(node)
        return found


def name_weights(graph: OnnxGraph) -> NamedWeights:
    """Gives each constant of a graph the name and the shape it had in torch."""
    named = NamedWeights()
    claims: dict[str, set[int]] = {}
    for node in graph.nodes:
        for position, name, value in graph.used(node):
            key = graph.own_name(name) or _name_by_use(graph, node, position)
            if key is None:
                if value.numel() > 1:
                    named.unnamed[name] = value
                continue
            claims.setdefault(key, set()).add(value.data_ptr())
            named.tensors.setdefault(key, _as_in_torch(graph, node, position, name, value))
            if node.op_type == "Add":
                named.added.add(key)
        if folded := _folded_norm(graph, node):
            named.folded_norms.append(folded)
    for key, constants in claims.items():
        if len(constants) > 1:  # several constants of one module that has no such weight
            named.unnamed[key] = named.tensors.pop(key)
    if graph.targets:
        _name_copies(graph, named)
    else:
        _name_positions(graph, named)
    return named


def _name_by_use(graph: OnnxGraph, node: onnx.NodeProto, position: int) -> str | None:
    """The name of a nameless constant by the part it plays in a node."""
    role = _ROLES.get(node.op_type, {}).get(position)
    if role is None:
        return None
    bias = _named_sibling(graph, node)
    if bias is not None:
        return re.sub("(weight|bias)$", role, bias)
    module = graph.module(node)
    return f"{module}.{role}".lstrip(".") if module is not None else None


def _named_sibling(graph: OnnxGraph, node: onnx.NodeProto) -> str | None:
    """A weight or a bias with a name in the same node, or in the addition that follows it."""
    nodes = [node]
    if node.op_type == "MatMul":
        nodes += [n for n in graph.readers.get(node.output[0], []) if n.op_type == "Add"]
    for one in nodes:
        for _, name, _ in graph.used(one):
            own = graph.own_name(name)
            if own is not None and re.search(r"(weight|bias)$", own):
                return own
    return None


def _as_in_torch(
    graph: OnnxGraph, node: onnx.NodeProto, position: int, name: str, value: Tensor
) -> Tensor:
    """Undoes what the exporter did to a weight: transposed, flattened, repeated for the batch."""
    nameless = _NAMELESS.fullmatch(name) is not None
    if node.op_type == "MatMul" and position == 1 and nameless and value.ndim == 2:
        return value.t().reshape(-1, *_patch_shape(graph, node, len(value)))
    if node.op_type == "Gemm" and position == 1 and not _attribute(node, "transB"):
        return value.t() if nameless else value
    if node.op_type == "Concat" and value.ndim == 3 and graph.own_name(name) != name:
        return value[:1]
    return value


def _patch_shape(graph: OnnxGraph, node: onnx.NodeProto, width: int) -> list[int]:
    """(channels, rows, columns) of a patch, where a product reads patches cut from an input."""
    flat = graph.producers.get(node.input[0])
    if flat is None or flat.op_type != "Reshape":
        return [width]
    patches = value = flat.input[0]
    for _ in range(_DEEPEST):
        before = graph.producers.get(value)
        if before is None:
            shape = graph.shapes.get(patches, [])[-3:]
            product = shape[0] * shape[1] * shape[2] if len(shape) == 3 else 0
            return shape if product == width else [width]
        if before.op_type not in ("Reshape", "Transpose", "Cast"):
            break
        value = before.input[0]
    return [width]


def _folded_norm(graph: OnnxGraph, node: onnx.NodeProto) -> str | None:
    """The convolution's name, where its weight is not the trained one any more."""
    if node.op_type not in ("Conv", "ConvTranspose") or node.input[1] not in graph.constants:
        return None
    own = graph.own_name(node.input[1])
    call, _ = graph.call(node)
    if own is not None and "batch_norm" not in call:
        return None
    return own.removesuffix(".weight") if own else graph.module(node) or node.name


def _name_copies(graph: OnnxGraph, named: NamedWeights) -> None:
    """Parameters that share a constant with an equal one, by the calls that got them.

    The parameters of a call and the constants of the nodes it became are in the same order.
    """
    calls: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.nodes:
        calls.setdefault(graph.call(node)[0], []).append(node)
    calls.pop("", None)
    for nodes in calls.values():
        if any(_folded_norm(graph, node) for node in nodes):
            continue
        parameters = graph.call(nodes[0])[1]
        _name_zero_bias(nodes[-1], parameters, named)
        uses = [(node, *use) for node in nodes for use in graph.used(node)]
        if len(uses) != len(parameters):  # constants of the operator itself, such as a scale
            uses = [use for use in uses if use[-1].numel() > 1]
        if len(uses) == len(parameters):
            for key, use in zip(parameters, uses, strict=True):
                if key not in named.tensors:
                    named.tensors[key] = _as_in_torch(graph, *use)


def _name_zero_bias(node: onnx.NodeProto, parameters: list[str], named: NamedWeights) -> None:
    """A bias that the call got and the node lacks: the exporter leaves out those that are zero."""
    if node.op_type in ("Conv", "Gemm") and len(node.input) == 2 and len(parameters) == 2:
        weight, bias = parameters
        if weight in named.tensors and bias not in named.tensors:
            named.tensors[bias] = named.tensors[weight].new_zeros(len(named.tensors[weight]))


def _name_positions(graph: OnnxGraph, named: NamedWeights) -> None:
    """Positions that were cut into class token and grid, so that the grid can be resampled."""
    import torch

    for node in graph.nodes:
        module = graph.module(node)
        if node.op_type != "Add" or module is None:
            continue
        inside = f"{module}." if module else ""
        for value in node.input:
            pieces = _pieces(graph, value)
            if pieces and all(name in named.unnamed for name in pieces):
                joined = torch.cat([named.unnamed[name] for name in pieces], 1)
                for patches, positions in _POSITIONS.items():
                    if any(key.startswith(f"{inside}{patches}.") for key in named.tensors):
                        named.tensors.setdefault(f"{inside}{positions}", joined)
                        named.unnamed = {k: v for k, v in named.unnamed.items() if k not in pieces}


def _pieces(graph: OnnxGraph, value: str, depth: int = 0) -> list[str] | None:
    """The constants (1 n d) that a value was joined from, if it does not depend on an input."""
    if value in graph.constants:
        return [value] if graph.constants[value].ndim == 3 else None
    node = graph.producers.get(value)
    if node is None or depth > _DEEPEST:
        return None
    if node.op_type in _RESHAPING:
        return _pieces(graph, node.input[0], depth + 1)
    if node.op_type != "Concat":
        return None
    deeper = depth + _DEEPEST // 2  # joined pieces of joined pieces, and no further
    pieces = [_pieces(graph, one, deeper) for one in node.input]
    return None if None in pieces else [name for piece in pieces for name in piece or ()]


def _attribute(node: onnx.NodeProto, name: str) -> int:
    return next((a.i for a in node.attribute if a.name == name), 0)


def _properties(proto: Any) -> dict[str, str]:
    """Notes of the exporter, by the last part of their names."""
    return {entry.key.rpartition(".")[2]: entry.value for entry in proto.metadata_props}


def _listed(text: str) -> list[str]:
    """The strings of a list that the exporter wrote as Python prints it."""
    return re.findall(r"'([^']*)'", text)
