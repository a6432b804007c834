"""FlashAttention-2 in Triton, behind one torch custom op: `flash_attention(q, k, v, mask)`. Start with README.md."""
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")     # read when a kernel is defined: ours then take CPU tensors

from .masks import Mask, causal_mask, full_mask  # noqa: E402
from .ops import FlashAttention2, flash_attention  # noqa: E402

__all__ = ["FlashAttention2", "Mask", "causal_mask", "flash_attention", "full_mask"]
