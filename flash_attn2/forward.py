"""The forward pass: one program per tile of queries walks the keys that any of them sees.

    s = q k^T          m = max(m, scale s)        p = exp2(scale s - m)
    l = l alpha + rowsum(p)      acc = acc alpha + p v      with alpha = exp2(m_old - m)

The accumulator stays unnormalised and is divided by l once, at the end; only lse = m + log l is kept for the backward
(FlashAttention-2, Dao 2023, algorithm 1). Inside, exponents are base 2: scale_log2 = softmax_scale * log2(e).
"""
import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from .masks import Mask, first_row, interval, tile_range
from .tiles import load_rows, padded, store_rows, tile

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def capped(s, tanh_scale):
    """Softcap: tanh(s * softmax_scale / softcap). What multiplies it, softcap, is in scale_log2. s itself without."""
    if tanh_scale is not None:
        s = 1.0 - 2.0 / (tl.exp2(s * (tanh_scale * (2.0 * LOG2E))) + 1.0)
    return s


@triton.jit
def walk_keys(acc, m, l, q, k_base, v_base, stride_kt, stride_vt, Tk, lo, hi, begin, end, gap_at, gap,
              scale_log2, tanh_scale, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
              MASKED: tl.constexpr):
    """Key tiles begin .. end - 1; the edge walk (MASKED) jumps over `gap` full tiles at tile `gap_at`."""
    for step in range(begin, end):
        n0 = first_row(step, gap_at, gap, BLOCK_N, MASKED)
        k = load_rows(k_base, n0, Tk, stride_kt, D, D_PAD, BLOCK_N, WHOLE=not MASKED)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_scale)      # (BLOCK_M, BLOCK_N)
        if MASKED:
            j = n0 + tl.arange(0, BLOCK_N)
            s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        if MASKED:
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)                    # a row may have seen no key yet
        else:
            pivot = m_new
        p = tl.exp2(s * scale_log2 - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)
        v = load_rows(v_base, n0, Tk, stride_vt, D, D_PAD, BLOCK_N, WHOLE=not MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")  # (BLOCK_M, D_PAD)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["left", "right"])
def forward_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, lo_ptr, hi_ptr,
                   stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh,
                   stride_vb, stride_vt, stride_vh, stride_ob, stride_ot, stride_oh,
                   Tq, Tk, H, group, left, right, scale_log2, tanh_scale,
                   D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                   VECTORS: tl.constexpr):
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = (n_tiles - 1 - pid % n_tiles) * BLOCK_M       # causal: the longest rows first, head after head (K, V in L2)
    b = tl.cast(pid // n_tiles // H, tl.int64)
    h = tl.cast(pid // n_tiles % H, tl.int64)
    k_base = k_ptr + b * stride_kb + h // group * stride_kh
    v_base = v_ptr + b * stride_vb + h // group * stride_vh
    if VECTORS:
        lo_ptr += b * Tq
        hi_ptr += b * Tq
    i = m0 + tl.arange(0, BLOCK_M)
    lo, hi = interval(lo_ptr, hi_ptr, i, Tq, Tk, left, right, VECTORS)
    begin, full_begin, full_end, end = tile_range(lo_ptr, hi_ptr, m0, BLOCK_M, Tq, Tk, left, right, BLOCK_N, VECTORS)
    q = load_rows(q_ptr + b * stride_qb + h * stride_qh, m0, Tq, stride_qt, D, D_PAD, BLOCK_M, WHOLE=False)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    gap = full_end - full_begin
    acc, m, l = walk_keys(acc, m, l, q, k_base, v_base, stride_kt, stride_vt, Tk, lo, hi,
                          full_begin, full_end, 0, 0, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=False)
    acc, m, l = walk_keys(acc, m, l, q, k_base, v_base, stride_kt, stride_vt, Tk, lo, hi,
                          begin, end - gap, full_begin, gap, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=True)
    l = tl.where(l == 0.0, 1.0, l)                     # a row without keys: o = 0, and m = -inf makes its lse -inf
    lse = (m + tl.log2(l)) * LN2
    store_rows(o_ptr + b * stride_ob + h * stride_oh, acc / l[:, None], m0, Tq, stride_ot, D, D_PAD, BLOCK_M)
    tl.store(lse_ptr + (b * H + h) * Tq + i, lse, mask=i < Tq)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float,
            softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """-> o (B, Tq, H, D) as q, lse (B, H, Tq) float32 in nats. q (B, Tq, H, D), k and v (B, Tk, H_kv, D), checked."""
    B, Tq, H, D = q.shape
    Tk, H_kv = k.shape[1:3]
    o = torch.empty((B, Tq, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    q, k, v = map(addressable, (q, k, v))
    t = tile("forward", D, q.dtype, q.device)
    if o.numel() == 0:
        return o, lse
    with on_device(q):
        forward_kernel[(triton.cdiv(Tq, t.BLOCK_M) * B * H,)](
            q, k, v, o, lse, mask.lo, mask.hi, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *o.stride()[:3],
            Tq, Tk, H, H // H_kv, mask.left, mask.right, *scales(softmax_scale, softcap), D=D, D_PAD=padded(D),
            VECTORS=mask.lo is not None, **t._asdict())
    return o, lse


def scales(softmax_scale: float, softcap: float) -> tuple[float, float | None]:
    """scale_log2 and tanh_scale: the base-2 logit is scale_log2 * capped(s, tanh_scale)."""
    if softcap:
        return softcap * LOG2E.value, softmax_scale / softcap
    return softmax_scale * LOG2E.value, None


def addressable(x: Tensor) -> Tensor:
    """x, or one copy of it where the kernels could not walk its rows: last stride not 1, or 2^31 within a tile."""
    return x if x.stride(-1) == 1 and x.stride(1) < 2**23 else x.contiguous()


def on_device(x: Tensor):
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
