"""Channel attention by name: one class and one `@register_channel_attention` make a new kind."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from vision.channel_attention.base import ChannelAttention

Kind = TypeVar("Kind", bound="type[ChannelAttention]")

TIMM = "timm:"

_kinds: dict[str, type[ChannelAttention]] = {}


def register_channel_attention(name: str) -> Callable[[Kind], Kind]:
    """Makes a subclass of `ChannelAttention` available as `create_channel_attention(name, ...)`."""

    def register(kind: Kind) -> Kind:
        if name in _kinds:
            raise ValueError(
                f"channel attention {name!r} of {kind.__module__} is already registered by "
                f"{_kinds[name].__module__}"
            )
        if name.startswith(TIMM):
            raise ValueError(f"channel attention {name!r}: names with {TIMM!r} stand for timm's")
        _kinds[name] = kind
        kind.kind = name
        return kind

    return register


def list_channel_attention(channels: int | None = None) -> list[str]:
    """The names that `create_channel_attention` knows, sorted; those of timm are not among them.

    Args:
        channels: Only the kinds that make sense at a place with so many channels.
    """
    return sorted(
        name for name, kind in _kinds.items() if channels is None or channels >= kind.min_channels
    )


def create_channel_attention(kind: str, channels: int, **options: Any) -> ChannelAttention:
    """A module (b c y x) -> (b c y x) that weighs the channels of a feature map.

    Args:
        kind: One of `list_channel_attention()`, or `timm:NAME` with a name that timm's factory
            knows (see `list_timm_attention`).
        channels: Channels of the feature map.
        options: Those of the kind; see `channel_attention_options`.

    Raises:
        ValueError: an unknown kind, an illegal value, or too few channels for the kind.
        TypeError: an unknown option, or a value of the wrong type.
    """
    known = channel_attention_options(kind)
    for name in options:
        if name not in known:
            raise TypeError(
                f"channel attention {kind!r} has no option {name!r}{nearest(name, known)}; "
                f"its options: {', '.join(known) or 'none'}"
            )
    if _is_timm(kind):
        from vision.channel_attention.foreign import TimmAttention

        return TimmAttention(channels, kind.removeprefix(TIMM), **options)
    return _kinds[kind](channels, **options)


def channel_attention_options(kind: str) -> dict[str, Any]:
    """The options of a kind with their defaults."""
    if _is_timm(kind):
        from vision.channel_attention.foreign import timm_options

        return timm_options(kind.removeprefix(TIMM))
    parameters = inspect.signature(_class_of(kind)).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "channels"}


def min_channels(kind: str) -> int:
    """The fewest channels at which a kind makes sense: 1, or 2 where it compares channels."""
    return 1 if _is_timm(kind) else _class_of(kind).min_channels


def nearest(name: str, names: Any) -> str:
    """A hint for error messages, empty where no name is near."""
    near = get_close_matches(str(name), [str(n) for n in names], n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _is_timm(kind: str) -> bool:
    if not isinstance(kind, str):
        raise TypeError(f"kind ({kind!r}) must be a name such as 'se', or {TIMM}NAME")
    return kind.startswith(TIMM)


def _class_of(kind: str) -> type[ChannelAttention]:
    if kind not in _kinds:
        raise ValueError(
            f"unknown channel attention {kind!r}{nearest(kind, _kinds)}; valid: "
            f"{', '.join(list_channel_attention())}, or {TIMM}NAME"
        )
    return _kinds[kind]
