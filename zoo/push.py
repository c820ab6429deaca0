"""Models onto the Hugging Face hub: `push_to_hub`; `hf-hub:OWNER/REPO` brings them back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from zoo.card import ModelCard
from zoo.sources import WeightsError, listed
from zoo.weights import card_of, save_pretrained, unwrap

LIBRARY = "attention-zoo"
_LICENSES = re.compile(
    r"apache-2\.0|mit|bsd(-[23]-clause)?|cc0-1\.0|cc-by(-nc)?(-sa|-nd)?-[234]\.0|(l|a)?gpl-[23]\.0"
    r"|mpl-2\.0|unlicense|openrail|unknown"
)  # of those that the hub knows; others are `other` with a name


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Add model",
    exist_ok: bool = True,
) -> str:
    """Uploads what `save_pretrained` writes, with a README.md, in one commit.

    A README.md that the repository has already is left as it is.

    Args:
        model: A model with a card, made by `zoo.create_model`; wrappers are taken off.
        repo_id: `OWNER/REPO`; made if there is none.
        private: Whether a new repository is private; None is the owner's default.
        token: Of the hub; by default that of `hf auth login` or `HF_TOKEN`.
        revision: Branch, made if there is none; `main` by default.
        commit_message: Of the commit.
        exist_ok: Whether the repository may exist.

    Returns:
        The address of the commit.

    Raises:
        WeightsError: the model cannot be saved, or the hub cannot be reached or does not take it.
    """
    from huggingface_hub import HfApi

    with TemporaryDirectory() as temporary:
        folder = save_pretrained(model, Path(temporary, "model"))
        api = HfApi(token=token, library_name=LIBRARY)
        try:
            repo = api.create_repo(repo_id, private=private, exist_ok=exist_ok).repo_id
            if revision is not None:
                api.create_branch(repo, branch=revision, exist_ok=True)
            if not api.file_exists(repo, "README.md", revision=revision):
                (folder / "README.md").write_text(model_readme(model, repo), encoding="utf-8")
            commit = api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message,
            )
        except Exception as error:
            raise WeightsError(f"{repo_id} cannot be pushed: {_reason(error, repo_id)}") from error
    return commit.commit_url


def _reason(error: Exception, repo_id: str) -> str:
    from huggingface_hub import constants, errors

    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        hint = "; `hf auth login` or set HF_TOKEN, with a token that may write there"
        return said + (hint if status in (401, 403, 404) else "")
    if isinstance(error, errors.OfflineModeIsEnabled):
        why = "HF_HUB_OFFLINE is set"
    elif type(error).__name__.endswith(("ConnectError", "ConnectionError", "Timeout")):
        why = f"{constants.ENDPOINT} cannot be reached ({said})"
    else:
        return said
    return (
        f"{why}; zoo.save_pretrained(model, FOLDER) keeps the model, and `hf upload {repo_id} "
        f"FOLDER` pushes it later"
    )


def model_readme(model: nn.Module, repo_id: str) -> str:
    """The hub's description of a model: how to load it, preprocessing, options, metrics.

    Args:
        model: A model with a card; numbers in `card.extra["metrics"]` are listed.
        repo_id: `OWNER/REPO`.
    """
    from huggingface_hub import ModelCard as Readme

    card = _card_of(model)
    text = _TEXT.format(
        name=repo_id.partition("/")[2] or repo_id,
        architecture=card.architecture,
        parameters=sum(parameter.numel() for parameter in unwrap(model).parameters()),
        source=f" Weights started from `{card.source}`." if card.source else "",
        repo_id=repo_id,
        preprocessing=_table("preprocessing", card.preprocessing.to_dict()),
        options=_table("option", card.options),
        metrics=_section("Metrics", "metric", _metrics(card)),
        classes=_classes(card.class_names),
    )
    head = _head(card).to_yaml()
    return str(Readme(f"---\n{head}\n---\n\n{text}"))


_TEXT = """# {name}

`{architecture}` of Attention Zoo, {parameters:,} parameters.{source}

```python
import zoo

model = zoo.create_model("hf-hub:{repo_id}").eval()
transform = zoo.transforms(model)
```
{metrics}
## Preprocessing

{preprocessing}
{classes}
## Options

{options}
"""


def _card_of(model: nn.Module) -> ModelCard:
    card = card_of(unwrap(model))
    if card is None:
        raise TypeError(
            f"{type(model).__name__} has no card; models made by zoo.create_model have one"
        )
    return card


def _head(card: ModelCard) -> Any:
    """What the hub itself reads: library, tags, licence, metrics."""
    from huggingface_hub import ModelCardData

    classifies = card.class_names is not None or bool(card.options.get("num_classes"))
    family = str(card.architecture).rpartition(":")[2].partition("_")[0]
    known = card.license is not None and _LICENSES.fullmatch(card.license.lower())
    licence = card.license and (card.license.lower() if known else "other")
    return ModelCardData(
        library_name=LIBRARY,
        tags=[LIBRARY, "pytorch", family],
        license=licence,
        license_name=None if known else card.license,
        pipeline_tag="image-classification" if classifies else None,
        metrics=list(_metrics(card)) or None,
    )


def _metrics(card: ModelCard) -> dict[str, float]:
    metrics = card.extra.get("metrics")
    if not isinstance(metrics, Mapping):
        return {}
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}


def _section(title: str, column: str, rows: Mapping[str, Any]) -> str:
    return f"\n## {title}\n\n{_table(column, rows)}" if rows else ""


def _table(column: str, rows: Mapping[str, Any]) -> str:
    lines = [f"| {column} | value |", "|---|---|"]
    for name, value in rows.items():
        told = json.dumps(value).replace("|", "\\|")
        lines.append(f"| {name} | `{told}` |")
    return "\n".join(lines) + "\n"


def _classes(names: Iterable[str] | None) -> str:
    if names is None:
        return ""
    flat = [" ".join(name.split()) for name in names]
    return f"\n{len(flat)} classes: {listed(flat, 20)}.\n"
