from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from crossmodal.loss import Share, contrastive_loss, gather_features

KINDS = ("infonce", "sigmoid")
SIZES = ((4, 4), (5, 4), (1, 0), (3, 0))


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(6, 5), nn.Linear(7, 5)
        self.scale, self.bias = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.tensor(-2.0))
        self.double()

    def forward(self, x, y):
        return F.normalize(self.image(x)), F.normalize(self.text(y)), self.scale, self.bias


def pairs(total: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(total)
    return (
        torch.randn(total, 6, generator=draw, dtype=torch.float64),
        torch.randn(total, 7, generator=draw, dtype=torch.float64),
    )


def loss_of(model, x, y, kind, size=None):
    image, text, scale, bias = model(x, y)
    if kind == "sigmoid":
        return contrastive_loss(image, text, scale, bias, kind, size)
    return contrastive_loss(image, text, scale, kind=kind, size=size) + 0 * bias  # all take part


def one_of_two(folder: str) -> None:
    """What each of the processes runs: losses weighted as the engine does it, and gathered rows."""
    dist.init_process_group("gloo")
    rank, world, out = dist.get_rank(), dist.get_world_size(), {}
    for sizes in SIZES:
        total, size, start = sum(sizes), sizes[rank], sum(sizes[:rank])
        x, y = (t[start : start + size] if size else t[:1] for t in pairs(total))
        for kind in KINDS:
            model = nn.parallel.DistributedDataParallel(Towers())
            share = loss_of(model, x, y, kind, size) * size * world / total
            share.backward()
            mean = share.detach() / world
            dist.all_reduce(mean)
            grads = {name: p.grad for name, p in model.module.named_parameters()}
            out[sizes, kind] = (mean, grads)
        rows = x.clone().requires_grad_()
        gathered = gather_features(rows, size)
        (gathered * (rank + 1)).sum().backward()
        out[sizes, "gather"] = (gathered.detach(), rows.grad)
    torch.save(out, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two real processes computed, by process."""
    folder = tmp_path_factory.mktemp("two")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *command, __file__, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


def features(b: int = 6, e: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(b)
    image, text = torch.randn(2, b, e, generator=draw, dtype=torch.float64)
    return F.normalize(image), F.normalize(text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
def test_two_processes_give_the_loss_and_gradients_of_one(ranks, sizes, kind):
    model = Towers()
    loss = loss_of(model, *pairs(sum(sizes)), kind)
    loss.backward()
    for results in ranks:
        value, grads = results[sizes, kind]
        torch.testing.assert_close(value, loss.detach(), rtol=0, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sizes", SIZES)
def test_rows_of_all_processes_come_with_gradients(ranks, sizes):
    x, _ = pairs(sum(sizes))
    for rank, results in enumerate(ranks):
        gathered, grad = results[sizes, "gather"]
        assert torch.equal(gathered, x)
        counts = torch.arange(len(grad)) < sizes[rank]
        assert torch.equal(grad, 3.0 * counts[:, None].expand_as(grad).double()), "1 + 2"


@pytest.mark.parametrize("scale", [1.0, 14.3, 100.0])
def test_infonce_equals_open_clip(scale):
    from open_clip.loss import ClipLoss

    image, text = features()
    ours = contrastive_loss(image, text, scale)
    torch.testing.assert_close(ours, ClipLoss()(image, text, torch.tensor(scale)))


@pytest.mark.parametrize(("scale", "bias"), [(10.0, -10.0), (3.0, 0.5)])
def test_sigmoid_equals_open_clip(scale, bias):
    from open_clip.loss import SigLipLoss

    image, text = features()
    ours = contrastive_loss(image, text, scale, bias, "sigmoid")
    theirs = SigLipLoss()(image, text, torch.tensor(scale), torch.tensor(bias))
    torch.testing.assert_close(ours, theirs)


def test_both_equal_their_definitions():
    (image, text), scale, bias = features(4), 2.5, -1.0
    scores = (scale * image @ text.T).tolist()
    softmax = sigmoid = 0.0
    for i in range(4):
        row = sum(math.exp(scores[i][j]) for j in range(4))
        column = sum(math.exp(scores[j][i]) for j in range(4))
        softmax += (math.log(row) + math.log(column) - 2 * scores[i][i]) / 2 / 4
        for j in range(4):
            sign = 1 if i == j else -1
            sigmoid += math.log1p(math.exp(-sign * (scores[i][j] + bias))) / 4
    assert contrastive_loss(image, text, scale).item() == pytest.approx(softmax, abs=1e-12)
    found = contrastive_loss(image, text, scale, bias, "sigmoid").item()
    assert found == pytest.approx(sigmoid, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_rows_that_count_do(kind):
    image, text = features()
    assert torch.equal(
        contrastive_loss(image, text, 5.0, kind=kind, size=4),
        contrastive_loss(image[:4], text[:4], 5.0, kind=kind),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_row_gives_zero_and_zero_gradients(kind):
    image, text = (x.requires_grad_() for x in features(2))
    loss = contrastive_loss(image, text, 5.0, kind=kind, size=0)
    loss.backward()
    assert loss == 0
    assert not image.grad.any()
    assert not text.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_similarities_are_fp32_under_autocast(kind):
    image, text = (x.float() for x in features(32, 64))
    exact = contrastive_loss(image.double(), text.double(), 100.0, kind=kind)
    with torch.autocast("cpu", torch.bfloat16):
        loss = contrastive_loss(image, text, 100.0, kind=kind)
        half = contrastive_loss(image.bfloat16(), text.bfloat16(), 100.0, kind=kind)
    assert loss.dtype == half.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)


def test_wrong_arguments_are_named():
    image, text = features()
    with pytest.raises(ValueError, match=r"kind 'nce' must be one of 'infonce', 'sigmoid'"):
        contrastive_loss(image, text, 1.0, kind="nce")
    with pytest.raises(ValueError, match=r"image \(6, 5\) and text \(5, 5\) must be pairs"):
        contrastive_loss(image, text[:5], 1.0)
    with pytest.raises(ValueError, match="bias needs kind 'sigmoid'"):
        contrastive_loss(image, text, 1.0, -10.0)
    with pytest.raises(ValueError, match=r"size \(7\) must be at most 6"):
        contrastive_loss(image, text, 1.0, size=7)


def test_one_process_gathers_its_own_rows():
    image, _ = features()
    assert torch.equal(gather_features(image), image)
    assert torch.equal(gather_features(image, 2), image[:2])
    share = Share.of(image, 2)
    assert (share.size, share.start, share.stop, share.total) == (2, 0, 2, 2)


if __name__ == "__main__":
    one_of_two(sys.argv[1])
