"""Caption scores against sacrebleu called by hand, and token counts against a loop."""

from __future__ import annotations

import math
import sys
from collections import Counter

import pytest

from crossmodal.scores import by_length, caption_scores, sacrebleu_metrics

sacrebleu = pytest.importorskip("sacrebleu")

TEXTS = ["a red apple on a table", "two dogs run fast in snow", "cat", "the moon is full tonight"]
RIGHT = [
    ["a red apple on the table", "an apple on a table"],
    ["two dogs run in the snow"],
    ["cat"],
    ["a full moon", "the full moon tonight", "the moon is full tonight"],
]


def bleu_by_hand(texts: list[str], references: list[list[str]]) -> float:
    """Papineni's corpus BLEU-4 of words between spaces; the shortest closest reference counts."""
    hits, totals, length, closest = Counter(), Counter(), 0, 0
    for text, own in zip(texts, references, strict=True):
        words, others = text.split(), [reference.split() for reference in own]
        length += len(words)
        closest += min((abs(len(other) - len(words)), len(other)) for other in others)[1]
        for n in range(1, 5):
            grams = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
            most: Counter = Counter()
            for other in others:
                most |= Counter(tuple(other[i : i + n]) for i in range(len(other) - n + 1))
            hits[n] += sum((grams & most).values())
            totals[n] += sum(grams.values())
    mean = sum(math.log(hits[n] / totals[n]) for n in range(1, 5)) / 4
    return 100 * math.exp(mean + min(0, 1 - closest / length))


def test_bleu_is_that_of_the_corpus_with_all_references():
    found = caption_scores(TEXTS, RIGHT)
    assert found["bleu4"] == pytest.approx(bleu_by_hand(TEXTS, RIGHT))
    assert found["exact"] == 50
    streams = [[own[i] if i < len(own) else None for own in RIGHT] for i in range(3)]
    assert found["chrf"] == pytest.approx(sacrebleu.corpus_chrf(TEXTS, streams).score)
    only_first = caption_scores(TEXTS, [own[:1] for own in RIGHT])
    assert only_first["bleu4"] < found["bleu4"], "more references, more that is right"


def test_perfect_and_hopeless_captions():
    right = [["one two three four"], ["five six seven eight nine"]]
    same = caption_scores([own[0] for own in right], right)
    assert same == pytest.approx({"bleu4": 100, "chrf": 100, "exact": 100})
    assert caption_scores(["", "q"], right) == {"bleu4": 0, "chrf": 0, "exact": 0}


def test_case_spaces_and_composition_do_not_count_but_words_do():
    composed, apart = "caf\u00e9 by the sea shore", "Cafe\u0301  BY the\tsea shore "
    assert caption_scores([apart], [[composed]]) == pytest.approx(
        {"bleu4": 100, "chrf": 100, "exact": 100}
    )
    assert caption_scores(["cafe by the sea shore"], [[composed]])["exact"] == 0


@pytest.mark.parametrize("language", ["zh", "ja", "zh-Hant", "JA"])
def test_chinese_and_japanese_are_scored_by_character(language):
    texts, right = ["红色的苹果在桌上"], [["红色的苹果在桌子上"]]
    assert caption_scores(texts, right)["bleu4"] == 0, "one word, and a wrong one"
    found = caption_scores(texts, right, language=language)["bleu4"]
    spaced = [[" ".join(own[0])] for own in right]
    assert found == pytest.approx(bleu_by_hand([" ".join(texts[0])], spaced))
    (row,) = by_length(texts, right, lengths=(1, 5), language=language)
    assert (row.shortest, row.longest) == (5, None)
    (row,) = by_length(texts, right, lengths=(1, 5), language="de")
    assert (row.shortest, row.longest) == (1, 4)


def test_scores_by_length_are_those_of_the_captions_of_that_length():
    rows = by_length(TEXTS, RIGHT, lengths=(1, 2, 4, 6))
    assert [(row.shortest, row.longest, row.n) for row in rows] == [
        (1, 1, 1), (2, 3, 1), (6, None, 2),
    ]  # fmt: skip
    whole = caption_scores(TEXTS[:2], RIGHT[:2])
    assert (rows[2].bleu, rows[2].chrf, rows[2].exact) == pytest.approx(tuple(whole.values()))
    assert (rows[0].bleu, rows[0].exact) == pytest.approx((100, 100)), "a right one of one word"
    assert caption_scores(TEXTS[2:3], RIGHT[2:3])["bleu4"] == 0, "which has no four words"
    assert by_length(TEXTS, RIGHT, lengths=(2, 9))[0].n == 3, "shorter ones are left out"
    assert sum(row.n for row in by_length(TEXTS, RIGHT)) == 4


def test_what_cannot_be_scored_is_named():
    with pytest.raises(ValueError, match=r"hypotheses \(1\) and references \(2\)"):
        caption_scores(["a"], [["a"], ["b"]])
    with pytest.raises(ValueError, match=r"hypotheses \(0\)"):
        caption_scores([], [])
    with pytest.raises(ValueError, match=r"references of caption 1 \(\[\]\)"):
        caption_scores(["a", "b"], [["a"], []])
    with pytest.raises(ValueError, match=r"references of caption 0 \('a'\) must be a list"):
        caption_scores(["a"], ["a"])
    for wrong in ((), (3, 2), (1, 1), (-1, 2)):
        with pytest.raises(ValueError, match=r"lengths .* must rise"):
            by_length(["a"], [["a"]], lengths=wrong)


def test_a_missing_sacrebleu_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(ImportError, match=r"pip install 'attention-zoo\[captions\]'"):
        caption_scores(["a"], [["a"]])
    with pytest.raises(ImportError, match="sacrebleu"):
        sacrebleu_metrics()
