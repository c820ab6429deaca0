"""How good generated captions are: BLEU and chrF by sacrebleu, exact matches.

Case, kind of white space and the way a character is composed in Unicode do not count, as in COCO's
scores. Where a tokenizer does not give a text back as it was (CLIP's puts spaces around signs), the
references should have gone through it, too.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

BY_CHARACTER = ("ja", "zh")  # languages whose words no spaces divide
LENGTHS = (1, 2, 3, 4, 6, 9, 13)

References = Sequence[Sequence[str]]


def caption_scores(
    hypotheses: Sequence[str], references: References, *, language: str | None = None
) -> dict[str, float]:
    """Scores of a corpus of captions against one or several references each.

    Args:
        hypotheses: Generated captions.
        references: Right captions of each.
        language: Code such as `de` or `zh-Hant`: Chinese and Japanese are scored by character, all
            others by the words of sacrebleu's `13a`.

    Returns:
        `bleu4` and `chrf` of the corpus (arXiv 1804.08771; chrF is the one to read where captions
        have fewer than four words) and `exact`, the share equal to a reference; all in percent.

    Raises:
        ImportError: sacrebleu is missing.
        ValueError: no captions, other numbers of references, a caption without a reference.
    """
    texts, known = _checked(hypotheses, references)
    return {
        "bleu4": _bleu(texts, known, language),
        "chrf": sacrebleu_metrics().CHRF().corpus_score(texts, _streams(known)).score,
        "exact": _exact(texts, known),
    }


class LengthBin(NamedTuple):
    """Captions whose first reference has from `shortest` to `longest` words (None: no limit).

    Attributes:
        n: Captions.
        bleu: Of n-grams up to four words, or up to the longest reference of the bin if that is
            shorter: BLEU-4 would be 0 for any caption of three words.
        chrf, exact: As `caption_scores` gives them.
    """

    shortest: int
    longest: int | None
    n: int
    bleu: float
    chrf: float
    exact: float


def by_length(
    hypotheses: Sequence[str],
    references: References,
    *,
    lengths: Sequence[int] = LENGTHS,
    language: str | None = None,
) -> list[LengthBin]:
    """Scores as a function of the length of the reference.

    Args:
        hypotheses, references, language: As for `caption_scores`.
        lengths: Shortest reference of each bin, in words (characters where the language is scored
            by them), rising; the last bin has no upper limit, and references that are shorter than
            the first are in none.

    Returns:
        The bins that have captions.
    """
    starts = list(lengths)
    if not starts or starts != sorted({*starts}) or starts[0] < 0:
        raise ValueError(f"lengths ({starts}) must rise from 0 or more")
    texts, known = _checked(hypotheses, references)
    words = _lengths([own[0] for own in known], language)
    bins = []
    for start, stop in zip_longest(starts, starts[1:]):
        inside = [i for i, n in enumerate(words) if start <= n and (stop is None or n < stop)]
        if inside:
            part = [texts[i] for i in inside], [known[i] for i in inside]
            bins.append(_length_bin(start, stop, *part, language))
    return bins


def _checked(
    hypotheses: Sequence[str], references: References
) -> tuple[list[str], list[list[str]]]:
    """Both, as they are compared."""
    if not hypotheses or len(hypotheses) != len(references):
        raise ValueError(
            f"hypotheses ({len(hypotheses)}) and references ({len(references)}) must be "
            "equally many, one or more"
        )
    for index, own in enumerate(references):
        if isinstance(own, str) or not own:
            raise ValueError(f"references of caption {index} ({own!r}) must be a list of texts")
    return [_plain(text) for text in hypotheses], [[_plain(x) for x in own] for own in references]


def _plain(text: str) -> str:
    return " ".join(unicodedata.normalize("NFC", text).lower().split())


def _length_bin(
    start: int,
    stop: int | None,
    texts: list[str],
    references: list[list[str]],
    language: str | None,
) -> LengthBin:
    longest = max(_lengths([text for own in references for text in own], language))
    return LengthBin(
        start,
        None if stop is None else stop - 1,
        len(texts),
        _bleu(texts, references, language, order=max(1, min(4, longest))),
        sacrebleu_metrics().CHRF().corpus_score(texts, _streams(references)).score,
        _exact(texts, references),
    )


def _bleu(
    texts: list[str], references: list[list[str]], language: str | None, order: int = 4
) -> float:
    # force: or sacrebleu warns where many captions end in a full stop that stands apart.
    bleu = sacrebleu_metrics().BLEU(tokenize=_tokenize(language), max_ngram_order=order, force=True)
    return bleu.corpus_score(texts, _streams(references)).score


def _exact(texts: list[str], references: list[list[str]]) -> float:
    hits = sum(text in own for text, own in zip(texts, references, strict=True))
    return 100 * hits / len(texts)


def _lengths(texts: list[str], language: str | None) -> list[int]:
    """Words of each text, or characters, as BLEU counts them."""
    tokenizer = sacrebleu_metrics().BLEU(tokenize=_tokenize(language)).tokenizer
    return [len(tokenizer(text).split()) for text in texts]


def _tokenize(language: str | None) -> str:
    return "char" if language and language.lower().split("-")[0] in BY_CHARACTER else "13a"


def _streams(references: list[list[str]]) -> list[tuple[str | None, ...]]:
    """First references, second references, ...; None where a caption has no more."""
    return list(zip_longest(*references))


def sacrebleu_metrics() -> Any:
    """sacrebleu's `metrics`, or an error that says how to install it."""
    try:
        from sacrebleu import metrics
    except ImportError as error:
        raise ImportError(
            "caption scores need sacrebleu: pip install 'attention-zoo[captions]'"
        ) from error
    return metrics
