"""Readers of transformers' attention (see `zoo.diagnostics.foreign_scores`).

Its classes compute what they have in common by a kernel that the configuration names; what is
read here lies between the projections and that kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from zoo.diagnostics.foreign_reader import (
    Parts,
    Reader,
    Scores,
    causal_mask,
    heads_of,
    mask_of_windows,
    split,
)

_PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"))


def _encoder(
    m: Any,
    parts: Parts,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Scores:
    """Attention of a query, key and value projection, under either of their names."""
    kernel = m.config._attn_implementation
    if kernel not in (None, "eager", "sdpa"):  # None is eager, in a module without its model
        raise ValueError(
            f"attention implementation {kernel!r} hides its masks; call "
            "model.set_attn_implementation('sdpa') to capture its weights"
        )
    names = next(names for names in _PROJECTIONS if names[0] in parts)
    q, k = (split(parts[name], heads_of(m)) for name in names[:2])
    v = split(parts[names[2]], heads_of(m)) if names[2] in parts else None
    is_causal = kwargs.get("is_causal")
    is_causal = m.is_causal if is_causal is None else is_causal
    if is_causal and attention_mask is None and kernel == "sdpa":
        attention_mask = causal_mask(q.shape[2], k.shape[2], q)
    return Scores(q, k, (attention_mask,), m.scale if hasattr(m, "scale") else m.scaling, v)


def _rotated(
    m: Any,
    parts: Parts,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> Scores:
    """DINOv3's, with rotary positions of all but the tokens before the grid (arXiv 2508.10104)."""
    from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb

    plain = _encoder(m, parts, hidden_states, attention_mask, **kwargs)
    assert position_embeddings is not None
    q, k = apply_rotary_pos_emb(plain.q, plain.k, *position_embeddings)
    return replace(plain, q=q, k=k)


def _swin(
    m: Any,
    parts: Parts,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Scores:
    """Attention within windows, which stand in for the batch: ((b w) h i j)."""
    windows = mask_of_windows(attention_mask, len(hidden_states))
    plain = _encoder(m, parts, hidden_states, **kwargs)
    return replace(plain, masks=(parts["relative_position_bias"], windows))


def _bert(
    m: Any,
    parts: Parts,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Scores:
    """BERT's and its kin's, which can be made a decoder with a cache."""
    if cache is not None or past_key_values is not None:
        raise ValueError(
            "keys of earlier tokens may lie in a cache, where they cannot be seen; call the model "
            "with use_cache=False to capture its weights"
        )
    return _encoder(m, parts, hidden_states, attention_mask, **kwargs)


def _bert_cross(
    m: Any,
    parts: Parts,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    attention_mask: Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Scores:
    """The same from a decoder to what an encoder put out."""
    return _bert(m, parts, hidden_states, attention_mask, cache, past_key_values, **kwargs)


def _named(reader: Reader, **classes: str) -> dict[str, Reader]:
    """`HOME="NAME"` is transformers.models.HOME.modeling_HOME.NAMEAttention."""
    return {
        f"transformers.models.{home}.modeling_{home}.{name}Attention": reader
        for home, name in classes.items()
    }


_BERT = {
    "bert": "Bert",
    "camembert": "Camembert",
    "electra": "Electra",
    "roberta": "Roberta",
    "xlm_roberta": "XLMRoberta",
    "bridgetower": "BridgeTower",
}
_OUT = ("out_proj", "o_proj")

READERS = {
    **_named(
        Reader(_encoder, ("q_proj", "k_proj"), _OUT),
        altclip="AltCLIP",
        beit="Beit",
        chinese_clip="ChineseCLIPVision",
        clip="CLIP",
        clipseg="CLIPSeg",
        deit="DeiT",
        dinov2="Dinov2",
        dinov2_with_registers="Dinov2WithRegisters",
        ijepa="IJepa",
        metaclip_2="MetaClip2",
        siglip="Siglip",
        siglip2="Siglip2",
        vit="ViT",
        vit_mae="ViTMAE",
        vit_msn="ViTMSN",
        x_clip="XCLIP",
    ),
    **_named(
        Reader(_encoder, ("query", "key", "value")),
        altclip="AltRobertaSelf",
        chinese_clip="ChineseCLIPTextSelf",
        dpt="DPTSelf",
        yolos="YolosSelf",
    ),
    **_named(Reader(_rotated, ("q_proj", "k_proj"), _OUT), dinov3_vit="DINOv3ViT"),
    **_named(Reader(_swin, ("q_proj", "k_proj", "relative_position_bias"), _OUT), swin="Swin"),
    **_named(Reader(_bert, ("query", "key", "value")), **{h: f"{n}Self" for h, n in _BERT.items()}),
    **_named(
        Reader(_bert_cross, ("query", "key", "value")),
        **{h: f"{n}Cross" for h, n in _BERT.items()},
    ),
}
