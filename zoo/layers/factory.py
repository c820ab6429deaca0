"""Attention kinds by name: one small file and one `@register_attention` make a new one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeVar

from torch import nn

from zoo.layers.core import Additive, Core, Dot, Full
from zoo.layers.multihead import CrossAttention, MultiHead, SelfAttention, head_width

Kind = TypeVar("Kind", bound=Callable[..., nn.Module])

_kinds: dict[str, Callable[..., nn.Module]] = {}


def register_attention(name: str) -> Callable[[Kind], Kind]:
    """Makes a kind available as `create_attention(name, dim, num_heads, **options)`.

    Decorates a subclass of `Core`, which gets the usual projections around it, or a function
    `(dim, num_heads, **options)` that returns a whole module.
    """

    def register(kind: Kind) -> Kind:
        if name in _kinds:
            raise ValueError(
                f"attention kind {name!r} of {kind.__module__} is already registered by "
                f"{_kinds[name].__module__}"
            )
        _kinds[name] = kind
        if _is_core(kind):
            kind.registered_name = name  # type: ignore[attr-defined]
        return kind

    return register


def list_attention() -> list[str]:
    """The names that `create_attention` knows, sorted."""
    return sorted(_kinds)


def kinds_with_mask(rule: str) -> list[str]:
    """The kinds that can follow a rule: padding, causal, segment or dense."""
    return [name for name in list_attention() if rule in supported_masks(name)]


def kinds_with_bias() -> list[str]:
    """The kinds that have scores, to which a position bias can be added."""
    return [name for name in list_attention() if getattr(_kinds[name], "biases", False)]


def supported_masks(kind: str) -> tuple[str, ...]:
    """The rules that a kind can follow; see `Mask.kind`."""
    check_known(kind)
    return getattr(_kinds[kind], "masks", ())


def create_attention(kind: str, dim: int, num_heads: int = 8, **options: Any) -> nn.Module:
    """A module called as `attn(x, context=None, mask=None)`.

    Args:
        kind: One of `list_attention()`.
        dim: Width of the tokens.
        num_heads: Heads of the queries.
        options: Those of `MultiHead` and of the kind's core. With `dim_context` the module attends
            to a context, without to its own sequence.

    Raises:
        ValueError: an unknown kind, or an illegal value.
        TypeError: an unknown option.
    """
    check_known(kind)
    if not _is_core(_kinds[kind]):
        return _kinds[kind](dim, num_heads, **options)
    own, shared = core_options(kind), _parameters(MultiHead)
    for name in options:
        if name not in own + shared:
            raise TypeError(
                f"attention kind {kind!r} has no option {name!r}; its own: "
                f"{', '.join(own) or 'none'}; of every kind: {', '.join(shared)}"
            )
    head_dim = head_width(dim, num_heads, options.get("head_dim"))
    core = build_core(kind, num_heads, head_dim, **{k: options[k] for k in options if k in own})
    rest = {name: value for name, value in options.items() if name not in own}
    if options.get("dim_context") is None:
        rest.pop("dim_context", None)
        return SelfAttention(dim, num_heads, core=core, **rest)
    return CrossAttention(dim, num_heads, core=core, **rest)


def build_core(kind: str, num_heads: int, head_dim: int, **options: Any) -> Core:
    """The core of a kind, without projections; `options` are the kind's own."""
    check_known(kind)
    if not _is_core(_kinds[kind]):
        raise ValueError(f"attention kind {kind!r} is a whole module and has no core")
    check_own(kind, options)
    return _kinds[kind](num_heads, head_dim, **options)  # type: ignore[return-value]


def check_known(kind: str, name: str = "kind") -> None:
    """Refuses what is no registered kind; `name` is the argument that holds it."""
    if not isinstance(kind, str):
        raise TypeError(f"{name} ({kind!r}) must be the name of one of {list_attention()}")
    if kind not in _kinds:
        near = get_close_matches(kind, _kinds, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        where = "" if name == "kind" else f"{name}: "
        valid = list_attention()
        raise ValueError(f"{where}unknown attention kind {kind!r}, valid: {valid}{hint}")


def check_own(kind: str, options: Iterable[str]) -> None:
    """Refuses names that are no options of the kind itself.

    Raises:
        TypeError: with the kind's own, and where an option of every kind belongs.
    """
    own, shared = core_options(kind), ["dim", "num_heads", *_parameters(MultiHead)]
    for name in options:
        if name not in own:
            hint = f"; {name} is an option of the model or of create_attention, give it there"
            raise TypeError(
                f"attention kind {kind!r} has no option {name!r} of its own; its own: "
                f"{', '.join(own) or 'none'}{hint if name in shared else ''}"
            )


def core_options(kind: str) -> list[str]:
    """The options that a kind adds to those of every kind."""
    check_known(kind)
    return _parameters(_kinds[kind]) if _is_core(_kinds[kind]) else []


def geometry(
    kind: str, grid: tuple[int, int], num_prefix_tokens: int, layer: int
) -> dict[str, Any]:
    """Options of a kind that follow from a model's tokens: a prefix, then a grid row by row."""
    known: dict[str, Any] = {
        "grid": grid,
        "num_global": num_prefix_tokens,
        "max_len": num_prefix_tokens + grid[0] * grid[1],
    }
    if kind == "window":  # Swin's, in turn shifted; half a small grid, to be other than full
        known["window"] = min(7, max(1, min(grid) // 2))
        known["shift"] = bool(layer % 2)
    return {name: value for name, value in known.items() if name in core_options(kind)}


def _is_core(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Core)


def _parameters(function: Callable[..., Any]) -> list[str]:
    fixed = {"self", "dim", "num_heads", "core"} | ({"head_dim"} if _is_core(function) else set())
    return [name for name in inspect.signature(function).parameters if name not in fixed]


register_attention("full")(Full)
register_attention("dot")(Dot)
register_attention("additive")(Additive)
