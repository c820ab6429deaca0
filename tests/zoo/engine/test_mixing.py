from __future__ import annotations

import pytest
import torch

from zoo.engine.batches import BatchPlan, Loader
from zoo.engine.mixing import Mixing

IMAGES = torch.rand(24, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(24) % 5


class Images:
    def __len__(self) -> int:
        return len(IMAGES)

    def __getitems__(self, keys):
        ids = torch.tensor([i for _, i in keys])
        return {"images": IMAGES[ids], "targets": TARGETS[ids]}


def mixed(mix: Mixing, batch: int, world: int, rank: int, epoch: int = 0):
    loader = Loader(Images(), BatchPlan(24, batch, world=world, rank=rank, seed=1), lead=True)
    return [
        mix(b["images"], b["targets"], epoch, micro.index)
        for window in loader.windows(epoch)
        for micro, b in window
    ]


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.4, 1.0)])
@pytest.mark.parametrize("batch", [4, 5])
def test_two_processes_mix_as_one(mixup, cutmix, batch):
    mix = Mixing(5, mixup, cutmix, seed=7)
    whole = mixed(mix, 2 * batch, 1, 0)
    halves = [mixed(mix, batch, 2, rank) for rank in range(2)]
    for one, left, right in zip(whole, *halves, strict=True):
        for part in range(2):
            assert torch.equal(one[part], torch.cat([left[part], right[part]]))


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("size", [1, 2, 7])
def test_targets_are_probabilities_and_pixels_come_from_the_two_images(mixup, cutmix, size):
    mix = Mixing(5, mixup, cutmix, seed=0)
    images, targets = IMAGES[: size + 1], TARGETS[: size + 1]
    out, soft = mix(images, targets, 0, 3)
    assert out.shape == (size, 3, 8, 8)
    assert soft.shape == (size, 5)
    torch.testing.assert_close(soft.sum(1), torch.ones(size))
    for i in range(size):
        own, other = images[i + 1], images[i]
        share = soft[i, targets[i + 1]] if targets[i + 1] != targets[i] else torch.tensor(1.0)
        if mixup:
            torch.testing.assert_close(out[i], share * own + (1 - share) * other)
        else:
            from_own = (out[i] == own).all(0)
            assert ((out[i] == other).all(0) | from_own).all()
            torch.testing.assert_close(from_own.float().mean(), share)


def test_draws_depend_on_the_key_only():
    mix = Mixing(5, 0.4, seed=0)
    state = torch.get_rng_state()
    first = mix(IMAGES, TARGETS, 1, 2)[1]
    torch.rand(3)
    assert torch.equal(first, mix(IMAGES, TARGETS, 1, 2)[1])
    assert not torch.equal(first, mix(IMAGES, TARGETS, 1, 3)[1])
    assert not torch.equal(first, mix(IMAGES, TARGETS, 2, 2)[1])
    torch.set_rng_state(state)
    mix(IMAGES, TARGETS, 0, 0)
    assert torch.equal(state, torch.get_rng_state())


def test_inactive_mixing_changes_nothing():
    images, targets = Mixing(5)(IMAGES, TARGETS, 0, 0)
    assert images is IMAGES
    assert targets is TARGETS
    with pytest.raises(ValueError, match=r"mixup \(-1\)"):
        Mixing(5, mixup=-1)
