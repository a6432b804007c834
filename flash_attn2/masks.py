"""Which keys a query sees, which queries a key reaches: one interval each.

Query i sees the keys lo[i] <= j <= hi[i], and both bounds never decrease along the row; a row without keys has
hi = lo - 1. So key j is seen by an interval of queries too, q_lo[j] <= i <= q_hi[j], and the first and the last row
of a tile bound all its work in O(1). Causal, window and whole rows are a closed form of two integers; documents are
four vectors, built once a batch. Both are run-time values: a kernel is compiled once for each of the two forms.
"""
from typing import NamedTuple, SupportsIndex

import torch
import triton
import triton.language as tl
from torch import Tensor

NO_BOUND = 2**30      # keys on one side; leaves room for i + NO_BOUND in int32


class Mask(NamedTuple):
    """Closed form: query i, standing at key i + Tk - Tq, sees `left` keys before that position and `right` after it.

    With documents the four vectors say everything and left, right are ignored: lo, hi (B, Tq) and q_lo, q_hi (B, Tk),
    int32, contiguous."""
    left: int = NO_BOUND
    right: int = NO_BOUND
    lo: Tensor | None = None
    hi: Tensor | None = None
    q_lo: Tensor | None = None
    q_hi: Tensor | None = None


def full_mask() -> Mask:
    """Every query sees every key."""
    return Mask()


def causal_mask(window: int = 0, doc_start: Tensor | None = None) -> Mask:
    """A query sees itself and what came before it: the last `window` keys, itself included (0: all of them).

    doc_start (B, T), integers: where in the row each token's document begins; keys before it are not seen.
    ValueError: window < 0 or no integer, doc_start not (B, T) integers."""
    if not isinstance(window, SupportsIndex) or window < 0:
        raise ValueError(f"{window=} must be a number of keys, or 0 for no window")
    if doc_start is not None and (doc_start.dim() != 2 or doc_start.is_floating_point()):
        raise ValueError(f"doc_start is {tuple(doc_start.shape)} {doc_start.dtype}; it must be (B, T) integers")
    left = min(window - 1, NO_BOUND) if window else NO_BOUND
    if doc_start is None:
        return Mask(left, 0)
    i = torch.arange(doc_start.shape[1], device=doc_start.device, dtype=torch.int32).expand_as(doc_start)
    return from_bounds(torch.maximum(doc_start.int(), i - left), i, doc_start.shape[1])


def varlen_mask(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, total_q: int, total_k: int,
                left: int = NO_BOUND, right: int = NO_BOUND) -> Mask:
    """Segments packed into one row: query and key see each other only within one, the last query beside the last key.

    Segment s of N holds the queries cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1 of total_q and likewise the keys; either
    may be empty. cu_seqlens_q, cu_seqlens_k (N + 1,) int32, from 0, never decreasing. A query sees `left` keys before
    its position and `right` after it. Tokens past the last segment see nothing. The values of cu_seqlens are not
    checked, since that would wait for the GPU; wrong ones give a wrong mask, but never a key that is not there.
    ValueError: left or right < 0."""
    if left < 0 or right < 0:
        raise ValueError(f"{left=} and {right=} must be numbers of keys, or {NO_BOUND} for no bound")
    i = torch.arange(total_q, device=cu_seqlens_q.device, dtype=torch.int32)
    # i's segment; past the last one begin = end = N, which is empty. Wrong values may give -1: an index too.
    begin = torch.searchsorted(cu_seqlens_q, i, right=True) - 1
    end = (begin + 1).clamp(max=cu_seqlens_q.shape[0] - 1)
    first, stop = cu_seqlens_k[begin], cu_seqlens_k[end]
    position = i + (stop - cu_seqlens_q[end])
    lo = torch.clamp(position - min(left, NO_BOUND), first, stop)
    hi = torch.minimum(position + min(right, NO_BOUND), stop - 1)
    return from_bounds(lo[None], hi[None], total_k)


def sides(left: int | None, right: int | None, causal: bool) -> tuple[int, int]:
    """flash-attn's and torch's window as a Mask's left and right: None or -1 is no bound, causal is right = 0."""
    left, right = (NO_BOUND if n is None or n < 0 else min(int(n), NO_BOUND) for n in (left, right))
    return left, 0 if causal else right


def from_bounds(lo: Tensor, hi: Tensor, Tk: int) -> Mask:
    """The mask of two bounds lo, hi (B, Tq) over keys 0 .. Tk - 1; beyond those they are cut.

    Neither may decrease along a row: that is not checked, since a look at the values would wait for the GPU."""
    lo = lo.clamp(0, Tk).int().contiguous()
    hi = torch.maximum(hi.clamp(-1, Tk - 1).int(), lo - 1).contiguous()
    j = torch.arange(Tk, device=lo.device, dtype=torch.int32).expand(lo.shape[0], Tk).contiguous()
    q_lo = torch.searchsorted(hi, j, out_int32=True)                        # queries that end before j
    q_hi = torch.searchsorted(lo, j, right=True, out_int32=True) - 1        # the last query that begins by j
    return Mask(lo=lo, hi=hi, q_lo=q_lo, q_hi=q_hi)


def without_values(x: Tensor) -> bool:
    """Whether x is a shape alone: fake, meta, or of another class of torch's that stands for a tensor."""
    return type(x) is not Tensor or x.is_meta


def pairs(mask: Mask, B: int, Tq: int, Tk: int) -> int:
    """How many (query, key) pairs `mask` lets attend in B rows. Vectors are read, which waits for the GPU; fake ones
    (no values, as when only shapes are traced) count as plain causal."""
    if mask.lo is None:
        return B * (_staircase(Tq, Tk, mask.right) - _staircase(Tq, Tk, -mask.left - 1))
    if without_values(mask.lo):
        return pairs(causal_mask(), B, Tq, Tk)
    return int((mask.hi - mask.lo + 1).sum(dtype=torch.int64))


def _staircase(Tq: int, Tk: int, offset: int) -> int:
    """Pairs with j <= i + Tk - Tq + offset: the sum over i of that bound + 1, cut to 0 .. Tk."""
    def triangle(n: int) -> int:
        return n * (n + 1) // 2 if n > 0 else 0
    first = Tk - Tq + offset
    return triangle(Tq + first) - triangle(first) - triangle(Tq + first - Tk) + triangle(first - Tk)


@triton.jit
def interval(lo_ptr, hi_ptr, x, n_x, n_y, before, after):
    """First and last y that x reaches; x is an index or a tile of them. Keys of queries, or, with the arguments
    swapped, queries of keys; lo_ptr None: the closed form. An x past the end answers as the last one does."""
    x = tl.minimum(x, n_x - 1)
    if lo_ptr is not None:
        lo = tl.load(lo_ptr + x)
        hi = tl.load(hi_ptr + x)
    else:
        lo = tl.maximum(x + (n_y - n_x) - before, 0)
        hi = tl.maximum(tl.minimum(x + (n_y - n_x) + after, n_y - 1), lo - 1)
    return lo, hi


@triton.jit
def tile_range(lo_ptr, hi_ptr, x0, BLOCK_X: tl.constexpr, n_x, n_y, before, after, BLOCK_Y: tl.constexpr):
    """Tiles of y for the rows x0 .. x0 + BLOCK_X - 1: edge tiles are [begin, full_begin) and [full_end, end), and
    every pair of a tile in [full_begin, full_end) is seen."""
    first_lo, first_hi = interval(lo_ptr, hi_ptr, x0, n_x, n_y, before, after)
    last_lo, last_hi = interval(lo_ptr, hi_ptr, x0 + BLOCK_X - 1, n_x, n_y, before, after)
    begin = first_lo // BLOCK_Y
    end = tl.maximum(tl.cdiv(last_hi + 1, BLOCK_Y), begin)
    full_begin = tl.minimum(tl.cdiv(last_lo, BLOCK_Y), end)
    full_end = tl.maximum((first_hi + 1) // BLOCK_Y, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def edges(begin, full_begin, full_end, end):
    """Of tile_range's answer: tiles before the first number must ask for lo, tiles from the second one on for hi. Where
    no tile is full, the same tile may hold both edges, and all ask for both."""
    none = full_begin == full_end
    return tl.where(none, end, full_begin), tl.where(none, begin, full_end)


@triton.jit
def first_row(step, gap_at, gap, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Row where this step's tile begins; a walk over edge tiles (MASKED) jumps over `gap` full ones at `gap_at`."""
    if MASKED:
        step += tl.where(step >= gap_at, gap, 0)
    return step * BLOCK
