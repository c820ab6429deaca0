"""Data sets and sources: classes, bad files, pixels keyed by (seed, epoch, sample) alone."""

from __future__ import annotations

import copy
import io
import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vision.augment import Augment
from vision.data import FileSource, MemorySource, Split, load_dataset, make_source, typical_size
from vision.images import ImageError, decode
from zoo.card import Preprocessing
from zoo.preprocess import resize_and_crop

PRE = Preprocessing(size=(16, 12))
COLOURS = {"ant": (200, 30, 30), "bee": (30, 200, 30), "cat": (30, 30, 200), "dog": (200, 200, 30)}


def picture(colour: tuple[int, int, int], seed: int = 0, size=(24, 30)) -> Image.Image:
    """A colour with some noise, so that a label can be told from the pixels."""
    offset = np.random.default_rng(seed).integers(-25, 26, (*size, 3))
    return Image.fromarray((np.array(colour) + offset).astype(np.uint8))


def save(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)


def folder(root: Path, train: int = 3, val: int = 2, names=tuple(COLOURS)) -> Path:
    for split, count in (("train", train), ("val", val)):
        for name in names:
            for i in range(count):
                save(picture(COLOURS[name], i), root / split / name / f"{i}.png")
    return root


def remove(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()
    path.rmdir()


def bad_files() -> dict[str, bytes]:
    """Case D4: a good header with a truncated body, nothing at all, text in disguise."""
    buffer = io.BytesIO()
    picture((90, 90, 90), size=(64, 64)).save(buffer, "JPEG")
    return {
        "cut.jpg": buffer.getvalue()[: len(buffer.getvalue()) // 2],
        "empty.png": b"",
        "text.jpg": b"hello\n" * 50,
    }


def spoil(root: Path, place: str) -> list[str]:
    paths = [root / place / name for name in bad_files()]
    for path, data in zip(paths, bad_files().values(), strict=True):
        path.write_bytes(data)
    return [str(path) for path in paths]


def labels_match_pixels(split: Split, names: tuple[str, ...]) -> bool:
    """Whether each sample's label is the class whose colour it has."""
    source = make_source(split, PRE, train=False)
    batch = source.__getitems__([(0, i) for i in range(len(split))])
    means = batch["images"].double().mean((2, 3))  # b c
    colours = torch.tensor([COLOURS[name] for name in names], dtype=torch.float64)
    nearest = torch.cdist(means, colours).argmin(1)
    return torch.equal(nearest, batch["targets"])


# --- digits


def test_the_digits_are_split_once_and_for_all():
    from sklearn.datasets import load_digits

    np.random.seed(1)  # noqa: NPY002
    one = load_dataset("digits")
    np.random.seed(2)  # noqa: NPY002
    two = load_dataset("digits")
    assert (len(one.train), len(one.val), one.in_chans) == (1437, 360, 1)
    assert list(one.class_names) == [str(i) for i in range(10)]
    for a, b in ((one.train, two.train), (one.val, two.val)):
        assert np.array_equal(a.pixels, b.pixels)
        assert torch.equal(a.targets, b.targets)
    counts = torch.bincount(one.val.targets, minlength=10)
    assert counts.min() >= 34
    assert counts.max() <= 38
    raw = load_digits()
    both = np.concatenate([one.train.pixels, one.val.pixels])
    labels = torch.cat([one.train.targets, one.val.targets]).numpy()

    def rows(pixels, target):
        return sorted(zip(map(bytes, pixels), target.tolist(), strict=True))

    scaled = np.floor(raw.images * 255 / 16 + 0.5).astype(np.uint8)
    assert rows(both, labels) == rows(scaled, raw.target), "each image once, with its own label"
    assert both.max() == 255


def test_digits_fit_models_with_one_or_three_channels():
    val = load_dataset("digits").val
    one = Preprocessing(size=(8, 8), mean=(0.5,), std=(0.5,))
    three = Preprocessing(size=(8, 8))
    grey = make_source(val, one, train=False).__getitems__([(0, 3)])["images"]
    colour = make_source(val, three, train=False).__getitems__([(0, 3)])["images"]
    assert np.array_equal(grey[0, 0].numpy(), val.pixels[3])
    assert torch.equal(colour, grey.expand(-1, 3, -1, -1))
    with pytest.raises(ValueError, match="the model takes 4"):
        make_source(val, Preprocessing(mean=(0.5,) * 4, std=(0.5,) * 4), train=False)


# --- folders


def test_a_folder_is_read_with_its_own_labels(tmp_path):
    save(picture(COLOURS["bee"]), folder(tmp_path) / "train/bee/deep/er/X.JPG")
    save(picture(COLOURS["ant"]), tmp_path / "train/bee/.hidden.png")
    (tmp_path / "train/bee/notes.txt").write_text("not an image")
    data = load_dataset(f"folder:{tmp_path}")
    assert (data.class_names, data.in_chans) == (("ant", "bee", "cat", "dog"), 3)
    assert (len(data.train), len(data.val)) == (13, 8)
    assert (data.report["train"], data.report["val"], data.report["skipped"]) == (13, 8, 0)
    assert labels_match_pixels(data.train, data.class_names)
    assert labels_match_pixels(data.val, data.class_names)


@pytest.mark.parametrize("how", ["empty folder", "no folder"])
def test_a_class_without_validation_images_is_reported(tmp_path, capsys, how):
    """Case D1: class 2 of 4; the classes after it keep their numbers."""
    remove(folder(tmp_path) / "val/bee")
    if how == "empty folder":
        (tmp_path / "val/bee").mkdir()
    data = load_dataset(f"folder:{tmp_path}")
    assert data.class_names == ("ant", "bee", "cat", "dog")
    assert data.val.targets.tolist() == [0, 0, 2, 2, 3, 3]
    assert labels_match_pixels(data.val, data.class_names)
    assert data.report["classes_without_val_images"] == ["bee"]
    assert "bee" in capsys.readouterr().err


def test_a_class_only_in_val_is_an_error(tmp_path):
    """Case D1."""
    save(picture((1, 1, 1)), folder(tmp_path) / "val/eel/0.png")
    with pytest.raises(ValueError, match=r"val has classes .* lack: eel"):
        load_dataset(f"folder:{tmp_path}")


def test_the_order_of_classes_can_be_that_of_a_model(tmp_path):
    order = ["dog", "ant", "cat", "bee"]
    remove(folder(tmp_path) / "val/cat")
    data = load_dataset(f"folder:{tmp_path}", class_names=order)
    assert list(data.class_names) == order
    assert data.val.targets.tolist() == [0, 0, 1, 1, 3, 3]
    assert labels_match_pixels(data.train, data.class_names)
    with pytest.raises(ValueError, match="dog"):
        load_dataset(f"folder:{tmp_path}", class_names=order[1:])


def test_only_the_parts_asked_for_are_opened(tmp_path):
    spoil(folder(tmp_path), "train/ant")
    data = load_dataset(f"folder:{tmp_path}", splits=("val",))
    assert (len(data.train), len(data.val)) == (0, 8)
    assert data.class_names == ("ant", "bee", "cat", "dog"), "still those of training"


@pytest.mark.parametrize("bad_images", ["stop", "skip"])
def test_a_class_without_training_images_is_an_error(tmp_path, bad_images):
    (folder(tmp_path) / "train/eel").mkdir()
    with pytest.raises(ValueError, match=r"train: class eel has no images"):
        load_dataset(f"folder:{tmp_path}", bad_images=bad_images)


def test_what_is_missing_is_named_with_what_is_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_dataset(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(FileNotFoundError, match="holds: nothing"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "training").mkdir()
    with pytest.raises(FileNotFoundError, match=r"train and val; it holds: training"):
        load_dataset(f"folder:{tmp_path}")
    (tmp_path / "train").mkdir()
    (tmp_path / "val").mkdir()
    with pytest.raises(ValueError, match=r"train holds no class folders"):
        load_dataset(f"folder:{tmp_path}")


def test_no_images_at_all_is_an_error(tmp_path):
    for place in ("train/ant", "val/ant"):
        (tmp_path / place).mkdir(parents=True)
    with pytest.raises(ValueError, match="holds no images"):
        load_dataset(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("spec", "near"), [("digit", "digits"), ("fodler:/x", "folder"), ("folder:", "folder:PATH")]
)
def test_an_unknown_spec_lists_the_valid_ones(spec, near):
    with pytest.raises(ValueError, match=near) as caught:
        load_dataset(spec)
    assert all(word in str(caught.value) for word in (repr(spec), "digits", "folder:PATH"))


def test_an_unknown_policy_for_bad_images_is_an_error():
    with pytest.raises(ValueError, match="'ignore' must be 'stop' or 'skip'"):
        load_dataset("digits", bad_images="ignore")


# --- unreadable files, case D4


def test_all_unreadable_files_are_named_at_once(tmp_path):
    paths = [*spoil(folder(tmp_path), "train/ant"), *spoil(tmp_path, "val/dog")]
    with pytest.raises(ImageError) as caught:
        load_dataset(f"folder:{tmp_path}")
    assert all(path in str(caught.value) for path in paths)
    assert "6 unreadable" in str(caught.value)


def test_of_many_unreadable_files_ten_are_named_and_all_counted(tmp_path):
    folder(tmp_path)
    for i in range(14):
        (tmp_path / f"train/cat/bad{i:02}.png").touch()
    with pytest.raises(ImageError) as caught:
        load_dataset(f"folder:{tmp_path}")
    assert "14 unreadable" in str(caught.value)
    assert str(caught.value).count("cat/bad") == 10
    data = load_dataset(f"folder:{tmp_path}", bad_images="skip")
    assert data.report["skipped"] == 14
    assert len(data.report["skipped_files"]) == 10


def test_skipped_files_are_counted_and_shift_no_label(tmp_path, capsys):
    paths = [*spoil(folder(tmp_path), "train/bee"), *spoil(tmp_path, "val/ant")]
    data = load_dataset(f"folder:{tmp_path}", bad_images="skip")
    assert (len(data.train), len(data.val)) == (12, 8)
    assert data.report["skipped"] == 6
    assert sorted(data.report["skipped_files"]) == sorted(paths)
    assert not set(paths) & {*data.train.paths, *data.val.paths}
    assert labels_match_pixels(data.train, data.class_names)
    assert labels_match_pixels(data.val, data.class_names)
    assert "6 unreadable" in capsys.readouterr().err


def test_a_class_left_with_no_readable_image_is_an_error(tmp_path):
    for file in (folder(tmp_path) / "train/cat").iterdir():
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="class cat has no readable image"):
        load_dataset(f"folder:{tmp_path}", bad_images="skip")


def test_a_validation_part_with_no_readable_image_is_an_error(tmp_path):
    for file in (folder(tmp_path) / "val").glob("*/*"):
        file.write_bytes(b"")
    with pytest.raises(ImageError, match="val has no readable image"):
        load_dataset(f"folder:{tmp_path}", bad_images="skip")


def test_a_file_that_breaks_after_the_check_is_named(tmp_path):
    data = load_dataset(f"folder:{folder(tmp_path)}")
    source = make_source(data.train, PRE, train=True, in_memory=False)
    Path(data.train.paths[4]).write_bytes(b"")
    with pytest.raises(ImageError, match=r"bee/1\.png"):
        source.__getitems__([(0, 3), (0, 4)])


# --- sources


def alike(n: int, root: Path) -> Split:
    """The same picture n times, so that different pixels mean different random numbers."""
    for i in range(n):
        save(picture((90, 120, 150), size=(24, 20)), root / f"{i:02}.png")
    paths = tuple(str(root / f"{i:02}.png") for i in range(n))
    return Split(torch.arange(n) % 5, hflip=0.5, paths=paths)


AUGMENTS = {
    "affine": (True, Augment()),
    "affine and policy": (True, Augment(shear=5.0, policy="randaugment")),
    "crops in memory": (True, Augment(spatial="crop", policy="randaugment")),
    "flips in memory": (True, Augment(spatial="none", policy="trivialaugment")),
    "crops": (False, Augment()),
    "crops and policy": (False, Augment(policy="randaugment")),
    "affine files": (False, Augment(spatial="affine", shear=5.0)),
}


def augmented(kind: str, split: Split, seed: int = 0):
    in_memory, augment = AUGMENTS[kind]
    return make_source(split, PRE, train=True, augment=augment, seed=seed, in_memory=in_memory)


def fetch(source, keys) -> dict:
    """Key -> pixels, from one batch; also checks the rest of the batch."""
    batch = source.__getitems__(keys)
    assert batch["images"].dtype in (torch.uint8, torch.float32)
    assert batch["ids"].tolist() == [index for _, index in keys]
    assert batch["ids"].dtype == batch["targets"].dtype == torch.int64
    assert torch.equal(batch["targets"], source.targets[batch["ids"]])
    return dict(zip(keys, batch["images"], strict=True))


@pytest.mark.parametrize("kind", AUGMENTS)
def test_a_sample_of_an_epoch_is_the_same_in_any_batch(kind, tmp_path):
    split = alike(12, tmp_path)
    source, keys = augmented(kind, split), [(e, i) for e in (0, 1) for i in range(12)]
    alone = {key: fetch(source, [key])[key] for key in keys}
    for seed in range(3):
        torch.manual_seed(seed)
        order = random.Random(seed).sample(keys, len(keys))  # epochs mixed
        for start in range(0, len(order), 7):
            for key, pixels in fetch(augmented(kind, split), order[start : start + 7]).items():
                assert torch.equal(pixels, alone[key]), key
    numpy_keys = [(np.int64(1), np.int64(3))]
    fresh = augmented(kind, split).__getitems__(numpy_keys)["images"][0]
    assert torch.equal(fresh, alone[1, 3])


@pytest.mark.parametrize("kind", AUGMENTS)
def test_samples_epochs_and_seeds_differ_and_a_seed_reproduces(kind, tmp_path):
    split, keys = alike(12, tmp_path), [(e, i) for e in (0, 1) for i in range(12)]
    images = torch.stack([*fetch(augmented(kind, split), keys).values()])
    again = torch.stack([*fetch(augmented(kind, split), keys).values()])
    other = torch.stack([*fetch(augmented(kind, split, seed=1), keys).values()])
    assert torch.equal(images, again)
    assert not torch.equal(images, other)
    distinct = len(images.flatten(1).unique(dim=0))
    # Flips and policies have few outcomes (also "leave as it is"); the others a continuum.
    assert distinct == 24 if AUGMENTS[kind][1].spatial != "none" else distinct >= 12


def loaded(source, keys: list, start_method: str) -> dict:
    """Key -> pixels, read through a DataLoader with two workers."""
    batches = [keys[start : start + 4] for start in range(0, len(keys), 4)]
    loader: DataLoader = DataLoader(
        source,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=copy.copy,
        num_workers=2,
        multiprocessing_context=start_method,
    )
    read = {}
    for part, batch in zip(batches, loader, strict=True):
        assert torch.equal(batch["targets"], source.targets[batch["ids"]])
        read.update(zip(part, batch["images"].clone(), strict=True))
    return read


@pytest.mark.parametrize("kind", ["affine", "affine and policy", "crops", "crops and policy"])
def test_two_processes_with_two_workers_each(kind, tmp_path):
    """Case D8: all (epoch, sample) differ, and equal what one process reads alone."""
    split = alike(12, tmp_path)
    alone = fetch(augmented(kind, split), [(e, i) for e in (0, 1) for i in range(12)])
    read: dict = {}
    for rank in range(2):
        torch.manual_seed(rank)
        keys = [(e, i) for e in (0, 1) for i in range(rank, 12, 2)]
        read |= loaded(augmented(kind, split), keys, "fork")
    assert read.keys() == alone.keys()
    assert all(torch.equal(read[key], alone[key]) for key in alone)
    assert len(torch.stack([*read.values()]).flatten(1).unique(dim=0)) == 24


@pytest.mark.parametrize("kind", ["affine and policy", "crops and policy"])
def test_spawned_workers_read_the_same(kind, tmp_path):
    """Case D9."""
    split, keys = alike(8, tmp_path), [(e, i) for e in (0, 1) for i in range(8)]
    alone = fetch(augmented(kind, split), keys)
    read = loaded(augmented(kind, split), keys, "spawn")
    assert all(torch.equal(read[key], alone[key]) for key in keys)


@pytest.mark.parametrize("kind", AUGMENTS)
def test_a_source_survives_pickling(kind, tmp_path):
    source = augmented(kind, alike(5, tmp_path))
    keys = [(2, i) for i in range(5)]
    copied = pickle.loads(pickle.dumps(source))
    assert torch.equal(copied.__getitems__(keys)["images"], source.__getitems__(keys)["images"])


@pytest.mark.parametrize("kind", AUGMENTS)
def test_global_random_numbers_are_left_alone(kind, tmp_path):
    split = alike(6, tmp_path)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    augmented(kind, split).__getitems__([(0, 1), (0, 4)])
    load_dataset("digits")
    drawn = torch.rand(3), random.random(), np.random.rand()  # noqa: NPY002
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    assert torch.equal(drawn[0], torch.rand(3))
    assert drawn[1:] == (random.random(), np.random.rand())  # noqa: NPY002


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_evaluation_is_the_transform_of_the_model(tmp_path, channels, in_memory):
    data = load_dataset(f"folder:{folder(tmp_path)}")
    pre = PRE.adapted(in_chans=channels)
    source = make_source(data.val, pre, train=False, augment=Augment(), in_memory=in_memory)
    batch = source.__getitems__([(0, i) for i in range(len(source))])
    assert batch["images"].dtype == torch.uint8
    for path, pixels in zip(data.val.paths, batch["images"], strict=True):
        assert torch.equal(pixels, resize_and_crop(pre)(decode(path, channels)))
    later = source.__getitems__([(9, 2)])["images"][0]
    assert torch.equal(later, batch["images"][2]), "epochs do not matter"


def test_training_without_any_augmentation_is_the_evaluation(tmp_path):
    data = load_dataset(f"folder:{folder(tmp_path)}")
    plain = Augment(spatial="none", hflip=0.0)
    for in_memory in (True, False):
        sources = [
            make_source(data.train, PRE, train=train, augment=plain, in_memory=in_memory)
            for train in (True, False)
        ]
        one, two = (source.__getitems__([(0, i) for i in range(12)]) for source in sources)
        assert torch.equal(one["images"], two["images"])


def test_memory_is_for_small_images_by_default(tmp_path):
    split = alike(2, tmp_path)
    for size, kind in (((64, 64), MemorySource), ((65, 64), FileSource), ((32, 96), FileSource)):
        assert type(make_source(split, Preprocessing(size=size), train=False)) is kind
    forced = make_source(split, Preprocessing(size=(96, 96)), train=False, in_memory=True)
    assert type(forced) is MemorySource


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_flip_is_the_data_sets_choice_unless_said(tmp_path, in_memory):
    wide = np.zeros((12, 16, 3), np.uint8)
    wide[:, :8] = 255  # bright on the left
    save(Image.fromarray(wide), tmp_path / "x.png")
    pre, keys = Preprocessing(size=(12, 16)), [(e, 0) for e in range(60)]

    def flips(default: float, asked: float | None) -> int:
        split = Split(torch.tensor([0]), hflip=default, paths=(str(tmp_path / "x.png"),))
        augment = Augment(spatial="none", hflip=asked)
        source = make_source(split, pre, train=True, augment=augment, in_memory=in_memory)
        return int((source.__getitems__(keys)["images"][:, 0, 0, 0] == 0).sum())

    assert flips(0.0, None) == 0
    assert 10 < flips(0.5, None) < 50
    assert flips(0.5, 0.0) == 0
    assert flips(0.0, 1.0) == 60


def test_links_upwards_and_hidden_folders_add_no_images(tmp_path):
    for split in ("train", "val"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(tmp_path / split / name / "0.png")
    (tmp_path / "train/b/up").symlink_to("..")
    (tmp_path / "train/a/.ipynb_checkpoints").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "train/a/.ipynb_checkpoints/0-checkpoint.png")
    assert load_dataset(f"folder:{tmp_path}").train.targets.tolist() == [0, 1]


def test_the_typical_size_is_that_of_the_median_image(tmp_path):
    paths = []
    for i, size in enumerate([(10, 20), (30, 40), (500, 600)]):
        paths.append(str(tmp_path / f"{i}.png"))
        picture((200, 30, 30), size=size).save(paths[-1])
    files = Split(torch.zeros(3, dtype=torch.long), 0.0, paths=tuple(paths))
    assert typical_size(files) == (30, 40)
    many = Split(torch.zeros(300, dtype=torch.long), 0.0, paths=tuple(paths * 100))
    assert typical_size(many, samples=30) == (30, 40)
    assert typical_size(load_dataset("digits").train) == (8, 8)
    assert typical_size(load_dataset("emoji").val) == (32, 32)
    assert typical_size(Split(torch.zeros(0, dtype=torch.long), 0.0)) == (0, 0)


@pytest.mark.parametrize("spec", ["digits", "files"])
def test_a_subset_has_the_images_that_were_asked_for(spec: str, tmp_path) -> None:
    split = load_dataset("digits").val
    if spec == "files":
        paths = tuple(str(tmp_path / f"{index}.png") for index in range(9))
        for index, path in enumerate(paths):
            split.image(index, 1).save(path)
        split = replace(split, targets=split.targets[:9], paths=paths, pixels=None)
    part = split.subset([7, 2])
    assert part.targets.tolist() == split.targets[[7, 2]].tolist()
    for place, index in enumerate((7, 2)):
        assert part.image(place, 1).tobytes() == split.image(index, 1).tobytes()
