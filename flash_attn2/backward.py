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

from .forward import LOG2E, addressable, capped, on_device, scales
from .masks import Mask, first_row, interval, tile_range
from .tiles import load_rows, padded, store_rows, tile


@triton.jit
def delta_kernel(o_ptr, do_ptr, lse_ptr, dlse_ptr, delta_ptr, stride_ob, stride_ot, stride_oh, stride_db, stride_dt,
                 stride_dh, Tq, H, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, HAS_DLSE: tl.constexpr):
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = pid % n_tiles * BLOCK_M
    b = tl.cast(pid // n_tiles // H, tl.int64)
    h = tl.cast(pid // n_tiles % H, tl.int64)
    o = load_rows(o_ptr + b * stride_ob + h * stride_oh, m0, Tq, stride_ot, D, D_PAD, BLOCK_M, WHOLE=False)
    do = load_rows(do_ptr + b * stride_db + h * stride_dh, m0, Tq, stride_dt, D, D_PAD, BLOCK_M, WHOLE=False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    i = m0 + tl.arange(0, BLOCK_M)
    row = (b * H + h) * Tq + i
    if HAS_DLSE:
        lse = tl.load(lse_ptr + row, mask=i < Tq, other=0.0)
        dlse = tl.load(dlse_ptr + row, mask=i < Tq, other=0.0)
        delta -= tl.where(lse == float("-inf"), 0.0, dlse)       # a row without keys has a constant lse
    tl.store(delta_ptr + row, delta, mask=i < Tq)


@triton.jit
def walk_queries(dk, dv, k, v, q_base, do_base, lse_ptr, delta_ptr, stride_qt, stride_dt, Tq, q_lo, q_hi,
                 begin, end, gap_at, gap, scale_log2, tanh_scale, D: tl.constexpr, D_PAD: tl.constexpr,
                 BLOCK_M: tl.constexpr, MASKED: tl.constexpr):
    """Query tiles begin .. end - 1; the edge walk (MASKED) jumps over `gap` full tiles at tile `gap_at`."""
    for step in range(begin, end):
        m0 = first_row(step, gap_at, gap, BLOCK_M, MASKED)
        i = m0 + tl.arange(0, BLOCK_M)
        q = load_rows(q_base, m0, Tq, stride_qt, D, D_PAD, BLOCK_M, WHOLE=not MASKED)
        do = load_rows(do_base, m0, Tq, stride_dt, D, D_PAD, BLOCK_M, WHOLE=not MASKED)
        lse = tl.load(lse_ptr + i, mask=i < Tq, other=0.0)
        delta = tl.load(delta_ptr + i, mask=i < Tq, other=0.0)
        s_t = capped(tl.dot(k, tl.trans(q), input_precision="ieee"), tanh_scale)    # (BLOCK_N, BLOCK_M)
        p_t = tl.exp2(s_t * scale_log2 - (lse * LOG2E)[None, :])
        if MASKED:
            p_t = tl.where((i[None, :] >= q_lo[:, None]) & (i[None, :] <= q_hi[:, None]), p_t, 0.0)
        dp_t = tl.dot(v, tl.trans(do), input_precision="ieee")                      # (BLOCK_N, BLOCK_M)
        ds_t = p_t * (dp_t - delta[None, :])
        if tanh_scale is not None:
            ds_t *= 1.0 - s_t * s_t
        dv = tl.dot(p_t.to(do.dtype), do, dv, input_precision="ieee")               # (BLOCK_N, D_PAD)
        dk = tl.dot(ds_t.to(q.dtype), q, dk, input_precision="ieee")                # (BLOCK_N, D_PAD)
    return dk, dv


@triton.jit(do_not_specialize=["left", "right"])
def dkdv_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, q_lo_ptr, q_hi_ptr,
                stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                stride_db, stride_dt, stride_dh, stride_gb, stride_gt, stride_gh,
                Tq, Tk, H_kv, group, left, right, softmax_scale, scale_log2, tanh_scale,
                D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                VECTORS: tl.constexpr):
    n_tiles = tl.cdiv(Tk, BLOCK_N)
    pid = tl.program_id(0)
    n0 = pid % n_tiles * BLOCK_N                       # causal: early keys are seen by the most queries, so first
    b = tl.cast(pid // n_tiles // H_kv, tl.int64)
    h_kv = tl.cast(pid // n_tiles % H_kv, tl.int64)
    if VECTORS:
        q_lo_ptr += b * Tk
        q_hi_ptr += b * Tk
    j = n0 + tl.arange(0, BLOCK_N)
    q_lo, q_hi = interval(q_lo_ptr, q_hi_ptr, j, Tk, Tq, right, left, VECTORS)
    begin, full_begin, full_end, end = tile_range(q_lo_ptr, q_hi_ptr, n0, BLOCK_N, Tk, Tq, right, left, BLOCK_M,
                                                  VECTORS)
    gap = full_end - full_begin
    k = load_rows(k_ptr + b * stride_kb + h_kv * stride_kh, n0, Tk, stride_kt, D, D_PAD, BLOCK_N, WHOLE=False)
    v = load_rows(v_ptr + b * stride_vb + h_kv * stride_vh, n0, Tk, stride_vt, D, D_PAD, BLOCK_N, WHOLE=False)
    dk = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    dv = tl.zeros([BLOCK_N, D_PAD], tl.float32)
    for g in range(group):
        h = h_kv * group + g
        q_base = q_ptr + b * stride_qb + h * stride_qh
        do_base = do_ptr + b * stride_db + h * stride_dh
        row = (b * H_kv * group + h) * Tq
        dk, dv = walk_queries(dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, stride_qt, stride_dt, Tq,
                              q_lo, q_hi, begin, end - gap, full_begin, gap, scale_log2, tanh_scale, D, D_PAD, BLOCK_M,
                              MASKED=True)
        dk, dv = walk_queries(dk, dv, k, v, q_base, do_base, lse_ptr + row, delta_ptr + row, stride_qt, stride_dt, Tq,
                              q_lo, q_hi, full_begin, full_end, 0, 0, scale_log2, tanh_scale, D, D_PAD, BLOCK_M,
                              MASKED=False)
    grad = b * stride_gb + h_kv * stride_gh
    store_rows(dk_ptr + grad, dk * softmax_scale, n0, Tk, stride_gt, D, D_PAD, BLOCK_N)
    store_rows(dv_ptr + grad, dv, n0, Tk, stride_gt, D, D_PAD, BLOCK_N)


@triton.jit
def walk_keys_for_dq(dq, q, do, lse_log2, delta, k_base, v_base, stride_kt, stride_vt, Tk, lo, hi,
                     begin, end, gap_at, gap, scale_log2, tanh_scale,
                     D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr):
    for step in range(begin, end):
        n0 = first_row(step, gap_at, gap, BLOCK_N, MASKED)
        k = load_rows(k_base, n0, Tk, stride_kt, D, D_PAD, BLOCK_N, WHOLE=not MASKED)
        v = load_rows(v_base, n0, Tk, stride_vt, D, D_PAD, BLOCK_N, WHOLE=not MASKED)
        s = capped(tl.dot(q, tl.trans(k), input_precision="ieee"), tanh_scale)      # (BLOCK_M, BLOCK_N)
        p = tl.exp2(s * scale_log2 - lse_log2[:, None])
        if MASKED:
            j = n0 + tl.arange(0, BLOCK_N)
            p = tl.where((j[None, :] >= lo[:, None]) & (j[None, :] <= hi[:, None]), p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")                        # (BLOCK_M, BLOCK_N)
        ds = p * (dp - delta[:, None])
        if tanh_scale is not None:
            ds *= 1.0 - s * s
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")                  # (BLOCK_M, D_PAD)
    return dq


@triton.jit(do_not_specialize=["left", "right"])
def dq_kernel(q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, lo_ptr, hi_ptr,
              stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
              stride_db, stride_dt, stride_dh, stride_gb, stride_gt, stride_gh,
              Tq, Tk, H, group, left, right, softmax_scale, scale_log2, tanh_scale,
              D: tl.constexpr, D_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
              VECTORS: tl.constexpr):
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = (n_tiles - 1 - pid % n_tiles) * BLOCK_M       # causal: the longest rows first
    b = tl.cast(pid // n_tiles // H, tl.int64)
    h = tl.cast(pid // n_tiles % H, tl.int64)
    if VECTORS:
        lo_ptr += b * Tq
        hi_ptr += b * Tq
    i = m0 + tl.arange(0, BLOCK_M)
    lo, hi = interval(lo_ptr, hi_ptr, i, Tq, Tk, left, right, VECTORS)
    begin, full_begin, full_end, end = tile_range(lo_ptr, hi_ptr, m0, BLOCK_M, Tq, Tk, left, right, BLOCK_N, VECTORS)
    gap = full_end - full_begin
    k_base = k_ptr + b * stride_kb + h // group * stride_kh
    v_base = v_ptr + b * stride_vb + h // group * stride_vh
    q = load_rows(q_ptr + b * stride_qb + h * stride_qh, m0, Tq, stride_qt, D, D_PAD, BLOCK_M, WHOLE=False)
    do = load_rows(do_ptr + b * stride_db + h * stride_dh, m0, Tq, stride_dt, D, D_PAD, BLOCK_M, WHOLE=False)
    row = (b * H + h) * Tq + i
    lse_log2 = tl.load(lse_ptr + row, mask=i < Tq, other=0.0) * LOG2E
    delta = tl.load(delta_ptr + row, mask=i < Tq, other=0.0)
    dq = tl.zeros([BLOCK_M, D_PAD], tl.float32)
    dq = walk_keys_for_dq(dq, q, do, lse_log2, delta, k_base, v_base, stride_kt, stride_vt, Tk, lo, hi,
                          full_begin, full_end, 0, 0, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=False)
    dq = walk_keys_for_dq(dq, q, do, lse_log2, delta, k_base, v_base, stride_kt, stride_vt, Tk, lo, hi,
                          begin, end - gap, full_begin, gap, scale_log2, tanh_scale, D, D_PAD, BLOCK_N, MASKED=True)
    store_rows(dq_ptr + b * stride_gb + h * stride_gh, dq * softmax_scale, m0, Tq, stride_gt, D, D_PAD, BLOCK_M)


def backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask,
             softmax_scale: float, softcap: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, contiguous, shaped as q, k, v. do (B, Tq, H, D), any strides; dlse (B, H, Tq) float32 or None."""
    q, k, v, o, do = map(addressable, (q, k, v, o, do))
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    B, Tq, H, D = q.shape
    Tk, H_kv = k.shape[1:3]
    inputs = (q, k, v, do, lse, delta)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    masked = (mask.left, mask.right, softmax_scale, *scales(softmax_scale, softcap))
    static = dict(D=D, D_PAD=padded(D), VECTORS=mask.lo is not None)
    with on_device(q):
        if q.numel():
            _delta(o, do, lse, dlse, delta)
            t = tile("dq", D, q.dtype, q.device)
            dq_kernel[(triton.cdiv(Tq, t.BLOCK_M) * B * H,)](
                *inputs, dq, mask.lo, mask.hi, *strides, *dq.stride()[:3], Tq, Tk, H, H // H_kv, *masked,
                **static, **t._asdict())
        if k.numel():
            t = tile("dkdv", D, q.dtype, q.device)
            dkdv_kernel[(triton.cdiv(Tk, t.BLOCK_N) * B * H_kv,)](
                *inputs, dk, dv, mask.q_lo, mask.q_hi, *strides, *dk.stride()[:3], Tq, Tk, H_kv, H // H_kv, *masked,
                **static, **t._asdict())
    return dq, dk, dv


def _delta(o: Tensor, do: Tensor, lse: Tensor, dlse: Tensor | None, delta: Tensor) -> None:
    B, Tq, H, D = o.shape
    dlse = lse if dlse is None else dlse.contiguous()
    delta_kernel[(triton.cdiv(Tq, 64) * B * H,)](o, do, lse, dlse, delta, *o.stride()[:3], *do.stride()[:3], Tq, H,
                                                 D=D, D_PAD=padded(D), BLOCK_M=64, HAS_DLSE=dlse is not lse)
