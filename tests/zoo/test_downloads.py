"""Weights of a hub and of an address, with servers of our own: no other can be reached here."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import save_file
from timm.models import save_for_hf

import zoo
from zoo.downloads import read_hub, read_url
from zoo.sources import read_source
from zoo.weights import WeightsError

NAME = "vit_micro_patch2_8"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40


def cache_folder(cache: Path, folder: Path, repo: str, commit: str = COMMIT) -> Path:
    """Lays a folder out as huggingface_hub does: blobs by hash, links to them, a ref."""
    home = cache / f"models--{repo.replace('/', '--')}"
    snapshot = home / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (home / "blobs").mkdir(exist_ok=True)
    (home / "refs").mkdir(exist_ok=True)
    (home / "refs" / "main").write_text(commit)
    for file in folder.iterdir():
        blob = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, home / "blobs" / blob)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob))
    return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """huggingface_hub's cache, and nothing else."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


# --- the cache ----------------------------------------------------------------------------------


def test_our_own_folder_from_the_cache(cache: Path, tmp_path: Path) -> None:
    model: Any = zoo.create_model(NAME, depth=1, num_classes=2, class_names=["cat", "dog"]).eval()
    cache_folder(cache, zoo.save_pretrained(model, tmp_path / "ours"), "me/vit")
    source = read_hub("me/vit")
    assert source.name == f"hf-hub:me/vit@{COMMIT}"
    again: Any = zoo.create_model("hf-hub:me/vit").eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))
    assert again.card.source == f"hf-hub:me/vit@{COMMIT}"
    assert again.card.class_names == ("cat", "dog")
    assert torch.equal(zoo.create_model(again.card.source).eval()(x), model(x))


def test_each_revision_has_its_own_weights(cache: Path, tmp_path: Path) -> None:
    models: list[Any] = [zoo.create_model(NAME, depth=1).eval() for _ in range(2)]
    for model, commit in zip(models, (COMMIT, OTHER), strict=True):
        folder = zoo.save_pretrained(model, tmp_path / commit)
        cache_folder(cache, folder, "me/vit", commit)
    refs = cache / "models--me--vit" / "refs"
    (refs / "pr").mkdir()
    (refs / "v1.0").write_text(COMMIT)
    (refs / "pr" / "1").write_text(COMMIT)
    x = torch.randn(2, 3, 8, 8)
    for revision in ("v1.0", "pr/1", COMMIT):
        again = zoo.create_model(f"hf-hub:me/vit@{revision}").eval()
        assert torch.equal(again(x), models[0](x))
    assert torch.equal(zoo.create_model("hf-hub:me/vit").eval()(x), models[1](x))  # main's


@pytest.mark.parametrize("safe", [True, False])
def test_a_timm_folder_from_the_cache(safe: bool, cache: Path, tmp_path: Path) -> None:
    theirs = timm.create_model("resnet10t", num_classes=3).eval()
    save_for_hf(theirs, str(tmp_path / "timm"), safe_serialization=safe)
    cache_folder(cache, tmp_path / "timm", "me/resnet")
    model: Any = zoo.create_model("hf-hub:me/resnet").eval()
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model(x), theirs(x))
    other: Any = zoo.create_model("timm:resnet10t", pretrained="hf-hub:me/resnet", num_classes=3)
    assert torch.equal(other.eval()(x), theirs(x))
    assert other.card.source == f"hf-hub:me/resnet@{COMMIT}"


@pytest.mark.parametrize("shard", ["5GB", "10kB"])
def test_a_transformers_folder_from_the_cache(shard: str, cache: Path, tmp_path: Path) -> None:
    theirs = transformers.ViTModel(
        transformers.ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=32,
        )
    )
    theirs.save_pretrained(tmp_path / "vit", max_shard_size=shard)
    transformers.ViTImageProcessor().save_pretrained(tmp_path / "vit")
    cache_folder(cache, tmp_path / "vit", "me/vit")
    source = read_source("hf-hub:me/vit")
    assert source.tensors.keys() == read_source(f"local-dir:{tmp_path / 'vit'}").tensors.keys()
    assert sum(value.numel() for value in source.tensors.values()) == theirs.num_parameters()
    assert source.card is not None
    assert source.card.source == f"hf-hub:me/vit@{COMMIT}"
    assert source.config["model_type"] == "vit"


def test_the_environment_says_where_the_cache_is(tmp_path: Path) -> None:
    folder = zoo.save_pretrained(zoo.create_model(NAME, depth=1), tmp_path / "ours")
    cache_folder(tmp_path / "home" / "hub", folder, "me/vit")
    code = "import sys; from zoo.sources import read_source; print(read_source(sys.argv[1]).name)"
    done = subprocess.run(
        [sys.executable, "-c", code, "hf-hub:me/vit"],
        env={"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"hf-hub:me/vit@{COMMIT}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("me/none", r"hf-hub:me/none cannot be had: HF_HUB_OFFLINE is set, and .*local-dir:FOLDER"),
        ("me/vit@v9", r"hf-hub:me/vit@v9 cannot be had: HF_HUB_OFFLINE is set"),
        ("me/vit@../../x", r"revision '\.\./\.\./x' is no branch, tag or commit"),
        ("me/vit@", r"revision '' is no branch"),
        ("../me/vit", r"hf-hub:\.\./me/vit cannot be had: HFValidationError"),
        ("a/b/c", r"hf-hub:a/b/c cannot be had: HFValidationError"),
    ],
)
def test_what_the_cache_lacks(name: str, message: str, cache: Path, tmp_path: Path) -> None:
    folder = zoo.save_pretrained(zoo.create_model(NAME, depth=1), tmp_path / "ours")
    cache_folder(cache, folder, "me/vit")
    with pytest.raises(WeightsError, match=message) as error:
        read_hub(name)
    assert "\n" not in str(error.value)


def test_names_in_a_cached_index_must_be_plain(cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "vit"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "vit"}')
    index = {"weight_map": {"x": "../../../../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
    cache_folder(cache, folder, "me/vit")
    with pytest.raises(WeightsError, match=r"speaks of '\.\./.*must be plain"):
        read_hub("me/vit")


# --- a hub --------------------------------------------------------------------------------------


class Hub:
    """Serves the files of a folder as the hub's API does; `asked` lists those fetched."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked = folder, list[str]()
        self.error: tuple[int, str] | None = None
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            def do_HEAD(self) -> None:
                hub.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        path = to.path.partition("?")[0]
        if self.error is not None:
            self.send(to, b"{}", self.error[0], {"X-Error-Code": self.error[1]})
        elif path.startswith("/api/models/me/vit/tree/"):
            files = [{"type": "file", "path": x, "size": n, "oid": x} for x, n in self.files()]
            self.send(to, json.dumps(files).encode())
        elif path.startswith("/api/models/"):
            self.send(to, json.dumps({"id": "me/vit", "sha": COMMIT}).encode())
        elif path.startswith(f"/me/vit/resolve/{COMMIT}/"):
            name = path.rpartition("/")[2]
            self.asked.append(name)
            told = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}
            self.send(to, (self.folder / name).read_bytes(), 200, told)
        else:
            self.send(to, b"no such page", 404)

    def files(self) -> list[tuple[str, int]]:
        return [(file.name, file.stat().st_size) for file in sorted(self.folder.iterdir())]

    def send(
        self,
        to: BaseHTTPRequestHandler,
        body: bytes,
        status: int = 200,
        headers: dict[str, str] | None = None,
    ) -> None:
        to.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            to.send_header(key, value)
        to.end_headers()
        if to.command == "GET":
            to.wfile.write(body)


@pytest.fixture
def hub(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    (tmp_path / "served").mkdir()
    hub = Hub(tmp_path / "served")
    template = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


def test_only_json_and_the_best_weights_are_fetched(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = timm.create_model("resnet10t", num_classes=3).eval()
    save_for_hf(theirs, str(hub.folder), safe_serialization="both")
    for name in ("modeling.py", "train.pkl", "optimizer.pt", "other.safetensors", "README.md"):
        (hub.folder / name).write_text("---\nlicense: mit\n---\n")
    model: Any = zoo.create_model("hf-hub:me/vit").eval()
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(model(x), theirs(x))
    assert set(hub.asked) == {"config.json", "README.md", "model.safetensors"}
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert torch.equal(zoo.create_model("hf-hub:me/vit").eval()(x), theirs(x))


def test_torch_files_are_fetched_where_there_is_nothing_else(hub: Hub) -> None:
    theirs = timm.create_model("resnet10t", num_classes=3)
    save_for_hf(theirs, str(hub.folder), safe_serialization=False)
    assert read_hub("me/vit").tensors.keys() == theirs.state_dict().keys()
    assert set(hub.asked) == {"config.json", "pytorch_model.bin"}


def test_exactly_the_shards_of_the_index_are_fetched(hub: Hub) -> None:
    for key in "abc":
        save_file({key: torch.ones(1)}, hub.folder / f"{key}.safetensors")
    index = {"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub.folder / "config.json").write_text('{"model_type": "vit"}')
    assert set(read_hub("me/vit").tensors) == {"a", "b"}
    assert "c.safetensors" not in hub.asked
    assert {"a.safetensors", "b.safetensors"} <= set(hub.asked)


def test_a_repository_without_weights(hub: Hub) -> None:
    (hub.folder / "config.json").write_text('{"model_type": "vit"}')
    (hub.folder / "model.py").write_text("raise SystemExit")
    with pytest.raises(WeightsError, match=r"model\.json is missing; the folder holds: config"):
        read_hub("me/vit")
    assert hub.asked == ["config.json"] * len(hub.asked)


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "GatedRepo", r"it is gated; ask for access at .*/me/vit, then `hf auth login`"),
        (404, "RepoNotFound", r"there is no .*/me/vit, or it is private: check the name"),
        (404, "RevisionNotFound", r"it has no such revision; .*/me/vit/commits lists them"),
        (500, "", r"the hub cannot be reached, and .* has it not"),
    ],
)
def test_what_the_hub_refuses(status: int, code: str, message: str, hub: Hub) -> None:
    hub.error = status, code
    with pytest.raises(WeightsError, match=message) as error:
        read_hub("me/vit@v1")
    assert str(error.value).startswith("hf-hub:me/vit@v1 cannot be had: ")
    assert "\n" not in str(error.value)
    if code == "RepoNotFound":
        assert isinstance(error.value.__cause__, huggingface_hub.errors.RepositoryNotFoundError)


# --- addresses ----------------------------------------------------------------------------------


@pytest.fixture
def hub_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "torch"))
    return tmp_path / "torch" / "checkpoints"


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_a_file_at_an_address(suffix: str, hub: Hub, hub_dir: Path) -> None:
    file = hub.folder / f"weights{suffix}"
    model: Any = zoo.create_model(NAME, depth=1).eval()
    state = model.state_dict()
    save_file(state, file) if suffix == ".safetensors" else torch.save({"model": state}, file)
    address = f"{hub.address}/me/vit/resolve/{COMMIT}/{file.name}#sha256={sha256(file).upper()}"
    other: Any = zoo.create_model(NAME, depth=1, pretrained=f"url:{address}").eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(other(x), model(x))
    inside = "" if suffix == ".safetensors" else " (model)"
    assert other.card.source == f"url:{address}{inside}"
    assert [item.name for item in hub_dir.iterdir()] == [f"{sha256(file)}{suffix}"]
    read_url(address)
    assert hub.asked == [file.name]  # the second time it is in the cache


def test_a_cached_file_is_checked_again(tmp_path: Path, hub_dir: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file({"x": torch.ones(2)}, file)
    address = f"file://{file}#sha256={sha256(file)}"
    cached = hub_dir / f"{sha256(file)}.safetensors"
    assert torch.equal(read_url(address).tensors["x"], torch.ones(2))
    save_file({"x": torch.zeros(2)}, cached)
    assert torch.equal(read_url(address).tensors["x"], torch.ones(2))
    cached.write_bytes(file.read_bytes()[:-1])
    file.unlink()
    with pytest.raises(WeightsError, match=r"url:file://.* cannot be had: URLError"):
        read_url(address)
    assert not list(hub_dir.iterdir())


def test_another_file_than_the_hash_says_is_refused(hub: Hub, hub_dir: Path) -> None:
    file = hub.folder / "weights.safetensors"
    save_file({"x": torch.ones(2)}, file)
    address = f"{hub.address}/me/vit/resolve/{COMMIT}/{file.name}#sha256={'0' * 64}"
    with pytest.raises(WeightsError, match=r"cannot be had: RuntimeError: invalid hash value"):
        read_url(address)
    with pytest.raises(WeightsError, match=r"cannot be had: HTTPError: .*404"):
        read_url(f"{hub.address}/none#sha256={'0' * 64}")
    assert not list(hub_dir.iterdir())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("https://host/x.pth", r"must end with .*url:https://host/x\.pth#sha256=HEX, with the 64"),
        ("https://host/x.pth#sha256=12", "must end with the file's sha256"),
        ("https://host/x.pth#md5=12", "must end with the file's sha256"),
        (f"ftp://host/x.pth#sha256={'0' * 64}", "must begin with one of https, http, file"),
        (f"host/x.pth#sha256={'0' * 64}", "must begin with one of https, http, file"),
        ("https://[host/x.pth", "is no address"),
    ],
)
def test_addresses_that_are_none(address: str, message: str, hub_dir: Path) -> None:
    with pytest.raises(WeightsError, match=rf"url:.*{message}"):
        read_url(address)
    assert not hub_dir.exists()
