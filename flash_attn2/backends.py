"""One signature for every attention: attention.mask(...) once a batch and mask kind, attention(q, k, v, mask) a layer.

    flash_attn2   the kernels of this folder; flash_attn2:triton: never the Hopper ones
    sdpa          torch's scaled_dot_product_attention; sdpa:flash, :cudnn, :efficient, :math force one kernel of it
    flex          torch's FlexAttention, compiled; GPU only
    reference     dense float64, for tests

Nothing falls back silently: `build` raises ValueError for what a backend cannot do, before any model exists.
"""
import os
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, and_masks, flex_attention

from . import reference
from .masks import Mask, causal_mask
from .ops import MAX_HEAD_DIM, flash_attention

SDPA_KERNELS = {
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:math": SDPBackend.MATH,
}
NAMES = ("flash_attn2", "flash_attn2:triton", "sdpa", *SDPA_KERNELS, "flex", "reference")
FLEX_BLOCK = 128        # tokens on a side of FlexAttention's blocks, its default
PROBE_TOKENS = 256      # below 128 FlexAttention takes another kernel, for decoding


class Attention(Protocol):
    """Causal self-attention. `mask` is whatever its own __call__ wants: opaque to the model."""

    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device): ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        """q (B, T, H, D), k and v (B, T, H_kv, D) -> o (B, T, H, D)."""


class FlashAttn2:
    def __init__(self, kernels: str = "auto"):
        self.kernels = kernels

    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device) -> Mask:
        return causal_mask(window, doc_start)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return flash_attention(q, k, v, mask, kernels=self.kernels)[0]


class Sdpa:
    """kernel None lets torch choose. A window or documents become a dense bool mask: T^2 bytes, slow, right."""

    def __init__(self, kernel: SDPBackend | None = None):
        self.kernel = kernel

    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device) -> Tensor | None:
        if doc_start is None and not 0 < window < T:
            return None
        i, lo = torch.arange(T, device=device), _first_seen(T, window, doc_start, device)
        seen = (i[None, None, :] >= lo[:, :, None]) & (i[None, None, :] <= i[None, :, None])
        return seen[:, None]                                                    # (B or 1, 1, T, T)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        call = dict(attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
        if self.kernel is None:
            return F.scaled_dot_product_attention(q, k, v, **call).transpose(1, 2)
        with sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(q, k, v, **call).transpose(1, 2)


class Flex:
    """Within a compiled model a part of it; in an eager one compiled by itself, for one length, then for any.

    Past torch's limit of recompilations it is an error (fullgraph), never the T^2 scores of the eager function."""

    def __init__(self):
        self.compiled = torch.compile(flex_attention, fullgraph=True)

    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device) -> BlockMask:
        """What create_block_mask gives, from the first key that each query sees: (T / 128)^2 work and memory.

        create_block_mask looks at T^2 pairs and must be compiled not to store them, again for each length; past the
        limit of recompilations it stores them after all."""
        lo = _first_seen(T, window, doc_start, device)
        begin = torch.arange(0, T, FLEX_BLOCK, device=device)                   # a block's first token
        last = (begin + FLEX_BLOCK - 1).clamp(max=T - 1)
        seen = (begin + FLEX_BLOCK > lo[:, begin, None]) & (begin <= begin[:, None])            # (B or 1, q, k blocks)
        full = (begin >= lo[:, last, None]) & (begin < begin[:, None]) & (begin + FLEX_BLOCK <= T)[:, None]
        return BlockMask.from_kv_blocks(*_block_lists(seen & ~full), *_block_lists(full), BLOCK_SIZE=FLEX_BLOCK,
                                        mask_mod=_mask_mod(window, doc_start), seq_lengths=(T, T))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None) -> Tensor:
        """As Attention's; mask None: every query sees every key."""
        attend = flex_attention if torch.compiler.is_compiling() else self.compiled
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return attend(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def _first_seen(T: int, window: int, doc_start: Tensor | None, device: torch.device) -> Tensor:
    """The first key that each query sees, (1 or B, T) int64."""
    lo = torch.zeros(1, T, dtype=torch.int64, device=device) if doc_start is None else doc_start.long()
    return torch.maximum(lo, torch.arange(T, device=device) - window + 1) if window else lo


def _block_lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """blocks (B, q, k) bool -> how many k blocks a q block has (B, 1, q), and all of them, these first (B, 1, q, k)."""
    blocks = blocks[:, None].int()
    return blocks.sum(-1, dtype=torch.int32), torch.argsort(blocks, dim=-1, descending=True, stable=True).int()


def _mask_mod(window: int, doc_start: Tensor | None):
    """The pairs that attend, for the blocks at an edge."""
    def causal(b, h, i, j):
        return j <= i

    def near(b, h, i, j):
        return i - j < window

    def same_document(b, h, i, j):
        return j >= doc_start[b, i]
    return and_masks(causal, *[near] * (window > 0), *[same_document] * (doc_start is not None))


class Reference:
    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device) -> Tensor:
        bound = (window - 1, None) if window else None
        return reference.seen(T, T, window=bound, doc_q=doc_start, doc_k=doc_start, device=device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return reference.attention(q, k, v, mask)[0].to(q.dtype)


def resolve(name: str, device: torch.device) -> str:
    """`auto` is flash_attn2 on a GPU and sdpa on a CPU; any other name is itself. ValueError: an unknown name."""
    if name == "auto":
        return "flash_attn2" if device.type == "cuda" else "sdpa"
    if name not in NAMES:
        raise ValueError(f"no attention backend is called {name!r}; known: auto, {', '.join(NAMES)}")
    return name


def build(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, *, plain: bool,
          grouped: bool = False) -> Attention:
    """The attention called `name`, or a ValueError that says what it cannot do.

    dtype is q's; plain tells whether every mask is causal and no more (False: a window or documents occur),
    grouped whether k and v have fewer heads than q."""
    name = resolve(name, device)
    if name.startswith("flash_attn2"):
        _check_flash_attn2(device, dtype, head_dim)
        return FlashAttn2(name.partition(":")[2] or "auto")
    if name == "reference":
        return Reference()
    if name in ("sdpa:cudnn", "sdpa:efficient") and device.type != "cuda":
        raise ValueError(f"{name} runs on a GPU only; use sdpa on a {device.type}")
    if name == "flex" and device.type != "cuda":
        raise ValueError(f"flex trains on a GPU only: torch has no backward for it on a {device.type}; use sdpa")
    if name == "sdpa:efficient" and grouped:
        raise ValueError("sdpa:efficient takes no grouped heads: set model.n_kv_head=0")
    if name == "sdpa:flash" and not plain:
        raise ValueError("sdpa:flash takes no mask but causal: no windows, and data.document_mask=False")
    if name in ("sdpa:flash", "sdpa:cudnn") and device.type == "cuda" and dtype == torch.float32:
        raise ValueError(f"{name} takes float16 and bfloat16, not {dtype}")
    attention = Flex() if name == "flex" else Sdpa(SDPA_KERNELS.get(name))
    if name != "sdpa":
        _try(name, attention, device, dtype, head_dim, 2 if grouped else 1)
    return attention


def _try(name: str, attention: Attention, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> None:
    """One small call: torch's kernels know their own limits (widths, cards), and change them between versions."""
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, attention.mask(PROBE_TOKENS, 0, None, device))
    if name == "flex":      # compiled by itself it would remember this length, and meet the first real one as a change
        call = torch.compile(call, fullgraph=True, dynamic=False)
    q, k, v = (torch.zeros(1, PROBE_TOKENS, heads, head_dim, device=device, dtype=dtype, requires_grad=True)
               for heads in (group, 1, 1))
    try:
        call(q, k, v).sum().backward()
    except RuntimeError as error:
        raise ValueError(f"{name} cannot do head width {head_dim} in {dtype} on {device}: "
                         f"{str(error).strip().partition(chr(10))[0]}") from error


def _check_flash_attn2(device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"flash_attn2: head width {head_dim} must not exceed {MAX_HEAD_DIM}")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise ValueError(f"flash_attn2 needs compute capability 8.0, {torch.cuda.get_device_name(device)} has "
                         f"{'.'.join(map(str, torch.cuda.get_device_capability(device)))}; use sdpa")
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("flash_attn2 runs on a CPU only in Triton's interpreter: set TRITON_INTERPRET=1, or use sdpa")
    if device.type == "cpu" and dtype == torch.bfloat16:
        raise ValueError("flash_attn2 on a CPU is Triton's interpreter, where bfloat16 is silently wrong: use float32")
