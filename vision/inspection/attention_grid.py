"""Attention of all layers and heads over images, as one picture: rows are layers, columns heads.

A map's colours tell how many times its even share a patch gets, on one scale for all layers, heads
and steps, so that pictures of a training can be compared: 1 where attention is spread evenly over
the patches.

Shapes: b images, l layers, h heads, s steps, c y x channels, rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

from vision.inspection.sheet import (
    BAR,
    GREY,
    PAPER,
    Sheet,
    coloured,
    fitted,
    text_width,
    wrapped,
)

TIMES = (1 / 4, 16)  # of the even share: the ends of the scale of colours
CELL = ((24, 96), (80, 64), (10**9, 56))  # up to so many maps an image: side of one in pixels
WIDE = 1.4  # width over height that a picture should have
EDGE, GAP, LINE = 12, 10, 16  # pixels: around all, between images, of a line of text
THUMB, BESIDE = 56, 150  # pixels: least height of the image alone, least room for words beside it


@dataclass(frozen=True)
class Block:
    """What a picture shows of one image.

    Attributes:
        image: uint8 (c y x)
        title: Of the image.
        cells: uint8 (rows columns y x 3)
        columns: What is written above each column.
    """

    image: Tensor
    title: str
    cells: Tensor
    columns: Sequence[str]


def draw_grid(
    path: Path,
    pixels: Tensor,
    maps: Mapping[str, Tensor],
    *,
    title: str,
    names: Sequence[str] = (),
) -> None:
    """Draws the maps of every layer (row) and head (column) over each image, as a PNG.

    Args:
        path: The PNG.
        pixels: The images before they were normalised: uint8 (b c y x).
        maps: By layer, the weight of each patch (b h y x); heads may differ in number.
        title: Of the picture.
        names: One an image.

    Raises:
        ImportError: matplotlib is missing.
    """
    heads = max(layer.shape[1] for layer in maps.values())
    size = _cell(pixels, len(maps) * heads)
    rows = [_padded(over(pixels, layer, size), heads) for layer in maps.values()]
    cells = torch.stack(rows, 1)  # b l h y x 3
    columns = [f"{'head ' if size[1] >= 64 else ''}{head}" for head in range(heads)]
    titles = names or [f"image {index}" for index in range(len(pixels))]
    blocks = [
        Block(image, title, own, columns)
        for image, title, own in zip(pixels, titles, cells, strict=True)
    ]
    _draw(path, blocks, list(maps), title, _even(maps))


def draw_over_time(
    path: Path,
    image: Tensor,
    steps: Mapping[int, Mapping[str, Tensor]],
    *,
    title: str,
    name: str = "",
) -> None:
    """Draws one image under its maps of every layer (row) at every step (column), as a PNG.

    Args:
        path: The PNG.
        image: uint8 (c y x)
        steps: Step -> layer -> weight of each patch (h y x), of which the mean over heads is drawn.
        title: Of the picture.
        name: Of the image.

    Raises:
        ImportError: matplotlib is missing.
    """
    layers = list(next(iter(steps.values())))
    size = _cell(image[None], len(layers) * len(steps))
    drawn = []
    for layer in layers:
        own = torch.stack([maps[layer].float().mean(0) for maps in steps.values()])
        drawn.append(over(image[None], own[None], size)[0])  # s y x 3
    columns = [f"{'step ' if column == 0 else ''}{step}" for column, step in enumerate(steps)]
    block = Block(image, name, torch.stack(drawn), columns)
    _draw(path, [block], layers, title, _even(next(iter(steps.values()))))


def over(pixels: Tensor, maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Images in grey (b c y x) under the colours of maps (b n y x) -> uint8 (b n y x 3)

    Framed by a white line, within `size`.
    """
    size = (size[0] - 2, size[1] - 2)
    even = 1 / (maps.shape[-2] * maps.shape[-1])
    low, high = map(math.log, TIMES)
    relative = F.interpolate(maps.float(), size, mode="bilinear", align_corners=False) / even
    shares = (relative.clamp(min=1e-9).log() - low) / (high - low)
    grey = torch.stack([fitted(image, size) for image in pixels]).float().mean(-1)
    blended = 0.25 * grey[:, None, ..., None] + 0.75 * coloured(shares)
    return F.pad(blended.round(), (0, 0, 1, 1, 1, 1), value=PAPER[0]).to(torch.uint8)


def _even(maps: Mapping[str, Tensor]) -> str:
    """What an even share is, where all maps have as many patches."""
    counts = {layer.shape[-2] * layer.shape[-1] for layer in maps.values()}
    return f"1/{counts.pop()}" if len(counts) == 1 else "1 over the number of patches"


def _cell(pixels: Tensor, maps: int) -> tuple[int, int]:
    """Rows and columns of pixels that one map gets."""
    side = next(side for most, side in CELL if maps <= most)
    wide = math.sqrt(pixels.shape[-1] / pixels.shape[-2])
    return round(side / wide), round(side * wide)


def _padded(cells: Tensor, heads: int) -> Tensor:
    """(b h y x 3), with white in the place of heads that a layer does not have"""
    missing = cells.new_full((cells.shape[0], heads - cells.shape[1], *cells.shape[2:]), PAPER[0])
    return torch.cat([cells, missing], 1)


def layer_labels(layers: Sequence[str]) -> tuple[list[str], str]:
    """What tells layers apart, and the pattern of their names.

    >>> layer_labels(["blocks.0.attn", "blocks.1.attn"])
    (['0', '1'], 'blocks.*.attn')
    """
    if len(layers) == 1:
        return list(layers), ""
    head = _in_common(layers)
    head = head[: max(head.rfind("."), head.rfind("_")) + 1]
    rest = [layer[len(head) :] for layer in layers]
    tail = _in_common([each[::-1] for each in rest])[::-1]
    tail = tail[tail.find(".") :] if "." in tail else ""
    labels = [each[: len(each) - len(tail)] for each in rest]
    return (labels, f"{head}*{tail}") if all(labels) and (head or tail) else (list(layers), "")


def _in_common(texts: Sequence[str]) -> str:
    """The letters with which all begin."""
    alike = takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False))
    return "".join(letters[0] for letters in alike)


def _draw(path: Path, blocks: list[Block], layers: list[str], title: str, even: str) -> None:
    labels, pattern = layer_labels(layers)
    rows, columns, high, wide = blocks[0].cells.shape[:4]
    aside = max(map(text_width, labels)) + 8
    thumb = round(wide * max(high, THUMB) / high) + 6
    inner = max(columns * wide, thumb + BESIDE if any(block.title for block in blocks) else 0)
    titles = [_lines(block.title, inner - thumb) for block in blocks]
    head = max(high, THUMB, 4 + LINE * max(map(len, titles))) + LINE + 4
    width, height = aside + inner + GAP, head + rows * high + GAP
    across = _across(len(blocks), width, height)
    above = 2 * EDGE + 6 * LINE
    least = 2 * EDGE + max(text_width(title, "title"), BAR[0] + 30 + text_width(_told(even)))
    sheet = Sheet(
        max(least, 2 * EDGE + across * width),
        above + math.ceil(len(blocks) / across) * height,
        path,
    )
    _explain(sheet, title, f"rows: layers {pattern}" if pattern else "rows: layers", even)
    for index, block in enumerate(blocks):
        left, top = EDGE + index % across * width, above + index // across * height
        _draw_block(sheet, block, titles[index], labels, (left, top), aside, head)
    sheet.save()


def _lines(title: str, room: int) -> list[str]:
    """A title on lines that fit; what was found begins one of its own."""
    parts = title.replace(", found ", "\nfound ").split("\n")
    return [line for part in parts for line in wrapped(part, room, 2)]


def _across(blocks: int, width: int, height: int) -> int:
    """How many images stand side by side."""

    def far(across: int) -> float:
        lines = math.ceil(blocks / across)
        shape = across * width / (lines * height)
        return abs(math.log(shape / WIDE)) + (across * lines - blocks) / blocks

    return min(range(1, blocks + 1), key=far)


def _told(even: str) -> str:
    return f"times its even share ({even}) that a patch gets"


def _explain(sheet: Sheet, title: str, rows: str, even: str) -> None:
    low, high = map(math.log, TIMES)
    ticks = [
        ((math.log(times) - low) / (high - low), text)
        for times, text in ((1 / 4, "≤1/4"), (1, "1"), (4, "4"), (16, "≥16"))
    ]
    sheet.write(title, EDGE, EDGE, "title")
    sheet.write(rows, EDGE, EDGE + LINE + 6, colour=GREY)
    sheet.scale(EDGE + 8, EDGE + 3 * LINE, ticks, _told(even))


def _draw_block(
    sheet: Sheet,
    block: Block,
    title: Sequence[str],
    labels: Sequence[str],
    corner: tuple[int, int],
    aside: int,
    head: int,
) -> None:
    left, top = corner
    high, wide = block.cells.shape[2:4]
    thumb = fitted(block.image, (max(high, THUMB), round(wide * max(high, THUMB) / high)))
    sheet.put(thumb, left + aside, top)
    for line, text in enumerate(title):
        sheet.write(text, left + aside + thumb.shape[1] + 6, top + 4 + line * LINE)
    for column, text in enumerate(block.columns):
        x = left + aside + column * wide + wide // 2
        sheet.write(text, x, top + head - 6, anchor="ms", colour=GREY)
    for row, text in enumerate(labels):
        y = top + head + row * high + high // 2
        sheet.write(text, left + aside - 5, y, anchor="rm", colour=GREY)
    picture = rearrange(block.cells, "r c y x rgb -> (r y) (c x) rgb")
    sheet.put(picture, left + aside, top + head)
