"""The mask as vectors, as closed form and as tile ranges, against brute force over every pair."""
import functools

import pytest
import torch
import triton
import triton.language as tl
from attention_cases import document_starts, packing, running, segment_mask
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn2 import Mask, causal_mask, full_mask, reference, varlen_mask
from flash_attn2.masks import NO_BOUND, edges, from_bounds, interval, tile_range

TILES = [(64, 64), (16, 64), (64, 16), (32, 128)]


@triton.jit
def interval_kernel(lo_ptr, hi_ptr, out_ptr, n_x, n_y, before, after, BLOCK_X: tl.constexpr):
    x = tl.program_id(0) * BLOCK_X + tl.arange(0, BLOCK_X)
    lo, hi = interval(lo_ptr, hi_ptr, x, n_x, n_y, before, after)
    tl.store(out_ptr + 2 * x, lo)
    tl.store(out_ptr + 2 * x + 1, hi)


@triton.jit
def tile_range_kernel(lo_ptr, hi_ptr, out_ptr, n_x, n_y, before, after, BLOCK_X: tl.constexpr, BLOCK_Y: tl.constexpr):
    pid = tl.program_id(0)
    begin, full_begin, full_end, end = tile_range(lo_ptr, hi_ptr, pid * BLOCK_X, BLOCK_X, n_x, n_y, before, after,
                                                  BLOCK_Y)
    lo_until, hi_from = edges(begin, full_begin, full_end, end)
    tl.store(out_ptr + 6 * pid, begin)
    tl.store(out_ptr + 6 * pid + 1, full_begin)
    tl.store(out_ptr + 6 * pid + 2, full_end)
    tl.store(out_ptr + 6 * pid + 3, end)
    tl.store(out_ptr + 6 * pid + 4, lo_until)
    tl.store(out_ptr + 6 * pid + 5, hi_from)


def bounds(mask: Mask, keys: bool, row: int):
    """What the kernels pass for query rows (keys False) or key rows (True) of one batch row."""
    if mask.lo is None:
        return None, None, *((mask.right, mask.left) if keys else (mask.left, mask.right))
    lo, hi = (mask.q_lo, mask.q_hi) if keys else (mask.lo, mask.hi)
    return lo[row], hi[row], mask.left, mask.right


def intervals(mask: Mask, n_x: int, n_y: int, keys: bool, device, row: int = 0, block: int = 64) -> torch.Tensor:
    """(tiles * block, 2): lo and hi of every row, those past the end of the last tile too."""
    tiles = triton.cdiv(n_x, block)
    out = torch.full((tiles * block, 2), -999, dtype=torch.int32, device=device)
    lo, hi, before, after = bounds(mask, keys, row)
    interval_kernel[(tiles,)](lo, hi, out, n_x, n_y, before, after, BLOCK_X=block)
    return out.cpu()


def ranges(mask: Mask, n_x: int, n_y: int, keys: bool, device, block_x: int, block_y: int, row: int = 0):
    return [walk[:4] for walk in walks_and_edges(mask, n_x, n_y, keys, device, block_x, block_y, row)]


def walks_and_edges(mask: Mask, n_x: int, n_y: int, keys: bool, device, block_x: int, block_y: int, row: int = 0):
    """Of each tile begin, full_begin, full_end, end, lo_until, hi_from."""
    tiles = triton.cdiv(n_x, block_x)
    out = torch.full((tiles, 6), -999, dtype=torch.int32, device=device)
    lo, hi, before, after = bounds(mask, keys, row)
    tile_range_kernel[(tiles,)](lo, hi, out, n_x, n_y, before, after, BLOCK_X=block_x, BLOCK_Y=block_y)
    return out.cpu().tolist()


def check_edges(mask: Mask, seen: torch.Tensor, device, row: int, block_x: int, block_y: int) -> None:
    """In each tile that is walked, and in its neighbours, the bounds that it asks for leave what is seen."""
    for keys, pairs in ((False, seen), (True, seen.T)):
        n_x, n_y = pairs.shape
        bound = intervals(mask, n_x, n_y, keys, device, row)[:n_x]
        walks = walks_and_edges(mask, n_x, n_y, keys, device, block_x, block_y, row)
        for t, (begin, _, _, end, lo_until, hi_from) in enumerate(walks):
            x = slice(t * block_x, (t + 1) * block_x)
            lo, hi = bound[x, :1], bound[x, 1:]
            for tile in range(max(begin - 1, 0), end + 2):
                y = torch.arange(tile * block_y, (tile + 1) * block_y)
                left = ((y >= lo) | (tile >= lo_until)) & ((y <= hi) | (tile < hi_from))
                want = torch.nn.functional.pad(pairs[x], (0, block_y))[:, tile * block_y:(tile + 1) * block_y]
                assert torch.equal(left[:, :want.shape[1]], want) and not left[:, want.shape[1]:].any()


def check_intervals(mask: Mask, seen: torch.Tensor, device, row: int = 0) -> None:
    """For queries and for keys: y lies in [lo, hi] exactly where the pair is seen; nothing is hi = lo - 1."""
    for keys, pairs in ((False, seen), (True, seen.T)):
        n_x, n_y = pairs.shape
        got = intervals(mask, n_x, n_y, keys, device, row)
        lo, hi = got[:n_x, 0], got[:n_x, 1]
        y = torch.arange(n_y)
        assert torch.equal((y >= lo[:, None]) & (y <= hi[:, None]), pairs)
        assert torch.equal(got[n_x:], got[n_x - 1:n_x].expand(len(got) - n_x, 2)), "past the end: as the last one"
        assert ((hi >= lo - 1) & (lo >= 0) & (hi < n_y)).all()
        assert (lo.diff() >= 0).all() and (hi.diff() >= 0).all(), "bounds never decrease"


def check_ranges(mask: Mask, seen: torch.Tensor, device, row: int = 0, block_x: int = 64, block_y: int = 64) -> None:
    """Every seen pair is walked; every pair of a full tile exists and is seen; no full tile is missed."""
    for keys, pairs in ((False, seen), (True, seen.T)):
        n_x, n_y = pairs.shape
        walks = ranges(mask, n_x, n_y, keys, device, block_x, block_y, row)
        for t, (begin, full_begin, full_end, end) in enumerate(walks):
            assert 0 <= begin <= full_begin <= full_end <= end <= triton.cdiv(n_y, block_y) + (begin == end)
            rows = pairs[t * block_x:(t + 1) * block_x]
            walked = torch.zeros(n_y, dtype=torch.bool)
            walked[begin * block_y:end * block_y] = True
            assert not (rows & ~walked).any(), f"tile {t} of {'keys' if keys else 'queries'} misses a pair"
            assert full_end == full_begin or full_end * block_y <= n_y, "a full tile reaches past the end"
            assert rows[:, full_begin * block_y:full_end * block_y].all(), f"tile {t}: a full tile hides an unseen pair"
            columns = rows.all(0)[:n_y // block_y * block_y].view(-1, block_y).all(1)
            assert columns.sum() == full_end - full_begin, f"tile {t}: a full tile is walked as an edge"
            if rows.any(1).all():  # no row is empty: the walk is tight at both ends
                assert rows[:, begin * block_y:(begin + 1) * block_y].any()
                assert rows[:, (end - 1) * block_y:end * block_y].any()


def check(mask: Mask, seen: torch.Tensor, device, row: int = 0, tiles=TILES) -> None:
    check_intervals(mask, seen, device, row)
    for block_x, block_y in tiles:
        check_ranges(mask, seen, device, row, block_x, block_y)
    for block_x, block_y in tiles[::2]:
        check_edges(mask, seen, device, row, block_x, block_y)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 129, 130, 131], ids="window{}".format)
def test_window_edges_by_hand(window, device):
    """T = 130: query i sees `window` keys, itself included, or all. As closed form and as vectors."""
    T = 130
    expected = torch.tensor([[max(0, i - window + 1), i] for i in range(T)], dtype=torch.int32)
    expected_q = torch.tensor([[j, min(T - 1, j + window - 1)] for j in range(T)], dtype=torch.int32)
    closed = causal_mask(window)
    assert closed == Mask(left=window - 1, right=0)
    vectors = causal_mask(window, torch.zeros(1, T, dtype=torch.int64, device=device))
    for mask in (closed, vectors):
        assert torch.equal(intervals(mask, T, T, False, device)[:T], expected)
        assert torch.equal(intervals(mask, T, T, True, device)[:T], expected_q)


def test_by_hand_two_documents(device):
    """a a a b b, window 2."""
    mask = causal_mask(2, torch.tensor([[0, 0, 0, 3, 3]], device=device))
    assert mask.lo.tolist() == [[0, 0, 1, 3, 3]] and mask.hi.tolist() == [[0, 1, 2, 3, 4]]
    assert mask.q_lo.tolist() == [[0, 1, 2, 3, 4]] and mask.q_hi.tolist() == [[1, 2, 2, 4, 4]]


def test_by_hand_tile_ranges(device):
    """T = 256, tiles of 64, causal and window 100. (begin, full_begin, full_end, end)"""
    of_queries, of_keys = (ranges(causal_mask(), 256, 256, keys, device, 64, 64) for keys in (False, True))
    assert of_queries == [[0, 0, 0, 1], [0, 0, 1, 2], [0, 0, 2, 3], [0, 0, 3, 4]]
    assert of_keys == [[0, 1, 4, 4], [1, 2, 4, 4], [2, 3, 4, 4], [3, 4, 4, 4]]
    # query 128 sees keys 29 to 128 and query 191 keys 92 to 191: no tile is within both
    assert ranges(causal_mask(100), 256, 256, False, device, 64, 64)[2] == [0, 2, 2, 3]


def test_whole_row_is_one_walk_of_full_tiles(device):
    assert ranges(full_mask(), 128, 192, False, device, 64, 64) == [[0, 0, 3, 3]] * 2
    assert ranges(full_mask(), 192, 128, True, device, 64, 64) == [[0, 0, 2, 2]] * 3
    assert ranges(full_mask(), 128, 190, False, device, 64, 64) == [[0, 0, 2, 3]] * 2, "an unfinished tile is an edge"


@pytest.mark.parametrize("Tq, Tk", [(1, 1), (65, 65), (128, 128), (1, 130), (130, 1), (65, 130), (130, 65), (128, 64)])
def test_closed_form(Tq, Tk, device):
    """Causal, whole rows, windows on either side and both, each against every pair."""
    edges = (0, 1, 63, 64, Tq - 1, NO_BOUND)
    both = {(5, 70), (70, 5), (NO_BOUND, 9), (NO_BOUND, NO_BOUND)}
    for left, right in {(n, 0) for n in edges} | {(0, n) for n in edges} | both:
        seen = reference.seen(Tq, Tk, causal=False, window=(left, right))
        check(Mask(left, right), seen, device, tiles=TILES[:2])


@pytest.mark.parametrize("seed", range(6))
def test_random_documents(seed, device):
    """Two rows of packed documents, with and without a window."""
    torch.manual_seed(seed)
    T = int(torch.randint(2, 260, ()))
    docs = tuple(packing(T, int(torch.randint(1, min(T, 12) + 1, ())), 2 * seed + b) for b in range(2))
    starts = document_starts(docs)
    for window in (0, int(torch.randint(1, T + 2, ()))):
        mask = causal_mask(window, starts.to(device))
        seen = reference.seen(T, T, window=(window - 1, None) if window else None, doc_q=starts, doc_k=starts)
        for row in range(2):
            check(mask, seen[row], device, row)


@pytest.mark.parametrize("seed", range(6))
def test_random_segments(seed, device):
    """Documents whose queries and keys differ in number, empty ones among them."""
    torch.manual_seed(seed)
    counts = torch.randint(0, 90, (6, 2)) * (torch.rand(6, 2) > 0.25)
    segments = (*((int(q), int(k)) for q, k in counts), (3, 2))
    mask, seen = segment_mask(segments, 2, device)
    check(mask, seen.cpu(), device, row=1)


@pytest.mark.parametrize("seed", range(6))
def test_random_monotone_bounds(seed, device):
    """Any lo and hi that never decrease, hi below lo - 1 included (a row without keys)."""
    torch.manual_seed(seed)
    Tq, Tk = (int(n) for n in torch.randint(1, 200, (2,)))
    lo = torch.randint(0, Tk + 1, (1, Tq)).sort(1).values
    hi = torch.randint(-1, Tk, (1, Tq)).sort(1).values
    j = torch.arange(Tk)
    seen = (j >= lo[..., None]) & (j <= hi[..., None])
    mask = from_bounds(lo.to(device), hi.to(device), Tk)
    check(mask, seen[0], device)


def test_vectors_are_what_the_kernels_take(device):
    mask = causal_mask(7, document_starts(((3, 4), (7,)), device))
    for x in mask[2:]:
        assert x.dtype == torch.int32 and x.is_contiguous() and x.shape == (2, 7) and x.device.type == device.type


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_document_starts_of_any_integer_type(dtype, device):
    starts = document_starts(((3, 4),), device)
    for a, b in zip(causal_mask(2, starts.to(dtype))[2:], causal_mask(2, starts)[2:], strict=True):
        assert torch.equal(a, b)


def test_one_row_of_starts_expanded_over_the_batch(device):
    """Stride 0 in, contiguous out."""
    mask = causal_mask(0, document_starts(((3, 4),), device).expand(5, 7))
    assert mask.lo.shape == (5, 7) and all(x.is_contiguous() for x in mask[2:])


def test_window_is_a_number_of_keys():
    with pytest.raises(ValueError, match="window=-1 must be a number of keys, or 0 for no window"):
        causal_mask(-1)
    starts = torch.zeros(1, 8, dtype=torch.int32)
    assert all(torch.equal(a, b) for a, b in zip(causal_mask(3_000_000_000, starts)[2:], causal_mask(0, starts)[2:],
                                                 strict=True))


def test_bounds_past_the_keys_are_cut():
    lo, hi = torch.tensor([[-3, 0, 4, 9]]), torch.tensor([[0, 7, 9, 12]])
    mask = from_bounds(lo, hi, 6)
    assert mask.lo.tolist() == [[0, 0, 4, 6]] and mask.hi.tolist() == [[0, 5, 5, 5]]
    assert mask.q_lo.tolist() == [[0, 1, 1, 1, 1, 1]] and mask.q_hi.tolist() == [[1, 1, 1, 1, 2, 2]]


def cumulative(lengths, device=None) -> torch.Tensor:
    return torch.tensor([*running(lengths), sum(lengths)], dtype=torch.int32, device=device)


cached_seen = functools.lru_cache(None)(reference.seen)


def packed_seen(segments, total_q: int, total_k: int, left: int, right: int) -> torch.Tensor:
    """(total_q, total_k), one block for each segment's (queries, keys); tokens past the last see nothing."""
    seen, i, j = torch.zeros(total_q, total_k, dtype=torch.bool), 0, 0
    for n_q, n_k in segments:
        seen[i:i + n_q, j:j + n_k] = cached_seen(n_q, n_k, causal=False, window=(left, right))
        i, j = i + n_q, j + n_k
    return seen


def test_varlen_by_hand(device):
    """2 queries over 3 keys, none over 1, 3 over 2; then 2 queries and 2 keys of nobody. Causal."""
    mask = varlen_mask(cumulative((2, 0, 3), device), cumulative((3, 1, 2), device), 7, 8, right=0)
    assert mask.lo.tolist() == [[0, 0, 4, 4, 4, 6, 6]] and mask.hi.tolist() == [[1, 2, 3, 4, 5, 5, 5]]
    assert mask.q_lo.tolist() == [[0, 0, 1, 2, 3, 4, 7, 7]] and mask.q_hi.tolist() == [[1, 1, 1, 1, 4, 4, 6, 6]]


def test_varlen_of_3000_random_packings():
    """Every pair, both ways round; 0 to 5 segments of 0 to 6 queries and keys, then 0 to 3 tokens of nobody."""
    sides = (0, 1, 2, 5, NO_BOUND, 2 * NO_BOUND)
    for _ in range(3000):
        counts = torch.randint(0, 7, (int(torch.randint(0, 6, ())), 2)) * (torch.rand(2) > 0.1)
        rest_q, rest_k, left, right = torch.randint(0, 24, (4,)).tolist()
        segments, left, right = counts.tolist(), sides[left % 6], sides[right % 6]
        total_q, total_k = int(counts[:, 0].sum()) + rest_q % 4, int(counts[:, 1].sum()) + rest_k % 4
        mask = varlen_mask(*(cumulative(counts[:, n].tolist()) for n in (0, 1)), total_q, total_k, left, right)
        lo, hi, q_lo, q_hi = (x[0] for x in mask[2:])
        i, j = torch.arange(total_q)[:, None], torch.arange(total_k)
        case = f"{segments=} {total_q=} {total_k=} {left=} {right=}"
        seen = packed_seen(segments, total_q, total_k, left, right)
        assert torch.equal((j >= lo[:, None]) & (j <= hi[:, None]), seen), case
        assert torch.equal((i >= q_lo) & (i <= q_hi), seen), case
        for first, last, n in ((lo, hi, total_k), (q_lo, q_hi, total_q)):
            assert (first.diff() >= 0).all() and (last.diff() >= 0).all(), f"a bound falls: {case}"
            assert (first >= 0).all() and (last < n).all() and (last >= first - 1).all(), case


@pytest.mark.parametrize("left, right", [(NO_BOUND, 0), (NO_BOUND, NO_BOUND), (20, 0), (10, 70)])
def test_varlen_as_the_kernels_walk_it(left, right, device):
    """Tiles too: long segments, an empty one on either side, tokens of nobody."""
    segments = ((100, 30), (0, 5), (7, 90), (60, 0), (1, 1))
    cu_q, cu_k = (cumulative(n, device) for n in zip(*segments, strict=True))
    mask = varlen_mask(cu_q, cu_k, 200, 130, left, right)
    check(mask, packed_seen(segments, 200, 130, left, right), device)


def test_varlen_tokens_of_nobody_walk_no_tiles(device):
    mask = varlen_mask(cumulative((64,), device), cumulative((64,), device), 256, 256, left=5, right=0)
    for keys in (False, True):
        assert all(begin == end for begin, *_, end in ranges(mask, 256, 256, keys, device, 64, 64)[1:])


def test_varlen_of_equal_queries_and_keys_is_packed_documents(device):
    documents = (5, 1, 60, 64)
    mask = varlen_mask(*[cumulative(documents, device)] * 2, 130, 130, 19, 0)
    for ours, packed in zip(mask[2:], causal_mask(20, document_starts((documents,), device))[2:], strict=True):
        assert torch.equal(ours, packed)


def test_varlen_wrong_values_reach_no_key_that_is_not_there(device):
    """Nobody checks the values inside a compiled graph: whatever they are, the bounds stay within the row."""
    extremes = torch.tensor([-2**31, 2**31 - 1, -1, 0, 1])
    for n in range(300):
        cu_q, cu_k = torch.randint(-40, 80, (2, n % 6 + 1)) if n % 2 else extremes[torch.randint(0, 5, (2, n % 6 + 1))]
        mask = varlen_mask(cu_q.int().to(device), cu_k.int().to(device), 30, 20, NO_BOUND if n % 3 else 4, n % 5)
        for first, last, end in ((mask.lo, mask.hi, 20), (mask.q_lo, mask.q_hi, 30)):
            assert (first >= 0).all() and (first <= end).all() and (last >= -1).all() and (last < end).all()


def test_varlen_compiled_is_eager(device):
    """By inductor, in one graph, for other values without compiling again."""
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(varlen_mask, backend=counter, fullgraph=True)
    for lengths in (((9, 0, 3), (0, 7, 5)), ((0, 12, 0), (2, 3, 4))):
        args = (*(cumulative(n, device) for n in lengths), 13, 12, 6, 0)
        for ours, eager in zip(compiled(*args)[2:], varlen_mask(*args)[2:], strict=True):
            assert torch.equal(ours, eager)
    assert counter.frame_count == 1


@pytest.mark.parametrize("left, right", [(-1, 0), (0, -1)])
def test_varlen_sides_are_numbers_of_keys(left, right):
    with pytest.raises(ValueError, match=f"left={left} and right={right} must be numbers of keys"):
        varlen_mask(cumulative((3,)), cumulative((3,)), 3, 3, left, right)


@pytest.mark.gpu
def test_varlen_never_waits_for_the_gpu(device):
    cu_seqlens = cumulative((100, 0, 28), device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        varlen_mask(cu_seqlens, cu_seqlens, 130, 128, right=0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
