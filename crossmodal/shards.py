"""Pairs in WebDataset shards: `wds:PATTERN`, tar files on disk that are read by index.

A sample is the members of one shard whose path is the same up to the first dot of the file name:
an image (any of `vision.data.EXTENSIONS`) and its caption in `.txt`, else in `.json`, an object
with a field `caption`, text or a list of texts.

Nothing is unpacked: each member's place is noted once, so that order, resuming and several
processes are those of any other data. Hence shards are plain tar files on this machine.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from crossmodal.rows import Options, PairError, Row, RowError, Table, texts_of, unlabelled
from vision.data import EXTENSIONS, Split
from vision.images import ImageError, decode


class Member(NamedTuple):
    """A file in a shard."""

    shard: str
    name: str
    offset: int
    size: int

    def read(self) -> bytes:
        """Its content."""
        with open(self.shard, "rb") as file:
            file.seek(self.offset)
            return file.read(self.size)


@dataclass(frozen=True)
class ShardImages(Split):
    """Images in shards, read when asked for."""

    members: tuple[Member, ...] = ()

    def image(self, index: int, channels: int) -> Image.Image:
        """One image in mode L or RGB."""
        member = self.members[index]
        try:
            return decode(member.read(), channels)
        except ImageError as error:
            raise ImageError(f"{member.shard} member {member.name}: {error}") from error


def read(pattern: str, options: Options) -> Table:
    """Lists the samples of all shards.

    Raises:
        FileNotFoundError: a shard that is not there.
        PairError: no local path.
    """
    rows, problems = [], []
    for shard in find(pattern):
        members, damage = _members(shard)
        for key, group in itertools.groupby(members, key=_key):
            where = f"{shard} sample {key}"
            try:
                rows.append(_row(list(group), f"{Path(shard).name}/{key}", where, options))
            except RowError as error:
                problems.append(f"{where}: {error}")
        problems += damage
    return Table(rows, problems, _images)


def _images(members: Sequence[Any]) -> Split:
    return ShardImages(unlabelled(len(members)), 0.0, members=tuple(members))


def find(pattern: str) -> list[str]:
    """Files of a pattern with braces and wildcards.

    Raises:
        FileNotFoundError: one that is not there, or no match.
    """
    if "://" in pattern or pattern.startswith("pipe:"):
        raise PairError(f"wds:{pattern}: shards are read by index; copy them to a local folder")
    found = []
    for path in expand(os.path.expanduser(pattern)):
        files = sorted(glob.glob(path)) if glob.has_magic(path) else [path]
        missing = [file for file in files if not os.path.isfile(file)]
        if missing or not files:
            raise FileNotFoundError(f"no shard {path} (looked in {Path(path).parent.resolve()})")
        found += files
    return found


def expand(pattern: str) -> list[str]:
    """Braces as a shell expands them.

    >>> expand("a{08..10}.tar"), expand("{x,y}/{0..1}")
    (['a08.tar', 'a09.tar', 'a10.tar'], ['x/0', 'x/1', 'y/0', 'y/1'])
    """
    match = re.search(r"\{([^{}]*)\}", pattern)
    if match is None:
        return [pattern]
    numbers = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if numbers:
        first, last = numbers.groups()
        choices = [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    else:
        choices = match[1].split(",")
    before, after = pattern[: match.start()], pattern[match.end() :]
    return [path for choice in choices for path in expand(before + choice + after)]


def _members(shard: str) -> tuple[list[Member], list[str]]:
    """A shard's files in order, and how it is damaged, if it is."""
    members: list[Member] = []
    try:
        with tarfile.open(shard, "r:") as tar:
            for info in tar:
                members.append(Member(shard, info.name, info.offset_data, info.size * info.isreg()))
            damage = _ending(shard, tar.offset)
    except tarfile.TarError as error:
        damage = str(error) + ("" if members else "; shards are plain tar files, not compressed")
    if damage:
        last = f"member {members[-1].name}" if members else "its beginning"
        damage = f"{shard}: damaged in or after {last}: {damage}; write the shard anew"
    length = os.path.getsize(shard)
    usable = [
        member
        for member in members
        if member.size
        and member.offset + member.size <= length
        and not os.path.basename(member.name).startswith(".")
    ]
    return usable, [damage] if damage else []


def _ending(shard: str, offset: int) -> str:
    """What is wrong with the end of an archive; tarfile is silent about what it cannot read."""
    with open(shard, "rb") as file:
        file.seek(offset)
        block = file.read(tarfile.BLOCKSIZE)
    if len(block) < tarfile.BLOCKSIZE:
        return "the end is missing"
    return "what follows is no header" if any(block) else ""


def _key(member: Member) -> str:
    folder, name = os.path.split(member.name)
    return os.path.join(folder, name.split(".", 1)[0])


def _row(members: Sequence[Member], key: str, where: str, options: Options) -> Row:
    images, texts = [], {}
    for member in members:
        extension = os.path.splitext(member.name)[1].lower()
        if extension in EXTENSIONS:
            images.append(member)
        elif extension in (".txt", ".json"):
            texts[extension] = member
    if len(images) != 1:
        names = ", ".join(member.name for member in members)
        raise RowError(f"{len(images)} images instead of one among {names}")
    return Row(images[0], _captions(texts, options.caption_column), key, where)


def _captions(texts: dict[str, Member], column: str) -> tuple[str, ...]:
    if not texts:
        raise RowError("no caption: neither .txt nor .json")
    member = texts.get(".txt") or texts[".json"]
    try:
        text = member.read().decode("utf-8-sig")
        if member is texts.get(".txt"):
            return texts_of(text, member.name)
        record = json.loads(text)
    except UnicodeDecodeError as error:
        raise RowError(f"{member.name} is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RowError(f"{member.name} is not JSON: {error}") from None
    if not isinstance(record, dict) or column not in record:
        raise RowError(f"{member.name} has no field {column} (--caption-column names another)")
    return texts_of(record[column], f"{member.name} {column}")
