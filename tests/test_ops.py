"""The public call and the two custom ops: errors, torch.compile, checkpointing, what opcheck asks."""

import functools

import pytest
import torch
from attention_cases import (
    Case,
    assert_as_good_as_torch,
    document_starts,
    make_inputs,
    make_mask,
    ours,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from flash_attn2 import FlashAttention2, Mask, causal_mask, flash_attention, full_mask, ops

OPCHECK = Case(65, 60, B=2, H=2, H_kv=1, D=16)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def forward_runs(monkeypatch):
    """One entry for each run of the forward launcher."""
    runs, real = [], ops.forward

    def counted(*args):
        runs.append(args)
        return real(*args)
    monkeypatch.setattr(ops, "forward", counted)
    return runs


def documents(device, T: int, *lengths) -> Mask:
    return causal_mask(0, document_starts((lengths,), device).expand(2, T))


def op_inputs(with_documents: bool, device):
    case = OPCHECK if not with_documents else OPCHECK._replace(Tk=65, docs=((65,), (1, 64)))
    x = make_inputs(case, torch.float32, device)
    return x._replace(q=x.q.detach(), k=x.k.detach(), v=x.v.detach()), make_mask(case, device)[0]


@pytest.mark.parametrize("with_documents", [False, True], ids=["closed", "documents"])
def test_opcheck_forward(with_documents, device):
    x, mask = op_inputs(with_documents, device)
    torch.library.opcheck(
        torch.ops.flash_attn2.forward.default, (x.q, x.k, x.v, mask.lo, mask.hi, mask.left, mask.right, 0.25, 0.0,
                                                    "auto")
    )


@pytest.mark.parametrize("with_documents", [False, True], ids=["closed", "documents"])
def test_opcheck_forward_of_transposed_inputs(with_documents, device):
    """The fake's strides are the real ones, whatever the inputs' are."""
    x, mask = op_inputs(with_documents, device)
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:3])
    torch.library.opcheck(
        torch.ops.flash_attn2.forward.default,
        (q, k, v, mask.lo, mask.hi, mask.left, mask.right, 0.25, 0.0, "auto"),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize(
    "with_documents, with_dlse", [(False, False), (True, True)], ids=["closed", "documents_and_dlse"]
)
def test_opcheck_backward(with_documents, with_dlse, device):
    x, mask = op_inputs(with_documents, device)
    o, lse = flash_attention(x.q, x.k, x.v, mask)
    torch.library.opcheck(
        torch.ops.flash_attn2.backward.default,
        (
            x.do.transpose(1, 2).contiguous().transpose(1, 2),
            x.dlse if with_dlse else None,
            x.q,
            x.k,
            x.v,
            o,
            lse,
            *mask[2:],
            mask.left,
            mask.right,
            0.25,
            0.0,
            "auto",
            False,
        ),
    )


def step(q, k, v, mask, do, dlse):
    """A loss that uses both outputs."""
    o, lse = flash_attention(q, k, v, mask)
    return (o * do).sum() + (lse * dlse).sum()


def step_gradients(call, x, mask):
    loss = call(x.q, x.k, x.v, mask, x.do, x.dlse)
    return loss.detach(), *torch.autograd.grad(loss, (x.q, x.k, x.v))


@pytest.mark.parametrize("layout", ["BTHD", "BHTD"])
@pytest.mark.parametrize("with_documents", [False, True], ids=["closed", "documents"])
def test_compiled_is_eager(with_documents, layout, device):
    """fullgraph: no graph break. BHTD: q, k, v are transposed views."""
    case = Case(65, B=2, H=2, H_kv=1, D=16)
    x, mask = (
        make_inputs(case, torch.float32, device),
        documents(device, 65, 30, 35) if with_documents else causal_mask(),
    )
    if layout == "BHTD":
        q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in x[:3])
        x = x._replace(q=q, k=k, v=v)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step_gradients(compiled, x, mask), step_gradients(step, x, mask))


def test_compiled_by_inductor_is_eager(device):
    """With work before and after to fuse, the mask built inside."""
    x = make_inputs(Case(65, B=2, H=2, H_kv=1, D=16), torch.float32, device)
    starts = document_starts(((30, 35), (65,)), device)

    def block(q, k, v):
        o, lse = flash_attention(q.sin(), k * 2, v, causal_mask(40, starts))
        return (o.transpose(1, 2).exp() * x.do.transpose(1, 2)).sum() + (lse * x.dlse).sum()
    results = []
    for call in (block, torch.compile(block, fullgraph=True)):
        loss = call(x.q, x.k, x.v)
        results.append((loss.detach(), *torch.autograd.grad(loss, (x.q, x.k, x.v))))
    torch.testing.assert_close(*results)


def test_new_documents_do_not_compile_again(device):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True)
    x = make_inputs(Case(65, B=2, H=1, D=16), torch.float32, device)
    for lengths in ((65,), (30, 35), (1, 1, 63)):
        mask = documents(device, 65, *lengths)
        torch.testing.assert_close(step_gradients(compiled, x, mask), step_gradients(step, x, mask))
        assert counter.frame_count == 1, f"documents {lengths} compiled again"


def test_second_length_compiled(device):
    """With a gradient of lse: a mark left from the first length would show."""
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for T in (65, 40, 70):
        x = make_inputs(Case(T, H=2, H_kv=1, D=16), torch.float32, device)
        torch.testing.assert_close(
            step_gradients(compiled, x, causal_mask()), step_gradients(step, x, causal_mask())
        )


def test_checkpointed_runs_forward_again(forward_runs, device):
    x = make_inputs(Case(65, H=2, H_kv=1, D=16), torch.float32, device)
    expected = step_gradients(step, x, causal_mask())
    forward_runs.clear()
    got = step_gradients(functools.partial(checkpoint, step, use_reentrant=False), x, causal_mask())
    assert len(forward_runs) == 2
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def save_attention(ctx, op, *args, **kwargs):
    saved = op == torch.ops.flash_attn2.forward.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_selective_checkpoint_saves_attention_by_name(forward_runs, compiled, device):
    """(o, lse) are kept: the forward op runs once, everything round it twice."""
    x = make_inputs(Case(65, H=2, H_kv=1, D=16), torch.float32, device)
    contexts = functools.partial(create_selective_checkpoint_contexts, save_attention)

    def block(*args):
        return checkpoint(step, *args, use_reentrant=False, context_fn=contexts)
    expected = step_gradients(step, x, causal_mask())
    forward_runs.clear()
    got = step_gradients(
        torch.compile(block, backend="aot_eager", fullgraph=True) if compiled else block, x, causal_mask()
    )
    assert len(forward_runs) == 1
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("loss", [lambda lse: lse.sum(), lambda lse: lse[..., ::2].sum(),
                                  lambda lse: lse.transpose(1, 2).square().sum()], ids=["sum", "sliced", "transposed"])
def test_gradient_of_lse_of_any_strides(loss, device):
    """Stride 0 from sum(), and others: as from a contiguous copy."""
    x = make_inputs(Case(70, B=2, H=2, D=16), torch.float32, device)
    _, lse = flash_attention(x.q, x.k, x.v, causal_mask())
    got = torch.autograd.grad(loss(lse), (x.q, x.k), retain_graph=True)
    leaf = lse.detach().clone().requires_grad_()
    dlse, = torch.autograd.grad(loss(leaf), leaf)
    want = torch.autograd.grad(lse, (x.q, x.k), dlse.contiguous())
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast(compiled, device):
    """float32 becomes autocast's dtype, as under SDPA, and gradients come back in float32; a half stays what it is."""
    dtype = torch.float16
    x = make_inputs(Case(65, H=2, H_kv=1, D=16), torch.float32, device)

    def call(q, k, v):
        with torch.autocast(device.type, dtype=dtype):
            return flash_attention(q, k, v.to(dtype), causal_mask())
    o, lse = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)(*x[:3])
    want, want_lse = flash_attention(*(t.to(dtype) for t in x[:3]), causal_mask())
    assert o.dtype == dtype and torch.equal(o, want) and torch.equal(lse, want_lse)
    dq, dk, dv = torch.autograd.grad(o, x[:3], x.do.to(dtype))
    assert dq.dtype == dk.dtype == dv.dtype == torch.float32
    for got, wanted in zip((dq, dk, dv), torch.autograd.grad(want, x[:3], x.do.to(dtype)), strict=True):
        assert torch.equal(got, wanted)


def test_autocast_leaves_a_half_alone(device):
    x = make_inputs(Case(5, D=16), torch.float16, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert flash_attention(*x[:3], causal_mask())[0].dtype == torch.float16


def test_without_autocast_mixed_dtypes_are_refused(device):
    x = make_inputs(Case(5, D=16), torch.float32, device)
    with pytest.raises(TypeError, match="k is torch.float16 on .*, q is torch.float32"):
        flash_attention(x.q, x.k.half(), x.v, causal_mask())


FLOP_CASES = {
    "causal": Case(65, B=2, H=4, H_kv=2, D=16),
    "window": Case(65, H=2, D=16, window=10),
    "Tq_above_Tk": Case(65, 40, H=2, D=16),
    "two_sided": Case(40, 65, H=2, D=16, sides=(5, 7)),
    "documents": Case(66, B=2, H=2, D=16, docs=((66,), (1, 30, 35))),
    "segments": Case(70, 75, H=1, D=16, segments=((0, 3), (60, 0), (10, 70), (0, 2))),
}


@pytest.mark.parametrize("case", FLOP_CASES.values(), ids=FLOP_CASES)
def test_flop_counter_counts_the_pairs_that_attend(case, device):
    x = make_inputs(case, torch.float32, device)
    mask, seen = make_mask(case, device)
    pairs = int(seen.expand(case.B, case.Tq, case.keys).sum())
    with FlopCounterMode(display=False) as counter:
        o, _ = flash_attention(x.q, x.k, x.v, mask)
        o.backward(x.do)
    counts = counter.get_flop_counts()["Global"]
    assert counts[torch.ops.flash_attn2.forward] == 4 * case.D * case.H * pairs
    assert counts[torch.ops.flash_attn2.backward] == 10 * case.D * case.H * pairs


def test_flop_counter_of_meta_documents_is_causal():
    q = torch.empty(1, 65, 2, 16, device="meta")
    mask = causal_mask(0, torch.zeros(1, 65, dtype=torch.int64, device="meta"))
    with FlopCounterMode(display=False) as counter:
        flash_attention(q, q, q, mask)
    assert counter.get_total_flops() == 4 * 16 * 2 * (65 * 66 // 2)


def test_flop_counter_of_fake_documents_is_causal():
    """Shapes alone know no documents: traced with fake tensors the count is the whole triangle."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(1, 65, 2, 16)
        vectors = [torch.empty(1, 65, dtype=torch.int32) for _ in range(4)]
        flash_attention(q, q, q, Mask(lo=vectors[0], hi=vectors[1], q_lo=vectors[2], q_hi=vectors[3]))
    assert counter.get_total_flops() == 4 * 16 * 2 * (65 * 66 // 2)


def test_double_backward_raises(device):
    x = make_inputs(Case(5, D=16), torch.float32, device)
    o, _ = flash_attention(x.q, x.k, x.v, causal_mask())
    dq, = torch.autograd.grad(o.square().sum(), x.q, create_graph=True)
    with pytest.raises(RuntimeError, match="backward.default but no autograd formula was registered"):
        dq.sum().backward()


def test_a_gradient_penalty_raises(device):
    """Also where the second derivative is only a part of the graph: never a wrong number in silence."""
    x = make_inputs(Case(5, D=16), torch.float32, device)
    o, _ = flash_attention(x.q, x.k, x.v, causal_mask())
    dq, = torch.autograd.grad(o.sum(), x.q, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        (o.sum() + dq.square().sum()).backward()
    w = torch.eye(16, device=device, requires_grad=True)
    h = x.v.detach() @ w
    o, _ = flash_attention(h, h, h, causal_mask())
    dw, = torch.autograd.grad(o.square().sum() + h.pow(3).sum(), w, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        torch.autograd.grad(dw.sum(), w)


def test_without_grad(device):
    x = make_inputs(Case(65, D=16, H=1), torch.float32, device)
    expected, lse = flash_attention(x.q, x.k, x.v, causal_mask())
    assert expected.requires_grad and lse.requires_grad
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o, lse = flash_attention(x.q, x.k, x.v, causal_mask())
        assert not o.requires_grad and not lse.requires_grad and torch.equal(o, expected)


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_gradient_of_one_input_alone(wanted, device):
    x = make_inputs(Case(5, D=16, H=1), torch.float32, device)
    expected = dict(zip("qkv", (ours(x, causal_mask())[n] for n in ("dq", "dk", "dv")), strict=True))[wanted]
    x = x._replace(**{name: getattr(x, name).detach() for name in "qkv" if name != wanted})
    o, lse = flash_attention(x.q, x.k, x.v, causal_mask())
    assert torch.equal(torch.autograd.grad((o, lse), getattr(x, wanted), (x.do, x.dlse))[0], expected)


def test_default_scale_is_one_over_the_root_of_the_width(device):
    x = make_inputs(Case(65, D=16, H=1), torch.float32, device)
    assert torch.equal(
        flash_attention(x.q, x.k, x.v, causal_mask())[0],
        flash_attention(x.q, x.k, x.v, causal_mask(), 0.25)[0],
    )


def test_the_autograd_function_is_public():
    assert issubclass(FlashAttention2, torch.autograd.Function)


def like(T=5, H=2, D=16, B=1, dtype=torch.float32, device="cpu"):
    return torch.zeros(B, T, H, D, dtype=dtype, device=device)


def four(shape=(1, 5), dtype=torch.int32, **others) -> Mask:
    """A mask whose four vectors are right but for `others`."""
    return Mask(**{name: torch.zeros(shape, dtype=dtype) for name in ("lo", "hi", "q_lo", "q_hi")} | others)


ERRORS = {  # name: (arguments that differ from a right call, type, name, value and rule in the message)
    "q_of_3": (
        dict(q=like()[0]),
        ValueError,
        r"q must be \(batch, tokens, heads, head width\), not \(5, 2, 16\)",
    ),
    "q_of_0": (
        dict(q=torch.zeros(())),
        ValueError,
        r"q must be \(batch, tokens, heads, head width\), not \(\)",
    ),
    "k_of_5": (
        dict(k=like()[None]),
        ValueError,
        r"k must be \(batch, tokens, heads, head width\), not \(1, 1, 5, 2, 16\)",
    ),
    "v_of_2": (dict(v=torch.zeros(5, 16)), ValueError, r"v must be .* not \(5, 16\)"),
    "float64": (
        dict(q=like(dtype=torch.float64)),
        TypeError,
        r"q is torch.float64; it must be float16, bfloat16 or float32",
    ),
    "integers": (dict(v=like(dtype=torch.int32)), TypeError, r"v is torch.int32; it must be float16"),
    "k_of_another_dtype": (
        dict(k=like(dtype=torch.float16)),
        TypeError,
        r"k is torch.float16 on cpu, q is torch.float32 on cpu: they must agree",
    ),
    "v_elsewhere": (
        dict(v=like(device="meta")),
        TypeError,
        r"v is torch.float32 on meta, q is torch.float32 on cpu: they must agree",
    ),
    "v_shorter_than_k": (
        dict(v=like(4)),
        ValueError,
        r"v \(1, 4, 2, 16\) must have k's shape \(1, 5, 2, 16\)",
    ),
    "v_wider_than_k": (
        dict(v=like(D=32)),
        ValueError,
        r"v \(1, 5, 2, 32\) must have k's shape \(1, 5, 2, 16\)",
    ),
    "batch": (
        dict(k=like(B=3), v=like(B=3)),
        ValueError,
        r"k \(3, 5, 2, 16\) must have q's batch 1 and head width 16",
    ),
    "width": (
        dict(k=like(D=32), v=like(D=32)),
        ValueError,
        r"k \(1, 5, 2, 32\) must have q's batch 1 and head width 16",
    ),
    "heads": (dict(q=like(H=3)), ValueError, r"q's 3 heads must be a multiple of k's 2"),
    "no_key_heads": (dict(k=like(H=0), v=like(H=0)), ValueError, r"q's 2 heads must be a multiple of k's 0"),
    "width_257": (
        dict.fromkeys("qkv", like(D=257)),
        ValueError,
        r"head width 257 must lie between 1 and 256",
    ),
    "width_0": (dict.fromkeys("qkv", like(D=0)), ValueError, r"head width 0 must lie between 1 and 256"),
    "mask_none": (dict(mask=None), TypeError, r"mask is a NoneType; it must be a flash_attn2.Mask"),
    "mask_tensor": (dict(mask=torch.ones(3, 3)), TypeError, r"mask is a Tensor; it must be a flash_attn2.Mask"),
    "mask_past_no_bound": (dict(mask=Mask(2**31 - 1, 0)), ValueError, r"left=2147483647 .* must be integers between 0"),
    "scale_underflows": (dict(softmax_scale=1e-50), ValueError, r"softmax_scale=1e-50 must be positive and finite"),
    "scale_0": (dict(softmax_scale=0.0), ValueError, r"softmax_scale=0.0 must be positive and finite"),
    "scale_below_0": (dict(softmax_scale=-1), ValueError, r"softmax_scale=-1.0 must be positive and finite"),
    "scale_nan": (
        dict(softmax_scale=float("nan")),
        ValueError,
        r"softmax_scale=nan must be positive and finite",
    ),
    "scale_infinite": (
        dict(softmax_scale=float("inf")),
        ValueError,
        r"softmax_scale=inf must be positive and finite",
    ),
    "softcap_below_0": (dict(softcap=-1.0), ValueError, r"softcap=-1.0 must be 0 \(none\) or lie between"),
    "softcap_1e7": (dict(softcap=1e7), ValueError, r"softcap=10000000.0 must be 0 \(none\) or lie between"),
    "softcap_none": (dict(softcap=None), TypeError, r"softcap is a NoneType; it must be a number"),
    "q_list": (dict(q=[1.0]), TypeError, r"q is a list; it must be a tensor"),
    "scale_tensor": (dict(softmax_scale=torch.tensor(0.3)), TypeError, r"softmax_scale is a Tensor; it must be a num"),
    "left_of_half": (dict(mask=Mask(2.5, 0)), ValueError, r"left=2.5 and right=0 must be integers between 0"),
    "rows_too_long": (
        dict.fromkeys("qkv", torch.empty(1, 5, 2**15, 256, device="meta")),
        ValueError,
        r"q's 32768 heads of width 256 make a row of 8388608 numbers; it must have fewer than 2\^23",
    ),
    "softcap_nan": (dict(softcap=float("nan")), ValueError, r"softcap=nan must be 0 \(none\) or lie between"),
    "left_below_0": (dict(mask=Mask(-1, 0)), ValueError, r"left=-1 and right=0 must be integers between 0 and"),
    "right_below_0": (dict(mask=Mask(0, -2)), ValueError, r"left=0 and right=-2 must be integers between 0 and"),
    "one_vector_missing": (
        dict(mask=four(q_hi=None)),
        ValueError,
        r"all of lo, hi, q_lo, q_hi or none; missing q_hi",
    ),
    "one_vector_given": (
        dict(mask=Mask(lo=torch.zeros(1, 5).int())),
        ValueError,
        r"or none; missing hi, q_lo, q_hi",
    ),
    "vectors_of_another_batch": (
        dict(mask=four((3, 5))),
        ValueError,
        r"mask.lo is \(3, 5\) torch.int32 on cpu; it must be contiguous \(1, 5\) int32 on cpu",
    ),
    "vectors_of_another_length": (
        dict(k=like(6), v=like(6), mask=four()),
        ValueError,
        r"mask.q_lo is \(1, 5\) .* must be contiguous \(1, 6\)",
    ),
    "vectors_of_int64": (dict(mask=four(dtype=torch.int64)), ValueError, r"mask.lo is \(1, 5\) torch.int64"),
    "vector_elsewhere": (
        dict(mask=four(hi=torch.zeros(1, 5, device="meta").int())),
        ValueError,
        r"mask.hi is \(1, 5\) torch.int32 on meta; it must be .* on cpu",
    ),
    "vector_with_gaps": (
        dict(mask=four(q_lo=torch.zeros(1, 10).int()[:, ::2])),
        ValueError,
        r"mask.q_lo is \(1, 5\) torch.int32 on cpu; it must be contiguous",
    ),
}


@pytest.mark.parametrize("arguments, error, message", ERRORS.values(), ids=ERRORS)
def test_error(arguments, error, message, forward_runs):
    """The name, the value and the rule, before any launch. (The device is checked last.)"""
    call = dict(q=like(), k=like(), v=like(), mask=full_mask()) | arguments
    with pytest.raises(error, match=message):
        flash_attention(**call)
    assert not forward_runs


def test_bfloat16_on_a_cpu_is_refused(monkeypatch, forward_runs):
    """Triton's interpreter computes garbage there without a word."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = like(dtype=torch.bfloat16)
    with pytest.raises(
        TypeError, match="bfloat16 is silently wrong in Triton's interpreter: use float32 or float16"
    ):
        flash_attention(x, x, x, causal_mask())
    assert not forward_runs


def test_a_cpu_without_the_interpreter_is_refused(monkeypatch, forward_runs):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="only through Triton's interpreter: set TRITON_INTERPRET=1"):
        flash_attention(like(), like(), like(), causal_mask())
    assert not forward_runs


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("with_documents", [False, True], ids=["closed", "documents"])
def test_on_a_device_that_is_not_the_current_one(with_documents):
    other = torch.device("cuda:1")
    case = Case(1000, H=6, H_kv=3, docs=((300, 700),) if with_documents else None)
    x = make_inputs(case, torch.bfloat16, other)
    mask, seen = make_mask(case, other)
    with torch.cuda.device(0):
        got = ours(x, mask)
    assert all(value.device == other for value in got.values())
    assert_as_good_as_torch(got, x, seen)
