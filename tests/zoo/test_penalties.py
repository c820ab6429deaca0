"""Penalties on attention: their values, gradients, and every way of training."""

from __future__ import annotations

import copy
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import vision
from zoo.diagnostics import NothingCapturedError, capture_attention, entropy
from zoo.layers import Block, Mask, create_attention, list_attention
from zoo.penalties import alike, attention_penalty, evenness

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 4}
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
BOTH = {"heads": 0.3, "entropy": 0.2}


def ours(**options: Any) -> Any:
    torch.manual_seed(0)
    model = vision.VisionTransformer(**SMALL, num_classes=3, **options).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


# --- measures -----------------------------------------------------------------------------------


def grams(outputs: Tensor) -> Tensor:
    """The definition: cosines between the heads' matrices of products of tokens; mean of pairs."""
    o = outputs.double()
    products = torch.einsum("bhie,bhje->bhij", o, o).flatten(2)
    products = products / products.norm(dim=-1, keepdim=True)
    cosines = torch.einsum("bhp,bgp->bhg", products, products)
    h = o.shape[1]
    return (cosines.sum((1, 2)) - h).mean() / (h * (h - 1))


@pytest.mark.parametrize("shape", [(3, 4, 7, 5), (1, 2, 3, 8), (2, 3, 1, 4)])
def test_alike_is_its_definition(shape: tuple[int, ...]) -> None:
    outputs = torch.randn(shape)
    torch.testing.assert_close(alike(outputs).double(), grams(outputs), rtol=0, atol=1e-6)
    torch.testing.assert_close(alike(outputs.double()), grams(outputs))


def test_alike_does_not_depend_on_a_heads_own_axes() -> None:
    """Heads that say the same in other coordinates are the same: no turn of values escapes."""
    one = torch.randn(2, 1, 9, 6, dtype=torch.float64)
    turn, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    torch.testing.assert_close(
        alike(torch.cat([one, -3 * one @ turn], 1)), torch.ones((), dtype=torch.float64)
    )
    apart = torch.zeros(2, 2, 8, 4)
    apart[:, 0, :4], apart[:, 1, 4:] = torch.randn(2, 4, 4), torch.randn(2, 4, 4)
    assert alike(apart) == 0
    assert 0 < alike(torch.randn(5, 4, 20, 4)) < 1


def test_nothing_put_out_is_not_alike_and_has_no_gradient() -> None:
    outputs = torch.randn(2, 3, 5, 4, requires_grad=True)
    with torch.no_grad():
        outputs[1] = 0
    alike(outputs).backward()
    assert outputs.grad is not None
    assert outputs.grad.isfinite().all()
    assert (outputs.grad[1] == 0).all()


def test_evenness_is_the_normalised_entropy() -> None:
    weights = torch.randn(2, 3, 5, 7, dtype=torch.float64).mul(4).softmax(-1)
    torch.testing.assert_close(evenness(weights), entropy(weights, normalized=True).mean())
    assert evenness(torch.full((1, 1, 2, 4), 0.25)) == pytest.approx(1)
    assert evenness(torch.eye(4)[None, None]) == 0


def test_one_hot_rows_have_finite_gradients() -> None:
    scores = torch.tensor([[[[0.0, 1e4], [0.0, -1e4]]]], requires_grad=True)
    evenness(scores.softmax(-1)).backward()
    assert scores.grad is not None
    assert (scores.grad == 0).all()  # a stiff row is stiff for the bonus too


# --- values and gradients -----------------------------------------------------------------------


def run(model: Any, **weights: float) -> tuple[Tensor, list[Tensor]]:
    """The term, and its gradients."""
    model.zero_grad()
    with attention_penalty(model, **weights) as penalty:
        model(IMAGES.to(next(model.parameters()).dtype))
    term = penalty()
    term.backward()
    return term.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_term_is_made_of_what_capture_shows(checkpointing: bool) -> None:
    model = ours()
    model.set_grad_checkpointing(checkpointing)
    with (
        capture_attention(model) as weights,
        capture_attention(model, what="outputs") as outputs,
        attention_penalty(model, **BOTH) as penalty,
    ):
        model(IMAGES)
    heads = torch.stack([alike(maps) for (maps,) in outputs.values()]).mean()
    even = torch.stack([evenness(maps) for (maps,) in weights.values()]).mean()
    torch.testing.assert_close(penalty().detach(), 0.3 * heads - 0.2 * even)
    torch.testing.assert_close(penalty.parts, {"heads": heads, "entropy": even})


def hugging() -> Any:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        image_size=16, patch_size=4,
    )  # fmt: skip
    return transformers.ViTModel(config)


MODELS: dict[str, Callable[[], Any]] = {
    "ours": ours,
    "ours, checkpointing": lambda: checkpointed(ours()),
    "ours, additive": lambda: ours(attention="additive"),
    "ours, window": lambda: ours(attention="window", attention_options={"window": 2}),
    "timm": lambda: timm.models.VisionTransformer(**SMALL),
    "timm, checkpointing": lambda: checkpointed(timm.models.VisionTransformer(**SMALL)),
    "timm swin": lambda: timm.models.SwinTransformer(
        img_size=16, patch_size=2, embed_dim=8, depths=(2,), num_heads=(2,), window_size=4
    ),
    "torchvision": lambda: torchvision.models.VisionTransformer(16, 4, 2, 4, 16, 32),
    "open_clip": lambda: open_clip.CLIP(
        8,
        vision_cfg={
            "layers": 2, "width": 16, "head_width": 4, "image_size": 16, "patch_size": 4
        },
        text_cfg={"context_length": 4, "vocab_size": 9, "width": 8, "heads": 2, "layers": 1},
    ).visual,
    "transformers": hugging,
}  # fmt: skip


def checkpointed(model: Any) -> Any:
    model.set_grad_checkpointing(True)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    """In float64, along a random direction in the space of the parameters."""
    torch.manual_seed(0)
    model = MODELS[name]().double().train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0, 0.3)
    directions = [torch.randn_like(p) for p in parameters]
    run(model, **BOTH)
    slope = sum(
        float((p.grad * d).sum())
        for p, d in zip(parameters, directions, strict=True)
        if p.grad is not None
    )

    def moved(by: float) -> float:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=by)
        return float(run(model, **BOTH)[0])

    step = 1e-6
    after = moved(step)
    before = moved(-2 * step)
    assert abs(slope) > 1e-4
    assert slope == pytest.approx((after - before) / (2 * step), rel=1e-4)


@pytest.mark.parametrize("kind", list_attention())
def test_every_kind_can_be_penalised(kind: str) -> None:
    options = {"linformer": {"max_len": 7, "rank": 4}}.get(kind, {})
    attn = create_attention(kind, 16, 4, **options).train()
    model, x = nn.ModuleDict({"attn": attn}), torch.randn(3, 7, 16)
    learns = kind not in ("identity", "mean", "uniform")  # what their weights are
    with attention_penalty(model, heads=0.3, entropy=0.2 * learns) as penalty:
        attn(x, mask=Mask.padding([7, 3, 0]))
    penalty().backward()
    gradients = [p.grad for p in attn.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert any(gradient.abs().sum() > 0 for gradient in gradients)


def test_it_works_against_what_it_is_for() -> None:
    """Some steps on the term alone: heads differ more, and weights are more even."""
    for weights, part, up in (
        ({"heads": 1.0}, "heads", False),
        ({"entropy": 1.0}, "entropy", True),
    ):
        model = ours(temperature=0.05)  # sharp
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        values = []
        for _ in range(20):
            with attention_penalty(model, **weights) as penalty:
                model(IMAGES)
            optimizer.zero_grad()
            penalty().backward()
            optimizer.step()
            values.append(float(penalty.parts[part]))
        assert values[-1] - values[0] > 0.1 if up else values[0] - values[-1] > 0.1


# --- ways of training ---------------------------------------------------------------------------


def test_the_loss_and_its_gradients_stay_the_same() -> None:
    """Beside the term: the same dropout, the same kernels, bit for bit."""

    def train(penalised: bool) -> list[Tensor]:
        model = ours(attn_drop_rate=0.3, drop_path_rate=0.2)
        torch.manual_seed(2)
        with attention_penalty(model, **(BOTH if penalised else {})):
            loss = model(IMAGES).square().mean()
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters()), torch.get_rng_state()]

    assert all(map(torch.equal, train(False), train(True)))


def test_checkpointing_gives_the_same_gradients() -> None:
    plain, computed_again = run(ours(), **BOTH), run(checkpointed(ours()), **BOTH)
    assert torch.equal(plain[0], computed_again[0])
    for one, other in zip(plain[1], computed_again[1], strict=True):
        torch.testing.assert_close(one, other)


def test_checkpointing_with_a_loss_beside_it() -> None:
    def train(model: Any) -> list[Tensor]:
        with attention_penalty(model, **BOTH) as penalty:
            loss = model(IMAGES).square().mean()
        (loss + penalty()).backward()
        return [p.grad for p in model.parameters()]

    for one, other in zip(train(ours()), train(checkpointed(ours())), strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast() -> None:
    exact, _ = run(ours(), **BOTH)
    with torch.autocast("cpu", torch.bfloat16):
        term, gradients = run(ours(), **BOTH)
    assert term.dtype == torch.float32
    torch.testing.assert_close(term, exact, rtol=0.05, atol=0.01)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_gradient_accumulation() -> None:
    model = ours()
    _, whole = run(model, **BOTH)
    model.zero_grad()
    with attention_penalty(model, **BOTH) as penalty:
        for part in IMAGES.split(2):
            model(part)
            (penalty() / 2).backward()
    for one, parameter in zip(
        whole, (p for p in model.parameters() if p.grad is not None), strict=True
    ):
        torch.testing.assert_close(one, parameter.grad)


def test_compiled_models() -> None:
    """Compiled before the context or in it, as training and evaluation take turns."""
    torch._dynamo.reset()
    x = torch.randn(2, 5, 16)

    def train(compiling: bool) -> list[Tensor]:
        torch.manual_seed(0)
        block = Block(16, 4)
        call: Any = torch.compile(block, backend="aot_eager") if compiling else block
        call(x)
        with attention_penalty(call, **BOTH) as penalty:
            loss = call(x).square().mean()
        (loss + penalty()).backward()
        return [loss.detach(), *(p.grad for p in block.parameters())]

    for one, other in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(one, other)


PARALLEL = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from vision import VisionTransformer
from zoo.penalties import attention_penalty

dist.init_process_group("gloo")
rank = dist.get_rank()

def build():
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=4)

images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
for checkpointing in (False, True):
    alone, inner = build(), build()
    inner.set_grad_checkpointing(checkpointing)
    wrapped = DistributedDataParallel(inner)
    for model, batch in ((alone, images), (wrapped, images[2 * rank : 2 * rank + 2])):
        with attention_penalty(model, heads=0.3, entropy=0.2) as penalty:
            loss = model(batch).square().mean()
        (loss + penalty()).backward()
    for one, other in zip(alone.parameters(), inner.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6), rank
dist.destroy_process_group()
"""


def test_two_processes_make_the_gradients_of_one(tmp_path: Path) -> None:
    script = tmp_path / "parallel.py"
    script.write_text(PARALLEL)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [sys.executable, *launch, script],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


# --- use ----------------------------------------------------------------------------------------


def test_passes_without_gradients_do_not_count() -> None:
    model = ours()
    with attention_penalty(model, heads=0.1) as penalty:
        model(IMAGES)
        with torch.no_grad():
            model(IMAGES[:2])
    expected, _ = run(ours(), heads=0.1)
    assert torch.equal(penalty().detach(), expected)


def test_a_term_is_given_once() -> None:
    model = ours()
    with attention_penalty(model, heads=0.1) as penalty:
        model(IMAGES)
        penalty().backward()
        with pytest.raises(NothingCapturedError, match="penalty on heads: call it once for each"):
            penalty()
        model(IMAGES)
        assert penalty().requires_grad


def test_reentrant_checkpointing_is_named() -> None:
    block = Block(16, 4)
    x = torch.randn(2, 5, 16, requires_grad=True)
    with attention_penalty(nn.ModuleList([block]), **BOTH) as penalty:
        checkpoint(block, x, use_reentrant=True)
    with pytest.raises(NothingCapturedError, match=r"heads and entropy.*use_reentrant=True"):
        penalty()


def test_weights_of_zero_observe_nothing() -> None:
    model = ours()
    with attention_penalty(model) as penalty:
        assert not any(getattr(module, "active", False) for module in model.modules())
        model(IMAGES)
    assert penalty() == 0


def test_layers_are_chosen_and_left() -> None:
    model = ours()
    with attention_penalty(model, layers="blocks.1.*", heads=1.0) as penalty:
        model(IMAGES)
        copy.deepcopy(model)(IMAGES)
    with capture_attention(model, "blocks.1.*", what="outputs") as records:
        model(IMAGES)
    torch.testing.assert_close(penalty().detach(), alike(records["blocks.1.attn"][0]))
    assert not any(getattr(module, "active", False) for module in model.modules())


@pytest.mark.parametrize("weight", [-0.1, math.inf, math.nan])
@pytest.mark.parametrize("name", ["heads", "entropy"])
def test_weights_are_positive_and_finite(name: str, weight: float) -> None:
    with pytest.raises(ValueError, match=name), attention_penalty(ours(), **{name: weight}):
        pass


def test_bad_input() -> None:
    with (
        pytest.raises(ValueError, match=r"layers='block\.\*' matches no .*'blocks\.0\.attn'"),
        attention_penalty(ours(), heads=0.1, layers="block.*"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="matches no attention: the model has none"),
        attention_penalty(nn.Linear(2, 2), entropy=0.1),
    ):
        pass
    single = nn.ModuleList([Block(16, 1)])
    with (
        pytest.raises(ValueError, match=r"heads \(0.1\) needs two or more; 0\.attn has one"),
        attention_penalty(single, heads=0.1),
    ):
        single[0](torch.randn(2, 5, 16))


@pytest.mark.parametrize("size", [1e-10, 1e3, 1e10])
def test_how_large_heads_are_does_not_matter(size: float) -> None:
    outputs = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    small, large = outputs.clone().requires_grad_(), (outputs * size).requires_grad_()
    alike(small).backward()
    alike(large).backward()
    assert torch.allclose(alike(large), alike(small), atol=1e-6)
    assert small.grad is not None
    assert large.grad is not None
    assert torch.allclose(large.grad * size, small.grad, atol=1e-6)


def test_weights_that_do_not_learn_are_named() -> None:
    model = vision.VisionTransformer(**SMALL, attention="mean", num_classes=3)
    with attention_penalty(model, entropy=0.1) as penalty:
        model(IMAGES)
        with pytest.raises(NothingCapturedError, match="as those of kind mean"):
            penalty()
