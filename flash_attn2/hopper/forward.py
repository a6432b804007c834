"""The forward on Hopper: forward.py's loop, cut in roles that overlap.

One warp, the producer, orders tiles of k and v by TMA. Two or three warpgroups own 64 query rows each: their products
are asynchronous, so while the tensor cores work for one group, another takes its exponentials. At head width 128 a
group's own exponentials overlap too, with its p v of the tile before (OVERLAP). At 64 the registers of three groups
leave no room for that, and three groups measure better than two.
"""
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..forward import LN2, on_device, scales
from ..masks import Mask, edges, interval, tile_range
from .gluon_api import barrier
from .pipeline import barriers, ring, rows_descriptor

ROWS = gl.constexpr(64)     # of a group: what one warpgroup's product takes


class Config(NamedTuple):
    GROUPS: int             # warpgroups that compute
    BLOCK_N: int            # keys of a tile
    STAGES: int             # tiles of k, and of v, in shared memory
    OVERLAP: bool           # p v of the tile before runs under this tile's exponentials
    maxnreg: int            # registers a thread at launch: 65,536 over all threads


CONFIG = {64: Config(3, 128, 2, False, 128), 128: Config(2, 128, 2, True, 168)}     # by head width; measured (LOG.md)


@gluon.jit
def scores(q, keys, step, BLOCK_N: gl.constexpr):
    """Issues s = q k^T of a step, (ROWS, BLOCK_N)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    k = keys.tile(step, BLOCK_N, q.shape[1])
    return warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, layout), use_acc=False,
                         is_async=True)


@gluon.jit
def up_to(s, n0, hi):
    """Scores of a tile that begins at key n0: -inf past the last key hi that a row sees."""
    j = n0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(j[None, :] <= hi[:, None], s, float("-inf"))


@gluon.jit
def down_to(s, n0, lo):
    """-inf before the first key lo that a row sees."""
    j = n0 + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where(j[None, :] >= lo[:, None], s, float("-inf"))


@gluon.jit
def thread_sums(p):
    """Sums over the columns that a thread holds, (ROWS, 8): no shuffles, which wait until the loop is over."""
    return gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def softmax_step(s, m, l, scale_log2, edge, dtype: gl.constexpr):
    """-> p, alpha, m, l: as the Triton kernel's, p in q's dtype, l (ROWS, 8) by thread.

    The branch mends rows that have seen no key yet: -inf - -inf. It also stands between the exponentials and the wait
    for p v that follows, which ptxas otherwise hoists above them (README.md)."""
    l_rows: gl.constexpr = gl.SliceLayout(1, l.type.layout)
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    l_tile = thread_sums(p)
    p_low = p.to(dtype)
    if edge:
        none = m_new == float("-inf")
        p_low = gl.where(none[:, None], 0.0, p_low)
        alpha = gl.where(none, 0.0, alpha)
        l_tile = gl.where(gl.convert_layout(none, l_rows)[:, None], 0.0, l_tile)
    return p_low, alpha, m_new, l * gl.convert_layout(alpha, l_rows)[:, None] + l_tile


@gluon.jit
def pass_over(keys, values, begin, end):
    """Steps that only other groups need. Each is awaited: two releases within one phase would count for two groups."""
    for step in range(begin, end):
        keys.wait(step)
        keys.release(step)
        values.wait(step)
        values.release(step)


@gluon.jit
def finish(acc, m, l, q_tile, o_desc, lse_ptr, i, b, h, m0, Tq):
    """o = acc / l by way of the group's q, which nobody reads any more; lse = m + log l."""
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    l = gl.where(l == 0.0, 1.0, l)                                      # no key: o = 0, and m = -inf makes lse -inf
    gl.store(lse_ptr + i, (m + gl.log2(l)) * LN2, mask=i < Tq)
    o = acc / gl.convert_layout(l, gl.SliceLayout(1, acc.type.layout))[:, None]
    q_tile.reshape([acc.shape[0], acc.shape[1]]).store(o.to(o_desc.dtype))
    fence_async_shared()                                                # before TMA reads what threads wrote
    barrier()
    tma.async_copy_shared_to_global(o_desc, [b, m0, h, 0], q_tile)
    tma.store_wait(0)


@gluon.jit
def consume(args, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, OVERLAP: gl.constexpr):
    """A group: ROWS query rows over key tiles first, first - 1, ... In each step s of this tile and p v of the one
    before are in the tensor cores' queue together."""
    (q_tiles, q_ready, keys, values, o_desc, lse_ptr, lo_ptr, hi_ptr, b, h, m0, Tq, Tk, left, right,
     first, n, scale_log2) = args
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)        # as it lies in registers: converting is free
    m0 += GROUP * ROWS
    begin, full_begin, full_end, end = tile_range(lo_ptr, hi_ptr, m0, ROWS, Tq, Tk, left, right, BLOCK_N)
    skip = gl.minimum(gl.maximum(first + 1 - end, 0), n - 1)            # of the program's n steps a group needs
    stop = gl.maximum(gl.minimum(first + 1 - begin, n), skip + 1)       # skip .. stop - 1, one at least
    lo_until, hi_from = edges(begin, full_begin, full_end, end)
    pass_over(keys, values, 0, skip)
    q = q_tiles.index(GROUP).reshape([ROWS, D])
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    mbarrier.wait(q_ready, 0)
    keys.wait(skip)
    s = warpgroup_mma_wait(0, deps=[scores(q, keys, skip, BLOCK_N)])
    keys.release(skip)
    i = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    lo, hi = interval(lo_ptr, hi_ptr, i, Tq, Tk, left, right)
    s = down_to(up_to(s, (first - skip) * BLOCK_N, hi), (first - skip) * BLOCK_N, lo)
    m = gl.max(s, 1) * scale_log2
    p = gl.exp2(s * scale_log2 - gl.where(m == float("-inf"), 0.0, m)[:, None])
    l = thread_sums(p)
    p_op = gl.convert_layout(p.to(q.dtype), p_layout)
    for step in range(skip + 1, stop):
        keys.wait(step)
        s_mma = scores(q, keys, step, BLOCK_N)
        values.wait(step - 1)
        acc_mma = warpgroup_mma(p_op, values.tile(step - 1, BLOCK_N, D), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_mma])                         # p v goes on
        keys.release(step)
        if not OVERLAP:
            acc = warpgroup_mma_wait(0, deps=[acc_mma])
            values.release(step - 1)
        tile = first - step
        if tile >= hi_from:
            s = up_to(s, tile * BLOCK_N, hi)
        if tile < lo_until:
            s = down_to(s, tile * BLOCK_N, lo)
        p_low, alpha, m, l = softmax_step(s, m, l, scale_log2, (tile < lo_until) | (tile >= hi_from), q.dtype)
        if OVERLAP:
            acc = warpgroup_mma_wait(0, deps=[acc_mma])
            values.release(step - 1)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
        p_op = gl.convert_layout(p_low, p_layout)
    values.wait(stop - 1)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p_op, values.tile(stop - 1, BLOCK_N, D), acc, is_async=True)])
    values.release(stop - 1)
    pass_over(keys, values, stop, n)
    finish(acc, m, l, q_tiles.index(GROUP), o_desc, lse_ptr, i, b, h, m0, Tq)


@gluon.jit
def produce(args, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr):
    q_desc, k_desc, v_desc, q_tiles, q_ready, keys, values, b, h, h_kv, m0, first, n = args
    mbarrier.expect(q_ready, GROUPS * q_desc.block_type.nbytes)
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(q_desc, [b, m0 + group * ROWS, h, 0], q_ready, q_tiles.index(group))
    for step in range(n):
        row = (first - step) * BLOCK_N
        keys.wait_empty(step)
        keys.fill(step, k_desc, [b, row, h_kv, 0])
        values.wait_empty(step)
        values.fill(step, v_desc, [b, row, h_kv, 0])


@gluon.jit(do_not_specialize=["left", "right"])
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, lo_ptr, hi_ptr, Tq, Tk, H, group, left, right, scale_log2,
                   D: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                   OVERLAP: gl.constexpr):
    """A program is GROUPS * 64 query rows of one head. Arguments as in the Triton kernel; q, k, v, o by descriptors."""
    BLOCK_M: gl.constexpr = GROUPS * ROWS
    n_tiles = gl.cdiv(Tq, BLOCK_M)
    pid = gl.program_id(0)
    m0 = (n_tiles - 1 - pid % n_tiles) * BLOCK_M       # causal: the longest rows first, head after head (k, v in L2)
    b = pid // n_tiles // H
    h = pid // n_tiles % H
    lse_ptr += (b.to(gl.int64) * H + h) * Tq
    if lo_ptr is not None:
        lo_ptr += b.to(gl.int64) * Tq
        hi_ptr += b.to(gl.int64) * Tq
    begin, _, _, end = tile_range(lo_ptr, hi_ptr, m0, BLOCK_M, Tq, Tk, left, right, BLOCK_N)
    n = gl.maximum(end - begin, 1)                     # rows without keys walk one tile, all masked
    first = begin + n - 1
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    q_ready = barriers(1, 1).index(0)
    keys = ring(k_desc, STAGES, GROUPS)
    values = ring(v_desc, STAGES, GROUPS)
    barrier()                                          # the barriers are there for all
    args = (q_tiles, q_ready, keys, values, o_desc, lse_ptr, lo_ptr, hi_ptr, b, h, m0, Tq, Tk, left, right,
            first, n, scale_log2)
    load = (q_desc, k_desc, v_desc, q_tiles, q_ready, keys, values, b, h, h // group, m0, first, n)
    if GROUPS == 2:
        gl.warp_specialize([(consume, (args, 0, BLOCK_N, D, OVERLAP)), (consume, (args, 1, BLOCK_N, D, OVERLAP)),
                            (produce, (load, GROUPS, BLOCK_N))], [4, 1], [240, 24])
    else:
        gl.warp_specialize([(consume, (args, 0, BLOCK_N, D, OVERLAP)), (consume, (args, 1, BLOCK_N, D, OVERLAP)),
                            (consume, (args, 2, BLOCK_N, D, OVERLAP)), (produce, (load, GROUPS, BLOCK_N))],
                           [4, 4, 1], [160, 160, 24])


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """-> o (B, Tq, H, D) as q, lse (B, H, Tq) float32 in nats. What it takes: `dispatch.why_not_hopper`."""
    B, Tq, H, D = q.shape
    Tk, H_kv = k.shape[1:3]
    o = torch.empty((B, Tq, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    config = CONFIG[D]
    with on_device(q):
        forward_kernel[(triton.cdiv(Tq, config.GROUPS * ROWS.value) * B * H,)](
            rows_descriptor(q, ROWS.value), rows_descriptor(k, config.BLOCK_N), rows_descriptor(v, config.BLOCK_N),
            rows_descriptor(o, ROWS.value), lse, mask.lo, mask.hi, Tq, Tk, H, H // H_kv, mask.left, mask.right,
            scales(softmax_scale, 0.0)[0], D=D, **config._asdict(), num_warps=4)
    return o, lse
