"""The commands that belong to a run: to repeat it, to continue it, and to use what it trained.

They come from config.json, and so are the same whenever a page is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zoo.engine.launch import launch_words

Config = Mapping[str, Any]

PLACES = ("out", "resume")  # options that say where a run is


def commands(config: Config, folder: Path) -> dict[str, str]:
    """What for -> the command line; nothing where config.json does not tell the recipe.

    Args:
        config: The content of config.json.
        folder: The run folder, as the commands shall name it.
    """
    recipe = config.get("recipe")
    if not recipe:
        return {}
    script, words = _script(config), _own_words(config)
    launch, out = launcher(config), str(folder)
    pairs = recipe == "train_crossmodal"
    evaluate = _beside(script, "evaluate_crossmodal" if pairs else "evaluate")
    found = {
        "Repeat": [*launch, script, *words, "--out", f"{out}-again"],
        "Resume": [*launch, script, *words, "--out", out, "--resume", "auto"],
        "Evaluate": [*launch, evaluate, "--model", out],
    }
    if not pairs:
        found["Predict"] = ["python", _beside(script, "predict"), "IMAGES", "--model", out]
    explore = ["python", _beside(script, "inspect_attention"), "--model", out]
    found["Explore its attention"] = [*explore, "--out", f"{out}-attention"]
    return {what: shlex.join(words) for what, words in found.items()}


def launcher(config: Config) -> list[str]:
    """What a run was started with, as `launch_words` spells it."""
    hardware = config.get("hardware") or {}
    return launch_words(
        int(config.get("processes") or 1),
        hardware.get("precision") or "no",
        cpu=hardware.get("device") == "cpu",
    )


def differing(config: Config) -> dict[str, Any] | None:
    """The options that are not as they are by default, but for where the run is.

    Where config.json has no `defaults`, those that the command line names; None where it tells
    neither.
    """
    options = {k: v for k, v in (config.get("options") or {}).items() if k not in PLACES}
    defaults = config.get("defaults")
    if defaults is not None:
        return {k: v for k, v in options.items() if v != defaults.get(k)}
    if not _called(config):
        return None
    given = {_option(word) for word in config["command"]}
    return {k: v for k, v in options.items() if k in given}


def _option(word: str) -> str | None:
    """The option that a word of a command line sets.

    >>> _option("--img-size=32"), _option("--no-ema"), _option("32")
    ('img_size', 'ema', None)
    """
    if not word.startswith("--"):
        return None
    return word[2:].partition("=")[0].replace("-", "_").removeprefix("no_")


def _script(config: Config) -> str:
    """The recipe's path as it was called."""
    words = config.get("command") or [""]
    return words[0] if _called(config) else f"recipes/{config['recipe']}.py"


def _called(config: Config) -> bool:
    """Whether the recipe was called by itself, and not by another program."""
    words = config.get("command") or [""]
    return Path(words[0]).stem == config.get("recipe")


def _beside(script: str, name: str) -> str:
    return str(Path(script).with_name(f"{name}.py"))


def _own_words(config: Config) -> list[str]:
    """The flags of the run without those that name its folder."""
    if not _called(config):
        options = differing(config)
        if options is None:
            options = {k: v for k, v in (config.get("options") or {}).items() if k not in PLACES}
        return [word for name, value in options.items() for word in flag(name, value)]
    words: list[str] = []
    skip = False
    for word in config["command"][1:]:
        if skip or word.split("=")[0] in ("--out", "--resume"):
            skip = not skip and "=" not in word
        else:
            words.append(word)
    return words


def flag(name: str, value: Any) -> list[str]:
    """An option as words of a command line; none for what is not set.

    >>> flag("img_size", [32, 64]), flag("ema", True), flag("gates", False), flag("out", None)
    (['--img-size', '32', '64'], ['--ema'], ['--no-gates'], [])
    """
    spelled = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{spelled}" if value else f"--no-{spelled}"]
    if isinstance(value, Mapping):
        return [f"--{spelled}", *(str(word) for pair in value.items() for word in pair)]
    many = isinstance(value, Sequence) and not isinstance(value, str)
    return [f"--{spelled}", *(map(str, value) if many else [str(value)])]
