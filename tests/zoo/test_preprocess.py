from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data.transforms_factory import transforms_imagenet_eval

import zoo
from zoo.card import CROP_MODES, Preprocessing
from zoo.preprocess import build_transform, normalize, resize_and_crop

MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)


def noise(rows: int, cols: int, channels: int = 3) -> Image.Image:
    values = np.random.default_rng(rows * cols).integers(0, 255, (rows, cols, channels), np.uint8)
    return Image.fromarray(values.squeeze())


@pytest.mark.parametrize("mode", CROP_MODES)
@pytest.mark.parametrize("crop_pct", [1.0, 0.9, 0.6])
@pytest.mark.parametrize("size", [(32, 32), (24, 40), (40, 24)])
@pytest.mark.parametrize("source", [(17, 60), (61, 33), (32, 32), (200, 201)])
def test_equals_timm(
    size: tuple[int, int], crop_pct: float, mode: str, source: tuple[int, int]
) -> None:
    pre = Preprocessing(size, MEAN, STD, "bicubic", crop_pct, mode)
    theirs = transforms_imagenet_eval(
        size, crop_pct, mode, mean=MEAN, std=STD, interpolation="bicubic"
    )
    ours = build_transform(pre)(noise(*source))
    assert ours.shape == (3, *size)
    torch.testing.assert_close(ours, theirs(noise(*source)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_normalize_bytes_and_floats_alike(channels: int) -> None:
    pre = Preprocessing((5, 7), (0.3,) * channels, tuple(0.1 * (c + 1) for c in range(channels)))
    images = torch.randint(0, 256, (2, channels, 5, 7), dtype=torch.uint8)
    mean, std = (torch.tensor(v, dtype=torch.float64)[:, None, None] for v in (pre.mean, pre.std))
    expected = ((images.double() / 255 - mean) / std).float()
    for form in (images, images.float() / 255, images.double() / 255):
        out = normalize(form, pre)
        assert out.dtype == torch.float32
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(normalize(images[0], pre), expected[0], atol=1e-5, rtol=1e-5)


def test_normalize_is_differentiable_after_inference_mode() -> None:
    pre = Preprocessing((2, 2), (0.25, 0.5, 0.75))
    with torch.inference_mode():
        normalize(torch.rand(1, 3, 2, 2), pre)
    images = torch.rand(1, 3, 2, 2, requires_grad=True)
    normalize(images, pre).sum().backward()
    torch.testing.assert_close(images.grad, torch.full_like(images, 2.0))


def test_normalize_refuses_other_channels_and_types() -> None:
    with pytest.raises(ValueError, match=r"\(2, 1, 4, 4\).*\(\.\.\., 3, rows, columns\)"):
        normalize(torch.zeros(2, 1, 4, 4), Preprocessing())
    with pytest.raises(TypeError, match=r"not torch\.int64"):
        normalize(torch.zeros(2, 3, 4, 4, dtype=torch.int64), Preprocessing())


def test_tensors_and_images_give_the_same_size() -> None:
    cut = pickle.loads(pickle.dumps(resize_and_crop(Preprocessing((20, 30), crop_pct=0.8))))
    image = noise(50, 40)
    tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    from_image, from_tensor = cut(image), cut(tensor)
    assert from_image.dtype == from_tensor.dtype == torch.uint8
    assert from_image.shape == from_tensor.shape == (3, 20, 30)
    # Two bicubic kernels with antialias: the same but for rounding.
    assert (from_image.int() - from_tensor.int()).abs().max() <= 2


def test_the_right_size_is_left_alone() -> None:
    image = noise(20, 30)
    cut = resize_and_crop(Preprocessing((20, 30)))
    assert torch.equal(cut(image), torch.from_numpy(np.array(image)).permute(2, 0, 1))


def test_modes_and_orientation() -> None:
    grey, colour = Preprocessing((8, 8), (0.5,), (0.5,)), Preprocessing((8, 8))
    assert resize_and_crop(grey)(noise(8, 8)).shape == (1, 8, 8)
    assert resize_and_crop(colour)(noise(8, 8, 1)).shape == (3, 8, 8)
    with pytest.raises(TypeError, match=r"mode RGBA.*vision\.decode"):
        resize_and_crop(colour)(noise(8, 8).convert("RGBA"))
    with pytest.raises(TypeError, match="not <class 'str'>"):
        resize_and_crop(colour)("cat.jpg")
    with pytest.raises(ValueError, match="cannot have 4 channels"):
        resize_and_crop(Preprocessing((8, 8), (0.5,) * 4, (0.5,) * 4))(noise(8, 8))
    with pytest.raises(ValueError, match=r"\(1, 8, 8\); the model takes 3 channels"):
        resize_and_crop(colour)(torch.zeros(1, 8, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match="must be uint8"):
        resize_and_crop(colour)(torch.zeros(3, 8, 8))
    turned = noise(8, 8)
    turned.getexif()[0x0112] = 3  # upside down
    assert torch.equal(
        resize_and_crop(colour)(turned), resize_and_crop(colour)(noise(8, 8)).flip(1, 2)
    )


def test_transforms_of_a_model() -> None:
    model = zoo.create_model("vit_micro_patch2_8", in_chans=1, img_size=(8, 16))
    image = zoo.transforms(model)(noise(20, 30, 1))
    assert model(image[None]).shape == (1, model.num_classes)
    with pytest.raises(TypeError, match="Linear has no card"):
        zoo.transforms(torch.nn.Linear(1, 1))
