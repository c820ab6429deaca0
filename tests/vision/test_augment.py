"""Augmentation against independent references, and what its randomness may depend on."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from vision.augment import Augment, BatchAffine, affine_matrices, sample_transform
from zoo.card import Preprocessing
from zoo.rng import seeded

SIZES = [(8, 8), (32, 32), (9, 14), (20, 7)]
STRONG = Augment(spatial="affine", degrees=40, translate=0.3, scale=(0.6, 1.7), shear=25)


def noise(b: int, c: int, size: tuple[int, int]) -> torch.Tensor:
    source = torch.Generator().manual_seed(b + c)
    return torch.randint(0, 256, (b, c, *size), generator=source, dtype=torch.uint8)


def drawn(augment: Augment, n: int, hflip: float = 0.0, seed: int = 0) -> BatchAffine:
    return BatchAffine(augment, hflip, n, seed)


def numbers(batch: BatchAffine, index: int, epoch: int = 0) -> list[float]:
    return batch._of_epoch(epoch)[index].double().tolist()


def parameters(augment: Augment, u: list[float]) -> tuple[float, float, float, float, float]:
    """Angle, zoom, shear (radians, factor, slope) and shifts (parts of the side) from uniforms."""
    low, high = augment.scale
    return (
        (2 * u[0] - 1) * math.radians(augment.degrees),
        low * (high / low) ** u[1],
        math.tan((2 * u[2] - 1) * math.radians(augment.shear)),
        (2 * u[3] - 1) * augment.translate,
        (2 * u[4] - 1) * augment.translate,
    )


def loop_affine(image: np.ndarray, augment: Augment, u: list[float], flip: bool) -> np.ndarray:
    """Bilinear resampling in float64, pixel by pixel, black outside."""
    _, rows, cols = image.shape
    angle, zoom, shear, right, down = parameters(augment, u)
    c, s = math.cos(angle) / zoom, math.sin(angle) / zoom
    out = np.zeros(image.shape)
    for row, col in product(range(rows), range(cols)):
        x, y = col + 0.5 - cols / 2, row + 0.5 - rows / 2
        from_x = c * (x + shear * y) - s * y
        from_x = (-from_x if flip else from_x) + cols / 2 - 0.5 + right * cols
        from_y = s * (x + shear * y) + c * y + rows / 2 - 0.5 + down * rows
        left, top = math.floor(from_x), math.floor(from_y)
        for i, j in product((top, top + 1), (left, left + 1)):
            if 0 <= i < rows and 0 <= j < cols:
                out[:, row, col] += (1 - abs(from_y - i)) * (1 - abs(from_x - j)) * image[:, i, j]
    return out


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_the_batch_equals_a_plain_loop(size, channels):
    images, batch = noise(6, channels, size), drawn(STRONG, 6, hflip=0.5)
    ids = torch.tensor([4, 0, 5, 2, 1, 3])
    got = batch(images, [0] * 6, ids)
    for image, index, one in zip(images, ids.tolist(), got, strict=True):
        u = numbers(batch, index)
        expected = loop_affine(image.numpy() / 255.0, STRONG, u, flip=u[6] < 0.5)
        assert np.abs(one.numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("size", SIZES)
def test_the_batch_equals_torchvision_sample_by_sample(size):
    augment = Augment(spatial="affine", degrees=25, translate=0.2, scale=(0.7, 1.4))
    images, batch = noise(8, 3, size), drawn(augment, 8)
    got = batch(images, [0] * 8, torch.arange(8))
    for index in range(8):
        angle, zoom, _, right, down = parameters(augment, numbers(batch, index))
        # Ours maps output to input: in = A out + t. torchvision shifts last: out = A' (in - t).
        c, s = math.cos(angle) * zoom, math.sin(angle) * zoom
        t = (right * size[1], down * size[0])
        shift = [-(c * t[0] + s * t[1]), -(-s * t[0] + c * t[1])]
        expected = F.affine(
            images[index].float() / 255,
            angle=-math.degrees(angle),
            translate=shift,
            scale=zoom,
            shear=[0.0, 0.0],
            interpolation=v2.InterpolationMode.BILINEAR,
        )
        assert (got[index] - expected).abs().max() < 1e-4


@pytest.mark.parametrize("size", [*SIZES, (30, 33)])
@pytest.mark.parametrize("spatial", ["auto", "affine"])
def test_identity_parameters_return_the_image_exactly(size, spatial):
    still = Augment(spatial=spatial, degrees=0, translate=0, scale=(1.0, 1.0))
    images, ids = noise(5, 3, size), torch.arange(5)
    assert torch.equal(drawn(still, 5)(images, [0] * 5, ids), images)
    assert torch.equal(drawn(still, 5, hflip=1.0)(images, [0] * 5, ids), images.flip(-1))


@pytest.mark.parametrize("size", SIZES)
def test_without_spatial_augmentation_a_flip_mirrors_exactly(size):
    images, batch = noise(64, 3, size), drawn(Augment(spatial="none"), 64, hflip=0.5)
    got = batch(images, [0] * 64, torch.arange(64))
    mirrored = [numbers(batch, i)[6] < 0.5 for i in range(64)]
    assert 10 < sum(mirrored) < 54
    for image, one, flip in zip(images, got, mirrored, strict=True):
        assert torch.equal(one, image.flip(-1) if flip else image)


def test_a_flip_under_an_affine_map_is_the_map_of_the_mirrored_image():
    images, ids = noise(16, 3, (12, 10)), torch.arange(16)
    turning = replace(STRONG, translate=0.0)  # shifts keep their side
    flipped = drawn(turning, 16, hflip=1.0)(images, [3] * 16, ids)
    expected = drawn(turning, 16, hflip=0.0)(images.flip(-1), [3] * 16, ids)
    torch.testing.assert_close(flipped, expected, atol=1e-4, rtol=0)
    assert (flipped - drawn(turning, 16)(images, [3] * 16, ids)).abs().max() > 0.1


@pytest.mark.parametrize("chance", [0.0, 0.2, 0.5, 1.0])
def test_flips_come_as_often_as_asked_for(chance):
    n = 4000
    images = torch.tensor([0, 1], dtype=torch.uint8).expand(n, 1, 1, 2)
    got = drawn(Augment(spatial="none"), n, chance)(images, [0] * n, torch.arange(n))
    share = got[:, 0, 0, 0].float().mean().item()
    assert share == pytest.approx(chance, abs=5 * math.sqrt(chance * (1 - chance) / n))


def test_parameters_stay_in_their_ranges_and_fill_them():
    n, size = 5000, (10, 20)
    augment = Augment(degrees=15, translate=0.25, scale=(0.5, 2.0))
    draws = drawn(augment, n)._of_epoch(0)
    theta = affine_matrices(augment, draws, torch.zeros(n, dtype=torch.bool), size).double()
    zoom = (theta[:, 0, 0] * theta[:, 1, 1] - theta[:, 0, 1] * theta[:, 1, 0]) ** -0.5
    angle = torch.rad2deg(torch.atan2(theta[:, 1, 0] * size[0] / size[1], theta[:, 0, 0]))
    shifts = theta[:, :, 2] / 2
    for values, low, high in (
        (zoom.log2(), -1, 1),
        (angle, -15, 15),
        (shifts[:, 0], -0.25, 0.25),
        (shifts[:, 1], -0.25, 0.25),
    ):
        width = high - low
        assert low - 1e-4 <= values.min() < low + 0.01 * width
        assert high - 0.01 * width < values.max() <= high + 1e-4
        assert values.mean().item() == pytest.approx((low + high) / 2, abs=0.03 * width)
    columns = torch.corrcoef(draws.T)
    assert (columns - torch.eye(7)).abs().max() < 0.08, "drawn independently of each other"


def test_parameters_depend_on_seed_epoch_and_sample_alone():
    images, ids = noise(1, 3, (16, 16)).expand(20, -1, -1, -1), torch.arange(20)
    batch = drawn(STRONG, 20)
    whole = {epoch: batch(images, [epoch] * 20, ids) for epoch in (0, 1, 0)}
    everything = torch.cat([*whole.values(), drawn(STRONG, 20, seed=1)(images, [0] * 20, ids)])
    assert len(everything.flatten(1).unique(dim=0)) == 60, "all differ"
    torch.manual_seed(99)
    keys = [(1, 7), (0, 3), (1, 3), (0, 19), (0, 3)]  # epochs mixed, one sample twice
    mixed = drawn(STRONG, 20)(images[:5], [e for e, _ in keys], torch.tensor([i for _, i in keys]))
    for one, (epoch, index) in zip(mixed, keys, strict=True):
        assert torch.equal(one, whole[epoch][index])


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("policy", ["randaugment", "trivialaugment"])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(8, 8), (32, 24)])
def test_policies_work_for_grey_and_small_images(size, channels, policy, in_memory):
    pre = Preprocessing(size=size, mean=(0.5,) * channels, std=(0.5,) * channels)
    augment = Augment(spatial="none", policy=policy)
    transform = sample_transform(augment, pre, 0.0, in_memory=in_memory)
    image = noise(1, channels, size)[0]
    results = []
    for index in range(80):  # every operation comes up
        with seeded("policy", index):
            results.append(transform(image if in_memory else F.to_pil_image(image)))
    for result in results:
        assert type(result) is torch.Tensor
        assert result.dtype == torch.uint8
        assert result.shape == image.shape
    assert len({result.numpy().tobytes() for result in results}) > 20


def test_random_crops_have_the_size_of_the_model_and_obey_crop_scale():
    pre = Preprocessing(size=(12, 20))
    ramp = np.broadcast_to(np.arange(200, dtype=np.uint8)[None, :, None], (200, 200, 3))
    shares = []
    for scale in ((0.05, 0.1), (0.8, 1.0)):
        transform = sample_transform(
            Augment(spatial="crop", crop_scale=scale), pre, 0.0, in_memory=False
        )
        spans = []
        for index in range(40):
            with seeded(index):
                out = transform(Image.fromarray(ramp))
            assert out.shape == (3, 12, 20)
            assert out.dtype == torch.uint8
            spans.append(out.float().amax().item() - out.float().amin().item())
        shares.append(np.mean(spans) / 200)
    assert shares[0] < 0.45 < 0.8 < shares[1]


@pytest.mark.parametrize("spatial", ["none", "affine", "crop", "auto"])
def test_flips_of_single_images(spatial):
    """In files mode: every image is mirrored with hflip 1, none with hflip 0."""
    pre = Preprocessing(size=(16, 16))
    augment = Augment(spatial=spatial, degrees=0, translate=0, scale=(1, 1), crop_scale=(1, 1))
    left_bright = np.zeros((16, 16, 3), np.uint8)
    left_bright[:, :8] = 255
    for hflip in (0.0, 1.0):
        transform = sample_transform(augment, pre, hflip, in_memory=False)
        for index in range(5):
            with seeded(index):
                out = transform(Image.fromarray(left_bright)).float()
            assert (out[..., :4].mean() < out[..., -4:].mean()) == bool(hflip)


def test_evaluation_leaves_memory_alone():
    assert sample_transform(None, Preprocessing(), 0.0, in_memory=True) is None
    assert sample_transform(Augment(), Preprocessing(), 0.5, in_memory=True) is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"spatial": "affin"}, "spatial 'affin'"),
        ({"policy": "autoaugment"}, "randaugment, trivialaugment"),
        ({"hflip": 1.5}, r"hflip \(1.5\)"),
        ({"degrees": -1.0}, r"degrees \(-1.0\)"),
        ({"translate": 1.1}, r"translate \(1.1\)"),
        ({"shear": 90.0}, r"shear \(90.0\)"),
        ({"scale": (1.1, 0.9)}, "scale"),
        ({"scale": (0.0, 1.0)}, "scale"),
        ({"crop_scale": (0.5, 1.2)}, "crop_scale"),
        ({"degrees": math.nan}, "degrees"),
    ],
)
def test_options_out_of_range_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        Augment(**options)
