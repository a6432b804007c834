"""Which pair of kernels runs: Gluon's on Hopper where it can, Triton's everywhere else. The rule, in one place.

    auto      Hopper's where it can, Triton's elsewhere
    hopper    Hopper's; ValueError where it cannot
    triton    Triton's: every card, dtype and width, softcap, and a backward that repeats bit for bit

Hopper's backward adds up dq in any order. So where `torch.use_deterministic_algorithms` or `deterministic=True` asks
for the same bits each time, auto's backward is Triton's.
"""
import functools
import logging

import torch
from torch import Tensor

from . import backward as triton_backward
from . import forward as triton_forward
from . import hopper
from .masks import Mask
from .tiles import tma_can

KERNELS = ("auto", "hopper", "triton")
HEAD_DIMS = (64, 128)
DTYPES = (torch.float16, torch.bfloat16)
MAX_ROWS = 2**29        # query rows of all heads: two float32 numbers each in one TMA coordinate


def why_not_hopper(q: Tensor, k: Tensor, v: Tensor, softcap: float = 0.0) -> str | None:
    """What of q (B, Tq, H, D), k, v (B, Tk, H_kv, D) the Hopper pair does not take, in words. None: it takes them."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "no sm_90 card"
    if hopper.VERSION not in hopper.KNOWN:
        _log_version()
        return f"triton {hopper.VERSION}, Gluon known for {', '.join(hopper.KNOWN)}"
    if q.dtype not in DTYPES:
        return str(q.dtype).removeprefix("torch.")
    if q.shape[-1] not in HEAD_DIMS:
        return f"head width {q.shape[-1]}"
    if softcap:
        return "softcap"
    if not all(map(tma_can, (q, k, v))):
        return "strides or base that TMA cannot address: empty, expanded, or no multiples of 16 bytes"
    if q.shape[:3].numel() > MAX_ROWS:
        return f"more than 2^29 query rows over all heads, {q.shape[:3].numel()}"
    return None


def check_choice(kernels: str, deterministic: bool) -> None:
    """ValueError: no pair of this name, or one that cannot repeat bit for bit."""
    if kernels not in KERNELS:
        raise ValueError(f"{kernels=} must be one of {', '.join(KERNELS)}")
    if kernels == "hopper" and deterministic:
        raise ValueError("kernels='hopper' sums dq in any order; for a deterministic backward use auto or triton")


def which(*of) -> str:
    """What auto takes, in words: hopper, or triton and why."""
    reason = why_not_hopper(*of)
    return f"triton: {reason}" if reason else "hopper"


@functools.cache
def _log_version() -> None:
    logging.getLogger(__name__).warning("the Hopper kernels are written for Gluon of triton %s, this is %s: the Triton "
                                        "pair runs, slower", ", ".join(hopper.KNOWN), hopper.VERSION)


def on_hopper(kernels: str, *of) -> bool:
    """Whether the Hopper pair runs; `of` are why_not_hopper's arguments. ValueError: it must and it cannot."""
    if kernels == "triton":
        return False
    reason = why_not_hopper(*of)
    if reason and kernels == "hopper":
        raise ValueError(f"kernels='hopper' does not take this: {reason}; use auto or triton")
    return reason is None


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float, softcap: float = 0.0,
            kernels: str = "auto") -> tuple[Tensor, Tensor]:
    """-> o (B, Tq, H, D) as q, lse (B, H, Tq) float32 in nats."""
    if on_hopper(kernels, q, k, v, softcap):
        from .hopper.forward import forward
        return forward(q, k, v, mask, softmax_scale)
    return triton_forward.forward(q, k, v, mask, softmax_scale, softcap)


def backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask,
             softmax_scale: float, softcap: float = 0.0, kernels: str = "auto",
             deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, contiguous, shaped as q, k, v. do (B, Tq, H, D), any strides; dlse (B, H, Tq) float32 or None."""
    repeats = deterministic or torch.are_deterministic_algorithms_enabled()
    check_choice(kernels, repeats)
    if repeats and kernels == "auto":
        kernels = "triton"
    if on_hopper(kernels, q, k, v, softcap):
        from .hopper.backward import backward
        return backward(do, dlse, q, k, v, o, lse, mask, softmax_scale)
    return triton_backward.backward(do, dlse, q, k, v, o, lse, mask, softmax_scale, softcap)
