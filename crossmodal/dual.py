"""A dual encoder: images and captions as unit vectors of one space (CLIP, arXiv 2103.00020).

Shapes: b batch, n tokens, c y x channels, rows and columns of an image, e width of an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossmodal.composite import Composite
from crossmodal.encoded import Encoded
from crossmodal.loss import KINDS, precise
from crossmodal.tokenizer import Tokenizer
from crossmodal.towers import ImageTower, text_tower
from vision.checks import check_choice
from zoo.freezing import freeze
from zoo.layers.check import integer, positive
from zoo.registry import records_options, register_model

INIT_TEMPERATURE = {"infonce": 0.07, "sigmoid": 0.1}  # of CLIP; of SigLIP (arXiv 2303.15343)
INIT_BIAS = -10.0  # of SigLIP: almost all pairs are none


class DualOutput(NamedTuple):
    """What `crossmodal.loss.contrastive_loss` takes.

    Attributes:
        image: Unit vectors (b e).
        text: Unit vectors (b e).
        scale: Factor on similarities: 1 / temperature.
        bias: Added to them; None with InfoNCE.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor | None


class DualEncoder(Composite):
    """An image tower and a text tower, each with a projection to the shared space.

    Args:
        image_tower: Name of an image model, see `ImageTower`.
        image_options: Further options of it.
        text_tower: Name of a text tower, see `crossmodal.towers.text_tower`.
        text_options: Further options of it.
        img_size: Side, or rows and columns, of the images.
        in_chans: Channels of the images.
        tokenizer: Makes the ids of captions; the text tower's own where None.
        context_length: Most tokens of a caption; the text tower's own where None.
        embed_dim: Width of the shared space.
        loss: `infonce` or `sigmoid`; the latter adds a bias, see `contrastive_loss`.
        init_temperature: 1 over the scale at first; where None 0.07, or 0.1 with `sigmoid`.
        max_scale: Where `clamp_scale_` holds the learned scale.
        freeze_image: Stages or blocks of the image tower that do not learn, or "all".
        freeze_text: Blocks of the text tower that do not learn, or "all".
    """

    image_tower: ImageTower
    text_tower: Any  # a TextTower or open_clip's

    @records_options
    def __init__(
        self,
        image_tower: str = "resnet_micro",
        image_options: dict[str, Any] | None = None,
        text_tower: str = "text_micro",
        text_options: dict[str, Any] | None = None,
        img_size: int | Sequence[int] = 32,
        in_chans: int = 3,
        tokenizer: str | None = None,
        context_length: int | None = None,
        embed_dim: int = 128,
        loss: str = "infonce",
        init_temperature: float | None = None,
        max_scale: float = 100.0,
        freeze_image: int | str = 0,
        freeze_text: int | str = 0,
    ) -> None:
        super().__init__()
        check_choice("loss", loss, KINDS)
        self.loss, self.embed_dim = loss, integer("embed_dim", embed_dim)
        self.image_tower = ImageTower(
            image_tower,
            img_size=img_size,
            in_chans=in_chans,
            freeze=freeze_image,
            options=image_options,
        )
        self.text_tower = _text_tower(text_tower, text_options, tokenizer, context_length)
        freeze(self.text_tower, freeze_text)
        self.image_proj = _projection(self.image_tower.pooled_features, embed_dim)
        self.text_proj = _projection(self.text_tower.pooled_features, embed_dim)
        self._add_scale(init_temperature, positive("max_scale", max_scale))

    def _add_scale(self, temperature: float | None, max_scale: float) -> None:
        if temperature is None:
            temperature = INIT_TEMPERATURE[self.loss]
        scale = 1 / positive("init_temperature", temperature)
        if not 1 <= scale <= max_scale:
            raise ValueError(
                f"init_temperature ({temperature}) must lie between 1 / max_scale "
                f"({1 / max_scale:g}) and 1"
            )
        self.max_scale = max_scale
        self.logit_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.logit_bias = nn.Parameter(torch.tensor(INIT_BIAS)) if self.loss == "sigmoid" else None

    def forward(self, images: Tensor, tokens: Tensor, mask: Tensor) -> DualOutput:
        """images (b c y x), tokens (b n), mask (b n) -> vectors (b e) of both, and the scale"""
        return self._output(self.image_tower(images), self.text_tower(tokens, mask))

    def _output(self, image: Encoded, text: Encoded) -> DualOutput:
        bias = None if self.logit_bias is None else precise(self.logit_bias)
        scale = precise(self.logit_scale).exp()
        return DualOutput(self.embed_image(image), self.embed_text(text), scale, bias)

    def encode_image(self, images: Tensor, normalize: bool = True) -> Tensor:
        """(b c y x) -> (b e)"""
        return self.embed_image(self.image_tower(images), normalize)

    def encode_text(self, tokens: Tensor, mask: Tensor, normalize: bool = True) -> Tensor:
        """(b n), (b n) -> (b e)"""
        return self.embed_text(self.text_tower(tokens, mask), normalize)

    def embed_image(self, image: Encoded, normalize: bool = True) -> Tensor:
        """An image that the tower has read already, as a vector of the shared space (b e)."""
        return _embedded(self.image_proj(image.pooled), normalize)

    def embed_text(self, text: Encoded, normalize: bool = True) -> Tensor:
        """A caption that the tower has read already, as a vector of the shared space (b e)."""
        return _embedded(self.text_proj(text.pooled), normalize)

    @torch.no_grad()
    def clamp_scale_(self) -> None:
        """Brings the scale back to [1, max_scale]; to be called after each update.

        Without an upper bound it grows until the gradients of all but the hardest pairs vanish.
        """
        self.logit_scale.clamp_(0, math.log(self.max_scale))

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids the text tower reads."""
        return self.text_tower.make_tokenizer()


def _text_tower(
    name: str, options: dict[str, Any] | None, tokenizer: str | None, context_length: int | None
) -> nn.Module:
    """The text tower, with what the model says of captions among its options."""
    captions = {"tokenizer": tokenizer, "context_length": context_length}
    options, given = options or {}, {k: v for k, v in captions.items() if v is not None}
    twice = sorted(options.keys() & captions.keys())
    if twice:
        raise TypeError(
            f"text_options has {twice[0]!r}, which the model sets: give {twice[0]} to it"
        )
    return text_tower(name, **options, **given)


def _projection(width: int, embed_dim: int) -> nn.Linear:
    linear = nn.Linear(width, embed_dim, bias=False)
    nn.init.normal_(linear.weight, std=width**-0.5)
    return linear


def _embedded(x: Tensor, normalize: bool) -> Tensor:
    return F.normalize(precise(x), dim=-1) if normalize else x


# --- variants --------------------------------------------------------------------------------


@register_model
def dual_micro(**options: Any) -> DualEncoder:
    """For images of 32x32 and names: a small CNN and two layers of text."""
    return DualEncoder(**options)


@register_model
def dual_base(**options: Any) -> DualEncoder:
    """CLIP's ViT-B/32 (arXiv 2103.00020) in open_clip's shape, without its fast GELU."""
    base: dict[str, Any] = {
        "image_tower": "vit_base_patch32_224",
        "image_options": {"pre_norm": True, "norm_eps": 1e-5},
        "text_tower": "text_base",
        "img_size": 224,
        "embed_dim": 512,
    }
    return DualEncoder(**{**base, **options})
