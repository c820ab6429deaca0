"""Logits' range and heads' outputs of our attention, and that capturing changes no training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vision import VisionTransformer
from zoo.diagnostics import NothingCapturedError, capture_attention
from zoo.layers import AttentionPool, Mask, create_attention, list_attention
from zoo.layers.factory import build_core

DIM, HEADS, WIDTH = 12, 2, 6
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 4},
    "block": {"block_size": 4},
    "strided": {"window": 6, "stride": 5},
    "longformer": {"window": 4, "num_global": 2},
    "bigbird": {"block_size": 4, "num_random": 1},
    "linformer": {"max_len": 11, "rank": 5},
}
WHAT = ("weights", "logits", "outputs")


def make(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return create_attention(kind, DIM, HEADS, **OPTIONS.get(kind, {}), **options).eval()


def has_scores(kind: str) -> bool:
    return build_core(kind, HEADS, WIDTH).scores


def captured(model: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """Everything that one layer shows of one pass."""
    wrapped, found = nn.ModuleDict({"attn": model}), {}
    with ExitStack() as stack:
        shown = {what: stack.enter_context(capture_attention(wrapped, what=what)) for what in WHAT}
        found["out"] = model(*args, **kwargs).detach()
    return found | {what: records["attn"][0] for what, records in shown.items()}


# --- logits -------------------------------------------------------------------------------------


def explicit(attn: Any, x: Tensor, allowed: Tensor, added: Tensor | float = 0.0) -> Tensor:
    """The definition in float64: (b h i j), NaN where a query may not look."""
    qkv = x.double() @ attn.qkv.weight.double().T + attn.qkv.bias.double()
    q, k, _ = qkv.view(*x.shape[:2], 3, HEADS, WIDTH).unbind(2)
    scores = torch.einsum("bihe,bjhe->bhij", q, k) / math.sqrt(WIDTH) / attn.temperature + added
    return scores.masked_fill(~allowed, math.nan)


@pytest.mark.parametrize("mask", ["none", "padding", "causal", "dense"])
def test_logits_are_the_range_of_the_scores(mask: str) -> None:
    attn, x = make("full", temperature=0.5), 3 * torch.randn(3, 7, DIM)
    masks: dict[str, Any] = {
        "none": None,
        "padding": Mask.padding([7, 3, 0]),
        "causal": Mask.causal(),
        "dense": Mask.dense(torch.rand(3, HEADS, 7, 7) < 0.4),
    }
    rule = masks[mask]
    allowed = torch.ones(1, 1, 7, 7, dtype=torch.bool) if rule is None else rule.lower(7, 7)
    allowed = allowed.expand(3, HEADS, 7, 7)
    scores = explicit(attn, x, allowed)
    least = scores.nan_to_num(math.inf).amin(-1)
    most = scores.nan_to_num(-math.inf).amax(-1)
    logits = captured(attn, x, mask=rule)["logits"]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), torch.stack([least, most], -1), rtol=0, atol=1e-5)
    empty = ~allowed.any(-1)
    assert (logits[empty] == torch.tensor([math.inf, -math.inf])).all()
    assert logits[~empty].isfinite().all()


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", list_attention())
def test_logits_and_weights_agree_in_all_kinds(kind: str, train: bool) -> None:
    """A softmax's largest and least weight differ by a factor exp(most - least)."""
    attn, x = make(kind), 3 * torch.randn(3, 11, DIM)
    mask = Mask.padding([11, 6, 0])
    if not has_scores(kind):
        wrapped = nn.ModuleDict({"attn": attn})
        with (
            pytest.raises(ValueError, match=rf"with scores.*these kinds have none: attn \({kind}"),
            capture_attention(wrapped, what="logits"),
        ):
            pass
        return
    shown = captured(attn.train(train), x, mask=mask)
    weights, logits = shown["weights"].double(), shown["logits"].double()
    seen = weights.sum(-1) > 0
    least = weights.masked_fill(weights == 0, math.inf).amin(-1)
    ratio = (weights.amax(-1) / least).log()
    span = logits[..., 1] - logits[..., 0]
    torch.testing.assert_close(span[seen], ratio[seen], rtol=1e-4, atol=1e-5)
    assert (span[~seen] == -math.inf).all()


def test_logits_hold_the_bias() -> None:
    model = VisionTransformer(
        img_size=8, patch_size=2, embed_dim=DIM, num_heads=HEADS, depth=1, position="relative"
    ).eval()
    attn: Any = model.blocks[0].attn
    with torch.no_grad():
        for parameter in attn.bias.parameters():
            parameter.normal_(0, 3)
    images, tokens = torch.randn(2, 3, 8, 8), []
    attn.register_forward_pre_hook(lambda m, args: tokens.append(args[0].detach()))
    with capture_attention(model, what="logits") as records:
        model(images)
    n = tokens[0].shape[1]
    allowed = torch.ones(2, HEADS, n, n, dtype=torch.bool)
    scores = explicit(attn, tokens[0], allowed, attn.bias.lower(n, n).detach().double())
    expected = torch.stack(scores.aminmax(dim=-1), -1)
    torch.testing.assert_close(
        records["blocks.0.attn"][0].double(), expected.detach(), rtol=0, atol=1e-5
    )


def test_nan_stays_nan() -> None:
    x = torch.randn(2, 5, DIM)
    x[1, 2] = math.nan
    logits = captured(make("full"), x)["logits"]
    assert logits[0].isfinite().all()
    assert logits[1].isnan().all()


def test_adaptive_puts_both_kinds_together() -> None:
    attn, x = make("adaptive", threshold=8, long="full"), torch.randn(2, 11, DIM)
    mask = Mask.padding([11, 5])
    mixed, full = captured(attn, x, mask=mask), captured(make("full"), x, mask=mask)
    for what in WHAT:
        torch.testing.assert_close(mixed[what], full[what])


def test_layers_without_scores_are_left_out() -> None:
    model = nn.ModuleDict({"a": make("performer"), "b": make("full")})
    x = torch.randn(2, 5, DIM)
    with capture_attention(model, what="logits") as records:
        model["b"](model["a"](x))
    assert list(records) == ["b"]
    with (
        pytest.raises(ValueError, match=r"layers='a' .*there is \['b'\]; .*a \(performer\)$"),
        capture_attention(model, "a", what="logits"),
    ):
        pass


# --- outputs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", list_attention())
def test_outputs_are_what_is_projected(kind: str, train: bool) -> None:
    """Bit for bit, with dropout."""
    drop = {"attn_drop": 0.5} if build_core(kind, HEADS, WIDTH).drops else {}
    attn, x = make(kind, **drop).train(train), torch.randn(3, 11, DIM)
    wrapped = nn.ModuleDict({"attn": attn})
    with capture_attention(wrapped, what="outputs") as records:
        out = attn(x, mask=Mask.padding([11, 6, 0]))
    (heads,) = records["attn"]
    assert heads.shape == (3, HEADS, 11, WIDTH)
    assert torch.equal(attn.proj(heads.transpose(1, 2).flatten(2)), out)
    assert (heads[2] == 0).all() or kind == "linformer"  # its keys are mixed before


def test_outputs_equal_weights_times_values_in_float64() -> None:
    attn, x = make("full"), torch.randn(3, 7, DIM)
    mask = Mask.padding([7, 3, 0])
    allowed = mask.lower(7, 7).expand(3, HEADS, 7, 7)
    weights = explicit(attn, x, allowed).nan_to_num(-math.inf).softmax(-1).nan_to_num(0)
    qkv = x.double() @ attn.qkv.weight.double().T + attn.qkv.bias.double()
    v = qkv.view(3, 7, 3, HEADS, WIDTH)[:, :, 2]
    expected = torch.einsum("bhij,bjhe->bhie", weights, v)
    shown = captured(attn, x, mask=mask)
    torch.testing.assert_close(shown["outputs"].double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(shown["weights"].double(), weights, rtol=0, atol=1e-5)


def test_pooling_by_a_learned_query_shows_all() -> None:
    torch.manual_seed(0)
    pool = AttentionPool(DIM, HEADS).eval()
    shown = captured(pool, torch.randn(3, 7, DIM), Mask.padding([7, 3, 1]))
    assert {what: tuple(shown[what].shape) for what in WHAT} == {
        "weights": (3, HEADS, 1, 7),
        "logits": (3, HEADS, 1, 2),
        "outputs": (3, HEADS, 1, WIDTH),
    }
    x = pool.proj(shown["outputs"].transpose(1, 2).flatten(2))
    torch.testing.assert_close((x + pool.mlp(pool.norm(x)))[:, 0], shown["out"])


def test_other_precisions() -> None:
    attn, x = make("full"), torch.randn(2, 7, DIM)
    exact = captured(attn, x)
    attn.to(torch.bfloat16)
    shown = captured(attn, x.to(torch.bfloat16))
    for what in WHAT:
        assert shown[what].dtype == torch.float32
        torch.testing.assert_close(shown[what], exact[what], rtol=0.05, atol=0.02)


@pytest.mark.parametrize("what", ["weight", "", None])
def test_what_is_one_of_three(what: Any) -> None:
    with (
        pytest.raises(ValueError, match=f"what={what!r} must be one of 'weights', 'logits', 'out"),
        capture_attention(make("full"), what=what),
    ):
        pass


@pytest.mark.parametrize("what", WHAT)
def test_bounds_samples_and_what_did_not_run(what: str) -> None:
    model, x = nn.ModuleDict({"attn": make("full")}), torch.randn(3, 7, DIM)
    with capture_attention(model, samples=2, what=what) as records:
        model["attn"](x)
    (shown,) = records["attn"]
    assert len(shown) == 2
    with capture_attention(model, samples=2, what=what, max_bytes=shown.nbytes):
        model["attn"](x)
    with (
        pytest.raises(MemoryError, match=rf"max_bytes={shown.nbytes - 1}"),
        capture_attention(model, samples=2, what=what, max_bytes=shown.nbytes - 1),
    ):
        model["attn"](x)
    with pytest.raises(NothingCapturedError), capture_attention(model, what=what):
        pass


# --- training -----------------------------------------------------------------------------------

IMAGES = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@contextmanager
def one_process(folder: Path) -> Iterator[None]:
    dist.init_process_group("gloo", f"file://{folder}/group", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def train(way: str, capturing: bool) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Losses and parameters of three steps, and the records of each."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    drop = {"attn_drop_rate": 0.3, "proj_drop_rate": 0.2, "drop_path_rate": 0.2}
    inner = VisionTransformer(
        img_size=8, patch_size=2, embed_dim=16, num_heads=2, depth=1, num_classes=3, **drop
    ).train()
    inner.set_grad_checkpointing("checkpointing" in way)
    model: Any = inner
    if "compiled" in way:
        model.compile(backend="aot_eager")
    if "parallel" in way:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    losses: list[Tensor] = []
    seen: list[dict[str, Any]] = []
    for _ in range(3):
        with ExitStack() as stack:
            shown = {
                what: stack.enter_context(capture_attention(model, what=what))
                for what in (WHAT if capturing else ())
            }
            with torch.autocast("cpu", torch.bfloat16, enabled="bf16" in way):
                loss = model(IMAGES).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        seen.append(shown)
    return [*losses, *(p.detach() for p in inner.parameters()), torch.get_rng_state()], seen


@pytest.mark.parametrize(
    "way",
    [
        *("plain", "bf16", "checkpointing", "checkpointing bf16"),
        *("parallel", "parallel checkpointing", "compiled"),
        pytest.param("compiled checkpointing", marks=pytest.mark.slow),
    ],
)
def test_training_is_the_same_bit_for_bit(way: str, tmp_path: Path) -> None:  # A3, A9
    with one_process(tmp_path) if "parallel" in way else ExitStack():
        plain, captured = train(way, False), train(way, True)
    for one, other in zip(plain[0], captured[0], strict=True):
        assert torch.equal(one, other)
    for shown in captured[1]:
        for what, records in shown.items():
            assert list(records) == ["blocks.0.attn"], what
            assert {len(maps) for maps in records.values()} == {1}, what
        for (maps,) in shown["weights"].values():  # before dropout
            torch.testing.assert_close(maps.sum(-1), torch.ones(4, 2, 17))
            entropy = torch.special.entr(maps).sum(-1)
            assert (entropy >= 0).all()
            assert (entropy <= math.log(17) + 1e-5).all()
