"""One signature for every attention: attention.mask(...) once a batch and mask kind, attention(q, k, v, mask) a layer.

    flash_attn2   the kernels of this folder
    sdpa          torch's scaled_dot_product_attention; sdpa:flash, :cudnn, :efficient, :math force one kernel of it
    reference     dense float64, for tests

Nothing falls back silently: `build` raises ValueError for what a backend cannot do, before any model exists.
"""
import os
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import reference
from .masks import Mask, causal_mask
from .ops import MAX_HEAD_DIM, flash_attention

SDPA_KERNELS = {
    "sdpa:flash": SDPBackend.FLASH_ATTENTION,
    "sdpa:cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa:efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa:math": SDPBackend.MATH,
}
NAMES = ("flash_attn2", "sdpa", *SDPA_KERNELS, "reference")


class Attention(Protocol):
    """Causal self-attention. `mask` is whatever its own __call__ wants: opaque to the model."""

    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device): ...

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask) -> Tensor:
        """q (B, T, H, D), k and v (B, T, H_kv, D) -> o (B, T, H, D)."""


class FlashAttn2:
    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device) -> Mask:
        return causal_mask(window, doc_start)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
        return flash_attention(q, k, v, mask)[0]


class Sdpa:
    """kernel None lets torch choose. A window or documents become a dense bool mask: T^2 bytes, slow, right."""

    def __init__(self, kernel: SDPBackend | None = None):
        self.kernel = kernel

    def mask(self, T: int, window: int, doc_start: Tensor | None, device: torch.device) -> Tensor | None:
        if doc_start is None and not 0 < window < T:
            return None
        i = torch.arange(T, device=device)
        lo = torch.zeros(1, T, dtype=torch.int64, device=device) if doc_start is None else doc_start.long()
        if window:
            lo = torch.maximum(lo, i - window + 1)
        seen = (i[None, None, :] >= lo[:, :, None]) & (i[None, None, :] <= i[None, :, None])
        return seen[:, None]                                                    # (B or 1, 1, T, T)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        call = dict(attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1])
        if self.kernel is None:
            return F.scaled_dot_product_attention(q, k, v, **call).transpose(1, 2)
        with sdpa_kernel(self.kernel):
            return F.scaled_dot_product_attention(q, k, v, **call).transpose(1, 2)


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
    if name == "flash_attn2":
        _check_flash_attn2(device, dtype, head_dim)
        return FlashAttn2()
    if name == "reference":
        return Reference()
    if name in ("sdpa:cudnn", "sdpa:efficient") and device.type != "cuda":
        raise ValueError(f"{name} runs on a GPU only; use sdpa on a {device.type}")
    if name == "sdpa:efficient" and grouped:
        raise ValueError("sdpa:efficient takes no grouped heads: set model.n_kv_head=0")
    if name == "sdpa:flash" and not plain:
        raise ValueError("sdpa:flash takes no mask but causal: no windows, and data.document_mask=False")
    if name in ("sdpa:flash", "sdpa:cudnn") and device.type == "cuda" and dtype == torch.float32:
        raise ValueError(f"{name} takes float16 and bfloat16, not {dtype}")
    attention = Sdpa(SDPA_KERNELS.get(name))
    if name in SDPA_KERNELS:
        _try(name, attention, device, dtype, head_dim, 2 if grouped else 1)
    return attention


def _try(name: str, attention: Attention, device: torch.device, dtype: torch.dtype, head_dim: int, group: int) -> None:
    """One small call: torch's kernels know their own limits (widths, cards), and change them between versions."""
    q, k, v = (torch.zeros(1, 16, heads, head_dim, device=device, dtype=dtype, requires_grad=True)
               for heads in (group, 1, 1))
    try:
        attention(q, k, v, attention.mask(16, 0, None, device)).sum().backward()
    except RuntimeError as error:
        raise ValueError(f"{name} cannot do head width {head_dim} in {dtype} on {device}: {error}") from error


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
