"""Where a model looks: a page to explore its attention, and for captions a picture of each word.

Command:
    python recipes/inspect_attention.py --model timm:vit_tiny_patch16_224 --images a.jpg b.png
    python recipes/inspect_attention.py --model runs/NAME
    python recipes/inspect_attention.py --model runs/A --compare runs/B --images 'photos/*.jpg'
    python recipes/inspect_attention.py --model runs/A --compare runs/A --compare-checkpoint best
    python recipes/inspect_attention.py --model vit_small_patch14_dinov2 \\
        --pretrained file:dino.onnx --images photos/ --layers 'blocks.[89].*' 'blocks.1?.*'
    python recipes/inspect_attention.py --model runs/NAME --captions "red heart" --indices 3 17
    python recipes/inspect_attention.py --model runs/NAME --pairs captions.jsonl --part train
    python recipes/inspect_attention.py --model local-dir:FOLDER --pairs emoji --written

The page is one HTML file that loads nothing: choose image, layer and head, point at a patch to see
where it looks or is looked at from; numbers of heads, rollout, gates of CNNs, alarms. Without
--images a run is looked at on images of its own validation data.

The last three are for models of `train_crossmodal.py --task match` and `caption`, where words look
at the image; these get attention.png as well.

Expected: explorer.html in --out, by default inspect/ of the run or else attention/, below 10 MB,
within a minute; for captions attention.png and attention.safetensors too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, int64, zeros

from crossmodal.captioner import Captioner
from crossmodal.composite import Composite
from crossmodal.data import Pairs
from crossmodal.explorer import explore_words
from crossmodal.looks import Look, fixed_pairs, look_at, spread
from crossmodal.overlay import attention_layers
from crossmodal.overlay_figure import draw
from crossmodal.training import PairOptions
from vision.class_names import read_class_names
from vision.data import Split, load_dataset, make_source
from vision.inspection.explorer import explore
from vision.inspection.explorer_panel import classified, facts_of, of_run, panel_of
from vision.predict import find_images, readable
from zoo.diagnostics.plotting import figure_class
from zoo.engine import cli
from zoo.pages.explorer import MOST_BYTES, Image, Panel, as_html
from zoo.run_folder import LAST, TrainedModel, find_trained

UNREAD = "a"  # stands for the caption of an image about which a captioner writes


@dataclass(frozen=True)
class Config:
    """Writes a page to explore a model's attention."""

    model: str
    """A run folder, local-dir:FOLDER as zoo.save_pretrained writes it, hf-hub:OWNER/REPO,
    timm:NAME, torchvision:NAME, open_clip:ARCH/TAG, or a model of zoo.list_models()."""
    pretrained: str | None = None
    """Other weights for a model that is named: file:, timm:, hf-hub:, ..., see
    zoo.load_pretrained."""
    checkpoint: str = "last"
    """Of a run folder: last, best, a step, or a file of its checkpoints/."""
    images: tuple[str, ...] = ()
    """Files, folders, wildcards."""
    compare: str | None = None
    """A second model or run, shown beside the first, on the same images."""
    compare_pretrained: str | None = None
    """Other weights for that one, as --pretrained."""
    compare_checkpoint: str = "last"
    """Of that run folder, as --checkpoint."""
    layers: tuple[str, ...] = ("*",)
    """Names of attention modules to explore, with wildcards."""
    class_names: str | None = None
    """Names of the model's outputs, where its weights bring none: a text file, one a line, or a
    set of ImageNet: imagenet-1k, -12k, -21k-goog, -21k-miil, -22k or -22k-ms."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Unreadable files: stop and name them, or skip and tell them."""
    max_mb: float = MOST_BYTES / 1e6
    """Size of the page; weights are stored as exactly as it allows."""
    pairs: str | None = None
    """For models of text and image: a file of pairs, or what train_crossmodal.py takes as --data;
    by default the run's own."""
    part: str | None = None
    """train, val, or a further part of the data, such as style of emoji; val by default, or all
    pairs of a file that tells no parts."""
    samples: int = 4
    """How many images or pairs of the data, at even distances over all."""
    indices: tuple[int, ...] = ()
    """Which ones instead, from 0."""
    captions: tuple[str, ...] = ()
    """Other captions than the data's: one for each image, or one for all."""
    written: bool = False
    """Show the words that a captioner writes itself, instead of the data's."""
    layer: int | None = None
    """For attention.png: one of the layers in which words look at the image, from 0; their mean by
    default."""
    head: int | None = None
    """For attention.png: one of the heads; their mean by default."""
    smooth: bool = True
    """For attention.png: interpolate between the centres of cells; else cells are squares."""
    out: str | None = None
    """Folder for what is written, where earlier files are replaced: by default inspect/ of the run
    folder, else attention/."""


def check_libraries() -> None:
    """Refuses to look without what draws, before anything is computed."""
    figure_class("explorer.html")
    if find_spec("jinja2") is None:
        raise ImportError("explorer.html needs jinja2: pip install 'attention-zoo[plots]'")


def main(config: Config) -> Look | Path:
    sources = [find_trained(config.model, config.pretrained, config.checkpoint)]
    if config.compare is not None:
        given = config.compare, config.compare_pretrained, config.compare_checkpoint
        sources.append(find_trained(*given))
    elif config.compare_checkpoint != LAST:
        raise ValueError(f"--compare-checkpoint {config.compare_checkpoint} needs --compare RUN")
    check_libraries()
    if config.out is None:
        folder = sources[0].folder
        config = replace(config, out=str(folder / "inspect") if folder else "attention")
    files = readable(find_images(config.images), config.bad_images) if config.images else []
    models: list[Any] = [source.create() for source in sources]
    kinds = {isinstance(model, Composite) for model in models}
    if len(kinds) > 1:
        raise ValueError(
            f"--compare {config.compare} and --model {config.model} must both be models of images, "
            "or both of text and image"
        )
    if kinds == {True}:
        return inspect_words(config, sources, models, files)
    return inspect_images(config, sources, models, files)


# Models of images


def inspect_images(
    config: Config, sources: list[TrainedModel], models: list[Any], files: list[Path]
) -> Path:
    """Writes the page; returns it."""
    paths, split = images_of(config, sources[0], models[0], files)
    panels = []
    for source, model, name in zip(sources, models, names_of(config), strict=True):
        if config.class_names:
            names = read_class_names(config.class_names)
            model.card = replace(model.card, class_names=names)
        pixels = pixels_of(make_source(split, model.card.preprocessing, train=False), len(paths))
        explored = explore(model, pixels, config.layers, name)
        images = [
            Image(title, remark, image)
            for title, remark, image in zip(paths, classified(model, pixels), pixels, strict=True)
        ]
        facts = facts_of(model, str(source.pretrained or source.name), explored)
        panels.append(panel_of(explored, images, facts))
    return write(config, panels)


def images_of(
    config: Config, source: TrainedModel, model: Any, files: list[Path]
) -> tuple[list[str], Split]:
    """Images and their names: those of --images, else some of the run's validation data."""
    if files:
        return [path.name for path in files], split_of(files)
    data = source.flags.get("data")
    if data is None:
        raise ValueError(
            f"--images is needed with --model {config.model}: files, folders or wildcards"
        )
    names = model.card.class_names
    val = load_dataset(data, bad_images=config.bad_images, class_names=names, splits=("val",)).val
    indices = list(config.indices or spread(min(config.samples, len(val)), len(val)))
    wrong = [index for index in indices if not 0 <= index < len(val)]
    if wrong:
        raise ValueError(f"--indices {wrong} must lie in 0 to {len(val) - 1}, as {data} has them")
    split = val.subset(indices)
    targets = split.targets.tolist()
    return [
        f"val {index}: {names[target] if names else target}"
        for index, target in zip(indices, targets, strict=True)
    ], split


def split_of(paths: list[Path]) -> Split:
    return Split(zeros(len(paths), dtype=int64), 0.0, tuple(map(str, paths)))


def pixels_of(source: Any, count: int) -> Tensor:
    """All images of a source, before they are normalised: uint8 (b c y x)."""
    return source.__getitems__([(0, index) for index in range(count)])["images"]


def names_of(config: Config) -> list[str]:
    """Short names of the models for the page."""
    given = [config.model] if config.compare is None else [config.model, config.compare]
    folders = [Path(name.removeprefix("local-dir:")).expanduser() for name in given]
    names = [
        folder.resolve().name if folder.is_dir() else name
        for folder, name in zip(folders, given, strict=True)
    ]
    checkpoints = [config.checkpoint, config.compare_checkpoint]
    told = [f" ({Path(name).stem})" if name != LAST else "" for name in checkpoints]
    short, long = ([a + b for a, b in zip(x, told, strict=False)] for x in (names, given))
    return short if len({*short}) == len(short) else long


def write(config: Config, panels: list[Panel]) -> Path:
    """Writes explorer.html, with what run folders add."""
    given = [config.model, config.compare or ""]
    panels = [
        of_run(panel, Path(folder).expanduser())
        for panel, folder in zip(panels, given, strict=False)
    ]
    page = as_html(panels, max_bytes=int(config.max_mb * 1e6))
    file = Path(str(config.out)) / "explorer.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")
    print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
    return file


# Models of text and image


def inspect_words(
    config: Config, sources: list[TrainedModel], models: list[Any], files: list[Path]
) -> Look:
    """Writes picture, numbers and page; returns what the picture shows."""
    part, pairs, indices, captions = pairs_of(config, sources[0], models[0], files)
    looks, panels = [], []
    for source, model, name in zip(sources, models, names_of(config), strict=True):
        batch = fixed_pairs(model, pairs, indices, captions)
        written = config.written
        look = look_at(model, batch, layer=config.layer, head=config.head, written=written)
        look = replace(look, captions=titles(pairs, indices, captions))
        explored = explore_words(model, batch, written=written, name=name)
        told = zip(indices, look.captions, look.remarks, look.pixels, strict=True)
        images = [
            Image(caption, f"{part} {index}: {caption} ({remark})", image)
            for index, caption, remark, image in told
        ]
        facts = facts_of(model, str(source.pretrained or source.name), explored)
        looks.append(look)
        panels.append(panel_of(explored, images, facts))
    out, look = Path(str(config.out)), looks[0]
    out.mkdir(parents=True, exist_ok=True)
    look.save(out / "attention.safetensors")
    draw(look, out / "attention.png", smooth=config.smooth)
    for image in panels[0].images:
        print(image.remark)
    print(f"wrote {out / 'attention.png'} and attention.safetensors")
    write(config, panels)
    return look


def titles(pairs: Pairs, indices: Sequence[int], captions: Sequence[str]) -> list[str]:
    """The captions as they were given: a vocabulary may know but a part of them."""
    if tuple(captions) == (UNREAD,):
        return [Path(pairs.images.paths[index]).name for index in indices]
    given = [pairs.captions[index][0] for index in indices]
    return list(captions) * (len(given) // len(captions)) if captions else given


def pairs_of(
    config: Config, source: TrainedModel, model: Any, files: list[Path]
) -> tuple[str, Pairs, Sequence[int], tuple[str, ...]]:
    """The part's name, its pairs, which of them, and captions in place of its own."""
    if files:
        return own_images(config, model, files)
    options = pair_options(config, source.flags)
    attention_layers(model)  # before the data is read
    part, pairs = part_of(options, config.part)
    return part, pairs, config.indices or spread(config.samples, len(pairs)), config.captions


def own_images(
    config: Config, model: Any, files: list[Path]
) -> tuple[str, Pairs, Sequence[int], tuple[str, ...]]:
    """Images of one's own, with --captions, or for a captioner with what it writes."""
    captions = config.captions
    if not captions and isinstance(model, Captioner) and config.written:
        captions = (UNREAD,)
    if not captions:
        raise ValueError(
            f"--images needs --captions with --model {config.model}: one for each image, or one "
            "for all; or of a captioner --written"
        )
    pairs = Pairs(split_of(files), tuple(("",) for _ in files))
    return "image", pairs, range(len(files)), captions


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
    cli(main, Config)
