"""Slots: the identity while empty, modules in order when filled, lenient about host files."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from vision.channel_attention import create_channel_attention
from vision.slots import SITES, FromIdentity, Slot, kind_of, slots
from zoo.diagnostics import capture_gates, gate_profile, gate_ranges


class Scale(nn.Module):
    kind = "scale"

    def __init__(self, value: float = 2.0) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.tensor([value]))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.value + self.bias


class Host(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)
        self.slot_pre = Slot("pre")
        self.slot_post = Slot("post")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.slot_post(self.conv(self.slot_pre(x)))


def filled() -> Host:
    host = Host()
    host.slot_pre.append(Scale(3.0))
    host.slot_post.append(Scale(5.0))
    return host


def test_an_empty_slot_gives_the_same_tensor_and_has_no_state() -> None:
    slot = Slot("post")
    x = torch.randn(1, 2, 3, 3)
    assert slot(x) is x
    assert not slot.state_dict()
    assert "post" in repr(slot)
    assert Slot("pre").site in SITES


def test_modules_run_in_order() -> None:
    slot = Slot("post").append(Scale(2.0)).append(nn.Hardtanh(max_val=3.0))
    assert slot(torch.tensor([1.0, 2.0])).tolist() == [2.0, 3.0]


def test_a_host_checkpoint_loads_strictly_with_one_warning() -> None:
    checkpoint = Host().state_dict()
    model = filled()
    with pytest.warns(UserWarning, match="keep their values") as seen:
        model.load_state_dict(checkpoint, strict=True)
    assert len(seen) == 1
    assert torch.equal(model.conv.weight, checkpoint["conv.weight"])
    assert (model.slot_pre[0].value, model.slot_post[0].value) == (3.0, 5.0)
    with pytest.warns(UserWarning, match="keep their values") as seen:  # at each loading
        model.load_state_dict(checkpoint)
    assert len(seen) == 1


def test_assigning_a_host_checkpoint_keeps_the_parameters_of_slots() -> None:
    model = filled()
    kept = model.slot_pre[0].value
    with pytest.warns(UserWarning, match="keep their values"):
        model.load_state_dict(Host().state_dict(), assign=True)
    assert model.slot_pre[0].value is kept


def test_a_whole_state_dict_loads_without_a_word_and_exactly() -> None:
    source, target = filled(), filled()
    with torch.no_grad():
        source.slot_pre[0].value.fill_(7.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.load_state_dict(source.state_dict())
    assert target.slot_pre[0].value == 7.0


def test_a_part_of_a_slot_is_an_error() -> None:
    state = filled().state_dict()
    del state["slot_pre.0.bias"]
    with pytest.raises(RuntimeError, match=r"Missing key.*slot_pre\.0\.bias"):
        filled().load_state_dict(state)


def test_unknown_keys_in_an_empty_slot_are_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"Unexpected key.*slot_pre\.0"):
        Host().load_state_dict(filled().state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_identity_starts_as_the_identity_and_moves(dtype: torch.dtype) -> None:
    wrapped = FromIdentity(Scale(3.0)).to(dtype)
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    out = wrapped(x)
    assert torch.equal(out, x)
    assert out.dtype == dtype
    out.float().square().sum().backward()
    assert wrapped.scale.grad is not None
    assert wrapped.scale.grad.abs().item() > 0
    with torch.no_grad():
        wrapped.scale.fill_(1.0)
    torch.testing.assert_close(wrapped(x), 3 * x)


def test_from_identity_keeps_the_dtype_of_its_input_under_autocast() -> None:
    wrapped = FromIdentity(nn.Conv2d(3, 3, 1))
    x = torch.randn(1, 3, 2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(wrapped(x), x)
        assert wrapped(x.bfloat16()).dtype == torch.bfloat16


GATED = ["se", "simam", "bam", "gct", "timm:eca", "timm:scoord"]


def gated(kind: str, scale: float, **options: str) -> FromIdentity:
    wrapped = FromIdentity(create_channel_attention(kind, 8, **options)).eval()
    nn.init.constant_(wrapped.scale, scale)
    return wrapped


def shown(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with capture_gates(model) as records:
        model(x)
    ((gate,),) = records.values()
    return gate[..., None, None] if gate.ndim == 2 else gate


@pytest.mark.parametrize("kind", GATED)
def test_a_gate_that_starts_from_the_identity_is_shown_as_one(kind: str) -> None:
    batches = [(torch.randn(4, 8, 5, 6), torch.tensor([0, 1, 0, 1]))]
    (moments,) = gate_profile(gated(kind, 0.0), batches, 2).values()
    found = moments.statistics()
    assert (found.mean, found.channel_spread, found.sample_spread) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", GATED)
@pytest.mark.parametrize("scale", [-0.5, 0.25, 1.0])
def test_from_identity_shows_the_factor_that_multiplies(kind: str, scale: float) -> None:
    wrapped, x = gated(kind, scale), torch.randn(2, 8, 5, 6)
    for model in (wrapped, copy.deepcopy(wrapped)):
        torch.testing.assert_close(x * shown(model, x), model(x))
    twin = copy.deepcopy(wrapped)
    nn.init.zeros_(twin.scale)
    assert (shown(twin, x) == 1).all()
    assert wrapped.state_dict().keys() == {
        "scale", *(f"module.{n}" for n in create_channel_attention(kind, 8).state_dict())
    }  # fmt: skip


def test_from_identity_shows_the_term_that_is_added() -> None:
    wrapped, x = gated("gc", 0.5), torch.randn(2, 8, 5, 6)
    nn.init.normal_(wrapped.module.fc2.weight)
    torch.testing.assert_close(x + shown(wrapped, x), wrapped(x))
    assert list(gate_ranges(wrapped).values()) == [None]


@pytest.mark.parametrize(
    ("gate", "scale", "limits"),
    [
        ("sigmoid", 0.25, (0.75, 1.0)),
        ("sigmoid", -0.5, (1.0, 1.5)),
        ("tanh", 0.5, (0.0, 1.0)),
        ("relu", 0.5, (0.5, float("inf"))),
        ("relu", -0.5, (float("-inf"), 1.5)),
        ("relu", 0.0, (1.0, 1.0)),
    ],
)
def test_the_limits_follow_the_scale(gate: str, scale: float, limits: tuple[float, float]) -> None:
    assert list(gate_ranges(gated("se", scale, gate=gate)).values()) == [limits]


def test_from_identity_compiles_into_one_graph() -> None:
    torch._dynamo.reset()
    wrapped, x = gated("se", 0.5), torch.randn(2, 8, 5, 6)
    compiled = torch.compile(wrapped, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), wrapped(x))


def test_kinds_and_names() -> None:
    host = filled()
    host.slot_post.append(FromIdentity(Scale()))
    assert [kind_of(m) for m in host.slot_post] == ["scale", "scale"]
    assert kind_of(nn.ReLU()) == "ReLU"
    assert [name for name, _ in slots(host)] == ["slot_pre", "slot_post"]
    assert [slot.site for _, slot in slots(copy.deepcopy(host))] == ["pre", "post"]
