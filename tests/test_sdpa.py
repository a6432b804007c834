"""Our kernels under torch's flash operators: values, layouts, registration, and what unchanged code gets.

Without a GPU the overrides are put under the CPU key too: torch's autograd, compiler and varlen_attn then reach them.
"""
import contextlib
import functools
import inspect

import pytest
import torch
import torch.nn.functional as F
from attention_cases import FULL, Case, Inputs, assert_as_good_as_torch, errors, make_inputs, make_mask, on_both
from torch.library import Library
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint

from flash_attn2 import reference, sdpa
from flash_attn2.sdpa import (
    activate_sdpa,
    flash_attention_backward,
    flash_attention_forward,
    restore_sdpa,
    scaled_dot_product_backward,
    scaled_dot_product_forward,
)

aten = torch.ops.aten
LAYOUTS = {  # name: a (B, H, T, D) tensor with the values of x (B, T, H, D)
    "BHTD": lambda x: x.transpose(1, 2).contiguous(),
    "BTHD": lambda x: x.contiguous().transpose(1, 2),
    "sliced": lambda x: torch.stack((x, x), 2)[:, :, 0].transpose(1, 2),        # as from a packed q, k, v projection
}
on_layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def runs(monkeypatch):
    """One entry, "forward" or "backward", for each run of a launcher through an override."""
    names = []

    def counted(name, real, *args):
        names.append(name)
        return real(*args)
    for name in ("forward", "backward"):
        monkeypatch.setattr(sdpa, name, functools.partial(counted, name, getattr(sdpa, name)))
    return names


@contextlib.contextmanager
def active():
    activate_sdpa()
    try:
        yield
    finally:
        restore_sdpa()


@pytest.fixture
def ours(runs):
    """Ours active and no other fused kernel in reach; on a CPU too, for the operators called by name."""
    library = Library("aten", "IMPL")
    for name, function in sdpa.OVERRIDES.items() if not torch.cuda.is_available() else ():
        library.impl(name, function, "CPU")
    torch._dynamo.reset()
    with active(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        yield runs
    torch._dynamo.reset()
    del library


@pytest.fixture(autouse=True)
def nothing_stays_active():
    yield
    assert current_flash_attention_impl() is None


def attend(q, k, v, is_causal=True, scale=None):
    """F.scaled_dot_product_attention; the operator below it where torch would never go there: a CPU, float32."""
    if q.is_cuda and q.dtype != torch.float32:
        grouped = q.shape[1] != k.shape[1]
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]


def inputs(case: Case, dtype, device) -> Inputs:
    """No gradient of lse: torch's operators take none."""
    x = make_inputs(case, dtype, device)
    return x._replace(dlse=torch.zeros_like(x.dlse))


def in_layout(x: Inputs, layout: str) -> tuple[torch.Tensor, ...]:
    """q, k, v, do (B, H, T, D); the first three are leaves that want gradients."""
    q, k, v = (LAYOUTS[layout](t.detach()).requires_grad_() for t in x[:3])
    return q, k, v, LAYOUTS[layout](x.do)


def step(call, q, k, v, do) -> tuple[torch.Tensor, ...]:
    """Output and gradients of one call, each laid out as it comes."""
    o = call(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), do)


def named(results, **others) -> dict[str, torch.Tensor]:
    """Results of `step` on (B, H, T, D), as attention_cases names and lays them out."""
    return dict(zip(("o", "dq", "dk", "dv"), (t.transpose(1, 2) for t in results), strict=True)) | others


def layout_of(x):
    """Shape, dtype and the strides that mean something; an int or None is itself."""
    if not isinstance(x, torch.Tensor):
        return x
    return tuple(x.shape), x.dtype, tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1)


def on_meta(*values):
    """The same shapes, dtypes and strides without values: what torch's own shape functions are asked with."""
    return tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
                 if isinstance(x, torch.Tensor) else x for x in values)


# The overrides as functions.

DENSE = {
    "causal": Case(65, D=16),
    "full": Case(65, D=16, sides=FULL),
    "causal_Tq_below_Tk": Case(40, 100, H=1, D=16),
    "causal_Tq_above_Tk": Case(100, 40, H=1, D=16),
    "full_Tq_below_Tk": Case(40, 100, H=1, D=16, sides=FULL),
    "full_Tq_above_Tk": Case(100, 40, H=1, D=16, sides=FULL),
    "one_query": Case(1, 65, D=16),
    "gqa": Case(30, H=4, H_kv=2, D=16, B=2),
    "scale": Case(30, D=16, softmax_scale=0.3),
    "D24": Case(30, D=24),
}


def dense(case: Case, q, k, v, do) -> tuple[list, list]:
    """What the two operators return."""
    causal = case.sides is None
    with torch.no_grad():
        outputs = scaled_dot_product_forward(q, k, v, 0.0, causal, scale=case.softmax_scale)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = outputs
        grads = scaled_dot_product_backward(do, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed,
                                            offset, scale=case.softmax_scale)
    return list(outputs), list(grads)


@on_layouts
@pytest.mark.parametrize("case, dtype", [(case, torch.float32) for case in DENSE.values()]
                         + [(DENSE["causal"], torch.float16)], ids=[*DENSE, "causal-float16"])
def test_values(case, dtype, layout, device, poison):
    x = inputs(case, dtype, device)
    (out, lse, *_), grads = dense(case, *in_layout(x, layout))
    assert_as_good_as_torch(named((out, *grads), lse=lse), x, make_mask(case, device)[1], case.softmax_scale)


@pytest.mark.parametrize("name", ["causal", "full", "full_Tq_below_Tk", "full_Tq_above_Tk", "gqa", "scale"])
def test_values_are_those_of_torchs_math(name, device):
    case = DENSE[name]
    q, k, v, do = in_layout(inputs(case, torch.float32, device), "BTHD")
    (out, *_), grads = dense(case, q, k, v, do)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = step(lambda *x: F.scaled_dot_product_attention(
            *x, is_causal=case.sides is None, scale=case.softmax_scale, enable_gqa=True), q, k, v, do)
    torch.testing.assert_close((out, *grads), theirs, rtol=1e-4, atol=1e-5)


def test_causal_means_bottom_right(device):
    """As torch says it with causal_lower_right, which is a dense mask where there is no flash kernel."""
    case = DENSE["causal_Tq_below_Tk"]
    q, k, v, do = in_layout(inputs(case, torch.float32, device), "BHTD")
    (out, *_), grads = dense(case, q, k, v, do)
    with sdpa_kernel(SDPBackend.MATH):
        theirs = step(lambda *x: F.scaled_dot_product_attention(*x, causal_lower_right(40, 100)), q, k, v, do)
    torch.testing.assert_close((out, *grads), theirs, rtol=1e-4, atol=1e-5)


@on_layouts
@pytest.mark.parametrize("case", [Case(6, H=4, H_kv=2, D=16, B=2), Case(6, 9, D=24, sides=FULL), Case(1, 5, B=3)],
                         ids=["gqa", "Tq_below_Tk", "one_query"])
def test_layouts_are_those_torch_compiles_for(case, layout, device):
    q, k, v, do = in_layout(inputs(case, torch.float16, device), layout)
    outputs, grads = dense(case, q, k, v, do)
    fakes = aten._scaled_dot_product_flash_attention(*on_meta(q, k, v), 0.0, True)
    assert [layout_of(x) for x in outputs] == [layout_of(x) for x in fakes]
    out, lse, cum_q, cum_k, max_q, max_k, seed, offset, _ = on_meta(*outputs)
    fakes = aten._scaled_dot_product_flash_attention_backward(
        *on_meta(do, q, k, v), out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset)
    assert [layout_of(x) for x in grads] == [layout_of(x) for x in fakes]


PACKED = {  # name: (queries, keys) of each sequence, is_causal, (left, right) keys or -1
    "causal": (((30, 30), (1, 1), (40, 40)), True, (-1, 0)),
    "full": (((30, 30), (1, 1), (40, 40)), False, (-1, -1)),
    "causal_unequal": (((20, 50), (0, 7), (40, 10), (5, 0), (6, 6)), True, (-1, 0)),
    "full_unequal": (((20, 50), (0, 7), (40, 10), (5, 0), (6, 6)), False, (-1, -1)),
    "window": (((20, 50), (40, 10), (30, 30)), False, (7, 0)),
    "two_sided_window": (((50, 50), (20, 30)), False, (7, 3)),
    "window_past_the_end": (((50, 50), (20, 30)), False, (10**12, 10**12)),
}


def packed_seen(segments, window, device):
    """Which keys a query sees, (total_q, total_k)."""
    left, right = (None if n < 0 else n for n in window)
    blocks = [reference.seen(n_q, n_k, causal=False, window=(left, right), device=device) for n_q, n_k in segments]
    return torch.block_diag(*blocks).bool()


def boundaries(lengths, device):
    return F.pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).int()


def packed(x: Inputs, segments, is_causal, window):
    """(tensors in, what the two operators return) for q, k, v, do (1, total, H, D)."""
    q, k, v, do = (t.detach()[0] for t in x[:4])
    n_q, n_k = zip(*segments, strict=True)
    cum_q, cum_k = boundaries(n_q, q.device), boundaries(n_k, q.device)
    call = dict(window_size_left=window[0], window_size_right=window[1])
    outputs = flash_attention_forward(q, k, v, cum_q, cum_k, max(n_q), max(n_k), 0.0, is_causal, False, **call)
    out, lse, seed, unused, _ = outputs
    grads = flash_attention_backward(do, q, k, v, out, lse, cum_q, cum_k, max(n_q), max(n_k), 0.0, is_causal, seed,
                                     unused, **call)
    return (q, k, v, cum_q, cum_k, max(n_q), max(n_k)), outputs, grads


def packed_case(segments, **others) -> Case:
    return Case(sum(n for n, _ in segments), sum(n for _, n in segments), segments=segments, **others)


@pytest.mark.parametrize("segments, is_causal, window", PACKED.values(), ids=PACKED)
def test_packed_values(segments, is_causal, window, device, poison):
    x = inputs(packed_case(segments, H=2, H_kv=1, D=16), torch.float32, device)
    _, (out, lse, *_), grads = packed(x, segments, is_causal, window)
    got = dict(zip(("o", "lse", "dq", "dk", "dv"), (t[None] for t in (out, lse, *grads)), strict=True))
    assert_as_good_as_torch(got, x, packed_seen(segments, window, device))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_tokens_past_the_last_sequence_see_nothing_and_are_not_seen(is_causal, device):
    segments = ((20, 30), (30, 20))
    x = inputs(packed_case((*segments, (15, 0), (0, 10)), D=16), torch.float32, device)
    _, (out, lse, *_), grads = packed(x, segments, is_causal, (-1, -1))
    got = dict(zip(("o", "lse", "dq", "dk", "dv"), (t[None] for t in (out, lse, *grads)), strict=True))
    seen = packed_seen((*segments, (15, 0), (0, 10)), (-1, 0 if is_causal else -1), device)
    assert_as_good_as_torch(got, x, seen)
    assert not out[50:].any() and not grads[0][50:].any() and not grads[1][50:].any() and not grads[2][50:].any()


def test_packed_layouts_are_those_torch_compiles_for(device):
    segments = ((30, 20), (10, 40))
    (q, k, v, *_), outputs, grads = given = packed(
        inputs(packed_case(segments, H=4, H_kv=2, D=16), torch.float16, device), segments, False, (-1, -1))
    fakes = aten._flash_attention_forward(*on_meta(*given[0]), 0.0, False, False)
    assert [layout_of(x) for x in outputs] == [layout_of(x) for x in fakes]
    assert [layout_of(x) for x in grads] == [layout_of(x) for x in (q, k, v)]


def test_varlen_operators_without_sequences_take_a_batch(device):
    x = inputs(Case(40, 60, D=16, B=2, sides=(9, 4)), torch.float32, device)
    q, k, v, do = (t.detach() for t in x[:4])
    out, lse, seed, unused, _ = flash_attention_forward(q, k, v, None, None, 40, 60, 0.0, False, False,
                                               window_size_left=9, window_size_right=4)
    dq, dk, dv = flash_attention_backward(do, q, k, v, out, lse, None, None, 40, 60, 0.0, False, seed, unused,
                                 window_size_left=9, window_size_right=4)
    assert_as_good_as_torch(dict(o=out, lse=lse, dq=dq, dk=dk, dv=dv), x,
                            reference.seen(40, 60, causal=False, window=(9, 4), device=device))


ERRORS = {  # name: (options of the operator, type, message)
    "dropout": (dict(dropout_p=0.1), ValueError, r"dropout_p=0.1: nanolong_flash_attn2 cannot do that; restore_sdpa"),
    "debug_mask": (dict(return_debug_mask=True), ValueError, r"return_debug_mask=True: nanolong_flash_attn2 cannot"),
    "scale_0": (dict(scale=0.0), ValueError, r"softmax_scale=0.0 must be positive"),
    "dtype": (dict(query=torch.zeros(1, 2, 5, 16).double()), TypeError, r"q is torch.float64; it must be float16"),
    "width": (dict.fromkeys(("query", "key", "value"), torch.zeros(1, 2, 5, 264)), ValueError,
              r"head width 264 must lie between 1 and 256"),
    "heads": (dict(query=torch.zeros(1, 3, 5, 16)), ValueError, r"q's 3 heads must be a multiple of k's 2"),
}


@pytest.mark.parametrize("options, error, message", ERRORS.values(), ids=ERRORS)
def test_error(options, error, message):
    with pytest.raises(error, match=message):
        scaled_dot_product_forward(**dict.fromkeys(("query", "key", "value"), torch.zeros(1, 2, 5, 16)) | options)


@pytest.mark.parametrize("name, value", [("alibi_slopes", torch.ones(2)), ("seqused_k", torch.zeros(1).int()),
                                         ("block_table", torch.zeros(1, 1).int()), ("num_splits", 4)])
def test_what_only_torchs_kernel_can_do_is_an_error(name, value):
    x = torch.zeros(1, 5, 2, 16)
    with pytest.raises(ValueError, match=rf"{name}=.*nanolong_flash_attn2 cannot do that"):
        flash_attention_forward(x, x, x, None, None, 5, 5, 0.0, False, False, **{name: value})


def test_defaults_spelled_out_are_no_error(device):
    x = torch.zeros(1, 5, 2, 16, device=device)
    flash_attention_forward(x, x, x, None, None, 5, 5, 0.0, False, False, alibi_slopes=None, seqused_k=None,
                            num_splits=1)


def test_dropout_in_backward_is_an_error():
    x, lse = torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5)
    with pytest.raises(ValueError, match="dropout_p=0.5"):
        scaled_dot_product_backward(x, x, x, x, x, lse, None, None, 5, 5, 0.5, True, None, None)


# Registration.

def kernels() -> list[str]:
    """Torch's tables of what stands under each dispatch key."""
    return [torch._C._dispatch_dump(f"aten::{name}") for name in sdpa.OVERRIDES]


def on_cuda_key(name: str, *args, **kwargs):
    """Call what stands under the CUDA key, whatever the tensors are."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    return getattr(aten, name).default.redispatch(keys, *args, **kwargs)


def test_importing_registers_and_changes_nothing():
    assert sdpa.NAME in list_flash_attention_impls()
    assert current_flash_attention_impl() is None


def test_activate_and_restore(runs):
    before = kernels()
    activate_sdpa()
    assert current_flash_attention_impl() == sdpa.NAME
    during = kernels()
    assert all(a != b for a, b in zip(before, during, strict=True))
    activate_sdpa()
    assert kernels() == during
    restore_sdpa()
    assert current_flash_attention_impl() is None and kernels() == before
    restore_sdpa()
    assert kernels() == before


def test_torchs_own_calls_activate_and_restore():
    before = kernels()
    activate_flash_attention_impl(sdpa.NAME)
    assert kernels() != before
    restore_flash_attention_impl()
    assert kernels() == before


def test_restore_leaves_another_library_alone(monkeypatch):
    removed = []

    class Other:
        def remove(self):
            removed.append(True)
    register_flash_attention_impl("another", register_fn=Other)
    activate_sdpa()
    activate_flash_attention_impl("another")
    restore_sdpa()
    assert current_flash_attention_impl() == "another" and not removed
    activate_sdpa()
    assert removed and current_flash_attention_impl() == sdpa.NAME
    restore_sdpa()


def test_the_cuda_key_is_ours_and_torchs_schemas_fit(runs, device):
    """Every operator through the dispatcher, so that arguments and results pass torch's own conversion."""
    q, k, v, do = (t.detach() for t in in_layout(inputs(DENSE["gqa"], torch.float32, device), "BTHD"))
    with active():
        outputs = on_cuda_key("_scaled_dot_product_flash_attention", q, k, v, 0.0, True)
        out, lse, _, _, max_q, max_k, seed, offset, _ = outputs
        none = torch.empty(0)
        grads = on_cuda_key("_scaled_dot_product_flash_attention_backward", do, q, k, v, out, lse, none, none, max_q,
                            max_k, 0.0, True, seed, offset)
        q, k, v, do, out = (t.transpose(1, 2) for t in (q, k, v, do, out))
        direct = on_cuda_key("_flash_attention_forward", q, k, v, None, None, max_q, max_k, 0.0, True, False,
                             window_size_left=-1, window_size_right=0)
        cum = boundaries((30,), device)
        direct_grads = on_cuda_key("_flash_attention_backward", do[0], q[0], k[0], v[0], out[0], lse[0], cum, cum,
                                   max_q, max_k, 0.0, True, seed, offset)
    assert runs == ["forward", "backward", "forward", "backward"]
    assert torch.equal(out, direct[0]) and torch.equal(lse, direct[1])
    for whole, row in zip(grads, direct_grads, strict=True):
        torch.testing.assert_close(whole[0].transpose(0, 1), row, rtol=1e-4, atol=1e-5)


def test_errors_reach_the_caller(device):
    x = torch.zeros(1, 2, 5, 16, device=device)
    with active(), pytest.raises(ValueError, match="dropout_p=0.1: nanolong_flash_attn2 cannot do that"):
        on_cuda_key("_scaled_dot_product_flash_attention", x, x, x, 0.1, True)


# Torch's autograd, compiler, checkpointing and varlen_attn over them.

@on_layouts
@on_both(Case(33, H=2, H_kv=1, D=16, B=2), Case(1000, H=6, H_kv=3, B=2))
def test_autograd(case, dtype, layout, ours, device):
    x = inputs(case, dtype, device)
    got = step(attend, *in_layout(x, layout))
    assert ours == ["forward", "backward"]
    assert_as_good_as_torch(named(got), x, make_mask(case, device)[1])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@on_layouts
@on_both(Case(33, H=2, H_kv=1, D=16, B=2), Case(1000, H=6, H_kv=3, B=2))
def test_compiled_is_eager(case, dtype, layout, backend, ours, device):
    q, k, v, do = in_layout(inputs(case, dtype, device), layout)

    def block(q, k, v):
        return attend(q, k, v).transpose(1, 2).reshape(case.B, case.Tq, -1)     # as a model joins its heads
    do = do.transpose(1, 2).reshape(case.B, case.Tq, -1)
    expected = step(block, q, k, v, do)
    ours.clear()
    got = step(torch.compile(block, backend=backend, fullgraph=True), q, k, v, do)
    assert ours == ["forward", "backward"]
    torch.testing.assert_close(got, expected)


def test_compiled_code_follows_activation(ours, device):
    """What was compiled while ours were active runs torch's own kernel after the restore, where there is one."""
    q = torch.randn(1, 2, 33, 64, device=device, dtype=torch.float16 if device.type == "cuda" else torch.float32)
    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    compiled(q, q, q)
    assert ours == ["forward"]
    restore_sdpa()
    compiled(q, q, q)
    assert ours == ["forward"] + ["forward"] * (device.type == "cpu")           # the CPU key is this file's


def test_checkpointed_runs_forward_again(ours, device):
    """Bit for bit on Hopper too: 33 keys are one tile, and dq no sum."""
    q, k, v, do = in_layout(inputs(Case(33), torch.bfloat16 if device.type == "cuda" else torch.float32,
                                   device), "BTHD")
    expected = step(attend, q, k, v, do)
    ours.clear()
    got = step(functools.partial(checkpoint, attend, use_reentrant=False), q, k, v, do)
    assert ours == ["forward", "forward", "backward"]
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def varlen(q, k, v, cum_q, cum_k, max_q, max_k, window):
    """varlen_attn of any torch: older ones say is_causal."""
    if "window_size" in inspect.signature(varlen_attn).parameters:
        return varlen_attn(q, k, v, cum_q, cum_k, max_q, max_k, window_size=window)
    return varlen_attn(q, k, v, cum_q, cum_k, max_q, max_k, is_causal=window == (-1, 0))


def varlen_arguments(segments, device):
    n_q, n_k = zip(*segments, strict=True)
    return boundaries(n_q, device), boundaries(n_k, device), max(n_q), max(n_k)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)], ids=["full", "causal"])
@on_both(packed_case(((30, 30), (1, 1), (40, 50)), D=16),
         packed_case(((300, 300), (1, 1), (400, 500), (65, 65)), H=6, D=64))
def test_varlen_attn(case, dtype, window, ours, device):
    x = inputs(case, dtype, device)
    q, k, v = (t.detach()[0].requires_grad_() for t in x[:3])
    o = varlen(q, k, v, *varlen_arguments(case.segments, device), window)
    grads = torch.autograd.grad(o, (q, k, v), x.do[0])
    assert ours == ["forward", "backward"]
    got = dict(zip(("o", "dq", "dk", "dv"), (t.detach()[None] for t in (o, *grads)), strict=True))
    assert_as_good_as_torch(got, x, packed_seen(case.segments, window, device))


# F.scaled_dot_product_attention and what stands on it, against torch's own kernels.

flash_only = functools.partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
AGAINST_STOCK = {
    "D64": Case(1000, H=6, B=2),
    "D64_gqa": Case(1000, H=6, H_kv=2, B=2),
    "D64_scale": Case(1000, H=6, softmax_scale=0.3),
    "D64_full": Case(1000, H=6, B=2, sides=FULL),
    "D64_full_Tq_below_Tk": Case(300, 1000, H=6, sides=FULL),
    "D64_full_Tq_above_Tk": Case(1000, 300, H=6, sides=FULL),
    "D64_one_query": Case(1, 1000, H=6, B=2, sides=FULL),
    "D64_T1024": Case(1024, H=6),
    "D20_padded": Case(300, H=4, D=20, B=2),
    "D80": Case(1000, H=6, D=80, B=2),
    "D128": Case(1000, H=6, D=128, B=2),
    "D128_gqa_full": Case(1000, H=6, H_kv=3, D=128, sides=FULL),
}


def both(call, q, k, v, do, runs):
    """(ours, torch's) results of `step` under its flash kernel alone; ours are counted."""
    with flash_only():
        theirs = step(call, q, k, v, do)
        assert runs == []
        with active():
            mine = step(call, q, k, v, do)
    assert runs == ["forward", "backward"]
    return mine, theirs


@pytest.mark.gpu
@on_layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", AGAINST_STOCK.values(), ids=AGAINST_STOCK)
def test_in_place_of_stock(case, dtype, layout, runs, device):
    x = inputs(case, dtype, device)
    call = functools.partial(attend, is_causal=case.sides is None, scale=case.softmax_scale)
    mine, theirs = both(call, *in_layout(x, layout), runs)
    assert [layout_of(t) for t in mine] == [layout_of(t) for t in theirs]
    assert_as_good_as_torch(named(mine), x, make_mask(case, device)[1], case.softmax_scale)


@pytest.mark.gpu
@on_layouts
def test_operators_return_what_stocks_return(layout, runs, device):
    """Also what F.scaled_dot_product_attention hides: lse and the dummies."""
    q, k, v, _ = (t.detach() for t in in_layout(inputs(Case(500, H=6, H_kv=3, B=2), torch.bfloat16, device), layout))
    theirs = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    with active():
        mine = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    assert [layout_of(t) for t in mine] == [layout_of(t) for t in theirs]
    torch.testing.assert_close(mine[1], theirs[1], rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@on_layouts
@pytest.mark.parametrize("Tq, Tk", [(300, 1000), (1000, 300), (1, 500), (500, 500)])
def test_causal_lower_right_gives_what_stock_gives(Tq, Tk, layout, runs, device):
    """Rows without keys included: 0, though torch's warning says NaN."""
    x = inputs(Case(Tq, Tk, H=4), torch.float16, device)
    mine, theirs = both(lambda *qkv: F.scaled_dot_product_attention(*qkv, causal_lower_right(Tq, Tk)),
                        *in_layout(x, layout), runs)
    assert [layout_of(t) for t in mine] == [layout_of(t) for t in theirs]
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
    assert_as_good_as_torch(named(mine), x, reference.seen(Tq, Tk, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("Tq, Tk", [(300, 1000), (1000, 300)])
def test_is_causal_with_unequal_lengths_stays_torchs(Tq, Tk, runs, device):
    """It means top left, which no flash kernel does: torch sends it elsewhere."""
    q, k, v, _ = in_layout(inputs(Case(Tq, Tk, H=4), torch.float16, device), "BHTD")
    call = functools.partial(F.scaled_dot_product_attention, is_causal=True)
    theirs = call(q, k, v)
    with active():
        mine = call(q, k, v)
        with flash_only(), pytest.raises(RuntimeError):
            call(q, k, v)
    assert runs == [] and torch.equal(mine, theirs)


@pytest.mark.gpu
def test_restored_is_stock(runs, device):
    q, k, v, do = in_layout(inputs(Case(1000, H=6), torch.bfloat16, device), "BTHD")
    with flash_only():
        before = attend(q, k, v)
        with active():
            attend(q, k, v)
        assert runs == ["forward"]
        after = step(attend, q, k, v, do)
        assert runs == ["forward"] and torch.equal(before, after[0])
        with active():
            step(attend, q, k, v, do)
        assert runs == ["forward", "forward", "backward"]


@pytest.mark.gpu
def test_stock_can_finish_what_ours_began(runs, device):
    """A restore between forward and backward: what the two keep for each other has one meaning."""
    x = inputs(Case(1000, H=6), torch.bfloat16, device)
    q, k, v, do = in_layout(x, "BTHD")
    with flash_only():
        with active():
            o = attend(q, k, v)
        grads = torch.autograd.grad(o, (q, k, v), do)
    assert runs == ["forward"]
    assert_as_good_as_torch(named((o.detach(), *grads)), x, reference.seen(1000, 1000, device=device))


@pytest.mark.gpu
def test_autocast(ours, device):
    """Bit for bit on Hopper too: 200 keys are two tiles, and dq a sum of two in either order."""
    q, k, v, do = in_layout(inputs(Case(200, H=4), torch.float32, device), "BTHD")
    with torch.autocast("cuda", torch.bfloat16):
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert o.dtype == torch.bfloat16
    grads = torch.autograd.grad(o, (q, k, v), do.bfloat16())
    assert ours == ["forward", "backward"] and {g.dtype for g in grads} == {torch.float32}
    rounded = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    torch.testing.assert_close((o.detach(), *(g.bfloat16() for g in grads)),
                               step(attend, *rounded, do.bfloat16()), rtol=0, atol=0)


@pytest.mark.gpu
def test_dropout_is_an_error_not_another_kernel(ours, device):
    q = torch.zeros(1, 2, 64, 64, device=device, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="dropout_p=0.1: nanolong_flash_attn2 cannot do that"):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True)
    assert ours == []


@pytest.mark.gpu
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (100, 0), (30, 20)], ids=str)
def test_varlen_attn_gives_what_stock_gives(window, runs, device):
    if max(window) > 0 and "window_size" not in inspect.signature(varlen_attn).parameters:
        pytest.skip("this torch's varlen_attn has no window")
    segments = ((300, 300), (1, 1), (400, 500), (65, 65))
    x = inputs(packed_case(segments, H=6), torch.float16, device)
    q, k, v = (t.detach()[0].requires_grad_() for t in x[:3])
    arguments = varlen_arguments(segments, device)
    results = []
    for context in (contextlib.nullcontext, active):
        with context():
            results.append(step(lambda *qkv: varlen(*qkv, *arguments, window), q, k, v, x.do[0]))
    assert runs == ["forward", "backward"]
    theirs, mine = results
    assert [layout_of(t) for t in mine] == [layout_of(t) for t in theirs]
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_nested_tensors_give_what_stock_gives(runs, device):
    """A jagged batch reaches the packed operators."""
    def rows():
        return [torch.randn(n, 4, 64, device=device, dtype=torch.float16) for n in (300, 1, 65)]
    q, k, v = (torch.nested.nested_tensor(rows(), layout=torch.jagged, requires_grad=True) for _ in range(3))
    k, v = (torch.nested.nested_tensor_from_jagged(t.values().detach(), q.offsets()).requires_grad_() for t in (k, v))

    def call():
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
        grads = torch.autograd.grad(o.values().square().sum(), (q, k, v))
        return o.values().detach(), *(g.values() for g in grads)
    with flash_only():
        theirs = call()
        with active():
            mine = call()
    assert runs == ["forward", "backward"]
    torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


# A model that knows nothing of us.

LAYERS = 3


def gpt2(device, dtype=torch.float32):
    """A random small GPT-2 of transformers, heads 64 wide, that attends through F.scaled_dot_product_attention."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=256, n_positions=256, n_embd=128, n_head=2, n_layer=LAYERS, attn_pdrop=0.0, resid_pdrop=0.0,
        embd_pdrop=0.0, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")
    model = transformers.GPT2LMHeadModel(config).to(device, dtype)
    assert model.config._attn_implementation == "sdpa"
    return model


def loss_and_gradients(model, tokens):
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach().double(), {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_gpt2_of_transformers(dtype, runs, device):
    """As near to float32 with the same weights as torch's own flash kernel is, in every parameter."""
    tokens = torch.randint(256, (4, 200), device=device)
    model = gpt2(device, dtype)
    with sdpa_kernel(SDPBackend.MATH):
        exact_loss, exact = loss_and_gradients(gpt2(device, dtype).float(), tokens)
    with flash_only():
        stock_loss, stock = loss_and_gradients(model, tokens)
        assert runs == []
        with active():
            loss, gradients = loss_and_gradients(model, tokens)
    assert runs == ["forward"] * LAYERS + ["backward"] * LAYERS
    assert (loss - exact_loss).abs() <= 2 * (stock_loss - exact_loss).abs() + 1e-3
    for name, gradient in gradients.items():
        mine, theirs = (errors(g, exact[name])[1] for g in (gradient, stock[name]))
        assert mine <= 2 * theirs + 1e-7, f"{name}: rms error {mine:.3e}, torch's is {theirs:.3e}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="F.scaled_dot_product_attention itself is tested on a GPU")
def test_gpt2_of_transformers_on_a_cpu(ours, monkeypatch):
    model, tokens = gpt2("cpu"), torch.randint(256, (2, 65))
    with sdpa_kernel(SDPBackend.MATH):
        expected = loss_and_gradients(model, tokens)
    assert ours == []

    def operator(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
        assert attn_mask is None, "a mask would keep it from torch's flash kernel"
        return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", operator)
    got = loss_and_gradients(model, tokens)
    assert ours == ["forward"] * LAYERS + ["backward"] * LAYERS
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)
