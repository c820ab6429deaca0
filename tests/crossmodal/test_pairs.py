"""Pairs listed in files, and what all lists of rows share: merging, checks, division."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from crossmodal.data import load_pairs
from crossmodal.rows import PairError, Row, divide


def picture(path: Path, seed: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def pictures(folder: Path, n: int) -> list[str]:
    return [picture(folder / f"img/{i}.png", i).relative_to(folder).as_posix() for i in range(n)]


def jsonl(file: Path, rows: list) -> str:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    file.write_text(text, encoding="utf-8")
    return f"pairs:{file}"


def table(file: Path, rows: list[list[str]]) -> str:
    with file.open("w", encoding="utf-8", newline="") as text:
        csv.writer(text, delimiter="\t" if file.suffix == ".tsv" else ",").writerows(rows)
    return f"pairs:{file}"


def content(pairs) -> dict[str, tuple[str, ...]]:
    return {
        Path(path).name: texts
        for path, texts in zip(pairs.images.paths, pairs.captions, strict=True)
    }


def test_lines_give_images_with_one_or_several_captions(tmp_path):
    names = pictures(tmp_path, 4)
    rows = [
        {"image": names[0], "caption": "zero, \u00e9 \u540d", "split": "train", "note": 1},
        {"image": names[1], "caption": ["one", " uno "], "split": "val"},
        "",
        {"image": names[2], "caption": "two", "split": "train"},
        {"image": f"./img/../{names[2]}", "caption": ["zwei", "two"], "split": "train"},
        {"image": str(tmp_path / names[3]), "caption": "three", "split": "train"},
    ]
    data = load_pairs(jsonl(tmp_path / "a.jsonl", rows))
    assert content(data.train) == {
        "0.png": ("zero, \u00e9 \u540d",),
        "2.png": ("two", "zwei"),
        "3.png": ("three",),
    }
    assert content(data.val) == {"1.png": ("one", "uno")}
    assert data.report == {
        "train": 3,
        "val": 1,
        "train_captions": 4,
        "val_captions": 2,
        "skipped": 0,
        "skipped_rows": [],
    }
    image = np.asarray(data.train.images.image(1, 3))
    assert np.array_equal(image, np.asarray(Image.open(tmp_path / names[2])))


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_tables_equal_lines(tmp_path, suffix):
    names = pictures(tmp_path, 3)
    captions = ['with a "quote", a comma', "two\nlines", "a\ttab"]
    rows = [[caption, name, "x"] for name, caption in zip(names, captions, strict=True)]
    rows.append(["again", names[0], "x"])
    spec = table(tmp_path / f"a{suffix}", [[" caption", "image", "other"], *rows])
    same = jsonl(tmp_path / "a.jsonl", [{"image": n, "caption": c} for c, n, _ in rows])
    one, two = load_pairs(spec, val_share=0.34), load_pairs(same, val_share=0.34)
    assert content(one.train) == content(two.train)
    assert content(one.val) == content(two.val)
    assert len(one.val) == 1
    assert (content(one.train) | content(one.val))["0.png"] == (captions[0], "again")


def test_a_byte_order_mark_and_other_column_names_are_fine(tmp_path):
    (name,) = pictures(tmp_path, 1)
    file = tmp_path / "a.csv"
    file.write_text(f"filepath,title\n{name},one\n", encoding="utf-8-sig")
    data = load_pairs(f"pairs:{file}", val_share=0, image_column="filepath", caption_column="title")
    assert content(data.train) == {"0.png": ("one",)}


# --- bad rows


def bad_lines(tmp_path: Path) -> tuple[list, dict[int, str]]:
    """Rows for a JSONL file, and what is wrong in the bad ones by line."""
    names = pictures(tmp_path, 3)
    (tmp_path / "cut.png").write_bytes((tmp_path / names[0]).read_bytes()[:50])
    (tmp_path / "empty.png").write_bytes(b"")
    rows = [
        {"image": names[0], "caption": "good"},
        {"image": "img/none.png", "caption": "x"},
        {"image": names[1], "caption": "  "},
        {"image": names[1], "caption": []},
        {"image": names[1], "caption": ["x", 3]},
        {"image": names[1], "text": "x"},
        '{"image": "a.png", "caption": ',
        '["a.png", "x"]',
        {"image": names[1], "caption": "x", "split": "test"},
        {"image": "cut.png", "caption": "x"},
        {"image": names[2], "caption": "good too"},
        {"image": names[0], "caption": "x", "split": "train"},
        {"image": "empty.png", "caption": "x"},
    ]
    wrong = {
        2: f"no image {tmp_path}/img/none.png (paths count from the folder of the file)",
        3: "caption is empty",
        4: "caption lists 0 texts",
        5: "caption must be text, not 3",
        6: "no caption among 'image', 'text' (--image-column and --caption-column",
        7: "not JSON, one object a line: Expecting value at column",
        8: "must be an object, not list",
        9: "split 'test' must be train or val",
        10: f"{tmp_path}/cut.png: ",
        12: "the image is in split 'train', but in '' at",
        13: f"{tmp_path}/empty.png: empty file",
    }
    return rows, wrong


def test_bad_rows_are_named_by_line_all_at_once(tmp_path):
    rows, wrong = bad_lines(tmp_path)
    spec = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(PairError) as caught:
        load_pairs(spec)
    head, *lines = str(caught.value).split("\n")
    assert head == f"11 rows of {spec} cannot be used (--bad-rows skip leaves them out):"
    assert len(lines) == 11
    assert lines[-1].strip() == "..."
    said = dict(line.strip().split(": ", 1) for line in lines[:-1])
    for line, problem in wrong.items():
        if line != 13:  # the eleventh
            assert said[f"{tmp_path}/a.jsonl line {line}"].startswith(problem)


def test_bad_rows_are_left_out_and_counted_if_asked(tmp_path, capsys):
    rows, wrong = bad_lines(tmp_path)
    spec = jsonl(tmp_path / "a.jsonl", rows)
    data = load_pairs(spec, bad_rows="skip", val_share=0)
    assert content(data.train) == {"0.png": ("good",), "2.png": ("good too",)}
    assert data.report["skipped"] == len(wrong) == 11
    assert len(data.report["skipped_rows"]) == 10
    assert f"11 rows of {spec} are left out" in capsys.readouterr().err


def test_images_are_trusted_if_asked(tmp_path):
    rows, _ = bad_lines(tmp_path)
    spec = jsonl(tmp_path / "a.jsonl", [rows[0], rows[9]])
    data = load_pairs(spec, check_images=False, val_share=0)
    assert list(content(data.train)) == ["0.png", "cut.png"]


def test_every_image_of_many_is_checked(tmp_path):
    names = [picture(tmp_path / f"{i}.png").name for i in range(300)]
    (tmp_path / "299.png").write_bytes(b"no image")
    spec = jsonl(tmp_path / "a.jsonl", [{"image": name, "caption": name} for name in names])
    with pytest.raises(PairError, match=r"(?s)1 rows of .*line 300: .*299\.png"):
        load_pairs(spec)
    data = load_pairs(spec, bad_rows="skip")
    assert (len(data.train), len(data.val)) == (269, 30)


def test_a_file_without_a_usable_pair_is_refused_even_so(tmp_path):
    spec = jsonl(tmp_path / "a.jsonl", [{"image": "none.png", "caption": "x"}])
    with pytest.raises(PairError, match="holds no usable pair"):
        load_pairs(spec, bad_rows="skip")


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_text_that_is_not_utf8_is_named_by_line(tmp_path, suffix):
    name = pictures(tmp_path, 1)[0].encode()
    rows = {
        ".jsonl": b'{"image": "%s", "caption": "ok"}\n{"image": "%s", "caption": "caf\xe9"}\n',
        ".csv": b'image,caption\n%s,"o\nk"\n%s,caf\xe9\n',
    }[suffix]
    file = tmp_path / f"a{suffix}"
    file.write_bytes(rows % (name, name))
    line = {".jsonl": 2, ".csv": 4}[suffix]
    with pytest.raises(PairError, match=rf"line {line}: caption 'caf\\udce9' is not UTF-8; save"):
        load_pairs(f"pairs:{file}")
    data = load_pairs(f"pairs:{file}", bad_rows="skip", val_share=0)
    assert data.report["skipped"] == 1
    assert len(data.train) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,caption\na.png,x\n", r"line 1: no column image; it names 'path, caption' \(--image"),
        ("a.png,x\n", "line 1: no column image and caption; it names 'a.png, x'"),
        ("image,caption\na.png,x, y\n", "line 2: 3 fields, but the first line names 2 columns"),
        ('image,caption\n\na.png,"x\nb.png,y\n', "line 3: unexpected end of data; a field"),
        ("", "is empty"),
        ("image,caption\n", "holds no pair"),
        ("image,caption,split\na.png,x,\n", "line 2: split '' must be train or val, in every row"),
    ],
)
def test_tables_with_wrong_columns_or_quotes_are_refused(tmp_path, text, message):
    picture(tmp_path / "a.png")
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(PairError, match=message):
        load_pairs(f"pairs:{tmp_path}/a.csv")


def test_a_table_in_utf16_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("image,caption\na.png,x\n", encoding="utf-16")
    with pytest.raises(PairError, match="line 1: "):
        load_pairs(f"pairs:{tmp_path}/a.csv")


def test_missing_files_and_other_kinds_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*none\.csv \(looked for /"):
        load_pairs(f"pairs:{tmp_path}/none.csv")
    (tmp_path / "a.txt").write_text("image,caption\n")
    with pytest.raises(PairError, match=r"must be one of \.jsonl, \.ndjson, \.csv, \.tsv"):
        load_pairs(f"pairs:{tmp_path}/a.txt")


# --- two parts


def row(key: str, split: str = "") -> Row:
    return Row(key, ("x",), key, key, split)


def test_a_share_is_held_out_by_key_whatever_the_order():
    rows = [row(f"{i}.png") for i in range(50)]
    train, val = divide(rows, 0.1)
    assert (len(train), len(val)) == (45, 5)
    assert {r.key for r in train} | {r.key for r in val} == {r.key for r in rows}
    assert {r.key for r in divide(rows[::-1], 0.1)[1]} == {r.key for r in val}
    assert {r.key for r in val} < {r.key for r in divide(rows, 0.4)[1]}
    assert [r.key for r in val] != [r.key for r in rows[:5]] != [r.key for r in rows[-5:]]


def test_a_share_leaves_each_side_a_row_and_none_or_all_do_not():
    two = [row("a"), row("b")]
    assert [len(part) for part in divide(two, 0.01)] == [1, 1]
    assert [len(part) for part in divide(two, 0.99)] == [1, 1]
    assert [len(part) for part in divide(two, 0)] == [2, 0]
    assert [len(part) for part in divide(two, 1)] == [0, 2]
    assert [len(part) for part in divide(two[:1], 0.1)] == [1, 0]


def test_the_split_column_goes_before_a_share():
    train, val = divide([row("a", "val"), row("b", "train"), row("c", "val")], 0.0)
    assert [r.key for r in train] == ["b"]
    assert [r.key for r in val] == ["a", "c"]


def test_another_file_can_be_the_validation_part(tmp_path):
    names = pictures(tmp_path, 4)
    rows = [{"image": name, "caption": name} for name in names]
    train, val = jsonl(tmp_path / "a.jsonl", rows[:3]), jsonl(tmp_path / "b.jsonl", rows[3:])
    data = load_pairs(train, val=val)
    assert list(content(data.train)) == ["0.png", "1.png", "2.png"]
    assert list(content(data.val)) == ["3.png"]
    leak = jsonl(tmp_path / "c.jsonl", rows[2:])
    with pytest.raises(
        PairError, match=r"1 validation images .*c.jsonl line 1 is .*a.jsonl line 3"
    ):
        load_pairs(train, val=leak)
    with pytest.raises(ValueError, match="val 'emoji' must be pairs:FILE"):
        load_pairs(train, val="emoji")


def test_of_two_files_with_splits_each_gives_its_own_part(tmp_path):
    names = pictures(tmp_path, 4)
    for file, some in (("a.jsonl", names[:2]), ("b.jsonl", names[2:])):
        splits = zip(some, ("train", "val"), strict=True)
        jsonl(tmp_path / file, [{"image": n, "caption": n, "split": s} for n, s in splits])
    data = load_pairs(f"pairs:{tmp_path}/a.jsonl", val=f"pairs:{tmp_path}/b.jsonl")
    assert (list(content(data.train)), list(content(data.val))) == (["0.png"], ["3.png"])


def test_bad_rows_of_the_validation_file_count_too(tmp_path):
    (name, other) = pictures(tmp_path, 2)
    train = jsonl(tmp_path / "a.jsonl", [{"image": name, "caption": "x"}])
    val = jsonl(tmp_path / "b.jsonl", [{"image": other, "caption": "x"}, {"image": "none"}])
    with pytest.raises(PairError, match=r"1 rows of .*b.jsonl"):
        load_pairs(train, val=val)
    assert load_pairs(train, val=val, bad_rows="skip").report["skipped"] == 1


def test_a_split_in_some_rows_only_is_refused(tmp_path):
    names = pictures(tmp_path, 3)
    rows = [{"image": name, "caption": "a"} for name in names]
    rows[1]["split"], rows[2]["split"] = "train", "val"
    spec = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(PairError, match=r"line 1: no split, but .*line 2 has one"):
        load_pairs(spec)
    assert len(load_pairs(spec, bad_rows="skip").train) == 1


@pytest.mark.parametrize("line", ["[" * 100_000, '{"image": ' + "9" * 6000 + "}"])
def test_json_that_python_does_not_read_is_a_bad_row(tmp_path, line):
    (name, other) = pictures(tmp_path, 2)
    rows = [{"image": name, "caption": "a"}, {"image": other, "caption": "b"}, line]
    spec = jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(PairError, match="line 3: not JSON"):
        load_pairs(spec)
    assert load_pairs(spec, bad_rows="skip").report["skipped"] == 1


def test_lines_in_utf_16_say_so(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"image": "a.png", "caption": "a"}), encoding="utf-16")
    with pytest.raises(PairError, match=r"line 1: .*save the file as UTF-8"):
        load_pairs(f"pairs:{file}")


def test_a_link_does_not_put_an_image_into_both_parts(tmp_path):
    (name,) = pictures(tmp_path, 1)
    (tmp_path / "link.png").symlink_to(tmp_path / name)
    rows = [
        {"image": name, "caption": "a", "split": "train"},
        {"image": "link.png", "caption": "b", "split": "val"},
    ]
    with pytest.raises(PairError, match="line 2: the image is in split 'val', but in 'train'"):
        load_pairs(jsonl(tmp_path / "a.jsonl", rows))


def test_two_columns_of_one_name_are_refused(tmp_path):
    rows = [["image", "caption", "caption"], [*pictures(tmp_path, 1), "a", "b"]]
    with pytest.raises(PairError, match="line 1: 'caption' names several columns"):
        load_pairs(table(tmp_path / "a.csv", rows))
