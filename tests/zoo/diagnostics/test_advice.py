"""What alarms say follows what is known of the run: its options, its recipe, its dropout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from made_looks import EVEN, OPEN, B, H, N, look, one_key

from zoo.diagnostics.alarms import Alarm, Alarms


def twice(alarms: Alarms, step: int = 80, **seen) -> list[Alarm]:
    return [*alarms.check(step, **seen), *alarms.check(step, **seen)]


DEFAULTS = {
    "model": "vit_micro_patch2_8",
    "lr": 2e-3,
    "warmup_epochs": None,
    "clip_grad": 1.0,
    "attention": None,
    "qk_norm": None,
    "temperature": "1",
    "attn_drop": None,
    "entropy_bonus": 0.0,
}
HOT = {"layers": {"a": look(one_key(0.97, torch.arange(N)), 2e3)}, "training": {"loss": 1.0}}


def told(seen=HOT, without: str = "", **flags) -> tuple[str, str]:
    """All causes and all remedies."""
    given = {name: value for name, value in (DEFAULTS | flags).items() if name != without}
    found = twice(Alarms(100, flags=given, defaults=DEFAULTS), **seen)
    assert found
    return tuple(
        " | ".join(text for alarm in found for text in getattr(alarm, name))
        for name in ("causes", "remedies")
    )


@pytest.mark.parametrize(
    ("cause", "remedy", "contrary", "so"),
    [
        ("not scaled", "--attention full", {"attention": "full"}, {"attention": "dot"}),
        ("not scaled", "--attention full", {}, {"model": "local-dir:runs/a/model"}),
        ("", "--clip-grad 1", {}, {"clip_grad": None}),
        ("bounds queries", "--qk-norm True", {"qk_norm": True}, {"qk_norm": False}),
        (
            "temperature is too low",
            "--temperature 2:1",
            {"temperature": "2:1"},
            {"temperature": "0.1"},
        ),
        ("", "--entropy-bonus 0.01", {"entropy_bonus": 0.01}, {}),
    ],
)
def test_what_the_options_contradict_is_left_out(cause, remedy, contrary, so):
    causes, remedies = told(**so)
    assert cause in causes
    assert remedy in remedies
    causes, remedies = told(**contrary)
    assert not cause or cause not in causes
    assert remedy not in remedies


def test_gates_are_told_of_insertions_only_where_there_are_some():
    seen = {"gates": {"a": replace(OPEN, dead=0.7)}}
    assert "--insert" in told(seen, insert=(("se@standard",),))[1]
    assert "--insert" not in told(seen, insert=())[1]
    causes, _ = told(seen, insert=(("se@standard:init=identity",),))
    assert "started shut" not in causes
    assert "relu" not in causes


def test_options_that_a_recipe_lacks_are_not_advised():
    causes, remedies = told(without="qk_norm")
    assert "bounds queries" in causes
    assert "--qk-norm" not in remedies


def test_a_learning_rate_far_above_the_recipes_comes_first():
    high = Alarms(100, flags=DEFAULTS | {"lr": 1.0}, defaults=DEFAULTS)
    found = twice(high, **HOT)
    hot = [alarm for alarm in found if alarm.kind in ("stiff", "large_logits")]
    assert len(hot) == 2
    for alarm in hot:
        assert "1 is 500 times the recipe's 0.002" in alarm.causes[0]
        assert alarm.remedies[0] == "--lr 0.002"
    assert "times the recipe's" not in told(lr=4e-3)[0]
    causes, remedies = told({"layers": {"a": EVEN}}, lr=1.0)
    assert causes.startswith("the learning rate is too high")
    assert "a higher --lr" not in remedies


def test_the_order_of_causes_follows_what_is_known():
    """First the range of the values, then the regularisation, which is named where it is high."""
    for dropout, named in ((0.1, False), (0.5, True)):
        seen = {"a": look(torch.full((B, H, N, N), 1 / N), 0.02)}
        (alarm,) = twice(Alarms(100, attention_dropout=dropout), layers=seen)
        assert "divided by too much (they lie in -0.02 to 0.02)" in alarm.causes[0]
        assert (alarm.causes[1] == "attention dropout (0.5) is high") is named
        assert ("--attn-drop 0.1" in alarm.remedies) is named
