"""Numbers on pairs: against the weights themselves, without padding, by modality."""

from __future__ import annotations

import pytest
import torch

import crossmodal  # noqa: F401  its models are registered
import zoo
from crossmodal.data import load_pairs
from crossmodal.look_numbers import look_at_pairs, watched_layers
from crossmodal.looks import AttentionSaver, TowerWatch
from zoo.diagnostics.measures import entropy

SIZE = (16, 24)
TOWER = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "class_token": True}
IMAGE = {"image_tower": "vit_micro_patch4_32", "image_options": TOWER, "img_size": SIZE}
TEXT = {"text_tower": "text_bag", "text_options": {"embed_dim": 16}}
CAPTIONS = ["a red heart", "two birds, one extraordinarily unbelievable hat"]
PATCHES = 7  # 2 x 3 and the class token


def matcher(**options):
    torch.manual_seed(0)
    given = {**IMAGE, **TEXT, "embed_dim": 8, "fusion_heads": 2, "gated": False, **options}
    return zoo.create_model("matcher_micro", **given).eval()


def writer(decoder="transformer"):
    torch.manual_seed(0)
    given = {**IMAGE, "decoder": decoder, "dim": 16, "num_heads": 2, "context_length": 64}
    return zoo.create_model("captioner_micro", **given).eval()


def inputs(model, captions=CAPTIONS, **more):
    torch.manual_seed(1)
    tokens, mask = model.make_tokenizer()(captions, **more)
    return torch.randn(len(captions), 3, *SIZE), tokens, mask


def weights_of(model, layer, images, tokens, mask):
    with torch.no_grad(), zoo.capture_attention(model, layer) as records:
        model.match(model.image_tower(images), model.text_tower(tokens, mask))
    return records[layer][0]


def test_layers_between_the_modalities_and_of_the_image_tower():
    both = watched_layers(matcher(fusion_depth=1, fusion_direction="both"))
    assert both[-2:] == ["fusion.blocks_text.0.attn", "fusion.blocks_image.0.attn"]
    assert all(name.startswith("image_tower.") for name in both[:-2])
    assert len(both) == 3
    assert any(name.startswith("decoder.blocks.0.cross") for name in watched_layers(writer()))


def test_numbers_leave_padding_out():
    """The two captions differ in length: by hand, over the tokens that each has."""
    model = matcher(fusion_depth=1)
    images, tokens, mask = inputs(model)
    assert not mask.all()
    layer = "fusion.blocks_text.0.attn"
    look = look_at_pairs(model, images, tokens, mask).layers[layer]
    weights = weights_of(model, layer, images, tokens, mask)
    rows = entropy(weights).transpose(1, 2)[mask] / torch.log(torch.tensor(float(PATCHES)))
    torch.testing.assert_close(look.entropy, rows.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: matcher(fusion_layout="merged", fusion_direction="both"),
        lambda: matcher(fusion_direction="both"),
        writer,
        lambda: writer("lstm_additive"),
    ],
)
def test_more_padding_changes_no_number(make):
    model = make()
    images, tokens, mask = inputs(model)
    wide = inputs(model, length=tokens.shape[1] + 6)[1:]
    one = look_at_pairs(model, images, tokens, mask).numbers()
    two = look_at_pairs(model, images, *wide).numbers()
    assert two == pytest.approx(one, rel=1e-4)
    assert one


@pytest.mark.parametrize("direction", ["text", "image"])
def test_shares_by_modality_are_the_weights(direction):
    model = matcher(fusion_layout="merged", fusion_direction="both", fusion_depth=1)
    images, tokens, mask = inputs(model)
    layer, n = f"fusion.blocks_{direction}.0.attn", tokens.shape[1]
    found = look_at_pairs(model, images, tokens, mask)
    weights = weights_of(model, layer, images, tokens, mask).mean(1)
    on_text = weights[..., :n] if direction == "text" else weights[..., PATCHES:]
    share = on_text.sum(-1)
    wanted = float((share[mask] if direction == "text" else share).mean())
    assert found.shares[layer]["text"] == pytest.approx(wanted, rel=1e-5)
    assert found.shares[layer]["image"] == pytest.approx(1 - wanted, rel=1e-5)
    assert 0.05 < wanted < 0.95
    assert found.numbers()[f"attn/{layer}/text_share"] == found.shares[layer]["text"]


def test_only_layers_that_see_both_have_shares():
    model = matcher(fusion_direction="both")
    assert look_at_pairs(model, *inputs(model)).shares == {}


def test_a_saver_tells_numbers_and_reports_them_again_when_resumed(tmp_path):
    class Heard:
        def __init__(self):
            self.training, self.told, self.before = {"loss": 2.0}, [], []

        def resume(self, step, before):
            self.before = list(before)

        def __call__(self, step, **seen):
            self.told.append((step, seen))

    pairs = load_pairs("needle:4").val
    small = {**IMAGE, "img_size": (8, 32), "in_chans": 1}
    model = matcher(**small, fusion_layout="merged")
    heard = Heard()
    saver = AttentionSaver(model, pairs, tmp_path, 2, samples=2, report=heard)
    assert saver(model, 1) == {}
    numbers = saver(model, 2)
    ((step, seen),) = heard.told
    assert (step, set(seen)) == (2, {"layers", "shares"})
    assert set(numbers) >= {f"attn/{layer}/entropy" for layer in seen["layers"]}
    again = Heard()
    AttentionSaver(model, pairs, tmp_path, 2, samples=2, report=again, step=3)(model, 3)
    ((earlier, kept),) = again.before
    assert (earlier, kept["shares"], kept["training"]) == (2, seen["shares"], heard.training)
    for layer, look in seen["layers"].items():
        assert kept["layers"][layer].numbers() == pytest.approx(look.numbers())


def test_the_tower_of_a_dual_encoder_is_watched(tmp_path):
    pairs = load_pairs("needle:4").val
    torch.manual_seed(0)
    small = {**IMAGE, "img_size": (8, 32), "in_chans": 1}
    model = zoo.create_model("dual_micro", **small, **TEXT, embed_dim=8)
    watch = TowerWatch(model, pairs, tmp_path, 2, samples=2)
    assert watch(model, 1) == {}
    assert any(name.endswith("/entropy") for name in watch(model, 2))
    watch.finish()
    assert {p.name for p in tmp_path.glob("*.png")} == {"step000002.png", "over_time.png"}
    plain = zoo.create_model("dual_micro", **TEXT, in_chans=1)
    with pytest.raises(ValueError, match="needs attention or gates that can be seen"):
        TowerWatch(plain, pairs, tmp_path, 2)
