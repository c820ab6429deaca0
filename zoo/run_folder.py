"""What a recipe's `--model` means: a run folder, or a model with where its weights are.

- a run folder: the model of its last epoch, or by `--checkpoint` another one of its checkpoints;
- `local-dir:FOLDER`, `hf-hub:OWNER/REPO[@REV]`: the model that is saved there;
- `timm:NAME[.TAG]`, `torchvision:NAME[.WEIGHTS]`, `open_clip:ARCH/TAG` (its visual tower): the
  library's network with the library's weights, or with others by `--pretrained`;
- a name of `zoo.list_models()`: that model with its own weights, or with others by `--pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from zoo.files import read_torch
from zoo.hosts import HOSTS
from zoo.merge import head_keys
from zoo.registry import FOLDERS, create_model, list_models
from zoo.sources import CARD_FILE, WeightsError
from zoo.temperature import temperature_schedule
from zoo.weights import LoadReport, load_pretrained

LEGAL = (
    "local-dir:FOLDER, hf-hub:OWNER/REPO, timm:NAME, torchvision:NAME, open_clip:ARCH/TAG and "
    "names of zoo.list_models()"
)
LAST = "last"  # --checkpoint: the trained model


@dataclass(frozen=True)
class TrainedModel:
    """A model to create, and where its weights are.

    Attributes:
        name: For `zoo.create_model`.
        pretrained: For `zoo.create_model`: a source, True for the model's own weights, or False
            where the name brings them.
        flags: Of the run that trained it; none where it does not come from a run folder.
        folder: Of that run.
        checkpoint: A file of its checkpoints/, instead of the weights it ended with.
    """

    name: str
    pretrained: bool | str = False
    flags: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    checkpoint: Path | None = None

    def create(self, tell: Callable[[str], object] = print) -> nn.Module:
        """The model with its weights.

        Args:
            tell: Gets the report of what loading from `--pretrained` adapted; it notes where the
                weights are for another image size. Of a checkpoint, which epoch's it is.

        Raises:
            WeightsError: the weights do not belong to the model, or leave its classifier untrained.
        """
        if self.checkpoint is not None:
            model = create_model(self.name)
            tell(_load_checkpoint(model, self.checkpoint, self.flags))
            return model
        if not isinstance(self.pretrained, str):
            return create_model(self.name, pretrained=self.pretrained)
        model = create_model(self.name)
        report = load_pretrained(model, self.pretrained)
        _check_head(model, report, self)
        tell(str(report))
        return model


def _check_head(model: nn.Module, report: LoadReport, wanted: TrainedModel) -> None:
    untrained = {key: how for key, how in report.reinitialized.items() if key in head_keys(model)}
    if untrained:
        raise WeightsError(
            f"--pretrained {wanted.pretrained} leaves the classifier of {wanted.name} untrained: "
            + "; ".join(f"{key}: {how}" for key, how in untrained.items())
        )


def find_trained(model: str, pretrained: str | None = None, checkpoint: str = LAST) -> TrainedModel:
    """What `--model`, `--pretrained` and `--checkpoint` mean.

    Args:
        model: One of what the module lists.
        pretrained: Other weights for a model that is named.
        checkpoint: Of a run folder: `last`, `best`, a step, or a file of its checkpoints/.

    Raises:
        FileNotFoundError: `model` is none of what the module lists, or the run has no such
            checkpoint.
        ValueError: `pretrained` is given for a model that brings its own weights, or `checkpoint`
            for one that is no run folder.
    """
    found = _find(model, pretrained)
    if checkpoint == LAST:
        return found
    if found.folder is None:
        raise ValueError(
            f"--checkpoint {checkpoint} is of a run folder, and --model {model} is none"
        )
    return replace(found, checkpoint=_checkpoint_of(found.folder, checkpoint))


def _find(model: str, pretrained: str | None) -> TrainedModel:
    prefix, colon, rest = model.partition(":")
    if colon and prefix in HOSTS:
        name = f"{prefix}:{rest.partition('/')[0]}" if prefix == "open_clip" else model
        return TrainedModel(name, pretrained or (model if name != model else True))
    folder = Path(model).expanduser()
    saved = (folder / "model" / CARD_FILE).exists()
    if pretrained and (saved or prefix in FOLDERS):
        others = " (--checkpoint chooses among those of the run)" if saved else ""
        raise ValueError(
            f"--model {model} brings its own weights; drop --pretrained {pretrained}{others}"
        )
    if colon and prefix in FOLDERS:
        return TrainedModel(model)
    if saved:
        return TrainedModel(f"local-dir:{folder / 'model'}", flags=_flags(folder), folder=folder)
    if not colon and not folder.is_dir() and model in list_models():
        return TrainedModel(model, pretrained or True)
    raise FileNotFoundError(
        f"--model {model} is no run folder with a trained model: {_what_is_wrong(folder, prefix)} "
        f"(legal as well: {LEGAL})"
    )


def _flags(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    if not file.exists():
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8"))["options"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not as a training run writes it: {error!r}") from error


def _checkpoint_of(folder: Path, wanted: str) -> Path:
    """A file of the checkpoints/ of a run."""
    saved = {path.stem: path for path in sorted((folder / "checkpoints").glob("*.pt"))}
    name = f"step_{int(wanted):08d}" if wanted.isdecimal() else wanted
    if name in saved:
        return saved[name]
    file = Path(wanted).expanduser()
    inside = file if file.exists() else folder / "checkpoints" / file.name
    if inside.resolve() in {path.resolve() for path in saved.values()}:
        return inside
    there = ", ".join([LAST, *saved])
    raise FileNotFoundError(f"--checkpoint {wanted} is none of {folder}, which has {there}")


def _load_checkpoint(model: nn.Module, file: Path, flags: dict[str, Any]) -> str:
    """Loads what a training would evaluate, the average where it keeps one; returns what it is."""
    state = read_torch(file)
    try:
        average, position = state["ema"], state["position"]
        weights = state["model"]
        if average:
            start = "module."
            weights = {
                key.removeprefix(start): value
                for key, value in average.items()
                if key.startswith(start)
            }
        model.load_state_dict(weights)
        warning = _set_temperature(model, state, flags)
        told = _progress(position, state["metrics"], flags)
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise WeightsError(f"{file} is no checkpoint of this run's model: {error}") from error
    return f"{file}: {told}" + (", averaged weights" if average else "") + warning


def _progress(position: dict[str, Any], metrics: dict[str, float], flags: dict[str, Any]) -> str:
    """Where in the training, and what is known of it there."""
    epoch, inside = position["epoch"], bool(position["update"])
    of = f" of {flags['epochs']}" if "epochs" in flags else ""
    where = f"in epoch {epoch + 1}{of}" if inside else f"after epoch {epoch}{of}"
    told = f"{where}, step {position['step']}"
    if inside or epoch != position["best_epoch"]:
        return told
    names = [name for name, value in metrics.items() if value == position["best"]]
    return f"{told}, {names[0] if names else 'best'} {position['best']:.4g}"


def _set_temperature(model: nn.Module, state: dict[str, Any], flags: dict[str, Any]) -> str:
    """Gives attention the temperature of that moment; a warning where that is not known."""
    course, position = str(flags.get("temperature", 1)), state["position"]
    follow = temperature_schedule(course)[1]
    if follow is None:
        return ""
    if "total" in state:
        follow(model, max(0, position["step"] - 1) / max(1, state["total"] - 1))
        return ""
    if position["epoch"] == flags.get("epochs"):
        return ""
    return (
        f"\nwarning: the run had --temperature {course}; these weights were measured at that of "
        f"their epoch, and now have the last one, {course.partition(':')[2]}"
    )


def _what_is_wrong(folder: Path, prefix: str) -> str:
    if (folder / CARD_FILE).exists():
        return f"did you mean local-dir:{folder}?"
    if folder.is_dir():
        return f"it has no model/{CARD_FILE}"
    if folder.is_file() or prefix in ("file", "url"):
        source = f"file:{folder}" if folder.is_file() else f"{prefix}:..."
        run = folder.parent.parent
        if folder.parent.name == "checkpoints" and (run / "model" / CARD_FILE).exists():
            return f"did you mean --model {run} --checkpoint {folder.stem}?"
        return (
            "a file of weights does not say which model they are of: name it by --model and pass "
            f"--pretrained {source}"
        )
    near = get_close_matches(str(folder), list_models(), n=3)
    return "no such folder" + (f"; models of a near name: {', '.join(near)}" if near else "")
