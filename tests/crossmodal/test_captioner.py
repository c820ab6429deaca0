"""The captioner as a model of the zoo, its loss and counts, and where it looks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zoo
from crossmodal.captioner import DECODERS, Captioner, caption_loss, token_counts
from crossmodal.generate import generate
from vision.resnet import ResNet
from zoo.surgery import evaluating

TEXTS = ["a dog", "cat", "red owls"]


def captioner(decoder: str = "transformer", **options: Any) -> Any:
    torch.manual_seed(0)
    small = {"tokenizer": "bytes", "context_length": 16, "dim": 32, "num_heads": 2}
    return zoo.create_model("captioner_micro", decoder=decoder, **{**small, **options})


def pairs() -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(3, 3, 32, 32, generator=rng), *captioner().make_tokenizer()(TEXTS)


def test_it_is_registered_with_its_towers_preprocessing() -> None:
    assert "captioner_micro" in zoo.list_models("captioner_*")
    model = captioner(img_size=24, in_chans=1)
    assert isinstance(model, Captioner)
    assert model.card.preprocessing == model.image_tower.preprocessing
    assert (model.card.preprocessing.size, model.card.preprocessing.in_chans) == ((24, 24), 1)


@pytest.mark.parametrize("tokenizer", ["bytes", "clip"])
def test_it_reads_and_writes_its_tokenizers_ids(tokenizer: str) -> None:
    model = captioner(tokenizer=tokenizer)
    made = model.make_tokenizer()
    assert (made.spec, made.context_length) == (tokenizer, 16)
    assert model.decoder.vocab_size == made.vocab_size
    special = (made.start_id, made.end_id, made.pad_id)
    assert (model.start_id, model.end_id, model.pad_id) == special
    assert captioner(tokenizer=tokenizer, context_length=None).context_length in (77, 128)


@pytest.mark.parametrize("decoder", DECODERS)
def test_logits_are_those_of_the_decoder_on_the_towers_tokens(decoder: str) -> None:
    model = captioner(decoder).eval()
    images, tokens, mask = pairs()
    out = model(images, tokens, mask)
    assert out.shape == (3, 9, 259)
    seen = model.encode_image(images)
    assert seen.tokens.shape == (3, 64, model.image_tower.num_features)
    torch.testing.assert_close(out, model.decoder(tokens[:, :-1], seen, mask[:, :-1]))


@pytest.mark.parametrize("decoder", DECODERS)
def test_save_and_open_again(decoder: str, tmp_path: Path) -> None:
    model = captioner(decoder, tie=False, position="sincos", image_options={"widths": [8, 8, 16]})
    zoo.save_pretrained(model, tmp_path / "model")
    stored = json.loads((tmp_path / "model" / "model.json").read_text())
    assert stored["options"]["decoder"] == decoder
    again: Any = zoo.create_model(f"local-dir:{tmp_path / 'model'}")
    images, tokens, mask = pairs()
    assert torch.equal(again.eval()(images, tokens, mask), model.eval()(images, tokens, mask))


def test_weights_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    zoo.save_pretrained(captioner(), tmp_path / "model")
    with pytest.raises(zoo.weights.WeightsError, match="tokenizer: 'bytes' there, 'clip' here"):
        zoo.load_pretrained(captioner(tokenizer="clip"), f"local-dir:{tmp_path / 'model'}")


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_parameter_learns(decoder: str) -> None:  # E12: parallel training waits for each
    model = captioner(decoder)
    images, tokens, mask = pairs()
    caption_loss(model(images, tokens, mask), tokens, mask).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_frozen_tower_stands_still(decoder: str) -> None:
    model = captioner(decoder, freeze_image="all")
    images, tokens, mask = pairs()
    before = {k: v.clone() for k, v in model.image_tower.state_dict().items()}
    caption_loss(model.train()(images, tokens, mask), tokens, mask).backward()
    assert all(p.grad is None for p in model.image_tower.parameters())
    assert all(p.grad is not None for p in model.decoder.parameters())
    after = model.image_tower.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("decoder", DECODERS)
def test_it_learns_captions_by_heart(decoder: str) -> None:
    model = captioner(
        decoder, image_tower="vit_micro_patch4_32", image_options={"depth": 1}, depth=1
    )
    images, tokens, mask = pairs()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(50):
        optimizer.zero_grad()
        caption_loss(model(images, tokens, mask), tokens, mask).backward()
        optimizer.step()
    right, total = token_counts(model.eval()(images, tokens, mask), tokens, mask)
    assert torch.equal(right, total)
    assert model.make_tokenizer().decode(*generate(model, images)) == TEXTS


def test_no_weight_decay_and_checkpointing_reach_the_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = captioner(image_tower="vit_micro_patch4_32")
    names = {"image_tower.trunk.pos_embed", "decoder.pos_embed"}
    assert model.no_weight_decay() == names
    model.set_grad_checkpointing()
    assert model.decoder.grad_checkpointing
    assert model.image_tower.trunk.grad_checkpointing
    monkeypatch.delattr(ResNet, "set_grad_checkpointing")
    model = captioner()
    model.set_grad_checkpointing()
    assert model.decoder.grad_checkpointing
    with pytest.raises(ValueError, match="resnet_micro has no gradient checkpointing"):
        captioner("lstm_fixed").set_grad_checkpointing()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_captions_of_their_means(smoothing: float) -> None:
    _, tokens, mask = pairs()
    logits = torch.randn(3, 9, 259, dtype=torch.float64)
    means = []
    for row in range(3):
        logp = logits[row].log_softmax(-1)
        steps = [
            (1 - smoothing) * logp[i, tokens[row, i + 1]] + smoothing * logp[i].mean()
            for i in range(int(mask[row].sum()) - 1)
        ]
        means.append(-sum(steps) / len(steps))
    expected = sum(means) / 3
    torch.testing.assert_close(caption_loss(logits, tokens, mask, smoothing), expected)
    changed = torch.where(mask, tokens, 999)  # ids of padding, in or out of the vocabulary
    torch.testing.assert_close(caption_loss(logits, changed, mask, smoothing), expected)
    parts = [caption_loss(logits[r], tokens[r], mask[r], smoothing) for r in ([0], [1, 2])]
    torch.testing.assert_close((parts[0] + 2 * parts[1]) / 3, expected)


def test_the_loss_of_no_token_is_zero() -> None:
    logits, tokens = torch.randn(2, 3, 5, requires_grad=True), torch.ones(2, 4, dtype=torch.long)
    mask = torch.tensor([[True, True, True, False], [False] * 4])
    loss = caption_loss(logits, tokens, mask)
    torch.testing.assert_close(loss, caption_loss(logits[:1], tokens[:1], mask[:1]) / 2)
    loss.backward()
    assert logits.grad is not None
    assert logits.grad[1].abs().sum() == logits.grad[0, 2].abs().sum() == 0


def test_token_counts_are_sums() -> None:
    _, tokens, mask = pairs()
    logits = torch.nn.functional.one_hot(tokens[:, 1:] % 259, 259).float()
    logits[0, 1] = logits[0, 1].roll(1)
    right, total = token_counts(logits, tokens, mask)
    assert total.tolist() == [len(text) + 1 for text in TEXTS]  # bytes, and the end
    assert right.tolist() == [total[0] - 1, total[1], total[2]]


def test_evaluating_puts_every_part_back() -> None:
    model = captioner().train()
    model.decoder.eval()
    before = [part.training for part in model.modules()]
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model.modules()] == before
    assert len(set(before)) == 2


@pytest.mark.parametrize("n", [1, 17])
def test_captions_of_a_length_it_cannot_read(n: int) -> None:
    tokens = torch.ones(3, n, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"context_length \(16\), got \(3, {n}\)"):
        captioner()(pairs()[0], tokens, tokens.bool())


def test_options_that_are_refused() -> None:
    with pytest.raises(ValueError, match="decoder 'gru' must be one of 'lstm_fixed'"):
        captioner("gru")
    with pytest.raises(TypeError, match="captioner_micro has no option 'widht'"):
        captioner(widht=3)
    with pytest.raises(ValueError, match=r"logits must be \(b, n - 1, vocab\)"):
        caption_loss(torch.randn(3, 16, 5), *pairs()[1:])
