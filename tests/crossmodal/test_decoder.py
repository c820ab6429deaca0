"""Decoders against formulas and torch's modules; teacher forcing against token by token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from crossmodal.captioner import DECODERS, create_decoder
from crossmodal.decoder import POSITIONS, DecoderBlock, TransformerDecoder
from crossmodal.encoded import Encoded
from crossmodal.recurrent import FirstState, LstmAdditive, LstmFixed
from zoo.layers import Mask, reorder

V, N, DIM, IMAGE, POOLED, CELLS = 13, 7, 16, 12, 10, 6


def decoder(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"dim": DIM, "depth": 2, "num_heads": 2, **options}
    return create_decoder(kind, V, N, IMAGE, POOLED, **options).double().eval()


def image(b: int = 3, seed: int = 1, mask: Tensor | None = None) -> Encoded:
    rng = torch.Generator().manual_seed(seed)
    tokens = torch.randn(b, CELLS, IMAGE, generator=rng, dtype=torch.float64)
    pooled = torch.randn(b, POOLED, generator=rng, dtype=torch.float64)
    return Encoded(tokens, pooled, mask)


def captions(b: int = 3, n: int = N) -> Tensor:
    return torch.randint(V, (b, n), generator=torch.Generator().manual_seed(2))


def one_by_one(model: Any, tokens: Tensor, seen: Encoded) -> Tensor:
    state, outs = model.start(seen), []
    for token in tokens.unbind(1):
        logits, state = model.step(token, state)
        outs.append(logits)
    return torch.stack(outs, 1)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("lstm_fixed", {}),
    ("lstm_fixed", {"depth": 1, "tie": False}),
    ("lstm_additive", {}),
    ("lstm_additive", {"depth": 1, "num_heads": 1, "tie": False}),
    *(("transformer", {"position": position}) for position in POSITIONS),
    ("transformer", {"tie": False, "mlp_ratio": 2.0}),
]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_token_by_token_gives_the_logits_of_all_at_once(kind: str, options: dict[str, Any]) -> None:
    model, tokens = decoder(kind, **options), captions()
    for mask in (None, torch.arange(CELLS) < torch.tensor([[6], [2], [4]])):
        seen = image(mask=mask)
        out = model(tokens, seen)
        assert out.shape == (3, N, V)
        torch.testing.assert_close(one_by_one(model, tokens, seen), out)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_samples_of_a_state_go_on_as_their_own(kind: str, options: dict[str, Any]) -> None:
    model, tokens, index = decoder(kind, **options), captions(), torch.tensor([2, 0, 2, 1, 1])
    state = model.start(image())
    for token in tokens[:, :4].unbind(1):
        _, state = model.step(token, state)
    before = model.step(tokens[:, 4], state)[0]
    after = model.step(tokens[index, 4], reorder(state, index))[0]
    torch.testing.assert_close(after, before[index])
    assert torch.equal(model.step(tokens[:, 4], state)[0], before)  # no step changed the state


@pytest.mark.parametrize("kind", DECODERS)
def test_no_logit_depends_on_later_tokens(kind: str) -> None:
    model, tokens = decoder(kind), captions()
    other = tokens.clone()
    other[:, 4:] = (other[:, 4:] + 1) % V
    out, changed = (model(ids, image()) for ids in (tokens, other))
    torch.testing.assert_close(changed[:, :4], out[:, :4])
    assert (changed[:, 4:] - out[:, 4:]).abs().amax((1, 2)).min() > 1e-3


@pytest.mark.parametrize("kind", DECODERS)
def test_padding_changes_nothing(kind: str) -> None:  # G3
    model = decoder(kind, tie=False)
    tokens, lengths = captions(), torch.tensor([2, 5, 4])
    mask = torch.arange(N) < lengths[:, None]
    out = model(tokens, image(), mask)
    for other in (torch.where(mask, tokens, 3), torch.where(mask, tokens, V + 50), tokens[:, :5]):
        kept = mask[:, : other.shape[1]]
        torch.testing.assert_close(model(other, image(), kept)[kept], out[mask])
    for row, length in enumerate(lengths):
        alone = Encoded(*(x[row : row + 1] for x in image()[:2]))
        torch.testing.assert_close(
            model(tokens[row : row + 1, :length], alone)[0], out[row, :length]
        )


@pytest.mark.parametrize("kind", DECODERS)
def test_no_gradient_reaches_the_embeddings_of_padding(kind: str) -> None:  # G3
    model, pad = decoder(kind, tie=False), V - 1
    mask = torch.arange(N) < torch.tensor([[2], [5], [4]])
    tokens = torch.where(mask, captions() % pad, pad)
    model(tokens, image(), mask).square().sum().backward()  # padded places count here
    grad = model.token_embed.weight.grad
    assert torch.equal(grad[pad], torch.zeros(DIM, dtype=torch.float64))
    assert grad.abs().sum() > 0


@pytest.mark.parametrize("kind", DECODERS)
def test_a_caption_of_padding_alone_is_finite(kind: str) -> None:  # A1
    model, tokens = decoder(kind), captions()
    mask = (torch.arange(N) < torch.tensor([[3], [0], [N]])).contiguous()
    out = model(tokens, image(), mask)
    assert out.isfinite().all()
    out.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["lstm_additive", "transformer"])
def test_padding_of_the_image_changes_nothing(kind: str) -> None:
    model, tokens = decoder(kind), captions()
    mask = torch.arange(CELLS) < torch.tensor([[6], [2], [4]])
    seen = image(mask=mask)
    out = model(tokens, seen)
    other = seen._replace(tokens=torch.where(mask[..., None], seen.tokens, 7.0))
    torch.testing.assert_close(model(tokens, other), out)
    assert (model(tokens, seen._replace(mask=None)) - out)[1:].abs().max() > 1e-3


def test_what_each_decoder_sees_of_the_image() -> None:
    tokens, one, two = captions(), image(seed=1), image(seed=5)
    other_cells, other_vector = one._replace(tokens=two.tokens), one._replace(pooled=two.pooled)
    moved = {}
    for kind in DECODERS:
        model = decoder(kind)
        outs = [model(tokens, seen) for seen in (one, other_cells, other_vector)]
        moved[kind] = [not torch.equal(out, outs[0]) for out in outs[1:]]
    assert moved == {
        "lstm_fixed": [False, True],
        "lstm_additive": [True, True],
        "transformer": [True, False],
    }


@pytest.mark.parametrize("scale", [0.01, 100.0])
@pytest.mark.parametrize("kind", DECODERS)
def test_the_scale_of_image_features_changes_nothing(kind: str, scale: float) -> None:
    model, tokens, seen = decoder(kind), captions(), image()
    scaled = Encoded(seen.tokens * scale, seen.pooled * scale)
    torch.testing.assert_close(model(tokens, scaled), model(tokens, seen), rtol=1e-2, atol=1e-2)


def cell(gates: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """The LSTM's equations: gates (b 4d) in torch's order, input, forget, new, output."""
    i, f, g, o = gates.chunk(4, -1)
    memory = f.sigmoid() * memory + i.sigmoid() * g.tanh()
    return o.sigmoid() * memory.tanh(), memory


def normed(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    mean, var = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    return (x - mean) / (var + norm.eps).sqrt() * norm.weight + norm.bias


def first(part: FirstState, pooled: Tensor) -> tuple[Tensor, Tensor]:
    """Of one layer"""
    made = normed(part.norm, pooled) @ part.linear.weight.T + part.linear.bias
    hidden, memory = made.chunk(2, -1)
    return hidden.tanh(), memory


def test_lstm_fixed_is_its_formula() -> None:
    model, tokens = decoder("lstm_fixed", depth=1), captions()
    assert isinstance(model, LstmFixed)
    table, lstm = model.token_embed.weight, model.lstm
    hidden, memory = first(model.first, image().pooled)
    for place in range(N):
        x = table[tokens[:, place]] * DIM**0.5
        gates = x @ lstm.weight_ih_l0.T + hidden @ lstm.weight_hh_l0.T
        hidden, memory = cell(gates + lstm.bias_ih_l0 + lstm.bias_hh_l0, memory)
        read = hidden @ model.readout.weight.T + model.readout.bias
        torch.testing.assert_close(model(tokens, image())[:, place], read @ table.T)


def test_lstm_additive_is_its_formula() -> None:
    """Bahdanau's scores v tanh(W q + U k), written out for one head."""
    model, tokens = decoder("lstm_additive", depth=1, num_heads=1), captions()
    assert isinstance(model, LstmAdditive)
    out = model(tokens, image())
    table, attn, lstm = model.token_embed.weight, model.attn, model.cells[0]
    cells = normed(model.norm_image, image().tokens)
    keys, values = attn.kv(cells).chunk(2, -1)  # b m d
    hidden, memory = first(model.first, image().pooled)
    for place in range(N):
        query = attn.core.query(attn.q(hidden))[:, None]
        energy = (query + keys @ attn.core.key.weight.T).tanh() @ attn.core.score.weight[0]
        found = attn.proj((energy.softmax(-1)[..., None] * values).sum(1))
        x = torch.cat([table[tokens[:, place]] * DIM**0.5, found], -1)
        gates = x @ lstm.weight_ih.T + hidden @ lstm.weight_hh.T + lstm.bias_ih + lstm.bias_hh
        hidden, memory = cell(gates, memory)
        read = torch.cat([hidden, found], -1) @ model.readout.weight.T + model.readout.bias
        torch.testing.assert_close(out[:, place], read @ table.T)


def as_torch(block: DecoderBlock) -> nn.TransformerDecoderLayer:
    """torch's layer with a block's weights; its context must have the block's width."""
    theirs = nn.TransformerDecoderLayer(
        DIM, 2, 4 * DIM, 0.0, "gelu", 1e-6, batch_first=True, norm_first=True
    ).double()
    state = {
        "self_attn.in_proj_weight": block.attn.qkv.weight,
        "self_attn.in_proj_bias": block.attn.qkv.bias,
        "multihead_attn.in_proj_weight": torch.cat([block.cross.q.weight, block.cross.kv.weight]),
        "multihead_attn.in_proj_bias": torch.cat([block.cross.q.bias, block.cross.kv.bias]),
    }
    parts = {
        "self_attn.out_proj": block.attn.proj,
        "multihead_attn.out_proj": block.cross.proj,
        "linear1": block.mlp.fc1,
        "linear2": block.mlp.fc2,
        "norm1": block.norm1,
        "norm2": block.norm2,
        "norm3": block.norm3,
    }
    for name, part in parts.items():
        state |= {f"{name}.{key}": value for key, value in part.state_dict().items()}
    theirs.load_state_dict(state)
    return theirs.eval()


def test_a_block_equals_torchs_decoder_layer() -> None:
    torch.manual_seed(0)
    block = DecoderBlock(DIM, DIM, 2).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    x, context = torch.randn(2, 2, N, DIM, dtype=torch.float64).unbind()
    padded = torch.arange(N) >= torch.tensor([[4], [N]])
    later = torch.ones(N, N, dtype=torch.bool).triu(1)
    expected = as_torch(block)(x, context, later, memory_key_padding_mask=padded)
    out = block(x, context, Mask.causal(), ~padded[:, None, None])
    torch.testing.assert_close(out, expected)


def test_the_transformer_is_its_blocks_with_positions_and_norms() -> None:
    model, tokens = decoder("transformer"), captions()
    assert isinstance(model, TransformerDecoder)
    table = model.token_embed.weight
    x = table[tokens] * DIM**0.5 + model.pos_embed
    for block in model.blocks:
        x = block(x, normed(model.norm_image, image().tokens), Mask.causal())
    torch.testing.assert_close(model(tokens, image()), normed(model.norm, x) @ table.T)


@pytest.mark.parametrize("position", POSITIONS)
def test_order_is_seen(position: str) -> None:
    model = decoder("transformer", position=position)
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])
    seen = reorder(image(1), torch.tensor([0, 0]))
    one, other = model(tokens, seen)[:, -1]
    assert (one - other).abs().max() > 1e-3


def test_tied_output_has_no_weights_of_its_own() -> None:
    for kind in DECODERS:
        tied, free = decoder(kind), decoder(kind, tie=False)
        added = dict(free.named_parameters()).keys() - dict(tied.named_parameters()).keys()
        assert added == {"head.weight"}


def test_checkpointing_gives_the_same_gradients() -> None:
    grads = []
    for enable in (False, True):
        model = decoder("transformer")
        model.set_grad_checkpointing(enable)
        seen = image()
        seen.tokens.requires_grad_()
        model(captions(), seen).square().mean().backward()
        grads.append([seen.tokens.grad, *(p.grad for p in model.parameters())])
    for plain, again in zip(*grads, strict=True):
        torch.testing.assert_close(again, plain)


@pytest.mark.parametrize("kind", DECODERS)
def test_dropout_is_on_in_training_alone(kind: str) -> None:
    model, tokens = decoder(kind, drop=0.5), captions()
    assert torch.equal(model(tokens, image()), model(tokens, image()))
    model.train()
    assert not torch.equal(model(tokens, image()), model(tokens, image()))


def test_words_over_patches_can_be_captured() -> None:
    tokens, model = captions(), decoder("lstm_additive")
    with zoo.capture_attention(model, model.looks) as records:
        model(tokens, image())
    assert [m.shape for m in records["attn"]] == N * [(3, 2, 1, CELLS)]
    model = decoder("transformer")
    with zoo.capture_attention(model, model.looks) as records:
        model(tokens, image())
    assert {k: [m.shape for m in v] for k, v in records.items()} == {
        f"blocks.{layer}.cross": [(3, 2, N, CELLS)] for layer in range(2)
    }


def test_positions_do_not_decay() -> None:
    assert decoder("transformer").no_weight_decay() == {"pos_embed"}
    assert decoder("transformer", position="rope").no_weight_decay() == set()


@pytest.mark.parametrize(
    ("tokens", "mask", "error", "words"),
    [
        (captions().float(), None, TypeError, "integers, got torch.float32"),
        (captions(), torch.ones(3, N), TypeError, "mask must be bool"),
        (captions(), torch.ones(3, 2).bool(), ValueError, r"\(3, 7\) and \(3, 2\)"),
        (captions()[:, :0], None, ValueError, "n of at least 1"),
        (captions(4), None, ValueError, "4 captions for 3 images"),
        (captions(3, N + 1), None, ValueError, "8 tokens, but context_length is 7"),
        (captions() + V, None, ValueError, "not in the vocabulary of 13"),
        (captions(), torch.arange(N).expand(3, N) > 1, ValueError, "padding comes last"),
    ],
)
def test_inputs_that_are_refused(
    tokens: Tensor, mask: Tensor | None, error: type[Exception], words: str
) -> None:
    for kind in DECODERS:
        with pytest.raises(error, match=words):
            decoder(kind)(tokens, image(), mask)


def test_a_step_beyond_the_context_is_refused() -> None:
    model, token = decoder("transformer"), torch.ones(3, dtype=torch.long)
    state = model.start(image())
    for _ in range(N):
        _, state = model.step(token, state)
    with pytest.raises(ValueError, match="7 tokens are read"):
        model.step(token, state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "lstm_aditive"}, "decoder 'lstm_aditive' must be one of.*nearest: 'lstm_add"),
        ({"position": "relative"}, "position 'relative' must be one of"),
        ({"num_heads": 3}, r"dim \(16\) must be divisible by num_heads \(3\)"),
        ({"depth": 0}, r"depth \(0\) must be at least 1"),
        ({"drop": 1.5}, r"drop \(1.5\) must lie in \[0, 1\]"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        decoder(**{"kind": "transformer", **options})
