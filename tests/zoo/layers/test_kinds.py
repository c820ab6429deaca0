"""Every attention kind against its own definition in float64, and the contract of all kinds.

A new kind is tested by being registered; its definition belongs into `REFERENCES`.
"""

from __future__ import annotations

import copy
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from zoo import capture_attention
from zoo.layers import Mask, create_attention, list_attention, supported_masks
from zoo.layers.factory import build_core
from zoo.layers.multihead import set_temperature

KINDS = list_attention()
SMALL = {  # patterns that are sparse on short sequences
    "window": {"window": 8},
    "block": {"block_size": 8, "num_global": 2},
    "strided": {"window": 6, "stride": 5},
    "longformer": {"window": 9, "num_global": 2},
    "bigbird": {"block_size": 4, "num_random": 2, "num_global": 1},
    "linformer": {"max_len": 64, "rank": 6},
    "performer": {"num_features": 20},
    "adaptive": {"threshold": 10},
}
SHIFTED = [
    ("window", {"window": 8, "shift": True}),
    ("strided", {"window": 6, "stride": 3, "num_far": 2}),
]
CASES = [(kind, SMALL.get(kind, {})) for kind in KINDS] + SHIFTED
PERMUTABLE = ("full", "dot", "additive", "linear", "performer", "mean", "uniform", "identity")
H, E = 2, 6


def core_of(kind, options):
    torch.manual_seed(1)
    core = build_core(kind, H, E, **options)
    if hasattr(core, "radius"):  # the smallest block would hide the pattern of a short sequence
        core.size = max(1, core.radius)
    return core.eval()


def masks_of(kind, b, i, j):
    lengths = torch.tensor([(j, j // 2, 0)[sample % 3] for sample in range(b)])
    ids = torch.randint(0, 3, (b, i)), torch.randint(0, 3, (b, j))
    made = {
        "none": None,
        "padding": Mask.padding(lengths),
        "causal": Mask.causal(),
        "segment": Mask.segment(*ids),
        "dense": Mask.dense(torch.rand(b, H, i, j) < 0.6),
    }
    supported = {name: m for name, m in made.items() if name in ("none", *supported_masks(kind))}
    if {"padding", "causal"} <= supported.keys():
        supported["padding & causal"] = Mask.padding(lengths) & Mask.causal()
    return supported


# --- definitions ------------------------------------------------------------------------------


def softmax_of(scores, allowed):
    """Rows of weights; zeros where nothing is allowed."""
    weights = torch.zeros_like(scores)
    filled = scores.masked_fill(~allowed, -math.inf)
    some = allowed.any(-1)
    weights[some] = filled[some].softmax(-1)
    return weights


def exact(q, k, v, allowed, core, scale=None):
    scores = torch.einsum("bhie,bhje->bhij", q, k) * (E**-0.5 if scale is None else scale)
    return torch.einsum("bhij,bhje->bhie", softmax_of(scores, allowed), v)


def additive(q, k, v, allowed, core):
    net = copy.deepcopy(core).double()
    pair = torch.cat(
        [
            q[:, :, :, None].expand(-1, -1, -1, k.shape[2], -1),
            k[:, :, None].expand(-1, -1, q.shape[2], -1, -1),
        ],
        -1,
    )
    joined = torch.cat([net.query.weight, net.key.weight], 1)  # W [q; k]
    scores = torch.tanh(pair @ joined.T + net.query.bias) @ net.score.weight[0]
    return torch.einsum("bhij,bhje->bhie", softmax_of(scores, allowed), v)


def ratio(weights, allowed, v):
    weights = weights * allowed
    total = weights.sum(-1, keepdim=True)
    return torch.einsum("bhij,bhje->bhie", weights / total.clamp(min=1e-300), v)


def linear(q, k, v, allowed, core):
    phi = [torch.where(x > 0, x + 1, x.exp()) for x in (q, k)]
    return ratio(torch.einsum("bhie,bhje->bhij", *phi), allowed, v)


def performer(q, k, v, allowed, core):
    w = core.directions.double()
    phi = [
        torch.exp(torch.einsum("bhne,me->bhnm", x, w) - x.square().sum(-1, keepdim=True) / 2)
        for x in (q / E**0.25, k / E**0.25)
    ]
    return ratio(torch.einsum("bhim,bhjm->bhij", *phi), allowed, v)


def linformer(q, k, v, allowed, core):
    seen = allowed[:, :, 0, :, None]  # padding is the same for all queries
    k, v = (
        torch.einsum("jr,bhje->bhre", p.double()[: x.shape[2]], x * seen)
        for p, x in ((core.key, k), (core.value, v))
    )
    return exact(q, k, v, torch.ones(*q.shape[:3], k.shape[2], dtype=torch.bool), core)


def uniform(q, k, v, allowed, core):
    return ratio(torch.ones(1, dtype=torch.float64), allowed, v)


def within(rule):
    """Exact attention over the pairs that `rule(place of the query, key, core)` allows."""

    def attend(q, k, v, allowed, core):
        i, j = q.shape[2], k.shape[2]
        pattern = torch.tensor(
            [[rule(row + j - i, col, j, core) for col in range(j)] for row in range(i)]
        )
        return exact(q, k, v, allowed & pattern, core)

    return attend


def is_global(p, k, core):
    return k < core.num_global or 0 <= p < core.num_global


def block(p, k, j, core):
    return p // 8 == k // 8 or is_global(p, k, core)


def window(p, k, j, core):
    shift = core.shift[0]
    return (p + shift) // 8 == (k + shift) // 8


def longformer(p, k, j, core):
    return abs(p - k) <= 4 or is_global(p, k, core)


def strided(p, k, j, core):
    """Far keys are counted from the middle of the query's block."""
    middle = p // core.size * core.size + core.size // 2
    number = (k + 1) // core.stride - 1 - (middle // core.stride - core.num_far // 2)
    far = (k + 1) % core.stride == 0 and 0 <= number < core.num_far
    return abs(p - k) <= core.radius or far


def bigbird(p, k, j, core):
    table = core.random_blocks(math.ceil(j / 4))
    far = table is not None and p >= 0 and k // 4 in table[p // 4].tolist()
    return abs(p // 4 - k // 4) <= 1 or far or is_global(p, k, core)


def adaptive(q, k, v, allowed, core):
    if k.shape[2] < 10:
        return exact(q, k, v, allowed, core)
    return within(strided)(q, k, v, allowed, core.when_long)


REFERENCES = {
    "full": exact,
    "dot": lambda *args: exact(*args, scale=1.0),
    "additive": additive,
    "linear": linear,
    "performer": performer,
    "linformer": linformer,
    "identity": within(lambda p, k, j, core: p == k),
    "mean": uniform,
    "uniform": uniform,
    "block": within(block),
    "window": within(window),
    "longformer": within(longformer),
    "strided": within(strided),
    "bigbird": within(bigbird),
    "adaptive": adaptive,
}


def test_every_kind_has_a_definition():
    assert set(REFERENCES) == set(KINDS)


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize(
    ("i", "j"), [(1, 1), (7, 7), (8, 8), (9, 9), (13, 13), (37, 37), (5, 13), (13, 5), (17, 40)]
)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_values_and_gradients_equal_the_definition(kind, options, i, j, batch):
    core = core_of(kind, options)
    torch.manual_seed(i * 100 + j)
    q, k, v = (torch.randn(batch, H, n, E, requires_grad=True) for n in (i, j, j))
    for name, mask in masks_of(kind, batch, i, j).items():
        allowed = torch.ones(batch, H, i, j, dtype=torch.bool)
        if mask is not None:
            allowed = allowed & mask.lower(i, j)
        doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
        expected = REFERENCES[kind](*doubles, allowed, core)
        out = core(q, k, v, mask)
        torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5, msg=name)
        seed = torch.randn(out.shape)
        ours = torch.autograd.grad(out, (q, k, v), seed, allow_unused=True)
        theirs = torch.autograd.grad(expected, doubles, seed.double(), allow_unused=True)
        for a, b in zip(ours, theirs, strict=True):
            a, b = (torch.zeros(1) if g is None else g.float() for g in (a, b))
            torch.testing.assert_close(*torch.broadcast_tensors(a, b), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 3), "grid": (4, 7), "num_global": 1},
        {"window": 2, "grid": (4, 4), "shift": True},
        {"window": (3, 3), "grid": (7, 5), "shift": (1, 2), "num_global": 5},
    ],
)
def test_windows_of_an_image(options):
    core = build_core("window", H, E, **options)
    prefix, (rows, cols) = core.num_global, options["grid"]
    n = prefix + rows * cols
    q, k, v = torch.randn(3, 2, H, n, E)

    def rule(p, key, j, core):
        if p < prefix or key < prefix:
            return True
        (y, x), (z, w) = divmod(p - prefix, cols), divmod(key - prefix, cols)
        (dy, dx), (wy, wx) = core.shift, core.window
        return (y + dy) // wy == (z + dy) // wy and (x + dx) // wx == (w + dx) // wx

    for mask in (None, Mask.padding([n, n - 3]), Mask.causal()):
        allowed = torch.ones(2, H, n, n, dtype=torch.bool)
        if mask is not None:
            allowed = allowed & mask.lower(n, n)
        expected = within(rule)(q.double(), k.double(), v.double(), allowed, core)
        torch.testing.assert_close(core(q, k, v, mask).double(), expected, rtol=1e-5, atol=1e-5)


def test_random_blocks_are_far_distinct_and_those_of_a_longer_sequence():
    core = build_core("bigbird", H, E, block_size=4, num_random=3)
    table = core.random_blocks(300)
    assert torch.equal(table, build_core("bigbird", H, E, num_random=3).random_blocks(300))
    for number, chosen in enumerate(table.tolist()):
        there = [c for c in chosen if c >= 0]
        assert len(set(there)) == len(there)
        assert all(abs(number - c) > 1 and c < 300 for c in there)
    assert (table >= 0).float().mean() > 0.7
    assert (table[:, 1:] != table[:, :-1]).any()
    for keys in (5, 64, 129):
        shorter = table[:keys]
        assert torch.equal(core.random_blocks(keys), shorter.masked_fill(shorter >= keys, -1))


def test_performer_approaches_softmax():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, H, 24, E) * 0.5
    expected = build_core("full", H, E)(q, k, v)
    errors = [
        (build_core("performer", H, E, num_features=m)(q, k, v) - expected).norm() / expected.norm()
        for m in (16, 4096)
    ]
    assert errors[1] < 0.1
    assert errors[1] < errors[0] / 2


def test_performer_redraws_in_training_only():
    core = build_core("performer", H, E, redraw=True)
    q, k, v = torch.randn(3, 1, H, 5, E)
    assert not torch.equal(core.train()(q, k, v), core(q, k, v))
    assert torch.equal(core.eval()(q, k, v), core(q, k, v))
    assert core.state_dict() == {}


def test_the_worked_example():
    """The scale is that of one head's width: 0.584 / 0.416, not the unscaled 0.618 / 0.382."""
    q = torch.tensor([[0.8, 0.2]])[None, None]
    k = torch.tensor([[0.9, 0.1], [0.1, 0.9]])[None, None]
    v = torch.eye(2)[None, None]
    scaled, unscaled = (build_core(kind, 1, 2)(q, k, v)[0, 0, 0] for kind in ("full", "dot"))
    assert scaled.tolist() == pytest.approx([0.584, 0.416], abs=5e-4)
    assert unscaled.tolist() == pytest.approx([0.618, 0.382], abs=5e-4)


def test_the_readme_tells_the_masks_of_every_kind():
    """The table is written by hand and must say what the registry does."""
    text = (Path(__file__).parents[3] / "README.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \| .*? \|$", text, re.MULTILINE)
    told = {}
    for kinds, masks in rows:
        names, cells = re.findall(r"`(\w+)`", kinds), masks.split("; ")
        cells = cells * len(names) if len(cells) == 1 else cells
        told |= dict(zip(names, cells, strict=True))
    for kind in KINDS:
        every = supported_masks(kind) == ("padding", "causal", "segment", "dense")
        assert told[kind] == ("all" if every else ", ".join(supported_masks(kind))), kind


# --- the contract of every kind -----------------------------------------------------------------

DIM = H * E


def make(kind, **options):
    torch.manual_seed(2)
    return create_attention(kind, DIM, H, **{**SMALL.get(kind, {}), **options}).eval()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a1_a_sample_that_is_all_padding(kind, dtype):
    attn = make(kind, proj_bias=False).to(dtype)
    x = torch.randn(2, 11, DIM, dtype=dtype, requires_grad=True)
    out = attn(x, mask=Mask.padding([11, 0]))
    assert (out[1] == 0).all()
    out.float().square().sum().backward()
    assert x.grad.isfinite().all()
    assert (x.grad[1] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in attn.parameters())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out[:1], attn(x[:1]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [-math.inf, torch.finfo(torch.float32).min, -1e4])
def test_a2_a5_a_float_mask_is_refused(kind, value):
    mask = torch.full((2, 1, 1, 11), value)
    with pytest.raises(TypeError, match="mask must be bool"):
        make(kind)(torch.randn(2, 11, DIM), mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_a3_capture_changes_nothing(kind):
    attn, x = make(kind).train(), torch.randn(2, 11, DIM)
    mask = Mask.padding([11, 0])
    torch.manual_seed(0)
    plain = attn(x, mask=mask)
    torch.manual_seed(0)
    with capture_attention(nn.ModuleDict({"attn": attn})) as records:
        assert torch.equal(attn(x, mask=mask), plain)
    (weights,) = records["attn"]
    assert weights.shape[:3] == (2, H, 11)
    if kind != "linformer":  # its weights are over projected positions, which are never empty
        sums = weights.sum(-1)
        torch.testing.assert_close(sums[0], torch.ones_like(sums[0]))
        assert (sums[1] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_captured_weights_make_the_output(kind):
    if kind == "linformer":
        pytest.skip("its weights are over projected positions")
    core = core_of(kind, SMALL.get(kind, {}))
    attn = make(kind, qkv_bias=False)
    attn.core = core
    x = torch.randn(2, 13, DIM)
    with capture_attention(nn.ModuleDict({"attn": attn})) as records:
        out = attn(x, mask=Mask.padding([13, 6]))
    v = attn.qkv(x)[..., -DIM:].unflatten(-1, (H, E)).transpose(1, 2)
    expected = attn.proj((records["attn"][0] @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a7_a9_dropout_acts_in_training_only(kind):
    if not build_core(kind, H, E).drops:
        with pytest.raises(ValueError, match="attn_drop"):
            make(kind, attn_drop=0.5)
        return
    attn, x = make(kind, attn_drop=0.5), torch.randn(2, 11, DIM)
    assert torch.equal(attn(x), attn(x))
    attn.train()
    assert not torch.equal(attn(x), attn(x))
    with capture_attention(nn.ModuleDict({"attn": attn})) as records:
        attn(x)
    weights = records["attn"][0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]))
    entropy = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
    assert (entropy >= -1e-6).all()
    assert (entropy <= math.log(weights.shape[-1]) + 1e-5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a8_masks_in_half_precision(kind):
    mask = Mask.padding([11, 4])
    if "causal" in supported_masks(kind):
        mask = mask & Mask.causal()
    x = 20 * torch.randn(2, 11, DIM)
    attn = make(kind)
    with torch.autocast("cpu", torch.bfloat16):
        assert attn(x, mask=mask).isfinite().all()
    assert attn.bfloat16()(x.bfloat16(), mask=mask).isfinite().all()


@pytest.mark.parametrize("kind", PERMUTABLE)
def test_a11_order_is_invisible_without_positions(kind):
    attn, x = make(kind), torch.randn(2, 11, DIM)
    order = torch.randperm(11)
    torch.testing.assert_close(attn(x[:, order]), attn(x)[:, order], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [24, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a12_a14_padding_moves_no_token(kind, n):
    """Appended tokens, whatever they hold, change nothing: as if each sample stood alone."""
    options = SMALL.get(kind, {}) if n == 24 else {"max_len": n} if kind == "linformer" else {}
    if kind == "adaptive":
        options = {"threshold": n // 2}  # one sample below, one above
    torch.manual_seed(1)
    attn, x = create_attention(kind, DIM, H, **options), torch.randn(2, n, DIM)
    lengths = [n // 2 + 3, n // 2 - 3]
    mask = Mask.padding(lengths)
    for mode in (True, False):
        attn.train(mode)
        alone = [attn(x[i : i + 1, :real])[0] for i, real in enumerate(lengths)]
        for junk in (0.0, math.nan):
            beyond = torch.arange(n) >= torch.tensor(lengths)[:, None]
            out = attn(x.masked_fill(beyond[..., None], junk), mask=mask)
            assert out.shape == x.shape
            for sample, expected in enumerate(alone):
                got = out[sample, : lengths[sample]]
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_leaks_to_a_query_that_may_not_see_it(kind, junk):
    """Also where other queries see it: causal order, segments, any tensor."""
    attn, n = make(kind).eval(), 40
    x, bad = torch.randn(2, n, DIM), 30
    dirty = x.clone()
    dirty[0, bad] = junk
    segments = (torch.arange(n) >= 20).long().expand(2, -1)
    for mask, clean in (
        (Mask.causal(), bad),
        (Mask.causal() & Mask.padding([n, 7]), bad),
        (Mask.segment(segments), 20),
        (Mask.dense((segments[:, :, None] == segments[:, None])[:, None]), 20),
    ):
        if any(rule.kind not in supported_masks(kind) for rule in mask.rules()):
            continue
        expected, out = attn(x, mask=mask), attn(dirty, mask=mask)
        torch.testing.assert_close(out[0, :clean], expected[0, :clean], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out[1], expected[1], rtol=1e-5, atol=1e-5)
        assert not out[0, bad].isfinite().all(), "what is seen is not hidden"


@pytest.mark.parametrize("n", [13, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_of_a_process_has_gradients(kind, n):
    """Parallel training waits for the gradient of every parameter that others have."""
    attn = make(kind) if kind != "linformer" else create_attention(kind, DIM, H, max_len=n)
    attn(torch.randn(2, n, DIM), mask=Mask.padding([0, 0])).sum().backward()
    assert attn.qkv.weight.grad is not None
    assert not attn.qkv.weight.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_full_load_into_every_kind(kind):
    full, attn = make("full"), make(kind)
    report = attn.load_state_dict(full.state_dict(), strict=False)
    assert report.unexpected_keys == []
    assert all(key.startswith("core.") for key in report.missing_keys)


@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_other_numbers_and_widths(kind):
    attn = create_attention(kind, 16, 4, head_dim=6, num_kv_heads=2, **SMALL.get(kind, {}))
    assert attn.qkv.out_features == (4 + 2 + 2) * 6
    x = torch.randn(2, 9, 16, requires_grad=True)
    attn(x).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_grouped_queries_equal_repeated_heads(kind):
    grouped = create_attention(kind, DIM, 4, num_kv_heads=2, **SMALL.get(kind, {})).eval()
    full = create_attention(kind, DIM, 4, **SMALL.get(kind, {})).eval()
    e = DIM // 4
    full.load_state_dict(
        {key: value for key, value in grouped.state_dict().items() if "qkv" not in key},
        strict=False,
    )
    with torch.no_grad():
        for name in ("weight", "bias"):
            q, k, v = getattr(grouped.qkv, name).split([4 * e, 2 * e, 2 * e])
            k, v = (x.unflatten(0, (2, e)).repeat_interleave(2, 0).flatten(0, 1) for x in (k, v))
            getattr(full.qkv, name).copy_(torch.cat([q, k, v]))
    x = torch.randn(2, 11, DIM)
    torch.testing.assert_close(grouped(x), full(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_attends_to_a_context(kind):
    attn = make(kind, dim_context=5)
    x, context = torch.randn(2, 7, DIM), torch.randn(2, 11, 5)
    assert attn(x, context, Mask.padding([11, 4])).shape == x.shape
    with pytest.raises(TypeError, match="needs a context"):
        attn(x)


@pytest.mark.parametrize("kind", KINDS)
def test_unsupported_masks_are_refused_with_the_kinds_that_can(kind):
    masks = {
        "causal": Mask.causal(),
        "segment": Mask.segment(torch.zeros(2, 11, dtype=torch.long)),
        "dense": Mask.dense(torch.ones(2, H, 11, 11, dtype=torch.bool)),
    }
    for rule, mask in masks.items():
        if rule in supported_masks(kind):
            make(kind)(torch.randn(2, 11, DIM), mask=mask)
            continue
        with pytest.raises(ValueError, match=rf"{kind}.* {rule} mask: .*: .*full"):
            make(kind)(torch.randn(2, 11, DIM), mask=mask & Mask.padding([11, 3]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_another_shape_is_refused(kind):
    for mask in (torch.ones(3, 1, 1, 11, dtype=torch.bool), torch.ones(2, 1, 1, 7) > 0):
        with pytest.raises((ValueError, RuntimeError), match=r"mask|size"):
            make(kind)(torch.randn(2, 11, DIM), mask=mask)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_states(kind):
    attn, x = make(kind), torch.randn(2, 11, DIM)
    expected = attn(x)
    assert torch.equal(copy.deepcopy(attn)(x), expected)
    other = create_attention(kind, DIM, H, **SMALL.get(kind, {})).eval()
    other.load_state_dict(attn.state_dict())
    assert torch.equal(other(x), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_temperature_divides_the_scores(kind):
    if kind in ("identity", "mean", "uniform"):
        for temperature in (2.0, "learned"):
            with pytest.raises(ValueError, match="has no scores that it could divide"):
                make(kind, temperature=temperature)
        with pytest.raises(ValueError, match="has no scores that it could divide"):
            set_temperature(make(kind), 2.0)
        return
    attn, x = make(kind), torch.randn(2, 11, DIM)
    hot = make(kind, temperature=2.0)
    if kind in ("linear", "performer"):  # no softmax: the queries' features
        with torch.no_grad():
            for name in ("weight", "bias"):
                getattr(attn.qkv, name)[:DIM] /= 2
        torch.testing.assert_close(hot(x), attn(x))
    else:
        with capture_attention(nn.ModuleDict({"attn": attn, "hot": hot})) as records:
            attn(x), hot(x)
        expected = records["attn"][0].sqrt()
        expected = expected / expected.sum(-1, keepdim=True)
        torch.testing.assert_close(records["hot"][0], expected, rtol=1e-4, atol=1e-6)
    learned = make(kind, temperature="learned")
    assert learned.log_temperature.shape == (H,)
    with torch.no_grad():
        learned.log_temperature.fill_(math.log(2.0))
    torch.testing.assert_close(learned(x), hot(x))


def test_unknown_options_and_values_are_named():
    cases = [
        ({"kind": "bigbrid"}, ValueError, "did you mean 'bigbird'"),
        ({"kind": "block", "blocksize": 8}, TypeError, "blocksize.*block_size"),
        ({"kind": "full", "num_heads": 5}, ValueError, r"dim \(12\).*num_heads \(5\)"),
        ({"kind": "full", "num_heads": 4, "num_kv_heads": 3}, ValueError, "num_kv_heads"),
        ({"kind": "window", "window": 0}, ValueError, "window 0"),
        ({"kind": "window", "window": 9, "grid": (4, 4)}, ValueError, r"\(9, 9\).*\(4, 4\)"),
        ({"kind": "window", "window": 4, "shift": 4}, ValueError, "shift 4"),
        ({"kind": "full", "temperature": 0}, ValueError, "temperature"),
        ({"kind": "full", "temperature": "hot"}, ValueError, "temperature"),
        ({"kind": "adaptive", "train": "linformer"}, ValueError, "train"),
        ({"kind": "performer", "num_features": 0}, ValueError, "num_features"),
    ]
    for options, error, words in cases:
        options = {"dim": 12, "num_heads": 2, **options}
        with pytest.raises(error, match=words):
            create_attention(**options)
    with pytest.raises(ValueError, match="max_len=8"):
        create_attention("linformer", 12, 2, max_len=8)(torch.randn(1, 9, 12))
    with pytest.raises(ValueError, match="17 queries and keys, got 16"):
        create_attention("window", 12, 2, window=2, grid=(4, 4), num_global=1)(
            torch.randn(1, 16, 12)
        )


def test_adaptive_chooses_by_mode_and_length():
    attn = make("adaptive", train="block", short="full", long="longformer", threshold=20)
    x = torch.randn(1, 300, DIM)
    same = {kind: create_attention(kind, DIM, H).eval() for kind in ("block", "full", "longformer")}
    for other in same.values():
        other.load_state_dict(attn.state_dict())
    assert torch.equal(attn(x[:, :19]), same["full"](x[:, :19]))
    assert torch.equal(attn(x), same["longformer"](x))
    torch.testing.assert_close(attn.train()(x), same["block"](x))


def test_no_warnings_and_no_large_tensor():
    """Sparse kinds on 4,096 tokens never hold a tensor of n x n elements."""
    from torch.utils._python_dispatch import TorchDispatchMode

    n, largest = 4096, []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            outputs = out if isinstance(out, (tuple, list)) else [out]
            largest.extend(o.numel() for o in outputs if isinstance(o, torch.Tensor))
            return out

    x = torch.randn(1, n, DIM, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in KINDS:
            if kind in ("full", "dot", "additive", "uniform"):
                continue
            options = {"max_len": n} if kind == "linformer" else {}
            attn = create_attention(kind, DIM, H, **options)
            largest.clear()
            with Largest():
                attn(x).sum().backward()
            assert max(largest) < n * n / 2, kind


def test_padding_and_causal_need_no_square():
    """Full attention with both masks holds no (n n) tensor and equals the masked kernel."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            outputs = out if isinstance(out, (tuple, list)) else [out]
            for o in outputs:
                assert not isinstance(o, torch.Tensor) or o.numel() < n * n, function
            return out

    n = 512
    q, k, v = (torch.randn(3, 1, n, 8, requires_grad=True) for _ in range(3))
    mask = Mask.padding([n, 300, 0]) & Mask.causal()
    core = build_core("full", 1, 8)
    with Largest():
        out = core(q, k, v, mask)
        out.sum().backward()
    expected = core(q, k, v, Mask.dense(mask.lower(n, n)))
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_first_and_training_after(kind):
    attn, x = make(kind), torch.randn(2, 40, DIM)
    with torch.inference_mode():
        attn(x)
    attn(x).sum().backward()


def test_windows_of_an_image_train_after_inference():
    attn = create_attention("window", DIM, H, window=2, grid=(4, 4), num_global=1)
    with torch.inference_mode():
        attn(torch.randn(1, 17, DIM))
    attn(torch.randn(1, 17, DIM)).sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_padding_leaves_gradients_of_the_real_finite(kind):
    core = core_of(kind, SMALL.get(kind, {}))
    q = torch.randn(1, H, 5, E, requires_grad=True)
    k, v = (torch.randn(1, H, 5, E).index_fill_(2, torch.tensor([3, 4]), math.nan) for _ in "kv")
    k.requires_grad_()
    v.requires_grad_()
    core(q, k, v, Mask.padding([3]))[:, :, :3].sum().backward()  # the others are padding too
    for x in (q, k, v, *core.parameters()):
        assert x.grad is None or x.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("b", "n"), [(0, 5), (2, 0), (0, 300)])
def test_nothing_in_nothing_out(kind, b, n):
    attn = make(kind, **({"max_len": 300} if kind == "linformer" else {}))
    out = attn(torch.randn(b, n, DIM), mask=Mask.padding([n] * b))
    assert out.shape == (b, n, DIM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_for_another_batch_is_refused(kind):
    with pytest.raises(ValueError, match=r"mask .* does not broadcast"):
        make(kind)(torch.randn(1, 11, DIM), mask=Mask.padding([3, 4, 5]))


def test_linear_keeps_small_features():
    q, k, v = torch.full((1, 1, 1, 4), -18.0), torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)
    assert build_core("linear", 1, 4)(q, k, v).tolist() == [[[[1.0] * 4]]]


def test_adaptive_promises_what_all_its_parts_can():
    for options in ({"bias": nn.Identity()}, {"attn_drop": 0.5}):
        with pytest.raises(ValueError, match=r"adaptive"):
            make("adaptive", train="identity", **options)


def test_performer_features_come_from_the_seed_alone():
    core = build_core("performer", H, E)
    expected = core.directions.clone()
    assert torch.equal(core.bfloat16().float().directions, expected)
    with torch.device("meta"):
        empty = build_core("performer", H, E)
    assert torch.equal(empty.to_empty(device="cpu").directions, expected)


def test_layouts_are_not_copied():
    core = build_core("strided", H, E, stride=2)
    q = torch.randn(1, H, 50, E)
    core(q, q, q)
    assert copy.deepcopy(core)._layouts == {}
    assert len(core._layouts) == 1
