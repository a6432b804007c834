"""The forward on Hopper: forward.py's loop, cut in roles that overlap.

One warp, the producer, orders tiles of k and v by TMA. Two or three warpgroups own 64 query rows each: their products
are asynchronous, so while the tensor cores work for one group, another takes its exponentials. At head width 128 a
group's own exponentials overlap too, with its p v of the tile before (OVERLAP). At 64 the registers of three groups
leave no room for that, and three groups measure better than two. An item of work is the rows of all groups in one head;
a program has one, or stays and takes one after another (PERSISTENT, schedule.py).
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
from .gluon_api import barrier, named_barrier
from .pipeline import barriers, ring, rows_descriptor, threads_of
from .schedule import draw, items, locate, multiprocessors
from .softmax import down_to, softmax_step, thread_sums, up_to

ROWS = gl.constexpr(64)     # of a group: what one warpgroup's product takes


class Config(NamedTuple):
    GROUPS: int             # warpgroups that compute
    BLOCK_N: int            # keys of a tile
    STAGES: int             # tiles of k, and of v, in shared memory
    OVERLAP: bool           # p v of the tile before runs under this tile's exponentials
    PERSISTENT: bool        # as many programs as multiprocessors
    maxnreg: int            # registers a thread at launch: 65,536 over all threads


# By head width; measured (LOG.md).
CONFIG = {64: Config(3, 128, 2, False, False, 128), 128: Config(2, 128, 2, True, True, 168)}
Q_EMPTY, EMPTY = gl.constexpr(7), gl.constexpr(8)       # named barriers: q; the stages of k, then of v


@gluon.jit
def scores(q, keys, step, BLOCK_N: gl.constexpr):
    """Issues s = q k^T of a step, (ROWS, BLOCK_N)."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    k = keys.tile(step, BLOCK_N, q.shape[1])
    return warpgroup_mma(q, k.permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, layout), use_acc=False,
                         is_async=True)


@gluon.jit
def pass_over(keys, values, begin, end):
    """Steps that only other groups need. Each is awaited: two arrivals in one round would count for two groups."""
    for step in range(begin, end):
        keys.wait(step)
        keys.release(step)
        values.wait(step)
        values.release(step)


@gluon.jit
def finish(acc, m, l, o_tile, o_desc, lse_ptr, i, b, h, m0, Tq):
    """o = acc / l, by way of shared memory; lse = m + log l."""
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    l = gl.where(l == 0.0, 1.0, l)                                      # no key: o = 0, and m = -inf makes lse -inf
    gl.store(lse_ptr + i, (m + gl.log2(l)) * LN2, mask=i < Tq)
    o = acc / gl.convert_layout(l, gl.SliceLayout(1, acc.type.layout))[:, None]
    tma.store_wait(0)                                                   # TMA has read the o before
    barrier()
    o_tile.reshape([acc.shape[0], acc.shape[1]]).store(o.to(o_desc.dtype))
    fence_async_shared()                                                # before TMA reads what threads wrote
    barrier()
    tma.async_copy_shared_to_global(o_desc, [b, m0, h, 0], o_tile)


@gluon.jit
def attend(args, item, turn, at, GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
           OVERLAP: gl.constexpr):
    """A group's ROWS query rows of an item, over its key tiles, which are tiles at, at + 1, ... of the rings. In each
    step s of this tile and p v of the one before are in the tensor cores' queue together. -> how many tiles."""
    q_tiles, q_ready, o_tiles, keys, values, o_desc, lse_ptr, lo_ptr, hi_ptr, Tq, Tk, H, left, right, scale_log2 = args
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)        # as it lies in registers: converting is free
    b, h, m0, first, n = locate(item, lo_ptr, hi_ptr, Tq, Tk, H, left, right, GROUPS * ROWS, BLOCK_N)
    m0 += GROUP * ROWS
    if lo_ptr is not None:
        lo_ptr += b.to(gl.int64) * Tq
        hi_ptr += b.to(gl.int64) * Tq
    begin, full_begin, full_end, end = tile_range(lo_ptr, hi_ptr, m0, ROWS, Tq, Tk, left, right, BLOCK_N)
    skip = gl.minimum(gl.maximum(first + 1 - end, 0), n - 1)            # of the item's n steps a group needs
    stop = gl.maximum(gl.minimum(first + 1 - begin, n), skip + 1)       # skip .. stop - 1, one at least
    lo_until, hi_from = edges(begin, full_begin, full_end, end)
    pass_over(keys, values, at, at + skip)
    q = q_tiles.index(GROUP).reshape([ROWS, D])
    acc = gl.zeros([ROWS, D], gl.float32, o_layout)
    mbarrier.wait(q_ready, turn & 1)
    keys.wait(at + skip)
    s = warpgroup_mma_wait(0, deps=[scores(q, keys, at + skip, BLOCK_N)])
    keys.release(at + skip)
    i = m0 + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
    lo, hi = interval(lo_ptr, hi_ptr, i, Tq, Tk, left, right)
    s = down_to(up_to(s, (first - skip) * BLOCK_N, hi), (first - skip) * BLOCK_N, lo)
    m = gl.max(s, 1) * scale_log2
    p = gl.exp2(s * scale_log2 - gl.where(m == float("-inf"), 0.0, m)[:, None])
    l = thread_sums(p)
    p_op = gl.convert_layout(p.to(q.dtype), p_layout)
    for step in range(at + skip + 1, at + stop):
        keys.wait(step)
        s_mma = scores(q, keys, step, BLOCK_N)
        values.wait(step - 1)
        acc_mma = warpgroup_mma(p_op, values.tile(step - 1, BLOCK_N, D), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s_mma])                         # p v goes on
        keys.release(step)
        if not OVERLAP:
            acc = warpgroup_mma_wait(0, deps=[acc_mma])
            values.release(step - 1)
        tile = first + at - step
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
    named_barrier("arrive", Q_EMPTY, threads_of(GROUPS))
    values.wait(at + stop - 1)
    pv = warpgroup_mma(p_op, values.tile(at + stop - 1, BLOCK_N, D), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[pv])
    values.release(at + stop - 1)
    pass_over(keys, values, at + stop, at + n)
    finish(acc, m, l, o_tiles.index(GROUP), o_desc, lse_ptr + (b.to(gl.int64) * H + h) * Tq, i, b, h, m0, Tq)
    return n


@gluon.jit
def consume(args, todo, n_items, GROUP: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr,
            OVERLAP: gl.constexpr):
    """A group, over the items of its program: one, or as many as the producer draws."""
    if todo is None:
        attend(args, gl.program_id(0), 0, 0, GROUP, GROUPS, BLOCK_N, D, OVERLAP)
    else:
        at = 0
        turn = 0
        item = todo.take(turn)
        while item < n_items:
            at += attend(args, item, turn, at, GROUP, GROUPS, BLOCK_N, D, OVERLAP)
            turn += 1
            item = todo.take(turn)
    tma.store_wait(0)


@gluon.jit
def order(args, item, turn, at, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """Orders q, k and v of an item, k and v as tiles at, at + 1, ... of the rings. -> how many tiles they are."""
    q_desc, k_desc, v_desc, q_tiles, q_ready, keys, values, lo_ptr, hi_ptr, Tq, Tk, H, group, left, right = args
    b, h, m0, first, n = locate(item, lo_ptr, hi_ptr, Tq, Tk, H, left, right, GROUPS * ROWS, BLOCK_N)
    if turn > 0:
        named_barrier("sync", Q_EMPTY, threads_of(GROUPS))
    mbarrier.expect(q_ready, GROUPS * q_desc.block_type.nbytes)
    for g in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(q_desc, [b, m0 + g * ROWS, h, 0], q_ready, q_tiles.index(g))
    for step in range(at, at + n):
        row = (first + at - step) * BLOCK_N
        keys.wait_empty(step)
        keys.fill(step, k_desc, [b, row, h // group, 0])
        values.wait_empty(step)
        values.fill(step, v_desc, [b, row, h // group, 0])
    return n


@gluon.jit
def produce(args, todo, counter, n_items, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr):
    """The producer warp, over the same items: it orders the next one's tiles as soon as there is room."""
    if todo is None:
        order(args, gl.program_id(0), 0, 0, GROUPS, BLOCK_N)
    else:
        at = 0
        turn = 0
        item = gl.program_id(0)
        while item < n_items:
            todo.put(turn, item)
            at += order(args, item, turn, at, GROUPS, BLOCK_N)
            turn += 1
            item = draw(counter)
        todo.put(turn, item)


@gluon.jit(do_not_specialize=["left", "right", "n_items"])
def forward_kernel(q_desc, k_desc, v_desc, o_desc, lse_ptr, lo_ptr, hi_ptr, counter, n_items, Tq, Tk, H, group, left,
                   right, scale_log2, D: gl.constexpr, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr,
                   STAGES: gl.constexpr, OVERLAP: gl.constexpr, PERSISTENT: gl.constexpr):
    """Arguments as in the Triton kernel; q, k, v, o by descriptors. counter: an int32 of 0, if PERSISTENT."""
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
    q_ready = barriers(1, 1).index(0)
    keys = ring(k_desc, STAGES, GROUPS, EMPTY)
    values = ring(v_desc, STAGES, GROUPS, EMPTY + STAGES)
    if PERSISTENT:
        o_tiles = gl.allocate_shared_memory(q_desc.dtype, [GROUPS] + q_desc.block_type.shape, q_desc.layout)
        todo = items()
    else:
        o_tiles = q_tiles                              # which nobody reads any more
        todo: gl.constexpr = None
    barrier()                                          # the barriers are there for all
    args = (q_tiles, q_ready, o_tiles, keys, values, o_desc, lse_ptr, lo_ptr, hi_ptr, Tq, Tk, H, left, right,
            scale_log2)
    load = (q_desc, k_desc, v_desc, q_tiles, q_ready, keys, values, lo_ptr, hi_ptr, Tq, Tk, H, group, left, right)
    if GROUPS == 2:
        gl.warp_specialize([(consume, (args, todo, n_items, 0, GROUPS, BLOCK_N, D, OVERLAP)),
                            (consume, (args, todo, n_items, 1, GROUPS, BLOCK_N, D, OVERLAP)),
                            (produce, (load, todo, counter, n_items, GROUPS, BLOCK_N))], [4, 1], [240, 24])
    else:
        gl.warp_specialize([(consume, (args, todo, n_items, 0, GROUPS, BLOCK_N, D, OVERLAP)),
                            (consume, (args, todo, n_items, 1, GROUPS, BLOCK_N, D, OVERLAP)),
                            (consume, (args, todo, n_items, 2, GROUPS, BLOCK_N, D, OVERLAP)),
                            (produce, (load, todo, counter, n_items, GROUPS, BLOCK_N))], [4, 4, 1], [160, 160, 24])


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """-> o (B, Tq, H, D) as q, lse (B, H, Tq) float32 in nats. What it takes: `dispatch.why_not_hopper`."""
    B, Tq, H, D = q.shape
    Tk, H_kv = k.shape[1:3]
    o = torch.empty((B, Tq, H, D), dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, Tq), dtype=torch.float32, device=q.device)
    config = CONFIG[D]
    n_items = programs = triton.cdiv(Tq, config.GROUPS * ROWS.value) * B * H
    counter = None
    if config.PERSISTENT:
        programs = min(n_items, multiprocessors(q.device))
        counter = torch.zeros(1, dtype=torch.int32, device=q.device)
    with on_device(q):
        forward_kernel[(programs,)](
            rows_descriptor(q, ROWS.value), rows_descriptor(k, config.BLOCK_N), rows_descriptor(v, config.BLOCK_N),
            rows_descriptor(o, ROWS.value), lse, mask.lo, mask.hi, counter, n_items, Tq, Tk, H, H // H_kv, mask.left,
            mask.right, scales(softmax_scale, 0.0)[0], D=D, **config._asdict(), num_warps=4)
    return o, lse
