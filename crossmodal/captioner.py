"""A captioner: an image tower and a decoder that writes what it sees, and its loss.

Shapes: b batch, n tokens, m image tokens, h heads, c y x channels, rows and columns of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from crossmodal.composite import Composite
from crossmodal.decoder import POSITIONS, Decoder, TransformerDecoder
from crossmodal.encoded import Encoded
from crossmodal.recurrent import LstmAdditive, LstmFixed
from crossmodal.tokenizer import Tokenizer, create_tokenizer
from crossmodal.towers import ImageTower
from vision.checks import check_choice
from zoo.registry import records_options, register_model

DECODERS = ("lstm_fixed", "lstm_additive", "transformer")


class Captioner(Composite):
    """Reads an image once, then writes a caption token by token.

    `lstm_fixed` sees the image as one vector, `lstm_additive` looks at its tokens before each
    word, `transformer` in each of its blocks. `crossmodal.generate` writes captions.

    Args:
        image_tower: Name of an image model, see `ImageTower`.
        image_options: Further options of it.
        img_size: Side, or rows and columns, of the images.
        in_chans: Channels of the images.
        freeze_image: Stages or blocks of the image tower that do not learn, or "all".
        decoder: One of `DECODERS`.
        tokenizer: Makes the ids of captions, see `create_tokenizer`.
        context_length: Most tokens of a caption; by default the tokenizer's.
        dim: Width of the decoder.
        depth: Layers of the decoder.
        num_heads: Heads of its attention, where there is any.
        mlp_ratio: Hidden width of the MLP over `dim`; of `transformer`.
        position: One of `crossmodal.decoder.POSITIONS`; of `transformer`, LSTMs read in order.
        tie: Whether the output's weights are the token embeddings.
        drop_rate: Dropout in the decoder.
    """

    @records_options
    def __init__(
        self,
        image_tower: str = "resnet_micro",
        image_options: dict[str, Any] | None = None,
        img_size: int | Sequence[int] | None = 32,
        in_chans: int = 3,
        freeze_image: int | str = 0,
        decoder: str = "transformer",
        tokenizer: str = "clip",
        context_length: int | None = None,
        dim: int = 128,
        depth: int = 2,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        position: str = "learned",
        tie: bool = True,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        made = create_tokenizer(tokenizer, context_length)
        self.tokenizer, self.context_length = tokenizer, made.context_length
        self.start_id, self.end_id, self.pad_id = made.start_id, made.end_id, made.pad_id
        self.image_tower = ImageTower(
            image_tower,
            img_size=img_size,
            in_chans=in_chans,
            freeze=freeze_image,
            options=image_options,
        )
        self.decoder = create_decoder(
            decoder,
            made.vocab_size,
            made.context_length,
            self.image_tower.num_features,
            self.image_tower.pooled_features,
            dim=dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            position=position,
            tie=tie,
            drop=drop_rate,
        )

    def forward(self, images: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
        """images (b c y x), captions (b n), mask (b n) -> logits (b n-1 vocab) of all but the start

        Logits at place i are of token i + 1, after the true tokens up to i.
        """
        if tokens.ndim != 2 or not 2 <= tokens.shape[1] <= self.context_length:
            raise ValueError(
                f"captions must be (b, n) with n from 2, start and end, to context_length "
                f"({self.context_length}), got {tuple(tokens.shape)}: take the model's "
                "make_tokenizer(), or build it with another context_length"
            )
        return self.decoder(tokens[:, :-1], self.encode_image(images), mask[:, :-1])

    def encode_image(self, images: Tensor) -> Encoded:
        """(b c y x) -> what the decoder looks at"""
        return self.image_tower(images)

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids the decoder reads and writes."""
        return create_tokenizer(self.tokenizer, self.context_length)


def create_decoder(
    kind: str,
    vocab_size: int,
    context_length: int,
    dim_image: int,
    dim_pooled: int,
    *,
    dim: int = 128,
    depth: int = 2,
    num_heads: int = 4,
    mlp_ratio: float = 4.0,
    position: str = "learned",
    tie: bool = True,
    drop: float = 0.0,
) -> Decoder:
    """A decoder by name, one of `DECODERS`; for the options see `Captioner`.

    Args:
        dim_image: Width of the image's tokens; `lstm_fixed` does not see them.
        dim_pooled: Width of the image's vector; `transformer` does not see it.
    """
    check_choice("decoder", kind, DECODERS)
    check_choice("position", position, POSITIONS)
    shared: dict[str, Any] = {"dim": dim, "depth": depth, "tie": tie, "drop": drop}
    if kind == "lstm_fixed":
        return LstmFixed(vocab_size, context_length, dim_pooled, **shared)
    shared["num_heads"] = num_heads
    if kind == "lstm_additive":
        return LstmAdditive(vocab_size, context_length, dim_image, dim_pooled, **shared)
    return TransformerDecoder(
        vocab_size, context_length, dim_image, mlp_ratio=mlp_ratio, position=position, **shared
    )


def caption_loss(
    logits: Tensor, tokens: Tensor, mask: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """The mean over captions of the mean cross-entropy of their tokens, the start left out.

    Each caption counts once, however long, so that neither the batch nor the number of processes
    changes its share. One without tokens counts 0.

    Args:
        logits: (b n-1 vocab), as a `Captioner` gives them.
        tokens: (b n)
        mask: (b n)
        label_smoothing: Share of the target that goes to all tokens alike.
    """
    return caption_losses(logits, tokens, mask, label_smoothing).mean()


def caption_losses(
    logits: Tensor, tokens: Tensor, mask: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """The mean cross-entropy of each caption's tokens (b,), see `caption_loss`."""
    targets, counted = _targets(logits, tokens, mask)
    losses = F.cross_entropy(
        logits.flatten(0, 1),
        targets.masked_fill(~counted, -100).flatten(),
        ignore_index=-100,
        reduction="none",
        label_smoothing=label_smoothing,
    ).view(targets.shape)
    return losses.sum(1) / counted.sum(1).clamp(min=1)


def token_counts(logits: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """How many tokens of each caption are the likeliest ones, and how many there are: (b), (b).

    Token accuracy of a data set is the ratio of their sums.
    """
    targets, counted = _targets(logits, tokens, mask)
    right = (logits.argmax(-1) == targets) & counted
    return right.sum(1), counted.sum(1)


def _targets(logits: Tensor, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(b n) -> (b n-1) each: the tokens after the first, and which of them count"""
    if tokens.shape != mask.shape or logits.shape[:2] != (len(tokens), tokens.shape[1] - 1):
        raise ValueError(
            f"logits must be (b, n - 1, vocab) for tokens and mask (b, n), got "
            f"{tuple(logits.shape)}, {tuple(tokens.shape)} and {tuple(mask.shape)}"
        )
    return tokens[:, 1:], mask[:, 1:]


# --- variants --------------------------------------------------------------------------------


@register_model
def captioner_micro(**options: Any) -> Captioner:
    """For images of 32x32: a small CNN and a Transformer decoder of two layers, 128 wide.

    It writes bytes: with CLIP's 49,408 tokens nearly all of its work would be the output.
    """
    return Captioner(**{"tokenizer": "bytes", **options})


@register_model
def captioner_probe(**options: Any) -> Captioner:
    """For rows of small cells: a ViT whose class token is the image's one vector."""
    probe: dict[str, Any] = {
        "image_tower": "vit_micro_patch4_32",
        "image_options": {"class_token": True, "global_pool": "token"},
        "tokenizer": "bytes",
    }
    return Captioner(**{**probe, **options})
