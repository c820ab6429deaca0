"""Classification by names alone: the class whose description is nearest to the image (CLIP).

Radford et al., arXiv 2103.00020, section 3.1.

Shapes: b batch, c y x channels/rows/columns, e width of the features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from vision.evaluate import count
from zoo.layers.check import integer

TEMPLATES = ("{}", "a drawing of {}", "an icon of {}", "a small picture of {}", "an emoji: {}")

Tokenize = Callable[[list[str]], tuple[Tensor, Tensor]]


@torch.no_grad()
def zero_shot_classifier(
    model: Any,
    tokenizer: Tokenize,
    class_names: Sequence[str],
    templates: Sequence[str] = TEMPLATES,
    *,
    batch_size: int = 256,
) -> Tensor:
    """One vector per class: the mean of its texts' normalised features, normalised again.

    Args:
        model: Dual encoder with `encode_text(tokens, mask, normalize)`.
        tokenizer: Gives ids (b n) and mask (b n) of texts.
        class_names: Different names.
        templates: Texts in which `{}` stands for the name.
        batch_size: Texts that are encoded at a time.

    Returns:
        (e classes), in fp32 on the model's device.
    """
    texts = _texts(class_names, templates)
    training, device = model.training, next(model.parameters()).device
    batch_size = integer("batch_size", batch_size)
    parts = []
    model.eval()
    try:
        for first in range(0, len(texts), batch_size):
            tokens, mask = tokenizer(texts[first : first + batch_size])
            part = model.encode_text(tokens.to(device), mask.to(device), normalize=True)
            parts.append(part.float())
    finally:
        model.train(training)
    features = rearrange(torch.cat(parts), "(n t) e -> n t e", t=len(templates))
    return F.normalize(features.mean(dim=1), dim=1).T


@torch.no_grad()
def zero_shot_counts(
    model: Any, images: Tensor, targets: Tensor, classifier: Tensor
) -> dict[str, Tensor]:
    """Classification counts of a batch, as `vision.evaluate.count` gives them.

    Args:
        model: Dual encoder with `encode_image(images, normalize)` and `logit_scale` (its log).
        images: Normalised (b c y x).
        targets: Class indices (b,).
        classifier: From `zero_shot_classifier`.
    """
    features = model.encode_image(images, normalize=True)
    # Under autocast the product would be rounded to half precision, which makes ties.
    with torch.autocast(features.device.type, enabled=False):
        logits = model.logit_scale.float().exp() * (features.float() @ classifier)
    return count(logits, targets)


def _texts(class_names: Sequence[str], templates: Sequence[str]) -> list[str]:
    """All texts of the first class, then of the second, ..."""
    for name, value in (("class_names", class_names), ("templates", templates)):
        if isinstance(value, str) or not value:
            raise ValueError(f"{name} ({value!r}) must be a list of texts, one or more")
    twice = sorted({name for name in class_names if class_names.count(name) > 1})
    if twice:
        raise ValueError(f"class_names must differ; {', '.join(twice)} occur twice or more")
    wrong = [template for template in templates if "{}" not in template]
    if wrong:
        raise ValueError(f"template {wrong[0]!r} must have {{}} where the name goes")
    return [template.replace("{}", name) for name in class_names for template in templates]
