"""The core call, its argument checks, and the two custom ops that torch.compile and checkpointing see."""
import os
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.flop_counter import register_flop_formula

from .dispatch import backward, check_choice, forward
from .masks import NO_BOUND, Mask, pairs

MAX_HEAD_DIM = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask,
                    softmax_scale: float | None = None, softcap: float = 0.0, kernels: str = "auto",
                    deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v over the keys that `mask` lets each query see, differentiable in q, k, v.

    q (B, Tq, H, D), k and v (B, Tk, H_kv, D), H a multiple of H_kv, D at most 256; float16 or bfloat16 (float32 for
    tests) of any strides; under autocast float32 becomes its dtype. softmax_scale > 0, 1 / sqrt(D) by default. softcap
    > 0 bends each logit x to softcap * tanh(x / softcap). Returns o (B, Tq, H, D) in q's dtype and lse (B, H, Tq) in
    float32, natural log, differentiable too. A query that sees no key gets o = 0, lse = -inf and no gradient. kernels:
    auto, hopper or triton (dispatch.py). Repeats bit for bit, but for dq of the Hopper kernels, which repeats to
    rounding; with deterministic=True, or torch's own switch, auto takes Triton's backward and hopper is an error.
    Raises ValueError or TypeError before any launch."""
    check_tensors(q=q, k=k, v=v)
    q, k, v = _autocast(q, k, v)
    check(q, k, v, mask, softmax_scale, softcap)
    check_choice(kernels, deterministic)
    return FlashAttention2.apply(q, k, v, mask.lo, mask.hi, mask.q_lo, mask.q_hi, mask.left, mask.right,
                                 scale_of(q, softmax_scale), float(softcap), kernels, bool(deterministic))


def scale_of(q: Tensor, softmax_scale: float | None) -> float:
    """softmax_scale, 1 / sqrt(head width) by default."""
    return q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)


class FlashAttention2(torch.autograd.Function):
    """Saves tensors and calls the two ops, nothing else. The second has none: torch says so when a derivative of it is
    asked for."""

    @staticmethod
    def forward(ctx, q, k, v, lo, hi, q_lo, q_hi, left, right, softmax_scale, softcap, kernels, deterministic):
        o, lse = torch.ops.flash_attn2.forward(q, k, v, lo, hi, left, right, softmax_scale, softcap, kernels)
        ctx.save_for_backward(q, k, v, o, lse, lo, hi, q_lo, q_hi)
        ctx.scalars = left, right, softmax_scale, softcap, kernels, deterministic
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse, *bounds = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        grads = torch.ops.flash_attn2.backward(do, dlse, q, k, v, o, lse, *bounds, *ctx.scalars)
        return *grads, *[None] * 10


@custom_op("flash_attn2::forward", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, lo: Tensor | None, hi: Tensor | None, left: int, right: int,
             softmax_scale: float, softcap: float, kernels: str) -> tuple[Tensor, Tensor]:
    return forward(q, k, v, Mask(left, right, lo, hi), softmax_scale, softcap, kernels)


@_forward.register_fake
def _(q, k, v, lo, hi, left, right, softmax_scale, softcap, kernels):
    B, Tq, H, D = q.shape
    return q.new_empty(B, Tq, H, D), q.new_empty(B, H, Tq, dtype=torch.float32)


@custom_op("flash_attn2::backward", mutates_args=())
def _backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
              lo: Tensor | None, hi: Tensor | None, q_lo: Tensor | None, q_hi: Tensor | None,
              left: int, right: int, softmax_scale: float, softcap: float, kernels: str,
              deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    mask = Mask(left, right, lo, hi, q_lo, q_hi)
    return backward(do, dlse, q, k, v, o, lse, mask, softmax_scale, softcap, kernels, deterministic)


@_backward.register_fake
def _(do, dlse, q, k, v, o, lse, lo, hi, q_lo, q_hi, left, right, softmax_scale, softcap, kernels, deterministic):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@register_flop_formula(torch.ops.flash_attn2.forward, get_raw=True)
def forward_flops(q, k, v, lo, hi, left, right, *_, **__) -> int:
    """Two products of 2 D FLOPs for each pair that attends, in each head; masked pairs are not counted."""
    B, Tq, H, D = q.shape
    return 4 * D * H * pairs(Mask(left, right, lo, hi), B, Tq, k.shape[1])


@register_flop_formula(torch.ops.flash_attn2.backward, get_raw=True)
def backward_flops(do, dlse, q, k, v, o, lse, lo, hi, q_lo, q_hi, left, right, *_, **__) -> int:
    """Five products where the forward has two: what the mathematics needs, not the seven that the Triton pair runs."""
    return forward_flops(q, k, v, lo, hi, left, right) * 5 // 2


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    kind = tensors[0].device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return tensors
    return tuple(x.to(torch.get_autocast_dtype(kind)) if x.dtype == torch.float32 else x for x in tensors)


def check_tensors(**tensors) -> None:
    """TypeError: an argument that is no tensor, by its name."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a tensor")


def check(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float | None, softcap: float = 0.0) -> None:
    """Raises ValueError or TypeError with the name, the value and the rule."""
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dim() != 4:
            raise ValueError(f"{name} must be (batch, tokens, heads, head width), not {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; it must be float16, bfloat16 or float32")
        if x.dtype != q.dtype or x.device != q.device:
            raise TypeError(f"{name} is {x.dtype} on {x.device}, q is {q.dtype} on {q.device}: they must agree")
    (B, Tq, H, D), (Bk, Tk, H_kv, Dk) = q.shape, k.shape
    if v.shape != k.shape:
        raise ValueError(f"v {tuple(v.shape)} must have k's shape {tuple(k.shape)}")
    if (Bk, Dk) != (B, D):
        raise ValueError(f"k {tuple(k.shape)} must have q's batch {B} and head width {D}")
    if H_kv == 0 or H % H_kv:
        raise ValueError(f"q's {H} heads must be a multiple of k's {H_kv}")
    if not 0 < D <= MAX_HEAD_DIM:
        raise ValueError(f"head width {D} must lie between 1 and {MAX_HEAD_DIM}")
    if H * D >= 2**23:
        raise ValueError(f"q's {H} heads of width {D} make a row of {H * D} numbers; it must have fewer than 2^23")
    for name, x in dict(softmax_scale=0.0 if softmax_scale is None else softmax_scale, softcap=softcap).items():
        if isinstance(x, Tensor | str | None):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be a number (it has no gradient)")
    if softmax_scale is not None and not 1e-30 <= softmax_scale <= 1e30:
        raise ValueError(f"softmax_scale={float(softmax_scale)} must be positive and finite, within 1e-30 and 1e30")
    if softcap and not 1e-3 <= softcap <= 1e3:
        raise ValueError(f"softcap={float(softcap)} must be 0 (none) or lie between 0.001 and 1000")
    _check_mask(mask, B, Tq, Tk, q.device)
    if q.device.type == "cpu":
        _check_interpreter(q)


def _check_mask(mask: Mask, B: int, Tq: int, Tk: int, device: torch.device) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(f"mask is a {type(mask).__name__}; it must be a flash_attn2.Mask, such as causal_mask()")
    if not all(isinstance(n, SupportsIndex) and 0 <= n <= NO_BOUND for n in (mask.left, mask.right)):
        raise ValueError(f"mask: left={mask.left} and right={mask.right} must be integers between 0 and "
                         f"{NO_BOUND} (no bound)")
    vectors = dict(lo=Tq, hi=Tq, q_lo=Tk, q_hi=Tk)
    absent = [name for name in vectors if getattr(mask, name) is None]
    if absent and len(absent) < len(vectors):
        raise ValueError(f"mask: all of {', '.join(vectors)} or none; missing {', '.join(absent)}")
    for name, T in vectors.items() if not absent else ():
        x = getattr(mask, name)
        if x.shape != (B, T) or x.dtype != torch.int32 or x.device != device or not x.is_contiguous():
            raise ValueError(f"mask.{name} is {tuple(x.shape)} {x.dtype} on {x.device}; it must be contiguous "
                             f"{(B, T)} int32 on {device}")


def _check_interpreter(q: Tensor) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("flash_attn2 runs on a CPU only through Triton's interpreter: set TRITON_INTERPRET=1 before "
                         "the import")
    if q.dtype == torch.bfloat16:
        raise TypeError("bfloat16 is silently wrong in Triton's interpreter: use float32 or float16 on a CPU")
