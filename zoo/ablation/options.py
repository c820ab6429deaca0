"""The flags that all ablation recipes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from zoo.layers.check import integer


@dataclass(frozen=True)
class AblationOptions:
    """What is trained, how often and how many at once."""

    out: str
    """Folder of the ablation; finished cells in it are kept."""
    model: str
    """As for the recipe that trains the cells."""
    epochs: int
    """Epochs a cell."""
    lr: float
    """Learning rate, the same for all."""
    data: str = "digits"
    """As for the recipe that trains the cells."""
    seeds: int = 3
    """Seeds a variant: 0, 1, ..."""
    batch_size: int = 64
    """Images per step."""
    workers: int = 2
    """Cells trained at once."""
    threads: int = 1
    """CPU threads of each."""
    plan: bool = False
    """Prints what would be run, and what it could show, and stops."""

    def __post_init__(self) -> None:
        for name in ("seeds", "epochs", "batch_size", "workers", "threads"):
            integer(name, getattr(self, name))

    def flags(self, *more: str) -> dict[str, Any]:
        """Those that go to every cell, and `more` where they are given."""
        names = ("model", "data", *more, "epochs", "lr", "batch_size")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}
