"""Functions that a compiled model calls, but does not trace."""

from __future__ import annotations

import torch

# torch.compiler.disable imports torch._dynamo at once, over a second of every start; torch's own
# modules use this one, which waits for the first call.
untraced = getattr(torch, "_disable_dynamo", torch.compiler.disable)
