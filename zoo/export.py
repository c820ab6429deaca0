"""Models as files that run without this project: ONNX and programs of `torch.export`.

A file is checked before it gets its name: read back, it gives the model's own outputs on random
images, at several batch sizes. The model's card (architecture, options, preprocessing, class
names) is inside; `zoo.exported` reads it.

Shapes: b batch, c y x channels, rows and columns of an image, d features, k outputs.
"""

from __future__ import annotations

import copy
import inspect
import json
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from zoo.card import ModelCard
from zoo.exported import INPUT, ONNX, PROGRAM, open_export, require
from zoo.rng import generator
from zoo.sources import CARD_FILE, FORMAT
from zoo.weights import card_of, unwrap

BATCHES = (1, 2, 5)  # checked where any batch size is allowed
_TRACED = 3  # images of the batch that is traced: none of these sizes
_TOLERANCES = {  # between two orders of summation, relative to the largest output from 1 on
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}
_LARGEST_ONNX = 2**31 - 2**20  # bytes: protobuf's limit of one file, less room for the graph


class ExportError(RuntimeError):
    """A model that cannot be exported, or whose file computes something else."""


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how far its outputs are from the model's.

    Attributes:
        path: The file.
        size: Its bytes.
        dynamic_batch: Whether it takes any number of images, not one only.
        differences: Largest absolute difference of an output, by batch size; empty if unchecked.
        tolerances: Largest difference that would have passed, by batch size.
    """

    path: Path
    size: int
    dynamic_batch: bool
    differences: dict[int, float]
    tolerances: dict[int, float]

    def __str__(self) -> str:
        batch = "any batch size" if self.dynamic_batch else "a batch of 1"
        checks = [
            f"  batch {number}: largest difference to the model {difference:.1e} "
            f"(tolerance {self.tolerances[number]:.1e})"
            for number, difference in self.differences.items()
        ]
        first = f"{self.path}: {self.size / 1e6:.2f} MB, for {batch}"
        return "\n".join([first, *(checks or ["  not checked"])])


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dynamic_batch: bool = True,
    opset: int | None = None,
    check: bool = True,
) -> ExportReport:
    """Writes a model as ONNX: `images` (b c y x) -> `logits` (b k), or `features` (b d).

    A copy of the model is exported, in evaluation mode and on the CPU; wrappers (DDP,
    torch.compile, an averaged model) are taken off. The file appears as a whole, after the check.

    Args:
        model: A model with a card that takes one batch of images, in float32 or float16.
        path: Ends with `.onnx`.
        dynamic_batch: Whether the file takes any number of images; otherwise one.
        opset: Version of ONNX's operators; by default the one that torch recommends.
        check: Whether onnxruntime's outputs are compared with the model's.

    Raises:
        ExportError: the model cannot be exported, or the file's outputs differ.
        ImportError: onnx, onnxscript or onnxruntime is missing.
    """
    require("onnx", "onnxscript", *(["onnxruntime"] if check else []))
    subject = _Subject(model, dynamic_batch)
    _check_onnx(subject)

    def write(file: Path) -> None:
        program = torch.onnx.export(
            subject.trace(),
            dynamo=True,
            verbose=False,
            input_names=[INPUT],
            output_names=["logits" if getattr(subject.model, "num_classes", 0) else "features"],
            dynamic_shapes=subject.dynamic_shapes,
            opset_version=opset,
        )
        assert program is not None  # only without dynamo
        written = program.model.opset_imports[""]
        if opset is not None and written != opset:
            raise ExportError(
                f"{subject.name} cannot be written in opset {opset}: torch's exporter wrote "
                f"{written}; leave opset out, or take one nearer to it"
            )
        program.model.metadata_props[CARD_FILE] = subject.card_text()
        program.save(file, external_data=False)

    return _export(subject, Path(path), ONNX, write, check)


def export_program(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    dynamic_batch: bool = True,
    check: bool = True,
) -> ExportReport:
    """Writes a model as a program of `torch.export`, for `torch.export.load`.

    As `export_onnx`, but needs torch only, takes any dtype and has no limit of size. The program
    is on the CPU; `torch.export.passes.move_to_device_pass` moves it.

    `torch.export.load` unpickles parts of such a file: load only files that you trust. Here only
    the file just written is loaded, for the check.

    Args:
        model: A model with a card that takes one batch of images.
        path: Ends with `.pt2`.
        dynamic_batch: Whether the program takes any number of images; otherwise one.
        check: Whether the outputs of the program, read back, are compared with the model's.

    Raises:
        ExportError: the model cannot be exported, or the program's outputs differ.
    """
    subject = _Subject(model, dynamic_batch)

    def write(file: Path) -> None:
        program = subject.trace()
        torch.export.save(program, file, extra_files={CARD_FILE: subject.card_text()})

    return _export(subject, Path(path), PROGRAM, write, check)


class _Subject:
    """A model to export: a copy of it in evaluation mode, and what is known of it."""

    def __init__(self, model: nn.Module, dynamic_batch: bool) -> None:
        model = unwrap(model)
        self.card = _card(model)
        self.name = self.card.architecture or type(model).__name__
        _check_arguments(model, self.name)
        self.model = copy.deepcopy(model).cpu().eval()
        self.dtype = next(
            (p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32
        )
        self.dynamic_batch = dynamic_batch
        self.dynamic_shapes = ({0: torch.export.Dim("batch")},) if dynamic_batch else None

    def images(self, number: int) -> Tensor:
        """(b c y x), the same ones every time."""
        preprocessing = self.card.preprocessing
        shape = (number, preprocessing.in_chans, *preprocessing.size)
        return torch.randn(shape, generator=generator(0, "export", number)).to(self.dtype)

    def outputs(self, number: int) -> Tensor:
        outputs = self.model(self.images(number))
        if not isinstance(outputs, Tensor):
            raise ExportError(
                f"{self.name} returns a {type(outputs).__name__}; only models that return one "
                f"tensor can be exported"
            )
        return outputs

    def trace(self) -> torch.export.ExportedProgram:
        """The model as a graph of torch's operators.

        It runs once before, so that sparse attention has made the tables of its pattern: the
        graph holds them as constants. Python's own `len` of a tensor fixes the batch, unless
        Python is traced as well (`strict`), which takes longer and allows fewer models.
        """
        number = _TRACED if self.dynamic_batch else 1
        self.outputs(number)
        given = self.model, (self.images(number),)
        try:
            return torch.export.export(*given, dynamic_shapes=self.dynamic_shapes, strict=False)
        except Exception as error:
            try:
                return torch.export.export(*given, dynamic_shapes=self.dynamic_shapes, strict=True)
            except Exception:
                raise error from None

    def card_text(self) -> str:
        return json.dumps({"format": FORMAT, **self.card.to_dict()})


def _card(model: nn.Module) -> ModelCard:
    card = card_of(model)
    if card is None:
        raise ExportError(
            f"{type(model).__name__} has no card, so the size of its images is unknown: build it "
            f"with zoo.create_model (zoo.register_model adds your own)"
        )
    return card


def _check_arguments(model: nn.Module, name: str) -> None:
    needed = _needed(model)
    if len(needed) == 1:
        return
    parts = [n for n, m in model.named_modules() if n and hasattr(m, "card")]
    parts = [part for part in parts if len(_needed(model.get_submodule(part))) == 1]
    hint = f"; this part of it can be: {', '.join(parts)}" if parts else ""
    raise ExportError(
        f"{name} takes {', '.join(needed)}; only models that take one batch of images can be "
        f"exported{hint}"
    )


def _needed(model: nn.Module) -> list[str]:
    """Names of the arguments that the model cannot do without."""
    parameters = inspect.signature(model.forward).parameters.values()
    star = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in star]


def _check_onnx(subject: _Subject) -> None:
    if subject.dtype not in (torch.float32, torch.float16):
        raise ExportError(
            f"{subject.name} is in {subject.dtype}; onnxruntime has its operators in float32 and "
            f"float16 only: export copy.deepcopy(model).float(), or a {PROGRAM} program"
        )
    size = sum(t.numel() * t.element_size() for t in subject.model.state_dict().values())
    if size > _LARGEST_ONNX:
        raise ExportError(
            f"{subject.name} has {size / 1e9:.1f} GB of weights, one ONNX file holds 2 GB: export "
            f"copy.deepcopy(model).half(), or a {PROGRAM} program"
        )


def _export(
    subject: _Subject, path: Path, suffix: str, write: Callable[[Path], None], check: bool
) -> ExportReport:
    path = path.expanduser()
    if path.suffix != suffix:
        raise ValueError(f"path ({path}) must end with {suffix}")
    if path.is_dir():
        raise ValueError(f"path ({path}) is a folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
        file = Path(folder) / path.name
        with torch.no_grad(), _explained(subject, suffix):
            with warnings.catch_warnings():  # the exporters warn of their own code
                warnings.simplefilter("ignore")
                write(file)
            differences, tolerances = _compare(subject, file) if check else ({}, {})
        size = file.stat().st_size
        with file.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(file, path)
    return ExportReport(path, size, subject.dynamic_batch, differences, tolerances)


@contextmanager
def _explained(subject: _Subject, suffix: str) -> Iterator[None]:
    """Errors of the exporters, of many types, as one that names the model."""
    try:
        yield
    except (ExportError, OSError):
        raise
    except Exception as error:
        kind = subject.card.options.get("attention")
        attention = f" (attention kind {kind!r})" if kind else ""
        hint = " for any batch size; try dynamic_batch=False" if subject.dynamic_batch else ""
        reason = " ".join(str(error).split()).partition(" For more information")[0][:500]
        raise ExportError(
            f"{subject.name}{attention} cannot be exported to {suffix}{hint}: "
            f"{type(error).__name__}: {reason}"
        ) from error


def _compare(subject: _Subject, file: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Largest difference to the model, and the largest allowed, by batch size."""
    run = open_export(file)
    differences, tolerances = {}, {}
    for number in BATCHES if subject.dynamic_batch else (1,):
        expected, outputs = subject.outputs(number).double(), run(subject.images(number)).double()
        if outputs.shape != expected.shape:
            raise ExportError(
                f"the exported {subject.name} gives {tuple(outputs.shape)} for a batch of "
                f"{number}, the model {tuple(expected.shape)}; nothing was written"
            )
        difference = float((outputs - expected).abs().max())
        tolerance = _TOLERANCES[subject.dtype] * max(1.0, float(expected.abs().max()))
        if not difference <= tolerance:  # NaN too
            raise ExportError(
                f"the exported {subject.name} differs from the model by {difference:.2e} for a "
                f"batch of {number}, more than {tolerance:.2e}; nothing was written"
            )
        differences[number], tolerances[number] = difference, tolerance
    return differences, tolerances
