"""Modules into a CNN at named sites, in place, and out of it again.

>>> insert(model, "se@standard", "eca@post:stages=3,4")  # doctest: +SKIP

A block that gets a module keeps its class as a base: a subclass of the same name has the forward of
the old one, with slots in it (`vision.blocks`). Everything else stays: names and values of the
state dict, hooks, `isinstance`, `copy.deepcopy`, methods of the model. Removal puts the old class
back. What a block's forward reads from the block (a drop rate, a flag for gradient checkpointing)
is fixed at insertion, its training flag excepted, and so are containers inside it that hide the
site: hooks on those no longer run. A model with insertions cannot be pickled whole;
its state dict can be saved as always.

Shapes: b batch, c y x channels/rows/columns.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from vision.anatomy import read, walks_children
from vision.places import Block, Host, Place, SiteTable
from vision.slots import SITES, FromIdentity, Slot, kind_of, slots
from vision.splicing import (
    Installed,
    forwards,
    has_slots,
    install,
    slot_at,
    uninstall,
    without_slots,
)
from zoo.card import ModelCard
from zoo.registry import register_edit

INITS = ("paper", "identity")

DRAWING = """\
      stem                        once, before the first stage
        |
        +----------------.
        |                |
       pre               |
        |                |
  conv, norm, act        |        a block without an add has no shortcut,
        |           downsample    and no place after the add
      conv1         or nothing
        |                |
  conv, norm, act        |
        |            identity
      conv2              |
        |                |
    conv, norm           |        SE of the host's own belongs to
        |                |        its branch
      conv3              |
        |                |
    standard             |
        |                |
 layer scale, drop path  |
        |                |
        '------ add -----'
                 |
             post_add
                 |
                act
                 |
               post
                 |
          between_stages          after every stage but the last"""


@dataclass(frozen=True)
class Insertion:
    """What to put where.

    Attributes:
        kind: One of `vision.channel_attention.list_channel_attention()`.
        site: One of `SITES`, or the name of a module with a dot in it, after whose output the new
            module stands: `layer3.2.conv2`, and `.layer3` for one at the top.
        stages: "all", or numbers from 1. Blocks without the site go without, as those of an
            inverted residual without shortcut do with `identity`; but each stage that is named,
            and for "all" at least one, must have the site.
        every: 2 for every second block of a stage, counted from its first.
        init: "paper", or "identity" to leave the host's outputs as they are at first.
        options: Those of the kind.
    """

    kind: str
    site: str
    stages: str | tuple[int, ...] = "all"
    every: int = 1
    init: str = "paper"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not re.fullmatch(r"[^\s@,=]+", self.kind):
            raise ValueError(f"kind must be a name, not {self.kind!r}")
        if self.site not in SITES and "." not in self.site:
            raise ValueError(_unknown_site(self.site))
        object.__setattr__(self, "stages", _checked_stages(self.stages))
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(f"every must be a positive integer, not {self.every!r}")
        if self.init not in INITS:
            raise ValueError(f"init must be one of {', '.join(INITS)}, not {self.init!r}")
        if self.is_path and (self.stages != "all" or self.every != 1):
            raise ValueError(f"site {self.site!r} is one module: it takes no stages and no every")
        for name, value in self.options.items():
            if not isinstance(value, bool | int | float | str | None) or _value(
                _text(value)
            ) not in (value,):
                raise ValueError(f"option {name}={value!r} must be a number, a word or None")
        object.__setattr__(self, "options", dict(self.options))

    @property
    def is_path(self) -> bool:
        return self.site not in SITES

    @classmethod
    def parse(cls, text: str) -> Insertion:
        """`KIND@SITE[:key=value,...]`, as in `se@standard:stages=3,4,rd_ratio=0.25`.

        Keys are `stages`, `every`, `init` and options of the kind; numbers that follow `stages=`
        belong to it up to the next key.
        """
        kind, at, rest = text.partition("@")
        site, colon, tail = rest.partition(":")
        if not (kind and at and site) or (colon and not tail):
            raise ValueError(
                f"insertion {text!r} must look like KIND@SITE or KIND@SITE:key=value,..., "
                f"as in se@standard:stages=3,4"
            )
        values = _settings(text, tail) if tail else {}
        known = {key: values.pop(key) for key in ("stages", "every", "init") if key in values}
        return cls(kind, site, options=values, **known)

    def __str__(self) -> str:
        settings = []
        if isinstance(self.stages, tuple):
            settings.append(f"stages={','.join(map(str, self.stages))}")
        settings += [f"every={self.every}"] if self.every != 1 else []
        settings += [f"init={self.init}"] if self.init != "paper" else []
        settings += [f"{name}={_text(value)}" for name, value in self.options.items()]
        return f"{self.kind}@{self.site}" + (f":{','.join(settings)}" if settings else "")

    def __hash__(self) -> int:
        return hash(str(self))


def _unknown_site(site: str) -> str:
    near = difflib.get_close_matches(site, SITES, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return (
        f"unknown site {site!r}; {hint}sites: {', '.join(SITES)}; or a module's name with a dot "
        f"in it (layer3.2.conv2; .layer3), for the place after its output"
    )


def _checked_stages(stages: Any) -> str | tuple[int, ...]:
    if stages == "all":
        return "all"
    numbers = (stages,) if isinstance(stages, int) else stages
    valid = isinstance(numbers, tuple | list) and len(numbers) > 0
    if not valid or not all(type(n) is int and n > 0 for n in numbers):
        raise ValueError(f"stages must be 'all' or numbers from 1, not {stages!r}")
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"stages names a stage twice: {list(numbers)}")
    return tuple(sorted(numbers))


def _settings(text: str, tail: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    key = ""
    for part in tail.split(","):
        name, equals, value = part.partition("=")
        if equals and name and value:
            key = name.strip()
            if key in values:
                raise ValueError(f"insertion {text!r} sets {key} twice")
            values[key] = _value(value.strip())
            if key == "stages" and values[key] != "all":
                values[key] = (values[key],)
        elif key == "stages" and not equals and isinstance(values["stages"], tuple):
            values["stages"] += (_value(part.strip()),)
        else:
            raise ValueError(f"insertion {text!r}: {part!r} must be key=value")
    return values


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for read_number in (int, float):
        try:
            return read_number(text)
        except ValueError:
            pass
    return text


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool | None) else str(value)


def insertion_sites(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> SiteTable:
    """The places of a CNN where a module can go; prints as a table.

    Args:
        model: Any CNN: ours, timm's, torchvision's, your own.
        img_size: Of the image with which it is looked at; by default what the model says, or 224.
    """
    _refuse_wrapped(model)
    with without_slots(model):
        return read(model, img_size).table()


def insert(
    model: nn.Module,
    *insertions: Insertion | str,
    img_size: int | tuple[int, int] | None = None,
) -> list[str]:
    """Puts modules into a CNN, in place; several at one site run in the order given.

    Args:
        model: Not yet compiled or wrapped for parallel training.
        insertions: As objects or as text, `se@standard:stages=3,4`.
        img_size: As for `insertion_sites`.

    Returns:
        The names of the new modules, in order.

    Raises:
        ValueError: A site or a stage that the model does not have, insertions in conflict, a model
            that cannot be followed; nothing is changed then.
    """
    _refuse_wrapped(model)
    wanted = [_insertion(i) for i in insertions]
    _refuse_inner_card(model)
    with without_slots(model) as installed:
        host = read(model, img_size)
        plan = [(place, insertion) for insertion in wanted for place in _chosen(host, insertion)]
        _refuse_conflicts(model, installed, plan)
        made = [(place, _built(model, place, insertion)) for place, insertion in plan]
        edited = forwards(host, installed, [place for place, _ in made])
    names = []
    for owner, forward in edited.items():
        install(model.get_submodule(owner), forward)
    for place, module in made:
        slot = slot_at(model, place)
        names.append(f"{_path(place)}.{len(slot)}")
        slot.append(module)
    model._insertions = (*insertions_of(model), *wanted)  # type: ignore[assignment]
    _note(model)
    return names


@register_edit("insertions")
def insert_listed(model: nn.Module, insertions: Sequence[str]) -> None:
    """What `zoo.create_model(name, insertions=[...])` does to the model it has built."""
    if isinstance(insertions, str) or not all(isinstance(i, str | Insertion) for i in insertions):
        raise TypeError(f"insertions must be a list of texts, not {insertions!r}")
    insert(model, *insertions)


def remove_insertions(model: nn.Module) -> None:
    """Takes all inserted modules out again; the model is as it was, class by class."""
    _refuse_wrapped(model, "remove insertions")
    for module in list(model.modules()):
        if has_slots(module):
            uninstall(module)
    for _, slot in slots(model):
        slot._modules.clear()
    for module in model.modules():
        if module.__dict__.pop("_insertions", None) is not None:
            _note(module)


def inserted(model: nn.Module) -> dict[str, nn.Module]:
    """The inserted modules by name, without the wrapper of `init="identity"`."""
    found: dict[str, nn.Module] = {}
    for name, slot in slots(model):
        for index, module in enumerate(slot):
            wrapped = isinstance(module, FromIdentity)
            path = f"{name}.{index}.module" if wrapped else f"{name}.{index}"
            found[path] = model.get_submodule(path)
    return found


def insertions_of(model: nn.Module) -> tuple[Insertion, ...]:
    """What `insert` has put into a model, in order."""
    return tuple(model.__dict__.get("_insertions", ()))


def _insertion(given: Any) -> Insertion:
    if isinstance(given, str):
        return Insertion.parse(given)
    if not isinstance(given, Insertion):
        raise TypeError(f"an insertion is an Insertion or a text such as se@pre, not {given!r}")
    return given


def _refuse_inner_card(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if name and isinstance(getattr(module, "card", None), ModelCard):
            raise ValueError(
                f"insert into {name} itself: it has a card, which must tell its insertions"
            )


def _note(model: nn.Module) -> None:
    """The card tells the insertions, so that a saved model can be made again."""
    card = getattr(model, "card", None)
    if isinstance(card, ModelCard):
        options = {name: value for name, value in card.options.items() if name != "insertions"}
        texts = [str(insertion) for insertion in insertions_of(model)]
        told = {**options, "insertions": texts} if texts else options
        model.card = replace(card, options=told)  # type: ignore[assignment]


def _refuse_wrapped(model: nn.Module, what: str = "insert") -> None:
    wrappers = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule"}
    names = {kind.__name__ for kind in type(model).__mro__}
    if names & wrappers:
        raise ValueError(f"{what} before the model is wrapped in {sorted(names & wrappers)[0]}")
    compiled = any(m._compiled_call_impl is not None for m in model.modules())
    if "OptimizedModule" in names or compiled:
        raise ValueError(f"{what} first, and compile the model afterwards")


# From an insertion to places


def _chosen(host: Host, insertion: Insertion) -> list[Place]:
    if insertion.is_path:
        return [_after_module(host, insertion.site)]
    if not host.blocks:
        raise ValueError(_no_place(host, insertion, []))
    stages = _stages(host, insertion)
    if insertion.site == "stem" or insertion.site == "between_stages":
        found = [p for p in host.ends if p.site == insertion.site and p.stage in stages]
    else:
        _refuse_gaps(host, insertion)
        blocks = [block for stage in stages for block in _every(host, stage, insertion.every)]
        found = [p for block in blocks for p in block.places() if p.site == insertion.site]
    missing = set(stages) - {place.stage for place in found}
    if not found or (insertion.stages != "all" and missing):
        raise ValueError(_no_place(host, insertion, sorted(missing)))
    return found


def _stages(host: Host, insertion: Insertion) -> list[int]:
    if insertion.stages == "all":
        return list(range(1, host.stages + 1))
    too_high = [stage for stage in insertion.stages if int(stage) > host.stages]
    if too_high:
        raise ValueError(
            f"{insertion}: {type(host.model).__name__} has {host.stages} stages, numbered from 1; "
            f"there is no stage {too_high[0]}"
        )
    return [int(stage) for stage in insertion.stages]


def _every(host: Host, stage: int, every: int) -> list[Block]:
    return [block for block in host.blocks if block.stage == stage][::every]


def _refuse_gaps(host: Host, insertion: Insertion) -> None:
    """A block that could not be followed must not go without silently."""
    gaps = [gap for gap in host.gaps if gap.stage in _stages(host, insertion)]
    if gaps:
        others = sorted({b.stage for b in host.blocks} - {gap.stage for gap in host.gaps})
        stages = f"; stages without such blocks: {', '.join(map(str, others))}" if others else ""
        lines = [host.refusal(gap.name) for gap in gaps]
        raise ValueError("\n  ".join([f"{insertion}: no way into every block{stages}", *lines]))


def _no_place(host: Host, insertion: Insertion, stages: list[int]) -> str:
    legal: dict[str, list[str]] = {}
    for block in host.blocks:
        if block.stage in stages:
            sites = [place.site for place in block.places()]
            legal.setdefault(f"{block.kind} (as {block.name}): {', '.join(sites)}", []).append("")
    ends = [f"{p.site} (stage {p.stage})" for p in host.ends]
    lines = [f"{insertion}: {type(host.model).__name__} has no such place. Legal sites:"]
    lines += [*list(legal)[:6], *([f"of the network: {', '.join(ends)}"] if ends else [])]
    lines += ["or after any module: site='layer3.2.conv2'"]
    lines += [host.refusal(gap.name) for gap in host.gaps[:3]]
    return "\n  ".join(lines)


def _after_module(host: Host, site: str) -> Place:
    path = site.removeprefix(".")
    modules = dict(host.model.named_modules())
    if path not in modules or not path:
        near = difflib.get_close_matches(path, modules, n=3)
        hint = f"; nearest: {', '.join(near)}" if near else ""
        raise ValueError(f"{type(host.model).__name__} has no module {path!r}{hint}")
    call = host.calls.get(modules[path])
    if call is None or call.shape is None or not call.gives_map:
        what = "did not run" if call is None else f"gives {call.shape or 'no single tensor'}"
        known = ", not known to be one" if call and len(call.shape or ()) == 4 else ""
        raise ValueError(
            f"site {site!r}: {path} {what}{known}; an inserted module needs one (b c y x)"
        )
    if walks_children(modules[path]):
        raise ValueError(f"site {site!r}: {path} loops over its children; name the last of them")
    return Place(f"{path}.output", site, 0, call.shape[1], (call.shape[2], call.shape[3]))


def _path(place: Place) -> str:
    return f"{place.owner}.{place.slot}" if place.owner else place.slot


_Plan = list[tuple[Place, Insertion]]


def _refuse_conflicts(model: nn.Module, installed: Installed, plan: _Plan) -> None:
    taken: dict[str, list[str]] = {}
    for place, insertion in plan:
        owner = model.get_submodule(place.owner)
        slot = installed.get(owner, {}).get(place.slot) or owner._modules.get(place.slot)
        there = [kind_of(module) for module in slot] if isinstance(slot, Slot) else []
        kinds = taken.setdefault(place.name, there)
        if insertion.kind in kinds:
            raise ValueError(f"{insertion}: {place.name} has {insertion.kind} already")
        if place.channels == 1:
            raise ValueError(f"{insertion}: {place.name} has 1 channel, nothing to weigh")
        kinds.append(insertion.kind)


def _built(model: nn.Module, place: Place, insertion: Insertion) -> nn.Module:
    from vision.channel_attention import create_channel_attention

    module: nn.Module
    module = create_channel_attention(insertion.kind, place.channels, **insertion.options)
    if insertion.init == "identity":
        module = FromIdentity(module)
    owner = model.get_submodule(place.owner)
    weights = [*owner.parameters(), *model.parameters()]
    return module.to(next(w for w in weights if w.ndim >= 2)).train(owner.training)
