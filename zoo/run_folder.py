"""What a recipe's `--model` means: a run folder, or a model with where its weights are.

- a run folder: the model of its last epoch;
- `local-dir:FOLDER`, `hf-hub:OWNER/REPO[@REV]`: the model that is saved there;
- `timm:NAME[.TAG]`, `torchvision:NAME[.WEIGHTS]`, `open_clip:ARCH/TAG` (its visual tower): the
  library's network with the library's weights, or with others by `--pretrained`;
- a name of `zoo.list_models()`: that model with its own weights, or with others by `--pretrained`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from torch import nn

from zoo.hosts import HOSTS
from zoo.merge import head_keys
from zoo.registry import FOLDERS, create_model, list_models
from zoo.sources import CARD_FILE, WeightsError
from zoo.weights import LoadReport, load_pretrained

LEGAL = (
    "local-dir:FOLDER, hf-hub:OWNER/REPO, timm:NAME, torchvision:NAME, open_clip:ARCH/TAG and "
    "names of zoo.list_models()"
)


@dataclass(frozen=True)
class TrainedModel:
    """A model to create, and where its weights are.

    Attributes:
        name: For `zoo.create_model`.
        pretrained: For `zoo.create_model`: a source, True for the model's own weights, or False
            where the name brings them.
        flags: Of the run that trained it; none where it does not come from a run folder.
    """

    name: str
    pretrained: bool | str = False
    flags: dict[str, Any] = field(default_factory=dict)

    def create(self, tell: Callable[[str], object] = print) -> nn.Module:
        """The model with its weights.

        Args:
            tell: Gets the report of what loading from `--pretrained` adapted; it notes where the
                weights are for another image size.

        Raises:
            WeightsError: the weights do not belong to the model, or leave its classifier untrained.
        """
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


def find_trained(model: str, pretrained: str | None = None) -> TrainedModel:
    """What `--model` and `--pretrained` mean.

    Raises:
        FileNotFoundError: `model` is none of what the module lists.
        ValueError: `pretrained` is given for a model that brings its own weights.
    """
    prefix, colon, rest = model.partition(":")
    if colon and prefix in HOSTS:
        name = f"{prefix}:{rest.partition('/')[0]}" if prefix == "open_clip" else model
        return TrainedModel(name, pretrained or (model if name != model else True))
    folder = Path(model).expanduser()
    saved = (folder / "model" / CARD_FILE).exists()
    if pretrained and (saved or prefix in FOLDERS):
        raise ValueError(f"--model {model} brings its own weights; drop --pretrained {pretrained}")
    if colon and prefix in FOLDERS:
        return TrainedModel(model)
    if saved:
        return TrainedModel(f"local-dir:{folder / 'model'}", flags=_flags(folder))
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


def _what_is_wrong(folder: Path, prefix: str) -> str:
    if (folder / CARD_FILE).exists():
        return f"did you mean local-dir:{folder}?"
    if folder.is_dir():
        return f"it has no model/{CARD_FILE}"
    if folder.is_file() or prefix in ("file", "url"):
        source = f"file:{folder}" if folder.is_file() else f"{prefix}:..."
        return (
            "a file of weights does not say which model they are of: name it by --model and pass "
            f"--pretrained {source}"
        )
    near = get_close_matches(str(folder), list_models(), n=3)
    return "no such folder" + (f"; models of a near name: {', '.join(near)}" if near else "")
