"""Recurrent decoders: the image as one vector at the start, or looked at before each token.

Shapes: b batch, n tokens, m image tokens, d width, p width of the image's vector, l layers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from crossmodal.decoder import Decoder, as_keys
from crossmodal.encoded import Encoded
from zoo.layers import KeyValues, create_attention, layer_norm
from zoo.layers.check import integer


class LstmState(NamedTuple):
    """What recurrent layers remember: (b l d) each."""

    hidden: Tensor
    cell: Tensor


class FirstState(nn.Module):
    """The state of an LSTM before the first token, from the image's vector, normalised."""

    def __init__(self, dim_pooled: int, depth: int, dim: int) -> None:
        super().__init__()
        self.shape = (2, integer("depth", depth), dim)
        self.norm = layer_norm(dim_pooled)
        self.linear = nn.Linear(dim_pooled, 2 * depth * dim)

    def forward(self, pooled: Tensor) -> LstmState:
        """(b p) -> (b l d) twice"""
        hidden, cell = self.linear(self.norm(pooled)).unflatten(1, self.shape).unbind(1)
        return LstmState(hidden.tanh(), cell)  # a hidden state is bounded, a cell is not


class LstmFixed(Decoder):
    """An LSTM that has seen the image once, as one vector (Show and Tell, arXiv 1411.4555).

    The vector makes the first state, where that paper reads it as the first input.
    """

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        dim_pooled: int,
        dim: int = 128,
        depth: int = 1,
        *,
        tie: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, context_length, dim, tie=tie, drop=drop)
        self.first = FirstState(dim_pooled, depth, dim)
        between = drop if depth > 1 else 0.0
        self.lstm = nn.LSTM(dim, dim, depth, batch_first=True, dropout=between)
        self.readout = nn.Linear(dim, dim)

    def start(self, image: Encoded) -> LstmState:
        return self.first(image.pooled)

    def step(self, token: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        x, state = self._run(self._embed(token[:, None]), state)
        return self._logits(x[:, 0]), state

    def _read(self, tokens: Tensor, image: Encoded, mask: Tensor | None) -> Tensor:
        return self._run(self._embed(tokens, mask), self.start(image))[0]

    def _run(self, x: Tensor, state: LstmState) -> tuple[Tensor, LstmState]:
        """(b n d), torch's LSTM with layers as the first axis of its state"""
        layers_first = tuple(part.transpose(0, 1).contiguous().to(x.dtype) for part in state)
        x, after = self.lstm(self.drop(x), layers_first)
        return self.readout(x), LstmState(*(part.transpose(0, 1) for part in after))


class AttendingState(NamedTuple):
    """What an LSTM with attention remembers, and what it looks at."""

    memory: LstmState
    image: KeyValues
    mask: Tensor | None  # b 1 1 m


class LstmAdditive(Decoder):
    """An LSTM that looks at the image before each token (Show, Attend and Tell, arXiv 1502.03044).

    The hidden state of the last layer queries the image's tokens by additive scores (Bahdanau,
    arXiv 1409.0473); what it finds enters the first layer beside the token, and the output.
    Weights of one caption are recorded token by token: `zoo.capture_attention` gives a list of n
    tensors (b h 1 m), and `crossmodal.overlay.token_maps` puts them together.
    """

    looks = "attn"

    def __init__(
        self,
        vocab_size: int,
        context_length: int,
        dim_image: int,
        dim_pooled: int,
        dim: int = 128,
        depth: int = 1,
        num_heads: int = 1,
        *,
        tie: bool = True,
        drop: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, context_length, dim, tie=tie, drop=drop)
        self.first = FirstState(dim_pooled, depth, dim)
        self.norm_image = layer_norm(dim_image)
        self.attn: Any = create_attention("additive", dim, num_heads, dim_context=dim_image)
        self.cells = nn.ModuleList(
            nn.LSTMCell(dim if layer else 2 * dim, dim) for layer in range(depth)
        )
        self.readout = nn.Linear(2 * dim, dim)

    def start(self, image: Encoded) -> AttendingState:
        kept = self.attn.project(self.norm_image(image.tokens))
        return AttendingState(self.first(image.pooled), kept, as_keys(image.mask))

    def step(self, token: Tensor, state: AttendingState) -> tuple[Tensor, AttendingState]:
        x, memory = self._advance(self._embed(token[:, None])[:, 0], state)
        return self._logits(x), state._replace(memory=memory)

    def _read(self, tokens: Tensor, image: Encoded, mask: Tensor | None) -> Tensor:
        state, outputs = self.start(image), []
        for x in self._embed(tokens, mask).unbind(1):
            x, memory = self._advance(x, state)
            state = state._replace(memory=memory)
            outputs.append(x)
        return torch.stack(outputs, 1)

    def _advance(self, x: Tensor, state: AttendingState) -> tuple[Tensor, LstmState]:
        """One token (b d) -> what the output reads (b d), and the memory after it"""
        hidden, cell = (list(part.unbind(1)) for part in state.memory)
        found = self.attn(hidden[-1][:, None], state.image, state.mask)[:, 0]
        x = torch.cat([x, found], dim=-1)
        for layer, lstm in enumerate(self.cells):
            before = (hidden[layer].to(x.dtype), cell[layer].to(x.dtype))
            x, cell[layer] = lstm(self.drop(x), before)
            hidden[layer] = x
        memory = LstmState(torch.stack(hidden, 1), torch.stack(cell, 1))
        return self.readout(torch.cat([x, found], dim=-1)), memory
