"""What is compared: variants of one training recipe, the same seeds for each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zoo.engine.tracking import write_json

OWN_FLAGS = ("out", "resume", "seed")  # set for each cell


@dataclass(frozen=True)
class Variant:
    """One of the settings that are compared.

    Attributes:
        name: As tables and figures show it.
        flags: Flags of the recipe that make it, see `flag_words`; they win over the plan's.
        baselines: Baseline of the plan -> the variant that stands for it here, where each variant
            has one of its own: `{"constant": "constant@pre"}`.
    """

    name: str
    flags: Mapping[str, object] = field(default_factory=dict)
    baselines: Mapping[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name with everything but letters, digits and `._+-` replaced."""
        return re.sub(r"[^A-Za-z0-9._+-]+", "_", self.name).strip("._-")


@dataclass(frozen=True)
class Plan:
    """Variants times seeds; seed s of every variant is the recipe's `--seed s`.

    Attributes:
        recipe: Path of the training script; it must know --out, --resume auto and --seed.
        variants: What is compared, baselines included.
        seeds: Of every variant, so that differences can be taken seed by seed.
        flags: Flags of the recipe that all cells share.
        baselines: What the variants are compared with: names of variants, or names for which
            variants have one of their own.
        metric: Name of the number in the `metrics` of summary.json.
        higher_is_better: Whether a higher value of it is better.
        question: What the report is to answer; its title.
    """

    recipe: str | Path
    variants: Sequence[Variant]
    seeds: Sequence[int]
    flags: Mapping[str, object] = field(default_factory=dict)
    baselines: Sequence[str] = ()
    metric: str = "val/top1"
    higher_is_better: bool = True
    question: str = ""

    def __post_init__(self) -> None:
        names = self.names
        _check_unique("variants", names)
        _check_unique("seeds", list(self.seeds))
        _check_folders(self.variants)
        if len(names) < 2 or not self.seeds or min(self.seeds) < 0:
            raise ValueError(
                f"variants ({len(names)}) must be at least 2, a baseline and another, and seeds "
                f"({list(self.seeds)}) at least one, none negative"
            )
        _check_baselines(self)
        for flags in (self.flags, *(variant.flags for variant in self.variants)):
            _check_flags(flags)

    @property
    def names(self) -> list[str]:
        return [variant.name for variant in self.variants]

    def pairs(self) -> dict[str, list[tuple[str, str]]]:
        """Baseline -> the variants compared with it, each with the variant that stands for it."""
        names = self.names
        found = {}
        for baseline in self.baselines:
            each = [(one.name, one.baselines.get(baseline, baseline)) for one in self.variants]
            found[baseline] = [(name, own) for name, own in each if own in names and own != name]
        return found

    @property
    def comparisons(self) -> int:
        """How many differences are tested; a pair and its mirror image are one."""
        return len({frozenset(pair) for pairs in self.pairs().values() for pair in pairs})

    def to_json(self) -> dict[str, Any]:
        """As plan.json holds it."""
        content = {
            "recipe": str(self.recipe),
            "metric": self.metric,
            "higher_is_better": self.higher_is_better,
            "baselines": list(self.baselines),
            "seeds": list(self.seeds),
            "flags": dict(self.flags),
            "variants": {variant.name: dict(variant.flags) for variant in self.variants},
        }
        return json.loads(json.dumps(content, default=str))


@dataclass(frozen=True)
class Cell:
    """One training run of a plan."""

    variant: Variant
    seed: int
    out: Path

    @property
    def name(self) -> str:
        return f"{self.variant.name}, seed {self.seed}"

    @property
    def folder(self) -> Path:
        return self.out / "cells" / self.variant.folder / f"seed{self.seed}"

    @property
    def log(self) -> Path:
        return self.out / "logs" / f"{self.variant.folder}-seed{self.seed}.log"

    def summary(self) -> dict[str, Any] | None:
        """Its summary.json, or None where the run is not completed."""
        try:
            summary = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            return None
        return summary if summary.get("status") == "completed" else None


def cells_of(plan: Plan, out: Path) -> list[Cell]:
    """All cells, seed by seed, so that an unfinished plan has pairs to compare."""
    return [Cell(variant, seed, out) for seed in plan.seeds for variant in plan.variants]


def flag_words(flags: Mapping[str, object]) -> list[str]:
    """Command-line words for flat flags.

    >>> flag_words({"attention": "window", "ema": True, "img_size": (8, 8), "clip_grad": None})
    ['--attention', 'window', '--ema', '--img-size', '8', '8', '--clip-grad', 'None']

    False becomes `--no-name`, as tyro has it.
    """
    words: list[str] = []
    for name, value in flags.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{dashed}", *map(str, value)]
        else:
            words += [f"--{dashed}", str(value)]
    return words


def split_commas(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Makes several words of `a,b` where it is a value of one of the flags.

    >>> split_commas(["--kinds", "se,eca", "cbam", "--data", "folder:a,b"], ["kinds"])
    ['--kinds', 'se', 'eca', 'cbam', '--data', 'folder:a,b']
    """
    spread: list[str] = []
    inside = False
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            inside = flag[2:].replace("-", "_") in flags
            spread += [flag, *filter(None, value.split(","))] if inside and equals else [word]
        else:
            spread += filter(None, word.split(",")) if inside else [word]
    return spread


def keep_plan(plan: Plan, out: Path) -> None:
    """Writes OUT/plan.json, after checking that it continues the plan that is there.

    Seeds, variants and baselines may be added. Seeds that are added because a result was not yet
    significant make its p-value too small: decide on their number beforehand (`describe`).

    Raises:
        ValueError: another plan's cells are in the folder; all differences are named.
        FileExistsError: it holds cells without a plan.
    """
    path = out / "plan.json"
    if path.exists():
        changed = _differences(json.loads(path.read_text(encoding="utf-8")), plan.to_json())
        if changed:
            raise ValueError(
                f"{path} is another plan; only seeds, variants and baselines can be added to it: "
                + "; ".join(changed)
            )
    elif (out / "cells").exists():
        raise FileExistsError(f"{out / 'cells'} exists without {path}: choose a new folder")
    write_json(path, plan.to_json())


def _differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What forbids to continue the plan `old` as `new`."""
    found = []
    old, new = ({**plan, "recipe": Path(plan["recipe"]).name} for plan in (old, new))
    for name in ("recipe", "metric", "higher_is_better"):
        found += _changed(old, new, (name,))
    found += _changed(old["flags"], new["flags"], {**old["flags"], **new["flags"]}, "flag ")
    for many, one in (("seeds", "seed"), ("baselines", "baseline"), ("variants", "variant")):
        found += [f"{one} {item} is left out" for item in old[many] if item not in new[many]]
    for name in old["variants"].keys() & new["variants"].keys():
        before, now = old["variants"][name], new["variants"][name]
        found += _changed(before, now, {**before, **now}, f"variant {name}, flag ")
    return found


def _changed(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Any, prefix: str = ""
) -> list[str]:
    def shown(flags: Mapping[str, Any], name: str) -> Any:
        return flags.get(name, "not given")

    return [
        f"{prefix}{name}: {shown(old, name)} -> {shown(new, name)}"
        for name in names
        if shown(old, name) != shown(new, name)
    ]


def _check_unique(what: str, items: list[Any]) -> None:
    twice = sorted({item for item in items if items.count(item) > 1})
    if twice:
        raise ValueError(f"{what} must be unique; given twice: {', '.join(map(str, twice))}")


def _check_baselines(plan: Plan) -> None:
    known = {*plan.names, *(name for each in plan.variants for name in each.baselines)}
    unknown = [name for name in plan.baselines if name not in known]
    if unknown or not plan.baselines:
        raise ValueError(
            f"baselines ({', '.join(unknown) or 'none'}) must be among the variants: "
            f"{', '.join(plan.names)}"
        )
    for variant in plan.variants:
        for baseline, own in variant.baselines.items():
            if baseline not in plan.baselines or own not in plan.names:
                raise ValueError(
                    f"variant {variant.name!r} has {own!r} for the baseline {baseline!r}: that "
                    f"must be one of {', '.join(plan.baselines)}, and {own!r} a variant"
                )


def _check_folders(variants: Sequence[Variant]) -> None:
    """Different names must be different folders, on case-insensitive file systems too."""
    seen: dict[str, str] = {}
    for variant in variants:
        folder = variant.folder.casefold()
        if not folder:
            raise ValueError(f"the variant name {variant.name!r} has no letter or digit")
        if folder in seen:
            raise ValueError(
                f"the variants {seen[folder]!r} and {variant.name!r} would share the folder "
                f"{variant.folder}: rename one"
            )
        seen[folder] = variant.name


def _check_flags(flags: Mapping[str, object]) -> None:
    own = [name for name in flags if name.replace("-", "_") in OWN_FLAGS]
    if own:
        raise ValueError(f"flags ({', '.join(own)}) are set for each cell: leave them out")
