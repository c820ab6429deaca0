from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import zoo
from crossmodal.dual import DualEncoder, DualOutput
from crossmodal.loss import contrastive_loss
from zoo.engine.optim import adamw, parameter_groups
from zoo.weights import WeightsError

BYTES = {"tokenizer": "bytes", "context_length": 12}
TEXT = {"embed_dim": 16, "depth": 1, "num_heads": 2}
VIT = {"embed_dim": 24, "depth": 2, "num_heads": 2}


def small(**options) -> DualEncoder:
    """A text tower of 16, read as bytes, and whatever else is asked for."""
    options = {**BYTES, "text_options": TEXT, "img_size": 16, "embed_dim": 8, **options}
    return zoo.create_model("dual_micro", **options)


def small_vit(**options) -> DualEncoder:
    return small(image_tower="vit_micro_patch4_32", image_options=VIT, **options)


def batch(model: DualEncoder, texts=("cat", "a red fox", "", "sun"), seed: int = 0):
    draw = torch.Generator().manual_seed(seed)
    size = model.card.preprocessing.size
    images = torch.randn(len(texts), model.card.preprocessing.in_chans, *size, generator=draw)
    return images, *model.make_tokenizer()(list(texts))


@pytest.mark.parametrize("build", [small, small_vit])
def test_both_sides_are_unit_vectors_of_one_space(build):
    model = build().eval()
    images, tokens, mask = batch(model)
    output = model(images, tokens, mask)
    assert isinstance(output, DualOutput)
    assert output.image.shape == output.text.shape == (4, 8)
    for vectors in (output.image, output.text):
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    assert torch.equal(output.image, model.encode_image(images))
    assert torch.equal(output.text, model.encode_text(tokens, mask))
    raw = model.encode_image(images, normalize=False)
    torch.testing.assert_close(raw / raw.norm(dim=1, keepdim=True), output.image)
    raw = model.encode_text(tokens, mask, normalize=False)
    torch.testing.assert_close(raw, model.text_proj(model.text_tower(tokens, mask).pooled))
    assert output.scale.item() == pytest.approx(1 / 0.07)
    assert output.bias is None


def test_padding_changes_no_embedding():
    model = small().eval()
    tokenizer = model.make_tokenizer()
    short = model.encode_text(*tokenizer(["cat"]))
    tokens, mask = tokenizer(["cat", "a red fox"])
    torch.testing.assert_close(model.encode_text(tokens, mask)[:1], short, rtol=0, atol=1e-6)
    other = torch.where(mask, tokens, 7)
    assert torch.equal(model.encode_text(other, mask), model.encode_text(tokens, mask))


def test_sigmoid_starts_as_in_its_paper_and_has_a_bias():
    model = small(loss="sigmoid").eval()
    output = model(*batch(model))
    assert output.scale.item() == pytest.approx(10)
    assert output.bias.item() == -10
    loss = contrastive_loss(*output, kind=model.loss)
    loss.backward()
    assert model.logit_bias.grad.abs() > 0
    assert model.logit_scale.grad.abs() > 0


def test_it_is_clip_in_size():
    from open_clip.factory import get_model_config
    from open_clip.model import CLIP

    with torch.device("meta"):
        ours = zoo.create_model("dual_base")
        theirs = CLIP(**get_model_config("ViT-B-32"))
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1] == 151_277_313
    assert ours.embed_dim == 512


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": "sigmoid", "init_temperature": 0.5, "max_scale": 20.0},
        {"freeze_image": "all", "freeze_text": 1},
        {"freeze_image": 1, "freeze_text": "all", "in_chans": 1, "img_size": (16, 24)},
    ],
)
@pytest.mark.parametrize("build", [small, small_vit])
def test_a_saved_model_is_the_same_again(tmp_path, build, options):
    model = build(**options).eval()
    with torch.no_grad():
        model.logit_scale += 0.3
    zoo.save_pretrained(model, tmp_path / "model")
    again = zoo.create_model(f"local-dir:{tmp_path / 'model'}").eval()
    assert again.card.options == model.card.options
    assert again.card.preprocessing == model.card.preprocessing
    with torch.no_grad():
        pairs = zip(model(*batch(model)), again(*batch(model)), strict=True)
    assert all(a is b is None or torch.equal(a, b) for a, b in pairs)
    learns = [{n for n, p in m.named_parameters() if p.requires_grad} for m in (model, again)]
    assert learns[0] == learns[1]


def test_frozen_towers_do_not_learn_and_the_rest_does():
    model = small(freeze_image="all", freeze_text="all").train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = adamw(model, lr=0.1)
    contrastive_loss(*model(*batch(model))).backward()
    optimizer.step()
    changed = {k for k, v in model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == {"image_proj.weight", "text_proj.weight", "logit_scale"}


@pytest.mark.parametrize(("sign", "bound"), [(1, 100.0), (-1, 1.0)])
def test_scale_stays_within_its_bounds(tmp_path, sign, bound):
    """Case G4, with a resumed run in the middle."""
    model = small()
    optimizer = adamw(model, lr=0.5)

    def train(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            (-sign * model.logit_scale).backward()
            optimizer.step()
            model.clamp_scale_()
            scale = model.logit_scale.exp().item()
            assert 1 - 1e-6 <= scale <= 100 * (1 + 1e-6)

    train(60)
    assert model.logit_scale.exp().item() == pytest.approx(bound)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    state = torch.load(tmp_path / "c")
    model = small()
    optimizer = adamw(model, lr=0.5)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(40)
    assert model.logit_scale.exp().item() == pytest.approx(bound)


def test_checkpointing_changes_no_gradient():
    def gradients(checkpointing: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = small_vit()
        model.set_grad_checkpointing(checkpointing)
        flags = {m.grad_checkpointing for m in model.modules() if hasattr(m, "grad_checkpointing")}
        assert flags == {checkpointing}
        contrastive_loss(*model(*batch(model))).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain, again = gradients(False), gradients(True)
    assert plain.keys() == again.keys()
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], msg=name)


def test_positions_and_scale_do_not_decay():
    model = small_vit()
    assert "text_tower.pos_embed" in model.no_weight_decay()
    assert "image_tower.trunk.pos_embed" in model.no_weight_decay()
    kept = {
        id(p) for g in parameter_groups(model, 0.1) if not g["weight_decay"] for p in g["params"]
    }
    free = (model.logit_scale, model.text_tower.pos_embed, model.image_tower.trunk.pos_embed)
    assert all(id(p) in kept for p in free)
    assert id(model.image_proj.weight) not in kept


def test_weights_are_adapted_to_another_size_and_channels(tmp_path):
    zoo.save_pretrained(small_vit(), tmp_path / "model")
    model = zoo.create_model(f"local-dir:{tmp_path / 'model'}", img_size=32, in_chans=1)
    assert model.card.preprocessing.size == (32, 32)
    report = zoo.load_pretrained(model, f"local-dir:{tmp_path / 'model'}")
    assert report.resized == {"image_tower.trunk.pos_embed": "grid 4x4 -> 8x8"}
    assert report.adapted == {"image_tower.trunk.patch_embed.proj.weight": "3 input channels -> 1"}
    assert model(*batch(model)).image.shape == (4, 8)


def test_a_vocabulary_that_does_not_fit_is_named_with_both_sizes(tmp_path):
    from safetensors.torch import save_file

    model = small()
    zoo.save_pretrained(model, tmp_path / "model")
    save_file(model.state_dict(), tmp_path / "bare.safetensors")
    ours, theirs = 49408, model.text_tower.vocab_size
    wanted = rf"token_embed.weight: \({theirs}, 16\) in the source, \({ours}, 16\) in the model"
    with pytest.raises(WeightsError, match=wanted):
        zoo.create_model(f"local-dir:{tmp_path / 'model'}", tokenizer="clip")
    other = small(tokenizer="clip")
    with pytest.raises(WeightsError, match=wanted):
        zoo.load_pretrained(other, f"file:{tmp_path / 'bare.safetensors'}")
    with pytest.raises(WeightsError, match="tokenizer: 'bytes' there, 'clip' here"):
        zoo.load_pretrained(other, f"local-dir:{tmp_path / 'model'}")


def test_preprocessing_is_the_image_towers():
    model = small(in_chans=1, img_size=(16, 24))
    assert model.card.preprocessing.size == (16, 24)
    assert model.card.preprocessing.in_chans == 1
    host = small(image_tower="timm:resnet18", img_size=64)
    assert host.card.preprocessing.size == (64, 64)
    assert host.card.preprocessing.mean == (0.485, 0.456, 0.406), "not the zoo's default"


def test_embeddings_are_fp32_under_autocast():
    model = small().eval()
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*batch(model))
    assert {x.dtype for x in (output.image, output.text, output.scale)} == {torch.float32}
    torch.testing.assert_close(output.image.norm(dim=1), torch.ones(4))


def test_it_learns_pairs():
    torch.manual_seed(0)
    model = small_vit(init_temperature=0.2)
    pairs = batch(model, ("cat", "dog", "sun", "sea", "owl", "bee"))
    optimizer = adamw(model, lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        contrastive_loss(*model(*pairs)).backward()
        optimizer.step()
        model.clamp_scale_()
    image, text, *_ = model.eval()(*pairs)
    assert torch.equal((image @ text.T).argmax(1), torch.arange(6))


def test_wrong_options_are_named():
    with pytest.raises(TypeError, match="dual_micro has no option 'num_classes'"):
        zoo.create_model("dual_micro", num_classes=10)
    with pytest.raises(ValueError, match="loss 'triplet' must be one of 'infonce', 'sigmoid'"):
        small(loss="triplet")
    with pytest.raises(
        ValueError, match=r"init_temperature \(0.001\) must lie between .*0.01.* and 1"
    ):
        small(init_temperature=0.001)
    with pytest.raises(ValueError, match=r"embed_dim \(0\)"):
        small(embed_dim=0)
    with pytest.raises(TypeError, match="text_options has 'tokenizer', which the model sets"):
        small(text_options={"tokenizer": "clip"})
    assert isinstance(small().logit_scale, nn.Parameter)
    assert small().logit_scale.item() == pytest.approx(math.log(1 / 0.07))
