"""Makes emoji.png, the shipped data, from two published packages.

    curl -O https://registry.npmjs.org/emoji-datasource-google/-/emoji-datasource-google-16.0.0.tgz
    pip download --no-deps emoji==2.16.0
    python -m vision.emoji.make --drawings emoji-datasource-google-16.0.0.tgz \\
        --captions emoji-2.16.0-py3-none-any.whl --out emoji.png

Taken are all 1,911 entries of `emoji.json` (Emoji 16.0): each has a drawing by Google. The 1,875
skin tones, which `emoji.json` lists below these entries, are left out. Pixels stay as they are in
the sheet of true-colour drawings without other makers' fallbacks, also where they are transparent.
Both packages are checked by digest, and the file is read back and compared before it is written.
The same packages and the same Pillow and zlib give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vision.emoji import LANGUAGES, SIZE, Emoji, load_emoji

SHA512_DRAWINGS = (
    "6517b17f3b3b315a0b9e6cd998db0ee132a19c0269e43fbe566e8fa54a47fe31"
    "104257a6a7797cf028d9f83a19d9f68cf51e10c5990e3c90a84fc0e53e17d0dc"
)
SHA256_CAPTIONS = "c4230d80640def9071599ff56b1b5950fe13a2a94c0da98c5deab12431b24330"
SOURCE = "npm emoji-datasource-google 16.0.0, PyPI emoji 2.16.0"
COPYRIGHT = (
    "Drawings: Noto Emoji, Google, Apache-2.0 (flags: public domain). Metadata: emoji-data, "
    "Cal Henderson, MIT. Captions: emoji, Taehoon Kim and Kevin Wurster, BSD-3-Clause, "
    "after Unicode CLDR, Unicode-3.0."
)


def make(drawings: Path, captions: Path, out: Path) -> None:
    """Writes the data file.

    Args:
        drawings: Tarball of `emoji-datasource-google`.
        captions: Wheel of `emoji`.
        out: File to write.
    """
    entries, sheet = read_drawings(checked(drawings, "sha512", SHA512_DRAWINGS))
    characters = [to_text(entry["unified"]) for entry in entries]
    emoji = Emoji(
        images=cut(sheet, entries),
        names=tuple(entry["short_name"] for entry in entries),
        characters=tuple(characters),
        categories=tuple(entry["category"] for entry in entries),
        subcategories=tuple(entry["subcategory"] for entry in entries),
        captions=read_captions(checked(captions, "sha256", SHA256_CAPTIONS), characters),
    )
    data = pack(emoji)
    out.write_bytes(data)
    print(f"{out}: {len(emoji)} drawings, {len(data)} bytes, sha256 {hash_of(data, 'sha256')}")


def hash_of(data: bytes, algorithm: str) -> str:
    return hashlib.new(algorithm, data).hexdigest()


def checked(path: Path, algorithm: str, digest: str) -> bytes:
    """Contents of a file with a known digest."""
    data = path.read_bytes()
    found = hash_of(data, algorithm)
    if found != digest:
        raise ValueError(f"{path} has {algorithm} {found}, expected {digest}")
    return data


def read_drawings(tarball: bytes) -> tuple[list[dict[str, Any]], np.ndarray]:
    """Entries in Unicode's order, and the sheet (y x c) of their drawings, RGBA."""

    def read(name: str) -> bytes:
        member = package.extractfile(f"package/{name}")
        assert member is not None, name
        return member.read()

    with tarfile.open(fileobj=io.BytesIO(tarball)) as package:
        entries = json.loads(read("emoji.json"))
        sheet = Image.open(io.BytesIO(read(f"img/google/sheets-clean/{SIZE}.png")))
    assert sheet.mode == "RGBA"
    assert all(entry["has_img_google"] for entry in entries)
    return sorted(entries, key=lambda entry: entry["sort_order"]), np.asarray(sheet)


def cut(sheet: np.ndarray, entries: list[dict[str, Any]]) -> np.ndarray:
    """Drawings (n y x c) from their places in the sheet, where each has a border of one pixel."""
    step = SIZE + 2
    corners = [(entry["sheet_y"] * step + 1, entry["sheet_x"] * step + 1) for entry in entries]
    return np.stack([sheet[y : y + SIZE, x : x + SIZE] for y, x in corners])


def read_captions(wheel: bytes, characters: list[str]) -> dict[str, tuple[str, ...]]:
    """Names of the characters by language, without colons and underscores."""
    captions = {}
    with zipfile.ZipFile(io.BytesIO(wheel)) as package:
        for language in LANGUAGES:
            suffix = "" if language == "en" else f"_{language}"
            names = json.loads(package.read(f"emoji/unicode_codes/emoji{suffix}.json"))
            if language == "en":
                names = {character: entry["en"] for character, entry in names.items()}
            captions[language] = tuple(to_caption(names[each]) for each in characters)
    return captions


def to_text(unified: str) -> str:
    """`1F468-200D-1F33E` -> the characters with these code points."""
    return "".join(chr(int(code, 16)) for code in unified.split("-"))


def to_caption(name: str) -> str:
    """`:man_farmer:` -> `man farmer`."""
    return " ".join(name.strip(":").replace("_", " ").split())


def pack(emoji: Emoji) -> bytes:
    """A PNG from which `load_emoji` reads exactly `emoji`; the notices are in it too."""
    columns = math.ceil(math.sqrt(len(emoji)))
    rows = math.ceil(len(emoji) / columns)
    cells = np.zeros((rows * columns, SIZE, SIZE, 4), np.uint8)
    cells[: len(emoji)] = emoji.images
    sheet = rearrange(cells, "(i j) y x c -> (i y) (j x) c", j=columns)
    buffer = io.BytesIO()
    Image.fromarray(sheet).save(buffer, "PNG", optimize=True, pnginfo=_text(emoji))
    if not same(load_emoji(io.BytesIO(buffer.getvalue())), emoji):
        raise RuntimeError("the packed drawings or names differ from the given ones")
    return buffer.getvalue()


def _text(emoji: Emoji) -> PngInfo:
    info = PngInfo()
    info.add_text("Source", SOURCE)
    info.add_text("Copyright", COPYRIGHT)
    table = {
        "name": emoji.names,
        "character": emoji.characters,
        "category": emoji.categories,
        "subcategory": emoji.subcategories,
        **{f"caption {language}": names for language, names in emoji.captions.items()},
    }
    for key, column in table.items():
        info.add_itxt(key, "\n".join(column), zip=True)
    return info


def same(first: Emoji, second: Emoji) -> bool:
    """Whether two sets are equal, pixel by pixel and word by word."""
    return np.array_equal(first.images, second.images) and all(
        getattr(first, column) == getattr(second, column)
        for column in ("names", "characters", "categories", "subcategories", "captions")
    )


if __name__ == "__main__":
    import tyro

    tyro.cli(make)
