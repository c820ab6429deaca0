"""Channel attention: modules that weigh the channels of a feature map, by name.

    >>> import torch
    >>> from vision.channel_attention import create_channel_attention
    >>> attention = create_channel_attention("se", 64, rd_ratio=1 / 4)
    >>> attention(torch.rand(2, 64, 8, 8)).shape
    torch.Size([2, 64, 8, 8])

To add a kind, write a subclass of `ChannelAttention` with a `gate` and register it under a name;
the tests sweep the registry and ask for its number of parameters.
"""

from __future__ import annotations

from vision.channel_attention import (  # noqa: F401  # importing them registers the kinds
    baseline,
    context,
    spatial,
    squeeze,
    statistics,
)
from vision.channel_attention.base import ChannelAttention, reduced_width
from vision.channel_attention.registry import (
    channel_attention_options,
    create_channel_attention,
    list_channel_attention,
    min_channels,
    register_channel_attention,
)

__all__ = [
    "ChannelAttention",
    "channel_attention_options",
    "create_channel_attention",
    "list_channel_attention",
    "min_channels",
    "reduced_width",
    "register_channel_attention",
]
