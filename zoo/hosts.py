"""Networks of other libraries as models of the zoo: `timm:NAME`, `torchvision:NAME`.

They are the libraries' own classes with their own state-dict keys, and bring a card. Their trained
weights bring class names, licence and origin. The visual towers of open_clip, `open_clip:ARCH`, are
in `zoo.hosts_open_clip`.
"""

from __future__ import annotations

import importlib
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import nn

from zoo.card import ModelCard, Preprocessing, plain
from zoo.imagenet import SUBSETS, imagenet_classes
from zoo.sources import Source, WeightsError, listed

_UNTRAINED = Preprocessing(
    mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bilinear", crop_pct=0.875
)  # of a torchvision network without weights

_LISTS = {
    "torchvision": "torchvision.models"
}  # where a library's list_models is, if not at its top


@dataclass(frozen=True)
class Host:
    """A library's model: how to build it, what it expects, where its trained weights are.

    Attributes:
        build: Called with the options; returns the model with a card.
        preprocessing: At its own size.
        weights: Source of its trained weights; None where the library has none.
    """

    build: Callable[..., nn.Module]
    preprocessing: Preprocessing
    weights: str | None


def find_host(prefix: str, name: str) -> Host:
    """The model that `prefix:name` means.

    Raises:
        ValueError: the library has no model of that name; the nearest names are listed.
    """
    return HOSTS[prefix](name)


def _timm(name: str) -> Host:
    config = _timm_config(name)
    preprocessing = Preprocessing() if config is None else _as_preprocessing(config)

    def build(
        num_classes: int | None = None,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        **options: Any,
    ) -> nn.Module:
        from timm import create_model

        refuse_loading(name, options)
        if num_classes is None:  # as many as the trained weights have
            num_classes = 1000 if config is None else config.num_classes
        given = dict(options)
        if img_size is not None and config is not None and config.fixed_input_size:
            given["img_size"] = img_size
        try:
            model = create_model(name, num_classes=num_classes, in_chans=in_chans, **given)
        except TypeError as error:
            raise TypeError(_refused_option(name, error)) from error
        if config is not None and isinstance(config.first_conv, str):
            model.first_conv = config.first_conv  # type: ignore[assignment]
        if trunk_grids(model):
            model.position_grids = partial(trunk_grids, model)  # type: ignore[assignment]
        sizes = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size}
        return with_card(model, {**options, **sizes})

    trained = config is not None and bool(config.has_weights)
    return Host(build, preprocessing, f"timm:{name}" if trained else None)


def _refused_option(name: str, error: TypeError) -> str:
    """What a TypeError of timm means; an unknown option is told with those that there are."""
    from timm import create_model

    unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if unknown is None:
        return f"timm:{name}: {error}"
    with torch.device("meta"):
        given = inspect.signature(type(create_model(name)).__init__).parameters
    valid = [n for n in dict.fromkeys(["img_size", *given]) if n not in ("self", "kwargs")]
    near = get_close_matches(unknown[1], valid, n=3, cutoff=0.5)
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return f"timm:{name} has no option {unknown[1]!r}; {nearest}valid: {', '.join(valid)}"


def trunk_grids(network: Any) -> dict[str, tuple[int, int]]:
    """The grid of a timm network's learned position embedding (1 n d), if it has one."""
    grid = getattr(getattr(network, "patch_embed", None), "grid_size", None)
    positions = getattr(network, "pos_embed", None)
    if not grid or not isinstance(positions, nn.Parameter) or positions.ndim != 3:
        return {}
    return {"pos_embed": tuple(grid)} if positions.shape[1] >= math.prod(grid) else {}


def _timm_config(name: str) -> Any:
    """timm's description of the weights that a name means; None where it has no such weights."""
    from timm import get_pretrained_cfg, is_model, list_models

    if not is_model(name):
        raise ValueError(unknown_name("timm", name, list_models()))
    try:
        return get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        raise ValueError(_unknown_tag(name)) from error


def _unknown_tag(name: str) -> str:
    from timm import list_pretrained

    model_name, _, tag = name.partition(".")
    known = [full.partition(".")[2] for full in list_pretrained(f"{model_name}.*")]
    has = f"has {listed(known, 12)}" if known else "has none"
    return f"timm:{model_name} has no weights {tag!r}; it {has}"


def refuse_loading(name: str, options: Mapping[str, Any]) -> None:
    """timm's own parameters, such as a checkpoint to load, are no options of a network."""
    from timm import create_model

    found = sorted(options.keys() & inspect.signature(create_model).parameters.keys())
    if found:
        raise TypeError(
            f"timm:{name} has no option {found[0]!r}; weights come by pretrained=SOURCE, "
            f"see zoo.load_pretrained"
        )


def _as_preprocessing(config: Any) -> Preprocessing:
    return Preprocessing(
        size=tuple(config.input_size[1:]),
        mean=tuple(config.mean),
        std=tuple(config.std),
        interpolation=config.interpolation,
        crop_pct=config.crop_pct,
        crop_mode=config.crop_mode,
    )


def _torchvision(name: str) -> Host:
    from torchvision.models import get_model_weights, list_models

    model_name, _, _ = name.partition(".")
    known = list_models(module=importlib.import_module("torchvision.models"))
    if model_name not in known:
        raise ValueError(unknown_name("torchvision", model_name, known))
    weights: Any = list(get_model_weights(model_name))
    trained = _named_weights(name) if weights else None

    def build(
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        **options: Any,
    ) -> nn.Module:
        from torchvision.models import get_model

        _check_options(f"torchvision:{name}", model_name, options)
        if model_name in ("googlenet", "inception_v3"):
            options = {"init_weights": True, "aux_logits": False, **options}
        given = dict(options)
        if img_size is not None and model_name.startswith("vit_"):  # others take any size
            given["image_size"] = _side(name, img_size)
        try:
            model = get_model(model_name, weights=None, num_classes=max(1, num_classes), **given)
        except AssertionError as error:
            raise ValueError(f"torchvision:{name}: img_size ({img_size}): {error}") from error
        _tell_ends(model)
        if model_name.startswith("vit_"):
            model.position_grids = partial(_vit_grids, model)
        if in_chans != 3:
            change_stem(model, in_chans)
        sizes = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size}
        model = with_card(model, {**options, **sizes})
        if num_classes < 1:
            model.reset_classifier(num_classes)  # type: ignore[operator]
        return model

    if trained is None:
        return Host(build, _UNTRAINED, None)
    return Host(build, _of_weights(trained), f"torchvision:{name}")


def _vit_grids(network: Any) -> dict[str, tuple[int, int]]:
    side = network.image_size // network.patch_size
    return {"encoder.pos_embedding": (side, side)}


def _named_weights(name: str) -> Any:
    """torchvision's weights of `NAME` (its default) or `NAME.WEIGHTS`."""
    from torchvision.models import get_model_weights

    model_name, dot, tag = name.partition(".")
    found: Any = get_model_weights(model_name)
    if not dot:
        return found.DEFAULT
    if tag not in found.__members__:
        raise ValueError(
            f"torchvision:{model_name} has no weights {tag!r}; it has "
            f"{', '.join(found.__members__)}"
        )
    return found[tag]


def _of_weights(weights: Any) -> Preprocessing:
    made = weights.transforms()
    (crop,), (resize,) = made.crop_size, made.resize_size
    return Preprocessing(
        size=(crop, crop),
        mean=tuple(made.mean),
        std=tuple(made.std),
        interpolation=made.interpolation.value,
        crop_pct=crop / resize,
    )


def _side(name: str, img_size: int | tuple[int, int]) -> int:
    rows, cols = (img_size, img_size) if isinstance(img_size, int) else img_size
    if rows != cols:
        raise ValueError(f"img_size {(rows, cols)} must be square for torchvision:{name}")
    return rows


def _check_options(name: str, model_name: str, options: dict[str, Any]) -> None:
    """torchvision's functions let options that they do not know pass."""
    from torchvision.models import get_model

    if not options:
        return
    with torch.device("meta"):
        kind = type(get_model(model_name, weights=None))
    valid = [p for p in inspect.signature(kind.__init__).parameters if p not in ("self", "kwargs")]
    wrong = [option for option in options if option not in valid]
    if wrong:
        raise TypeError(f"{name} has no option {wrong[0]!r}; valid: {', '.join(valid)}")


class Ends(nn.Module):
    """What timm's classifiers tell of their first and last layer, added to a torchvision network.

    Attributes:
        first_conv: Name of the module that reads the image.
        classifier_name: Name of the module that gives the classes.
        num_features: Channels that this one reads.
    """

    first_conv: str
    classifier_name: str
    num_classes: int
    num_features: int
    card: ModelCard

    def get_classifier(self) -> nn.Module:
        return self.get_submodule(self.classifier_name)

    def reset_classifier(self, num_classes: int) -> None:
        """Another number of classes, with new weights; 0 leaves the features."""
        if num_classes < 0:
            raise ValueError(f"num_classes ({num_classes}) must not be negative")
        pointwise = isinstance(self.get_classifier(), nn.Conv2d)
        new: nn.Module = nn.Identity()
        if num_classes and pointwise:
            new = nn.Conv2d(self.num_features, num_classes, 1)
        elif num_classes:
            new = nn.Linear(self.num_features, num_classes)
        _put(self, self.classifier_name, new.to(next(self.parameters())))
        self.num_classes = num_classes
        self.card = self.card.with_options(num_classes=num_classes)


def _tell_ends(model: nn.Module) -> None:
    convolutions = [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    outputs: Any = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    name, last = list(outputs.items())[-1]
    kind = type(model)
    model.__class__ = type(kind.__name__, (Ends, kind), {"__module__": kind.__module__})
    linear = isinstance(last, nn.Linear)
    model.first_conv, model.classifier_name = convolutions[0], name
    model.num_features = last.in_features if linear else last.in_channels
    model.num_classes = last.out_features if linear else last.out_channels


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def change_stem(model: nn.Module, in_chans: int) -> None:
    """A new first convolution, for another number of channels."""
    name = str(model.first_conv)
    old: Any = model.get_submodule(name)
    new = nn.Conv2d(
        in_chans,
        old.out_channels,
        old.kernel_size,
        old.stride,
        old.padding,
        old.dilation,
        bias=old.bias is not None,
    )
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    _put(model, name, new)


def with_card(model: nn.Module, options: dict[str, Any]) -> nn.Module:
    """The model, with a card of its options."""
    model.card = ModelCard(None, plain(options, "options"), Preprocessing())  # type: ignore[assignment]
    return model


def unknown_name(library: str, name: str, known: list[str]) -> str:
    """That a library has no such model, which names are near, and what lists all."""
    folded = {other.lower(): other for other in known}  # ResNet50 is near to resnet50
    near = get_close_matches(name.partition(".")[0].lower(), folded, n=3, cutoff=0.5)
    nearest = f"nearest: {', '.join(folded[one] for one in near)}; " if near else ""
    lists = f"{_LISTS.get(library, library)}.list_models()"
    return f"{library} has no model {name!r}; {nearest}{lists} lists all {len(known)}"


def homes_of(name: str) -> list[str]:
    """`HOST:NAME` for each library that has a model of exactly this name; imports them all."""
    from importlib.util import find_spec

    tells: dict[str, Callable[[], bool]] = {
        "timm": lambda: importlib.import_module("timm").is_model(name),
        "torchvision": lambda: name in importlib.import_module("torchvision.models").list_models(),
        "open_clip": lambda: name in importlib.import_module("open_clip").list_models(),
    }
    return [f"{host}:{name}" for host, has in tells.items() if find_spec(host) and has()]


@contextmanager
def as_weights_error() -> Iterator[None]:
    """A name that a library does not know, as an error about a source of weights."""
    try:
        yield
    except WeightsError:
        raise
    except ValueError as error:
        raise WeightsError(str(error)) from error


def not_had(source: str, error: Exception) -> WeightsError:
    """That a library's own loader failed, why, and what else can be done."""
    said = " ".join(str(error).split())
    return WeightsError(
        f"{source} cannot be had: {type(error).__name__}: {said}; load it once with a connection, "
        f"which keeps it in the library's cache, or bring the file here and take file:PATH"
    )


def _open_clip(name: str) -> Host:
    from zoo.hosts_open_clip import find_open_clip

    return find_open_clip(name)


HOSTS: dict[str, Callable[[str], Host]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "open_clip": _open_clip,
}


def read_timm(name: str) -> Source:
    """The trained weights of a timm model, from its hub or cache."""
    from timm import create_model

    source = f"timm:{name}"
    with as_weights_error():
        config = _timm_config(name)
    try:
        model = create_model(name, pretrained=True)
    except Exception as error:
        if config is None or not config.has_weights:
            text = f"timm has no weights for {name}; timm.list_pretrained() lists all that it has"
            raise WeightsError(text) from error
        raise not_had(source, error) from error
    return Source(source, dict(model.state_dict()), timm_card(source, config), network=model)


def timm_card(source: str, config: Any) -> ModelCard:
    """What timm knows about trained weights."""
    if config is None:
        return ModelCard(None, {}, Preprocessing(), source=source)
    hub = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else None
    known = {
        "weights": f"{config.architecture}.{config.tag}" if config.tag else config.architecture,
        "url": hub or config.url or None,
        "origin": config.origin_url,
        "paper": config.paper_ids,
    }
    return ModelCard(
        None,
        {"num_classes": config.num_classes},
        _as_preprocessing(config),
        class_names=_timm_classes(config),
        license=None if config.license == "unknown" else config.license,
        source=source,
        extra={key: value for key, value in known.items() if value},
    )


def _timm_classes(config: Any) -> tuple[str, ...] | None:
    """Names of the outputs, where the tag says that they are classes of ImageNet."""
    from timm.data import infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": config.num_classes})
    if subset not in SUBSETS or not re.search(r"in(et|w)?\d+k", config.tag or ""):
        return None
    return imagenet_classes(subset)


def read_torchvision(name: str) -> Source:
    """The trained weights of a torchvision model, from its server or cache."""
    source = f"torchvision:{name}"
    with as_weights_error():
        if _torchvision(name).weights is None:
            raise WeightsError(f"torchvision has no weights for {name}")
        weights = _named_weights(name)
    try:
        tensors = weights.get_state_dict(progress=False, check_hash=True)
    except (OSError, RuntimeError) as error:  # the latter where the hash is another
        raise not_had(source, error) from error
    return Source(source, dict(tensors), _torchvision_card(source, weights))


def _torchvision_card(source: str, weights: Any) -> ModelCard:
    """What torchvision knows about trained weights."""
    names = weights.meta["categories"]
    return ModelCard(
        None,
        {"num_classes": len(names)} if names else {},
        _of_weights(weights),
        class_names=tuple(names) if names else None,
        license=weights.meta.get("license"),
        source=source,
        extra={"weights": weights.name, "url": weights.url, "recipe": weights.meta["recipe"]},
    )
