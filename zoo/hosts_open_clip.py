"""Visual towers of open_clip as models of the zoo: `open_clip:ARCH`, weights `open_clip:ARCH/TAG`.

Weights are those of a whole model, text included; a layout takes the visual tower's out of them.

Shapes: b batch, n tokens (the class token first, then the grid row by row), d width, p width of an
embedding in the space of images and texts, c y x channels, rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import Tensor, nn

from zoo.card import ModelCard, Preprocessing, plain
from zoo.hosts import (
    Host,
    as_weights_error,
    change_stem,
    not_had,
    trunk_grids,
    unknown_name,
    with_card,
)
from zoo.layouts import Layout, register_layout
from zoo.sources import Source, WeightsError

_CROP_MODES = {"shortest": "center", "squash": "squash", "longest": "border"}
_NOT_OPTIONS = ("image_size", "timm_model_pretrained", "output_tokens")
_RESNET_STRIDE = 32


class OpenClipVisual(nn.Module):
    """An image tower of open_clip, and a classifier of its embeddings.

    Args:
        visual: open_clip's module: a ViT, its ResNet, or a network of timm.
        num_features: Width of its embedding, p.
        num_classes: Outputs; 0 leaves the classifier out and gives the embedding.
    """

    card: ModelCard

    def __init__(self, visual: Any, num_features: int, num_classes: int = 0) -> None:
        super().__init__()
        trunk: Any = getattr(visual, "trunk", None)
        self.visual, self.num_features, self.num_classes = visual, num_features, num_classes
        self.is_vit, self.is_timm = hasattr(visual, "transformer"), trunk is not None
        self.num_prefix_tokens = getattr(trunk, "num_prefix_tokens", int(self.is_vit))
        self.output_fmt = getattr(trunk, "output_fmt", "NCHW")
        conv = trunk.default_cfg.get("first_conv") if self.is_timm else "conv1"
        if isinstance(conv, str):
            self.first_conv = f"visual.trunk.{conv}" if self.is_timm else f"visual.{conv}"
        self.head = nn.Linear(num_features, num_classes) if num_classes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(b c y x) -> logits (b num_classes), or embeddings (b p) without a classifier."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """(b c y x) -> what open_clip pools: tokens (b n d), or a map (b d y x).

        Tokens are normalised where open_clip does so before it pools: not with attentional pooling,
        whose norm comes after.
        """
        visual = self.visual
        if self.is_timm:
            return visual.trunk.forward_features(x)
        if self.is_vit:
            x = visual.transformer(visual._embeds(x))
            return visual.ln_post(x) if self._norm_before_pool() else x
        for part in (visual.stem, visual.layer1, visual.layer2, visual.layer3, visual.layer4):
            x = part(x)
        return x

    def _norm_before_pool(self) -> bool:
        return self.visual.attn_pool is None and not self.visual.final_ln_after_pool

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features -> logits, or open_clip's embeddings (b p), its projection included."""
        x = self._embed(x)
        return x if pre_logits else self.head(x)

    def _embed(self, x: Tensor) -> Tensor:
        visual = self.visual
        if self.is_timm:
            return visual.head(visual.trunk.forward_head(x))
        if not self.is_vit:
            return visual.attnpool(x)
        pooled, _ = visual._global_pool(x) if self._norm_before_pool() else visual._pool(x)
        return pooled @ visual.proj

    def get_classifier(self) -> nn.Module:
        return self.head

    def reset_classifier(self, num_classes: int) -> None:
        """Another number of classes, with new weights; 0 leaves the embeddings."""
        if num_classes < 0:
            raise ValueError(f"num_classes ({num_classes}) must not be negative")
        head = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self.head = head.to(next(self.parameters())).train(self.training)
        self.num_classes = num_classes
        self.card = self.card.with_options(num_classes=num_classes)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass instead of kept."""
        if not (self.is_vit or self.is_timm):
            raise ValueError("open_clip's ResNet has no gradient checkpointing")
        self._network().set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Names of the positions and tokens, which weight decay leaves alone."""
        prefix = "visual.trunk" if self.is_timm else "visual"
        names: set[str] = getattr(self._network(), "no_weight_decay", set)()
        return {f"{prefix}.{name}" for name in names}

    def _network(self) -> Any:
        return self.visual.trunk if self.is_timm else self.visual

    def position_grids(self) -> dict[str, tuple[int, int]]:
        """Grid of each learned position embedding, for resampling; see `zoo.weights`."""
        if self.is_vit:
            return {"visual.positional_embedding": self.visual.grid_size}
        if not self.is_timm:
            side = self.visual.image_size // _RESNET_STRIDE
            return {"visual.attnpool.positional_embedding": (side, side)}
        grids = trunk_grids(self.visual.trunk)
        return {f"visual.trunk.{name}": grid for name, grid in grids.items()}


def find_open_clip(arch: str) -> Host:
    """The visual tower of an architecture of open_clip.

    Raises:
        ValueError: open_clip has no such architecture.
    """
    config = open_clip_config(arch)

    def build(
        num_classes: int = 0,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        embed_dim: int | None = None,
        quick_gelu: bool | None = None,
        **options: Any,
    ) -> nn.Module:
        from open_clip.model import CLIPVisionCfg, _build_vision_tower

        check_fields(f"open_clip:{arch}", CLIPVisionCfg, options, _NOT_OPTIONS)
        vision = {**config["vision_cfg"], **options, "output_tokens": False}
        vision["timm_model_pretrained"] = False
        if img_size is not None:
            vision["image_size"] = _fitting(arch, vision, img_size)
        width = config["embed_dim"] if embed_dim is None else embed_dim
        gelu = config.get("quick_gelu", False) if quick_gelu is None else quick_gelu
        visual = _build_vision_tower(width, vision, gelu)
        if img_size is not None and hasattr(visual, "set_input_size"):
            visual.set_input_size(vision["image_size"])
        projected = not vision.get("timm_model_name") or vision.get("timm_proj") != "none"
        features = width if projected else visual.trunk.num_features
        model = OpenClipVisual(visual, features, num_classes)
        _set_channels(arch, model, in_chans)
        sizes = {"num_classes": num_classes, "in_chans": in_chans, "img_size": img_size}
        told = {"embed_dim": width, "vision_cfg": vision, "quick_gelu": gelu}
        return with_card(model, {**tower_options(told), **sizes})

    size = config["vision_cfg"].get("image_size", 224)
    return Host(build, open_clip_preprocessing(size, _any_weights(arch)), f"open_clip:{arch}")


def open_clip_config(arch: str) -> dict[str, Any]:
    """open_clip's own table of an architecture.

    Raises:
        ValueError: there is none; the nearest names are listed.
    """
    from open_clip import get_model_config, list_models

    if arch not in list_models():
        raise ValueError(unknown_name("open_clip", arch, list_models()))
    return get_model_config(arch)


def check_fields(
    name: str, config: type, options: Mapping[str, Any], excluded: tuple[str, ...] = ()
) -> None:
    """Refuses options that a configuration class of open_clip does not have."""
    valid = [field.name for field in fields(config) if field.name not in excluded]
    wrong = [option for option in options if option not in valid]
    if wrong:
        raise TypeError(f"{name} has no option {wrong[0]!r}; valid: {', '.join(valid)}")


def _fitting(arch: str, vision: dict[str, Any], img_size: Any) -> int | tuple[int, int]:
    """The image size as open_clip takes it; refused where it would cut off a border."""
    rows, cols = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if vision.get("timm_model_name"):
        return rows, cols
    resnet = isinstance(vision["layers"], list | tuple)
    patch = _RESNET_STRIDE if resnet else vision["patch_size"]
    if rows % patch or cols % patch or min(rows, cols) < 1:
        raise ValueError(
            f"img_size {(rows, cols)} must be divisible by {patch}, the step of open_clip:{arch}"
        )
    if resnet and rows != cols:
        raise ValueError(f"img_size {(rows, cols)} must be square for open_clip:{arch}")
    return rows if resnet else (rows, cols)


def _set_channels(arch: str, model: OpenClipVisual, in_chans: int) -> None:
    if in_chans == 3:
        return
    if not hasattr(model, "first_conv"):
        raise ValueError(f"in_chans ({in_chans}) must be 3 for open_clip:{arch}")
    change_stem(model, in_chans)


def open_clip_preprocessing(size: int | tuple[int, int] | list[int], config: Any) -> Preprocessing:
    """Of a table of open_clip's; its defaults, OpenAI's, where that says nothing."""
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    return Preprocessing(
        size=(size, size) if isinstance(size, int) else (size[0], size[1]),
        mean=tuple(config.get("mean", OPENAI_DATASET_MEAN)),
        std=tuple(config.get("std", OPENAI_DATASET_STD)),
        interpolation=config.get("interpolation", "bicubic"),
        crop_mode=_CROP_MODES[config.get("resize_mode", "shortest")],
    )


def _any_weights(arch: str) -> dict[str, Any]:
    """What open_clip says about the first weights of an architecture, if it has any."""
    from open_clip.pretrained import get_pretrained_cfg, list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(arch)
    return get_pretrained_cfg(arch, tags[0]) if tags else {}


def load_open_clip(name: str, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A whole model of open_clip with trained weights, from its hub or cache.

    Args:
        name: `ARCH/TAG`; the tag may be left out where there is one only.
        **options: Further options of `open_clip.create_model`.

    Returns:
        The model, and what open_clip says about the weights.

    Raises:
        WeightsError: there are no such weights, or they cannot be had.
    """
    import open_clip
    from open_clip.pretrained import get_pretrained_cfg

    arch, _, tag = name.partition("/")
    with as_weights_error():
        gelu = open_clip_config(arch).get("quick_gelu", False)
    tag = _known_tag(arch, tag)
    config = get_pretrained_cfg(arch, tag)
    if config.get("quick_gelu", False) != gelu:
        other = arch.removesuffix("-quickgelu") if gelu else f"{arch}-quickgelu"
        raise WeightsError(
            f"open_clip:{arch}/{tag} was trained with{'out' if gelu else ''} QuickGELU, and {arch} "
            f"has{'' if gelu else ' not'} that activation; take {other}/{tag}"
        )
    try:
        model = open_clip.create_model(arch, pretrained=tag, **options)
    except Exception as error:
        raise not_had(f"open_clip:{arch}/{tag}", error) from error
    return model, config


def _known_tag(arch: str, tag: str) -> str:
    from open_clip.pretrained import list_pretrained_tags_by_model

    tags = list_pretrained_tags_by_model(arch)
    if not tags:
        raise WeightsError(f"open_clip has no weights for {arch}")
    if not tag and len(tags) == 1:
        return tags[0]
    if tag not in tags:
        asked = f"no weights {tag!r}" if tag else "several weights"
        raise WeightsError(
            f"open_clip:{arch} has {asked}; name one as open_clip:{arch}/TAG, with TAG one of "
            f"{', '.join(tags)}"
        )
    return tag


def read_open_clip(name: str) -> Source:
    """Trained weights `ARCH/TAG` of a whole model, from open_clip's hub or cache."""
    model, config = load_open_clip(name)
    source, arch = f"open_clip:{name}", open_clip_config(name.partition("/")[0])
    size = getattr(model.visual, "image_size", 224)
    options = {"quick_gelu": arch.get("quick_gelu", False)}
    card = ModelCard(None, options, open_clip_preprocessing(size, config), source=source)
    grids = OpenClipVisual(model.visual, 1).position_grids()
    return Source(source, dict(model.state_dict()), card, grids, model)


def tower_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of the visual tower that a table of open_clip's describes, defaults included."""
    from open_clip.model import CLIPVisionCfg

    vision = config["vision_cfg"]
    options = {
        field.name: vision.get(field.name, field.default)
        for field in fields(CLIPVisionCfg)
        if field.name not in _NOT_OPTIONS
    }
    own = {"embed_dim": config["embed_dim"], "quick_gelu": bool(config.get("quick_gelu"))}
    return plain({**options, **own}, "options")


def _is_whole(source: Source) -> bool:
    return "logit_scale" in source.tensors


def _visual_part(source: Source, model: Any) -> Source:
    visual = {key: value for key, value in source.tensors.items() if key.startswith("visual.")}
    card = source.card or ModelCard(None, {}, model.card.preprocessing, source=source.name)
    left_out = [f"{len(source.tensors) - len(visual)} tensors of the text part"]
    card = replace(card, extra={**card.extra, "left_out": left_out})
    return replace(source, tensors=visual, card=card)


register_layout(
    Layout(
        "open_clip's model of images and texts",
        fits=lambda model: isinstance(model, OpenClipVisual),
        recognises=_is_whole,
        translate=_visual_part,
    )
)
