"""Our image classifiers in timm: `timm.create_model("zoo_NAME")` after `import vision`.

timm takes seconds to import, and `import vision` does without: where timm is not there yet, it is
met at the door (`register_with_timm`). timm has a `vit_tiny_patch16_224` of its own, so ours have a
prefix, and `timm.list_models("zoo_*")` lists them.

What timm's functions and scripts ask of a model is set on each: `pretrained_cfg` (from its card, so
that `timm.data.resolve_model_data_config` gives the right transform), `feature_info`,
`group_matcher`.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import threading
import types
import typing
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any

from torch import nn

from vision.resnet import ResNet
from vision.vit import VisionTransformer
from zoo import registry
from zoo.card import ModelCard, Preprocessing

PREFIX = "zoo_"
default_cfgs: dict[str, dict[str, Any]] = {}  # timm's registry looks here, under this name

_SOURCES = {"hf_hub_id": "hf-hub", "file": "file", "url": "url"}  # fields of timm, our prefixes
_UNUSED = ("state_dict", "hf_hub_filename")  # fields that no source of ours stands for
_changing = threading.RLock()


def register_with_timm() -> None:
    """Tells timm of all image classifiers registered so far, now or as soon as it is imported.

    `import vision` does this. After a later `zoo.register_model` of yours, call it again: a model
    is taken where its function says that it returns a class with timm's `reset_classifier`.
    """
    if "timm" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Doorkeeper) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Doorkeeper())


class _Doorkeeper:
    """Registers our models once timm is imported, and then goes.

    It finds no module itself. It asks the finders behind it for timm, and gives their loader, as it
    is, one thing more to do.
    """

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "timm":
            return None
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(name, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None:
                self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: Any) -> None:
        run = getattr(loader, "exec_module", None)

        def exec_module(module: types.ModuleType) -> None:
            run(module)  # type: ignore[misc]
            if module.__name__ == "timm":
                # A new list: another thread that goes through the old one would skip a finder.
                sys.meta_path = [finder for finder in sys.meta_path if finder is not self]
                _register()

        if run is not None:
            loader.exec_module = exec_module


def _register() -> None:
    """An error here must not become one of `import timm`."""
    try:
        from timm.models import is_model, register_model

        with _changing:
            for entry in list(registry._entries.values()):
                name = PREFIX + entry.name
                kind = _returned(entry.builder)
                if hasattr(kind, "reset_classifier") and not is_model(name):
                    default_cfgs[name] = _config(name, entry.preprocessing, kind, entry.weights)
                    register_model(_entrypoint(name, entry.name))
    except Exception as error:
        warnings.warn(
            f"timm does not get the models of vision: {type(error).__name__}: {error}",
            stacklevel=2,
        )


def _returned(builder: Callable[..., nn.Module]) -> type:
    """The class that a function says it returns; just a module where it does not say."""
    try:
        returned = typing.get_type_hints(builder).get("return")
    except (NameError, TypeError, AttributeError):  # annotations that cannot be resolved
        return nn.Module
    return returned if isinstance(returned, type) else nn.Module


def _entrypoint(name: str, own_name: str) -> Callable[..., nn.Module]:
    def build(**options: Any) -> nn.Module:
        return _create(own_name, **options)

    build.__name__ = build.__qualname__ = name
    build.__doc__ = f"`zoo.create_model({own_name!r})`, for timm."
    return build


def _create(
    own_name: str,
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    pretrained_model_args: dict[str, Any] | None = None,
    cache_dir: Any = None,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    feature_cls: Any = "getter",
    **options: Any,
) -> nn.Module:
    """What timm's `create_model` calls. Options are those of the model, as in `zoo.create_model`.

    Args:
        own_name: Without the prefix.
        pretrained: Whether weights are loaded: those that the configuration names (`file`, `url`,
            `hf_hub_id`), or the model's own.
        pretrained_cfg: timm's description of weights.
        pretrained_cfg_overlay: Its fields that are replaced.
        pretrained_model_args: Of a saved model: timm has them among the options already.
        cache_dir: Refused, as sources have their own caches.
        features_only: Whether to return timm's `FeatureGetterNet`, of feature maps.
        out_indices: Which ones: indices, or the last so many.
        feature_cls: "getter", which takes them from `forward_intermediates`.
    """
    if cache_dir is not None:
        raise ValueError(f"cache_dir ({cache_dir}): set the environment's HF_HOME, HF_HUB_CACHE")
    source = _source(pretrained_cfg, pretrained_cfg_overlay) if pretrained else False
    if features_only:
        options["num_classes"] = 0
    model: Any = registry.create_model(own_name, pretrained=source, **options)
    name = PREFIX + own_name
    model.pretrained_cfg = _config_of(name, model)
    model.default_cfg = model.pretrained_cfg  # its older name
    if hasattr(model, "layer_index"):
        model.group_matcher = functools.partial(_group_matcher, model)
    if (info := _feature_info(model)) is not None:
        model.feature_info = info
    return _features(name, model, out_indices, feature_cls) if features_only else model


def _source(config: Any, overlay: dict[str, Any] | None) -> str | bool:
    """The source of the weights that timm's configuration names; True for the model's own."""
    if isinstance(config, str):
        raise ValueError(f"tag {config!r}: our models have one set of weights, without a tag")
    given = {**(asdict(config) if is_dataclass(config) else config or {}), **(overlay or {})}  # type: ignore[arg-type]
    if given.get("source") == "local-dir":
        return f"local-dir:{given['file']}"
    unused = [field for field in _UNUSED if given.get(field)]
    if unused:
        raise ValueError(
            f"pretrained_cfg has {', '.join(unused)}; weights of our models come from "
            f"{', '.join(_SOURCES)}"
        )
    return next((f"{ours}:{given[f]}" for f, ours in _SOURCES.items() if given.get(f)), True)


def _config(name: str, preprocessing: Preprocessing, kind: type, weights: str | None) -> Any:
    """timm's description of a model that is not built yet."""
    prefix, _, place = (weights or "").partition(":")
    return {
        "architecture": name,
        "input_size": (preprocessing.in_chans, *preprocessing.size),
        "fixed_input_size": issubclass(kind, VisionTransformer),
        "interpolation": preprocessing.interpolation,
        "crop_pct": preprocessing.crop_pct,
        "crop_mode": preprocessing.crop_mode,
        "mean": preprocessing.mean,
        "std": preprocessing.std,
        "num_classes": -1,  # the builder's own
        "first_conv": getattr(kind, "first_conv", None),
        **{field: place for field, ours in _SOURCES.items() if ours == prefix},
    }


def _config_of(name: str, model: Any) -> dict[str, Any]:
    """timm's description of a model, from its card."""
    card: ModelCard = model.card
    classifier = model.get_classifier()
    names = [n for n, module in model.named_modules() if module is classifier]
    return {
        **_config(name, card.preprocessing, type(model), None),
        "num_classes": model.num_classes,
        "classifier": names[0] if model.num_classes else None,
        **({"license": card.license} if card.license else {}),
        **({"label_names": card.class_names} if card.class_names else {}),
    }


def _group_matcher(model: Any, coarse: bool = False) -> Callable[[str], int]:
    """For `timm.optim`'s layer decay: a function from a parameter's name to its layer."""
    return model.layer_index


def _feature_info(model: nn.Module) -> list[dict[str, Any]] | None:
    """Channels and stride of each map of `forward_intermediates`, where these are known."""
    if isinstance(model, VisionTransformer):
        stride = model.patch_embed.patch_size[0]
        names = [f"blocks.{index}" for index in range(len(model.blocks))]
        maps = [(name, model.embed_dim, stride) for name in names]
    elif isinstance(model, ResNet):
        maps = [("relu", model.conv1.out_channels, model.conv1.stride[0])]
        for stage in range(1, model.num_stages + 1):
            last = getattr(model, f"layer{stage}")[-1].last_norm
            stride = model.reduction >> (model.num_stages - stage)
            maps.append((f"layer{stage}", last.num_features, stride))
    else:
        return None
    return [{"module": name, "num_chs": chs, "reduction": stride} for name, chs, stride in maps]


def _features(
    name: str, model: Any, out_indices: int | Sequence[int] | None, feature_cls: Any
) -> nn.Module:
    from timm.models._features import FeatureGetterNet

    if feature_cls not in ("getter", FeatureGetterNet):
        raise ValueError(f"feature_cls ({feature_cls!r}) must be 'getter' for {name}")
    if not hasattr(model, "feature_info"):
        raise ValueError(
            f"{name} has no features_only: {type(model).__name__} does not tell its feature maps; "
            f"VisionTransformer and ResNet do"
        )
    if out_indices is None:  # timm's for the same families
        out_indices = 3 if isinstance(model, VisionTransformer) else range(len(model.feature_info))
    indices = out_indices if isinstance(out_indices, int) else tuple(out_indices)
    net: Any = FeatureGetterNet(model, out_indices=indices)
    dropped = ("num_classes", "classifier")
    net.pretrained_cfg = {k: v for k, v in model.pretrained_cfg.items() if k not in dropped}
    net.default_cfg = net.pretrained_cfg
    return net
