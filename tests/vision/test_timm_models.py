from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn

import zoo
from vision import ResNet
from vision.timm_models import PREFIX, register_with_timm
from zoo import registry
from zoo.depth import layer_indices
from zoo.rng import generator

SMALL = ["vit_micro_patch2_8", "vit_micro_patch4_32", "resnet_micro", "resnet20"]


def images(model: Any, number: int = 2) -> Tensor:
    preprocessing = model.card.preprocessing
    shape = (number, preprocessing.in_chans, *preprocessing.size)
    return torch.randn(shape, generator=generator("timm_models"))


def test_all_image_classifiers_are_listed() -> None:
    wanted = [PREFIX + name for name in zoo.list_models(["vit_*", "resnet*"])]
    assert set(timm.list_models("zoo_*")) == set(wanted)
    assert not timm.is_model("zoo_dual_micro")
    assert not timm.is_model("zoo_text_micro")
    assert timm.create_model("vit_tiny_patch16_224", depth=1).__module__.startswith("timm.")


@pytest.mark.parametrize("name", SMALL)
def test_same_logits_as_from_the_zoo(name: str) -> None:
    ours = zoo.create_model(name, num_classes=5, in_chans=1, img_size=(16, 24)).eval()
    theirs = timm.create_model(PREFIX + name, num_classes=5, in_chans=1, img_size=(16, 24)).eval()
    assert type(theirs) is type(ours)
    assert theirs.card == ours.card
    theirs.load_state_dict(ours.state_dict())
    x = images(ours)
    assert torch.equal(theirs(x), ours(x))
    assert torch.equal(theirs.forward_head(theirs.forward_features(x)), ours(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.list_models(["vit_*", "resnet*"], exclude=SMALL))
def test_same_logits_at_full_size(name: str) -> None:
    ours = zoo.create_model(name).eval()
    theirs = timm.create_model(PREFIX + name).eval()
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        assert torch.equal(theirs(images(ours, 1)), ours(images(ours, 1)))


def test_options_and_insertions() -> None:
    model = timm.create_model(
        "zoo_vit_micro_patch4_32", drop_rate=0.1, drop_path_rate=0.2, attention="window", depth=2
    )
    assert model.card.options["drop_path_rate"] == 0.2
    assert model.head_drop.p == 0.1
    model = timm.create_model("zoo_resnet_micro", insertions=["se@standard"], drop_path_rate=0.1)
    assert model.card.options["insertions"]
    with pytest.raises(TypeError, match=r"vit_micro_patch4_32 has no option 'nonsense'.*valid:"):
        timm.create_model("zoo_vit_micro_patch4_32", nonsense=1)


def test_classifier_can_be_left_out_and_replaced() -> None:
    model = timm.create_model("zoo_vit_micro_patch2_8", num_classes=0).eval()
    assert model(images(model)).shape == (2, 64)
    assert model.pretrained_cfg["classifier"] is None
    model.reset_classifier(7)
    assert model(images(model)).shape == (2, 7)


def test_configuration_is_the_cards() -> None:
    model = timm.create_model("zoo_resnet18", num_classes=5, in_chans=1, img_size=(64, 96))
    config = model.pretrained_cfg
    assert model.default_cfg is config
    assert (config["num_classes"], config["classifier"], config["first_conv"]) == (5, "fc", "conv1")
    assert config["architecture"] == "zoo_resnet18"
    data = timm.data.resolve_model_data_config(model)
    assert data["input_size"] == (1, 64, 96)
    assert data["mean"] == model.card.preprocessing.mean


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "vit_base_patch16_clip_224"])
def test_transform_is_that_of_timm_for_its_own(name: str) -> None:
    """Without building anything: what timm's scripts read before they build."""
    ours = timm.get_pretrained_cfg(PREFIX + name)
    assert ours.fixed_input_size == name.startswith("vit")
    preprocessing = registry._find(name).preprocessing
    for field in ("mean", "std", "interpolation", "crop_pct", "crop_mode"):
        assert getattr(ours, field) == getattr(preprocessing, field)
    assert ours.input_size == (3, *preprocessing.size)


def test_transform_equals_ours() -> None:
    model = timm.create_model("zoo_vit_micro_patch4_32", img_size=24, depth=1)
    theirs = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    pixels = torch.randint(0, 256, (60, 80, 3), dtype=torch.uint8, generator=generator(1))
    image = Image.fromarray(pixels.numpy())
    torch.testing.assert_close(theirs(image), zoo.transforms(model)(image), rtol=0, atol=0.02)


def test_scripts_get_the_size_that_they_ask_for() -> None:
    resolve = getattr(timm.models, "resolve_model_input_args", None)
    if resolve is None:
        pytest.skip("timm has it from 1.0.27 on")
    given = resolve("zoo_vit_micro_patch4_32", {"img_size": 16, "in_chans": 1})
    model = timm.create_model(given.pop("model_name"), **given)
    assert model.card.preprocessing.size == (16, 16)
    assert model.card.preprocessing.in_chans == 1


def test_pretrained_without_weights_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="resnet_micro has no weights of its own; pass a source"):
        timm.create_model("zoo_resnet_micro", pretrained=True)


@pytest.mark.parametrize("how", ["overlay", "configuration", "checkpoint_path"])
def test_weights_from_a_file(how: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    saved = zoo.create_model("resnet_micro", num_classes=3).eval()
    path = tmp_path / "weights.safetensors"
    save_file(saved.state_dict(), path)
    options: dict[str, Any] = {
        "overlay": {"pretrained": True, "pretrained_cfg_overlay": {"file": str(path)}},
        "configuration": {"pretrained": True, "pretrained_cfg": {"file": str(path)}},
        "checkpoint_path": {"checkpoint_path": str(path)},
    }[how]
    model = timm.create_model("zoo_resnet_micro", num_classes=3, **options).eval()
    assert torch.equal(model(images(saved)), saved(images(saved)))


def test_own_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = zoo.create_model("resnet_micro", num_classes=3).eval()
    torch.save(saved.state_dict(), tmp_path / "weights.pt")
    registered(monkeypatch, "resnet_own", weights=f"file:{tmp_path / 'weights.pt'}")
    assert timm.list_models("zoo_resnet_own", pretrained=True) == ["zoo_resnet_own"]
    model = timm.create_model("zoo_resnet_own", pretrained=True, num_classes=3).eval()
    assert torch.equal(model(images(saved)), saved(images(saved)))
    assert timm.create_model("zoo_resnet_own", num_classes=3).card.source is None


def registered(monkeypatch: pytest.MonkeyPatch, name: str, **about: Any) -> None:
    """A model of the user's, for one test."""
    from timm.models import _registry

    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    for table in ("_model_entrypoints", "_model_pretrained_cfgs", "_model_default_cfgs"):
        monkeypatch.setattr(_registry, table, dict(getattr(_registry, table)))
    monkeypatch.setattr(_registry, "_model_has_pretrained", set(_registry._model_has_pretrained))

    def build(**options: Any) -> ResNet:
        return ResNet(**{"stem": "3x3", "block": "basic", "depths": (1, 1, 1),
            "widths": (16, 32, 64), "shortcut": "pad", "img_size": 32, **options})  # fmt: skip

    zoo.register_model(name=name, preprocessing=zoo.Preprocessing((32, 32)), **about)(build)
    register_with_timm()


def test_later_models(monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder) -> None:
    registered(monkeypatch, "resnet_later")
    register_with_timm()  # again: nothing is overwritten
    assert not [w for w in recwarn if "Overwriting" in str(w.message)]
    assert isinstance(timm.create_model("zoo_resnet_later"), ResNet)


def test_functions_that_do_not_say_what_they_return(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    def unresolved(**options: Any) -> NoSuchClass:  # type: ignore[name-defined]  # noqa: F821
        return ResNet(**options)

    for name, build in (("unresolved", unresolved), ("unsaid", lambda **options: ResNet())):
        zoo.register_model(name=name)(build)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        register_with_timm()
    assert not timm.list_models(["zoo_unresolved", "zoo_unsaid"])


def test_saved_by_timm(tmp_path: Path) -> None:
    from timm.models import save_for_hf

    model = timm.create_model("zoo_vit_micro_patch2_8", num_classes=4, in_chans=1).eval()
    args = {"num_classes": 4, "in_chans": 1}
    save_for_hf(model, str(tmp_path), model_args=args, safe_serialization="both")
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert torch.equal(again(images(model)), model(images(model)))


def test_saved_by_the_zoo(tmp_path: Path) -> None:
    model = timm.create_model("zoo_resnet_micro", num_classes=4, insertions=["eca@standard"]).eval()
    zoo.save_pretrained(model, tmp_path / "model")
    again = zoo.create_model(f"local-dir:{tmp_path / 'model'}").eval()
    assert torch.equal(again(images(model)), model(images(model)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"pretrained_cfg": "tag"}, "'tag': our models have one set of weights"),
        ({"pretrained_cfg": {"state_dict": {"a": 1}}}, "has state_dict; weights of our models"),
        ({"cache_dir": "here"}, r"cache_dir \(here\)"),
    ],
)
def test_weights_that_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        timm.create_model("zoo_resnet_micro", pretrained=True, **options)


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224"])
def test_features_equal_those_of_timm(name: str) -> None:
    size = {"img_size": 32} if name.startswith("vit") else {}
    pooled = {"global_pool": ""} if name.startswith("vit") else {}
    theirs = timm.create_model(name, num_classes=0, **size, **pooled)
    ours = timm.create_model(PREFIX + name, features_only=True, **size).eval()
    state = {k: v for k, v in theirs.state_dict().items() if k in ours.model.state_dict()}
    ours.model.load_state_dict(state)
    their_net = timm.create_model(name, features_only=True, **size).eval()
    own = their_net.model if name.startswith("vit") else their_net
    own.load_state_dict(state, strict=False)
    x = torch.randn(2, 3, 32, 32, generator=generator(2))
    expected, outputs = their_net(x), ours(x)
    assert len(outputs) == len(expected)
    for one, other in zip(outputs, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert ours.feature_info.channels() == their_net.feature_info.channels()
    assert ours.feature_info.reduction() == their_net.feature_info.reduction()
    assert "num_classes" not in ours.default_cfg


def test_chosen_features() -> None:
    net = timm.create_model("zoo_resnet_micro", features_only=True, out_indices=(1, 3)).eval()
    assert [tuple(x.shape[1:]) for x in net(torch.randn(1, 3, 32, 32))] == [
        (16, 32, 32),
        (64, 8, 8),
    ]
    assert net.feature_info.module_name() == ["layer1", "layer3"]
    assert dict(net.model.named_modules()).keys() >= {"layer1", "layer3", "relu"}
    net = timm.create_model("zoo_vit_micro_patch2_8", features_only=True, out_indices=1)
    assert net.feature_info.module_name() == ["blocks.3"]
    assert [tuple(x.shape) for x in net(torch.randn(1, 3, 8, 8))] == [(1, 64, 4, 4)]


def test_features_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"feature_cls \('hook'\) must be 'getter'"):
        timm.create_model("zoo_resnet_micro", features_only=True, feature_cls="hook")
    monkeypatch.setattr("vision.timm_models._feature_info", lambda model: None)
    with pytest.raises(ValueError, match="zoo_resnet_micro has no features_only: ResNet"):
        timm.create_model("zoo_resnet_micro", features_only=True)


@pytest.mark.parametrize("name", ["zoo_vit_micro_patch2_8", "zoo_resnet_micro"])
def test_layer_decay_of_timm(name: str) -> None:
    from timm.models import group_parameters
    from timm.optim import param_groups_layer_decay

    model = timm.create_model(name)
    layers, last = layer_indices(model)
    assert group_parameters(model, model.group_matcher(coarse=False), reverse=True) == layers
    groups = param_groups_layer_decay(model, weight_decay=0.1, layer_decay=0.5)
    names = {id(p): n for n, p in model.named_parameters()}
    for group in groups:
        for p in group["params"]:
            assert group["lr_scale"] == 0.5 ** (last - layers[names[id(p)]])
    twin = copy.deepcopy(model)
    assert twin.group_matcher.args[0] is twin


def test_step_with_timms_optimizer() -> None:
    model = timm.create_model("zoo_vit_micro_patch2_8", class_token=True, global_pool="token")
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=0.01, weight_decay=0.1)
    still = {id(p) for g in optimizer.param_groups if not g["weight_decay"] for p in g["params"]}
    assert {id(model.pos_embed), id(model.cls_token)} <= still
    model.set_grad_checkpointing(enable=True)
    before = model.head.weight.clone()
    nn.functional.cross_entropy(model(images(model)), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert not torch.equal(model.head.weight, before)


def run(code: str) -> str:
    command = [sys.executable, "-W", "error::UserWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_timm_is_met_at_the_door() -> None:
    """timm after vision: not loaded by it, found by others as before, and the hook goes."""
    lines = run("""
import sys, importlib, importlib.util
import vision
print("timm" in sys.modules)
keeper = sys.meta_path[0]
print(type(keeper).__name__)
spec = importlib.util.find_spec("timm")
print(spec.name, type(spec.loader).__name__, importlib.util.find_spec("no_such_module_x"))
print("timm" in sys.modules)
from timm.models import list_models
print("zoo_resnet_micro" in list_models("zoo_*"), keeper in sys.meta_path)
import timm
print(type(timm.__spec__.loader).__name__, timm.__file__.endswith("__init__.py"))
print(importlib.reload(timm).is_model("zoo_resnet_micro"))
""").splitlines()
    assert lines == [
        "False",
        "_Doorkeeper",
        "timm SourceFileLoader None",
        "False",
        "True False",
        "SourceFileLoader True",
        "True",
    ]


def test_timm_that_is_there_already() -> None:
    assert run("import timm, vision; print(timm.is_model('zoo_resnet20'))") == "True"


def test_a_broken_timm_stays_importable(tmp_path: Path) -> None:
    """One that fails fails with its own error; one without a registry gives a warning."""
    (tmp_path / "timm.py").write_text("raise RuntimeError('half installed')")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport vision, zoo\n"
    failing = """
for _ in range(2):
    try: import timm
    except RuntimeError as error: print(error)
"""
    assert run(code + failing) == "half installed\nhalf installed"
    (tmp_path / "timm.py").write_text("name = 'another timm'")
    other = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import timm
print(timm.name, "|", caught[-1].message)
"""
    out = run(code + other)
    assert out.startswith("another timm | timm does not get the models of vision: ")


@pytest.mark.slow
def test_threads_import_timm_at_once() -> None:
    out = run("""
import threading
import vision
found = []
def work():
    import timm
    found.append(timm.is_model("zoo_resnet_micro"))
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(found)
""")
    assert out == "[True, True, True, True]"
