"""What models of pairs are measured by: what is kept of each image and caption, and scores from it.

Rows are collected over all processes (`zoo.engine.collect`), then scored.

Shapes: b batch, n tokens, m images, t captions, d width of a token, e width of an embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from crossmodal.balance import attention_balance, watched
from crossmodal.captioner import caption_losses, token_counts
from crossmodal.data import Pairs
from crossmodal.encoded import Encoded
from crossmodal.generate import generate
from crossmodal.loss import contrastive_loss
from crossmodal.retrieval import rank_metrics, rerank, retrieval_metrics
from crossmodal.scores import caption_scores
from crossmodal.tokenizer import create_tokenizer
from crossmodal.training import PairTask
from zoo.surgery import evaluating

Rows = Mapping[str, Tensor]


def image_rows(task: PairTask, tokens: bool = False) -> Callable[[Any, Any], dict[str, Tensor]]:
    """What retrieval needs of each image: `vector` (b e); of a matcher `tokens`, `pooled` too."""

    def rows(model: Any, batch: Any) -> dict[str, Tensor]:
        image = model.image_tower(task.inputs(batch))
        return {"vector": model.embed_image(image), **(_kept(image) if tokens else {})}

    return rows


def text_rows(tokens: bool = False) -> Callable[[Any, Any], dict[str, Tensor]]:
    """What retrieval needs of each caption, as `image_rows`, with its `mask`."""

    def rows(model: Any, batch: Any) -> dict[str, Tensor]:
        text = model.text_tower(batch["tokens"], batch["mask"])
        return {"vector": model.embed_text(text), **(_kept(text) if tokens else {})}

    return rows


def _kept(encoded: Encoded) -> dict[str, Tensor]:
    kept = {"tokens": encoded.tokens, "pooled": encoded.pooled}
    return kept if encoded.mask is None else {**kept, "mask": encoded.mask}


@torch.no_grad()
def score_dual(model: Any, images: Rows, texts: Rows, pairs: Pairs) -> dict[str, float]:
    """Loss and recall of a dual encoder from the rows of all images (m ...) and captions (t ...).

    The loss is over batches of 256 pairs of an image and its first caption.
    """
    metrics = retrieval_metrics(images["vector"], texts["vector"], pairs.texts()[1])
    first = first_captions(pairs)
    total, device = 0.0, model.logit_scale.device
    bias = None if model.logit_bias is None else model.logit_bias.float()
    for rows in torch.arange(len(first)).split(256):
        image = images["vector"][rows].to(device)
        text = texts["vector"][first[rows]].to(device)
        loss = contrastive_loss(
            image, text, model.logit_scale.float().exp(), bias, kind=model.loss, alone=True
        )
        total += float(loss) * len(rows)
    return {"loss": total / len(first), **metrics}


@torch.no_grad()
def score_matcher(
    model: Any, images: Rows, texts: Rows, pairs: Pairs, k: int = 16, similarity: bool = True
) -> dict[str, float]:
    """Recall after the matcher has reordered the `k` nearest, and `dual_...` before it.

    They are ordered by the log-odds of the matcher, to which `similarity` adds the scaled
    similarity of the two vectors (as BLIP does, arXiv 2201.12086).
    """
    dual = score_dual(model, images, texts, pairs)
    candidates = {"i2t": len(pairs.texts()[0]), "t2i": len(pairs)}
    found = {
        f"{side}_{name}": value
        for side, ranks in match_ranks(model, images, texts, pairs, k, similarity).items()
        for name, value in rank_metrics(ranks, candidates[side]).items()
    }
    loss = dual.pop("loss")
    own, device = watched(len(pairs)), model.logit_scale.device
    with evaluating(model):
        image, text = _taken(images, own, device), _taken(texts, first_captions(pairs)[own], device)
        balance = attention_balance(model, image, text)
    return {"loss": loss, **found, **{f"dual_{n}": v for n, v in dual.items()}, **balance}


@torch.no_grad()
def match_ranks(
    model: Any, images: Rows, texts: Rows, pairs: Pairs, k: int = 16, similarity: bool = True
) -> dict[str, Tensor]:
    """Ranks both ways, `i2t` and `t2i`, after the matcher has reordered the `k` nearest."""
    owners = pairs.texts()[1]
    captions = by_image(range(len(owners)), pairs)
    match = match_fn(model, images, texts, similarity)
    with evaluating(model):
        return {
            "i2t": rerank(images["vector"], texts["vector"], captions, match, k=k),
            "t2i": rerank(texts["vector"], images["vector"], owners, lambda t, i: match(i, t), k=k),
        }


def first_captions(pairs: Pairs) -> Tensor:
    """Of each image, the index of its first caption among all (m,)."""
    counts = torch.tensor([len(own) for own in pairs.captions])
    return counts.cumsum(0) - counts


def by_image(items: Iterable[Any], pairs: Pairs) -> list[list[Any]]:
    """One item for each caption, as a list for each image."""
    left = iter(items)
    return [list(islice(left, len(own))) for own in pairs.captions]


def match_fn(
    model: Any, images: Rows, texts: Rows, similarity: bool = True
) -> Callable[[Tensor, Tensor], Tensor]:
    """Scores of a matcher for pairs, on the CPU: indices of images (b), of texts (b) -> (b).

    Args:
        images, texts: As for `match_ranks`.
        similarity: Whether it adds the scaled similarity to its log-odds.
    """
    device = model.logit_scale.device

    def match(image: Tensor, text: Tensor) -> Tensor:
        odds = model.match(_taken(images, image, device), _taken(texts, text, device)).cpu().float()
        near = (images["vector"][image] * texts["vector"][text]).sum(dim=1).float()
        return odds + similarity * model.logit_scale.exp().cpu() * near

    return match


def _taken(rows: Rows, index: Tensor, device: torch.device) -> Encoded:
    mask = rows["mask"][index].to(device) if "mask" in rows else None
    return Encoded(rows["tokens"][index].to(device), rows["pooled"][index].to(device), mask)


def caption_rows(task: PairTask, beams: int = 1) -> Callable[[Any, Any], dict[str, Tensor]]:
    """Of each image: what the model writes (`written`, b n; `length`), and how well it tells the
    first caption (`loss`; predicted `tokens` and right ones, `hits`)."""

    def rows(model: Any, batch: Any) -> dict[str, Tensor]:
        images, tokens, mask = task.inputs(batch), batch["tokens"], batch["mask"]
        logits = model(images, tokens, mask)
        hits, counted = token_counts(logits, tokens, mask)
        search: dict[str, Any] = {"method": "beam", "num_beams": beams} if beams > 1 else {}
        ids, written = generate(model, images, **search)
        return {
            "written": F.pad(ids, (0, model.context_length - ids.shape[1])),
            "length": written.sum(dim=1),
            "loss": caption_losses(logits, tokens, mask),
            "tokens": counted,
            "hits": hits,
        }

    return rows


def written_captions(task: PairTask, rows: Rows) -> list[str]:
    """What `caption_rows` collected, as text."""
    places = torch.arange(rows["written"].shape[1])
    return task.tokenizer.decode(rows["written"], places < rows["length"][:, None])


def caption_references(task: PairTask, pairs: Pairs) -> list[list[str]]:
    """All captions of each image, as the tokenizer gives them back: case and spaces may change.

    Whole ones, where the model's context would cut them: a model of few tokens is not scored
    against the starts of captions.
    """
    texts = pairs.texts()[0]
    whole = create_tokenizer(task.tokenizer.spec, max(task.tokenizer.lengths(texts)))
    return by_image(whole.decode(*whole(texts)), pairs)


def score_captions(
    task: PairTask, rows: Rows, pairs: Pairs, language: str | None = None
) -> dict[str, float]:
    """Loss, token accuracy, BLEU-4, chrF and exact matches against all captions of each image.

    Of the first images, where there are rows of fewer than all.
    """
    written = written_captions(task, rows)
    references = caption_references(task, pairs)[: len(written)]
    return {
        "loss": float(rows["loss"].double().mean()),
        "token_accuracy": 100 * int(rows["hits"].sum()) / int(rows["tokens"].sum()),
        **caption_scores(written, references, language=language),
    }
