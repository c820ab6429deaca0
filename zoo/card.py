"""What a model needs to be used again, beside its tensors: options, preprocessing, class names."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

INTERPOLATIONS = ("nearest", "bilinear", "bicubic")
CROP_MODES = ("center", "squash", "border")


class CardError(ValueError):
    """A model card or a preprocessing that does not hold together."""


@dataclass(frozen=True)
class Preprocessing:
    """How an image becomes the tensor a model was trained on.

    Attributes:
        size: Rows and columns of the model's input.
        mean: Mean a channel, of values in [0, 1]; its length is the number of channels.
        std: Standard deviation a channel.
        interpolation: One of `INTERPOLATIONS`.
        crop_pct: Part of the resized image that the crop keeps, in (0, 2]. Above 1 the image is
            resized to less than `size`, and the crop fills up with black, or in mode `border` with
            the mean: so some weights of timm were evaluated (VOLO, 1.15).
        crop_mode: `center` keeps the aspect ratio and cuts what is too long; `squash` resizes to
            `size`, aspect ratio ignored; `border` keeps all of the image and pads with the mean.
    """

    size: tuple[int, int] = (224, 224)
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        for name in ("size", "mean", "std"):
            value = getattr(self, name)
            if not isinstance(value, tuple | list):
                raise CardError(f"{name} must be a list of numbers, not {value!r}")
            if not all(_is_number(number) for number in value):
                raise CardError(f"{name} must hold finite numbers, not {value!r}")
        if len(self.size) != 2 or not all(int(s) == s and s > 0 for s in self.size):
            raise CardError(f"size must be (rows, columns), two positive integers, not {self.size}")
        if not self.mean or len(self.mean) != len(self.std):
            raise CardError(
                f"mean and std need one value a channel each: "
                f"mean has {len(self.mean)}, std has {len(self.std)}"
            )
        if min(self.std) <= 0:
            raise CardError(f"std must be positive, not {self.std}")
        _check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        _check_choice("crop_mode", self.crop_mode, CROP_MODES)
        if not _is_number(self.crop_pct) or not 0 < self.crop_pct <= 2:
            raise CardError(f"crop_pct must be in (0, 2], not {self.crop_pct!r}")
        # Tuples of plain numbers: hashable, and equal after a round trip through JSON.
        object.__setattr__(self, "size", tuple(int(s) for s in self.size))
        object.__setattr__(self, "mean", tuple(float(m) for m in self.mean))
        object.__setattr__(self, "std", tuple(float(s) for s in self.std))

    @property
    def in_chans(self) -> int:
        return len(self.mean)

    def adapted(
        self, size: tuple[int, int] | None = None, in_chans: int | None = None
    ) -> Preprocessing:
        """The same rules for another input size or channel count.

        New channels get the average of the old means and the average of the old deviations.
        """
        changes: dict[str, Any] = {}
        if size is not None:
            changes["size"] = size
        if in_chans is not None and in_chans != self.in_chans:
            changes["mean"] = (sum(self.mean) / self.in_chans,) * in_chans
            changes["std"] = (sum(self.std) / self.in_chans,) * in_chans
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Preprocessing:
        """The inverse of `to_dict`; unknown or missing fields are errors."""
        return cls(**_checked_fields(cls, data, required={"size", "mean", "std"}))


_FREE_OPTIONS = re.compile(
    r"num_classes|in_chans|img_size|context_length|.*drop.*_rate|drop_rate|zero_init_residual"
)


@dataclass(frozen=True)
class ModelCard:
    """Everything about a model that is not a tensor.

    Attributes:
        architecture: Registered name that builds the model; None for a model built by hand.
        options: Every non-tensor option the model was built with, defaults included.
        preprocessing: The preprocessing its weights expect.
        class_names: One name an output, in order.
        license: Licence of the weights.
        source: Where the weights came from.
        extra: Anything else worth keeping, in JSON types.
    """

    architecture: str | None
    options: dict[str, Any]
    preprocessing: Preprocessing
    class_names: tuple[str, ...] | None = None
    license: str | None = None
    source: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.architecture, str | None) or self.architecture == "":
            raise CardError(f"architecture must be a name, not {self.architecture!r}")
        if not isinstance(self.preprocessing, Preprocessing):
            raise CardError(f"preprocessing must be a Preprocessing, not {self.preprocessing!r}")
        for name in ("license", "source"):
            if not isinstance(getattr(self, name), str | None):
                raise CardError(f"{name} must be a string or None, not {getattr(self, name)!r}")
        for name in ("options", "extra"):
            object.__setattr__(self, name, plain(getattr(self, name), name))
        if self.class_names is not None:
            self._check_class_names()
            object.__setattr__(self, "class_names", tuple(self.class_names))

    def _check_class_names(self) -> None:
        names = self.class_names
        if not isinstance(names, list | tuple) or not all(isinstance(n, str) for n in names):
            raise CardError(f"class_names must be a list of strings, not {names!r}")
        twice = sorted(name for name, count in Counter(names).items() if count > 1)
        if twice:
            raise CardError(f"class_names must differ from each other; repeated: {twice}")
        outputs = self.options.get("num_classes", len(names))
        if outputs != len(names):
            raise CardError(f"class_names has {len(names)} names, but num_classes is {outputs}")

    def with_options(self, **options: Any) -> ModelCard:
        """The card after a change of the model; another class count drops the class names."""
        options = {**self.options, **options}
        kept = options.get("num_classes") == self.options.get("num_classes")
        return replace(self, options=options, class_names=self.class_names if kept else None)

    def differences(self, other: ModelCard) -> dict[str, tuple[Any, Any]]:
        """Lasting options that both have, with other values: name -> (here, there)."""
        theirs = other.lasting_options()
        return {
            name: (value, theirs[name])
            for name, value in self.lasting_options().items()
            if name in theirs and not _same(value, theirs[name])
        }

    def lasting_options(self) -> dict[str, Any]:
        """Options but those that change no output of a trained model or that loading adapts."""
        return {k: v for k, v in self.options.items() if not _FREE_OPTIONS.fullmatch(k)}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["preprocessing"] = self.preprocessing.to_dict()
        data["class_names"] = None if self.class_names is None else list(self.class_names)
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelCard:
        """The inverse of `to_dict`; unknown or missing fields are errors."""
        values = _checked_fields(cls, data, {"architecture", "options", "preprocessing"})
        if not isinstance(values["preprocessing"], Mapping):
            raise CardError(f"preprocessing must be a table, not {values['preprocessing']!r}")
        values["preprocessing"] = Preprocessing.from_dict(values["preprocessing"])
        return cls(**values)


def plain(value: Any, where: str) -> Any:
    """A copy of `value` in JSON types (tuples become lists); anything else is an error."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CardError(f"{where} must be finite to be stored, not {value}")
        return value
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        bad = [key for key in value if not isinstance(key, str)]
        if bad:
            raise CardError(f"{where} may have only strings as keys, not {bad[0]!r}")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    raise CardError(
        f"{where} is a {type(value).__qualname__}, which a model card cannot store; "
        f"use numbers, strings, lists and tables"
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two options are equal; a size may be a number, or twice that number."""
    return one == other or [one, one] == other or one == [other, other]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise CardError(f"{name} must be one of {', '.join(choices)}, not {value!r}")


def _checked_fields(cls: type, data: Mapping[str, Any], required: set[str]) -> dict[str, Any]:
    known = [f.name for f in fields(cls)]
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise CardError(f"{cls.__name__} has no field {unknown[0]!r}; it has {', '.join(known)}")
    missing = sorted(required - set(data))
    if missing:
        raise CardError(f"{cls.__name__} lacks {', '.join(missing)}")
    return dict(data)
