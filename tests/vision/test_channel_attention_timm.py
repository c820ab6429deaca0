"""The modules of timm's factory under `timm:NAME`."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import timm
import torch
from timm.layers import create_attn, get_attn
from torch import Tensor

from vision.channel_attention import (
    channel_attention_options,
    create_channel_attention,
    list_channel_attention,
    min_channels,
)
from vision.channel_attention.foreign import TimmAttention, list_timm_attention

NAMES = list_timm_attention()
# What a module cannot do without; timm 1.0.31 cannot build the mlp of its "ge".
NEEDED: dict[str, dict[str, Any]] = {
    "bottleneck": {"feat_size": (14, 14)},
    "ge": {"use_mlp": False},
}
CHANNELS = 32


def build(name: str, **options: Any) -> TimmAttention:
    torch.manual_seed(0)
    options = {**NEEDED.get(name, {}), **options}
    module = create_channel_attention(f"timm:{name}", CHANNELS, **options)
    assert isinstance(module, TimmAttention)
    return module.eval()


def example(name: str) -> Tensor:
    side = 16 if name == "halo" else 14
    return torch.randn(2, CHANNELS, side, side)


def shown(module: TimmAttention, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    seen: list[Tensor] = []
    with module.tap.observe(seen.append):
        y = module(x)
    return y, seen


def test_the_list_has_every_name_of_the_factory() -> None:
    quoted = re.findall(r"attn_type == '(\w+)'", inspect.getsource(get_attn))
    assert sorted(quoted) == NAMES
    assert not any(name.startswith("timm:") for name in list_channel_attention())


@pytest.mark.parametrize("name", NAMES)
def test_equals_timms_own_module(name: str) -> None:
    module = build(name)
    torch.manual_seed(0)
    theirs = create_attn(name, CHANNELS, **NEEDED.get(name, {})).eval()
    assert module.inner.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(module.inner.state_dict())
    x = example(name)
    assert torch.equal(module(x), theirs(x))
    assert torch.equal(copy.deepcopy(module)(x), theirs(x))
    assert (module.kind, module.channels, module.tap.kind) == (f"timm:{name}", CHANNELS, "gate")
    assert min_channels(f"timm:{name}") == 1


@pytest.mark.parametrize("name", NAMES)
def test_shows_the_gate_where_the_output_is_a_gate_times_the_input(name: str) -> None:
    module, x = build(name), example(name)
    y, seen = shown(module, x)
    assert torch.equal(y, module(x))
    if name not in ("ceca", "eca", "ecam", "ese", "gc", "ge", "scoord", "se", "strip"):
        assert seen == []
        return
    (gate,) = seen
    assert gate.shape in {(2, CHANNELS), tuple(x.shape)}
    torch.testing.assert_close(y, x * (gate[..., None, None] if gate.ndim == 2 else gate))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scoord", {"has_skip": True}),
        ("strip", {"has_skip": True}),
        ("gc", {"fuse_add": True}),
        ("gc", {"fuse_scale": False}),
    ],
)
def test_shows_nothing_where_more_than_the_gate_makes_the_output(
    name: str, options: dict[str, Any]
) -> None:
    assert shown(build(name, **options), example(name))[1] == []


def test_a_copy_shows_its_own_gate() -> None:
    module = build("se")
    twin = copy.deepcopy(module)
    assert len(shown(twin, example("se"))[1]) == 1
    seen: list[Tensor] = []
    with module.tap.observe(seen.append):
        twin(example("se"))
    assert seen == []


def test_gives_options_to_timm() -> None:
    module = build("se", rd_channels=5)
    assert module.inner.get_submodule("fc1").weight.shape == (5, CHANNELS, 1, 1)
    assert channel_attention_options("timm:se")["rd_ratio"] == 1 / 16


@pytest.mark.parametrize("name", ["ese", "nl", "splat", "strip"])
def test_refuses_options_that_timm_would_swallow(name: str) -> None:
    with pytest.raises(TypeError, match=f"'timm:{name}' has no option 'reduction'; its options"):
        create_channel_attention(f"timm:{name}", CHANNELS, reduction=4)


@pytest.mark.parametrize(("name", "option"), [("sk", "stride"), ("halo", "dim_out")])
def test_refuses_options_that_reshape_the_map(name: str, option: str) -> None:
    with pytest.raises(TypeError, match=f"has no option {option!r}"):
        create_channel_attention(f"timm:{name}", CHANNELS, **{option: 2})


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(ValueError, match=r"no attention 'ecaa' \(did you mean 'eca'\?\).*strip"):
        create_channel_attention("timm:ecaa", CHANNELS)
    with pytest.raises(ValueError, match="timm knows no attention 'SE'"):
        create_channel_attention("timm:SE", CHANNELS)
    with pytest.raises(ValueError, match="timm knows no attention ''"):
        create_channel_attention("timm:", CHANNELS)


@pytest.mark.parametrize(
    ("name", "channels", "reason"),
    [
        ("bottleneck", 32, r"feature size.*pass feat_size=\(rows, columns\)"),
        ("ge", 32, "pass use_mlp=False"),
        ("sk", 7, "a size does not divide another"),
    ],
)
def test_says_what_timm_cannot_build(name: str, channels: int, reason: str) -> None:
    version = re.escape(timm.__version__)
    with pytest.raises(ValueError, match=f"timm {version} cannot build its .*'{name}'.*{reason}"):
        create_channel_attention(f"timm:{name}", channels)


@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("bat", r"multiples of block_size \(7\)"),
        ("halo", r"multiples of block_size \(8\)"),
        ("bottleneck", r"it must have feat_size \(14, 14\)"),
    ],
)
def test_says_which_maps_fit(name: str, needs: str) -> None:
    message = rf"'timm:{name}' does not fit the map \(2, {CHANNELS}, 9, 14\): .*{needs}"
    with pytest.raises(ValueError, match=message):
        build(name)(torch.randn(2, CHANNELS, 9, 14))


def test_names_options_that_change_the_shape() -> None:
    x = torch.randn(1, CHANNELS, 8, 8)
    with pytest.raises(ValueError, match=r"'timm:splat' made \(1, 32, 6, 6\) of \(1, 32, 8, 8\)"):
        build("splat", padding=0)(x)
    with pytest.raises(ValueError, match=r"expects \(b, 32, y, x\)"):
        build("se")(torch.randn(1, 8, 8, 8))


@pytest.mark.parametrize("name", ["se", "eca", "cbam"])
def test_compiles_into_one_graph(name: str) -> None:
    torch._dynamo.reset()
    module, x = build(name), example(name)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), module(x))
