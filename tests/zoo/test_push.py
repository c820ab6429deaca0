"""Models onto a hub that is a folder of ours, and back through the cache of huggingface_hub."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants, errors
from torch import nn

import zoo
from zoo.card import ModelCard
from zoo.push import model_readme
from zoo.sources import WeightsError

NAME = "vit_micro_patch2_8"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FolderApi:
    """Stands for `HfApi`: a repository is a snapshot in a cache; every call is noted."""

    home: Path
    calls: list[tuple[str, dict[str, Any]]]

    def __init__(self, **options: Any) -> None:
        self.calls.append(("HfApi", options))

    def create_repo(self, repo_id: str, **options: Any) -> Any:
        self.calls.append(("create_repo", {"repo_id": repo_id, **options}))
        return SimpleNamespace(repo_id=repo_id if "/" in repo_id else f"me/{repo_id}")

    def create_branch(self, repo_id: str, **options: Any) -> None:
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))

    def file_exists(self, repo_id: str, filename: str, revision: str | None = None) -> bool:
        return (self.snapshot(repo_id) / filename).exists()

    def upload_folder(self, *, repo_id: str, folder_path: Path, **options: Any) -> Any:
        self.calls.append(("upload_folder", {"repo_id": repo_id, **options}))
        shutil.copytree(folder_path, self.snapshot(repo_id), dirs_exist_ok=True)
        refs = self.snapshot(repo_id).parents[1] / "refs"
        refs.mkdir(exist_ok=True)
        (refs / (options["revision"] or "main")).write_text(COMMIT)
        return SimpleNamespace(commit_url=f"https://huggingface.co/{repo_id}/commit/{COMMIT}")

    def snapshot(self, repo_id: str) -> Path:
        return self.home / f"models--{repo_id.replace('/', '--')}" / "snapshots" / COMMIT


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[FolderApi]:
    made = type("Api", (FolderApi,), {"home": tmp_path / "hub", "calls": []})
    monkeypatch.setattr(huggingface_hub, "HfApi", made)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return made


def make(**changes: Any) -> Any:
    model: Any = zoo.create_model(NAME, depth=1, num_classes=2, class_names=["cat|fat", "dog"])
    card = {**model.card.to_dict(), "preprocessing": model.card.preprocessing, **changes}
    model.card = ModelCard(**card)
    return model.eval()


def test_pushed_and_pulled_gives_the_same_logits(api: type[FolderApi]) -> None:
    model = make(license="apache-2.0")
    url = zoo.push_to_hub(nn.DataParallel(model), "me/vit", private=True, token="hf_x")
    assert url == f"https://huggingface.co/me/vit/commit/{COMMIT}"
    again: Any = zoo.create_model("hf-hub:me/vit").eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model(x))
    assert again.card.class_names == ("cat|fat", "dog")
    assert again.card.license == "apache-2.0"
    calls = dict(api.calls)
    assert calls["HfApi"] == {"token": "hf_x", "library_name": "attention-zoo"}
    assert calls["create_repo"] == {"repo_id": "me/vit", "private": True, "exist_ok": True}
    assert calls["upload_folder"]["commit_message"] == "Add model"
    assert [name for name, _ in api.calls].count("upload_folder") == 1
    assert "create_branch" not in calls


def test_a_branch_is_made_and_the_owner_is_found(api: type[FolderApi]) -> None:
    model = make()
    url = zoo.push_to_hub(model, "vit", revision="v1", commit_message="One", exist_ok=False)
    assert "/me/vit/" in url
    calls = dict(api.calls)
    assert calls["create_repo"] == {"repo_id": "vit", "private": None, "exist_ok": False}
    assert calls["create_branch"] == {"repo_id": "me/vit", "branch": "v1", "exist_ok": True}
    assert calls["upload_folder"] == {
        "repo_id": "me/vit",
        "revision": "v1",
        "commit_message": "One",
    }
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(zoo.create_model("hf-hub:me/vit@v1").eval()(x), model(x))


def test_a_readme_that_is_there_stays(api: type[FolderApi], tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--me--vit" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "README.md").write_text("written by hand")
    zoo.push_to_hub(make(), "me/vit")
    assert (snapshot / "README.md").read_text() == "written by hand"
    assert (snapshot / "model.safetensors").exists()


def test_the_readme_says_what_the_card_knows() -> None:
    metrics = {"val/top1": 98.5, "notes": "none"}
    model = make(license="MIT", source="timm:resnet10t", extra={"metrics": metrics})
    readme = huggingface_hub.ModelCard(model_readme(model, "me/vit"))
    assert readme.data.library_name == "attention-zoo"
    assert readme.data.license == "mit"
    assert readme.data.pipeline_tag == "image-classification"
    assert readme.data.metrics == ["val/top1"]
    assert readme.data.tags == ["attention-zoo", "pytorch", "vit"]
    text = readme.text
    assert 'zoo.create_model("hf-hub:me/vit")' in text
    assert "`vit_micro_patch2_8` of Attention Zoo" in text
    assert f"{sum(p.numel() for p in model.parameters()):,} parameters" in text
    assert "| val/top1 | `98.5` |" in text
    assert "| size | `[8, 8]` |" in text
    assert "| depth | `1` |" in text
    assert "2 classes: cat|fat, dog." in text
    assert "Weights started from `timm:resnet10t`." in text


def test_a_licence_that_the_hub_does_not_know_is_named() -> None:
    data = huggingface_hub.ModelCard(model_readme(make(license="My own"), "me/vit")).data
    assert (data.license, data.license_name) == ("other", "My own")
    data = huggingface_hub.ModelCard(model_readme(make(), "me/vit")).data
    assert data.license is None
    assert data.license_name is None
    assert data.metrics is None


def test_models_without_a_card_are_refused(api: type[FolderApi]) -> None:
    with pytest.raises(zoo.weights.WeightsError, match="Linear does not know its registered name"):
        zoo.push_to_hub(nn.Linear(2, 2), "me/vit")
    assert not api.calls  # nothing reached the hub
    with pytest.raises(TypeError, match="Linear has no card"):
        model_readme(nn.Linear(2, 2), "me/vit")


def test_a_hub_out_of_reach_is_told_as_when_reading(
    api: type[FolderApi], monkeypatch: pytest.MonkeyPatch
) -> None:
    class ConnectError(Exception):
        """As of httpx, which is not always the one installed."""

    def refuse(error: Exception) -> None:
        def create_repo(self: Any, repo_id: str, **options: Any) -> Any:
            raise error

        monkeypatch.setattr(api, "create_repo", create_repo)

    refuse(ConnectError("Name or service not known"))
    with pytest.raises(
        WeightsError, match=r"me/vit cannot be pushed: .* cannot be reached.*upload"
    ):
        zoo.push_to_hub(make(), "me/vit")
    refuse(errors.OfflineModeIsEnabled("offline"))
    with pytest.raises(WeightsError, match=r"HF_HUB_OFFLINE is set; zoo.save_pretrained"):
        zoo.push_to_hub(make(), "me/vit")
    refuse(errors.HFValidationError("Repo id must be in the form"))
    with pytest.raises(WeightsError, match=r"cannot be pushed: HFValidationError: Repo id must"):
        zoo.push_to_hub(make(), "me/vit/x")


@pytest.mark.parametrize("status", [401, 409])
def test_a_hub_that_refuses_is_told_with_what_helps(
    api: type[FolderApi], monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    error = errors.HfHubHTTPError.__new__(errors.HfHubHTTPError)
    error.response = SimpleNamespace(status_code=status)  # type: ignore[assignment]
    error.args = ("no",)

    def create_repo(self: Any, repo_id: str, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(api, "create_repo", create_repo)
    with pytest.raises(WeightsError) as caught:
        zoo.push_to_hub(make(), "me/vit")
    assert ("HF_TOKEN" in str(caught.value)) == (status == 401)
