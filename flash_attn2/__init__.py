"""FlashAttention-2 in Triton, behind one torch custom op: `flash_attention(q, k, v, mask)`. Start with README.md."""
import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")     # read when a kernel is defined: ours then take CPU tensors

from .interface import (  # noqa: E402
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .masks import Mask, causal_mask, full_mask, varlen_mask  # noqa: E402
from .ops import FlashAttention2, flash_attention  # noqa: E402
from .sdpa import activate_sdpa, restore_sdpa  # noqa: E402

__all__ = ["FlashAttention2", "Mask", "activate_sdpa", "causal_mask", "flash_attention", "flash_attn_func",
           "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "full_mask", "restore_sdpa",
           "varlen_mask"]
