"""Items of work, and a persistent grid: as many programs as multiprocessors, each drawing one item after another.

An item is the query rows that a program walks at once, in one head. The next item's tiles come while the last one's
rows are finished, so nothing waits for a program to begin or end. Items are drawn from a counter, a head's longest
first, so all programs end together. The producer warp draws them, and tells the groups through shared memory.
"""
import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..masks import tile_range
from .gluon_api import aggregate
from .pipeline import barriers


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@aggregate
class Items:
    slots: gl.shared_memory_descriptor      # [2, 1] int32, the item of an even and of an odd turn
    ready: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, slots, ready):
        self.slots = slots
        self.ready = ready

    @gluon.jit
    def put(self, turn, item):
        """Producer: the item of a turn. All groups have taken that of two turns before: in the last turn
        `forward.order` waited for them."""
        self.slots.index(turn & 1).store(gl.full([1], item, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(self.ready.index(turn & 1), count=1)

    @gluon.jit
    def take(self, turn):
        """Reader: the item of a turn."""
        mbarrier.wait(self.ready.index(turn & 1), turn >> 1 & 1)
        return gl.max(self.slots.index(turn & 1).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def items():
    return Items(gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])), barriers(2, 1))


@gluon.jit
def draw(counter):
    """An item that no program has had, for a warp: the first ones, one each, are programs' own numbers. By a tensor,
    since triton puts a scalar's result into shared memory where other partitions may still read."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    before = gl.atomic_add(counter + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")
    return gl.num_programs(0) + gl.max(gl.where(lane == 0, before, 0), 0)


@gluon.jit
def locate(item, lo_ptr, hi_ptr, Tq, Tk, H, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where an item lies -> b, h, m0, first, n: BLOCK_M query rows from m0 of head h in batch row b, over the n key
    tiles first, first - 1, ..."""
    n_tiles = gl.cdiv(Tq, BLOCK_M)
    m0 = (n_tiles - 1 - item % n_tiles) * BLOCK_M       # causal: the longest rows first, head after head (k, v in L2)
    b = item // n_tiles // H
    h = item // n_tiles % H
    if lo_ptr is not None:
        lo_ptr += b.to(gl.int64) * Tq
        hi_ptr += b.to(gl.int64) * Tq
    begin, _, _, end = tile_range(lo_ptr, hi_ptr, m0, BLOCK_M, Tq, Tk, left, right, BLOCK_N)
    n = gl.maximum(end - begin, 1)                      # rows without keys walk one tile, all masked
    return b, h, m0, begin + n - 1, n
