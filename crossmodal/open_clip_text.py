"""Text towers of open_clip: `text_tower("open_clip:ARCH")`.

What stands at padding is replaced by open_clip's own padding, and where its attention sees that (no
causal rule, or CoCa's class token), captions are brought to the full context length as there. So
neither ids nor amount of padding change an output, and the embedding is `encode_text`'s. With a
Hugging Face tokenizer the option `pad_id` must be that tokenizer's.

Shapes: b batch, n tokens, d width, p width of an embedding in the space of images and texts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from crossmodal.encoded import Encoded
from crossmodal.tokenizer import Tokenizer, create_tokenizer
from zoo.hosts_open_clip import check_fields, load_open_clip, open_clip_config
from zoo.sources import WeightsError, listed

_NOT_OPTIONS = ("output_tokens", "hf_model_name", "hf_model_pretrained", "hf_tokenizer_name")


class OpenClipText(nn.Module):
    """The text tower of an architecture of open_clip.

    Args:
        arch: Its name, `ViT-B-32`.
        pretrained: `open_clip:ARCH/TAG`, True where the architecture has weights of one tag only,
            or False.
        context_length: Most tokens of a caption; by default the architecture's.
        embed_dim: Width of the embedding, p; by default the architecture's.
        quick_gelu: Whether the activation is OpenAI's approximation of GELU; by default the
            architecture's.
        **options: Fields of open_clip's `CLIPTextCfg`.

    Attributes:
        num_features: Width of a token, d.
        pooled_features: Width of the pooled vector, p: open_clip's projection is included.
    """

    def __init__(
        self,
        arch: str,
        pretrained: bool | str = False,
        context_length: int | None = None,
        embed_dim: int | None = None,
        quick_gelu: bool | None = None,
        **options: Any,
    ) -> None:
        from open_clip.model import CLIPTextCfg, _build_text_tower

        super().__init__()
        config = open_clip_config(arch)
        check_fields(f"open_clip:{arch}", CLIPTextCfg, options, _NOT_OPTIONS)
        self.arch, self.config = arch, {**config["text_cfg"], **options}
        if "hf_model_name" in self.config:
            raise ValueError(
                f"open_clip:{arch} has {self.config['hf_model_name']} of the Hugging Face hub as "
                f"its text tower; take an architecture with open_clip's own, such as ViT-B-32"
            )
        if context_length is not None:
            self.config["context_length"] = context_length
        gelu = config.get("quick_gelu", False) if quick_gelu is None else quick_gelu
        width = config["embed_dim"] if embed_dim is None else embed_dim
        self.text = _build_text_tower(width, {**self.config, "output_tokens": True}, gelu)
        self.num_features, self.vocab_size = self.text.width, self.text.vocab_size
        self.context_length = self.text.context_length
        self.pooled_features = self.num_features if self.text.text_projection is None else width
        self.sees_padding = self.text.attn_mask is None or self.text.cls_emb is not None
        if pretrained:
            self._load(f"open_clip:{arch}" if pretrained is True else pretrained)

    def forward(self, tokens: Tensor, mask: Tensor) -> Encoded:
        """(b n) ids, (b n) True = a token of the caption -> tokens (b n d), pooled (b p)

        Tokens are the last states after the final norm, pooled what `encode_text` gives.
        """
        self._check(tokens, mask)
        ids = tokens.masked_fill(~mask, self.text.pad_id)
        x, pooled = self._whole(ids) if self.sees_padding else self._causal(ids, mask)
        empty = ~mask.any(1, keepdim=True)
        return Encoded(x.masked_fill(~mask[..., None], 0), pooled.masked_fill(empty, 0), mask)

    def _whole(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """open_clip's own pass over the full context."""
        n = ids.shape[1]
        full = F.pad(ids, (0, self.context_length - n), value=self.text.pad_id)
        pooled, x = self.text(full)
        x = x if self.text.cls_emb is None else self.text.ln_final(x)
        return x[:, :n], pooled

    def _causal(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The same on no more tokens than there are: none sees the padding behind it."""
        text, n = self.text, ids.shape[1]
        x = text.token_embedding(ids) + text.positional_embedding[:n]
        x = text.ln_final(text.transformer(x, attn_mask=text.attn_mask[:n, :n]))
        last = (mask.sum(1) - 1).clamp(min=0)  # the end token
        pooled = x[:, 0] if text.pool_type == "first" else x[torch.arange(len(x)), last]
        projection = text.text_projection
        if isinstance(projection, nn.Linear):
            return x, projection(pooled)
        return x, pooled if projection is None else pooled @ projection

    def _check(self, tokens: Tensor, mask: Tensor) -> None:
        if tokens.ndim != 2 or tokens.shape != mask.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"tokens and mask must both be (b, n), mask of truth values, got "
                f"{tuple(tokens.shape)} and {tuple(mask.shape)} of {mask.dtype}"
            )
        if tokens.shape[1] > self.context_length:
            raise ValueError(
                f"captions have {tokens.shape[1]} tokens, but context_length is "
                f"{self.context_length}: cut them with the tower's make_tokenizer()"
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = tokens[mask & ((tokens < 0) | (tokens >= self.vocab_size))].unique().tolist()
            if wrong:
                raise ValueError(
                    f"tokens {wrong[:8]} are not in the vocabulary of {self.vocab_size} of "
                    f"open_clip:{self.arch}: take the tower's make_tokenizer()"
                )

    def make_tokenizer(self) -> Tokenizer:
        """The tokenizer whose ids the tower reads.

        Raises:
            ValueError: the architecture's is on the Hugging Face hub.
        """
        if name := self.config.get("hf_tokenizer_name"):
            raise ValueError(
                f"open_clip:{self.arch} reads the ids of {name} of the Hugging Face hub: save that "
                f"tokenizer to a folder and take create_tokenizer('hf:FOLDER')"
            )
        return create_tokenizer("clip", self.context_length)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether blocks are computed again in the backward pass instead of kept."""
        self.text.set_grad_checkpointing(enable)

    def no_weight_decay(self) -> set[str]:
        """Names of the positions, which weight decay leaves alone."""
        return {f"text.{name}" for name in self.text.no_weight_decay()}

    def _load(self, source: str) -> None:
        prefix, _, name = source.partition(":")
        if prefix != "open_clip":
            raise WeightsError(f"pretrained ({source!r}) must be open_clip:ARCH/TAG")
        model, _ = load_open_clip(name, force_context_length=self.context_length)
        theirs = getattr(model, "text", model).state_dict()  # CLIP holds its text tower's parts
        own = self.text.state_dict()
        wrong = [k for k, v in own.items() if k not in theirs or theirs[k].shape != v.shape]
        if wrong:
            raise WeightsError(
                f"{source} does not fit open_clip:{self.arch} with these options: it lacks, or has "
                f"in another shape, {listed(wrong)}"
            )
        self.text.load_state_dict({key: theirs[key] for key in own})
