"""Attention kinds by name: one small file and one `@register_attention` make a new one."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeVar

from torch import nn

from zoo.layers.multihead import CrossAttention, SelfAttention

AttentionFactory = TypeVar("AttentionFactory", bound=Callable[..., nn.Module])

_kinds: dict[str, Callable[..., nn.Module]] = {}


def register_attention(name: str) -> Callable[[AttentionFactory], AttentionFactory]:
    """Makes `factory(dim, num_heads, **options)` available as `create_attention(name, ...)`."""

    def register(factory: AttentionFactory) -> AttentionFactory:
        if name in _kinds:
            raise ValueError(
                f"attention kind {name!r} of {factory.__module__} is already registered by "
                f"{_kinds[name].__module__}"
            )
        _kinds[name] = factory
        return factory

    return register


def list_attention() -> list[str]:
    """The names that `create_attention` knows, sorted."""
    return sorted(_kinds)


def create_attention(kind: str, dim: int, num_heads: int = 8, **options: Any) -> nn.Module:
    """A module called as `attn(x, context=None, mask=None)`; options are those of the kind."""
    if kind not in _kinds:
        near = get_close_matches(kind, _kinds, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown attention kind {kind!r}, valid: {list_attention()}{hint}")
    return _kinds[kind](dim, num_heads, **options)


@register_attention("full")
def full(
    dim: int, num_heads: int = 8, *, dim_context: int | None = None, **options: Any
) -> nn.Module:
    """Exact attention: to a context if `dim_context` is given, else within the sequence."""
    if dim_context is not None:
        return CrossAttention(dim, num_heads, dim_context=dim_context, **options)
    return SelfAttention(dim, num_heads, **options)
