"""Alarms in real trainings on digits: silent over healthy ones, and each provoked by its mistake.

Seeds and sizes are other ones than those by which the limits were chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import vision
import zoo
from vision.channel_attention.squeeze import SqueezeExcite
from vision.classify import Classification, ImageOptions
from zoo.diagnostics import capture_gates, gate_ranges
from zoo.diagnostics.alarms import Alarm, Alarms
from zoo.diagnostics.looks import look_at_gates, look_at_layer
from zoo.engine import Mixing
from zoo.engine.optim import adamw, set_lr, warmup_cosine
from zoo.layers import SelfAttention

SE = {"model": "resnet_micro", "insert": "se@standard", "img_size": 8}
TOKEN = {"class_token": True, "global_pool": "token"}


def train(
    model: str = "vit_micro_patch2_8",
    seed: int = 7,
    epochs: int = 4,
    lr: float = 2e-3,
    warmup: int = 10,
    clip: float | None = 1.0,
    insert: str | None = None,
    change: Callable[[Any], None] | None = None,
    **options: Any,
) -> list[Alarm]:
    """The alarms of a training like that of the recipes, with a look every 4 updates."""
    torch.manual_seed(seed)
    built = zoo.create_model(model, in_chans=1, **options)
    if insert:
        vision.insert(built, insert)
    if change:
        change(built)
    task = Classification(built, vision.load_dataset("digits"), ImageOptions(), Mixing(10), seed)
    total = epochs * (len(task.train) // 64)
    alarms = Alarms(total, attention_dropout=options.get("attn_drop_rate", 0.0))
    optimizer, found = adamw(built, lr), []
    for step, batch in enumerate(batches(task, epochs)):
        set_lr(optimizer.param_groups, lr * warmup_cosine(step, total, warmup))
        loss = F.cross_entropy(built.train()(batch["images"]), batch["targets"])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(built.parameters(), clip or 1e9)
        optimizer.step()
        if step % 4 == 3:
            training = {"loss": loss.item(), "grad_norm": norm.item()}
            found += alarms.check(step + 1, **looks(built, task), training=training)
    return found


def batches(task: Classification, epochs: int) -> Iterator[dict[str, Any]]:
    for epoch in range(epochs):
        order = torch.randperm(len(task.train)).tolist()
        for index in range(len(order) // 64):
            keys = [(epoch, sample) for sample in order[64 * index : 64 * index + 64]]
            batch = task.train.__getitems__(keys)
            yield task.prepare({**batch, "epoch": epoch, "index": index})


@torch.no_grad()
def looks(model: Any, task: Classification) -> dict[str, Any]:
    """At 4 validation samples."""
    model.eval()
    images = task.inputs(task.val.__getitems__([(0, index) for index in (0, 120, 240, 359)]))
    if ranges := gate_ranges(model):
        with capture_gates(model) as gates:
            model(images)
        return {"gates": {n: look_at_gates(maps[0], ranges[n]) for n, maps in gates.items()}}
    with (
        zoo.capture_attention(model) as weights,
        zoo.capture_attention(model, what="logits") as logits,
    ):
        model(images)
    return {
        "layers": {n: look_at_layer(maps[0], logits=logits[n][0]) for n, maps in weights.items()}
    }


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 3},
        {"seed": 8, "epochs": 2, "depth": 2},
        {**TOKEN, "depth": 2},
        {"attn_drop_rate": 0.5, "depth": 2},  # does not make attention even
        {**SE, "epochs": 3},
        {"seed": 18, "epochs": 1},
        pytest.param({"num_heads": 8, "epochs": 6}, marks=pytest.mark.slow),
        pytest.param({"num_heads": 2, "epochs": 6}, marks=pytest.mark.slow),
        pytest.param({"qk_norm": True, "epochs": 6}, marks=pytest.mark.slow),
        pytest.param({"position": "rope", "epochs": 12}, marks=pytest.mark.slow),
    ],
)
def test_healthy_trainings_are_silent(options):
    assert train(**options) == []


def kinds(alarms: list[Alarm]) -> set[str]:
    return {alarm.kind for alarm in alarms}


def test_a_divisor_far_too_large_makes_attention_uniform():
    found = train(temperature=50.0, depth=2)
    assert kinds(found) == {"uniform"}
    assert {alarm.layer for alarm in found} == {"blocks.0.attn", "blocks.1.attn"}
    assert "--temperature" in found[0].remedies[0]


def test_scores_without_their_scale_make_wide_heads_stiff():
    found = train(attention="dot", num_heads=2, head_dim=64, depth=2)
    assert "stiff" in kinds(found)
    assert kinds(found) <= {"stiff", "collapse"}
    stiff = next(alarm for alarm in found if alarm.kind == "stiff")
    assert "not scaled" in stiff.causes[0]
    assert "--attention full" in stiff.remedies


def test_a_learning_rate_far_too_high_makes_scores_large():
    found = train(lr=0.03, warmup=0, clip=None, depth=2)
    large = [alarm for alarm in found if alarm.kind == "large_logits"]
    assert large
    assert any("--lr" in remedy for remedy in large[0].remedies)


def test_a_learning_rate_of_one_heads_for_infinity():
    found = train(lr=1.0, warmup=0, clip=None, depth=2, epochs=2)
    ahead = [alarm for alarm in found if alarm.kind == "nan_ahead"]
    assert {alarm.layer for alarm in ahead} == {"blocks.0.attn", "blocks.1.attn"}
    assert any("--lr" in remedy for remedy in ahead[0].remedies)


def test_a_learning_rate_without_its_minus_sign_is_told_at_the_first_look():
    found = train(lr=1e8, warmup=0, clip=None, depth=2, epochs=1)  # meant as 1e-8
    assert kinds(found) == {"not_finite"}
    assert {(alarm.step, alarm.layer) for alarm in found} >= {(4, "blocks.0.attn"), (4, "")}


def test_heads_copied_from_one_stay_alike():
    def copy(model: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, SelfAttention):
                qkv = layer.qkv.weight.data.view(3, layer.num_heads, layer.head_dim, -1)
                qkv.copy_(qkv[:, :1].clone().expand_as(qkv))
                proj = layer.proj.weight.data.view(-1, layer.num_heads, layer.head_dim)
                proj.copy_(proj[:, :1].clone().expand_as(proj))

    found = train(change=copy, depth=2)
    assert kinds(found) == {"alike_heads"}
    assert "--num-heads 2 " in found[0].remedies[0]


@pytest.mark.parametrize(("bias", "kind"), [(-6.0, "dead_gates"), (6.0, "saturated_gates")])
def test_gates_that_start_at_an_end(bias, kind):
    def shift(model: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, SqueezeExcite):
                last = [part for part in layer.modules() if hasattr(part, "bias")][-1]
                torch.nn.init.constant_(last.bias, bias)

    found = train(**SE, change=shift, epochs=2)
    assert kinds(found) == {kind}
    assert any("init=identity" in remedy for remedy in found[0].remedies)


def test_a_learning_rate_that_slams_gates_shut():
    assert "dead_gates" in kinds(train(**SE, lr=1.0, warmup=0, clip=None, epochs=2))
