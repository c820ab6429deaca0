"""What the JSON of timm, transformers and open_clip says of the weights beside it.

Each `describe_...` gives a `Source` that lacks its tensors only: a card, position grids, and, where
the library can be asked, its network on the meta device, whose settings can be compared.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zoo import hosts
from zoo.card import CardError, ModelCard, Preprocessing
from zoo.hosts_open_clip import (
    OpenClipVisual,
    open_clip_config,
    open_clip_preprocessing,
    tower_options,
)
from zoo.sources import Source, WeightsError, read_json

_PROCESSOR = "preprocessor_config.json"
_RESAMPLE = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# transformers' image processors: whether one number as size means a square (else the short edge),
# and whether a crop follows where nothing is said.
_PROCESSORS = {
    "vit": (True, False),
    "deit": (True, True),
    "beit": (True, False),
    "siglip": (True, False),
    "blip": (True, False),
    "dinov3vit": (True, False),
    "clip": (False, True),
    "bit": (False, True),
    "mobilenetv1": (False, True),
    "mobilenetv2": (False, True),
    "convnext": (False, False),
}
_STEPS = {"do_resize", "do_center_crop", "do_rescale", "do_normalize"}
_HARMLESS = {"do_convert_rgb", "do_reduce_labels"}  # our images are RGB; labels are no input
_CONVNEXT_SQUASHES_FROM = 384
_WRONG = (ValueError, TypeError, AttributeError, ArithmeticError)  # of values of another type


def describe_timm(folder: Path, config: dict[str, Any], name: str) -> Source:
    """Of `timm.models.save_for_hf`: the architecture, its options, preprocessing and labels."""
    from timm import create_model, is_model, list_models
    from timm.models import PretrainedCfg

    path, architecture = folder / "config.json", config["architecture"]
    if not isinstance(architecture, str) or not is_model(architecture):
        raise WeightsError(
            f"{path}: {hosts.unknown_name('timm', str(architecture), list_models())}"
        )
    options = config.get("model_args") or {}
    try:
        hosts.refuse_loading(architecture, options)
        with torch.device("meta"):
            network: Any = create_model(f"local-dir:{folder}")
    except Exception as error:
        raise WeightsError(
            f"{path}: timm cannot make {architecture} of it: {type(error).__name__}: {error}"
        ) from error
    try:
        told = PretrainedCfg(**network.pretrained_cfg)
        card = hosts.timm_card(name, told)
        in_chans, *img_size = told.input_size
        size = options.get("img_size", img_size)  # timm leaves input_size where sizes are dynamic
        rows, cols = (size, size) if isinstance(size, int) else size
        outputs = {"num_classes": network.num_classes}
        card = replace(
            card,
            architecture=f"timm:{architecture}",
            options={**options, **outputs, "in_chans": in_chans, "img_size": [rows, cols]},
            preprocessing=card.preprocessing.adapted(size=(rows, cols)),
            class_names=class_names(told.label_names, network.num_classes) or card.class_names,
            license=card.license or license_of(folder),
        )
    except _WRONG as error:
        raise WeightsError(f"{path}: {error}") from error
    return Source(name, {}, card, hosts.trunk_grids(network), network)


def describe_open_clip(folder: Path, config: dict[str, Any], name: str) -> Source:
    """Of `open_clip.push_to_hf_hub`: the visual tower of a model whose tensors are there whole."""
    try:
        tower, options = _tower(config["model_cfg"])
        preprocessing = open_clip_preprocessing(
            options["img_size"], config.get("preprocess_cfg") or {}
        )
        architecture = f"open_clip:{_nearest_arch(options)}"
    except Exception as error:
        raise WeightsError(
            f"{folder / 'open_clip_config.json'}: open_clip cannot make a tower of it: "
            f"{type(error).__name__}: {error}"
        ) from error
    card = ModelCard(architecture, options, preprocessing, license=license_of(folder), source=name)
    return Source(name, {}, card, tower.position_grids(), tower)


def _tower(table: Mapping[str, Any]) -> tuple[OpenClipVisual, dict[str, Any]]:
    """A visual tower without storage, and its options but those of training."""
    from open_clip.model import _build_vision_tower

    options = tower_options(table)
    vision = {**table["vision_cfg"], "timm_model_pretrained": False, "output_tokens": False}
    with torch.device("meta"):
        visual = _build_vision_tower(options["embed_dim"], vision, options["quick_gelu"])
    sizes = {"num_classes": 0, "in_chans": 3, "img_size": vision.get("image_size", 224)}
    lasting = {key: value for key, value in options.items() if "drop" not in key}
    return OpenClipVisual(visual, options["embed_dim"]), {**lasting, **sizes}


def _nearest_arch(options: Mapping[str, Any]) -> str:
    """The architecture of open_clip whose visual tower has the fewest other options."""
    from open_clip import list_models

    def distance(arch: str) -> tuple[bool, int]:
        known = tower_options(open_clip_config(arch))
        other = sum(value != options.get(name, value) for name, value in known.items())
        return _family(known) != _family(options), other

    return min(list_models(), key=distance)


def _family(options: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Whether it is a network of timm, and which, or a ResNet, or a ViT."""
    return options["timm_model_name"], isinstance(options["layers"], list)


def describe_transformers(folder: Path, config: dict[str, Any], name: str) -> Source:
    """Of `save_pretrained`: preprocessing and class names.

    Without a preprocessor there is no card: to guess the preprocessing would be worse than to
    leave a model's own.
    """
    path, processor = _processor(folder)
    if not processor:
        return Source(name, {}, config={"preprocessor": {}})
    try:
        card = ModelCard(
            None,
            {},
            transformers_preprocessing(processor, str(config["model_type"])),
            class_names=class_names(config.get("id2label")),
            license=license_of(folder),
            source=name,
        )
    except _WRONG as error:
        raise WeightsError(
            f"{path}: {error}; to load the weights without their preprocessing, name their file: "
            f"file:{folder}/..."
        ) from error
    return Source(name, {}, card, config={"preprocessor": processor})


def _processor(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The table of the image processor; CLIP's is part of another since transformers 5."""
    for file, part in ((_PROCESSOR, None), ("processor_config.json", "image_processor")):
        path = folder / file
        if path.is_file():
            whole = read_json(path)
            table = whole if part is None else whole.get(part)
            if isinstance(table, dict) and table:
                return path, table
    return folder / _PROCESSOR, {}


def transformers_preprocessing(processor: Mapping[str, Any], model_type: str) -> Preprocessing:
    """The evaluation preprocessing that an image processor of transformers does.

    Args:
        processor: Its table, as in preprocessor_config.json.
        model_type: Of the model, where the table does not name the processor.

    Raises:
        CardError: it is a processor, or has a step, that `Preprocessing` cannot express.
    """
    kind = _kind(processor, model_type)
    _check_steps(processor)
    mean, std = _statistics(processor)
    size, crop_pct, crop_mode = _geometry(processor, kind)
    return Preprocessing(size, mean, std, _interpolation(processor), crop_pct, crop_mode)


def _kind(processor: Mapping[str, Any], model_type: str) -> str:
    name = processor.get("image_processor_type") or processor.get("feature_extractor_type")
    kind = re.sub(r"(ImageProcessor|FeatureExtractor)\w*$", "", str(name or model_type)).lower()
    kind = kind.replace("_", "")
    if kind not in _PROCESSORS:
        raise CardError(
            f"image processor {name or model_type!r} is unknown; known: {', '.join(_PROCESSORS)}"
        )
    return kind


def _check_steps(processor: Mapping[str, Any]) -> None:
    unknown = [
        key
        for key, value in processor.items()
        if key.startswith("do_") and value and key not in _STEPS | _HARMLESS
    ]
    if unknown:
        raise CardError(f"{unknown[0]}=true is a step that a card cannot express")
    if not processor.get("do_resize", True):
        raise CardError("do_resize=false gives images of any size, which a card cannot express")


def _statistics(processor: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of values in [0, 1], whatever scale the processor brings them to."""
    factor = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1
    mean, std = _required(processor, "image_mean"), _required(processor, "image_std")
    if not processor.get("do_normalize", True):
        mean, std = [0.0] * len(mean), [1.0] * len(std)
    top = 255 * factor  # what 1 becomes
    if math.isclose(top, 1):
        return tuple(mean), tuple(std)
    return tuple(value / top for value in mean), tuple(value / top for value in std)


def _geometry(processor: Mapping[str, Any], kind: str) -> tuple[tuple[int, int], float, str]:
    """Input size, the part of the resized image that it is, and how that one is resized."""
    square, crops = _PROCESSORS[kind]
    resized = size = _edges(processor, "size", square)
    if kind == "convnext":
        return _convnext(processor, resized)
    if processor.get("do_center_crop", crops):
        size = _edges(processor, "crop_size", True)
    rows, cols = size.get("height"), size.get("width")
    if set(resized) == {"shortest_edge"} and rows == cols and rows is not None:
        return (rows, rows), _crop_pct(rows, resized["shortest_edge"]), "center"
    if set(resized) == {"height", "width"} and rows is not None and cols is not None:
        pct = _crop_pct(rows, resized["height"])
        if math.floor(cols / pct) == resized["width"]:
            return (rows, cols), pct, "squash"
    raise CardError(f"size {resized} and crop {size} go together in a way a card cannot express")


def _edges(processor: Mapping[str, Any], key: str, square: bool) -> dict[str, int]:
    """A size as transformers writes it now; older tables have one number."""
    value = _required(processor, key)
    if isinstance(value, int):
        return dict.fromkeys(("height", "width") if square else ("shortest_edge",), value)
    if not isinstance(value, dict) or not all(isinstance(edge, int) for edge in value.values()):
        raise CardError(f"{key} must be a number or a table of numbers, not {value!r}")
    return value


def _convnext(
    processor: Mapping[str, Any], resized: Mapping[str, int]
) -> tuple[tuple[int, int], float, str]:
    """ConvNeXt's rule: small inputs are a crop, large ones all of the image, squashed."""
    if set(resized) != {"shortest_edge"}:
        raise CardError(f"size {dict(resized)} must be a shortest_edge for ConvNeXt's processor")
    side = resized["shortest_edge"]
    if side >= _CONVNEXT_SQUASHES_FROM:
        return (side, side), 1.0, "squash"
    return (side, side), processor.get("crop_pct") or 224 / 256, "center"


def _crop_pct(crop: int, resized: int) -> float:
    """crop / resized, such that dividing by it and rounding down gives `resized` again."""
    pct = crop / resized
    return pct if math.floor(crop / pct) == resized else math.nextafter(pct, 0)


def _interpolation(processor: Mapping[str, Any]) -> str:
    number = _required(processor, "resample")
    if number not in _RESAMPLE:
        known = ", ".join(f"{key} ({value})" for key, value in _RESAMPLE.items())
        raise CardError(f"resample ({number}) must be one of {known}")
    return _RESAMPLE[number]


def _required(table: Mapping[str, Any], key: str) -> Any:
    if table.get(key) is None:
        raise CardError(f"{key} is missing")
    return table[key]


def class_names(labels: object, outputs: int | None = None) -> tuple[str, ...] | None:
    """One name an output, or None where `labels` does not give each a name of its own.

    Names that several outputs share (the two cranes of ImageNet) get the number of the output.

    Args:
        labels: A list, or a table of numbers to names.
        outputs: How many there must be.
    """
    if isinstance(labels, Mapping):
        numbered = {str(number): name for number, name in labels.items()}
        labels = [numbered.get(str(number)) for number in range(len(numbered))]
    if not isinstance(labels, list | tuple) or not labels:
        return None
    if not all(isinstance(name, str) for name in labels) or len(labels) != (outputs or len(labels)):
        return None
    if any(re.fullmatch(r"LABEL_\d+", name) for name in labels):  # transformers' placeholders
        return None
    uses = Counter(labels)
    return tuple(
        name if uses[name] == 1 else f"{name} ({number})" for number, name in enumerate(labels)
    )


def license_of(folder: Path) -> str | None:
    """The licence that the head of a folder's README.md names."""
    path = folder / "README.md"
    if not path.is_file():
        return None
    from huggingface_hub import ModelCard as Readme

    try:
        found = Readme.load(path, ignore_metadata_errors=True).data.to_dict().get("license")
    except Exception:  # prose of any kind, on which nothing else depends
        return None
    return found if isinstance(found, str) else None
