"""What alarms advise are options that the recipes have."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

import pytest
import torch

from recipes import train_cnn, train_crossmodal, train_vit
from zoo.diagnostics import advice
from zoo.diagnostics.alarms import Alarms
from zoo.diagnostics.looks import look_at_layer


def test_every_flag_that_is_named_exists() -> None:
    recipes = (train_vit, train_cnn, train_crossmodal)
    there = {field.name for recipe in recipes for field in fields(recipe.Config)}
    named = set(re.findall(r"--([a-z][a-z-]*)", inspect.getsource(advice)))
    assert {"temperature", "qk-norm", "fusion-norm", "insert"} <= named
    assert {flag.replace("-", "_") for flag in named} <= there


@pytest.mark.parametrize("recipe", [train_vit, train_cnn, train_crossmodal])
def test_a_run_as_it_is_is_told_nothing_that_it_has_or_lacks(recipe) -> None:
    flags = recipe.Config().to_json()
    weights = torch.eye(8).expand(1, 2, 8, 8)
    scores = torch.tensor([-2e4, 2e4]).expand(1, 2, 8, 2)
    alarms = Alarms(100, flags=flags, defaults=flags)
    given = {"layers": {"a": look_at_layer(weights, logits=scores)}, "training": {"loss": 1.0}}
    found = [*alarms.check(80, **given), *alarms.check(90, **given)]
    assert {"stiff", "large_logits", "nan_ahead"} <= {alarm.kind for alarm in found}
    for alarm in found:
        text = str(alarm)
        assert "--lr" in text
        for wrong in ("--clip-grad", "not clipped", "--attention full", "not scaled"):
            assert wrong not in text
        named = re.findall(r"--([a-z][a-z-]*)", text)
        assert {name.replace("-", "_") for name in named} <= flags.keys()
