"""Arguments that every model of this package takes, checked alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Refuses a value that is not among the choices, and names the nearest."""
    choices = tuple(choices)
    if value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; nearest: {near[0]!r}" if near else ""
        raise ValueError(f"{name} {value!r} must be one of {', '.join(map(repr, choices))}{hint}")


def pair(value: int | Sequence[int], name: str) -> tuple[int, int]:
    """Rows and columns, from both or from one number for both."""
    edges = tuple(value) if isinstance(value, Sequence) else (value, value)
    if len(edges) != 2 or any(not isinstance(edge, int) or edge < 1 for edge in edges):
        raise ValueError(f"{name} must be a positive integer, or (rows, columns), not {value!r}")
    return edges[0], edges[1]


def take_indices(count: int, indices: int | Sequence[int] | None) -> list[int]:
    """Which of `count` features are meant: the last so many, those of a list, or all."""
    if indices is None:
        return list(range(count))
    if isinstance(indices, int):
        if not 0 < indices <= count:
            raise ValueError(f"indices ({indices}) must be between 1 and {count}, all there are")
        return list(range(count - indices, count))
    bad = [index for index in indices if not -count <= index < count]
    if bad or not indices:
        raise ValueError(f"indices {list(indices)} must lie in [-{count}, {count}), and be some")
    return [index % count for index in indices]
