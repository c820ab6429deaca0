"""Captions against exhaustive search, plain loops over lists and transformers' own generation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from crossmodal.captioner import DECODERS, create_decoder
from crossmodal.encoded import Encoded
from crossmodal.generate import METHODS, generate, probabilities
from zoo.rng import generator

START, END, PAD, V, LENGTH = 0, 1, 2, 7, 6


class Stand(nn.Module):
    """A captioner whose images are read already: (b 1 1 d) cells of one channel."""

    start_id, end_id, pad_id, context_length = START, END, PAD, LENGTH

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def encode_image(self, images: Tensor) -> Encoded:
        tokens = images.flatten(1, 2)
        return Encoded(tokens, tokens.mean(1))


def model(kind: str = "transformer", seed: int = 0, **options: Any) -> Stand:
    torch.manual_seed(seed)
    options = {"dim": 16, "depth": 2, "num_heads": 2, "tie": False, **options}
    decoder: Any = create_decoder(kind, V, LENGTH, 8, 8, **options)
    with torch.no_grad():
        decoder.head.weight.mul_(10)  # sharper, so that images make a difference
    return Stand(decoder.double().eval())


def images(b: int = 5) -> Tensor:
    return torch.randn(b, 2, 3, 8, generator=generator("images"), dtype=torch.float64)


class Table(nn.Module):
    """A decoder whose next logits are a row of a table, by the last token and the place."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = table  # n v v

    def forward(self, tokens: Tensor, image: Encoded, mask: Tensor | None = None) -> Tensor:
        return torch.stack([self.table[i, t] for i, t in enumerate(tokens.unbind(1))], 1)


def table(seed: int, n: int = LENGTH) -> Tensor:
    return 2 * torch.randn(n, V, V, generator=generator("table", seed), dtype=torch.float64)


def steps(caption: tuple[int, ...], logits: Tensor) -> Tensor:
    """log p of each token of a caption after the start, padding and start being impossible"""
    logits = logits.clone()
    logits[..., [START, PAD]] = -torch.inf
    logp = logits.log_softmax(-1)
    pairs = itertools.pairwise(caption)
    return torch.stack([logp[i, before, after] for i, (before, after) in enumerate(pairs)])


def rows(out: tuple[Tensor, Tensor]) -> list[list[int]]:
    """The captions without padding, which is checked to be that"""
    ids, mask = out
    assert bool((ids[~mask] == PAD).all())
    captions = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
    assert max(map(len, captions)) == ids.shape[1]
    for caption in captions:
        assert caption[0] == START
        assert caption[-1] == END
        assert not {START, END, PAD} & set(caption[1:-1])
    return captions


OPTIONS: list[dict[str, Any]] = [
    {"method": "greedy"},
    {"method": "beam"},
    {"method": "beam", "num_beams": 3, "length_penalty": 0.0},
    {"method": "sample"},
    {"method": "sample", "temperature": 2.0, "top_k": 4, "top_p": 0.9},
]


def seeded(options: dict[str, Any], which: Iterator[int] | range) -> dict[str, Any]:
    if options["method"] != "sample":
        return options
    return {**options, "generator": [generator("sample", i) for i in which]}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", DECODERS)
def test_with_and_without_cache_and_alone_and_in_a_batch(
    kind: str, options: dict[str, Any]
) -> None:
    writer = model(kind)
    captions = rows(generate(writer, images(), **seeded(options, range(5))))
    anew = generate(writer, images(), use_cache=False, **seeded(options, range(5)))
    assert rows(anew) == captions
    for i in range(5):
        alone = generate(writer, images()[i : i + 1], **seeded(options, range(i, i + 1)))
        assert rows(alone) == [captions[i]]


@pytest.mark.parametrize("position", ["sincos", "rope"])
def test_positions_go_on_with_the_cache(position: str) -> None:
    writer = model(position=position)
    outs = [rows(generate(writer, images(), method="beam", use_cache=c)) for c in (True, False)]
    assert outs[0] == outs[1]


def test_one_generator_for_the_batch() -> None:
    writer, outs = model(), []
    for use_cache in (True, False):
        rng = torch.Generator().manual_seed(3)
        outs.append(
            rows(generate(writer, images(), method="sample", generator=rng, use_cache=use_cache))
        )
    assert outs[0] == outs[1]
    torch.manual_seed(3)
    assert rows(generate(writer, images(), method="sample")) == outs[0]  # torch's own


@pytest.mark.parametrize("kind", DECODERS)
def test_greedy_takes_the_likeliest_and_is_a_beam_of_one(kind: str) -> None:
    writer = model(kind)
    captions = rows(generate(writer, images()))
    assert len({tuple(caption) for caption in captions}) > 1
    assert rows(generate(writer, images(), method="beam", num_beams=1)) == captions
    assert rows(generate(writer, images(), method="sample", top_k=1)) == captions
    for image, caption in zip(images().split(1), captions, strict=True):
        seen = writer.encode_image(image)
        for n in range(1, len(caption)):
            logits = writer.decoder(torch.tensor([caption[:n]]), seen)[0, -1]
            logits[[START, PAD]] = -torch.inf
            assert caption[n] == (END if n == LENGTH - 1 else logits.argmax())


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_wide_beam_finds_what_exhaustive_search_finds(seed: int, penalty: float) -> None:
    logits, words = table(seed), [t for t in range(V) if t not in (START, END, PAD)]
    candidates = [
        (START, *middle, END) for n in range(4) for middle in itertools.product(words, repeat=n)
    ]
    best = max(candidates, key=lambda c: float(steps(c, logits).sum()) / (len(c) - 1) ** penalty)
    out = generate(
        Stand(Table(logits)),
        images(1),
        method="beam",
        num_beams=len(candidates) + 1,
        length_penalty=penalty,
        max_length=5,
        use_cache=False,
    )
    assert rows(out) == [list(best)]


def beam_by_lists(logits: Tensor, k: int, penalty: float, longest: int) -> list[int]:
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, (START,))]
    done: list[tuple[float, tuple[int, ...]]] = []
    while len(done) < k and live:
        nexts = []
        for score, caption in live:
            choices = [END] if len(caption) == longest - 1 else range(V)
            for token in choices:
                if token not in (START, PAD):
                    longer = (*caption, token)
                    nexts.append((score + float(steps(longer, logits)[-1]), longer))
        nexts.sort(reverse=True)
        ended = [c for c in nexts[:k] if c[1][-1] == END]
        done += [(score / (len(c) - 1) ** penalty, c) for score, c in ended]
        live = [c for c in nexts if c[1][-1] != END][:k]
    return list(max(done)[1])


@pytest.mark.parametrize("k", [1, 2, 3, 5, 9])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_beam_search_is_what_its_documentation_says(k: int, penalty: float) -> None:
    for seed in range(8):
        logits = table(seed)
        options = {"num_beams": k, "length_penalty": penalty, "use_cache": False}
        out = generate(Stand(Table(logits)), images(2), method="beam", **options)
        assert rows(out) == 2 * [beam_by_lists(logits, k, penalty, LENGTH)]


@pytest.mark.parametrize(("k", "penalty"), [(1, 1.0), (2, 1.0), (3, 0.0), (5, 2.0)])
def test_beam_search_is_that_of_transformers(k: int, penalty: float) -> None:
    transformers = pytest.importorskip("transformers")
    for seed in range(3):
        theirs = gpt(transformers, seed)

        class Gpt(nn.Module):
            def forward(self, ids: Tensor, image: Encoded, theirs: Any = theirs) -> Tensor:
                return theirs(ids).logits

        ours = Stand(Gpt())
        ours.context_length = 24
        options = {"num_beams": k, "length_penalty": penalty}
        (caption,) = rows(generate(ours, images(1), method="beam", use_cache=False, **options))
        expected = theirs.generate(
            torch.tensor([[START]]), max_length=24, do_sample=False, early_stopping=k > 1, **options
        )
        assert len(caption) < 24  # there it may return captions without an end
        assert caption == expected[0].tolist()


def gpt(transformers: Any, seed: int) -> Any:
    """A tiny GPT-2 that never writes start or padding, and ends before the context does."""
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=V,
        n_positions=24,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=START,
        eos_token_id=END,
        pad_token_id=PAD,
        tie_word_embeddings=False,
        initializer_range=0.5,
    )
    made = transformers.GPT2LMHeadModel(config).eval().double()
    made.lm_head = nn.Linear(16, V).double()
    with torch.no_grad():
        made.lm_head.weight.normal_(std=0.3)
        made.lm_head.bias.copy_(torch.tensor([-1e4, 2.0, -1e4, 0, 0, 0, 0]))
    return made


LOGITS = torch.tensor([1.0, 2.0, -1.0, 0.5, 1.5, 0.0], dtype=torch.float64)


def chances(temperature: float, top_k: int | None, top_p: float | None) -> list[float]:
    weights = [float(x) for x in (LOGITS / temperature).exp()]
    order = sorted(range(len(weights)), key=lambda i: -weights[i])
    kept = order[:top_k]
    total, seen, nucleus = sum(weights[i] for i in kept), 0.0, []
    for i in kept:
        nucleus.append(i)
        seen += weights[i] / total
        if top_p is not None and seen >= top_p:
            break
    norm = sum(weights[i] for i in nucleus)
    return [weights[i] / norm if i in nucleus else 0.0 for i in range(len(weights))]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 3, 99])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.5, 0.9, 1.0])
def test_probabilities_are_the_plain_formula(
    temperature: float, top_k: int | None, top_p: float | None
) -> None:
    out = probabilities(LOGITS.expand(2, -1), temperature, top_k, top_p)
    expected = torch.tensor([chances(temperature, top_k, top_p)] * 2, dtype=torch.float64)
    torch.testing.assert_close(out, expected)


def test_samples_are_distributed_as_their_probabilities() -> None:
    count, logits = 4000, table(0)
    options: dict[str, Any] = {"temperature": 1.5, "top_k": 4, "top_p": 0.95}
    ids, _ = generate(
        Stand(Table(logits)),
        images(1).expand(count, -1, -1, -1),
        method="sample",
        use_cache=False,
        generator=generator("draws"),
        **options,
    )
    allowed = logits[0, START].clone()
    allowed[[START, PAD]] = -torch.inf
    expected = probabilities(allowed[None], **options)[0]
    seen = ids[:, 1].bincount(minlength=V) / count
    assert bool((seen[expected == 0] == 0).all())
    error = (expected * (1 - expected) / count).sqrt()
    assert bool(((seen - expected).abs() <= 4 * error).all())


@pytest.mark.parametrize("method", METHODS)
def test_start_and_padding_are_never_written_and_the_end_comes_in_time(method: str) -> None:
    logits = torch.zeros(LENGTH, V, V, dtype=torch.float64)
    logits[..., [START, PAD]], logits[..., END] = 50.0, -50.0
    for length in range(2, LENGTH + 1):
        out = generate(
            Stand(Table(logits)), images(3), method=method, max_length=length, use_cache=False
        )
        assert {len(caption) for caption in rows(out)} == {length}


@pytest.mark.parametrize("method", METHODS)
def test_a_caption_may_say_nothing(method: str) -> None:
    logits = torch.zeros(LENGTH, V, V, dtype=torch.float64)
    logits[..., END] = 50.0
    out = generate(Stand(Table(logits)), images(2), method=method, use_cache=False)
    assert rows(out) == 2 * [[START, END]]


@pytest.mark.parametrize("method", METHODS)
def test_no_images_give_no_captions(method: str) -> None:
    ids, mask = generate(model(), images(0), method=method)
    assert len(ids) == len(mask) == 0


def test_padding_that_is_the_end_too_can_end() -> None:
    writer = model()
    writer.pad_id = END
    ids, mask = generate(writer, images())
    assert bool((ids[~mask] == END).all())
    for caption, kept in zip(ids, mask, strict=True):
        assert (caption[kept] == END).nonzero().tolist() == [[int(kept.sum()) - 1]]


def test_it_writes_in_evaluation_mode_and_leaves_the_models_own() -> None:
    writer = model(drop=0.9).train()
    outs = [rows(generate(writer, images())) for _ in range(2)]
    assert outs[0] == outs[1] == rows(generate(writer.eval(), images()))
    writer.train()
    generate(writer, images(1))
    assert writer.decoder.training


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"method": "bean"}, ValueError, "method 'bean' must be one of.*nearest: 'beam'"),
        ({"max_length": 7}, ValueError, r"max_length \(7\) must lie in \[2, 6\]"),
        ({"max_length": 1}, ValueError, r"max_length \(1\) must be at least 2"),
        ({"max_length": 3.0}, TypeError, r"max_length \(3.0\) must be an integer"),
        ({"top_k": 3}, ValueError, "top_k is an option of method='sample', but method is 'greedy'"),
        ({"num_beams": 3}, ValueError, "num_beams is an option of method='beam'"),
        ({"method": "beam", "temperature": 2.0}, ValueError, "temperature is an option of"),
        ({"method": "beam", "num_beams": 0}, ValueError, r"num_beams \(0\) must be at least 1"),
        ({"method": "beam", "length_penalty": "1"}, TypeError, "length_penalty .* a number"),
        ({"method": "beam", "length_penalty": torch.inf}, ValueError, "must be finite"),
        ({"method": "sample", "temperature": 0}, ValueError, r"temperature \(0\) must be positive"),
        ({"method": "sample", "top_k": 0}, ValueError, r"top_k \(0\) must be at least 1"),
        ({"method": "sample", "top_p": 1.5}, ValueError, r"top_p \(1.5\) must lie in"),
        ({"method": "sample", "top_p": 0.0}, ValueError, r"top_p \(0\) must be greater than 0"),
        (
            {"method": "sample", "generator": [generator(0)]},
            ValueError,
            "1 generators for 5 images",
        ),
    ],
)
def test_options_that_are_refused(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        generate(model(), images(), **options)
