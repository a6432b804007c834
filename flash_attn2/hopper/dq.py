"""dq on its way: cleared sums, shares added to them in whatever order programs come, and at last the scaled dq.

A share is the 64 x 64 of dq that a warpgroup computes in one step, two for each query tile: the halves of its columns
at head width 128, of its rows at 64. In memory it is 4,096 numbers in the order in which the threads hold them, so that
they store 16 bytes at a time; `hand_over` and `finish_kernel` agree on that order.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..forward import LOG2E
from ..tiles import load_rows, store_rows
from .gluon_api import named_barrier, tma_reduce_add
from .pipeline import box_layout, threads_of

DQ_FULL = gl.constexpr(6)       # named barriers, one a group: its share is there


def buffers(tiles: int, BLOCK_M: int,
            device: torch.device) -> tuple[Tensor, TensorDescriptor, Tensor, TensorDescriptor]:
    """Of each query tile the rows' lse and delta, and the sums of its two shares; each with its TMA descriptor."""
    rows = torch.empty(tiles * 2 * BLOCK_M, dtype=torch.float32, device=device)
    sums = torch.empty(tiles * 2 * 64, 64, dtype=torch.float32, device=device)
    line = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    return (rows, TensorDescriptor(rows, [rows.numel()], [1], [2 * BLOCK_M], line),
            sums, TensorDescriptor(sums, list(sums.shape), [64, 1], [64, 64], box_layout((64, 64), torch.float32)))


@triton.jit
def prepare_kernel(o_ptr, do_ptr, lse_ptr, dlse_ptr, rows_ptr, sums_ptr, o_strides, do_strides, Tq, H,
                   D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of each query tile: rows = lse in log2 units, then delta = rowsum(do * o) - dlse; and its sums of dq = 0.

    Past the last row, and where a row has no key, lse is +inf: exp2(s - lse) is 0 there without a mask."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = pid % n_tiles * BLOCK_M
    b = pid // n_tiles // H
    h = pid // n_tiles % H
    o = load_rows(o_ptr, b, h, m0, Tq, o_strides, D, D, BLOCK_M)
    do = load_rows(do_ptr, b, h, m0, Tq, do_strides, D, D, BLOCK_M)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    i = m0 + tl.arange(0, BLOCK_M)
    row = (tl.cast(b, tl.int64) * H + h) * Tq + i
    lse = tl.load(lse_ptr + row, mask=i < Tq, other=float("-inf"))
    none = lse == float("-inf")
    if dlse_ptr is not None:
        delta -= tl.where(none, 0.0, tl.load(dlse_ptr + row, mask=i < Tq, other=0.0))
    rows = rows_ptr + tl.cast(pid, tl.int64) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(rows, tl.where(none, float("inf"), lse * LOG2E))
    tl.store(rows + BLOCK_M, delta)
    tl.store(sums_ptr + tl.cast(pid, tl.int64) * (BLOCK_M * D) + tl.arange(0, BLOCK_M * D),
             tl.zeros([BLOCK_M * D], tl.float32))


@gluon.jit
def hand_over(dq, i, dq_tiles, dq_empty, GROUP: gl.constexpr):
    """A share of dq to the writer, in the order in which a thread holds it: it stores 16 bytes at a time."""
    x = gl.reshape(dq, [4, 2, 8, 8, 4, 2])                                  # (warp, half, row, block, pair, column)
    x = gl.reshape(gl.permute(x, (3, 0, 2, 4, 1, 5)), [64, 64])
    mbarrier.wait(dq_empty.index(GROUP), i & 1 ^ 1)                         # TMA has read the share before
    dq_tiles.index(GROUP).store(x)
    fence_async_shared()                                                    # before TMA reads what threads wrote
    named_barrier("arrive", DQ_FULL + GROUP, threads_of(1))


@gluon.jit
def write(args):
    """Adds each tile's two shares to the sums of dq."""
    dq_desc, dq_tiles, dq_empty, first_tile, n_tiles, begin, end, group = args
    for head in range(group):
        for tile in range(begin, end):
            share = (first_tile + head * n_tiles + tile) * 2
            for g in gl.static_range(2):
                named_barrier("sync", DQ_FULL + g, threads_of(1))
                tma_reduce_add(dq_desc, [(share + g) * 64, 0], dq_tiles.index(g))
            tma.store_wait(0)
            for g in gl.static_range(2):
                mbarrier.arrive(dq_empty.index(g), count=1)


@triton.jit
def finish_kernel(sums_ptr, dq_ptr, dq_strides, Tq, H, softmax_scale, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """dq = softmax_scale * sums, each share of a tile put back in order. A share is 64 rows or 64 columns of it."""
    n_tiles = tl.cdiv(Tq, BLOCK_M)
    pid = tl.program_id(0)
    m0 = pid % n_tiles * BLOCK_M
    b = pid // n_tiles // H
    h = pid // n_tiles % H
    sums = sums_ptr + tl.cast(pid, tl.int64) * (BLOCK_M * D) + tl.arange(0, 4096)
    for share in tl.static_range(2):
        x = tl.reshape(tl.load(sums + share * 4096), [8, 4, 8, 4, 2, 2])    # (block, warp, row, pair, half, column)
        x = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [64, 64])         # rows (warp, half, row), columns the rest
        first_row = m0 + (share * 64 if BLOCK_M == 128 else 0)
        first_column = 0 if BLOCK_M == 128 else share * 64
        store_rows(dq_ptr + first_column, x * softmax_scale, b, h, first_row, Tq, dq_strides, 64, 64, 64)
