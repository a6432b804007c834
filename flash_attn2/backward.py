"""The backward pass: delta, then dQ over query tiles, then dK and dV over key tiles. No atomics: bitwise repeatable.

    p = exp(scale s - lse)    dv = p^T do    dp = do v^T    ds = p (dp - delta)    dk = scale ds^T q    dq = scale ds k

with delta = rowsum(do * o) - dlse (FlashAttention-2, algorithm 2; the lse gradient is one more term of rowsum).
p is recomputed from lse, so nothing of size Tq x Tk is ever stored. The key-tile kernel works on S^T: its products then
need no transposed accumulator. Grouped heads are walked inside one program, so dK and dV need no larger buffer.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import LOG2E, capped, on_device, scales
from .masks import Mask, first_row, interval, tile_range
from .tiles import addressable, descriptors_or_pointers, load_rows, padded, store_rows, tile

DELTA_ROWS = 64     # of a program; the work is all loads


@triton.jit
def delta_kernel(o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, o_strides, do_strides, Tq, H,
                 D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr):
    """delta = rowsum(do * o) - dlse, all (B, H, Tq) float32; dlse may be None."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = pid % n_tiles * BLOCK_M
    b = pid // n_tiles // H
    h = pid // n_tiles % H
    o = load_rows(o_ptr, b, h, m0, Tq, o_strides, D, D_PAD, BLOCK_M)
    do = load_rows(do_ptr, b, h, m0, Tq, do_strides, D, D_PAD, BLOCK_M)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    i = m0 + tl.arange(0, BLOCK_M)
    row = (tl.cast(b, tl.int64) * H + h) * Tq + i
    if dlse_ptr is not None:
        lse = tl.load(lse_ptr + row, mask=i < Tq, other=0.0)
        dlse = tl.load(dlse_ptr + row, mask=i < Tq, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)       # a row without keys has a constant lse
    tl.store(delta_ptr + row, delta, mask=i < Tq)


@triton.jit
def walk_queries(dk, dv, k, v, q_src, do_src, b, h, q_strides, do_strides, lse_ptr, delta_ptr, Tq, q_lo, q_hi,
                 begin, end, gap_at, gap, scale_log2, tanh_scale, D: tl.constexpr, D_PAD: tl.constexpr,
                 BLOCK_M: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr):
    """Query tiles begin .. end - 1; the edge walk (MASKED) jumps over `gap` full tiles at tile `gap_at`."""
    for step in range(begin, end):
        m0 = first_row(step, gap_at, gap, BLOCK_M, MASKED)
        i = m0 + tl.arange(0, BLOCK_M)
        q = load_rows(q_src, b, h, m0, Tq, q_strides, D, D_PAD, BLOCK_M, WHOLE=not MASKED, TMA=TMA)
        if MASKED:
            lse = tl.load(lse_ptr + i, mask=i < Tq, other=0.0)
            delta = tl.load(delta_ptr + i, mask=i < Tq, other=0.0)
        else:
            lse = tl.load(lse_ptr + i)
            delta = tl.load(delta_ptr + i)
        s_t = capped(tl.dot(k, tl.trans(q), input_precision="ieee"), tanh_scale)       # (BLOCK_N, BLOCK_M)
        p_t = tl.exp2(s_t * scale_log2 - (lse * LOG2E)[None, :])
        if MASKED:
            p_t = tl.where((i[None, :] >= q_lo[:, None]) & (i[None, :] <= q_hi[:, None]), p_t, 0.0)
        # do after s, and dv before ds: on the tile of head width 128 that took 498 TFLOP/s to 641 (LOG.md)
        do = load_rows(do_src, b, h, m0, Tq, do_strides, D, D_PAD, BLOCK_M, WHOLE=not MASKED, TMA=TMA)
        dp_t = tl.dot(v, tl.trans(do), input_precision="ieee")                         # (BLOCK_N, BLOCK_M)
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision="ieee")                  # (BLOCK_N, D_PAD)
        ds_t = p_t * (dp_t - delta[None, :])
        if tanh_scale is not None:
            ds_t *= 1.0 - s_t * s_t
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision="ieee")                   # (BLOCK_N, D_PAD)
    return dk, dv


@triton.jit(do_not_specialize=["left", "right"])
def dkdv_kernel(q_src, k_ptr, v_ptr, do_src, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_lo_ptr, q_hi_ptr,
                q_strides, k_strides, v_strides, do_strides, grad_strides,
                Tq, Tk, H_kv, group, left, right, softmax_scale, scale_log2, tanh_scale,
                D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                TMA: tl.constexpr):
    """A program is a key tile of one key head. q, do (B, Tq, H, D), pointers or descriptors; k, v, dk, dv
    (B, Tk, H_kv, D); lse, delta (B, H, Tq); q_lo, q_hi (B, Tk), or None for the closed form of left and right."""
    n_tiles = tl.cdiv(Tk, BLOCK_N)
    pid = tl.program_id(0)
    n0 = pid % n_tiles * BLOCK_N                       # causal: early keys are seen by the most queries, so first
    b = pid // n_tiles // H_kv
    h_kv = pid // n_tiles % H_kv
    if q_lo_ptr is not None:
        q_lo_ptr += tl.cast(b, tl.int64) * Tk
        q_hi_ptr += tl.cast(b, tl.int64) * Tk
    j = n0 + tl.arange(0, BLOCK_N)
    q_lo, q_hi = interval(q_lo_ptr, q_hi_ptr, j, Tk, Tq, right, left)
    begin, full_begin, full_end, end = tile_range(q_lo_ptr, q_hi_ptr, n0, BLOCK_N, Tk, Tq, right, left, BLOCK_M)
    gap = full_end - full_begin
    k = load_rows(k_ptr, b, h_kv, n0, Tk, k_strides, D, D_PAD, BLOCK_N)
    v = load_rows(v_ptr, b, h_kv, n0, Tk, v_strides, D, D_PAD, BLOCK_N)
    dk = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    for h in range(h_kv * group, h_kv * group + group):
        row = (tl.cast(b, tl.int64) * H_kv * group + h) * Tq
        dk, dv = walk_queries(dk, dv, k, v, q_src, do_src, b, h, q_strides, do_strides, lse_ptr + row, delta_ptr + row,
                              Tq, q_lo, q_hi, begin, end - gap, full_begin, gap, scale_log2, tanh_scale, D, D_PAD,
                              BLOCK_M, MASKED=True, TMA=TMA)
        dk, dv = walk_queries(dk, dv, k, v, q_src, do_src, b, h, q_strides, do_strides, lse_ptr + row, delta_ptr + row,
                              Tq, q_lo, q_hi, full_begin, full_end, 0, 0, scale_log2, tanh_scale, D, D_PAD,
                              BLOCK_M, MASKED=False, TMA=TMA)
    store_rows(dk_ptr, dk * softmax_scale, b, h_kv, n0, Tk, grad_strides, D, D_PAD, BLOCK_N)
    store_rows(dv_ptr, dv, b, h_kv, n0, Tk, grad_strides, D, D_PAD, BLOCK_N)


@triton.jit
def walk_keys_for_dq(dq, q, do, lse_log2, delta, k_src, v_src, b, h, k_strides, v_strides, Tk, lo, hi,
                     begin, end, gap_at, gap, scale_log2, tanh_scale, D: tl.constexpr, D_PAD: tl.constexpr,
                     BLOCK_N: tl.constexpr, MASKED: tl.constexpr, TMA: tl.constexpr):
    for step in range(begin, end):
        n0 = first_row(step, gap_at, gap, BLOCK_N, MASKED)
        k = load_rows(k_src, b, h, n0, Tk, k_strides, D, D_PAD, BLOCK_N, WHOLE=not MASKED, TMA=TMA)
        v = load_rows(v_src, b, h, n0, Tk, v_strides, D, D_PAD, BLOCK_N, WHOLE=not MASKED, TMA=TMA)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_scale)         # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s * scale_log2 - lse_log2[:, None])
        if MASKED:
            j = n0 + tl.arange(0, BLOCK_N)
            p = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")                           # (BLOCK_M, BLOCK_N)
        ds = p * (dp - delta[:, None])
        if tanh_scale is not None:
            ds *= 1.0 - s * s
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")                     # (BLOCK_M, D_PAD)
    return dq


@triton.jit(do_not_specialize=["left", "right"])
def dq_kernel(q_ptr, k_src, v_src, do_ptr, lse_ptr, delta_ptr, dq_ptr, lo_ptr, hi_ptr,
              q_strides, k_strides, v_strides, do_strides, grad_strides,
              Tq, Tk, H, group, left, right, softmax_scale, scale_log2, tanh_scale,
              D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              TMA: tl.constexpr):
    """A program is a query tile of one head. q, do, dq (B, Tq, H, D); k, v (B, Tk, H_kv, D), pointers or descriptors;
    lse, delta (B, H, Tq); lo, hi (B, Tq), or None for the closed form of left and right."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = (n_tiles - 1 - pid % n_tiles) * BLOCK_M       # causal: the longest rows first
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
    do = load_rows(do_ptr, b, h, m0, Tq, do_strides, D, D_PAD, BLOCK_M)
    row = (tl.cast(b, tl.int64) * H + h) * Tq + i
    lse_log2 = tl.load(lse_ptr + row, mask=i < Tq, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + row, mask=i < Tq, other=0.0)
    dq = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    dq = walk_keys_for_dq(dq, q, do, lse_log2, delta, k_src, v_src, b, h // group, k_strides, v_strides, Tk, lo, hi,
                          full_begin, full_end, 0, 0, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=False, TMA=TMA)
    dq = walk_keys_for_dq(dq, q, do, lse_log2, delta, k_src, v_src, b, h // group, k_strides, v_strides, Tk, lo, hi,
                          begin, end - gap, full_begin, gap, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=True,
                          TMA=TMA)
    store_rows(dq_ptr, dq * softmax_scale, b, h, m0, Tq, grad_strides, D, D_PAD, BLOCK_M)


def backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask,
             softmax_scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, contiguous, shaped as q, k, v. do (B, Tq, H, D), any strides; dlse (B, H, Tq) float32 or None."""
    q, k, v, o, do = map(addressable, (q, k, v, o, do))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    B, Tq, H, D = q.shape
    Tk, H_kv = k.shape[1:3]
    strides = [x.stride()[:3] for x in (q, k, v, do)]
    scalars = (mask.left, mask.right, softmax_scale, *scales(softmax_scale, softcap))
    with on_device(q):
        delta = rowsum_delta(o, do, lse, dlse)
        if q.numel():
            t = tile("dq", D, q.dtype, q.device)
            t, (k_src, v_src) = descriptors_or_pointers(t, t.BLOCK_N, k, v)
            dq_kernel[(triton.cdiv(Tq, t.BLOCK_M) * B * H,)](
                q, k_src, v_src, do, lse, delta, dq, mask.lo, mask.hi, *strides, dq.stride()[:3],
                Tq, Tk, H, H // H_kv, *scalars, D=D, D_PAD=padded(D), **t._asdict())
        if k.numel():
            t = tile("dkdv", D, q.dtype, q.device)
            t, (q_src, do_src) = descriptors_or_pointers(t, t.BLOCK_M, q, do)
            dkdv_kernel[(triton.cdiv(Tk, t.BLOCK_N) * B * H_kv,)](
                q_src, k, v, do_src, lse, delta, dk, dv, mask.q_lo, mask.q_hi, *strides, dk.stride()[:3],
                Tq, Tk, H_kv, H // H_kv, *scalars, D=D, D_PAD=padded(D), **t._asdict())
    return dq, dk, dv


def rowsum_delta(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(do * o) - dlse, (B, H, Tq) float32. Called on o's device."""
    B, Tq, H, D = o.shape
    delta = torch.empty_like(lse)
    if o.numel():
        dlse = None if dlse is None else dlse.contiguous()
        delta_kernel[(triton.cdiv(Tq, DELTA_ROWS) * B * H,)](
            o, do, lse, dlse, delta, o.stride()[:3], do.stride()[:3], Tq, H, D=D, D_PAD=padded(D), BLOCK_M=DELTA_ROWS)
    return delta
