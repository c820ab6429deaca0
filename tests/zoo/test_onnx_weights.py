"""Weights from ONNX: both exporters of torch give back the state dict; what is odd is refused."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch
import torchvision
import transformers
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

import zoo
from zoo.onnx_weights import read_onnx
from zoo.weights import WeightsError

TINY = {"depth": 1, "embed_dim": 16, "num_heads": 2, "img_size": 32, "num_classes": 5}


def our_vit(**options: Any) -> nn.Module:
    return zoo.create_model(
        "vit_micro_patch2_8",
        **{"depth": 1, "num_classes": 5, "class_token": True, "global_pool": "token", **options},
    )


def timm_vit() -> nn.Module:
    """Resamples its positions in each forward pass, and has registers."""
    options = {**TINY, "reg_tokens": 2, "dynamic_img_size": True}
    return timm.create_model("vit_tiny_patch16_224", **options)


def torchvision_vit() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 16, 1, 2, 16, 32, num_classes=5)


class Dinov2(nn.Module):
    """Behind a prefix, as the backbone of a larger network."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.Dinov2Config(
            hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
        )
        self.backbone = transformers.Dinov2Model(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(x).last_hidden_state


def randomized(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.is_floating_point():
                value.uniform_(0.1, 1)
    return model.eval()


def export(model: nn.Module, images: Tensor, path: Path, **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model.eval(), (images,), path, verbose=False, **options)
    return path


def run(path: Path, images: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(out)


def assert_same_state(source: Any, model: nn.Module, lacks: tuple[str, ...] = ()) -> None:
    state = {
        key: value
        for key, value in model.state_dict().items()
        if not key.endswith(("num_batches_tracked", *lacks))
    }
    assert source.tensors.keys() == state.keys()
    for key, value in state.items():
        assert torch.equal(source.tensors[key], value), key


# --- both exporters ----------------------------------------------------------------------------


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize(
    ("make", "size", "random"),
    [
        (our_vit, 8, True),
        (our_vit, 8, False),  # equal initial values, which exporters keep once or leave out
        (timm_vit, 32, False),
        (torchvision_vit, 32, False),
        (Dinov2, 28, True),
        (Dinov2, 28, False),
    ],
)
def test_vits_come_back(make: Any, size: int, random: bool, dynamo: bool, tmp_path: Path) -> None:
    model = randomized(make()) if random else make()
    path = export(model, torch.randn(2, 3, size, size), tmp_path / "x.onnx", dynamo=dynamo)
    source = read_onnx(path)
    assert_same_state(source, model, lacks=("mask_token",))
    assert source.config["library"] == "onnx"
    assert source.config["producer"].startswith("pytorch ")
    assert list(source.config["inputs"].values()) == [[2, 3, size, size]]
    assert source.config["layer_norm_eps"] == 1e-6
    assert source.config["hidden_act"] == "gelu"
    assert source.config["folded_norms"] == []


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_loaded_vit_computes_what_onnxruntime_does(dynamo: bool, tmp_path: Path) -> None:
    images = torch.randn(3, 3, 8, 16)
    options: dict[str, Any] = {"dynamic_axes": {"x": {0: "b"}}, "input_names": ["x"]}
    if dynamo:
        options = {"dynamic_shapes": ({0: torch.export.Dim("b")},)}
    model = our_vit(img_size=(8, 16), reg_tokens=2)
    path = export(model, images[:2], tmp_path / "x.onnx", dynamo=dynamo, **options)
    other = our_vit(img_size=(8, 16), reg_tokens=2).eval()
    report = zoo.load_pretrained(other, f"file:{path}")
    assert (report.missing, report.unexpected, report.matched_fraction) == ((), (), 1.0)
    torch.testing.assert_close(other(images), run(path, images), atol=1e-4, rtol=1e-4)
    turned = our_vit(img_size=(16, 8), reg_tokens=2)
    report = zoo.load_pretrained(turned, f"file:{path}")  # as many positions, turned
    assert report.resized == {"pos_embed": "grid 4x8 -> 8x4"}


def test_positions_resampled_at_the_export_are_those_of_its_size(tmp_path: Path) -> None:
    """The older exporter keeps the original ones, and resamples in the graph."""
    model, images = randomized(Dinov2()), torch.randn(1, 3, 42, 28)
    key = "backbone.embeddings.position_embeddings"
    kept = read_onnx(export(model, images, tmp_path / "old.onnx", dynamo=False))
    assert torch.equal(kept.tensors[key], model.state_dict()[key])
    assert not kept.position_grids
    resampled = read_onnx(export(model, images, tmp_path / "new.onnx", dynamo=True))
    embeddings = model.backbone.embeddings
    tokens = torch.zeros(1, 7, 16)
    expected = embeddings.interpolate_pos_encoding(tokens, 42, 28)
    torch.testing.assert_close(resampled.tensors[key], expected, atol=1e-4, rtol=1e-4)
    assert resampled.position_grids == {key: (3, 2)}


def test_buffers_that_are_not_stored_are_no_weights(tmp_path: Path) -> None:
    """Fixed positions are in the graph, but in no state dict."""
    model = our_vit(position="sincos", class_token=False, global_pool="avg")
    source = read_onnx(export(model, torch.randn(1, 3, 8, 8), tmp_path / "x.onnx", dynamo=True))
    assert_same_state(source, model)
    assert source.config["unnamed"] == {"pos_embed": [1, 16, 64]}


def test_older_files_come_back(tmp_path: Path) -> None:
    """Before opset 17, layer norm was six operators, and gelu was Erf."""
    model = randomized(our_vit(norm_eps=1e-5))
    path = export(
        model, torch.randn(1, 3, 8, 8), tmp_path / "x.onnx", dynamo=False, opset_version=14
    )
    assert "LayerNormalization" not in {node.op_type for node in onnx.load(path).graph.node}
    source = read_onnx(path)
    assert_same_state(source, model)
    assert source.config["layer_norm_eps"] == 1e-5
    assert source.config["hidden_act"] == "gelu"


def test_tanh_gelu_is_told(tmp_path: Path) -> None:
    model = our_vit(act="gelu_tanh")
    path = export(model, torch.randn(1, 3, 8, 8), tmp_path / "x.onnx", dynamo=False)
    assert read_onnx(path).config["hidden_act"] == "gelu_pytorch_tanh"


# --- batch norm --------------------------------------------------------------------------------

UNFOLDED: dict[bool, dict[str, Any]] = {
    False: {"training": torch.onnx.TrainingMode.PRESERVE, "dynamo": False},
    True: {"optimize": False, "dynamo": True},
}


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("random", [False, True])
def test_a_resnet_comes_back(random: bool, dynamo: bool, tmp_path: Path) -> None:
    model = zoo.create_model("resnet_micro", num_classes=5)
    if random:
        randomized(model)
    images = torch.randn(2, 3, 32, 32)
    path = export(model, images, tmp_path / "x.onnx", **UNFOLDED[dynamo])
    assert_same_state(read_onnx(path), model)
    other = zoo.create_model("resnet_micro", num_classes=5).eval()
    assert zoo.load_pretrained(other, f"file:{path}").matched_fraction > 0.99
    torch.testing.assert_close(other(images), run(path, images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dynamo", [False, True])
def test_folded_batch_norms_are_said(dynamo: bool, tmp_path: Path) -> None:
    model = randomized(timm.create_model("resnet10t", num_classes=5))
    path = export(model, torch.randn(1, 3, 32, 32), tmp_path / "x.onnx", dynamo=dynamo)
    source = read_onnx(path)
    assert len(source.config["folded_norms"]) == 14
    block = copy.deepcopy(model.layer2[0])
    for conv, norm, name in (
        (block.conv1, block.bn1, "layer2.0.conv1"),
        (block.downsample[1], block.downsample[2], "layer2.0.downsample.1"),
    ):
        fused = fuse_conv_bn_eval(conv, norm)
        assert name in source.config["folded_norms"]
        for part in ("weight", "bias"):
            torch.testing.assert_close(source.tensors[f"{name}.{part}"], getattr(fused, part))
    other = zoo.create_model("timm:resnet10t", num_classes=5)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    said = r"\(batch norm folded into 14 convolutions at the export\) does not fit"
    with pytest.raises(WeightsError, match=said):
        zoo.load_pretrained(other, f"file:{path}")
    assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())


# --- graphs by hand ----------------------------------------------------------------------------


def graph(
    nodes: list[Any], weights: list[TensorProto], path: Path, shape: tuple[Any, ...] = (1, 4)
) -> Path:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], weights))
    path.write_bytes(model.SerializeToString())
    return path


def weight(name: str, *shape: int) -> TensorProto:
    values = np.random.default_rng(len(name)).normal(size=shape).astype(np.float32)
    return numpy_helper.from_array(values, name)


def test_names_of_others_stay_in_the_order_of_use(tmp_path: Path) -> None:
    """Paddle's names, listed backwards, and one that no node reads."""
    names = ["conv2d_0.w_0_deepcopy_0", *(f"batch_norm2d_0.{p}" for p in ("w_0", "b_0", "w_1"))]
    nodes = [
        helper.make_node("Conv", ["x", names[0]], ["a"], "Conv.0"),
        helper.make_node("BatchNormalization", ["a", *names[1:], "v"], ["b"], "BatchNorm.0"),
        helper.make_node("Identity", ["linear_0.w_0"], ["copy"], "Identity.0"),
        helper.make_node("MatMul", ["b", "copy"], ["y"], "MatMul.0"),
    ]
    weights = [weight(names[0], 2, 3, 1, 1), *(weight(name, 2) for name in (*names[1:], "v"))]
    weights = [weight("unused", 2), weight("linear_0.w_0", 4, 3), *reversed(weights)]
    source = read_onnx(graph(nodes, weights, tmp_path / "x.onnx", ("b", 3, 4, 4)))
    assert list(source.tensors) == [*names, "v", "copy"]
    assert source.tensors["copy"].shape == (4, 3)  # as the file has it
    assert source.config["inputs"] == {"x": ["b", 3, 4, 4]}
    for tensor in weights[2:]:
        assert torch.equal(source.tensors[tensor.name], torch.tensor(numpy_helper.to_array(tensor)))


@pytest.mark.parametrize(
    ("node", "shape", "key", "expected"),
    [
        (("MatMul", ["x", "onnx::MatMul_7"], "/a/a.0/fc/MatMul", {}), (4, 3), "a.0.fc.weight", "T"),
        (("MatMul", ["x", "proj"], "/a/MatMul", {}), (4, 3), "proj", ""),
        (("Gemm", ["x", "onnx::Gemm_7"], "/fc/Gemm", {}), (4, 3), "fc.weight", "T"),
        (("Gemm", ["x", "onnx::Gemm_7"], "/fc/Gemm", {"transB": 1}), (3, 4), "fc.weight", ""),
        (("ConvTranspose", ["x", "17"], "/up/ConvTranspose", {}), (4, 2, 2, 2), "up.weight", ""),
    ],
)
def test_nameless_weights_get_the_name_of_their_module(
    node: Any, shape: tuple[int, ...], key: str, expected: str, tmp_path: Path
) -> None:
    kind, inputs, name, options = node
    value = weight(inputs[1], *shape)
    made = helper.make_node(kind, inputs, ["y"], name, **options)
    source = read_onnx(graph([made], [value], tmp_path / "x.onnx"))
    tensor = torch.tensor(numpy_helper.to_array(value))
    assert source.tensors.keys() == {key}
    assert torch.equal(source.tensors[key], tensor.T if expected else tensor)


def test_a_bias_tells_the_name_of_its_weight(tmp_path: Path) -> None:
    """No path in the nodes' names, as in old files, and a weight kept in a Constant."""
    constant = helper.make_node("Constant", [], ["7"], value=weight("", 4, 3))
    nodes = [
        constant,
        helper.make_node("MatMul", ["x", "7"], ["a"], "MatMul_0"),
        helper.make_node("Add", ["layer.attn.in_proj_bias", "a"], ["y"], "Add_0"),
    ]
    weights = [weight("layer.attn.in_proj_bias", 3)]
    source = read_onnx(graph(nodes, weights, tmp_path / "x.onnx"))
    assert source.tensors["layer.attn.in_proj_weight"].shape == (3, 4)


def test_what_has_no_name_is_left_out_and_listed(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "onnx::MatMul_1"], ["a"], "/attn/MatMul"),
        helper.make_node("MatMul", ["a", "onnx::MatMul_2"], ["b"], "/attn/MatMul_1"),
        helper.make_node("Mul", ["b", "onnx::Mul_3"], ["c"], "/Mul"),
        helper.make_node("Add", ["c", "bias"], ["y"], "/Add"),
    ]
    shapes = {"onnx::MatMul_1": (4, 4), "onnx::MatMul_2": (4, 4), "onnx::Mul_3": (4,), "bias": (4,)}
    weights = [weight(name, *shape) for name, shape in shapes.items()]
    source = read_onnx(graph(nodes, weights, tmp_path / "x.onnx"))
    assert source.tensors.keys() == {"bias"}  # which of the two were attn.weight?
    assert source.config["unnamed"] == {"onnx::Mul_3": [4], "attn.weight": [4, 4]}


def test_a_graph_that_doubles_is_not_followed(tmp_path: Path) -> None:
    """Forty joints of a value with itself would be 2^40 pieces of a position embedding."""
    nodes = [
        helper.make_node("Concat", [f"/c{i}"] * 2, [f"/c{i + 1}"], f"/Concat_{i}", axis=1)
        for i in range(40)
    ]
    nodes += [
        helper.make_node("Conv", ["x", "patch_embed.proj.weight"], ["a"], "/patch_embed/proj/Conv"),
        helper.make_node("Add", ["a", "/c40"], ["y"], "/Add"),
    ]
    weights = [weight("/c0", 1, 2, 4), weight("patch_embed.proj.weight", 4, 3, 2, 2)]
    source = read_onnx(graph(nodes, weights, tmp_path / "x.onnx"))
    assert source.tensors.keys() == {"patch_embed.proj.weight"}
    assert source.config["unnamed"] == {"/c0": [1, 2, 4]}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (TensorProto.FLOAT, torch.float32),
        (TensorProto.DOUBLE, torch.float64),
        (TensorProto.FLOAT16, torch.float16),
        (TensorProto.BFLOAT16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("raw", [False, True])
def test_dtypes_and_encodings(kind: int, dtype: torch.dtype, raw: bool, tmp_path: Path) -> None:
    values = torch.tensor([[0.5, -2.0], [3.0, 0.0]], dtype=dtype)
    flat: Any = values.flatten().view(torch.uint8).numpy().tobytes()
    if not raw:
        flat = values.flatten().tolist()
    tensor = helper.make_tensor("w", kind, (2, 2), flat, raw=raw)
    node = helper.make_node("MatMul", ["x", "w"], ["y"])
    read = read_onnx(graph([node], [tensor], tmp_path / "x.onnx")).tensors["w"]
    assert read.dtype == dtype
    assert torch.equal(read, values)


# --- files that are refused --------------------------------------------------------------------


def product(tensor: TensorProto, path: Path) -> Path:
    return graph([helper.make_node("MatMul", ["x", "w"], ["y"])], [tensor], path)


@pytest.mark.parametrize("dims", [(2**40, 2**20), (2**32, 2**32), (3,), (-1, -2), (2, -1), ()])
def test_sizes_that_are_not_there_are_refused(dims: tuple[int, ...], tmp_path: Path) -> None:
    tensor = weight("w", 2)
    del tensor.dims[:]
    tensor.dims.extend(dims)
    with pytest.raises(WeightsError, match=r"x\.onnx: w claims shape \[.*\] of .*, and has 8 byte"):
        read_onnx(product(tensor, tmp_path / "x.onnx"))


def external(location: str, offset: int = 0, length: int = 8) -> TensorProto:
    tensor = TensorProto(name="w", dims=[2], data_type=TensorProto.FLOAT)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", offset), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def test_external_data_is_read(tmp_path: Path) -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (tmp_path / "deep").mkdir()
    for where, offset in (("x.data", 0), ("x.data", 4), ("x.data", 8), ("deep/x.data", 8)):
        (tmp_path / where).write_bytes(values.numpy().tobytes())
        source = read_onnx(product(external(where, offset), tmp_path / "x.onnx"))
        assert torch.equal(source.tensors["w"], values[offset // 4 :][:2])


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (external("../x.data"), r"w points to '\.\./x\.data', which is not inside"),
        (external("deep/../../x.data"), "which is not inside the file's folder"),
        (external("deep\\..\\..\\x.data"), "which is not inside the file's folder"),
        (external("/etc/passwd"), "w points to '/etc/passwd', which is not inside"),
        (external("C:\\x.data"), "which is not inside the file's folder"),
        (external(""), "which is not inside the file's folder"),
        (external("gone.data"), r"gone\.data is missing, which .*x\.onnx keeps its weights in"),
        (external("empty.data"), r"empty\.data was cut short: it is empty"),
        (external("x.data", 12), r"x\.data was cut short: w of x\.onnx lies at 12 to 20.* 16 byte"),
        (external("x.data", -8), r"x\.data was cut short"),
        (external("x.data", 0, 2**62), r"x\.data was cut short"),
        (external("x.data", 0, 4), "w claims shape .* has 4 bytes"),
    ],
)
def test_external_data_elsewhere_is_refused(tensor: TensorProto, said: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    for path in (tmp_path, folder):
        (path / "x.data").write_bytes(bytes(16))
    (folder / "empty.data").touch()
    with pytest.raises(WeightsError, match=said):
        read_onnx(product(tensor, folder / "x.onnx"))


def test_other_graphs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    with pytest.raises(WeightsError, match=r"x\.onnx holds no weights: its graph has 1 nodes"):
        read_onnx(graph([helper.make_node("Relu", ["x"], ["y"])], [], path))
    nodes = [helper.make_node("DynamicQuantizeLinear", ["x"], ["y", "s", "z"])]
    with pytest.raises(WeightsError, match=r"is quantised \(DynamicQuantizeLinear\)"):
        read_onnx(graph(nodes, [weight("w", 2)], path))
    path.write_bytes(onnx.ModelProto(producer_name="x").SerializeToString())
    with pytest.raises(WeightsError, match=r"x\.onnx was cut short or is no ONNX file"):
        read_onnx(path)
    content = product(weight("w", 4, 4), path).read_bytes()
    for keep in (10, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:keep])
        with pytest.raises(WeightsError, match=r"x\.onnx was cut short or is no ONNX file"):
            read_onnx(path)


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = product(weight("w", 4, 4), tmp_path / "x.onnx")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(WeightsError, match=r'pip install "attention-zoo\[onnx\]"'):
        read_onnx(path)
