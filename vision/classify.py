"""What the training of an image classifier needs besides its model and its loss.

Shapes: b batch, c y x channels, rows and columns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zoo
from vision.augment import Augment
from vision.data import ImageDataset, make_source, typical_size
from vision.evaluate import count
from zoo.freezing import check_rule
from zoo.layers.check import finite_fields, positive
from zoo.merge import head_keys
from zoo.preprocess import normalize
from zoo.registry import FOLDERS
from zoo.weights import apply_source, read_source

SMALL, SHRUNK = 64, 4  # a model's pixels a side, and how many times these an image may have


@dataclass(frozen=True)
class ImageOptions:
    """Flags that the recipes for image classifiers share: images, targets and fine-tuning."""

    img_size: int | tuple[int, int] | None = None
    """Rows and columns, or one number for both; the model's own by default."""
    drop_path_rate: float = 0.0
    """Stochastic depth, rising linearly to this at the last block; 0 leaves the model's own."""
    label_smoothing: float = 0.1
    """Share of each target spread over all classes."""
    mixup: float = 0.2
    """alpha of mixup; 0 turns it off."""
    cutmix: float = 0.0
    """alpha of CutMix; 0 turns it off."""
    spatial: Literal["auto", "none", "affine", "crop"] = "auto"
    """auto: affine for data in memory, random resized crops otherwise."""
    hflip: float | None = None
    """Chance of a horizontal flip; by default the data set's (digits and emoji 0, folders 0.5)."""
    policy: Literal["none", "randaugment", "trivialaugment"] = "none"
    """Automatic augmentation per image, by torchvision."""
    bad_images: Literal["stop", "skip"] = "stop"
    """Unreadable files: stop and name them, or skip and count them."""
    freeze: str = "none"
    """What does not train and stays in eval mode: none, backbone (all but the classifier: a linear
    probe), stages=N (stem and first N stages or blocks), but-norms (all but norms and classifier),
    but-biases (all but biases and classifier: BitFit). New modules of --insert always train."""
    head_lr: float | None = None
    """Peak learning rate of the classifier, which follows the same curve; --lr by default."""

    def __post_init__(self) -> None:
        finite_fields(self)
        check_rule(self.freeze)
        if self.head_lr is not None:
            positive("head_lr", self.head_lr)
        if not 0 <= self.label_smoothing < 1 or not 0 <= self.drop_path_rate < 1:
            raise ValueError(
                f"label_smoothing ({self.label_smoothing}) and drop_path_rate "
                f"({self.drop_path_rate}) must lie in [0, 1)"
            )

    @property
    def augment(self) -> Augment:
        return Augment(spatial=self.spatial, hflip=self.hflip, policy=self.policy)

    @property
    def model_options(self) -> dict[str, Any]:
        """Options of the model that differ from its own: other libraries' do not have them all."""
        options = {"img_size": self.img_size, "drop_path_rate": self.drop_path_rate}
        return {name: value for name, value in options.items() if value}


def create_classifier(
    name: str, weights: str | None, say: Callable[[str], object] = print, **options: Any
) -> Any:
    """`zoo.create_model`, which also says what became of every tensor of the weights.

    A classifier that starts anew on trained weights starts at zero (arXiv 2010.11929, 3.2): some
    networks' own start, made for a thousand classes, gives a few of them logits in the tens.

    Args:
        name: Of the model.
        weights: A source of `zoo.load_pretrained`; None starts from random ones.
        say: Is given the report, as text.
        **options: Of the model; None leaves one out.
    """
    options = {key: value for key, value in options.items() if value is not None}
    if weights is not None and brings_weights(name):
        raise ValueError(f"{name} brings its own weights; drop pretrained ({weights})")
    model: Any = zoo.create_model(name, **options)
    if weights is not None:
        source = read_source(weights)
        report = apply_source(model, source, allowed=options)  # what was asked for may differ
        say(str(report))
        head = model.get_classifier()
        if isinstance(head, nn.Linear | nn.Conv2d) and head_keys(model) <= {*report.reinitialized}:
            for parameter in head.parameters():
                nn.init.zeros_(parameter)
    return model


def brings_weights(name: str) -> bool:
    """Whether a model's name is that of a folder with its weights."""
    return name.partition(":")[0] in FOLDERS


class Mix(Protocol):
    """Mixes images and their targets, keyed by epoch and batch, as `zoo.engine.Mixing` does."""

    def __call__(
        self, images: Tensor, targets: Tensor, epoch: int, index: int
    ) -> tuple[Tensor, Tensor]: ...


def _warn_of_shrinking(model: Any, data: ImageDataset) -> None:
    """Says, on the main process, that a model made for tiny images gets much larger ones.

    Models for `SMALL` pixels and more are made for photos, whatever these measure.
    """
    rows, cols = model.card.preprocessing.size
    there = typical_size(data.train)
    small = max(rows, cols) < SMALL and min(there) > SHRUNK * max(rows, cols)
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    if small and first:
        name, here = str(model.card.architecture), f"{rows}x{cols}"
        larger = "vit_micro_patch4_32, vit_tiny_patch16_224" if "vit" in name else "resnet18"
        print(
            f"WARNING: images of {there[0]}x{there[1]} pixels ({data.name}) are shrunk to {here}, "
            f"the input of {name}: little of them is left. Take a --model for larger images "
            f"({larger}; zoo.list_models()) or an --img-size such as {_larger(there)}, which takes "
            f"more time and memory; --img-size {rows} {cols} keeps {here} and says no more.",
            file=sys.stderr,
            flush=True,
        )


def _larger(size: tuple[int, int]) -> int:
    """A side that most patch sizes and strides divide, near an image's own, 224 at most."""
    return min(224, max(32, min(size) // 32 * 32))


class Classification:
    """A data set as one model takes it: sources of batches, and what is done to a batch.

    Args:
        model: Has a card, which says how images become inputs.
        data: The images.
        options: What is done to them in training.
        mix: Mixes each training batch.
        seed: Keys augmentation, with epoch and sample.

    Attributes:
        train, val: Sources for a loader.
    """

    def __init__(
        self, model: Any, data: ImageDataset, options: ImageOptions, mix: Mix, seed: int
    ) -> None:
        self.preprocessing, self.mix = model.card.preprocessing, mix
        if options.img_size is None:
            _warn_of_shrinking(model, data)
        self.train = make_source(
            data.train, self.preprocessing, train=True, augment=options.augment, seed=seed
        )
        self.val = make_source(data.val, self.preprocessing, train=False, augment=None, seed=seed)

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        """Pixels of a batch -> what the model takes (b c y x)."""
        return normalize(batch["images"], self.preprocessing)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """A training batch -> its inputs and targets, mixed."""
        images, targets = self.mix(
            self.inputs(batch), batch["targets"], batch["epoch"], batch["index"]
        )
        return {"images": images, "targets": targets}

    def count(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Sums over a validation batch, see `vision.evaluate.count`."""
        return count(model(self.inputs(batch)), batch["targets"])

    def check_smallest_batch(self, model: nn.Module, batch_size: int, processes: int = 1) -> None:
        """Tries one image where a batch of an epoch has no more, before an epoch gets there.

        Raises:
            ValueError: The model cannot train on one, as with BatchNorm over maps of 1x1.
        """
        n = len(self.train)
        if smallest_batch(n, batch_size, processes) > 1:
            return
        image = torch.zeros(1, self.preprocessing.in_chans, *self.preprocessing.size)
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                deepcopy(model).train()(image)
        except ValueError as error:
            sizes = range(max(2, batch_size), batch_size + n + 1)
            fitting = [size for size in sizes if smallest_batch(n, size, processes) > 1]
            hint = f"; take batch_size {fitting[0]}" if fitting else ""
            raise ValueError(
                f"batch_size {batch_size} on {processes} process(es) leaves a batch with one of "
                f"the {n} training images, on which this model cannot train{hint}: {error}"
            ) from error


def smallest_batch(num_samples: int, batch_size: int, processes: int = 1) -> int:
    """Images of the smallest batch that a process gets in an epoch, as `BatchPlan` divides them."""
    together = batch_size * processes
    rest = num_samples % together or together
    return max(1, rest // processes)


def training_step(model: Any, batch: int) -> Callable[[], None]:
    """One forward and backward pass over random images, to be timed."""
    images, targets = random_images(model, batch), torch.zeros(batch, dtype=torch.long)
    return lambda: F.cross_entropy(model(images), targets).backward()


def random_images(model: Any, batch: int) -> Tensor:
    """(b c y x) of the size that a model's card tells."""
    preprocessing = model.card.preprocessing
    return torch.randn(batch, preprocessing.in_chans, *preprocessing.size)
