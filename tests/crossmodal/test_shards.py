"""Pairs in WebDataset shards and through `datasets`: what is read, and what is refused."""

from __future__ import annotations

import doctest
import gzip
import io
import json
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import crossmodal.shards
from crossmodal.data import Pairs, load_pairs
from crossmodal.rows import PairError
from crossmodal.shards import expand
from vision.images import ImageError


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (6, 5, 3), np.uint8)


def png(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(seed)).save(buffer, "PNG")
    return buffer.getvalue()


def shard(path: Path, members: dict[str, bytes | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def seeds(pairs: Pairs) -> dict[int, tuple[str, ...]]:
    """Captions by the seed of the image they came with."""
    known = {pixels(seed).tobytes(): seed for seed in range(30)}
    return {
        known[np.asarray(pairs.images.image(i, 3)).tobytes()]: texts
        for i, texts in enumerate(pairs.captions)
    }


def two_shards(folder: Path) -> None:
    shard(
        folder / "s-08.tar",
        {
            "a/0.png": png(0),
            "a/0.txt": "zero \u00e9\n",
            "a/0.cls": "7",
            "a/1.jpeg.PNG": png(1),
            "a/1.json": json.dumps({"caption": ["one", "uno"], "size": 3}),
            "b/1.png": png(2),
            "b/1.txt": "two",
            "b/1.json": json.dumps({"caption": "not this one"}),
        },
    )
    shard(folder / "s-09.tar", {"0.png": png(3), "0.txt": "three", "._0.png": b"rubbish"})
    shard(folder / "s-10.tar", {"0.png": png(4), "0.txt": "four"})


def test_samples_of_all_shards_are_read_by_index(tmp_path):
    two_shards(tmp_path)
    data = load_pairs(f"wds:{tmp_path}/s-{{08..10}}.tar", val_share=0)
    assert seeds(data.train) == {
        0: ("zero \u00e9",),
        1: ("one", "uno"),
        2: ("two",),
        3: ("three",),
        4: ("four",),
    }
    assert data.report["skipped"] == 0
    assert seeds(load_pairs(f"wds:{tmp_path}/s-*.tar", val_share=0).train) == seeds(data.train)
    copy = pickle.loads(pickle.dumps(data.train))
    assert np.array_equal(copy.images.image(3, 3), pixels(3)), "worker processes read the same"
    assert np.asarray(data.train.images.image(3, 1)).shape == (6, 5)


def test_shards_are_divided_by_key_or_by_another_pattern(tmp_path):
    two_shards(tmp_path)
    data = load_pairs(f"wds:{tmp_path}/s-{{08,09,10}}.tar", val_share=0.4)
    assert (len(data.train), len(data.val)) == (3, 2)
    assert set(seeds(data.train)) | set(seeds(data.val)) == set(range(5))
    data = load_pairs(f"wds:{tmp_path}/s-08.tar", val=f"wds:{tmp_path}/s-{{09..10}}.tar")
    assert (set(seeds(data.train)), set(seeds(data.val))) == ({0, 1, 2}, {3, 4})
    with pytest.raises(PairError, match="3 validation images are training images too"):
        load_pairs(f"wds:{tmp_path}/s-08.tar", val=f"wds:{tmp_path}/s-08.tar")


def test_braces_expand_as_in_a_shell():
    assert doctest.testmod(crossmodal.shards).attempted == 1
    assert doctest.testmod(crossmodal.shards).failed == 0
    assert expand("s-{9..11}.tar") == ["s-9.tar", "s-10.tar", "s-11.tar"]
    assert expand("{a,b}{0..1}") == ["a0", "a1", "b0", "b1"]
    assert expand("plain.tar") == ["plain.tar"]


def test_bad_samples_are_named_by_shard_and_key(tmp_path):
    broken = {
        "0.png": png(0),
        "0.txt": "fine",
        "1.png": png(1),
        "2.txt": "no image",
        "3.png": png(3),
        "3.jpg": png(4),
        "3.txt": "two images",
        "4.png": png(4),
        "4.txt": " \n",
        "5.png": png(5),
        "5.txt": b"caf\xe9",
        "6.png": png(6),
        "6.json": "{",
        "7.png": png(7),
        "7.json": '{"text": "x"}',
        "8.png": png(8)[:60],
        "8.txt": "cut",
    }
    file = shard(tmp_path / "s.tar", broken)
    with pytest.raises(PairError) as caught:
        load_pairs(f"wds:{file}")
    said = str(caught.value)
    for key, problem in {
        1: "no caption: neither .txt nor .json",
        2: "0 images instead of one among 2.txt",
        3: "2 images instead of one among 3.png, 3.jpg, 3.txt",
        4: "4.txt is empty",
        5: "5.txt is not UTF-8 at byte 3",
        6: "6.json is not JSON: ",
        7: "7.json has no field caption (--caption-column names another)",
        8: f"{file} member 8.png: ",
    }.items():
        assert f"{file} sample {key}: {problem}" in said
    data = load_pairs(f"wds:{file}", bad_rows="skip", val_share=0)
    assert seeds(data.train) == {0: ("fine",)}
    assert data.report["skipped"] == 8
    data = load_pairs(f"wds:{file}", bad_rows="skip", check_images=False, val_share=0)
    with pytest.raises(ImageError, match=r"s\.tar member 8\.png: "):
        data.train.images.image(1, 3)


@pytest.mark.parametrize(
    ("damage", "message", "left"),
    [
        (lambda x: x[: 512 * 9 + 50], r"2\.png: unexpected end of data", 2),
        (lambda x: x[: 512 * 8], r"1\.txt: the end is missing", 2),
        (lambda x: x[: 512 * 8 + 300], r"1\.txt: the end is missing", 2),
        (lambda x: x[: 512 * 8 + 40] + b"?" + x[512 * 8 + 41 :], r"1\.txt: what follows is no", 2),
        (lambda x: x[:2600], r"1\.png: unexpected end of data", 1),
    ],
)
def test_damaged_shards_are_named_with_the_member(tmp_path, damage, message, left):
    small: dict[str, bytes | str] = {}
    for i in range(3):
        small |= {f"{i}.png": png(i), f"{i}.txt": str(i)}
    assert max(len(png(i)) for i in range(3)) < 512, "a member is a header and a block"
    file = shard(tmp_path / "s.tar", small)
    assert len(load_pairs(f"wds:{file}", val_share=0).train) == 3
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(PairError, match=rf"s\.tar: damaged in or after member {message}"):
        load_pairs(f"wds:{file}")
    data = load_pairs(f"wds:{file}", bad_rows="skip", val_share=0)
    assert list(seeds(data.train)) == list(range(left))


def test_a_caption_that_is_cut_short_is_not_used(tmp_path):
    file = shard(
        tmp_path / "s.tar", {"0.png": png(0), "0.txt": "a", "1.png": png(1), "1.txt": "b" * 90}
    )
    file.write_bytes(file.read_bytes()[: 512 * 7 + 50])
    data = load_pairs(f"wds:{file}", bad_rows="skip", val_share=0)
    assert seeds(data.train) == {0: ("a",)}
    assert "1.txt: unexpected end of data" in "".join(data.report["skipped_rows"])


def test_what_is_no_local_tar_is_refused(tmp_path):
    file = shard(tmp_path / "s.tar", {"0.png": png(0), "0.txt": "x"})
    zipped = tmp_path / "s.tar.gz"
    zipped.write_bytes(gzip.compress(file.read_bytes()))
    with pytest.raises(PairError, match=r"its beginning: .*plain tar files, not compressed"):
        load_pairs(f"wds:{zipped}")
    with pytest.raises(PairError, match="copy them to a local folder"):
        load_pairs("wds:https://example.org/{0..9}.tar")
    with pytest.raises(FileNotFoundError, match=r"no shard .*/s-1\.tar \(looked in /"):
        load_pairs(f"wds:{tmp_path}/s-{{1..2}}.tar")
    with pytest.raises(FileNotFoundError, match=r"no shard .*/none-\*\.tar"):
        load_pairs(f"wds:{tmp_path}/none-*.tar")


def test_samples_are_those_that_webdataset_reads(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    for number in range(2):
        with webdataset.TarWriter(f"{tmp_path}/s-{number}.tar") as writer:
            for i in range(number * 4, number * 4 + 4):
                writer.write({"__key__": f"k/{i:04d}", "png": png(i), "txt": f"caption {i}"})
    pattern = f"{tmp_path}/s-{{0..1}}.tar"
    theirs = webdataset.WebDataset(pattern, shardshuffle=False, empty_check=False).decode("rgb8")
    ours = load_pairs(f"wds:{pattern}", val_share=0).train
    samples = list(theirs)
    assert len(samples) == len(ours) == 8
    for i, sample in enumerate(samples):
        assert np.array_equal(sample["png"], np.asarray(ours.images.image(i, 3)))
        assert (sample["txt"],) == ours.captions[i]
