"""1,911 emoji drawings at 32x32 with category and names in 14 languages, shipped with the package.

The drawings are Google's Noto emoji; `NOTICE.txt` names sources and licences. Everything is in one
PNG: a sheet of the drawings in Unicode's order, row by row, and a text chunk for each column of
the table, one line a drawing. `vision.emoji.make` made it.

Shapes: `n` drawings · `y x` rows/columns of pixels · `c` channels.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from einops import rearrange
from PIL import Image

FILE = Path(__file__).with_name("emoji.png")
SIZE = 32
LANGUAGES = ("ar", "de", "en", "es", "fa", "fr", "id", "it", "ja", "ko", "pt", "ru", "tr", "zh")
TEXT = ("name", "character", "category", "subcategory", *(f"caption {x}" for x in LANGUAGES))
"""Keys of the text chunks."""
CATEGORIES = (
    "Smileys & Emotion",
    "People & Body",
    "Animals & Nature",
    "Food & Drink",
    "Travel & Places",
    "Activities",
    "Objects",
    "Symbols",
)
"""Classes, in Unicode's order; not among them: Flags and Component (five skin tones)."""

# Words that tell variants of one drawing apart: who, hair, direction, colour, size, hour, place.
_WORDS = """
person people man men woman women adult boy girl child baby and older old
bald beard hair curly
facing left right up down leftwards rightwards
black blond blue brown green grey orange purple red white yellow light dark pink
large medium small
one two three four five six seven eight nine ten eleven twelve
1st 2nd 3rd 0 1 2 3 4 5 6 7 8 9 10 # *
"""
_VARIANTS = frozenset(_WORDS.split())
_SAME = {
    "o\u2019clock": "clock",
    "thirty": "clock",
    "princess": "prince",
    "mermaid": "merperson",
    "merman": "merperson",
    "mrs.": "santa",
    "mx": "santa",
}


@dataclass(frozen=True)
class Emoji:
    """Drawings and their table; entry i of every column belongs to drawing i.

    Attributes:
        images: (n y x c) uint8, RGBA with straight alpha.
        names: Unique short names, such as `waxing_crescent_moon`.
        characters: The emoji as text.
        categories, subcategories: Unicode's groups.
        captions: Unicode's names by language (`LANGUAGES`).
    """

    images: np.ndarray
    names: tuple[str, ...]
    characters: tuple[str, ...]
    categories: tuple[str, ...]
    subcategories: tuple[str, ...]
    captions: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        return len(self.names)

    def on(self, background: tuple[int, int, int] = (255, 255, 255)) -> np.ndarray:
        """Drawings over one colour: (n y x c) uint8, RGB, rounded to nearest."""
        alpha = self.images[..., 3:].astype(np.uint16)
        colour = np.asarray(background, np.uint16)
        mixed = self.images[..., :3] * alpha + colour * (255 - alpha)
        return ((mixed + 127) // 255).astype(np.uint8)

    def held_out(self, share: float = 0.2) -> np.ndarray:
        """Marks the drawings that are kept from training: (n,) bool, as `held_out` does."""
        return held_out([base_name(name) for name in self.captions["en"]], self.categories, share)


def load_emoji(file: Path | BinaryIO = FILE) -> Emoji:
    """Reads what `vision.emoji.make` wrote, by default the shipped file."""
    with Image.open(file) as sheet:
        text = {key: tuple(value.split("\n")) for key, value in sheet.info.items() if key in TEXT}
        if len(text) < len(TEXT):
            raise ValueError(
                f"{file} lacks the text chunks {[key for key in TEXT if key not in text]}"
            )
        cells = rearrange(np.asarray(sheet), "(i y) (j x) c -> (i j) y x c", y=SIZE, x=SIZE)
    return Emoji(
        images=cells[: len(text["name"])],
        names=text["name"],
        characters=text["character"],
        categories=text["category"],
        subcategories=text["subcategory"],
        captions={language: text[f"caption {language}"] for language in LANGUAGES},
    )


def base_name(caption: str) -> str:
    """An English name without the words that tell variants apart.

    >>> base_name("woman running facing right"), base_name("light blue heart")
    ('running', 'heart')
    >>> base_name("man red hair"), base_name("ten-thirty")
    ('person', 'clock')
    """
    words = re.split(r"[ -]", caption.lower())
    kept = [_SAME.get(word, word) for word in words if word not in _VARIANTS]
    return " ".join(kept) or "person"


def held_out(
    base_names: Sequence[str], categories: Sequence[str], share: float = 0.2
) -> np.ndarray:
    """Splits by base name, so that no two variants stand on different sides.

    In each category the base names come in the order of their SHA-256; each is held out if it
    still fits into the category's share. A base name counts in the category it is first met in.

    Args:
        base_names, categories: One each for every drawing.
        share: Of a category's drawings, in [0, 1].

    Returns:
        (n,) bool: True where held out.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share ({share}) must be in [0, 1]")
    members: dict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(base_names):
        members[name].append(row)
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, rows in members.items():
        names_of[categories[rows[0]]].append(name)
    mask = np.zeros(len(base_names), bool)
    for names in names_of.values():
        room = round(share * sum(len(members[name]) for name in names))
        for name in sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest()):
            if len(members[name]) <= room:
                mask[members[name]] = True
                room -= len(members[name])
    return mask
