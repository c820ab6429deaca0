from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

import zoo
from crossmodal.encoded import Encoded
from crossmodal.loss import contrastive_loss
from crossmodal.matcher import Matcher, MatchOutput, hard_negatives, match_loss
from zoo.engine.optim import adamw
from zoo.rng import generator

KEY = (3, 1, 4)
SIZES = ((4, 4), (5, 4), (2, 0))
TEXTS = ("cat", "red fox", "owl", "cat", "a big house", "sun", "bee", "sea", "no")


def small(**options) -> Matcher:
    """Everything that differs between processes left out: no BatchNorm, no dropout."""
    torch.manual_seed(0)
    options = {
        "image_tower": "vit_micro_patch4_32",
        "image_options": {"embed_dim": 24, "depth": 1, "num_heads": 2},
        "text_options": {"embed_dim": 16, "depth": 1, "num_heads": 2},
        "tokenizer": "bytes",
        "context_length": 16,
        "img_size": 8,
        "embed_dim": 8,
        "fusion_depth": 1,
        "fusion_heads": 2,
        **options,
    }
    return zoo.create_model("matcher_micro", **options)


def batch(model: Matcher, texts=TEXTS) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(len(texts))
    images = torch.randn(len(texts), 3, 8, 8, generator=draw).to(model.logit_scale.dtype)
    return images, *model.make_tokenizer()(list(texts))


def open_gates(model: Matcher) -> Matcher:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("alpha"):
                parameter.fill_(0.7)
    return model


def both_losses(output: MatchOutput, model: Matcher, size=None) -> torch.Tensor:
    contrast = contrastive_loss(
        output.image, output.text, output.scale, output.bias, model.loss, size
    )
    return contrast + match_loss(output)


def one_of_two(folder: str) -> None:
    """What each of two processes runs: losses weighted as the engine does, and steps at a bound."""
    dist.init_process_group("gloo")
    rank, world, out = dist.get_rank(), dist.get_world_size(), {}
    for sizes in SIZES:
        total, size, start = sum(sizes), sizes[rank], sum(sizes[:rank])
        model = open_gates(small().double())
        images, _, _ = batch(model, TEXTS[:total])
        rows = slice(start, start + size) if size else slice(0, 1)
        _, tokens, mask = batch(model, TEXTS[rows])  # padded to this process's longest
        wrapped = nn.parallel.DistributedDataParallel(model)
        output = wrapped(images[rows], tokens, mask, key=KEY, size=size)
        share = both_losses(output, model, size) * size * world / total
        share.backward()
        mean = share.detach() / world
        dist.all_reduce(mean)
        out[sizes] = (mean, {name: p.grad for name, p in model.named_parameters()})
    out["scales"] = at_the_bound(rank)
    torch.save(out, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def at_the_bound(rank: int) -> list[float]:
    model = small(freeze_image="all", freeze_text="all", max_scale=20.0)
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer, scales = adamw(model, lr=0.3), []
    pairs = [x[4 * rank : 4 * rank + 4] for x in batch(model, TEXTS[:8])]
    for _ in range(100):
        optimizer.zero_grad()
        output = wrapped(*pairs, key=KEY)
        (contrastive_loss(*output[:4]) - output.scale).backward()
        optimizer.step()
        model.clamp_scale_()
        scales.append(model.logit_scale.exp().item())
    return scales


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two real processes computed, by process."""
    folder = tmp_path_factory.mktemp("two")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *command, __file__, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("sizes", SIZES)
def test_two_processes_give_the_loss_and_gradients_of_one(ranks, sizes):
    model = open_gates(small().double())
    output = model(*batch(model, TEXTS[: sum(sizes)]), key=KEY)
    assert output.match_weights.any()
    loss = both_losses(output, model)
    loss.backward()
    for results in ranks:
        value, grads = results[sizes]
        torch.testing.assert_close(value, loss.detach(), rtol=0, atol=1e-9)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=0, atol=1e-9, msg=name)


def test_scale_stays_within_its_bound_on_all_processes(ranks):
    """Case G4."""
    assert ranks[0]["scales"] == ranks[1]["scales"]
    assert max(ranks[0]["scales"]) <= 20 * (1 + 1e-6)
    assert ranks[0]["scales"][-50:] == pytest.approx([20.0] * 50)


def test_negatives_follow_the_softmax_of_the_scores():
    scores = torch.tensor([0.3, 2.0, -1.0, 0.9, 1.4])
    illegal = torch.tensor([False, False, False, True, False])
    n = 200_000
    noise = torch.empty(n, 5).exponential_(generator=torch.Generator().manual_seed(0))
    index, legal = hard_negatives(scores.expand(n, 5), illegal.expand(n, 5), noise)
    wanted = scores.masked_fill(illegal, -torch.inf).softmax(0)
    found = index.bincount(minlength=5) / n
    assert legal.all()
    assert found[3] == 0
    # Five deviations of a frequency of n draws.
    assert bool(((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / n).sqrt()).all())


def test_pairs_are_the_rows_own_and_the_negatives_drawn():
    """The loss and its gradients again, pair by pair, with the negatives chosen by loops."""
    model = open_gates(small().double()).eval()
    images, tokens, mask = batch(model)
    output = model(images, tokens, mask, key=KEY)
    noise = torch.empty(2, 9, 9).exponential_(generator=generator(*KEY, "negatives"))
    scores = (output.scale * output.image @ output.text.T).detach()

    def drawn(row: int, scores: torch.Tensor, noise: torch.Tensor) -> int:
        legal = [j for j in range(9) if TEXTS[j] != TEXTS[row]]
        return max(legal, key=lambda j: (scores[j] - noise[j].log()).item())

    pairs = [(i, i) for i in range(9)]
    pairs += [(i, drawn(i, scores[i], noise[0, i])) for i in range(9)]
    pairs += [(drawn(i, scores[:, i], noise[1, i]), i) for i in range(9)]
    loss = torch.zeros((), dtype=torch.float64)
    for row, (i, j) in enumerate(pairs):
        image, text = (
            model.image_tower(images[i, None]),
            model.text_tower(tokens[j, None], mask[j, None]),
        )
        alone, sign = model.match(image, text), 1 if i == j else -1
        torch.testing.assert_close(
            output.match_logits[row, 1:] - output.match_logits[row, :1], alone
        )
        loss = loss - F.logsigmoid(sign * alone).sum() / 27
    torch.testing.assert_close(match_loss(output), loss)
    assert output.match_targets.tolist() == [1] * 9 + [0] * 18
    for parts in (model.image_tower, model.text_tower, model.fusion, model.match_head):
        parameters = list(parts.parameters())  # those of the pooled vectors alone are not used
        ours, alone = (
            torch.autograd.grad(x, parameters, retain_graph=True, allow_unused=True)
            for x in (match_loss(output), loss)
        )
        used = [pair for pair in zip(ours, alone, strict=True) if pair != (None, None)]
        assert used
        torch.testing.assert_close([one for one, _ in used], [other for _, other in used])


def test_keys_decide_which_negatives():
    model = open_gates(small()).eval()

    def logits(key):
        with torch.no_grad():
            return model(*batch(model), key=key).match_logits

    assert torch.equal(logits(KEY), logits(KEY))
    assert not torch.equal(logits(KEY), logits((3, 1, 5)))
    torch.manual_seed(1)
    first = logits(None)
    torch.manual_seed(1)
    assert torch.equal(logits(None), first)


@pytest.mark.parametrize("texts", [("cat",), ("cat", "cat", "cat")])
def test_without_a_legal_negative_nothing_is_learned_and_nothing_breaks(texts):
    """Every parameter still gets a gradient, which DistributedDataParallel waits for."""
    model = open_gates(small())
    output = model(*batch(model, texts), key=KEY)
    loss = match_loss(output)
    loss.backward()
    assert loss == 0
    assert not output.match_weights.any()
    assert output.match_logits.isfinite().all()
    for name, parameter in model.fusion.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_rows_that_do_not_count_change_nothing():
    model = open_gates(small())
    images, tokens, mask = batch(model)
    part = model(images, tokens, mask, key=KEY, size=6)
    alone = model(images[:6], tokens[:6], mask[:6], key=KEY)
    assert len(part.match_logits) == 27
    torch.testing.assert_close(match_loss(part), match_loss(alone))
    with pytest.raises(ValueError, match="size is 0 on all processes"):
        model(images, tokens, mask, key=KEY, size=0)


@pytest.mark.parametrize("direction", ["text_to_image", "image_to_text", "both"])
@pytest.mark.parametrize("norm", ["per_modality", "shared", "none", "qk"])
def test_every_parameter_learns(direction, norm):
    model = open_gates(small(fusion_direction=direction, fusion_norm=norm))
    both_losses(model(*batch(model), key=KEY), model).backward()
    without = [
        n for n, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()
    ]
    assert without == []


@pytest.mark.parametrize(
    "options",
    [
        {"fusion_layout": "merged", "gated": False, "fusion_position": "learned"},
        {"fusion_attention": "linear", "fusion_dim": 32, "fusion_position": "sincos"},
        {"fusion_options": {"self_attention": True, "mlp_ratio": 2.0}, "freeze_text": "all"},
    ],
)
def test_a_saved_model_is_the_same_again(tmp_path, options):
    model = open_gates(small(**options)).eval()
    zoo.save_pretrained(model, tmp_path / "model")
    again = zoo.create_model(f"local-dir:{tmp_path / 'model'}").eval()
    assert isinstance(again, Matcher)
    assert again.card.options == model.card.options
    with torch.no_grad():
        ours, theirs = (m(*batch(model), key=KEY) for m in (model, again))
    assert torch.equal(ours.match_logits, theirs.match_logits)
    assert torch.equal(ours.text, theirs.text)


@pytest.mark.parametrize(("norm", "same"), [("per_modality", True), ("none", False)])
def test_a_norm_of_its_own_takes_the_images_scale_away(norm, same):
    logits = []
    for scale in (1.0, 100.0):
        model = open_gates(small(fusion_norm=norm, image_scale=scale).double()).eval()
        with torch.no_grad():
            logits.append(model(*batch(model), key=KEY).match_logits)
    assert torch.allclose(*logits, atol=1e-3) == same
    with pytest.raises(ValueError, match=r"image_scale \(0\) must be positive"):
        small(image_scale=0)


def test_padding_changes_no_match():
    model = open_gates(small().double()).eval()
    images, tokens, mask = batch(model, TEXTS[:1])
    image, text = model.image_tower(images), model.text_tower(tokens, mask)
    wider = Encoded(F.pad(text.tokens, (0, 0, 0, 5), value=9.0), text.pooled, F.pad(mask, (0, 5)))
    torch.testing.assert_close(model.match(image, wider), model.match(image, text))


def test_checkpointing_reaches_the_fusion_and_changes_no_gradient():
    grads = []
    for checkpointing in (False, True):
        model = open_gates(small())
        model.set_grad_checkpointing(checkpointing)
        assert model.fusion.grad_checkpointing == checkpointing
        both_losses(model(*batch(model), key=KEY), model).backward()
        grads.append([p.grad for p in model.parameters()])
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other)


def test_logits_are_fp32_under_autocast():
    model = open_gates(small())
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*batch(model), key=KEY)
        loss = both_losses(output, model)
    loss.backward()
    assert output.match_logits.dtype == loss.dtype == torch.float32
    assert loss.isfinite()


def test_it_learns_which_pairs_belong_together():
    model = small(gated=False)
    pairs = batch(model)
    optimizer = adamw(model, lr=3e-3, weight_decay=0.0)
    for step in range(80):
        optimizer.zero_grad()
        output = model(*pairs, key=(0, 0, step))
        both_losses(output, model).backward()
        optimizer.step()
    right = output.match_logits.argmax(1) == output.match_targets
    assert right.float().mean() > 0.9


if __name__ == "__main__":
    one_of_two(sys.argv[1])
