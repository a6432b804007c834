"""The forward pass: one program per tile of queries walks the keys that any of them sees.

    s = q k^T          m = max(m, scale s)        p = exp2(scale s - m)
    l = l alpha + rowsum(p)      acc = acc alpha + p v      with alpha = exp2(m_old - m)

The accumulator stays unnormalised and is divided by l once, at the end; only lse = m + log l is kept for the backward
(FlashAttention-2, Dao 2023, algorithm 1). Inside, exponents are base 2: scale_log2 = softmax_scale * log2(e).
"""
import contextlib
import threading

import torch
import triton
import triton.language as tl
from torch import Tensor

from .masks import Mask, first_row, interval, tile_range
from .tiles import addressable, descriptors_or_pointers, load_rows, padded, store_rows, tile

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def capped(s, tanh_scale):
    """Softcap: tanh(s * softmax_scale / softcap), whose factor softcap is in scale_log2; without a softcap s itself.
    Right to 1e-7, which softcap multiplies: `ops.check` bounds it."""
    if tanh_scale is not None:
        s = 1.0 - 2.0 / (tl.exp2(s * (tanh_scale * (2.0 * LOG2E))) + 1.0)
    return s


@triton.jit
def walk_keys(acc, m, l, q, k_src, v_src, b, h, k_strides, v_strides, Tk, lo, hi, begin, end, gap_at, gap,
              scale_log2, tanh_scale, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
              MASKED: tl.constexpr, TMA: tl.constexpr):
    """Key tiles begin .. end - 1; the edge walk (MASKED) jumps over `gap` full tiles at tile `gap_at`."""
    for step in range(begin, end):
        n0 = first_row(step, gap_at, gap, BLOCK_N, MASKED)
        k = load_rows(k_src, b, h, n0, Tk, k_strides, D, D_PAD, BLOCK_N, WHOLE=not MASKED, TMA=TMA)
        v = load_rows(v_src, b, h, n0, Tk, v_strides, D, D_PAD, BLOCK_N, WHOLE=not MASKED, TMA=TMA)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_scale)         # (BLOCK_M, BLOCK_N)
        if MASKED:
            j = n0 + tl.arange(0, BLOCK_N)
            s = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None]), s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * scale_log2)
        if MASKED:
            pivot = tl.where(m_new == float("-inf"), 0.0, m_new)                       # a row may have seen no key yet
        else:
            pivot = m_new
        p = tl.exp2(s * scale_log2 - pivot[:, None])
        alpha = tl.exp2(m - pivot)
        l = l * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")   # (BLOCK_M, D_PAD)
        m = m_new
    return acc, m, l


@triton.jit(do_not_specialize=["left", "right"])
def forward_kernel(q_ptr, k_src, v_src, o_ptr, lse_ptr, lo_ptr, hi_ptr, q_strides, k_strides, v_strides, o_strides,
                   Tq, Tk, H, group, left, right, scale_log2, tanh_scale, D: tl.constexpr, D_PAD: tl.constexpr,
                   BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    """A program is a query tile of one head. q, o (B, Tq, H, D); k, v (B, Tk, H_kv, D), pointers or descriptors;
    lse (B, H, Tq); lo, hi (B, Tq), or None for the closed form of left and right."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = (n_tiles - 1 - pid % n_tiles) * BLOCK_M       # causal: the longest rows first, head after head (K, V in L2)
    b = pid // n_tiles // H
    h = pid // n_tiles % H
    if lo_ptr is not None:
        lo_ptr += tl.cast(b, tl.int64) * Tq
        hi_ptr += tl.cast(b, tl.int64) * Tq
    i = m0 + tl.arange(0, BLOCK_M)
    lo, hi = interval(lo_ptr, hi_ptr, i, Tq, Tk, left, right)
    begin, full_begin, full_end, end = tile_range(lo_ptr, hi_ptr, m0, BLOCK_M, Tq, Tk, left, right, BLOCK_N)
    gap = full_end - full_begin
    q = load_rows(q_ptr, b, h, m0, Tq, q_strides, D, D_PAD, BLOCK_M)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    acc, m, l = walk_keys(acc, m, l, q, k_src, v_src, b, h // group, k_strides, v_strides, Tk, lo, hi,
                          full_begin, full_end, 0, 0, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=False, TMA=TMA)
    acc, m, l = walk_keys(acc, m, l, q, k_src, v_src, b, h // group, k_strides, v_strides, Tk, lo, hi,
                          begin, end - gap, full_begin, gap, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=True,
                          TMA=TMA)
    l = tl.where(l == 0.0, 1.0, l)                     # a row without keys: o = 0, and m = -inf makes its lse -inf
    lse = (m + tl.log2(l)) * LN2
    store_rows(o_ptr, acc / l[:, None], b, h, m0, Tq, o_strides, D, D_PAD, BLOCK_M)
    tl.store(lse_ptr + (tl.cast(b, tl.int64) * H + h) * Tq + i, lse, mask=i < Tq)


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float,
            softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """-> o (B, Tq, H, D) as q, lse (B, H, Tq) float32 in nats. q (B, Tq, H, D), k and v (B, Tk, H_kv, D), checked."""
    B, Tq, H, D = q.shape
    Tk, H_kv = k.shape[1:3]
    o = torch.empty((B, Tq, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    q, k, v = map(addressable, (q, k, v))
    if o.numel() == 0:
        return o, lse
    t = tile("forward", D, q.dtype, q.device)
    t, (k_src, v_src) = descriptors_or_pointers(t, t.BLOCK_N, k, v)
    with on_device(q):
        forward_kernel[(triton.cdiv(Tq, t.BLOCK_M) * B * H,)](
            q, k_src, v_src, o, lse, mask.lo, mask.hi, *(x.stride()[:3] for x in (q, k, v, o)),
            Tq, Tk, H, H // H_kv, mask.left, mask.right, *scales(softmax_scale, softcap), D=D, D_PAD=padded(D),
            **t._asdict())
    return o, lse


def scales(softmax_scale: float, softcap: float) -> tuple[float, float | None]:
    """scale_log2 and tanh_scale: the base-2 logit is scale_log2 * capped(s, tanh_scale)."""
    if softcap:
        return softcap * LOG2E.value, softmax_scale / softcap
    return softmax_scale * LOG2E.value, None


class _Thread(threading.local):
    def __init__(self):
        self.ready: set[torch.device] = set()


_thread = _Thread()


def on_device(x: Tensor):
    """Triton launches on the current device, which need not be the tensor's. It encodes descriptors in the CUDA context
    of the thread, and a new thread has none until something else has run there."""
    if not x.is_cuda:
        return contextlib.nullcontext()
    if x.device not in _thread.ready:
        torch.zeros(1, device=x.device)
        _thread.ready.add(x.device)
    return torch.cuda.device(x.device)
