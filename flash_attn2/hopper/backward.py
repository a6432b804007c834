"""The backward on Hopper: one pass and five products, where the Triton pair has two passes and seven.

A program owns 128 keys, walks the queries that reach them, and adds each tile's share of dq to float32 sums in
global memory, in whatever order programs come: dq repeats but for rounding, dk and dv bit for bit. Roles: two
warpgroups of 64 keys each; a producer warp that orders q, do and the rows' lse and delta; a writer warp that adds dq by
TMA. A kernel before the pass computes delta and clears the sums, one after it scales and casts them (dq.py).
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
from ..tiles import addressable, tma_can
from .dq import buffers, finish_kernel, hand_over, prepare_kernel, write
from .gluon_api import barrier, named_barrier
from .pipeline import barriers, ring, ring_beside, rows_descriptor

ROWS = gl.constexpr(64)         # keys of a group
BLOCK_N = 128                   # keys of a program


class Config(NamedTuple):
    BLOCK_M: int                # queries of a tile: 8,192 numbers in all, two shares of dq
    STAGES: int                 # tiles of q, and of do, in shared memory
    EARLY: bool                 # the next s is issued before the exchange of ds, or else under dq


CONFIG = {64: Config(128, 2, True), 128: Config(64, 3, False)}     # by head width; measured (LOG.md)
# Named barriers: "the other group's ds is there", for each group and even and odd steps; the end; stages.
DS_READY, DONE, EMPTY = gl.constexpr(8), gl.constexpr(12), gl.constexpr(13)


@gluon.jit
def own(tile, GROUP: gl.constexpr):
    """The group's half of the keys of a tile (1, 2 ROWS, 1, D), as (ROWS, D)."""
    return tile.reshape([2 * ROWS, tile.shape[3]]).slice(GROUP * ROWS, ROWS)


@gluon.jit
def transposed_product(a, b, BLOCK_M: gl.constexpr):
    """Issues a b^T, (ROWS, BLOCK_M): k q^T or v do^T."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    return warpgroup_mma(a, b.permute((1, 0)), gl.zeros([ROWS, BLOCK_M], gl.float32, layout), use_acc=False,
                         is_async=True)


@gluon.jit
def next_scores(k_tile, queries, i, total, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr):
    """Issues s^T of step i. Past the last step the product is of no use, but of no harm."""
    queries.wait(i, pred=i < total)
    return transposed_product(own(k_tile, GROUP), queries.tile(i, BLOCK_M, D), BLOCK_M)


@gluon.jit
def share_of_dq(ds_tile, k_tile, GROUP: gl.constexpr):
    """Issues a group's half of dq = ds k, (64, 64): of its columns, or of its rows where it has 64 columns."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ds = ds_tile.permute((1, 0))
    k = k_tile.reshape([2 * ROWS, k_tile.shape[3]])
    if k.shape[1] == 128:
        k = k.slice(GROUP * 64, 64, dim=1)
    else:
        ds = ds.slice(GROUP * 64, 64)
    return warpgroup_mma(ds, k, gl.zeros([64, 64], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def masked(p, tile, lo_until, hi_from, seen, GROUP: gl.constexpr):
    """p^T of a query tile: 0 where a query does not see the key. Full tiles do not ask."""
    i = tile * p.shape[1] + gl.arange(0, p.shape[1], gl.SliceLayout(0, p.type.layout))
    keys: gl.constexpr = gl.SliceLayout(1, p.type.layout)
    if tile < lo_until:
        q_lo = seen.index(0).slice(GROUP * ROWS, ROWS).load(keys)
        p = gl.where(i[None, :] >= q_lo[:, None], p, 0.0)
    if tile >= hi_from:
        q_hi = seen.index(1).slice(GROUP * ROWS, ROWS).load(keys)
        p = gl.where(i[None, :] <= q_hi[:, None], p, 0.0)
    return p


@gluon.jit
def consume(args, GROUP: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, EARLY: gl.constexpr):
    """Keys 64 GROUP .. + 63 of the program's: dk and dv in registers, at the end in place of k and v in shared memory.

    Each step ends with s of the next one, so that its exponentials can begin at once: issued before the exchange of ds
    (EARLY), or under dq, with more registers free."""
    (k_tile, v_tile, queries, grads, rows, ds_tiles, dq_tiles, seen, kv_ready, dq_empty,
     begin, lo_until, hi_from, end, group, scale_log2) = args
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, layout, 2)              # p^T, ds^T as they lie in registers
    dk = gl.zeros([ROWS, D], gl.float32, layout)
    dv = dk
    total = (end - begin) * group
    i = 0
    mbarrier.wait(kv_ready, 0)
    s = warpgroup_mma_wait(0, deps=[next_scores(k_tile.index(0), queries, 0, total, GROUP, BLOCK_M, D)])
    column: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    for _ in range(group):
        for tile in range(begin, end):
            # i >> 30 is 0, unknown to the compiler: it would hoist descriptors, which push accumulators from registers
            k, v = k_tile.index(i >> 30), v_tile.index(i >> 30)
            q, do = queries.tile(i, BLOCK_M, D), grads.tile(i, BLOCK_M, D)
            row = rows.index(i % queries.stages)
            ds_tile = ds_tiles.index(i % 2)
            grads.wait(i)
            dp_mma = transposed_product(own(v, GROUP), do, BLOCK_M)
            p = gl.exp2(s * scale_log2 - row.slice(0, BLOCK_M).load(column)[None, :])
            p = masked(p, tile, lo_until, hi_from, seen, GROUP)
            p_op = gl.convert_layout(p.to(do.dtype), a_layout)
            dp = warpgroup_mma_wait(0, deps=[dp_mma])
            dv_mma = warpgroup_mma(p_op, do, dv, is_async=True)
            ds = (p * (dp - row.slice(BLOCK_M, BLOCK_M).load(column)[None, :])).to(q.dtype)
            ds_tile.slice(GROUP * ROWS, ROWS).store(ds)
            fence_async_shared()                                            # before wgmma reads what threads wrote
            named_barrier("arrive", DS_READY + 2 * (i % 2) + 1 - GROUP, 256)
            dk_mma = warpgroup_mma(gl.convert_layout(ds, a_layout), q, dk, is_async=True)
            if EARLY:
                dv = warpgroup_mma_wait(1, deps=[dv_mma])
                s_mma = next_scores(k, queries, i + 1, total, GROUP, BLOCK_M, D)
            # The other group's half of ds. Two tiles of it suffice, and two barriers: a group that is at step i + 2 has
            # passed here in step i + 1, for which all of the other one had left step i.
            named_barrier("sync", DS_READY + 2 * (i % 2) + GROUP, 256)
            dq_mma = share_of_dq(ds_tile, k, GROUP)
            if EARLY:
                dk = warpgroup_mma_wait(2, deps=[dk_mma])
                queries.release(i)                                          # with do and rows
                s = warpgroup_mma_wait(1, deps=[s_mma])
                hand_over(warpgroup_mma_wait(0, deps=[dq_mma]), i, dq_tiles, dq_empty, GROUP)
            else:
                dv = warpgroup_mma_wait(2, deps=[dv_mma])
                dk = warpgroup_mma_wait(1, deps=[dk_mma])
                queries.release(i)
                s_mma = next_scores(k, queries, i + 1, total, GROUP, BLOCK_M, D)
                hand_over(warpgroup_mma_wait(1, deps=[dq_mma]), i, dq_tiles, dq_empty, GROUP)
                s = warpgroup_mma_wait(0, deps=[s_mma])
            i += 1
    named_barrier("sync", DONE, 256)                                        # the other group's last dq has read k
    own(v_tile.index(0), GROUP).store(dv.to(v_tile.dtype))
    own(k_tile.index(0), GROUP).store((dk * (scale_log2 * LN2)).to(k_tile.dtype))      # softmax_scale
    fence_async_shared()


@gluon.jit
def produce(args, BLOCK_M: gl.constexpr):
    """The producer warp: k and v once, then q, do and rows of each step."""
    (k_desc, v_desc, q_desc, do_desc, rows_desc, k_tile, v_tile, queries, grads, rows, kv_ready, b, h, h_kv, n0,
     first_tile, n_tiles, begin, end, group) = args
    mbarrier.expect(kv_ready, k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [b, n0, h_kv, 0], kv_ready, k_tile.index(0))
    tma.async_copy_global_to_shared(v_desc, [b, n0, h_kv, 0], kv_ready, v_tile.index(0))
    i = 0
    for head in range(group):
        for tile in range(begin, end):
            stage = i % queries.stages
            queries.wait_empty(i)                       # do and rows are released with q
            ready = queries.ready.index(stage)
            mbarrier.expect(ready, q_desc.block_type.nbytes + rows_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [b, tile * BLOCK_M, h + head, 0], ready,
                                            queries.tiles.index(stage))
            tma.async_copy_global_to_shared(rows_desc, [(first_tile + head * n_tiles + tile) * (2 * BLOCK_M)], ready,
                                            rows.index(stage))
            grads.fill(i, do_desc, [b, tile * BLOCK_M, h + head, 0])
            i += 1


@gluon.jit(do_not_specialize=["left", "right"])
def backward_kernel(q_desc, k_desc, v_desc, do_desc, rows_desc, dk_desc, dv_desc, dq_desc, q_lo_ptr, q_hi_ptr,
                    Tq, Tk, H_kv, group, left, right, scale_log2,
                    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                    EARLY: gl.constexpr):
    """A program is BLOCK_N keys of one key head, for all query heads that share it."""
    n_tiles_k = gl.cdiv(Tk, BLOCK_N)
    n_tiles = gl.cdiv(Tq, BLOCK_M)
    pid = gl.program_id(0)
    n0 = pid % n_tiles_k * BLOCK_N                     # causal: early keys are seen by the most queries, so first
    b = pid // n_tiles_k // H_kv
    h_kv = pid // n_tiles_k % H_kv
    if q_lo_ptr is not None:
        q_lo_ptr += b.to(gl.int64) * Tk
        q_hi_ptr += b.to(gl.int64) * Tk
    begin, full_begin, full_end, end = tile_range(q_lo_ptr, q_hi_ptr, n0, BLOCK_N, Tk, Tq, right, left, BLOCK_M)
    if n0 + BLOCK_N > Tk:
        full_end = full_begin                          # they read as 0: exp2(0 - lse) may be inf, and inf * 0
    if end <= begin:                                   # keys that no query sees walk one tile, all masked
        begin = gl.minimum(begin, n_tiles - 1)
        end = begin + 1
    lo_until, hi_from = edges(begin, full_begin, full_end, end)
    first_tile = (b * H_kv + h_kv) * group * n_tiles
    k_tile = gl.allocate_shared_memory(k_desc.dtype, [1] + k_desc.block_type.shape, k_desc.layout)
    v_tile = gl.allocate_shared_memory(v_desc.dtype, [1] + v_desc.block_type.shape, v_desc.layout)
    queries = ring(q_desc, STAGES, 2, EMPTY)
    grads = ring_beside(queries, do_desc)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * BLOCK_M], rows_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], k_desc.dtype)
    ds_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, BLOCK_N, BLOCK_M], ds_layout)
    dq_tiles = gl.allocate_shared_memory(gl.float32, [2, 64, 64], dq_desc.layout)
    seen = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    j = n0 + gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
    q_lo, q_hi = interval(q_lo_ptr, q_hi_ptr, j, Tk, Tq, right, left)
    seen.index(0).store(gl.where(j < Tk, q_lo, Tq))   # keys past the end reach no query
    seen.index(1).store(gl.where(j < Tk, q_hi, -1))
    kv_ready = barriers(1, 1).index(0)
    dq_empty = barriers(2, 1)
    barrier()                                          # the barriers and `seen` are there for all
    args = (k_tile, v_tile, queries, grads, rows, ds_tiles, dq_tiles, seen, kv_ready, dq_empty,
            begin, lo_until, hi_from, end, group, scale_log2)
    load = (k_desc, v_desc, q_desc, do_desc, rows_desc, k_tile, v_tile, queries, grads, rows, kv_ready,
            b, h_kv * group, h_kv, n0, first_tile, n_tiles, begin, end, group)
    add = (dq_desc, dq_tiles, dq_empty, first_tile, n_tiles, begin, end, group)
    gl.warp_specialize([(consume, (args, 0, BLOCK_M, D, EARLY)), (consume, (args, 1, BLOCK_M, D, EARLY)),
                        (produce, (load, BLOCK_M)), (write, (add,))], [4, 1, 1], [240, 24, 24])
    tma.async_copy_shared_to_global(dk_desc, [b, n0, h_kv, 0], k_tile.index(0))
    tma.async_copy_shared_to_global(dv_desc, [b, n0, h_kv, 0], v_tile.index(0))
    tma.store_wait(0)


def backward(do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, mask: Mask,
             softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv, contiguous, shaped as q, k, v. What it takes: `dispatch.why_not_hopper`; do of any strides."""
    B, Tq, H, D = q.shape
    Tk, H_kv = k.shape[1:3]
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    o, do = addressable(o), do if tma_can(do) else do.clone(memory_format=torch.contiguous_format)
    config = CONFIG[D]
    block = config.BLOCK_M
    tiles = triton.cdiv(Tq, block) * B * H
    rows, rows_desc, sums, sums_desc = buffers(tiles, block, q.device)
    with on_device(q):
        prepare_kernel[(tiles,)](o, do, lse, None if dlse is None else dlse.contiguous(), rows, sums, o.stride()[:3],
                                 do.stride()[:3], Tq, H, D=D, BLOCK_M=block, num_warps=8)
        backward_kernel[(triton.cdiv(Tk, BLOCK_N) * B * H_kv,)](
            rows_descriptor(q, block), rows_descriptor(k, BLOCK_N), rows_descriptor(v, BLOCK_N),
            rows_descriptor(do, block), rows_desc, rows_descriptor(dk, BLOCK_N), rows_descriptor(dv, BLOCK_N),
            sums_desc, mask.q_lo, mask.q_hi, Tq, Tk, H_kv, H // H_kv, mask.left, mask.right,
            scales(softmax_scale, 0.0)[0], D=D, BLOCK_N=BLOCK_N, **config._asdict(), num_warps=4, maxnreg=168)
        finish_kernel[(tiles,)](sums, dq, dq.stride()[:3], Tq, H, softmax_scale, D=D, BLOCK_M=block, num_warps=8)
    return dq, dk, dv
