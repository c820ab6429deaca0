"""Image-text pairs: towers, fusion by cross-attention, contrastive models, matching, captions.

Importing this package registers its models. The data side is imported when first asked for.

With images (b c y x) as their transforms give them:

    matcher = zoo.create_model("local-dir:runs/pairs/model").eval()  # or "matcher_micro"
    tokens, mask = matcher.make_tokenizer()(["red heart", "grinning face"])
    similarity = matcher.encode_text(tokens, mask) @ matcher.encode_image(images).T

    captioner = zoo.create_model("captioner_micro", decoder="transformer")
    ids, mask = generate(captioner, images, method="beam", num_beams=4)
    captions = captioner.make_tokenizer().decode(ids, mask)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from crossmodal import text_layouts as text_layouts  # registers layouts
from crossmodal.captioner import Captioner, caption_loss
from crossmodal.dual import DualEncoder
from crossmodal.encoded import Encoded
from crossmodal.fusion import CrossBlock, Fusion
from crossmodal.generate import generate
from crossmodal.loss import contrastive_loss
from crossmodal.matcher import Matcher, match_loss
from crossmodal.pool import TokenPool
from crossmodal.text import TextTower
from crossmodal.tokenizer import Tokenizer, create_tokenizer, list_tokenizers
from crossmodal.towers import ImageTower, text_tower

if TYPE_CHECKING:
    from crossmodal.data import load_pairs, make_caption_source, make_pair_source
    from crossmodal.retrieval import ranks, rerank, retrieval_metrics
    from crossmodal.scores import by_length, caption_scores
    from crossmodal.zeroshot import zero_shot_classifier

__all__ = [
    "Captioner",
    "CrossBlock",
    "DualEncoder",
    "Encoded",
    "Fusion",
    "ImageTower",
    "Matcher",
    "TextTower",
    "TokenPool",
    "Tokenizer",
    "by_length",
    "caption_loss",
    "caption_scores",
    "contrastive_loss",
    "create_tokenizer",
    "generate",
    "list_tokenizers",
    "load_pairs",
    "make_caption_source",
    "make_pair_source",
    "match_loss",
    "ranks",
    "rerank",
    "retrieval_metrics",
    "text_tower",
    "zero_shot_classifier",
]

_HOMES = {
    "by_length": "crossmodal.scores",
    "caption_scores": "crossmodal.scores",
    "load_pairs": "crossmodal.data",
    "make_caption_source": "crossmodal.data",
    "make_pair_source": "crossmodal.data",
    "ranks": "crossmodal.retrieval",
    "rerank": "crossmodal.retrieval",
    "retrieval_metrics": "crossmodal.retrieval",
    "zero_shot_classifier": "crossmodal.zeroshot",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'crossmodal' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
