"""Tile shapes by architecture, head width and pass, and how a tile of rows is loaded and stored.

The sm_90 rows are measured on an H200 (LOG.md). The others are chosen by how little they spill within the card's shared
memory, and no one has timed them: sm_100 (data-centre Blackwell, 227 KiB), and sm_80 for every other card, within the
99 KiB of sm_86, sm_89 and sm_120. Nothing is tuned while training: ranks would choose differently, and bitwise reruns
would end.
"""
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Tile(NamedTuple):
    BLOCK_M: int        # queries
    BLOCK_N: int        # keys
    num_warps: int
    num_stages: int
    TMA: bool = False   # load the walked-over tiles through tensor descriptors


TMA = True
# (architecture, padded head width) -> the three passes. fp16 and bf16.
TILES = {
    ("sm_90", 64): dict(forward=Tile(64, 64, 4, 3, TMA), dkdv=Tile(64, 64, 4, 3, TMA), dq=Tile(64, 64, 4, 3, TMA)),
    ("sm_90", 128): dict(forward=Tile(128, 128, 8, 3, TMA), dkdv=Tile(64, 64, 4, 2, TMA), dq=Tile(128, 64, 8, 3, TMA)),
    ("sm_90", 256): dict(forward=Tile(128, 64, 8, 2), dkdv=Tile(64, 64, 8, 2, TMA), dq=Tile(128, 32, 8, 3, TMA)),
    ("sm_100", 64): dict(forward=Tile(64, 64, 4, 3, TMA), dkdv=Tile(64, 64, 4, 3, TMA), dq=Tile(64, 64, 4, 3, TMA)),
    ("sm_100", 128): dict(forward=Tile(64, 64, 4, 3, TMA), dkdv=Tile(64, 64, 4, 2, TMA), dq=Tile(128, 64, 8, 3, TMA)),
    ("sm_100", 256): dict(forward=Tile(128, 64, 8, 1), dkdv=Tile(64, 64, 8, 1, TMA), dq=Tile(64, 64, 4, 1, TMA)),
    ("sm_80", 64): dict(forward=Tile(128, 64, 4, 3), dkdv=Tile(32, 64, 4, 3), dq=Tile(64, 64, 4, 2)),
    ("sm_80", 128): dict(forward=Tile(128, 64, 8, 2), dkdv=Tile(32, 64, 8, 2), dq=Tile(64, 32, 4, 2)),
    ("sm_80", 256): dict(forward=Tile(64, 32, 8, 1), dkdv=Tile(32, 32, 8, 1), dq=Tile(32, 32, 8, 1)),
}
FLOAT32 = Tile(32, 32, 4, 1)           # for tests: correct everywhere, fast nowhere
INTERPRETER = Tile(64, 64, 4, 1)       # its cost is per tile operation, so tiles are large


def padded(head_dim: int) -> int:
    """Columns of a tile: the next power of two, 16 at least (tl.dot takes no less)."""
    return max(16, 1 << (head_dim - 1).bit_length())


def tile(kind: str, head_dim: int, dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile of one pass (forward, dkdv, dq)."""
    if device.type == "cpu":
        return INTERPRETER
    if dtype == torch.float32:
        return FLOAT32
    return TILES[architecture(*torch.cuda.get_device_capability(device)), max(64, padded(head_dim))][kind]


def architecture(major: int, minor: int) -> str:
    """The rows of TILES that a card of this compute capability uses."""
    return {9: "sm_90", 10: "sm_100"}.get(major, "sm_80")


def addressable(x: Tensor) -> Tensor:
    """x, or one copy of it where the kernels could not walk its rows: last stride not 1, or 2^31 within a tile."""
    return x if x.stride(-1) == 1 and x.stride(1) < 2**23 else x.contiguous()


def tma_can(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can address x (B, T, H, D): base and strides in steps of 16 bytes."""
    steps = [stride * x.element_size() for stride in x.stride()[:3]]
    aligned = x.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)
    return aligned and x.stride(-1) == 1 and x.numel() > 0


def descriptors_or_pointers(t: Tile, block: int, *tensors: Tensor) -> tuple[Tile, list]:
    """What a kernel walks over, tile of `block` rows by tile, and whether as TMA descriptors or as plain pointers."""
    if not (t.TMA and all(map(tma_can, tensors))):
        return t._replace(TMA=False), list(tensors)
    box = [1, block, 1, padded(tensors[0].shape[-1])]
    return t, [TensorDescriptor(x, list(x.shape), list(x.stride()), box) for x in tensors]


@triton.jit
def tile_pointers(x, b, h, first, strides, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Only the tile's first row needs 64 bits; the launcher sees to it that the rest fits in 32."""
    stride_b, stride_t, stride_h = strides
    rows = tl.arange(0, BLOCK)[:, None]
    cols = tl.arange(0, D_PAD)[None, :]
    base = x + tl.cast(b, tl.int64) * stride_b + tl.cast(h, tl.int64) * stride_h
    return base + tl.cast(first, tl.int64) * stride_t + (rows * stride_t + cols)


@triton.jit
def inside(first, n_rows, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    return ((first + tl.arange(0, BLOCK))[:, None] < n_rows) & (tl.arange(0, D_PAD)[None, :] < D)


@triton.jit
def load_rows(x, b, h, first, n_rows, strides, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr,
              WHOLE: tl.constexpr = False, TMA: tl.constexpr = False):
    """Rows first .. first + BLOCK - 1 of head h in batch row b, (BLOCK, D_PAD); zeros past the last row and column.
    x is a pointer, or with TMA a descriptor. WHOLE promises that no row lies past the end."""
    if TMA:
        rows = x.load([b, first, h, 0]).reshape(BLOCK, D_PAD)
    elif WHOLE and D == D_PAD:
        rows = tl.load(tile_pointers(x, b, h, first, strides, D_PAD, BLOCK))
    else:
        rows = tl.load(tile_pointers(x, b, h, first, strides, D_PAD, BLOCK),
                       mask=inside(first, n_rows, D, D_PAD, BLOCK), other=0.0)
    return rows


@triton.jit
def store_rows(x, tile, b, h, first, n_rows, strides, D: tl.constexpr, D_PAD: tl.constexpr, BLOCK: tl.constexpr):
    ptrs = tile_pointers(x, b, h, first, strides, D_PAD, BLOCK)
    tl.store(ptrs, tile.to(x.dtype.element_ty), mask=inside(first, n_rows, D, D_PAD, BLOCK))
