"""Places for modules in a CNN, and the table of them.

Shapes: b batch, c y x channels/rows/columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import overload

from torch import nn

from vision.blocks import Reader
from vision.slots import SITES
from vision.tracing import Call


@dataclass(frozen=True)
class Place:
    """A place for a module.

    Attributes:
        name: Owner and site: `layer1.0.standard` is the slot `layer1.0.slot_standard`.
        site: One of `SITES`.
        stage: The stage it belongs to, from 1.
        channels: Of the tensor there.
        resolution: Its rows and columns, at the image size that was looked at.
    """

    name: str
    site: str
    stage: int
    channels: int
    resolution: tuple[int, int]

    @property
    def owner(self) -> str:
        """Name of the module that has the slot."""
        return self.name.rpartition(".")[0]

    @property
    def slot(self) -> str:
        """Name of the slot in its owner."""
        return f"slot_{self.name.rpartition('.')[2]}"


class SiteTable(Sequence[Place]):
    """The places of a model, in the order of its forward pass; prints as a table.

    Below the rows it tells which blocks could not be followed and have no places.
    """

    def __init__(self, places: Iterable[Place], refused: Iterable[str] = ()) -> None:
        self._places = tuple(places)
        self._refused = tuple(refused)

    @overload
    def __getitem__(self, index: int) -> Place: ...

    @overload
    def __getitem__(self, index: slice) -> SiteTable: ...

    def __getitem__(self, index: int | slice) -> Place | SiteTable:
        found = self._places[index]
        return SiteTable(found) if isinstance(found, tuple) else found

    def __len__(self) -> int:
        return len(self._places)

    def select(self, site: str | None = None, stage: int | None = None) -> SiteTable:
        """The places of a site, of a stage, or of both."""
        return SiteTable(
            place for place in self if site in (None, place.site) and stage in (None, place.stage)
        )

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that occur, in the order of `SITES`."""
        return tuple(site for site in SITES if any(place.site == site for place in self))

    def __str__(self) -> str:
        head = ("name", "site", "stage", "channels", "resolution")
        rows = [
            (p.name, p.site, str(p.stage), str(p.channels), f"{p.resolution[0]}x{p.resolution[1]}")
            for p in self
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = []
        for row in (head, *rows):
            left = (cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True))
            right = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
            lines.append("  ".join((*left, *right)))
        return "\n".join((*(lines if rows else ()), *self._refused))


@dataclass
class Block:
    """A module with sites, in the order of execution.

    Attributes:
        name: In the model.
        module: It.
        shapes: (b c y x) at each site.
        stage: From 1.
        followed: Whether its sites lie in a graph of its forward, not after it.
    """

    name: str
    module: nn.Module
    shapes: dict[str, tuple[int, ...]]
    stage: int = 0
    followed: bool = True

    @property
    def kind(self) -> str:
        return type(self.module).__name__

    def places(self) -> Iterator[Place]:
        """Its places, in the order of `SITES`."""
        for site in sorted(self.shapes, key=list(SITES).index):
            yield place_at(self.name, site, self.shapes[site], self.stage)


def place_at(owner: str, site: str, shape: tuple[int, ...], stage: int) -> Place:
    _, channels, rows, columns = shape
    return Place(f"{owner}.{site}" if owner else site, site, stage, channels, (rows, columns))


@dataclass
class Host:
    """What was found in a model.

    Attributes:
        model: The model.
        calls: The first call of each module.
        reader: Of its blocks.
        blocks: Those with sites, in order.
        gaps: Those that could not be followed and may hide some.
        ends: Places before the first stage and after each but the last.
        refused: Reasons why modules could not be followed, by name.
    """

    model: nn.Module
    calls: dict[nn.Module, Call]
    reader: Reader
    blocks: list[Block] = field(default_factory=list)
    gaps: list[Block] = field(default_factory=list)
    ends: list[Place] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def stages(self) -> int:
        return max((block.stage for block in (*self.blocks, *self.gaps)), default=0)

    def refusal(self, name: str) -> str:
        """Why a module was refused, and what can be done instead."""
        module = self.model.get_submodule(name)
        return (
            f"{name or 'the model'} ({type(module).__name__}) cannot be followed: "
            f"{self.refused[name]}; {self.way_out(name)}"
        )

    def way_out(self, name: str) -> str:
        """An offer to insert after a convolution that a module holds."""
        module = self.model.get_submodule(name)
        maps = [n for n, m in module.named_modules() if n and self._gives_map(m)]
        convs = [n for n in maps if isinstance(module.get_submodule(n), nn.Conv2d)]
        path = ".".join(part for part in (name, *(convs or maps)[:1]) if part)
        site = path if "." in path else f".{path}"
        return f"insert after a module instead, as in site={site!r}"

    def _gives_map(self, module: nn.Module) -> bool:
        return module in self.calls and self.calls[module].gives_map

    def table(self) -> SiteTable:
        """All places, in order."""
        found = [place for place in self.ends if place.site == "stem"]
        for stage in range(1, self.stages + 1):
            for block in self.blocks:
                found += block.places() if block.stage == stage else []
            found += [p for p in self.ends if p.site == "between_stages" and p.stage == stage]
        return SiteTable(found, [self.refusal(gap.name) for gap in self.gaps])
