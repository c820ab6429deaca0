"""What a trained model of pairs makes of validation pairs, as files that a page shows.

`predictions.json` has, of a dual encoder or a matcher, captions found for some images and images
found for some captions; of a captioner, what it writes about some images. PNGs stand beside it.

Shapes: b batch, e width of an embedding, m images, t captions, q queries, k candidates.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from crossmodal.captioner import Captioner
from crossmodal.data import Pairs
from crossmodal.evaluate import by_image, image_rows, match_fn, text_rows
from crossmodal.generate import generate
from crossmodal.matcher import Matcher
from crossmodal.training import PairTask
from vision.inspection.fixed_images import spread, undisturbed
from vision.samples import fresh_folder, save_thumbnail, write_text

MOST = 1000  # images that are candidates
SHOWN = 8  # queries of each kind
NEAREST = 5  # candidates shown for each
WRITTEN = 12  # images about which captions are shown

Rows = dict[str, Tensor]
MatchFn = Callable[[Tensor, Tensor], Tensor]


def write_samples(
    folder: Path,
    model: Any,
    task: PairTask,
    *,
    batch_size: int = 256,
    rerank: int = 16,
    similarity: bool = True,
    beams: int = 1,
) -> None:
    """Writes predictions.json and its PNGs into a folder; earlier ones are replaced.

    Args:
        folder: Made if need be.
        model: A dual encoder, a matcher or a captioner; its mode and the random state stay.
        task: Its validation pairs, the first `MOST` of them.
        batch_size: Images, or captions, a forward pass.
        rerank: Candidates that a matcher puts into order.
        similarity: Whether it adds the scaled similarity to its log-odds.
        beams: Captions that a captioner follows at once.
    """
    val = task.data.val
    with undisturbed(model):
        if isinstance(model, Captioner):
            told = _written(folder, model, task, val, beams)
        else:
            images, texts = _embedded(model, task, val, batch_size)
            matches = isinstance(model, Matcher)
            odds = match_fn(model, images, texts, similarity) if matches else None
            told = _retrieved(folder, task, val, (images, texts), odds, max(NEAREST, rerank))
    write_text(folder / "predictions.json", json.dumps(told, indent=1, ensure_ascii=False))


def _embedded(model: Any, task: PairTask, val: Pairs, batch_size: int) -> tuple[Rows, Rows]:
    """What the towers make of the candidates, on the CPU."""
    images = min(len(val), MOST)
    texts = sum(len(own) for own in val.captions[:images])
    tokens, device = isinstance(model, Matcher), next(model.parameters()).device
    return (
        _rows(model, task.pairs(val), image_rows(task, tokens), images, batch_size, device),
        _rows(model, task.captions(val), text_rows(tokens), texts, batch_size, device),
    )


def _rows(
    model: Any, source: Any, fn: Callable[..., Rows], number: int, size: int, device: Any
) -> Rows:
    parts = []
    for start in range(0, number, size):
        keys = [(0, index) for index in range(start, min(start + size, number))]
        batch = {name: value.to(device) for name, value in source.__getitems__(keys).items()}
        parts.append({name: value.cpu() for name, value in fn(model, batch).items()})
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _retrieved(
    folder: Path,
    task: PairTask,
    val: Pairs,
    rows: tuple[Rows, Rows],
    match: MatchFn | None,
    near: int,
) -> dict[str, Any]:
    images, texts = (each["vector"].double() for each in rows)
    captions, owners = val.texts()
    owners = owners[: len(texts)]
    own = by_image(range(len(owners)), val)
    fresh_folder(folder)
    pictures = Thumbnails(folder, task.pairs(val))
    by_query = [_nearest(i, images[i] @ texts.T, near, match) for i in _spread(SHOWN, len(images))]
    flipped = None if match is None else (lambda text, image: match(image, text))
    by_caption = [
        _nearest(t, texts[t] @ images.T, near, flipped) for t in _first(owners, len(images))
    ]
    return {
        "kind": "retrieval",
        "images": len(images),
        "captions": len(texts),
        "score": "cosine similarity" if match is None else "score of the matcher",
        "of_images": [
            {
                "image": pictures[i],
                "truth": list(val.captions[i]),
                "rank": _rank(order, own[i]),
                "found": [
                    {"text": captions[t], "score": round(score, 3), "right": t in own[i]}
                    for t, score in order[:NEAREST]
                ],
            }
            for i, order in by_query
        ],
        "of_captions": [
            {
                "text": captions[t],
                "rank": _rank(order, [int(owners[t])]),
                "found": [
                    {"image": pictures[i], "score": round(score, 3), "right": i == int(owners[t])}
                    for i, score in order[:NEAREST]
                ],
            }
            for t, order in by_caption
        ],
    }


def _first(owners: Tensor, images: int) -> list[int]:
    """The first captions of other images than the queries, where there are enough."""
    offset = images // (2 * SHOWN)
    chosen = [min(i + offset, images - 1) for i in _spread(SHOWN, images)]
    return [int((owners == i).nonzero()[0, 0]) for i in chosen]


def _nearest(
    query: int, scores: Tensor, near: int, match: MatchFn | None
) -> tuple[int, list[tuple[int, float]]]:
    """A query and all candidates by score; a matcher puts the first `near` into order."""
    order = scores.argsort(descending=True, stable=True)
    values = scores[order]
    if match is not None:
        first = order[:near]
        again, places = match(torch.full_like(first, query), first).sort(descending=True)
        order, values = torch.cat([first[places], order[near:]]), torch.cat([again, values[near:]])
    return query, list(zip(order.tolist(), values.tolist(), strict=True))


def _rank(order: Sequence[tuple[int, float]], relevant: Sequence[int]) -> int:
    return next(place for place, (index, _) in enumerate(order, 1) if index in relevant)


def _written(
    folder: Path, model: Captioner, task: PairTask, val: Pairs, beams: int
) -> dict[str, Any]:
    source, device = task.pairs(val), next(model.parameters()).device
    chosen = _spread(WRITTEN, len(val))
    batch = source.__getitems__([(0, index) for index in chosen])
    images = task.inputs({"images": batch["images"].to(device)})
    search: dict[str, Any] = {"method": "beam", "num_beams": beams} if beams > 1 else {}
    texts = task.tokenizer.decode(*generate(model, images, **search))
    fresh_folder(folder)
    pictures = Thumbnails(folder, source)
    return {
        "kind": "written",
        "images": len(val),
        "samples": [
            {
                "image": pictures[index],
                "written": text,
                "truth": list(val.captions[index]),
                "exact": text.strip().lower() in [each.lower() for each in val.captions[index]],
            }
            for index, text in zip(chosen, texts, strict=True)
        ],
    }


def _spread(most: int, total: int) -> list[int]:
    return spread(min(most, total), total)


class Thumbnails:
    """Writes images of a source as PNGs, each once: `pictures[index]` is the file's name."""

    def __init__(self, folder: Path, source: Any) -> None:
        self.folder, self.source = folder, source

    def __getitem__(self, index: int) -> str:
        name = f"image{index:06d}.png"
        if not (self.folder / name).exists():
            pixels = self.source.__getitems__([(0, index)])["images"][0]
            save_thumbnail(self.folder / name, pixels)
        return name
