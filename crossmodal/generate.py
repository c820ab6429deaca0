"""Writing captions: greedily, by beam search, or by sampling.

A caption is a start token, its words and an end token, in at most `max_length` tokens: where no
room is left, the end is written. Start and padding are never written. Each step reads one token
against what is kept of those before it (`use_cache`), or all of them anew; both give the same
captions, and so does a batch and each of its images alone.

Shapes: b batch, k beams of an image, n tokens, v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from crossmodal.decoder import Decoder
from crossmodal.encoded import Encoded
from vision.checks import check_choice
from zoo.layers import reorder
from zoo.layers.check import fraction, integer, positive
from zoo.surgery import evaluating

METHODS = ("greedy", "beam", "sample")

Generators: TypeAlias = torch.Generator | Sequence[torch.Generator] | None


@torch.no_grad()
def generate(
    model: Any,
    images: Tensor,
    *,
    method: str = "greedy",
    num_beams: int = 4,
    length_penalty: float = 1.0,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    max_length: int | None = None,
    use_cache: bool = True,
    generator: Generators = None,
) -> tuple[Tensor, Tensor]:
    """Captions of images (b c y x): ids (b n) and mask (b n), True = a token of the caption.

    n is the longest caption's; the others end in padding. The model is put into evaluation mode
    for the time.

    Args:
        model: A `Captioner`, or what has its `encode_image`, `decoder`, `context_length`,
            `start_id`, `end_id` and `pad_id`.
        method: `greedy` (the likeliest token each time), `beam` (see `_beam`), or `sample`.
        num_beams: Captions that `beam` follows at once; with 1 it is greedy.
        length_penalty: Of `beam`: finished captions are ranked by log p / n^length_penalty, n the
            tokens after the start. 0 ranks by probability, which favours short ones; 1 by the
            mean log probability of a token.
        temperature: Of `sample`: divides the logits.
        top_k: Of `sample`: only so many of the likeliest tokens can be drawn.
        top_p: Of `sample`: only the fewest likeliest tokens that together have this probability
            (nucleus sampling, arXiv 1904.09751), after temperature and `top_k`.
        max_length: Most tokens of a caption, start and end included; by default, and at most, the
            model's context length.
        use_cache: Whether a step reads one token only.
        generator: Of `sample`: one for the batch, or one for each image, whose caption then does
            not depend on its batch; torch's own by default.
    """
    _check_method(
        method,
        num_beams=num_beams,
        length_penalty=length_penalty,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=generator,
    )
    max_length = _longest(max_length, model.context_length)
    with evaluating(model):
        image = model.encode_image(images)
        writer = _Writer(model, image, max_length, use_cache)
        if method == "beam":
            return _beam(writer, integer("num_beams", num_beams), _finite(length_penalty))
        if method == "greedy":
            return _one_by_one(writer, lambda logits: logits.argmax(-1))
        limits = (positive("temperature", temperature), top_k, top_p)
        return _one_by_one(writer, lambda x: _draw(probabilities(x, *limits), generator))


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """What `sample` draws from: (b v) -> (b v), rows sum to 1."""
    logits = logits / positive("temperature", temperature)
    if top_k is not None:
        kept = logits.topk(min(integer("top_k", top_k), logits.shape[-1])).indices
        cut = torch.ones_like(logits, dtype=torch.bool).scatter(-1, kept, False)
        logits = logits.masked_fill(cut, -math.inf)
    chances = logits.softmax(-1)
    if top_p is None:
        return chances
    if fraction("top_p", top_p) == 0:
        raise ValueError("top_p (0) must be greater than 0, or no token could be drawn")
    ranked, order = chances.sort(-1, descending=True)
    before = ranked.cumsum(-1) - ranked  # the likeliest is always in
    ranked = ranked.masked_fill(before >= top_p, 0)
    return torch.zeros_like(chances).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


class _Writer:
    """The next token's logits after those written so far, with a cache or without.

    Attributes:
        ids: The first token of each image: (b 1).
    """

    def __init__(self, model: Any, image: Encoded, max_length: int, use_cache: bool) -> None:
        self.decoder: Decoder = model.decoder
        self.image, self.max_length = image, max_length
        self.end, self.pad = model.end_id, model.pad_id
        self.banned = [i for i in {model.start_id, model.pad_id} if i != model.end_id]
        self.state = self.decoder.start(image) if use_cache else None
        b, device = len(image.tokens), image.tokens.device
        self.ids = torch.full((b, 1), model.start_id, device=device)

    def logits(self, ids: Tensor) -> Tensor:
        """(b n), of which all but the last were given before -> (b v), at least fp32."""
        if self.state is None:
            logits = self.decoder(ids, self.image)[:, -1]
        else:
            logits, self.state = self.decoder.step(ids[:, -1], self.state)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        logits[:, self.banned] = -math.inf
        return logits

    def only_end(self, scores: Tensor) -> Tensor:
        """(b v): all but the end is out of the question."""
        others = torch.arange(scores.shape[-1], device=scores.device) != self.end
        return scores.masked_fill(others, -math.inf)

    def take(self, rows: Tensor) -> None:
        """Goes on with these captions, some of them several times: (n)."""
        if self.state is None:
            self.image = reorder(self.image, rows)
        else:
            self.state = reorder(self.state, rows)


def _one_by_one(writer: _Writer, choose: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """One caption an image: `choose` takes the next token (b) by its logits (b v)."""
    ids = writer.ids
    mask = torch.ones_like(ids, dtype=torch.bool)
    going = mask[:, 0]
    while bool(going.any()):
        logits = writer.logits(ids)
        if ids.shape[1] == writer.max_length - 1:
            logits = writer.only_end(logits)
        token = choose(logits).masked_fill(~going, writer.pad)
        ids, mask = torch.cat([ids, token[:, None]], 1), torch.cat([mask, going[:, None]], 1)
        going = going & (token != writer.end)
    return ids, mask


def _beam(writer: _Writer, k: int, penalty: float) -> tuple[Tensor, Tensor]:
    """The best of the captions that a beam search finishes.

    Each image has k unfinished captions, the likeliest of all continuations of the k before. A
    continuation that ends the caption is finished, and kept, if it is among the k likeliest. An
    image is done with k finished captions, of which the best by `penalty` is returned.
    """
    rows = torch.arange(len(writer.ids), device=writer.ids.device)
    writer.take(rows.repeat_interleave(k))
    ids = writer.ids[:, None].expand(-1, k, -1)  # b k n
    finished = _Finished(writer, k, penalty)
    scores = torch.full(ids.shape[:2], -math.inf, device=ids.device)
    scores[:, 0] = 0  # all beams are the same caption still
    while ids.shape[2] < writer.max_length and not finished.full:
        logp = writer.logits(ids.flatten(0, 1)).log_softmax(-1)
        if ids.shape[2] == writer.max_length - 1:
            logp = writer.only_end(logp)
        v = logp.shape[-1]
        scores, best = _best(scores[..., None] + logp.unflatten(0, (-1, k)), 2 * k)
        beam, token = best // v, best % v  # b 2k, the likeliest first
        ids = torch.cat([_rows(ids, beam), token[..., None]], 2)
        ends = token == writer.end
        finished.add(ids[:, :k], scores[:, :k].masked_fill(~ends[:, :k], -math.inf))
        scores, going = scores.masked_fill(ends, -math.inf).topk(k)  # of 2k at most k end
        ids, beam = _rows(ids, going), beam.gather(1, going)
        writer.take((rows[:, None] * k + beam).flatten())
    return finished.best()


def _best(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(b k v) -> the `count` highest and their places in (k v), with none where there are fewer"""
    flat = scores.flatten(1)
    values, places = flat.topk(min(count, flat.shape[1]))
    missing = (0, count - values.shape[1])
    return F.pad(values, missing, value=-math.inf), F.pad(places, missing)


def _rows(ids: Tensor, index: Tensor) -> Tensor:
    """(b k n), (b j) -> (b j n)"""
    return ids.gather(1, index[..., None].expand(-1, -1, ids.shape[2]))


class _Finished:
    """The k best finished captions of each image."""

    def __init__(self, writer: _Writer, k: int, penalty: float) -> None:
        self.pad, self.k, self.penalty = writer.pad, k, penalty
        b, device = len(writer.ids), writer.ids.device
        self.ids = torch.full((b, k, writer.max_length), self.pad, device=device)
        self.lengths = torch.zeros(b, k, dtype=torch.long, device=device)
        self.scores = torch.full((b, k), -math.inf, device=device)
        self.counts = torch.zeros(b, dtype=torch.long, device=device)

    @property
    def full(self) -> bool:
        """Whether every image is done."""
        return bool((self.counts >= self.k).all())

    def add(self, ids: Tensor, scores: Tensor) -> None:
        """Captions of one length (b k n) by log probability (b k), -inf where there is none."""
        n, done = ids.shape[2], self.counts >= self.k
        scores = (scores / (n - 1) ** self.penalty).masked_fill(done[:, None], -math.inf)
        self.counts = self.counts + scores.isfinite().sum(1)
        self.scores, kept = torch.cat([self.scores, scores], 1).topk(self.k)
        ids = F.pad(ids, (0, self.ids.shape[2] - n), value=self.pad)
        lengths = torch.full_like(self.lengths, n)
        self.ids = _rows(torch.cat([self.ids, ids], 1), kept)
        self.lengths = torch.cat([self.lengths, lengths], 1).gather(1, kept)

    def best(self) -> tuple[Tensor, Tensor]:
        """ids (b n), mask (b n)"""
        lengths = self.lengths[:, 0]
        n = int(lengths.max()) if len(lengths) else 2
        mask = torch.arange(n, device=lengths.device) < lengths[:, None]
        return self.ids[:, 0, :n], mask


_USED_BY = {  # what each option stands at where it is not given, and the method that reads it
    "num_beams": (4, "beam"),
    "length_penalty": (1.0, "beam"),
    "temperature": (1.0, "sample"),
    "top_k": (None, "sample"),
    "top_p": (None, "sample"),
    "generator": (None, "sample"),
}


def _check_method(method: str, **options: object) -> None:
    check_choice("method", method, METHODS)
    for name, value in options.items():
        default, user = _USED_BY[name]
        if method != user and value is not default and value != default:
            raise ValueError(f"{name} is an option of method={user!r}, but method is {method!r}")


def _longest(max_length: int | None, context_length: int) -> int:
    if max_length is None:
        return context_length
    if integer("max_length", max_length, minimum=2) > context_length:
        raise ValueError(
            f"max_length ({max_length}) must lie in [2, {context_length}]: start and end, and the "
            "model's context_length"
        )
    return int(max_length)


def _finite(length_penalty: float) -> float:
    if not isinstance(length_penalty, Real) or isinstance(length_penalty, bool):
        raise TypeError(f"length_penalty ({length_penalty!r}) must be a number")
    if not math.isfinite(length_penalty):
        raise ValueError(f"length_penalty ({length_penalty}) must be finite")
    return float(length_penalty)


def _draw(chances: Tensor, generator: Generators) -> Tensor:
    """(b v) -> (b): one number in [0, 1) decides each row."""
    b, device = len(chances), chances.device
    if isinstance(generator, Sequence):
        if len(generator) != b:
            raise ValueError(f"generator has {len(generator)} generators for {b} images")
        drawn = [_uniform(1, each, device) for each in generator]
        number = torch.cat(drawn) if drawn else chances.new_zeros(0, 1)
    else:
        number = _uniform(b, generator, device)
    total = chances.double().cumsum(-1)
    return (total <= number * total[:, -1:]).sum(-1).clamp(max=chances.shape[-1] - 1)


def _uniform(b: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    """(b 1), drawn where the generator is"""
    home = device if generator is None else generator.device
    return torch.rand(b, 1, generator=generator, device=home, dtype=torch.float64).to(device)
