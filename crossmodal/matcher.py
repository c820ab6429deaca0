"""A dual encoder that also looks at pairs: cross-attention tells whether they belong together.

Each image is paired with its caption, with a caption that is like its own and each caption with an
image that is like its own, chosen among the pairs of all processes (ALBEF, arXiv 2107.07651).

Shapes: b rows of this process, N rows of all processes, n tokens, d width, e width of an embedding,
c y x channels, rows and columns of an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossmodal.dual import DualEncoder, DualOutput
from crossmodal.encoded import Encoded
from crossmodal.fusion import Fusion
from crossmodal.loss import Share, exchange, precise
from zoo.layers.check import positive
from zoo.registry import records_options, register_model
from zoo.rng import generator
from zoo.untraced import untraced


class MatchOutput(NamedTuple):
    """A `DualOutput`, and 3 pairs a row: own, with another caption, with another image.

    Attributes:
        image, text, scale, bias: As in `DualOutput`.
        match_logits: That a pair does not, and does, belong together (3b 2).
        match_targets: 1 for the first b pairs, 0 for the others (3b).
        match_weights: Weight of each pair in the mean over this process's rows (3b); 0 for those
            of rows that do not count or have no legal negative.
    """

    image: Tensor
    text: Tensor
    scale: Tensor
    bias: Tensor | None
    match_logits: Tensor
    match_targets: Tensor
    match_weights: Tensor


def match_loss(output: MatchOutput) -> Tensor:
    """Cross-entropy of the matching head: this process's mean over the rows that count.

    It weighs in the mean over processes as `contrastive_loss` does. A row without a legal negative
    counts as 0 and is not left out, or the mean would depend on how rows are spread.
    """
    losses = F.cross_entropy(output.match_logits, output.match_targets, reduction="none")
    return (losses * output.match_weights).sum()


class Matcher(DualEncoder):
    """A `DualEncoder` with a fusion of its towers' tokens and a matching head.

    Args:
        fusion_dim: Width of the fusion; the text tower's where None.
        fusion_depth: Its number of blocks.
        fusion_heads: Attention heads.
        fusion_direction: `text_to_image`, `image_to_text` or `both`.
        fusion_norm: `per_modality`, `shared`, `none` or `qk`; see `CrossBlock`.
        fusion_layout: `cross` or `merged`.
        fusion_attention: Attention kind, one of `zoo.layers.list_attention()`.
        fusion_position: Positions added to the tokens: `none`, `learned` or `sincos`.
        gated: Whether each residual branch of the fusion has a gate that starts at 0.
        image_scale: Factor on the image's tokens as the fusion gets them: an experiment on norms.
        fusion_options: Further options of `Fusion`.

    The others are those of `DualEncoder`.
    """

    @records_options
    def __init__(
        self,
        image_tower: str = "resnet_micro",
        image_options: dict[str, Any] | None = None,
        text_tower: str = "text_micro",
        text_options: dict[str, Any] | None = None,
        img_size: int | Sequence[int] = 32,
        in_chans: int = 3,
        tokenizer: str | None = None,
        context_length: int | None = None,
        embed_dim: int = 128,
        loss: str = "infonce",
        init_temperature: float | None = None,
        max_scale: float = 100.0,
        freeze_image: int | str = 0,
        freeze_text: int | str = 0,
        fusion_dim: int | None = None,
        fusion_depth: int = 2,
        fusion_heads: int = 4,
        fusion_direction: str = "text_to_image",
        fusion_norm: str = "per_modality",
        fusion_layout: str = "cross",
        fusion_attention: str = "full",
        fusion_position: str = "none",
        gated: bool = True,
        image_scale: float = 1.0,
        fusion_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            image_tower=image_tower,
            image_options=image_options,
            text_tower=text_tower,
            text_options=text_options,
            img_size=img_size,
            in_chans=in_chans,
            tokenizer=tokenizer,
            context_length=context_length,
            embed_dim=embed_dim,
            loss=loss,
            init_temperature=init_temperature,
            max_scale=max_scale,
            freeze_image=freeze_image,
            freeze_text=freeze_text,
        )
        self.image_scale = positive("image_scale", image_scale)
        rows, columns = self.image_tower.grid
        self.fusion = Fusion(
            self.text_tower.num_features,
            self.image_tower.num_features,
            fusion_dim or self.text_tower.num_features,
            fusion_depth,
            fusion_heads,
            direction=fusion_direction,
            norm=fusion_norm,
            layout=fusion_layout,
            gated=gated,
            attention=fusion_attention,
            position=fusion_position,
            max_text=self.text_tower.context_length,
            max_image=self.image_tower.num_prefix_tokens + rows * columns,
            **(fusion_options or {}),
        )
        sides = 2 if fusion_direction == "both" else 1
        self.match_head = nn.Linear(sides * self.fusion.dim, 2)

    def forward(  # type: ignore[override]
        self,
        images: Tensor,
        tokens: Tensor,
        mask: Tensor,
        *,
        key: Sequence[int | str] | None = None,
        size: int | None = None,
    ) -> MatchOutput:
        """images (b c y x), tokens (b n), mask (b n) -> what the losses need

        Under several processes all must call it together.

        Args:
            key: Which random numbers choose the negatives, the same on all processes (seed, epoch,
                micro-batch); torch's generator where None.
            size: How many of the rows count, the first ones; all where None.
        """
        image, text = self.image_tower(images), self.text_tower(tokens, mask)
        output = self._output(image, text)
        share = Share.of(images, size)
        width = max(row[0] for row in exchange([tokens.shape[1]], tokens.device))
        text, tokens = _widened(text, width), _pad(tokens.masked_fill(~mask, -1), width, -1)
        other_text, other_image, legal = _negatives(output, share, tokens, key)
        texts, images_ = _of_all(text, share), _of_all(image, share)
        logits = self._logits(
            _rows([image, image, _taken(images_, other_image)]),
            _rows([text, _taken(texts, other_text), text]),
        )
        targets = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
        targets[: len(images)] = 1
        weights = (legal.to(logits) / (3 * max(1, share.size))).repeat(3)
        return MatchOutput(*output, logits, targets, weights)

    def match(self, image: Encoded, text: Encoded) -> Tensor:
        """Log-odds that pairs belong together, by what the towers made of them: -> (b,)"""
        logits = self._logits(image, text)
        return logits[:, 1] - logits[:, 0]

    def _logits(self, image: Encoded, text: Encoded) -> Tensor:
        """The head reads the mean token of each modality that attended."""
        image = image._replace(tokens=self.image_scale * image.tokens)
        fused_text, fused_image = self.fusion(text, image)
        sides = [(fused_text, text.mask), (fused_image, image.mask)]
        means = [_mean(tokens, mask) for tokens, mask in sides if tokens is not None]
        return precise(self.match_head(torch.cat(means, dim=-1)))


def hard_negatives(scores: Tensor, illegal: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draws a column for each row with probability softmax(scores), illegal ones left out.

    Args:
        scores: (b N).
        illegal: (b N), True = not to be drawn.
        noise: Independent numbers from the exponential distribution of mean 1 (b N).

    Returns:
        Indices (b,), and which rows have a legal column (b,); the others' indices mean nothing.
    """
    # -log(exponential) is Gumbel's noise: the place of the maximum has the softmax's probability.
    noisy = (scores - noise.log()).masked_fill(illegal, -torch.inf)
    return noisy.argmax(dim=1), ~illegal.all(dim=1)


@untraced
@torch.no_grad()
def _negatives(
    output: DualOutput, share: Share, tokens: Tensor, key: Sequence[int | str] | None
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of this process's rows the caption and the image among those of all, and legality.

    A pair with an equal caption is none: with it, the caption would belong to both images.
    """
    images, texts = share.gather(torch.stack([output.image, output.text], dim=1)).unbind(1)
    captions = share.gather(tokens).unique(dim=0, return_inverse=True)[1]
    total, own = share.total, slice(share.start, share.stop)
    if not total:
        raise ValueError("size is 0 on all processes: there are no pairs to choose negatives from")
    draw = None if key is None else generator(*key, "negatives")
    noise = torch.empty(2, total, total).exponential_(generator=draw)[:, own].to(images.device)
    equal = captions[own, None] == captions
    with torch.autocast(images.device.type, enabled=False):
        like_image, like_text = (
            output.scale * one[own] @ other.T for one, other in ((images, texts), (texts, images))
        )
    other_text, legal = hard_negatives(like_image, equal, noise[0])
    other_image, _ = hard_negatives(like_text, equal, noise[1])
    rest = len(tokens) - share.size  # rows that do not count have some negative as well
    return (
        F.pad(other_text, (0, rest)),
        F.pad(other_image, (0, rest)),
        F.pad(legal, (0, rest)),
    )


def _of_all(x: Encoded, share: Share) -> Encoded:
    """The rows that count, of all processes, with gradients."""
    return _each(share.gather, x)


def _taken(x: Encoded, index: Tensor) -> Encoded:
    return _each(lambda part: part[index], x)


def _each(function: Any, x: Encoded) -> Encoded:
    mask = None if x.mask is None else function(x.mask)
    return Encoded(function(x.tokens), function(x.pooled), mask)


def _rows(parts: list[Encoded]) -> Encoded:
    """One batch of several."""
    tokens, pooled, masks = zip(*parts, strict=True)
    return Encoded(
        torch.cat(tokens), torch.cat(pooled), None if masks[0] is None else torch.cat(masks)
    )


def _widened(text: Encoded, width: int) -> Encoded:
    """The same with padding up to `width` tokens."""
    assert text.mask is not None
    tokens = F.pad(text.tokens, (0, 0, 0, width - text.tokens.shape[1]))
    return Encoded(tokens, text.pooled, _pad(text.mask, width, False))


def _pad(x: Tensor, width: int, value: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[1]), value=value)


def _mean(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the tokens that count: (b n d), zeros elsewhere -> (b d)"""
    if mask is None:
        return tokens.mean(dim=1)
    return tokens.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)


# --- variants --------------------------------------------------------------------------------


@register_model
def matcher_micro(**options: Any) -> Matcher:
    """`dual_micro` with two layers of text that attends to the image."""
    return Matcher(**options)
