"""The attention modules of timm's factory as kinds of ours: `timm:NAME`.

Shapes: b batch, c channels, y/x rows and columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vision.channel_attention.base import ChannelAttention
from vision.channel_attention.registry import TIMM, nearest
from zoo.layers.tap import Tap

# timm's factory is a chain of comparisons and lists no names.
_NAMES = (
    "bat", "bottleneck", "cbam", "ceca", "coord", "eca", "ecam", "ela", "ese", "gc", "gca", "ge",
    "halo", "lambda", "lcbam", "nl", "scoord", "se", "sk", "splat", "strip",
)  # fmt: skip
# Those whose output is the input times the output of their child `gate`, called once.
_GATED = ("ceca", "eca", "ecam", "ese", "gc", "ge", "scoord", "se", "strip")
# What timm's classes cannot be built without, and do not say.
_NEEDED = {
    "bottleneck": "pass feat_size=(rows, columns), the size of the map",
    "ge": "pass use_mlp=False, since timm cannot build the mlp of its ge; kind 'ge' has one",
}
_RESHAPING = ("stride", "out_channels", "dim_out")


class TimmAttention(ChannelAttention):
    """A module of timm's factory, with its own options.

    The tap shows the gate of ceca, eca, ecam, ese, gc, ge, scoord, se and strip. The others have
    several gates, weights over positions, or no gate: their tap shows nothing, and `gate_range` is
    None for all.

    Args:
        channels: Channels of the feature map.
        name: A name that timm's factory knows.
        options: Those of timm's class.
    """

    gate_range = None

    def __init__(self, channels: int, name: str, **options: Any) -> None:
        self.kind = TIMM + name
        super().__init__(channels)
        self.inner = _build(name, channels, options)
        fused = options.get("has_skip") or options.get("fuse_add")
        if name in _GATED and not fused and options.get("fuse_scale", True):
            gate = self.inner.get_submodule("gate")
            self.inner.gate = nn.Sequential(gate, _ShowGate(self.tap))

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> (b c y x)"""
        self.check(x)
        try:
            y = self.inner(x)
        except AssertionError as error:
            raise ValueError(
                f"channel attention {self.kind!r} does not fit the map {tuple(x.shape)}: "
                f"{_needs(self.inner) or error}"
            ) from error
        if y.shape != x.shape:
            raise ValueError(
                f"channel attention {self.kind!r} made {tuple(y.shape)} of {tuple(x.shape)}; "
                "its options must keep the shape"
            )
        return y


def _needs(inner: nn.Module) -> str:
    """What a module asks of the size of its map, where timm asserts it without a word."""
    for part in inner.modules():
        size = getattr(part, "block_size", None)
        if size is not None:
            return f"rows and columns must be multiples of block_size ({size})"
    rows, columns = (
        getattr(getattr(inner, "pos_embed", None), side, None) for side in ("height", "width")
    )
    return f"it must have feat_size ({rows}, {columns})" if rows else ""


class _ShowGate(nn.Module):
    """Passes a gate on and shows it to a tap; (b c 1 1) and ECA's (b 1 c) as (b c)."""

    def __init__(self, tap: Tap) -> None:
        super().__init__()
        self.tap = tap

    def forward(self, gate: Tensor) -> Tensor:
        shared = gate.ndim == 3 or gate.shape[2:] == (1, 1)
        self.tap.record(lambda: gate.flatten(1) if shared else gate)
        return gate


def list_timm_attention() -> list[str]:
    """The names after `timm:` that the installed timm knows, sorted."""
    return [name for name in _NAMES if _find(name) is not None]


def timm_options(name: str) -> dict[str, Any]:
    """The options of a module of timm with their defaults; those that reshape the map left out."""
    parameters = list(inspect.signature(_class_of(name)).parameters.values())[1:]
    return {
        p.name: p.default
        for p in parameters
        if p.kind is not p.VAR_KEYWORD and p.name not in _RESHAPING
    }


def _build(name: str, channels: int, options: dict[str, Any]) -> nn.Module:
    try:
        return _class_of(name)(channels, **options)
    except (AssertionError, TypeError, ValueError, ArithmeticError) as error:
        import timm

        reason = str(error) or "a size does not divide another"
        if hint := _NEEDED.get(name):
            reason = f"{reason}; {hint}"
        raise ValueError(
            f"timm {timm.__version__} cannot build its attention {name!r} with {channels} channels "
            f"and the options {options}: {reason}"
        ) from error


def _class_of(name: str) -> Callable[..., nn.Module]:
    found = _find(name)
    if found is None:
        names = list_timm_attention()
        raise ValueError(
            f"timm knows no attention {name!r}{nearest(name, names)}; valid after {TIMM!r}: "
            f"{', '.join(names)}"
        )
    return found


def _find(name: str) -> Callable[..., nn.Module] | None:
    from timm.layers import get_attn

    if name != name.lower():  # the factory would take it, but each module has one name here
        return None
    try:
        return get_attn(name)
    except AssertionError:  # how the factory says that it does not know a name
        return None
