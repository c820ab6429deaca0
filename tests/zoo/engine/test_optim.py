from __future__ import annotations

import copy

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

import zoo
from zoo.engine.optim import EMA, adamw, parameter_groups, set_lr, warmup_cosine


class Tiny(nn.Module):
    num_layers = 3

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.ones(1, 4, 8))
        self.block = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 2)

    def no_weight_decay(self):
        return {"pos_embed"}

    def layer_index(self, name):
        return {"pos_embed": 0, "block": 1, "norm": 3, "head": 3}[name.split(".")[0]]


def describe(model, groups):
    names = {id(p): name for name, p in model.named_parameters()}
    return {
        names[id(p)]: (group["weight_decay"], group["lr_scale"])
        for group in groups
        for p in group["params"]
    }


def test_no_decay_on_norms_biases_and_positions():
    model = Tiny()
    model.head.bias.requires_grad_(False)
    found = describe(model, parameter_groups(model, 0.1))
    decayed = {name for name, (decay, _) in found.items() if decay}
    assert decayed == {"block.weight", "head.weight"}
    assert set(found) == {n for n, _ in model.named_parameters()} - {"head.bias"}


def test_layer_decay_scales_the_learning_rate():
    model = Tiny()
    found = describe(model, parameter_groups(model, 0.1, layer_decay=0.5))
    assert found["pos_embed"][1] == 0.125
    assert found["block.weight"][1] == 0.25
    assert found["head.weight"][1] == 1
    optimizer = adamw(model, 0.1, layer_decay=0.5)
    set_lr(optimizer.param_groups, 0.2)
    assert {round(g["lr"], 6) for g in optimizer.param_groups} == {0.025, 0.05, 0.2}


def test_layer_decay_needs_a_model_that_tells_its_layers():
    with pytest.raises(ValueError, match="layer_index"):
        parameter_groups(nn.Linear(2, 2), 0.1, layer_decay=0.5)
    with pytest.raises(ValueError, match="no trainable parameter"):
        parameter_groups(nn.ReLU(), 0.1)


HOSTS = ["vit_tiny_patch16_224", "tf_efficientnet_lite0", "convnext_atto", "xcit_nano_12_p16_224"]


@pytest.mark.parametrize("name", HOSTS)
def test_groups_of_timm_models_are_timms(name):
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=5)
    skip = model.no_weight_decay() if hasattr(model, "no_weight_decay") else ()
    theirs = param_groups_layer_decay(model, 0.05, skip, layer_decay=0.75)
    assert describe(model, parameter_groups(model, 0.05, layer_decay=0.75)) == describe(
        model, theirs
    )


def test_the_classifier_has_a_rate_of_its_own():
    model = zoo.create_model("vit_micro_patch4_32", num_classes=3)
    without = describe(model, parameter_groups(model, 0.1, layer_decay=0.5))
    found = describe(model, parameter_groups(model, 0.1, layer_decay=0.5, head_scale=7.0))
    assert found.pop("head.weight") == (0.1, 7.0)
    assert found.pop("head.bias") == (0.0, 7.0)
    assert found == {name: without[name] for name in found}
    optimizer = adamw(model, lr=0.1, layer_decay=0.5, head_lr=0.7)
    set_lr(optimizer.param_groups, 0.05)  # half way down the curve
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(model.head.bias)] == pytest.approx(0.35)
    assert rates[id(model.fc_norm.bias)] == pytest.approx(0.05)
    assert rates[id(model.patch_embed.proj.weight)] == pytest.approx(0.05 / 2**5)


def test_two_classifiers_of_a_distilled_model_share_that_rate():
    with torch.device("meta"):
        model = timm.create_model("deit_tiny_distilled_patch16_224", num_classes=3)
    found = describe(model, parameter_groups(model, 0.1, head_scale=2.0))
    fast = {name for name, (_, scale) in found.items() if scale == 2}
    assert fast == {"head.weight", "head.bias", "head_dist.weight", "head_dist.bias"}


def test_a_rate_of_the_head_needs_a_head_and_a_rate():
    with pytest.raises(ValueError, match=r"Linear has no get_classifier\(\)"):
        adamw(nn.Linear(2, 2), lr=0.1, head_lr=1.0)
    with pytest.raises(ValueError, match=r"head_lr \(1.0\) is a multiple of lr, which is 0"):
        adamw(Tiny(), lr=0.0, head_lr=1.0)


@pytest.mark.parametrize(
    ("total", "warmup"), [(100, 0), (100, 10), (10, 9), (10, 10), (1, 0), (2, 1)]
)
def test_warmup_cosine(total, warmup):
    curve = [warmup_cosine(t, total, warmup, floor=0.1) for t in range(total)]
    rising, falling = curve[: warmup + 1], curve[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert max(curve) <= 1
    if total - warmup > 1:
        assert curve[warmup] == 1
        assert curve[-1] == pytest.approx(0.1), "the minimum is reached at the last update"
        assert min(falling[:-1], default=1) > 0.1
    with pytest.raises(ValueError, match="update"):
        warmup_cosine(total, total)


def test_cosine_equals_torch():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    peer = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=49, eta_min=0.01)
    for update in range(50):
        assert warmup_cosine(update, 50, floor=0.01) == pytest.approx(
            optimizer.param_groups[0]["lr"]
        )
        optimizer.step()
        peer.step()


def bn_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def test_ema_averages_weights_and_running_statistics_with_warm_up():
    """Case E9: against a plain float64 loop."""
    model = bn_model(0)
    ema = EMA(model, decay=0.5)
    names = [n for n, v in model.state_dict().items() if v.is_floating_point()]
    expected = None
    for step in range(6):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        model.train()(torch.randn(4, 1, 2, 2) + step)
        ema.update_parameters(model)
        now = {n: model.state_dict()[n].double().clone() for n in names}
        decay = min(0.5, (1 + step) / (10 + step))
        expected = (
            now
            if expected is None
            else {n: decay * expected[n] + (1 - decay) * now[n] for n in names}
        )
    for name in names:
        torch.testing.assert_close(
            ema.module.state_dict()[name].double(), expected[name], rtol=1e-5, atol=1e-6
        )
    assert int(ema.module[1].num_batches_tracked) == int(model[1].num_batches_tracked) == 6


def test_ema_state_round_trip_continues():
    model, other = bn_model(0), bn_model(1)
    first, again = EMA(model, 0.9), EMA(other, 0.9)
    first.update_parameters(model)
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        model[0].weight.add_(1)
    first.update_parameters(model)
    again.update_parameters(model)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_ema_decay_is_checked():
    with pytest.raises(ValueError, match=r"ema decay \(1\)"):
        EMA(nn.Linear(1, 1), 1)
