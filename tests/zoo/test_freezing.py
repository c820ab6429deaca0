"""What is frozen neither learns nor moves its statistics, in every kind of tower."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torchvision.models import get_model

import vision
import zoo
from crossmodal.towers import ImageTower, text_tower
from zoo.freezing import RULES, check_rule, classifier_parameters, freeze, freeze_by_rule, parts

TINY_VIT = {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "embed_dim": 24}
TINY_RESNET = {"layers": [1, 1, 1, 1], "width": 8, "head_width": 16, "embed_dim": 24}
TINY_TEXT = {"layers": 2, "width": 32, "heads": 2, "embed_dim": 24, "vocab_size": 100}

# Name, options, depth, and modules or parameters that are frozen and that train with one block
# frozen; all are those of the network's own code.
TOWERS = [
    (
        *("vit_micro_patch4_32", {"class_token": True}, 4),
        *(["patch_embed", "pos_embed", "cls_token", "blocks.0"], ["blocks.1", "fc_norm"]),
    ),
    ("resnet_micro", {}, 3, ["conv1", "bn1", "layer1"], ["layer2", "layer3"]),
    ("timm:resnet10t", {}, 4, ["conv1", "bn1", "layer1"], ["layer2", "layer4"]),
    (
        *("timm:vit_tiny_patch16_224", {"depth": 3}, 3),
        *(["patch_embed", "pos_embed", "cls_token", "blocks.0"], ["blocks.1", "norm"]),
    ),
    ("timm:mobilenetv3_small_050", {}, 6, ["conv_stem", "bn1", "blocks.0"], ["blocks.1"]),
    ("torchvision:resnet18", {}, 4, ["conv1", "bn1", "layer1"], ["layer2", "layer4"]),
    ("torchvision:mobilenet_v3_small", {}, 12, ["features.0", "features.1"], ["features.2"]),
    (
        *("torchvision:densenet121", {}, 4),
        *(["features.conv0", "features.denseblock1", "features.transition1"],),
        *(["features.denseblock2", "features.norm5"],),
    ),
    (
        *("open_clip:ViT-B-32", TINY_VIT, 2),
        *(["visual.conv1", "visual.class_embedding", "visual.positional_embedding"],),
        *(["visual.transformer.resblocks.1", "visual.ln_post", "visual.proj"],),
    ),
    (
        *("open_clip:RN50", TINY_RESNET, 4),
        *(["visual.conv3", "visual.bn3", "visual.layer1"], ["visual.layer2", "visual.attnpool"]),
    ),
    (
        *("open_clip:convnext_tiny", {"timm_model_name": "resnet10t", "embed_dim": 24}, 4),
        *(["visual.trunk.conv1", "visual.trunk.layer1"], ["visual.trunk.layer2", "visual.head"]),
    ),
]


def made(name: str, options: dict[str, Any], frozen: int | str = 0) -> ImageTower:
    torch.manual_seed(0)
    return ImageTower(name, img_size=64 if ":" in name else 32, freeze=frozen, options=options)


def values(tower: nn.Module, name: str) -> list[nn.Parameter]:
    names = dict(tower.named_parameters())
    return [names[name]] if name in names else list(tower.get_submodule(name).parameters())


def step(tower: ImageTower) -> None:
    """One update of everything that learns, in training mode."""
    tower.train()
    x = torch.randn(4, tower.in_chans, *tower.preprocessing.size)
    tokens, pooled, _ = tower(x)
    (tokens.square().mean() + pooled.square().mean()).backward()
    learned = [p for p in tower.parameters() if p.requires_grad]
    torch.optim.SGD(learned, 0.1).step()


@pytest.mark.parametrize(
    ("name", "options", "depth", "frozen", "trained"), TOWERS, ids=[t[0] for t in TOWERS]
)
def test_the_first_block_and_all_before_it_stay(
    name: str, options: Any, depth: int, frozen: list[str], trained: list[str]
) -> None:
    tower = made(name, options, 1)
    assert len(parts(tower).blocks) == depth
    keys = set(made(name, options).state_dict())
    assert set(tower.state_dict()) == keys
    before = {key: value.clone() for key, value in tower.trunk.state_dict().items()}
    step(tower)
    after = tower.trunk.state_dict()
    for part in frozen:
        inside = [k for k in after if k == part or k.startswith(f"{part}.")]
        assert inside
        assert all(torch.equal(before[key], after[key]) for key in inside), part
        assert not any(p.requires_grad for p in values(tower.trunk, part))
    for part in trained:
        assert all(p.requires_grad for p in values(tower.trunk, part)), part
    moved = [key for key in after if not torch.equal(before[key], after[key])]
    assert any(key.startswith(part) for part in trained for key in moved)


@pytest.mark.parametrize("name", ["resnet_micro", "timm:resnet10t", "torchvision:resnet18"])
def test_statistics_of_frozen_stages_do_not_move(name: str) -> None:
    tower = made(name, {}, 2)
    tower.train()
    modes = {n: m.training for n, m in tower.named_modules() if isinstance(m, nn.BatchNorm2d)}
    still = {n for n, training in modes.items() if not training}
    assert still == {n for n in modes if n.split(".")[1] in ("conv1", "bn1", "layer1", "layer2")}
    assert tower.trunk.layer3.training
    tower.eval()
    assert not any(m.training for m in tower.modules())


def test_dropout_of_frozen_parts_is_off() -> None:
    options = {"proj_drop_rate": 0.5, "drop_path_rate": 0.5, "drop_rate": 0.5}
    tower = made("vit_micro_patch4_32", options, 2).train()
    names = {n: m.training for n, m in tower.named_modules() if isinstance(m, nn.Dropout)}
    assert not any(t for n, t in names.items() if "blocks.0" in n or "blocks.1" in n)
    assert all(t for n, t in names.items() if "blocks.2" in n or "head_drop" in n)
    x = torch.randn(2, 3, 32, 32)
    features = tower.trunk.forward_intermediates(x, [1], intermediates_only=True)[0]
    again = tower.trunk.forward_intermediates(x, [1], intermediates_only=True)[0]
    assert torch.equal(features, again)


def test_dropout_beside_frozen_parameters_goes_with_what_comes_before_it() -> None:
    text = text_tower("text_micro", tokenizer="bytes", embed_drop_rate=0.5)
    freeze(text, 1)
    assert not text.train().embed_drop.training  # type: ignore[union-attr]


def test_a_block_of_a_plain_row_of_layers_starts_at_a_convolution() -> None:
    with torch.device("meta"):
        vgg = get_model("vgg11_bn")
    assert len(parts(vgg).blocks) == 8
    freeze(vgg, 2)
    frozen = {name.rpartition(".")[0] for name, p in vgg.named_parameters() if not p.requires_grad}
    assert frozen == {"features.0", "features.1", "features.4", "features.5"}
    training = [layer.training for layer in vgg.train().features]
    assert training == [False] * 8 + [True] * (len(training) - 8)
    assert vgg.classifier[2].training  # dropout of the head


@pytest.mark.parametrize("name", [t[0] for t in TOWERS if "torchvision" not in t[0]])
def test_a_tower_that_is_frozen_whole_stays_as_it_is(name: str) -> None:
    options: Any = next(t[1] for t in TOWERS if t[0] == name)
    tower = made(name, options, "all")
    assert not any(p.requires_grad for p in tower.parameters())
    assert not any(m.training for m in tower.train().modules())
    x = torch.randn(2, 3, *tower.preprocessing.size)
    assert torch.equal(tower(x).pooled, tower(x).pooled)
    assert not tower(x).tokens.requires_grad


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_frozen_by_themselves(copied: Any) -> None:
    tower = made("resnet_micro", {}, 1)
    other = copied(tower)
    other.train()
    assert not other.trunk.layer1.training
    assert other.trunk.layer2.training
    assert not any(p.requires_grad for p in other.trunk.layer1.parameters())
    other.trunk.layer1.train(True)
    nn.Module.train(tower.trunk.layer1, True)  # the original only
    other.trunk.layer1.train(True)
    assert tower.trunk.layer1.training
    assert not other.trunk.layer1.training
    other.load_state_dict(tower.state_dict(), strict=True)


@pytest.mark.parametrize(
    ("name", "options", "frozen", "trained"),
    [
        (
            *("text_micro", {"tokenizer": "bytes"}),
            *(["token_embed", "pos_embed", "blocks.0"], ["blocks.1", "norm"]),
        ),
        (
            *("open_clip:ViT-B-32", TINY_TEXT),
            *(
                [
                    "text.token_embedding",
                    "text.positional_embedding",
                    "text.transformer.resblocks.0",
                ],
            ),
            *(["text.transformer.resblocks.1", "text.ln_final", "text.text_projection"],),
        ),
    ],
)
def test_text_towers(name: str, options: Any, frozen: list[str], trained: list[str]) -> None:
    tower = text_tower(name, **options)
    freeze(tower, 1)
    assert not any(p.requires_grad for part in frozen for p in values(tower, part))
    assert all(p.requires_grad for part in trained for p in values(tower, part))
    freeze(tower, 2)
    assert all(p.requires_grad for part in trained[1:] for p in values(tower, part))
    assert not any(p.requires_grad for p in values(tower, trained[0]))
    freeze(tower, "all")
    assert not any(p.requires_grad for p in tower.parameters())


def test_zero_freezes_nothing() -> None:
    tower = made("resnet_micro", {}, 0)
    assert all(p.requires_grad for p in tower.parameters())
    assert all(m.training for m in tower.train().modules())


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        (4, ValueError, r"blocks \(4\) must be at most 3, the depth of this tower, or 'all'"),
        (-1, ValueError, r"blocks \(-1\) must be at least 0"),
        ("most", TypeError, r"blocks \('most'\) must be an integer of at least 0, or 'all'"),
        (True, TypeError, r"blocks \(True\) must be an integer"),
    ],
)
def test_what_cannot_be_frozen_is_refused(blocks: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        made("resnet_micro", {}, blocks)


def test_a_network_whose_blocks_have_no_names_is_refused() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"Sequential: found no blocks.* freeze 0 or 'all' of it"):
        freeze(plain, 1)
    bag = text_tower("text_bag", tokenizer="bytes")
    with pytest.raises(ValueError, match=r"blocks \(1\) must be at most 0, the depth"):
        freeze(bag, 1)


# --- rules of fine-tuning --------------------------------------------------------------------

HOSTS: list[tuple[str, dict[str, Any]]] = [
    ("vit_micro_patch4_32", {"drop_path_rate": 0.3, "proj_drop_rate": 0.3}),
    ("resnet_micro", {"drop_path_rate": 0.3}),
    ("timm:vit_tiny_patch16_224", {"depth": 2, "img_size": 32, "proj_drop_rate": 0.3}),
    ("timm:mobilenetv3_small_050", {"img_size": 32}),
    ("timm:convnext_atto", {"img_size": 64}),
    ("torchvision:resnet18", {"img_size": 32}),
    ("open_clip:ViT-B-32", {**TINY_VIT, "img_size": 32}),
]
IDS = [name for name, _ in HOSTS]
NORMS = (nn.BatchNorm2d, nn.LayerNorm, nn.GroupNorm)


def classifier(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return zoo.create_model(name, num_classes=5, **options)


def head_of(model: Any) -> str:
    return next(name for name, module in model.named_modules() if module is model.get_classifier())


def learning(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


def moved(model: Any, weight_decay: float = 0.5) -> set[str]:
    """Keys that change in two updates with weight decay, in training mode."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = zoo.engine.adamw(model, 0.1, weight_decay)
    for _ in range(2):
        model.eval()  # as an evaluation in between does
        model.train()
        images = torch.randn(3, 3, *model.card.preprocessing.size)
        nn.functional.cross_entropy(model(images), torch.tensor([0, 1, 2])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}


@pytest.mark.parametrize(("name", "options"), HOSTS, ids=IDS)
def test_a_linear_probe_moves_the_classifier_and_nothing_else(name: str, options: Any) -> None:
    model = classifier(name, **options)
    freeze_by_rule(model, "backbone")
    head = head_of(model)
    expected = {f"{head}.weight", f"{head}.bias"}
    assert learning(model) == expected
    assert moved(model) == expected
    assert model.training
    assert model.get_classifier().training
    x = torch.randn(2, 3, *model.card.preprocessing.size)
    assert torch.equal(model(x), model(x)), "no dropout, no statistics of the batch"
    kept: list[torch.Tensor] = []
    model.get_classifier().register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    model(x)
    assert not kept[0].requires_grad, "no graph is kept for what is frozen"
    assert model(x).requires_grad


@pytest.mark.parametrize(("name", "options"), HOSTS, ids=IDS)
def test_but_norms_moves_norms_their_statistics_and_the_classifier(name: str, options: Any) -> None:
    model = classifier(name, **options)
    norms = {n for n, m in model.named_modules() if isinstance(m, NORMS)}
    freeze_by_rule(model, "but-norms")
    allowed = norms | {head_of(model)}
    assert {key.rpartition(".")[0] for key in learning(model)} == allowed
    changed = {key.rpartition(".")[0] for key in moved(model)}
    assert changed <= allowed
    assert {n for n in norms if isinstance(model.get_submodule(n), nn.BatchNorm2d)} <= changed
    other = {n for n, m in model.named_modules() if isinstance(m, nn.Dropout) and m.training}
    assert not other


@pytest.mark.parametrize(("name", "options"), HOSTS, ids=IDS)
def test_but_biases_moves_biases_and_the_classifier(name: str, options: Any) -> None:
    """BitFit: the statistics of norms stay."""
    model = classifier(name, **options)
    freeze_by_rule(model, "but-biases")
    head = head_of(model)
    own = {key for key in learning(model) if not key.startswith(f"{head}.")}
    assert own
    assert all(key.endswith("bias") for key in own)
    changed = {key for key in moved(model) if not key.startswith(f"{head}.")}
    assert changed <= own
    assert len(changed) > len(own) / 2
    modes = {n for n, m in model.named_modules() if m.training} - {"", head}
    assert not modes


@pytest.mark.parametrize(("name", "options"), HOSTS, ids=IDS)
def test_stages_freezes_what_freeze_does(name: str, options: Any) -> None:
    model, other = classifier(name, **options), classifier(name, **options)
    freeze_by_rule(model, "stages=2")
    freeze(other, 2)
    assert learning(model) == learning(other)
    assert {n for n, m in model.train().named_modules() if m.training} == {
        n for n, m in other.train().named_modules() if m.training
    }
    assert moved(model) <= set(learning(model)) | {
        key for key in model.state_dict() if "running" in key or "tracked" in key
    }


@pytest.mark.parametrize("rule", ["backbone", "stages=3", "but-norms", "but-biases"])
@pytest.mark.parametrize("name", ["resnet_micro", "timm:mobilenetv3_small_050"])
def test_what_is_inserted_trains_in_a_frozen_host(name: str, rule: str) -> None:
    """Its batch norms count and its gates learn; the block around it stays."""
    plain = classifier(name, img_size=32)
    freeze_by_rule(plain, rule)
    model = classifier(name, img_size=32)
    added = vision.insert(model, "cbam@standard:stages=2", "eca@post:stages=2,init=identity")
    freeze_by_rule(model, rule, keep=added)
    inside = {key for key in model.state_dict() if any(key.startswith(f"{n}.") for n in added)}
    parameters = {key for key, _ in model.named_parameters()}
    assert learning(model) == learning(plain) | (inside & parameters)
    model.train()
    for slot in added:
        assert all(m.training for m in model.get_submodule(slot).modules())
    changed = moved(model)
    assert any("running_mean" in key for key in inside & changed)
    blocks = {key for key in changed - inside if key.startswith(("layer2", "blocks.1"))}
    if rule in ("backbone", "stages=3"):
        assert not blocks


def test_dropout_of_a_head_module_stays_on_above_frozen_stages() -> None:
    model = timm.create_model("regnetx_002", num_classes=5, drop_rate=0.5)
    freeze_by_rule(model, "stages=4")
    model.train()
    assert model.head.drop.training
    assert not model.final_conv.training
    assert learning(model) == {"head.fc.weight", "head.fc.bias"}


@pytest.mark.parametrize("name", ["resnet_micro", "vit_micro_patch4_32", "timm:resnet10t"])
@pytest.mark.parametrize("rule", ["stages=1", "stages=2", "backbone", "but-norms", "but-biases"])
def test_gradient_checkpointing_with_frozen_parts_gives_the_same_gradients(
    name: str, rule: str
) -> None:
    grads = []
    for checkpointing in (False, True):
        model = classifier(name, img_size=32)
        freeze_by_rule(model, rule)
        model.train().set_grad_checkpointing(checkpointing)
        x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        model(x).square().mean().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        assert grads[-1].keys() == learning(model)
    for key, value in grads[0].items():
        torch.testing.assert_close(grads[1][key], value, msg=key)


def test_a_copy_is_frozen_by_the_same_rule() -> None:
    model = classifier("resnet_micro")
    added = vision.insert(model, "se@standard:stages=1")
    freeze_by_rule(model, "but-norms", keep=added)
    other = copy.deepcopy(model)
    model.train(False)
    other.train()
    modes = {n for n, m in other.named_modules() if m.training}
    assert modes == {n for n, m in model.train().named_modules() if m.training}
    assert "layer1.0.bn1" in modes
    assert not {"layer1", "layer1.0", "layer1.0.conv1", "head_drop"} & modes


def test_both_classifiers_of_a_distilled_model_train() -> None:
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3)
    freeze_by_rule(model, "backbone")
    assert learning(model) == {
        f"{n}.{k}" for n in ("head", "head_dist") for k in ("weight", "bias")
    }
    assert len(classifier_parameters(model)) == 4


def test_none_freezes_nothing_and_asks_for_nothing() -> None:
    plain = nn.Linear(2, 2)
    freeze_by_rule(plain, "none")
    assert plain.weight.requires_grad


@pytest.mark.parametrize(
    "rule", ["", "stages", "stages=N", "stages=0", "stages=-1", "norms", "all"]
)
def test_an_unknown_rule_is_refused_with_the_known_ones(rule: str) -> None:
    with pytest.raises(ValueError, match=f"freeze '{rule}' must be one of {', '.join(RULES)}"):
        check_rule(rule)


def test_rules_that_a_model_cannot_follow_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'stages=4' must be at most stages=3, the depth of Res"):
        freeze_by_rule(classifier("resnet_micro"), "stages=4")
    with pytest.raises(ValueError, match=r"Linear has no get_classifier"):
        freeze_by_rule(nn.Linear(2, 2), "backbone")
    plain = timm.create_model("vgg11", num_classes=3)
    with pytest.raises(ValueError, match=r"'but-norms': VGG has no norms before its classifier"):
        freeze_by_rule(plain, "but-norms")
