"""Maps of words against the formula, words of all vocabularies, pictures, training unmoved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from einops import rearrange
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from PIL import Image

import crossmodal  # noqa: F401  its models are registered
import zoo
from crossmodal.captioner import caption_loss
from crossmodal.data import load_pairs
from crossmodal.fusion import modality_share
from crossmodal.generate import generate
from crossmodal.looks import (
    AttentionSaver,
    Look,
    fixed_pairs,
    look_at,
    over_time,
    spread,
)
from crossmodal.overlay import attention_layers, token_maps, word_maps, words_of
from crossmodal.overlay_figure import draw
from crossmodal.tokenizer import create_tokenizer
from vision.inspection.training_watch import MOST_STEPS
from zoo.diagnostics.plotting import blend

CAPTIONS = ["a red heart", "two birds, one extraordinarily unbelievable hat"]
SIZE = (16, 24)
GRID = (2, 3)
TOWER = {"patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "class_token": True}
IMAGE = {"image_tower": "vit_micro_patch4_32", "image_options": TOWER, "img_size": SIZE}
TEXT = {"text_tower": "text_bag", "text_options": {"embed_dim": 16}}


@pytest.fixture(scope="module")
def pairs():
    return load_pairs("needle:4").val


def matcher(**options):
    torch.manual_seed(0)
    given = {**IMAGE, **TEXT, "embed_dim": 8, "fusion_heads": 2, "gated": False, **options}
    return zoo.create_model("matcher_micro", **given).eval()


def writer(decoder="transformer", **options):
    torch.manual_seed(0)
    given = {**IMAGE, "decoder": decoder, "dim": 16, "num_heads": 2, "context_length": 64}
    return zoo.create_model("captioner_micro", **{**given, **options}).eval()


def inputs(model, captions=CAPTIONS):
    torch.manual_seed(1)
    tokens, mask = model.make_tokenizer()(captions)
    return torch.randn(len(captions), 3, *SIZE), tokens, mask


# --- maps ------------------------------------------------------------------------------------


def test_a_matchers_maps_are_the_formulas():
    model = matcher(fusion_depth=1).double()
    images, tokens, mask = inputs(model)
    images = images.double()
    with torch.no_grad():
        maps = token_maps(model, images, tokens, mask)
        fusion, block = model.fusion, model.fusion.blocks_text[0]
        text = fusion.norm_text(fusion.proj_text(model.text_tower(tokens, mask).tokens))
        image = fusion.norm_image(fusion.proj_image(model.image_tower(images).tokens))
        q = rearrange(block.attn.q(block.norm_q(text)), "b i (h e) -> b h i e", h=2)
        k = block.attn.kv(block.norm_kv(image)).chunk(2, dim=-1)[0]
        k = rearrange(k, "b j (h e) -> b h j e", h=2)
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1).mean(1)
    assert weights.shape[-1] == 7  # the class token is the first key
    wanted = weights[..., 1:].unflatten(-1, GRID) * mask[..., None, None]
    torch.testing.assert_close(maps.double(), wanted, rtol=1e-5, atol=1e-6)


def test_a_merged_map_sums_to_the_share_of_the_cells():
    model = matcher(fusion_layout="merged", fusion_depth=1)
    images, tokens, mask = inputs(model)
    maps = token_maps(model, images, tokens, mask)
    with zoo.capture_attention(model, attention_layers(model)) as records, torch.no_grad():
        model.match(model.image_tower(images), model.text_tower(tokens, mask))
    ((weights,),) = records.values()
    others = tokens.shape[1] + 1  # the text and the class token
    share = 1 - modality_share(weights, others).mean(1)
    assert share[mask].min() > 0.1
    assert share[mask].max() < 0.9
    torch.testing.assert_close(maps.sum((2, 3))[mask], share[mask])


@pytest.mark.parametrize("decoder", ["transformer", "lstm_additive"])
def test_a_captioners_map_stands_at_the_token_that_is_written(decoder):
    model = writer(decoder)
    images, tokens, mask = inputs(model)
    maps = token_maps(model, images, tokens, mask)
    assert maps.shape == (*tokens.shape, *GRID)
    assert not maps[:, 0].any()
    state = model.decoder.start(model.encode_image(images))
    for place in range(tokens.shape[1] - 1):
        with zoo.capture_attention(model.decoder, model.decoder.looks) as records:
            _, state = model.decoder.step(tokens[:, place], state)
        mean = sum(weights.mean(1)[:, 0] for (weights,) in records.values()) / len(records)
        kept, own = mask[:, place + 1], mean[:, -GRID[0] * GRID[1] :]
        torch.testing.assert_close(maps[kept, place + 1].flatten(1), own[kept])


@pytest.mark.parametrize("make", [matcher, writer])
def test_padding_and_mode_change_no_map(make):
    model = make()
    images, tokens, mask = inputs(model)
    wide, wide_mask = model.make_tokenizer()(CAPTIONS, length=tokens.shape[1] + 5)
    before = token_maps(model, images, tokens, mask)
    model.train()
    model.image_tower.eval()
    after = token_maps(model, images, wide, wide_mask)
    assert model.training
    assert not model.image_tower.training
    torch.testing.assert_close(after[:, : tokens.shape[1]], before)
    assert not after[:, tokens.shape[1] :].any()


def test_layers_and_heads_average_to_the_default():
    model = matcher(fusion_depth=2, fusion_options={"self_attention": True})
    batch = inputs(model)
    each = [
        token_maps(model, *batch, layer=layer, head=head) for layer in (0, 1) for head in (0, 1)
    ]
    assert not torch.allclose(each[0], each[1])
    torch.testing.assert_close(torch.stack(each).mean(0), token_maps(model, *batch))
    with pytest.raises(ValueError, match=r"head \(2\) must be less than 2, the number of heads"):
        token_maps(model, *batch, head=2)
    with pytest.raises(ValueError, match=r"layer \(5\) must be less than 2"):
        token_maps(model, *batch, layer=5)


def test_a_words_map_is_the_mean_of_its_tokens_maps():
    model = writer()  # of bytes
    batch = inputs(model, ["a red heart", "hat"])
    words, maps = word_maps(model, *batch)
    tokens = token_maps(model, *batch)
    assert words == [["a", "red", "heart"], ["hat"]]
    assert maps.shape == (2, 3, *GRID)
    torch.testing.assert_close(maps[0, 1], tokens[0, 3:6].mean(0))  # start, a, space, r e d
    torch.testing.assert_close(maps[1, 0], tokens[1, 1:4].mean(0))
    assert not maps[1, 1:].any()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: zoo.create_model("dual_micro", **TEXT), "DualEncoder has no attention between"),
        (lambda: writer("lstm_fixed"), "train with --decoder lstm_additive or transformer"),
        (lambda: matcher(fusion_direction="image_to_text"), "--fusion-direction text_to_image"),
        (lambda: matcher(fusion_attention="linformer"), "'linformer' mixes the cells"),
    ],
)
def test_models_whose_words_look_at_nothing_are_refused(model, message, pairs, tmp_path):
    with pytest.raises(ValueError, match=message):
        attention_layers(model())
    with pytest.raises(ValueError, match=message):  # before anything is trained
        AttentionSaver(model(), pairs, tmp_path, every=1)


# --- words -----------------------------------------------------------------------------------


def words(spec, text):
    tokenizer = create_tokenizer(spec)
    ids, mask = tokenizer([text], length=60)
    return words_of(tokenizer, ids[0, : mask.sum()])


def test_byte_pairs_join_to_words():
    found = words("clip", CAPTIONS[1])
    assert [word for word, _ in found] == CAPTIONS[1].replace(",", " ,").split()
    assert [places for _, places in found] == [[1], [2], [3], [4], [5, 6], [7], [8]]
    assert words("clip", "ハート 😀")[0] == ("ハート", [1, 2, 3, 4])
    assert words("clip", "") == []


def test_bytes_join_to_words_whatever_their_characters_take():
    text = "née  赤い 😀!"
    wanted, start = [], 1
    for word in text.split(" "):
        size = len(word.encode())
        wanted += [(word, list(range(start, start + size)))] if word else []
        start += size + 1
    assert words("bytes", text) == wanted


def test_word_pieces_join_where_the_vocabulary_tidies_its_text(tmp_path):
    transformers = pytest.importorskip("transformers")
    vocab = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "don", "'", "t", "wal", "##king", ",", "go"]
    (tmp_path / "vocab.txt").write_text("\n".join(vocab))
    made = transformers.BertTokenizer(str(tmp_path / "vocab.txt"))
    made.clean_up_tokenization_spaces = True
    made.save_pretrained(tmp_path)
    found = words(f"hf:{tmp_path}", "walking, don't go")
    assert found[0][1][:2] == [1, 2]
    assert sorted(place for _, places in found for place in places) == list(range(1, 8))
    assert found[-1] == ("go", [7])
    assert " ".join(word for word, _ in found).replace(" ", "") == "walking,don'tgo"


# --- looks and pictures ----------------------------------------------------------------------


def needle(make, **options):
    return make(img_size=(8, 32), in_chans=1, image_options={**TOWER, "patch_size": 4}, **options)


def test_a_look_tells_log_odds_and_comes_back_from_its_file(pairs, tmp_path):
    model = needle(matcher)
    batch = fixed_pairs(model, pairs, [3, 0])
    look = look_at(model, batch)
    assert look.captions == [pairs.captions[3][0], pairs.captions[0][0]]
    assert look.pixels.equal(torch.from_numpy(pairs.images.pixels[[3, 0]])[:, None])
    assert look.maps.shape == (2, 1, 2, 8)
    images = zoo.preprocess.normalize(look.pixels, model.card.preprocessing)
    with torch.no_grad():
        odds = model.match(
            model.image_tower(images), model.text_tower(batch["tokens"], batch["mask"])
        )
    assert look.remarks == [f"log-odds {value:+.1f}" for value in odds.tolist()]
    look.save(tmp_path / "look.safetensors")
    again = Look.load(tmp_path / "look.safetensors")
    assert again.maps.equal(look.maps)
    assert again.pixels.equal(look.pixels)
    texts = ("words", "captions", "remarks")
    assert all(getattr(again, name) == getattr(look, name) for name in texts)


def test_a_look_at_the_words_that_a_captioner_writes(pairs):
    model = needle(writer)
    batch = fixed_pairs(model, pairs, [0, 1])
    given, own = look_at(model, batch), look_at(model, batch, written=True)
    images = zoo.preprocess.normalize(batch["images"], model.card.preprocessing)
    texts = model.make_tokenizer().decode(*generate(model, images))
    assert given.remarks == own.remarks == [f"writes: {text}" for text in texts]
    assert given.words == [[pairs.captions[0][0]], [pairs.captions[1][0]]]
    assert own.words == [text.split() for text in texts]
    with pytest.raises(ValueError, match="written needs a model that writes, and Matcher"):
        look_at(needle(matcher), batch, written=True)


def test_fixed_pairs_take_other_captions_and_refuse_what_does_not_fit(pairs):
    model = needle(matcher, context_length=8)
    batch = fixed_pairs(model, pairs, [0, 1], ["red heart"])
    assert model.make_tokenizer().decode(batch["tokens"], batch["mask"]) == ["red heart"] * 2
    cases = [
        ([0, len(pairs)], [], rf"indices \(\[{len(pairs)}\]\) must be some from 0"),
        ([], [], r"indices \(none\)"),
        ([0, 1, 2], ["a", "b"], "captions must be 1 or 3, one for each image, not 2"),
        ([0], [" "], "has no words"),
        ([0], ["very " * 9 + "long"], "has 12 tokens, .* the model reads 8: shorten it"),
    ]
    for indices, captions, message in cases:
        with pytest.raises(ValueError, match=message):
            fixed_pairs(model, pairs, indices, captions)


def test_spread_covers_all_and_refuses_more_than_there_are():
    assert spread(3, 3) == [0, 1, 2]
    assert spread(2, 9) == [0, 4]
    with pytest.raises(ValueError, match=r"samples \(4\) must not exceed 3"):
        spread(4, 3)


@pytest.mark.parametrize("smooth", [False, True])
def test_colours_stand_where_the_weights_are(smooth):
    scale = ScalarMappable(Normalize(0, 1), "inferno")
    weights = torch.tensor([[1.0, 0, 0], [0, 0, 0]])
    image = torch.full((1, 20, 30), 255, dtype=torch.uint8)
    found = blend(image, weights, scale, smooth)
    assert found.shape == (120, 180, 3)
    full, none = (0.4 + 0.6 * np.array(scale.to_rgba(value)[:3]) for value in (1.0, 0.0))
    np.testing.assert_allclose(found[0, 0], full, atol=1e-6)
    np.testing.assert_allclose(found[-1, -1], none, atol=1e-6)
    border = np.abs(found[5, 55:65] - found[5, 54:64]).max()
    assert (border > 0.3) is not smooth


def test_pictures_give_long_captions_further_lines(tmp_path):
    words = [[f"w{i}" for i in range(9)], [], ["$x", "a" * 40]]
    look = Look(
        pixels=torch.zeros(3, 3, 8, 16, dtype=torch.uint8),
        words=words,
        maps=torch.rand(3, 9, 2, 4),
        captions=[" ".join(each) for each in words],
        remarks=["log-odds +1.0", "", "costs $5 and $6"],
    )
    draw(look, tmp_path / "many.png")
    draw(
        replace(look, pixels=look.pixels[1:2], words=[[]], maps=look.maps[1:2, :0]),
        tmp_path / "empty.png",
        one_scale=True,
    )
    many, empty = (Image.open(tmp_path / f"{name}.png").size for name in ("many", "empty"))
    assert many[1] == pytest.approx(4 * empty[1], abs=4)
    assert many[0] > 2 * empty[0]


# --- in training -----------------------------------------------------------------------------


def trained(saver, steps=4):
    """Weights and losses after a few updates with dropout, from torch's own random numbers."""
    model = needle(writer, drop_rate=0.2).train()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    after = saver(model)
    tokens, mask = model.make_tokenizer()(["one", "seven"])
    for step in range(1, steps + 1):
        loss = caption_loss(model(torch.randn(2, 1, 8, 32), tokens, mask), tokens, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after(model, step)
    return losses, model.state_dict()


def test_saving_changes_nothing_of_the_training(pairs, tmp_path):
    plain, weights = trained(lambda model: lambda model, step: None)
    savers = []

    def saver(model):
        savers.append(AttentionSaver(model, pairs, tmp_path / "attention", every=2, samples=2))
        return savers[0]

    losses, same = trained(saver)
    assert losses == plain
    assert len(set(losses)) == 4
    assert all(value.equal(same[name]) for name, value in weights.items())
    savers[0].finish()
    names = sorted(path.name for path in (tmp_path / "attention").iterdir())
    steps = [f"step{step:06d}.{kind}" for step in (2, 4) for kind in ("png", "safetensors")]
    assert names == ["over_time.png", *steps]


def test_the_first_pair_over_time(tmp_path):
    assert over_time(tmp_path) is None
    for step in range(1, 31):
        look = Look(
            pixels=torch.zeros(2, 1, 4, 4, dtype=torch.uint8),
            words=[["one"], ["more", "words"]],
            maps=torch.full((2, 2, 2, 2), float(step)),
            captions=["one", "more words"],
            remarks=[f"writes: {step}", ""],
        )
        look.save(tmp_path / f"step{100 * step:06d}.safetensors")
    look = over_time(tmp_path)
    steps = [int(caption.removeprefix("step ")) for caption in look.captions]
    assert steps == sorted(steps)
    assert len(steps) == MOST_STEPS
    assert steps[-1] == 3000
    assert look.maps.shape == (MOST_STEPS, 1, 2, 2)
    assert (look.maps[:, 0, 0, 0] * 100).tolist() == steps
    assert look.remarks == [f"writes: {step // 100}" for step in steps]


def test_only_the_main_process_writes_and_only_every_so_often(pairs, tmp_path):
    model = needle(matcher)
    other = AttentionSaver(model, pairs, tmp_path / "other", every=1, main=False)
    other(model, 1)
    other.finish()
    main = AttentionSaver(model, pairs, tmp_path / "main", every=5, samples=2)
    main(model, 4)
    main.finish()
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_there_are_numbers_and_one_warning(pairs, tmp_path, monkeypatch, capsys):
    def missing(file):
        raise ImportError(f"{file.name} needs matplotlib")

    monkeypatch.setattr("crossmodal.overlay_figure.figure_class", missing)
    model = needle(matcher)
    saver = AttentionSaver(model, pairs, tmp_path, every=1, samples=len(pairs) + 1)
    saver(model, 1)
    saver(model, 2)
    saver.finish()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step000001.safetensors", "step000002.safetensors"]
    assert capsys.readouterr().err.count("step000001.png needs matplotlib") == 1
    assert len(Look.load(tmp_path / names[0]).captions) == len(pairs)
