"""The blocks and stages of a CNN, found in one forward pass.

Stages are numbered from 1. They are those of timm's `feature_info`, or `layer1`, `layer2`, ... as
in torchvision's ResNet, or else runs of blocks at one resolution.

Shapes: b batch, c y x channels/rows/columns.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from vision.blocks import Anatomy, Reader
from vision.flow import is_norm_or_activation
from vision.places import Block, Host, place_at
from vision.slots import slots
from vision.tracing import Call, TraceError, record
from zoo.card import ModelCard


def read(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> Host:
    """Looks at a model without insertions in one forward pass of one random image."""
    calls = _look(model, _size(model, img_size))
    host = Host(model, calls, Reader(calls))
    if any(True for _ in slots(model)):
        _read_slots(host)
        return host
    _find_blocks(host)
    host.blocks = host.blocks or _plain_blocks(host)
    host.gaps = _gaps(host)
    modules = _number_stages(host)
    if not host.blocks and not [gap for gap in host.gaps if gap.name]:
        modules = _conv_blocks(host)
    if not host.blocks and not host.gaps:
        raise ValueError(
            f"{type(model).__name__} is not a CNN: no maps (b c y x) with convolutions found"
        )
    _find_ends(host, modules)
    return host


def _size(model: nn.Module, img_size: int | tuple[int, int] | None) -> tuple[int, int]:
    if img_size is None:
        config = getattr(model, "pretrained_cfg", None)
        expected = config.get("input_size") if isinstance(config, dict) else None
        card = getattr(model, "card", None)
        known = tuple(expected[-2:]) if expected else 224
        img_size = card.preprocessing.size if isinstance(card, ModelCard) else known
    size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(size) != 2 or not all(type(s) is int and s > 0 for s in size):
        raise ValueError(f"img_size must be one or two positive integers, not {img_size!r}")
    return size


def _look(model: nn.Module, size: tuple[int, int]) -> dict[nn.Module, Call]:
    """The calls of a pass of one image (1 c y x) of random numbers."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if first is None:
        raise ValueError(f"{type(model).__name__} has no convolution: nothing to insert into")
    failures = []
    for channels in dict.fromkeys((first.in_channels, 3)):  # pixels may be folded before it
        random = torch.Generator().manual_seed(0)
        image = torch.randn(1, channels, *size, generator=random).to(first.weight)
        try:
            return record(model, image)
        except Exception as error:
            failures.append(error)
    raise ValueError(
        f"{type(model).__name__} does not run on an image of {size[0]}x{size[1]}, give another "
        f"img_size: {failures[0]}"
    ) from failures[0]


def _find_blocks(host: Host) -> None:
    """Modules with a residual add, and those of the same classes that lack it."""
    found: dict[str, tuple[nn.Module, Anatomy]] = {}
    for name, module in _candidates(host):
        try:
            if host.reader.adds(module):
                anatomy = host.reader.anatomy(host.reader.flow(module))
                if anatomy.residual:
                    found[name] = module, anatomy
        except TraceError as error:
            host.refused[name] = str(error)
    names = _blocks_among({name: module for name, (module, _) in found.items()})
    parts = {type(module) for name, (module, _) in found.items() if _is_inside(name, names)}
    kinds = {type(found[name][0]) for name in names} - parts
    for name, module in _candidates(host):
        if type(module) in kinds and not _is_inside(name, names):
            _add_block(host, name, module, found[name][1] if name in found else None)
    host.blocks.sort(key=lambda block: host.calls[block.module].start)


def _blocks_among(units: dict[str, nn.Module]) -> list[str]:
    """The outermost residual units, but none around several of one class: that is a network."""
    names = []
    for name in units:
        inner = Counter(type(m) for n, m in units.items() if _is_inside(n, [name]))
        if max(inner.values(), default=0) < 2:
            names.append(name)
    return [name for name in names if not _is_inside(name, names)]


def _is_inside(name: str, outer: list[str]) -> bool:
    return any(name != other and name.startswith(f"{other}." if other else "") for other in outer)


def _candidates(host: Host) -> Iterator[tuple[str, nn.Module]]:
    """Modules with a forward of their own around convolutions, stems left out."""
    for name, module in host.model.named_modules():
        plain = type(module) is nn.Sequential or not any(True for _ in module.children())
        stem = any("stem" in part for part in name.split("."))
        has_map = module in host.calls and host.calls[module].has_map
        if has_map and not plain and not stem and host.reader.convs(module):
            yield name, module


def _add_block(host: Host, name: str, module: nn.Module, anatomy: Anatomy | None) -> None:
    try:
        if anatomy is None:
            anatomy = host.reader.anatomy(host.reader.flow(module), mate=True)
    except TraceError as error:
        host.refused[name] = str(error)
        return
    shapes = {site: edge.shape for site, edge in anatomy.edges.items()}
    host.blocks.append(Block(name, module, shapes))


def _plain_blocks(host: Host) -> list[Block]:
    """Without any residual add: the smallest modules of a class of the host's that hold two."""
    small: list[tuple[str, nn.Module]] = []
    for name, module in _candidates(host):
        if _is_in_head(host, module):
            continue
        if name and host.reader.convs(module) > 1 and not isinstance(module, nn.Sequential):
            small = [s for s in small if not name.startswith(s[0] + ".")]
            small.append((name, module))
    blocks = []
    for name, module in small:
        try:
            anatomy = host.reader.anatomy(host.reader.flow(module))
        except TraceError as error:
            host.refused[name] = str(error)
            continue
        shapes = {site: edge.shape for site, edge in anatomy.edges.items()}
        if shapes:
            blocks.append(Block(name, module, shapes))
    return sorted(blocks, key=lambda block: host.calls[block.module].start)


def _gaps(host: Host) -> list[Block]:
    """The smallest modules that were refused, but those around blocks, in blocks and in a head."""
    blocks = [block.name for block in host.blocks]
    found = []
    for name in host.refused:
        module = host.model.get_submodule(name)
        around = any(_is_inside(other, [name]) for other in (*blocks, *host.refused))
        known = name in blocks or _is_inside(name, blocks)
        if not around and not known and not _is_in_head(host, module):
            found.append(Block(name, module, {}, followed=False))
    return sorted(found, key=lambda gap: host.calls[gap.module].start)


# Stages


def _number_stages(host: Host) -> list[str]:
    """Gives each block its stage; the modules that may end the stages, if their names are known."""
    units = sorted((*host.blocks, *host.gaps), key=lambda unit: host.calls[unit.module].start)
    info = _feature_modules(host)
    if info:
        ends = [host.calls[host.model.get_submodule(name)].end for name in info]
        keys = [sum(end < host.calls[unit.module].end for end in ends) for unit in units]
        keys = [min(key, len(info) - 1) for key in keys]
    else:
        keys = _layer_numbers(units) or _resolution_runs(host, units)
    numbers = {key: index for index, key in enumerate(sorted(set(keys)), start=1)}
    for unit, key in zip(units, keys, strict=True):
        unit.stage = numbers[key]
    return [info[key] for key in sorted(set(keys))] if info else []


def _feature_modules(host: Host) -> list[str]:
    """The modules of timm's `feature_info` that ran, in the order in which they ended."""
    info = getattr(host.model, "feature_info", None)
    if not isinstance(info, list) or not all(isinstance(entry, dict) for entry in info):
        return []
    modules = dict(host.model.named_modules())
    names = [entry.get("module") for entry in info]
    ran = [n for n in names if n and n in modules and modules[n] in host.calls]
    return sorted(ran, key=lambda name: host.calls[modules[name]].end)


def _is_in_head(host: Host, module: nn.Module) -> bool:
    """Whether a module runs after all of timm's stages: a classifier of convolutions."""
    last = [host.calls[host.model.get_submodule(n)].end for n in _feature_modules(host)[-1:]]
    return any(host.calls[module].start > end for end in last)


def _layer_numbers(units: list[Block]) -> list[int]:
    found = [re.match(r"(?:.+\.)?layer(\d+)\.", unit.name) for unit in units]
    return [int(match[1]) for match in found if match] if all(found) else []


def _resolution_runs(host: Host, units: list[Block]) -> list[int]:
    keys: list[int] = []
    before: tuple[int, ...] | None = None
    for unit in units:
        size = _resolution(host, unit) or before
        keys.append((keys[-1] if keys else 0) + (size != before))
        before = size
    return keys


def _resolution(host: Host, block: Block) -> tuple[int, ...]:
    """Rows and columns of what a block gives; () where it gives no map."""
    call = host.calls[block.module]
    shape = call.shape if call.gives_map else next(iter(block.shapes.values()), None)
    return (shape or ())[2:]


def _conv_blocks(host: Host) -> list[str]:
    """In a network of single convolutions (VGG) each stage is a block, in module order.

    A single one is the patch embedding of a transformer or a mixer.
    """
    leaves = [
        (name, module)
        for name, module in host.model.named_modules()
        if module in host.calls and not any(True for _ in module.children())
    ]
    if sum(isinstance(module, nn.Conv2d) for _, module in leaves) < 2:
        return []
    leaves.sort(key=lambda leaf: host.calls[leaf[1]].start)
    stage, number, before = 0, 0, None
    for index, (_, module) in enumerate(leaves):
        shape = host.calls[module].shape or ()
        if not isinstance(module, nn.Conv2d) or len(shape) != 4:
            continue
        if _is_in_head(host, module):
            break
        if shape[2:] != before:
            stage, number, before = stage + 1, 0, shape[2:]
        number += 1
        if number <= 3:
            last, owner = _with_norm(host, leaves[index:])
            host.blocks.append(Block(last, owner, {f"conv{number}": shape}, stage, False))
    return []


def _with_norm(host: Host, leaves: list[tuple[str, nn.Module]]) -> tuple[str, nn.Module]:
    """The last of the norm and activation modules that follow a convolution."""
    last, shape = leaves[0], host.calls[leaves[0][1]].shape
    for name, module in leaves[1:]:
        follows = host.calls[module].gives_map and host.calls[module].shape == shape
        if not is_norm_or_activation(module) or not follows:
            break
        last = name, module
    return last


def _find_ends(host: Host, ends: list[str]) -> None:
    """Where the first stage begins, and where each but the last ends."""
    units = sorted((*host.blocks, *host.gaps), key=lambda unit: host.calls[unit.module].start)
    for stage in range(1, host.stages + 1):
        own = [unit for unit in units if unit.stage == stage]
        common = _common_parent([block.name for block in own])
        if stage == 1:
            _add_stem(host, own, common)
        if stage < host.stages:
            following = [unit for unit in units if unit.stage == stage + 1]
            limit = min(host.calls[block.module].start for block in following)
            last = [own[-1].name] if len({_resolution(host, block) for block in own}) == 1 else []
            for name in [*ends[stage - 1 : stage], common, *last]:
                if _ends_stage(host, name, own, limit):
                    shape = host.calls[host.model.get_submodule(name)].shape or ()
                    host.ends.append(place_at(name, "between_stages", shape, stage))
                    break


def _common_parent(names: list[str]) -> str:
    shared = names[0].split(".")[:-1]
    for name in names[1:]:
        parts = name.split(".")[:-1]
        same = [a == b for a, b in zip(shared, parts, strict=False)]
        shared = shared[: same.index(False) if False in same else len(same)]
    return ".".join(shared)


def _ends_stage(host: Host, name: str, own: list[Block], limit: int) -> bool:
    call = host.calls.get(host.model.get_submodule(name))
    if not name or call is None or not call.gives_map:
        return False
    if walks_children(host.model.get_submodule(name)):
        return False
    last = max(host.calls[block.module].end for block in own)
    return last <= call.end < limit


def _is_past_a_layer(host: Host, call: Call) -> bool:
    done = (module for module, other in host.calls.items() if 0 <= other.end < call.start)
    return any(True for module in done for _ in module.parameters(recurse=False))


def walks_children(module: nn.Module) -> bool:
    """Whether a forward loops over the module's children, and so would run a slot among them."""
    if isinstance(module, nn.Sequential | nn.ModuleDict):
        return False  # those hide their slots
    names = getattr(type(module).forward, "__code__", None)
    walks = {"children", "named_children", "modules", "named_modules", "_modules"}
    return names is not None and bool(walks & set(names.co_names))


def _add_stem(host: Host, own: list[Block], common: str) -> None:
    """The input of the stage's module, or of its first block, unless it is the image itself."""
    last = max(host.calls[block.module].end for block in own)
    after = [b for b in (*host.blocks, *host.gaps) if b.stage > 1]
    limit = min((host.calls[b.module].start for b in after), default=last + (1 << 30))
    for name in (common, own[0].name):
        call = host.calls.get(host.model.get_submodule(name))
        if not name or call is None or not call.end < limit:
            continue
        if walks_children(host.model.get_submodule(name)):
            continue
        first, value = next(iter(call.arguments.items()), ("", None))
        shape = tuple(value.shape) if isinstance(value, Tensor) and first in call.maps else ()
        if shape and _is_past_a_layer(host, call):
            host.ends.append(place_at(name, "stem", shape, 1))
            return


# Models with slots of their own


def _read_slots(host: Host) -> None:
    """The places of a model that was built with slots."""
    owners: dict[str, Block] = {}
    for name, slot in slots(host.model):
        owner, _, child = name.rpartition(".")
        shape = host.calls[slot].shape if slot in host.calls else None
        if shape is None or len(shape) != 4:
            continue
        if slot.site in ("stem", "between_stages"):
            number = re.search(r"\d+$", child)
            path = f"{owner}.{child}" if owner else child
            end = place_at(owner, slot.site, shape, int(number[0]) if number else 1)
            host.ends.append(replace(end, name=path.replace("slot_", "", 1)))
        else:
            block = Block(owner, host.model.get_submodule(owner), {})
            owners.setdefault(owner, block).shapes[slot.site] = shape
    host.blocks = sorted(owners.values(), key=lambda block: host.calls[block.module].start)
    keys = _layer_numbers(host.blocks) or _resolution_runs(host, host.blocks)
    for block, key in zip(host.blocks, keys, strict=True):
        block.stage = key
