"""Draws where a model of images and captions looks for each word: overlays on the images.

Command:
    python recipes/inspect_attention.py --model runs/NAME
    python recipes/inspect_attention.py --model runs/NAME --captions "red heart" --indices 3 17
    python recipes/inspect_attention.py --model runs/NAME --pairs captions.jsonl --part train
    python recipes/inspect_attention.py --model local-dir:FOLDER --pairs emoji --written

For models of `train_crossmodal.py --task match` and `caption`; its --save-attention-every draws the
same while it trains.

Expected: attention.png and attention.safetensors in the folder, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tyro

from crossmodal.data import Pairs
from crossmodal.looks import Look, fixed_pairs, look_at, spread
from crossmodal.overlay import attention_layers
from crossmodal.overlay_figure import draw
from crossmodal.training import PairOptions
from zoo.run_folder import find_trained


@dataclass(frozen=True)
class Config:
    """Draws the weights of every word of a caption over the image."""

    model: str
    """A run folder, local-dir:FOLDER as zoo.save_pretrained writes it, hf-hub:OWNER/REPO, or the
    name of a model that has weights."""
    pairs: str | None = None
    """A file of pairs, or what train_crossmodal.py takes as --data; by default the run's own."""
    part: str | None = None
    """train, val, or a further part of the data, such as style of emoji; val by default, or all
    pairs of a file that tells no parts."""
    samples: int = 4
    """How many pairs, at even distances over all."""
    indices: tuple[int, ...] = ()
    """Which ones instead, from 0."""
    captions: tuple[str, ...] = ()
    """Other captions than the data's: one for each image, or one for all."""
    written: bool = False
    """Show the words that a captioner writes itself, instead of the data's."""
    layer: int | None = None
    """One of the layers in which words look at the image, from 0; their mean by default."""
    head: int | None = None
    """One of the heads; their mean by default."""
    smooth: bool = True
    """Interpolate between the centres of cells; else cells are squares."""
    out: str = "attention"
    """Folder for the picture and its numbers; earlier ones are replaced."""


def main(config: Config) -> Look:
    found = find_trained(config.model)
    options = pair_options(config, found.flags)
    model: Any = found.create()
    attention_layers(model)  # before the data is read
    part, pairs = part_of(options, config.part)
    indices = config.indices or spread(config.samples, len(pairs))
    batch = fixed_pairs(model, pairs, indices, config.captions)
    look = look_at(model, batch, layer=config.layer, head=config.head, written=config.written)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    look.save(out / "attention.safetensors")
    draw(look, out / "attention.png", smooth=config.smooth)
    for index, caption, remark in zip(indices, look.captions, look.remarks, strict=True):
        print(f"{part} {index}: {caption} ({remark})")
    print(f"wrote {out / 'attention.png'} and attention.safetensors")
    return look


def pair_options(config: Config, flags: dict[str, Any]) -> PairOptions:
    """How the data is read: as the run did, of other pairs where --pairs is given."""
    if not flags and config.pairs is None:
        raise ValueError(f"--pairs is needed with --model {config.model}")
    names = {field.name for field in fields(PairOptions)}
    options = PairOptions(**{name: flags[name] for name in names & flags.keys()})
    return options if config.pairs is None else given_pairs(options, config.pairs)


def given_pairs(options: PairOptions, pairs: str) -> PairOptions:
    """The same columns and languages, other pairs; all of them where the data tells no parts."""
    spec = f"pairs:{pairs}" if Path(pairs).is_file() else pairs
    return replace(options, data=spec, val_data=None, val_share=0.0)


def part_of(options: PairOptions, name: str | None) -> tuple[str, Pairs]:
    """A part of the data and its name."""
    data = options.load()
    parts = {"train": data.train, "val": data.val, **data.extra}
    parts = {part: pairs for part, pairs in parts.items() if len(pairs)}
    name = name or ("val" if "val" in parts else "train")
    if name not in parts:
        raise ValueError(f"part {name!r} of {options.data} must be one of {', '.join(parts)}")
    return name, parts[name]


if __name__ == "__main__":
    main(tyro.cli(Config))
