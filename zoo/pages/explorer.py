"""explorer.html: a model's attention on some images, to explore in a browser, as one file.

It loads nothing: weights are inside it, packed by `zoo.pages.explorer_pack`, and scripts unpack and
draw them. What comes from outside, such as names of files, is only ever shown as text.

Shapes: b images, h heads, c channels, l layers.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from torch import Tensor

from zoo.pages.charts import Chart
from zoo.pages.explorer_pack import Maps, Packed, Side, pack
from zoo.pages.pictures import Picture
from zoo.pages.style import MACROS, SCROLLING, SORTING, STYLE

MOST_BYTES = 10_000_000
SCRIPTS = ("data", "draw", "matrix", "view", "page")
_RESERVE = 200_000  # bytes of the page beside images and weights


@dataclass(frozen=True)
class Image:
    """An image as the model got it.

    Attributes:
        title: Such as the name of its file.
        remark: What the model says to it.
        pixels: uint8 (c y x).
    """

    title: str
    remark: str
    pixels: Tensor


@dataclass(frozen=True)
class Measure:
    """A number for each head of each layer.

    Attributes:
        title, explanation: For the reader.
        values: By name of a layer (h).
        limits: Of the scale of colours; by default those of the values.
    """

    title: str
    explanation: str
    values: dict[str, Tensor]
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class GateStrip:
    """The gates of a layer: (b c), with some numbers on them."""

    name: str
    values: Tensor
    limits: tuple[float, float] | None
    numbers: dict[str, float]


@dataclass(frozen=True)
class Panel:
    """What the page shows of one model.

    Attributes:
        name: Of the model.
        facts: About it, as name and text.
        images: The same for all panels, but for how they were cut.
        maps: Layers to explore.
        measures: By head.
        similarity: By layer, of each two heads (h h).
        gates: By layer.
        health: By layer, numbers; the columns of a table.
        alarms: Of `zoo.diagnostics.alarms`, as their `to_json` gives them.
        charts: Numbers over the steps of its training.
        over_time: A picture of maps at several of these.
        notes: What could not be shown, and why.
    """

    name: str
    images: list[Image]
    maps: list[Maps]
    facts: dict[str, str] = field(default_factory=dict)
    measures: list[Measure] = field(default_factory=list)
    similarity: dict[str, Tensor] = field(default_factory=dict)
    gates: list[GateStrip] = field(default_factory=list)
    health: dict[str, dict[str, float]] = field(default_factory=dict)
    alarms: list[dict[str, Any]] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    over_time: Picture | None = None
    notes: list[str] = field(default_factory=list)


def as_html(panels: Sequence[Panel], *, max_bytes: int = MOST_BYTES) -> str:
    """The page.

    Args:
        panels: One model, or two to compare.
        max_bytes: Of the page. Weights are stored as exactly as that allows, and it says how.

    Raises:
        ValueError: so many images and layers do not fit.
        ImportError: jinja2 or matplotlib is missing.
    """
    page = _environment().from_string(MACROS + _read("explorer.html"))
    images = [[_image(image) for image in panel.images] for panel in panels]
    taken = sum(len(image["data"]) for each in images for image in each) + _RESERVE
    taken += sum(len(panel.over_time.data) for panel in panels if panel.over_time)
    total = sum(layer.codes.numel() for panel in panels for layer in panel.maps)
    packs = [_packed(panel, max_bytes - taken, total) for panel in panels]
    data = {
        "colours": {"weight": _colours("inferno"), "number": _colours("viridis")},
        "models": [
            _model(panel, each, packed)
            for panel, each, packed in zip(panels, images, packs, strict=True)
        ],
    }
    return page.render(
        title=" and ".join(panel.name for panel in panels),
        panels=panels,
        packs=packs,
        explorable=any(panel.maps for panel in panels),
        images=len(panels[0].images),
        data=data,
        style=STYLE + _read("explorer.css"),
        script="\n".join(_read(f"explorer_{name}.js") for name in SCRIPTS) + SORTING + SCROLLING,
        number=_number,
        exactness=exactness,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def _environment() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError(
            "explorer.html needs jinja2: pip install 'attention-zoo[plots]'"
        ) from error
    return Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _read(name: str) -> str:
    return files("zoo.pages").joinpath(name).read_text(encoding="utf-8")


def _packed(panel: Panel, budget: int, total: int) -> Packed:
    own = sum(layer.codes.numel() for layer in panel.maps)
    return pack(panel.maps, max(0, int(budget * own / max(1, total))))


def exactness(packed: Packed) -> str:
    """How exactly weights are shown, as a sentence."""
    steps = f"Weights are stored in {packed.top} steps, on a scale that keeps small ones visible"
    if packed.pool == 1:
        return f"{steps}."
    return (
        f"{steps}; those of a query are the mean over {packed.pool} x {packed.pool} patches, "
        "to keep this page small."
    )


def _model(panel: Panel, images: list[dict[str, Any]], packed: Packed) -> dict[str, Any]:
    """What the scripts need of a panel, in plain types."""
    layers = zip(panel.maps, packed.chunks, packed.sizes, strict=True)
    return {
        "name": panel.name,
        "top": packed.top,
        "pool": packed.pool,
        "images": images,
        "layers": [
            {
                "name": layer.name,
                "heads": layer.codes.shape[1],
                "queries": _side(layer.queries, queries),
                "keys": _side(layer.keys, keys),
                "chunks": chunks,
            }
            for layer, chunks, (queries, keys) in layers
        ],
        "measures": [_measure(measure, panel.maps) for measure in panel.measures],
        "similarity": [
            _rounded(panel.similarity[layer.name]) if layer.name in panel.similarity else None
            for layer in panel.maps
        ],
        "gates": [_gates(strip) for strip in panel.gates],
    }


def _side(side: Side, count: int) -> dict[str, Any]:
    names = [list(each) for each in side.names]
    names = names[:1] if all(each == names[0] for each in names) else names
    return {"names": names, "grid": side.grid, "start": side.start, "count": count}


def _measure(measure: Measure, layers: Sequence[Maps]) -> dict[str, Any]:
    rows = [measure.values.get(layer.name) for layer in layers]
    return {
        "title": measure.title,
        "explanation": measure.explanation,
        "limits": measure.limits,
        "rows": [None if row is None else _rounded(row) for row in rows],
    }


def _rounded(values: Tensor) -> Any:
    """Lists with 4 digits; None for what is no number."""
    if values.ndim > 1:
        return [_rounded(row) for row in values]
    return [float(f"{v:.4g}") if math.isfinite(v) else None for v in values.tolist()]


def _gates(strip: GateStrip) -> dict[str, Any]:
    """Values as bytes, on the scale of the limits where there are finite ones."""
    values = strip.values.float().nan_to_num()
    low, high = strip.limits or (math.nan, math.nan)
    if not math.isfinite(high - low):
        low, high = float(values.min()), float(values.max())
    codes = (values - low).div(max(high - low, 1e-12)).clamp(0, 1).mul(255).round().byte()
    return {
        "name": strip.name,
        "low": low,
        "high": high,
        "channels": values.shape[1],
        "codes": base64.b64encode(codes.contiguous().numpy().tobytes()).decode(),
    }


def _image(image: Image) -> dict[str, Any]:
    """A picture as data: small ones exactly, others as JPEG."""
    import io

    from PIL import Image as Pictures

    pixels = image.pixels if len(image.pixels) in (1, 3) else image.pixels[:1]
    array = pixels.permute(1, 2, 0).contiguous().numpy()
    picture = Pictures.fromarray(array[..., 0] if array.shape[2] == 1 else array)
    small = max(picture.size) <= 64
    file = io.BytesIO()
    kind = "png" if small else "jpeg"
    picture.save(file, kind, quality=85)
    return {
        "title": image.title,
        "remark": image.remark,
        "data": f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}",
        "width": picture.width,
        "height": picture.height,
    }


def _colours(name: str) -> str:
    """A table of 256 colours of matplotlib: 768 bytes in base64."""
    try:
        from matplotlib import colormaps
    except ImportError as error:
        raise ImportError(
            "explorer.html needs matplotlib: pip install 'attention-zoo[plots]'"
        ) from error
    table = colormaps[name](range(256), bytes=True)[:, :3]
    return base64.b64encode(table.tobytes()).decode()


def _number(value: float) -> str:
    return f"{value:.3g}" if math.isfinite(value) else "-"
