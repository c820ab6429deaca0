"""Weights from ONNX files, under the names they had in torch; needs the extra `onnx`.

The graph is read, never run. `zoo.onnx_names` finds the names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zoo.card import CardError, ModelCard
from zoo.exported import card_of_onnx
from zoo.onnx_names import OnnxGraph, name_weights
from zoo.sources import Source, WeightsError, listed

if TYPE_CHECKING:
    import onnx

_MOST_PREFIX_TOKENS = 32


def read_onnx(path: str | Path) -> Source:
    """The weights of an ONNX file, in the order in which the graph uses them.

    `config` tells the producer, the inputs' shapes, `folded_norms` (convolutions that took in the
    batch norm behind them at the export, so that neither has its own weights any more), `unnamed`
    (constants that no name could be found for, left out), and where the graph tells them
    `layer_norm_eps` and `hidden_act`. `position_grids` has the grids that follow from the input's
    size. A file of `zoo.export_onnx` has the card of its model.

    Raises:
        WeightsError: the file or the card inside is broken, claims more than it holds, reaches for
            files elsewhere, or is quantised.
    """
    file = Path(path).expanduser()
    model = _parse(file)
    try:
        return _read(model, file, f"file:{path}")
    except WeightsError:
        raise
    except Exception as error:  # a damaged graph raises anything
        raise WeightsError(
            f"{file} was cut short or is no ONNX file: {type(error).__name__}: {error}"
        ) from error


def _read(model: onnx.ModelProto, file: Path, name: str) -> Source:
    graph = model.graph
    _refuse_quantised(graph, file)
    inputs = _inputs(graph)
    named = name_weights(OnnxGraph(graph, _constants(graph, file)))
    if not named.tensors:
        raise WeightsError(f"{file} holds no weights: its graph has {len(graph.node)} nodes")
    if named.folded_norms:
        name += f" (batch norm folded into {len(named.folded_norms)} convolutions at the export)"
    config = {
        "library": "onnx",
        "producer": f"{model.producer_name} {model.producer_version}".strip(),
        "inputs": inputs,
        "folded_norms": named.folded_norms,
        "unnamed": {key: list(value.shape) for key, value in named.unnamed.items()},
        **_options(graph),
    }
    grids = _position_grids(named.tensors, named.added, inputs)
    return Source(name, named.tensors, _card(model, file), grids, None, config)


def _card(model: onnx.ModelProto, file: Path) -> ModelCard | None:
    """What `zoo.export_onnx` wrote beside the graph."""
    try:
        return card_of_onnx(model, file)
    except CardError as error:
        raise WeightsError(str(error)) from error


def _options(graph: onnx.GraphProto) -> dict[str, Any]:
    """What no weight tells, in the words of transformers' config.json."""
    options: dict[str, Any] = {}
    epsilons = {f"{value:.6g}" for value in _epsilons(graph)}
    if len(epsilons) == 1:
        options["layer_norm_eps"] = float(epsilons.pop())
    operators = {(node.op_type, _text(node, "approximate")) for node in graph.node}
    if operators & {("Erf", ""), ("Gelu", ""), ("Gelu", "none")}:
        options["hidden_act"] = "gelu"
    elif ("Gelu", "tanh") in operators:
        options["hidden_act"] = "gelu_pytorch_tanh"
    return options


def _epsilons(graph: onnx.GraphProto) -> Iterator[float]:
    """Of layer norms: an attribute, or in older files what is added before the square root."""
    from onnx.numpy_helper import to_array

    scalars = {
        node.output[0]: attribute.t
        for node in graph.node
        for attribute in node.attribute
        if node.op_type == "Constant" and attribute.name == "value" and not attribute.t.dims
    }
    added = {node.output[0]: node for node in graph.node if node.op_type == "Add"}
    for node in graph.node:
        if node.op_type == "LayerNormalization":
            yield next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        elif node.op_type == "Sqrt" and node.input[0] in added:
            for value in added[node.input[0]].input:
                if value in scalars:
                    yield float(to_array(scalars[value]))


def _text(node: onnx.NodeProto, attribute: str) -> str:
    return next((a.s.decode() for a in node.attribute if a.name == attribute), "")


def _parse(file: Path) -> onnx.ModelProto:
    try:
        import onnx
    except ImportError as error:
        raise WeightsError(
            f'{file} is an ONNX file, and reading it needs the package onnx: pip install "'
            f'attention-zoo[onnx]"'
        ) from error
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(file, format="protobuf", load_external_data=False)
    except DecodeError as error:
        raise WeightsError(f"{file} was cut short or is no ONNX file: {error}") from error
    if not model.graph.node:
        raise WeightsError(f"{file} was cut short or is no ONNX file: it has no graph")
    return model


def _refuse_quantised(graph: onnx.GraphProto, file: Path) -> None:
    found = {
        node.op_type for node in graph.node if re.search("Quantize|Integer|QLinear", node.op_type)
    }
    if found:
        raise WeightsError(
            f"{file} is quantised ({listed(sorted(found))}): its weights are not the trained ones"
        )


def _inputs(graph: onnx.GraphProto) -> dict[str, list[int | str]]:
    """Shapes of the graph's inputs; a name stands for an edge that may vary."""
    weights = {tensor.name for tensor in graph.initializer}
    return {
        value.name: [edge.dim_param or edge.dim_value for edge in value.type.tensor_type.shape.dim]
        for value in graph.input
        if value.name not in weights
    }


def _constants(graph: onnx.GraphProto, file: Path) -> dict[str, Tensor]:
    """Initializers and values of Constant nodes that hold floating-point numbers."""
    given = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            given.update((node.output[0], a.t) for a in node.attribute if a.name == "value")
    mapped: dict[Path, Tensor] = {}
    dtypes = _dtypes()
    return {
        name: _tensor(tensor, dtypes[tensor.data_type], file, mapped)
        for name, tensor in given.items()
        if tensor.data_type in dtypes
    }


def _dtypes() -> dict[int, torch.dtype]:
    from onnx import TensorProto

    return {
        TensorProto.FLOAT: torch.float32,
        TensorProto.DOUBLE: torch.float64,
        TensorProto.FLOAT16: torch.float16,
        TensorProto.BFLOAT16: torch.bfloat16,
    }


def _tensor(
    proto: onnx.TensorProto, dtype: torch.dtype, file: Path, mapped: dict[Path, Tensor]
) -> Tensor:
    shape = list(proto.dims)
    size = math.prod(shape) * dtype.itemsize
    if proto.external_data:
        data = _external(proto, size, file, mapped)
    elif proto.raw_data:
        data = torch.frombuffer(bytearray(proto.raw_data), dtype=torch.uint8)
    elif proto.float_data or proto.double_data:
        values = proto.float_data or proto.double_data
        data = torch.tensor(values, dtype=dtype).view(torch.uint8)
    elif proto.int32_data:  # halves, as whole numbers with the same bits
        data = torch.tensor(proto.int32_data, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    else:
        data = torch.empty(0, dtype=torch.uint8)
    if len(data) != size or min(shape, default=0) < 0:
        raise WeightsError(
            f"{file}: {proto.name} claims shape {shape} of {dtype}, and has {len(data)} bytes"
        )
    return data.view(dtype).reshape(shape)


def _external(proto: onnx.TensorProto, size: int, file: Path, mapped: dict[Path, Tensor]) -> Tensor:
    """The bytes of a tensor that lies in another file, mapped into memory."""
    told: dict[str, Any] = {entry.key: entry.value for entry in proto.external_data}
    path = _beside(told.get("location", ""), proto.name, file)
    if path not in mapped:
        length = path.stat().st_size
        mapped[path] = torch.from_file(str(path), shared=False, size=length, dtype=torch.uint8)
    offset, length = (int(told.get("offset", 0)), int(told.get("length", size)))
    if min(offset, length) < 0 or offset + length > len(mapped[path]):
        raise WeightsError(
            f"{path} was cut short: {proto.name} of {file.name} lies at {offset} to "
            f"{offset + length}, and the file has {len(mapped[path])} bytes"
        )
    data = mapped[path][offset : offset + length]
    return data.clone() if offset % 8 else data


def _beside(location: str, tensor: str, file: Path) -> Path:
    """A path inside the ONNX file's folder; the file may not reach out of it."""
    parts = re.split(r"[/\\]", location)
    if not location or ".." in parts or not parts[0] or ":" in parts[0]:
        raise WeightsError(
            f"{file}: {tensor} points to {location!r}, which is not inside the file's folder"
        )
    path = file.parent / location
    if not path.is_file():
        raise WeightsError(f"{path} is missing, which {file} keeps its weights in")
    if not path.stat().st_size:
        raise WeightsError(f"{path} was cut short: it is empty")
    return path


def _position_grids(
    tensors: dict[str, Tensor], added: set[str], inputs: dict[str, list[int | str]]
) -> dict[str, tuple[int, int]]:
    """Grids of the positions that are added to an image's patches, from the sizes of both."""
    first = next((value for value in tensors.values() if value.ndim == 4), None)
    shape = next((shape for shape in inputs.values() if len(shape) == 4), [])
    rows, cols = shape[2:] or ("", "")
    if first is None or not isinstance(rows, int) or not isinstance(cols, int):
        return {}
    grid = (rows // first.shape[2], cols // first.shape[3])
    return {
        key: grid
        for key in tensors
        if key in added
        and tensors[key].ndim == 3
        and 0 <= tensors[key].shape[1] - grid[0] * grid[1] <= _MOST_PREFIX_TOKENS
    }
