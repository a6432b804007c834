"""Faults that users of other attention kernels reported: a recipe each, and the right result.

Each entry: the public threads (and the fault, where its tests stand in other files), then the tests that cover it, or
why none does. A test without a file is in this one.

Sizes
    thu-ml/SageAttention#386
        test_a_packed_view_past_2_31_elements
    fla-org/flash-linear-attention#769, state-spaces/mamba#1015, Knowledgator/FlashDeBERTa#11
        test_more_than_2_31_rows_of_lse, test_a_million_tokens
    Dao-AILab/flash-attention#1500
        test_many_short_rows_past_2_31_elements
    pytorch/pytorch#160955, NVIDIA-NeMo/Automodel#3802
        test_thirty_two_rows_of_32768, test_numerics.py::test_long_sequences
    B * H > 65535 on a grid axis: fla-org/flash-linear-attention#172, #1077, triton-lang/triton#3299,
    flashinfer-ai/flashinfer#3125
        test_more_than_65535_heads

Lengths and masks
    NaN from scores past the last row: Dao-AILab/flash-attention's own test_flash_attn_bwd_overflow
        test_large_scores_past_the_last_row, test_backward.py::test_large_scores_past_the_last_row_make_no_nan
    Dao-AILab/flash-attention#443: documents of one key, dq NaN
        test_interface.py::test_443_one_key_for_many_queries
    Dao-AILab/flash-attention#1778: rows without keys
        test_interface.py::test_1778_causal_with_more_queries_than_keys,
        test_forward.py::test_row_without_keys_is_zero_with_lse_minus_infinity,
        test_backward.py::test_row_without_keys_passes_no_gradient
    microsoft/onnxruntime#28904
        test_a_masked_row_is_zero_not_the_mean
    pytorch/pytorch#153799, openxla/tokamax#316
        test_every_length
    triton-lang/kernels#6
        test_one_query_of_twenty_keys
    Dao-AILab/flash-attention#1133, #1366, #2199, huggingface/transformers#39408
        test_windows_at_the_edges_of_tiles, test_interface.py::test_1133_1366_2199_39408_windows,
        test_forward.py::test_window_that_reaches_everything_is_causal

Packed documents
    Dao-AILab/flash-attention#1254: a document without queries, the backward hung
        test_interface.py::test_1254_a_segment_of_keys_alone
    Dao-AILab/flash-attention#2562: the same of width 256, an illegal address
        test_interface.py::test_2562_segments_without_queries_of_width_256
    Dao-AILab/flash-attention#2470, #2515, #1159, pytorch/pytorch#166318: no keys, no queries, no batch
        test_interface.py::test_2470_2515_1159_nothing_to_attend,
        test_interface.py::test_2470_2515_1159_nothing_to_attend_packed,
        test_forward.py::test_nothing_in_nothing_out, test_backward.py::test_nothing_in_zero_out
    XunhaoLai/native-sparse-attention-triton#27
        test_grouped_heads
    Dao-AILab/flash-attention#648
        test_grouped_heads, test_interface.py::test_648_lse_of_grouped_heads

Strides
    Dao-AILab/flash-attention#355
        test_do_of_every_other_batch_row
    facebookresearch/xformers#282, ROCm/TransformerEngine#623, pytorch/pytorch#194719
        test_do_as_autograd_makes_it, test_backward.py::test_do_of_any_layout
    ROCm/aotriton#236, flagos-ai/FlagAttention#46, #1
        test_five_layouts_at_once, test_backward.py::test_q_k_v_of_any_layout
    pytorch/executorch#22193, meta-pytorch/attention-gym#367
        test_rows_that_no_vector_load_can_read

Head widths, dtypes, options
    triton-lang/triton#621, pytorch/pytorch#133321, #133495, sgl-project/sglang#1281
        test_every_width, test_numerics.py::test_widths_and_lengths
    evintunador/triton_docs_tutorials#6, triton-lang/triton#1821
        test_float32_is_not_tf32, test_backward.py::test_float32_on_a_gpu
    triton-lang/triton#4174, KempnerInstitute/KempnerForge#206
        test_every_combination_of_options
    mixed dtypes
        test_mixed_dtypes, test_ops.py::test_error

torch.compile, devices, threads
    Comfy-Org/ComfyUI#15044, vllm-project/vllm#58182, NVIDIA/cuEquivariance#223, hao-ai-lab/FastVideo#1647,
    AMD-AGI/Primus-Turbo#362: a compiled graph is told other strides than the kernel returns
        test_ops.py::test_compiled_is_eager, test_ops.py::test_opcheck_forward_of_transposed_inputs
    pytorch/pytorch#136232: NaN at the second length compiled, with a gradient of lse
        test_ops.py::test_second_length_compiled
    triton-lang/triton#2441, Dao-AILab/flash-attention#523, #54, pytorch/pytorch#141010: tensors on cuda:1
        test_ops.py::test_on_a_device_that_is_not_the_current_one
    vllm-project/vllm#33857, pytorch/helion#416
        test_backward_in_a_fresh_thread, test_in_a_spawned_process

Tuning, atomics, repeats
    triton-lang/triton#4217, #3004, #5339, #3755
        test_nothing_is_tuned_and_only_hopper_adds
    Dao-AILab/flash-attention#429, #988, #1766, #2244, #2510
        test_repeats, test_repeats_under_load
    races at odd widths and lengths: the head of Dao-AILab/flash-attention's flash_attn_triton.py
        test_thousands_of_repeats

Triton's compiler
    fla-org/flash-linear-attention#826, triton-lang/triton#6124, openxla/xla#19780
        test_every_tile_of_the_table, test_numerics.py::test_widths_and_lengths: all five products, as shipped
    fla-org/flash-linear-attention#984, #988, #945
        test_every_tile_of_the_table
    fla-org/flash-linear-attention#1262
        test_arguments_of_one, with the ptxas that triton ships
    triton-lang/triton#9728, #8260, #7354: warp specialization crashes the compiler
        test_compile.py::test_every_tile_fits, test_hopper.py::test_every_configuration_fits: each is compiled
    triton-lang/triton#10821: two products into one accumulator
        none: the fault is Blackwell's, and our accumulators are separate

Triton's interpreter
    triton-lang/triton#11584: bfloat16 products wrong by 1e10
        test_ops.py::test_bfloat16_on_a_cpu_is_refused
    numpy 2.4 under triton 3.6: no loop over run-time bounds
        none: the Makefile pins numpy beside triton 3.6, and every test on a CPU has such loops
    no atomics on descriptors, none in bfloat16, no inline assembly
        test_tiles.py::test_descriptors_load_what_pointers_load: it runs our TMA descriptors; the rest only
        Hopper's kernels use, which never run there
    a row that is -inf throughout gives NaN
        test_forward.py::test_row_without_keys_is_zero_with_lse_minus_infinity
    autotune of two configs wants a GPU
        test_nothing_is_tuned_and_only_hopper_adds
"""
import ast
import itertools
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from attention_cases import (
    FULL,
    Case,
    Inputs,
    assert_as_good_as_torch,
    assert_same_bits,
    document_starts,
    dq_in_any_order,
    make_inputs,
    make_mask,
    on_both,
    ours,
    packing,
    same,
)
from torch import Tensor

import flash_attn2
from flash_attn2 import Mask, causal_mask, flash_attention, tiles
from flash_attn2.backward import backward
from flash_attn2.masks import from_bounds


def names_in(file: str) -> set[str]:
    tree = ast.parse((Path(__file__).parent / file).read_text())
    return {f.name for f in tree.body if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")}


def test_the_index_is_true():
    """Every test that it names exists, and every other test of this file stands in it."""
    here = Path(__file__).name
    lines = "".join(re.findall(r"^ {8}\S.*", __doc__, re.M))
    named = {(file or here, test) for file, test in re.findall(r"(?:\b(test_\w+\.py)::)?\b(test_\w+)", lines)}
    assert not {(file, test) for file, test in named if test not in names_in(file)}
    assert names_in(here) - {"test_the_index_is_true"} == {test for file, test in named if file == here}


def random_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """make_inputs for tensors so large that no float32 copy of them may exist."""
    H_kv = case.H_kv or case.H
    q, do = (torch.randn(case.B, case.Tq, case.H, case.D, dtype=dtype, device=device) for _ in range(2))
    k, v = (torch.randn(case.B, case.keys, H_kv, case.D, dtype=dtype, device=device) for _ in range(2))
    return Inputs(*(t.requires_grad_() for t in (q, k, v)), do, torch.randn(case.B, case.H, case.Tq, device=device))


def batch_rows(x: Inputs, rows: slice) -> Inputs:
    return Inputs(*(t.detach()[rows].requires_grad_() for t in x[:3]), x.do[rows], x.dlse[rows])


def assert_rows_as_if_alone(got: dict[str, Tensor], x: Inputs, mask: Mask, rows: slice) -> None:
    """These batch rows, bit for bit as a call of theirs alone gives them."""
    alone = mask if mask.lo is None else Mask(mask.left, mask.right, *(t[rows] for t in mask[2:]))
    assert_same_bits(ours(batch_rows(x, rows), alone), {name: value[rows] for name, value in got.items()},
                     dq_in_any_order(x), str(rows))


@on_both(Case(66, H=1, D=16, window=40), Case(2**31 // (3 * 32 * 128) + 1000, H=32, D=128, window=129))
def test_a_packed_view_past_2_31_elements(case, dtype, device, big):
    """thu-ml/SageAttention#386: q, k, v are views of one (1, S, 3, H, D), and row * stride overflowed."""
    big(30)
    qkv = torch.randn(1, case.Tq, 3, case.H, case.D, dtype=dtype, device=device)
    x = Inputs(*(t.detach().requires_grad_() for t in qkv.unbind(2)), torch.randn_like(qkv[:, :, 0]).contiguous(),
               torch.randn(1, case.H, case.Tq, device=device))
    copies = x._replace(**{n: getattr(x, n).detach().contiguous().requires_grad_() for n in "qkv"})
    assert x.q.stride(1) == 3 * copies.q.stride(1)
    assert_same_bits(ours(x, causal_mask(case.window)), ours(copies, causal_mask(case.window)),
                     dq_in_any_order(x))


@on_both(Case(40, B=2, H=4, H_kv=1, D=1, window=16), Case(2**22 + 8, B=8, H=64, H_kv=1, D=1, window=16))
def test_more_than_2_31_rows_of_lse(case, dtype, device, big):
    """fla-org/flash-linear-attention#769, state-spaces/mamba#1015, Knowledgator/FlashDeBERTa#11: lse and delta too have
    more than 2^31 elements. One column wide, so that all of it fits."""
    big(50)
    x = random_inputs(case, dtype, device)
    assert x.dlse.numel() > 2**31 or dtype == torch.float32
    mask = causal_mask(case.window)
    got = ours(x, mask)
    for rows in (slice(0, 1), slice(case.B - 1, None)):
        assert_rows_as_if_alone(got, x, mask, rows)


@on_both(Case(320, H=1, D=16, window=40), Case(2**20, H=6, H_kv=3, window=1025))
@pytest.mark.parametrize("form", ["closed", "documents"])
def test_a_million_tokens(case, dtype, form, device):
    """state-spaces/mamba#1015, Knowledgator/FlashDeBERTa#11: the last tokens as if the first had never been."""
    T = case.Tq
    tail, sure = (192, 64) if T == 320 else (8192, 4096)        # T - tail a multiple of every tile: the same walk
    x = random_inputs(case, dtype, device)
    docs = packing(T - tail // 2, 9, 0) + (tail // 4, tail // 4)
    starts = document_starts((docs,), device) if form == "documents" else None
    got = ours(x, causal_mask(case.window, starts))
    late = Inputs(*(t.detach()[:, -tail:].requires_grad_() for t in x[:3]), x.do[:, -tail:], x.dlse[..., -tail:])
    late_starts = None if starts is None else (starts[:, -tail:] - (T - tail)).clamp(min=0)
    expected = ours(late, causal_mask(case.window, late_starts))
    for g in (got, expected):
        g["lse"] = g["lse"].transpose(1, 2)
    assert_same_bits(*({n: t[:, -sure:] for n, t in g.items()} for g in (got, expected)), dq_in_any_order(x))


@on_both(Case(33, B=3, H=2, H_kv=1, D=16), Case(256, B=16384, H=16, H_kv=4, D=64))
def test_many_short_rows_past_2_31_elements(case, dtype, device, big):
    """Dao-AILab/flash-attention#1500: 2^32 elements of q, the batch row's offset overflowed in the backward."""
    big(64)
    x = random_inputs(case, dtype, device)
    got = ours(x, causal_mask())
    n = case.B // 32 + 1
    for first in (0, case.B // 2 - n // 2, case.B - n):
        assert_rows_as_if_alone(got, x, causal_mask(), slice(first, first + n))


@on_both(Case(70, B=2, H=1, D=16, window=40), Case(32768, B=32, H=6, H_kv=3, window=1025))
def test_thirty_two_rows_of_32768(case, dtype, device):
    """pytorch/pytorch#160955, NVIDIA-NeMo/Automodel#3802: B * T * T is past 2^31 many times over."""
    docs = tuple(packing(case.Tq, 5 + b, b) for b in range(case.B))
    x, mask = random_inputs(case, dtype, device), causal_mask(case.window, document_starts(docs, device))
    got = ours(x, mask)
    for b in (0, case.B - 1):
        assert_rows_as_if_alone(got, x, mask, slice(b, b + 1))


@pytest.mark.parametrize("case, dtype", [
    pytest.param(Case(17, B=3, H=2, H_kv=1, D=16), torch.float32, id="small"),
    pytest.param(Case(17, B=10923, H=6, H_kv=3, D=16), torch.bfloat16, id="65538", marks=pytest.mark.gpu),
    pytest.param(Case(17, B=16384, H=4, H_kv=2, D=16), torch.bfloat16, id="65536", marks=pytest.mark.gpu)])
def test_more_than_65535_heads(case, dtype, device):
    """fla-org/flash-linear-attention#172, #1077, triton-lang/triton#3299, flashinfer-ai/flashinfer#3125: axes y and z
    of a grid end there."""
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    got = ours(x, mask)
    for first in range(0, case.B, 4096):                 # torch's products by parts, which stay below the limit
        rows = slice(first, first + 4096)
        assert_as_good_as_torch({name: value[rows] for name, value in got.items()}, batch_rows(x, rows), seen)


@pytest.mark.parametrize("lengths, dtype", [
    pytest.param((97,), torch.float32, id="small"),
    pytest.param((97, 127, 129, 200, 1025), torch.bfloat16, id="bfloat16", marks=pytest.mark.gpu),
    pytest.param((97, 127, 129, 200, 1025), torch.float16, id="float16", marks=pytest.mark.gpu)])
def test_large_scores_past_the_last_row(lengths, dtype, device, poison):
    """Dao-AILab/flash-attention, test_flash_attn_bwd_overflow: an unmasked tail gave dq NaN."""
    for T in lengths:
        case = Case(T, H=2, H_kv=1, D=64 if device.type == "cuda" else 16, q_times=5.0)
        x = make_inputs(case, dtype, device)
        with torch.no_grad():
            x.k.mul_(3.0)
        mask, seen = make_mask(case, device)
        assert_as_good_as_torch(ours(x, mask), x, seen)


@on_both(Case(65, H=1, D=16), Case(1000, H=6, H_kv=3))
def test_a_masked_row_is_zero_not_the_mean(case, dtype, device, poison):
    """microsoft/onnxruntime#28904: with -1e30 for -inf a row without keys got the mean of v."""
    i, first, last = torch.arange(case.Tq, device=device), case.Tq // 3, case.Tq // 2
    blind = (i >= first) & (i < last)
    lo, hi = torch.where(i < first, 0, first), torch.where(blind, first - 1, i)
    x = make_inputs(case, dtype, device)
    with torch.no_grad():
        x.v.add_(3.0)
    got = ours(x, from_bounds(lo[None], hi[None], case.Tq))
    assert (got["o"][:, blind] == 0).all() and (got["lse"][..., blind] == float("-inf")).all()
    assert (got["dq"][:, blind] == 0).all()
    assert_as_good_as_torch(got, x, (i >= lo[:, None]) & (i <= hi[:, None]))


@pytest.mark.parametrize("more_keys", [0, 7])
@pytest.mark.parametrize("lengths, case, dtype", [
    pytest.param((1, 2, 17, 65), Case(1, H=1, D=16), torch.float32, id="small"),
    pytest.param(range(1, 131), Case(1, H=4, H_kv=2), torch.bfloat16, id="all", marks=pytest.mark.gpu)])
def test_every_length(lengths, case, dtype, more_keys, device, poison):
    """pytorch/pytorch#153799, openxla/tokamax#316: NaN gradients at some lengths."""
    for T in lengths:
        case = case._replace(Tq=T, Tk=T + more_keys)
        x = make_inputs(case, dtype, device)
        mask, seen = make_mask(case, device)
        assert_as_good_as_torch(ours(x, mask), x, seen)


@on_both(Case(1, 20, H=1, D=128), Case(1, 20, H=6, H_kv=3, D=128))
@pytest.mark.parametrize("kind", ["causal", "full"])
def test_one_query_of_twenty_keys(case, dtype, kind, device, poison):
    """triton-lang/kernels#6."""
    case = case if kind == "causal" else case._replace(sides=FULL)
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    assert seen.all()
    assert_as_good_as_torch(ours(x, mask), x, seen)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [129, 1024])
def test_windows_at_the_edges_of_tiles(T, device, poison):
    """Dao-AILab/flash-attention#1133, #1366, #2199, huggingface/transformers#39408: off by one at one end, zeros where
    queries and keys differ in number. `left` as flash-attn has it: left + 1 keys."""
    for left, more_keys in itertools.product((0, 1, 63, 64, 65, T - 1, T), (-1, 0, 1)):
        case = Case(T, T + more_keys, H=6, H_kv=3, sides=(left, 0))
        x = make_inputs(case, torch.bfloat16, device)
        mask, seen = make_mask(case, device)
        assert_as_good_as_torch(ours(x, mask), x, seen)


@on_both(Case(20, D=16), Case(300))
@pytest.mark.parametrize("H, H_kv", [(8, 2), (6, 3), (12, 4), (16, 2)])
def test_grouped_heads(case, dtype, H, H_kv, device, poison):
    """XunhaoLai/native-sparse-attention-triton#27, Dao-AILab/flash-attention#648: the key head of a query head, in dk
    and dv and in lse."""
    case = case._replace(H=H, H_kv=H_kv)
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    assert_as_good_as_torch(ours(x, mask), x, seen)


@on_both(Case(32, B=2, H=4, H_kv=1, D=128), Case(32, B=2, H=4, H_kv=1, D=128))
def test_do_of_every_other_batch_row(case, dtype, device, poison):
    """Dao-AILab/flash-attention#355 and its test_flash_attn_bwd_transpose."""
    x = make_inputs(case, dtype, device)
    do = torch.randn(case.Tq, 2 * case.B, case.H, case.D, device=device).to(dtype)[:, ::2].transpose(0, 1)
    assert not do.is_contiguous()
    assert_same_bits(ours(x._replace(do=do), causal_mask()), ours(x._replace(do=do.contiguous()), causal_mask()),
                     dq_in_any_order(x))


LOSSES = {
    "sum": lambda o, w: o.sum(),
    "mean": lambda o, w: o.mean(),
    "cat": lambda o, w: (torch.cat([o, w], 1) * torch.cat([w, w], 1)).sum(),
    "every_other_row": lambda o, w: o[:, ::2].sum(),
    "transpose": lambda o, w: (o.transpose(1, 2) * w.transpose(1, 2).contiguous()).sum(),
    "first_batch_row": lambda o, w: o[0].square().sum(),
}


@on_both(Case(20, B=2, H=1, D=16), Case(1000, B=2, H=6, H_kv=3))
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_do_as_autograd_makes_it(case, dtype, loss, device, poison):
    """facebookresearch/xformers#282, ROCm/TransformerEngine#623, pytorch/pytorch#194719: strides of 0 and of others."""
    x = make_inputs(case, dtype, device)
    o, _ = flash_attention(x.q, x.k, x.v, causal_mask())
    got = torch.autograd.grad(loss(o, x.do), x[:3], retain_graph=True)
    leaf = o.detach().requires_grad_()
    do, = torch.autograd.grad(loss(leaf, x.do), leaf)
    expected = torch.autograd.grad(o, x[:3], do.contiguous())
    for name, mine, theirs in zip(("dq", "dk", "dv"), got, expected, strict=True):
        assert same(name, mine, theirs, dq_in_any_order(x)), name


LAYOUTS = {
    "BHTD": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "packed": lambda t: torch.stack([-t, t, -t], 2)[:, :, 1],
    "padded_rows": lambda t: torch.cat([t, -t[..., :8]], -1)[..., :t.shape[-1]],
    "every_other_head": lambda t: torch.stack([t, -t], 3).flatten(2, 3)[:, :, ::2],
    "batch_last": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
}


@on_both(Case(20, B=2, H=1, D=16), Case(1000, B=2, H=6, H_kv=3))
@pytest.mark.parametrize("turn", range(5))
def test_five_layouts_at_once(case, dtype, turn, device, poison):
    """ROCm/aotriton#236, flagos-ai/FlagAttention#46, #1: do read with o's strides, k with v's. Here q, k, v, o and do
    each have their own."""
    x = make_inputs(case, dtype, device)
    o, lse = (t.detach() for t in flash_attention(x.q, x.k, x.v, causal_mask()))
    plain = dict(q=x.q.detach(), k=x.k.detach(), v=x.v.detach(), o=o, do=x.do)
    ways = list(LAYOUTS.values())
    strange = {name: ways[(n + turn) % 5](t) for n, (name, t) in enumerate(plain.items())}
    got, expected = (backward(dlse=x.dlse, lse=lse, mask=causal_mask(), softmax_scale=case.D ** -0.5, **tensors)
                     for tensors in (strange, plain))
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
    o_again, lse_again = flash_attention(strange["q"], strange["k"], strange["v"], causal_mask())
    assert torch.equal(o_again, o) and torch.equal(lse_again, lse)


UNALIGNED = {
    "columns_from_1": lambda t: torch.cat([t[..., :1], t], -1)[..., 1:],
    "rows_of_odd_bytes": lambda t: torch.cat([t, t[..., :1]], -1)[..., :-1],
    "rows_from_1_of_odd_bytes": lambda t: torch.cat([torch.cat([t[:, :1], t], 1), t.new_zeros(1, 1, 1, 1).expand(
        t.shape[0], t.shape[1] + 1, t.shape[2], 1)], -1)[:, 1:, :, :-1],
    "storage_offset_1": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "every_other_column": lambda t: torch.stack([t, -t], -1).flatten(3)[..., ::2],
}


@pytest.mark.parametrize("case, dtype", [
    pytest.param(Case(20, B=2, H=1, D=40), torch.float32, id="small"),
    *(pytest.param(Case(1000, B=2, H=6, H_kv=3, D=D), torch.bfloat16, id=f"D{D}", marks=pytest.mark.gpu)
      for D in (40, 72))])
@pytest.mark.parametrize("layout", UNALIGNED)
def test_rows_that_no_vector_load_can_read(case, dtype, layout, device, poison):
    """pytorch/executorch#22193, meta-pytorch/attention-gym#367: a last stride of 2, a base off 16 bytes."""
    x = make_inputs(case, dtype, device)
    q, k, v, do = (UNALIGNED[layout](t.detach()) for t in x[:4])
    assert torch.equal(q, x.q) and (q.stride() != x.q.stride() or q.storage_offset() == 1)
    strange = Inputs(*(t.requires_grad_() for t in (q, k, v)), do, x.dlse)
    assert_same_bits(ours(strange, causal_mask()), ours(x, causal_mask()))


@pytest.mark.parametrize("widths, case, dtype", [
    pytest.param((1, 16, 32, 40, 64, 72, 80, 96, 111, 128, 160, 192, 256), Case(20, H=1), torch.float32, id="small"),
    pytest.param((1, 8, 16, 72), Case(200, H=6, H_kv=3), torch.bfloat16, id="large", marks=pytest.mark.gpu)])
def test_every_width(widths, case, dtype, device, poison):
    """triton-lang/triton#621, pytorch/pytorch#133321, #133495, sgl-project/sglang#1281: columns past 64 forgotten, a
    width that is no power of two refused."""
    for D in widths:
        x = make_inputs(case._replace(D=D), dtype, device)
        mask, seen = make_mask(case, device)
        assert_as_good_as_torch(ours(x, mask), x, seen)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 64, 128])
def test_float32_is_not_tf32(D, device, poison):
    """evintunador/triton_docs_tutorials#6, triton-lang/triton#1821: dq was off by 0.72. tf32 keeps 11 bits of 24."""
    case = Case(200, H=2, D=D, q_times=5.0)
    x = make_inputs(case, torch.float32, device)
    mask, seen = make_mask(case, device)
    assert_as_good_as_torch(ours(x, mask), x, seen)


@on_both(Case(40, H=2, D=16), Case(300, H=6, D=64))
@pytest.mark.parametrize("grouped, softcap", [(False, 0.0), (False, 5.0), (True, 0.0), (True, 5.0)])
def test_every_combination_of_options(case, dtype, grouped, softcap, device, poison):
    """triton-lang/triton#4174, KempnerInstitute/KempnerForge#206: wrong where not causal, nothing at one width."""
    case = case._replace(H_kv=1 if grouped else None, softcap=softcap)
    docs = ((case.Tq // 3, case.Tq - case.Tq // 3),)
    masks = (dict(), dict(sides=FULL), dict(window=20), dict(sides=(9, 4)), dict(docs=docs), dict(docs=docs, window=9))
    for changes, scale in zip(masks, itertools.cycle((None, 1.0)), strict=False):
        one = case._replace(softmax_scale=scale, **changes)
        x = make_inputs(one, dtype, device)
        mask, seen = make_mask(one, device)
        assert_as_good_as_torch(ours(x, mask, scale, softcap), x, seen, scale, softcap)


def test_mixed_dtypes(device):
    """q, k and v of two dtypes are refused before any launch; a do of another dtype arrives in o's."""
    x = make_inputs(Case(5, H=1, D=16), torch.float16, device)
    for name, dtype in itertools.product("qkv", (torch.bfloat16, torch.float32, torch.float64)):
        mixed = dict(q=x.q, k=x.k, v=x.v) | {name: getattr(x, name).to(dtype)}
        with pytest.raises(TypeError, match="must agree|must be float16, bfloat16 or float32"):
            flash_attention(**mixed, mask=causal_mask())
    o, _ = flash_attention(x.q, x.k, x.v, causal_mask())
    expected = torch.autograd.grad(o, x[:3], x.do, retain_graph=True)
    for mine, theirs in zip(torch.autograd.grad(o, x[:3], x.do.float()), expected, strict=True):
        assert mine.dtype == torch.float16 and torch.equal(mine, theirs)


@on_both(Case(65, H=2, H_kv=1, D=16), Case(1000, H=6, H_kv=3))
def test_backward_in_a_fresh_thread(case, dtype, device):
    """vllm-project/vllm#33857, pytorch/helion#416: there no allocator was set."""
    x = make_inputs(case, dtype, device)
    expected = ours(x, causal_mask())
    with ThreadPoolExecutor(1) as pool:
        assert_same_bits(pool.submit(ours, x, causal_mask()).result(), expected, dq_in_any_order(x))
    o, lse = flash_attention(x.q, x.k, x.v, causal_mask())
    with ThreadPoolExecutor(1) as pool:
        got = pool.submit(torch.autograd.grad, (o, lse), x[:3], (x.do, x.dlse)).result()
    assert_same_bits(dict(zip(("dq", "dk", "dv"), got, strict=True)), expected, dq_in_any_order(x))


def in_child(device_type: str):
    """What a spawned process returns: plain arrays, which outlive it."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device_type == "cuda" else torch.float32
    x = make_inputs(Case(200, H=6, H_kv=3), dtype, torch.device(device_type))
    return {name: value.float().cpu().numpy() for name, value in ours(x, causal_mask()).items()}


@pytest.mark.gpu
def test_in_a_spawned_process(device):
    """vllm-project/vllm#33857, pytorch/helion#416: as a DataLoader's worker is. 200 keys are two tiles at most on any
    card, so dq is a sum of two in either order."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        got = pool.submit(in_child, device.type).result()
    for name, value in in_child(device.type).items():
        assert (got[name] == value).all(), name


def test_nothing_is_tuned_and_only_hopper_adds():
    """triton-lang/triton#4217, #3004, #5339, #3755: trials of a tuner added their atomics to the result. On Hopper two
    things are added to, and each call starts them at 0: the sums of dq, and the counter of items."""
    folder = Path(flash_attn2.__file__).parent
    adding = set()
    for file in folder.rglob("*.py"):
        text = file.read_text()
        assert not re.search(r"\bautotune\(|set_allocator\(|\b(red|atom)\.\w", text), file
        adding |= {str(file.relative_to(folder))} if re.search(r"\batomic_\w+\(|tma_reduce", text) else set()
    assert adding == {"hopper/gluon_api.py", "hopper/dq.py", "hopper/schedule.py"}


REPEATS = {"D64": Case(1000, B=8, H=6, H_kv=3), "D128": Case(1000, B=8, H=6, H_kv=3, D=128),
           "D64_documents": Case(1024, B=2, H=6, H_kv=3, docs=((300, 724), (1, 1023)))}


both_pairs = pytest.mark.parametrize("kernels", ["auto", "triton"])


def same_every_time(x: Inputs, mask: Mask, repeats: int, kernels: str, between=lambda: None) -> None:
    """One look at the GPU in the end."""
    first, always = ours(x, mask, kernels=kernels), torch.ones((), dtype=torch.bool, device=x.q.device)
    any_order = kernels != "triton" and dq_in_any_order(x)
    assert all(value.isfinite().all() for value in first.values())
    for _ in range(repeats):
        between()
        for name, value in ours(x, mask, kernels=kernels).items():
            always &= same(name, value, first[name], any_order)
    assert always


@pytest.mark.parametrize("case, repeats, dtype", [
    pytest.param(Case(100, B=2, H=1, D=16, docs=((100,), (64, 36))), 2, torch.float32, id="small"),
    *(pytest.param(case, 200, torch.bfloat16, id=name, marks=pytest.mark.gpu) for name, case in REPEATS.items())])
@both_pairs
def test_repeats(case, repeats, dtype, kernels, device):
    """Dao-AILab/flash-attention#429, #988, #1766, #2244, #2510: dq differed from run to run. Here the Hopper pair's
    by a rounding, and nothing else."""
    same_every_time(make_inputs(case, dtype, device), make_mask(case, device)[0], repeats, kernels)


@pytest.mark.gpu
@both_pairs
@pytest.mark.parametrize("case", REPEATS.values(), ids=REPEATS)
def test_repeats_under_load(case, kernels, device):
    """Dao-AILab/flash-attention#429, #2510: with other kernels on the GPU beside ours."""
    side, a = torch.cuda.Stream(), torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    side.wait_stream(torch.cuda.current_stream())

    def load():
        with torch.cuda.stream(side):
            for _ in range(4):
                torch.mm(a, a)
    same_every_time(make_inputs(case, torch.bfloat16, device), make_mask(case, device)[0], 50, kernels, load)
    torch.cuda.synchronize()


@pytest.mark.parametrize("case, repeats, dtype", [
    pytest.param(Case(40, 50, H=1, D=40), 2, torch.float32, id="small"),
    *(pytest.param(Case(Tq, Tk, H=6, H_kv=3, D=D), 2000, torch.bfloat16, id=f"{Tq}x{Tk}-D{D}", marks=pytest.mark.gpu)
      for Tq, Tk, D in ((128, 117, 40), (108, 256, 128), (1023, 1024, 64)))])
@both_pairs
def test_thousands_of_repeats(case, repeats, dtype, kernels, device, poison):
    """Dao-AILab/flash-attention, head of flash_attn_triton.py: races at widths and lengths that fill no tile."""
    case = case._replace(sides=FULL)
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    assert_as_good_as_torch(ours(x, mask, kernels=kernels), x, seen)
    same_every_time(x, mask, repeats, kernels)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["closed", "documents"])
@pytest.mark.parametrize("arch, D", sorted(tiles.TILES), ids=str)
def test_every_tile_of_the_table(arch, D, form, device, poison, monkeypatch):
    """fla-org/flash-linear-attention#984, #988, #945, #826: some tile shapes, warps and orders of operands gave
    wrong or changing numbers. Every row of the table, sm_80's on whatever card there is."""
    if arch == "sm_90" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("more shared memory than other cards have")
    tile = tiles.TILES[arch, D]
    for name in ("sm_80", "sm_90"):
        monkeypatch.setitem(tiles.TILES, (name, D), tile)
    case = Case(1000, H=6, H_kv=3, D=D, docs=((300, 700),) if form == "documents" else None)
    x = make_inputs(case, torch.bfloat16, device)
    mask, seen = make_mask(case, device)
    assert_as_good_as_torch(ours(x, mask, kernels="triton"), x, seen)
    same_every_time(x, mask, 20, "triton")


ONES = {"T": Case(1, H=1, D=16), "D_and_H": Case(65, H=1, D=1), "all": Case(1, H=1, D=1),
        "Tk": Case(65, 1, H=1, D=16), "H_kv": Case(65, H=2, H_kv=1, D=1)}


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("case", ONES.values(), ids=ONES)
def test_arguments_of_one(case, dtype, device, poison):
    """fla-org/flash-linear-attention#1262: arguments equal to 1 (lengths, heads, strides, scale) are compiled in."""
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    assert_as_good_as_torch(ours(x, mask, 1.0), x, seen, 1.0)
