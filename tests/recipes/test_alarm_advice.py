"""What alarms advise are options that the recipes have."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields

from recipes import train_cnn, train_crossmodal, train_vit
from zoo.diagnostics import advice


def test_every_flag_that_is_named_exists() -> None:
    recipes = (train_vit, train_cnn, train_crossmodal)
    there = {field.name for recipe in recipes for field in fields(recipe.Config)}
    named = set(re.findall(r"--([a-z][a-z-]*)", inspect.getsource(advice)))
    assert {"temperature", "qk-norm", "fusion-norm", "insert"} <= named
    assert {flag.replace("-", "_") for flag in named} <= there
