"""Tiles on their way from memory to the tensor cores: a ring of stages in shared memory, and two barriers for each.

`ready` lies in shared memory and completes when a tile's bytes have landed (TMA counts them). It flips its phase each
time: tile i lies in stage i % stages and is the (i // stages)-th there, so its readers wait for phase i // stages & 1.
`empty` is a named barrier, one of the 16 that the hardware has (bar.sync, bar.arrive): readers arrive and go on, and
the producer, before it fills a stage again, waits until all of them have. (An arrival at a barrier in shared memory is
one thread's: triton lets the whole partition meet before it, and again after.)

Allocate no barrier that nobody uses. Triton gives the memory of what is used no more to something else, and memory that
has held a barrier comes back changed when a kernel is stopped for another process (LOG.md, 2026-11-30;
`test_hopper.on_barriers` looks).
"""
import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .gluon_api import aggregate, named_barrier


def rows_descriptor(x: Tensor, rows: int) -> TensorDescriptor:
    """Tiles of `rows` tokens of one head of x (B, T, H, D): box (1, rows, 1, D), zeros past the end."""
    box = (1, rows, 1, x.shape[-1])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(box), box_layout(box, x.dtype))


@functools.cache
def box_layout(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory: swizzled, as wgmma reads it without bank conflicts."""
    return gl.NVMMASharedLayout.get_default_for(list(box), getattr(gl, str(dtype).removeprefix("torch.")))


@gluon.jit
def barriers(number: gl.constexpr, arrivals: gl.constexpr):
    """[number, 1] barriers, each complete after `arrivals`."""
    bars = gl.allocate_shared_memory(gl.int64, [number, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(number):
        mbarrier.init(bars.index(i), count=arrivals)
    return bars


@gluon.constexpr_function
def threads_of(groups):
    """Threads that meet at a named barrier: of `groups` warpgroups and one warp more."""
    return groups * 128 + 32


@aggregate
class Ring:
    tiles: gl.shared_memory_descriptor      # [stages, *box]
    ready: gl.shared_memory_descriptor
    empty: gl.constexpr                     # number of the first stage's named barrier
    threads: gl.constexpr                   # that meet there: of all readers and the producer
    stages: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, ready, empty, threads, stages):
        self.tiles = tiles
        self.ready = ready
        self.empty = gl.constexpr(empty)
        self.threads = gl.constexpr(threads)
        self.stages = gl.constexpr(stages)

    @gluon.jit
    def wait_empty(self, i):
        """Producer: until all have released what lay in tile i's stage."""
        if i >= self.stages:
            named_barrier("sync", self.empty + i % self.stages, self.threads)

    @gluon.jit
    def fill(self, i, desc, coordinates):
        """Producer, after wait_empty: order tile i."""
        ready = self.ready.index(i % self.stages)
        mbarrier.expect(ready, desc.block_type.nbytes)
        tma.async_copy_global_to_shared(desc, coordinates, ready, self.tiles.index(i % self.stages))

    @gluon.jit
    def wait(self, i, pred=True):
        """Reader: until tile i has landed."""
        mbarrier.wait(self.ready.index(i % self.stages), i // self.stages & 1, pred=pred)

    @gluon.jit
    def tile(self, i, rows: gl.constexpr, cols: gl.constexpr):
        return self.tiles.index(i % self.stages).reshape([rows, cols])

    @gluon.jit
    def release(self, i):
        """Reader: this warp reads tile i no more."""
        named_barrier("arrive", self.empty + i % self.stages, self.threads)


@gluon.jit
def ring(desc, stages: gl.constexpr, groups: gl.constexpr, empty: gl.constexpr):
    """A ring that `groups` warpgroups read, with the named barriers empty .. empty + stages - 1."""
    gl.static_assert(empty + stages <= 16, "there are 16 named barriers")
    tiles = gl.allocate_shared_memory(desc.dtype, [stages] + desc.block_type.shape, desc.layout)
    return Ring(tiles, barriers(stages, 1), empty, threads_of(groups), stages)


@gluon.jit
def ring_beside(other, desc):
    """Tiles that come with those of another ring, behind barriers of their own, and are released with them."""
    tiles = gl.allocate_shared_memory(desc.dtype, [other.stages] + desc.block_type.shape, desc.layout)
    return Ring(tiles, barriers(other.stages, 1), other.empty, other.threads, other.stages)
