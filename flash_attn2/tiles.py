"""Tile shapes by architecture, head width and pass, and how a tile of rows is loaded and stored.

The sm_90 rows are measured on an H200 (LOG.md); sm_80 is every other card's, chosen by spills, within 99 KiB.
Nothing is tuned while training: ranks would choose differently, and bitwise reruns would end.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Tile(NamedTuple):
    BLOCK_M: int        # queries
    BLOCK_N: int        # keys
    num_warps: int
    num_stages: int


# (architecture, padded head width) -> the three passes. fp16 and bf16.
TILES = {
    ("sm_90", 64): dict(forward=Tile(128, 64, 8, 3), dkdv=Tile(64, 64, 4, 3), dq=Tile(64, 64, 4, 3)),
    ("sm_90", 128): dict(forward=Tile(128, 128, 8, 3), dkdv=Tile(32, 64, 4, 3), dq=Tile(128, 64, 8, 3)),
    ("sm_90", 256): dict(forward=Tile(128, 64, 8, 2), dkdv=Tile(32, 64, 8, 2), dq=Tile(128, 32, 8, 2)),
    ("sm_80", 64): dict(forward=Tile(128, 64, 4, 3), dkdv=Tile(32, 64, 4, 3), dq=Tile(64, 64, 4, 2)),
    ("sm_80", 128): dict(forward=Tile(128, 64, 8, 2), dkdv=Tile(32, 64, 8, 2), dq=Tile(64, 32, 4, 2)),
    ("sm_80", 256): dict(forward=Tile(64, 32, 8, 1), dkdv=Tile(32, 32, 8, 1), dq=Tile(32, 32, 8, 1)),
}
FLOAT32 = Tile(32, 32, 4, 1)           # for tests: correct everywhere, fast nowhere
INTERPRETER = Tile(64, 64, 4, 1)       # its cost is per tile operation, so tiles are large


def padded(head_dim: int) -> int:
    """Columns of a tile: the next power of two, 16 at least (tl.dot takes no less)."""
    return max(16, triton.next_power_of_2(head_dim))


def tile(kind: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile of one pass (forward, dkdv, dq)."""
    if device.type == "cpu":
        return INTERPRETER
    if dtype == torch.float32:
        return FLOAT32
    arch = "sm_90" if torch.cuda.get_device_capability(device)[0] == 9 else "sm_80"
    return TILES[arch, max(64, padded(head_dim))][kind]


@triton.jit
def tile_pointers(base, first, stride_t, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Only the tile's first row needs 64 bits; the launcher sees to it that the rest fits in 32."""
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, D_PAD)[None, :]
    return base + tl.cast(first, tl.int64) * stride_t + (rows * stride_t + cols)


@triton.jit
def inside(first, n_rows, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    return ((first + tl.arange(0, BLOCK))[:, None] < n_rows) & (tl.arange(0, D_PAD)[None, :] < D)


@triton.jit
def load_rows(base, first, n_rows, stride_t, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
              WHOLE: tl.constexpr):
    """Rows first .. first + BLOCK - 1 of one head, (BLOCK, D_PAD); zeros past the last row and past column D.
    WHOLE promises that no row lies past the end."""
    ptrs = tile_pointers(base, first, stride_t, D_PAD, BLOCK)
    if WHOLE and D == D_PAD:
        return tl.load(ptrs)
    return tl.load(ptrs, mask=inside(first, n_rows, D, D_PAD, BLOCK), other=0.0)


@triton.jit
def store_rows(base, tile, first, n_rows, stride_t, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    ptrs = tile_pointers(base, first, stride_t, D_PAD, BLOCK)
    tl.store(ptrs, tile.to(base.dtype.element_ty), mask=inside(first, n_rows, D, D_PAD, BLOCK))
