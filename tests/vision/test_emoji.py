"""The shipped emoji: the file, its table, the split by base name, and how it was made."""

from __future__ import annotations

import doctest
import hashlib
import io
import json
import tarfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vision.emoji
from vision.data import load_dataset, make_source
from vision.emoji import (
    CATEGORIES,
    FILE,
    LANGUAGES,
    SIZE,
    Emoji,
    base_name,
    held_out,
    load_emoji,
    make,
)
from zoo.card import Preprocessing

SHA256 = "c7cbd819833337801cee8dd5b120def8f2d6026f433aae163e8ebc7bd56f1230"


@pytest.fixture(scope="module")
def emoji() -> Emoji:
    return load_emoji()


def small(n: int = 7) -> Emoji:
    """Noise for drawings, with colours where it is transparent, and names of several scripts."""
    images = np.random.default_rng(0).integers(0, 256, (n, SIZE, SIZE, 4), np.uint8)
    images[:, :9, :, 3] = 0
    names = tuple(f"name_{i}" for i in range(n))
    captions = {language: tuple(f"ñ 名 {language} {i}" for i in range(n)) for language in LANGUAGES}
    return Emoji(images, names, tuple(chr(0x1F600 + i) for i in range(n)), names, names, captions)


def test_the_shipped_file_is_the_one_that_was_made():
    data = FILE.read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert 2e6 < len(data) < 3e6


def test_notices_stand_beside_the_file_and_in_it():
    notice = FILE.with_name("NOTICE.txt").read_text(encoding="utf-8")
    with Image.open(FILE) as sheet:
        inside = sheet.info["Copyright"]
    for word in ("Noto Emoji", "Apache", "MIT", "BSD", "Unicode", "Cal Henderson", "Taehoon Kim"):
        assert word in notice
        assert word in inside
    for package in ("emoji-datasource-google 16.0.0", "emoji 2.16.0"):
        assert package in notice
        assert package in make.SOURCE


def test_1911_drawings_with_every_column(emoji):
    assert len(emoji) == 1911
    assert emoji.images.shape == (1911, SIZE, SIZE, 4)
    assert emoji.images.dtype == np.uint8
    for column in (emoji.names, emoji.characters, *emoji.captions.values()):
        assert len(set(column)) == 1911  # no duplicates
        assert all(text and text == " ".join(text.split()) for text in column)
    assert set(emoji.categories) == {*CATEGORIES, "Flags", "Component"}
    assert len(emoji.categories) == len(emoji.subcategories) == 1911
    assert tuple(emoji.captions) == LANGUAGES


def test_every_drawing_is_there_once(emoji):
    assert (emoji.images[..., 3].max((1, 2)) == 255).all()  # none is empty
    assert len({image.tobytes() for image in emoji.images}) == 1911


def test_drawings_belong_to_their_names(emoji):
    """Mean colours that anyone can name, and captions as Unicode has them."""
    for name, rgb in (("red_circle", 0), ("large_green_circle", 1), ("large_blue_circle", 2)):
        row = emoji.names.index(name)
        assert emoji.images[row, SIZE // 2, SIZE // 2, :3].argmax() == rgb, name
    row = emoji.characters.index("\N{CAT FACE}")
    found = {language: emoji.captions[language][row] for language in ("en", "de", "fr", "ja")}
    expected = {"en": "cat face", "de": "katzengesicht", "fr": "tête de chat", "ja": "ネコの顔"}
    assert found == expected
    assert emoji.categories[row] == "Animals & Nature"


def test_over_a_colour_equals_blending_in_float64(emoji):
    background = np.array([10, 200, 77])
    alpha = emoji.images[..., 3:] / 255
    blend = emoji.images[..., :3] * alpha + background * (1 - alpha)
    np.testing.assert_array_equal(emoji.on((10, 200, 77)), np.rint(blend))
    transparent = emoji.images[..., 3] == 0
    assert transparent.any()
    assert (emoji.on()[transparent] == 255).all()


@pytest.mark.parametrize(
    ("captions", "base"),
    [
        ("man detective, woman detective, detective", "detective"),
        ("man, woman, girl, old man, man red hair, person bald", "person"),
        ("family man woman boy, family adult adult child", "family"),
        ("mermaid, merman, merperson", "merperson"),
        ("woman running facing right, person running", "running"),
        ("red heart, light blue heart", "heart"),
        ("ten o\u2019clock, one-thirty", "clock"),
        ("keycap 0, keycap 10, keycap #, keycap *", "keycap"),
        ("up-right arrow, left arrow", "arrow"),
        ("waving hand", "waving hand"),
    ],
)
def test_variants_have_one_base_name(captions, base):
    assert {base_name(caption) for caption in captions.split(", ")} == {base}


def test_documented_base_names():
    result = doctest.testmod(vision.emoji)
    assert (result.attempted, result.failed) == (2, 0)


def test_no_base_name_stands_on_both_sides(emoji):
    mask = emoji.held_out()
    bases = np.array([base_name(caption) for caption in emoji.captions["en"]])
    assert not set(bases[mask]) & set(bases[~mask])
    categories = np.array(emoji.categories)
    for category in CATEGORIES:
        share = mask[categories == category].mean()
        assert share == pytest.approx(0.2, abs=0.01), category


def test_split_depends_on_names_alone():
    """Neither the order of the drawings nor other categories move a name to the other side."""
    names = [f"thing {i}" for i in range(40)]
    mask = held_out(names, ["a"] * 40)
    assert mask.sum() == 8
    order = np.random.default_rng(0).permutation(40)
    again = held_out([names[i] for i in order], ["a"] * 40)
    np.testing.assert_array_equal(again, mask[order])
    more = held_out([*names, "other", "another"], ["a"] * 40 + ["b"] * 2)
    np.testing.assert_array_equal(more[:40], mask)


def test_split_follows_the_sha256_of_the_names():
    names = [f"thing {i}" for i in range(10)]
    first = sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())[:2]
    assert [name for name, out in zip(names, held_out(names, ["a"] * 10), strict=True) if out] == [
        name for name in names if name in first
    ]


def test_groups_larger_than_the_share_stay_in_training():
    mask = held_out(["clock"] * 6 + ["a", "b", "c", "d"], ["time"] * 10)
    assert mask[:6].sum() == 0
    assert mask.sum() == 2
    assert held_out(["x"] * 3 + ["y"] * 2, ["a"] * 3 + ["b"] * 2, share=1).all()


def test_share_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"share \(1\.5\) must be in \[0, 1\]"):
        held_out(["a"], ["b"], 1.5)


def test_data_set_has_eight_categories_on_white(emoji):
    data = load_dataset("emoji")
    assert data.class_names == CATEGORIES
    assert (data.in_chans, len(data.train), len(data.val)) == (3, 1308, 328)
    assert data.report == {"train": 1308, "val": 328, "skipped": 0}
    assert data.train.hflip == data.val.hflip == 0
    mask, categories = emoji.held_out(), np.array(emoji.categories)
    for split, part in ((data.train, ~mask), (data.val, mask)):
        rows = np.flatnonzero(part & np.isin(categories, CATEGORIES))
        np.testing.assert_array_equal(split.pixels, emoji.on()[rows])
        assert [CATEGORIES[i] for i in split.targets] == categories[rows].tolist()
    largest = torch.bincount(data.val.targets).max() / len(data.val)
    assert largest == pytest.approx(77 / 328)


def test_batches_are_the_drawings_in_colour():
    split = load_dataset("emoji").val
    source = make_source(split, Preprocessing(size=(SIZE, SIZE)), train=False)
    batch = source.__getitems__([(0, 5), (0, 9)])
    expected = torch.from_numpy(split.pixels[[5, 9]]).movedim(-1, 1)
    torch.testing.assert_close(batch["images"], expected, rtol=0, atol=0)


def test_other_classes_and_near_misses_are_refused():
    with pytest.raises(ValueError, match="the model knows the classes cat, dog, but emoji has"):
        load_dataset("emoji", class_names=["cat", "dog"])
    with pytest.raises(ValueError, match="did you mean emoji"):
        load_dataset("emojis")


def test_loading_takes_less_than_half_a_second():
    start = time.process_time()
    load_emoji()
    assert time.process_time() - start < 0.5


def test_packing_loses_nothing_and_repeats():
    emoji = small()
    data = make.pack(emoji)
    assert data == make.pack(emoji)
    again = load_emoji(io.BytesIO(data))
    assert make.same(again, emoji)
    assert not make.same(again, replace(emoji, images=emoji.images ^ 1))
    assert not make.same(again, replace(emoji, names=emoji.names[::-1]))


def test_names_that_do_not_survive_are_refused():
    emoji = small()
    broken = replace(emoji, names=("two\nlines", *emoji.names[1:]))
    with pytest.raises(RuntimeError, match="differ from the given ones"):
        make.pack(broken)


def test_spaces_that_came_with_a_name_are_dropped():
    assert make.to_caption(":red__heart :") == "red heart"
    assert make.to_text("1F468-200D-1F33E") == "\U0001f468\u200d\U0001f33e"


def test_other_pictures_are_refused(tmp_path):
    path = tmp_path / "other.png"
    Image.new("RGBA", (SIZE, SIZE)).save(path)
    with pytest.raises(ValueError, match=r"other\.png lacks the text chunks \['name'"):
        load_emoji(path)


def packages(root: Path, emoji: Emoji) -> tuple[Path, Path]:
    """A tarball and a wheel laid out as the published ones, with few entries, unsorted."""
    sheet = np.full((3 * (SIZE + 2), 3 * (SIZE + 2), 4), 99, np.uint8)
    entries = []
    for i in reversed(range(len(emoji))):
        y, x = divmod(i, 3)
        top, left = y * (SIZE + 2) + 1, x * (SIZE + 2) + 1
        sheet[top : top + SIZE, left : left + SIZE] = emoji.images[i]
        entries.append(
            {
                "unified": f"{ord(emoji.characters[i]):X}",
                "short_name": emoji.names[i],
                "category": emoji.categories[i],
                "subcategory": emoji.subcategories[i],
                "sort_order": i,
                "sheet_x": x,
                "sheet_y": y,
                "has_img_google": True,
            }
        )
    png = io.BytesIO()
    Image.fromarray(sheet).save(png, "PNG")
    files = {
        "emoji.json": json.dumps(entries).encode(),
        "img/google/sheets-clean/32.png": png.getvalue(),
    }
    with tarfile.open(root / "drawings.tgz", "w:gz") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    with zipfile.ZipFile(root / "captions.whl", "w") as wheel:
        for language, names in emoji.captions.items():
            keys = [f":{name.replace(' ', '_')}:" for name in names]
            suffix = f"_{language}"
            if language == "en":
                keys, suffix = [{"en": key} for key in keys], ""
            table = dict(zip(emoji.characters, keys, strict=True))
            wheel.writestr(f"emoji/unicode_codes/emoji{suffix}.json", json.dumps(table))
    return root / "drawings.tgz", root / "captions.whl"


def test_making_the_file_from_packages(tmp_path, monkeypatch, capsys):
    emoji = small()
    drawings, captions = packages(tmp_path, emoji)
    for name, algorithm, path in (
        ("SHA512_DRAWINGS", "sha512", drawings),
        ("SHA256_CAPTIONS", "sha256", captions),
    ):
        monkeypatch.setattr(make, name, make.hash_of(path.read_bytes(), algorithm))
    make.make(drawings, captions, tmp_path / "out.png")
    assert make.same(load_emoji(tmp_path / "out.png"), emoji)
    assert make.hash_of((tmp_path / "out.png").read_bytes(), "sha256") in capsys.readouterr().out


def test_packages_of_other_versions_are_refused(tmp_path):
    drawings, captions = packages(tmp_path, small())
    with pytest.raises(ValueError, match=r"drawings\.tgz has sha512 \w+, expected 6517b17f"):
        make.make(drawings, captions, tmp_path / "out.png")
    assert not (tmp_path / "out.png").exists()
