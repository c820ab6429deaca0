"""Weights from elsewhere: repositories of the Hugging Face hub, and any address with its sha256.

Both are fetched by the libraries' own loaders into their own caches: huggingface_hub's (`HF_HOME`,
`HF_TOKEN`, `HF_HUB_OFFLINE`), torch.hub's (`TORCH_HOME`). Only JSON and files of weights are asked
for, never code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from zoo.files import read_file
from zoo.folders import TOLD_BY, read_folder, weight_files
from zoo.sources import Source, WeightsError, sha256_of

_SCHEMES = ("https", "http", "file")
_SHA256 = re.compile(r"sha256=([0-9a-fA-F]{64})")
_REVISION = re.compile(r"\w[\w.-]*(/\w[\w.-]*)*")


def read_hub(name: str) -> Source:
    """Weights of a repository, read as a folder; the source's name ends with the commit.

    Args:
        name: `OWNER/REPO` or `OWNER/REPO@REVISION`, a branch, a tag or a commit.

    Raises:
        WeightsError: the repository, the revision or its weights cannot be had.
    """
    repo, at, revision = name.partition("@")
    if at and not _REVISION.fullmatch(revision):
        raise WeightsError(f"hf-hub:{name}: revision {revision!r} is no branch, tag or commit")
    folder = _snapshot(repo, revision or None, TOLD_BY)
    commit = folder.name
    for files in weight_files(folder):
        _snapshot(repo, commit, files)
        if any((folder / file).is_file() for file in files):
            break
    return read_folder(folder, f"hf-hub:{repo}@{commit}")


def _snapshot(repo: str, revision: str | None, files: Iterable[str]) -> Path:
    """The folder of a commit in huggingface_hub's cache, with these files if it has them."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except Exception as error:
        asked = f"hf-hub:{repo}" + (f"@{revision}" if revision else "")
        raise WeightsError(f"{asked} cannot be had: {_reason(error, repo)}") from error


def _reason(error: Exception, repo: str) -> str:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"it is gated; ask for access at {page}, then `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no {page}, or it is private: check the name, or `hf auth login` "
            "or set HF_TOKEN"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no such revision; {page}/commits lists them"
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        return (
            f"{why}, and {constants.HF_HUB_CACHE} has it not, or not all of it; load it once with "
            "a connection, or copy its files into a folder and take local-dir:FOLDER"
        )
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def read_url(address: str) -> Source:
    """A file of weights at an address that ends with the file's sha256.

    The file is kept in torch.hub's cache under its hash and checked at each use.

    Args:
        address: `https://...#sha256=HEX`; also `http:` and `file:`, as the hash tells the file.

    Raises:
        WeightsError: the address lacks the hash, cannot be reached, or gives another file.
    """
    source = f"url:{address}"
    try:
        parts = urlsplit(address)
    except ValueError as error:
        raise WeightsError(f"{source} is no address: {error}") from error
    hashed = _SHA256.fullmatch(parts.fragment)
    if parts.scheme not in _SCHEMES:
        raise WeightsError(f"{source} must begin with one of {', '.join(_SCHEMES)}")
    if hashed is None:
        raise WeightsError(
            f"{source} must end with the file's sha256, so that no other file is loaded: "
            f"url:{parts._replace(fragment='').geturl()}#sha256=HEX, with the 64 digits that "
            "`sha256sum FILE` gives"
        )
    file = _fetched(parts._replace(fragment="").geturl(), hashed[1].lower(), source)
    found = read_file(str(file))
    return replace(found, name=found.name.replace(f"file:{file}", source))


def _fetched(url: str, sha256: str, source: str) -> Path:
    from torch.hub import download_url_to_file, get_dir

    suffix = Path(urlsplit(url).path).suffix
    file = Path(get_dir(), "checkpoints", f"{sha256}{suffix if suffix.isascii() else ''}")
    if file.is_file() and sha256_of(file) == sha256:
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Into a temporary file, which takes its name only if the hash is right.
        download_url_to_file(url, str(file), sha256, progress=sys.stderr.isatty())
    except Exception as error:
        file.unlink(missing_ok=True)  # an old one of another hash
        raise WeightsError(
            f"{source} cannot be had: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    return file
