"""flash-attn 2.8's public calls: its arguments, its meaning, its edges; every fault that its users reported."""
import functools
import gc
import inspect
from typing import NamedTuple

import pytest
import torch
from attention_cases import FULL, Case, assert_as_good_as_torch, errors, make_inputs, on_both, packing, running
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import flash_attn2
from flash_attn2 import (
    causal_mask,
    flash_attention,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    interface,
    reference,
)


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A compiler and a cache without a past."""
    torch._dynamo.reset()
    monkeypatch.setattr(interface, "_recent_masks", interface.RecentMasks())
    yield
    torch._dynamo.reset()


@pytest.fixture
def masks_built(monkeypatch):
    """One entry for each mask that is built from cu_seqlens."""
    built, real = [], interface.varlen_mask

    def counted(*args):
        built.append(args)
        return real(*args)
    monkeypatch.setattr(interface, "varlen_mask", counted)
    return built


class Packed(NamedTuple):
    """Segments of (queries, keys) packed into one row; q, k, v... of `x` keep their batch of 1."""
    x: object
    cu_q: Tensor
    cu_k: Tensor
    segments: tuple[tuple[int, int], ...]


def cumulative(lengths, device) -> Tensor:
    return torch.tensor([*running(lengths), sum(lengths)], dtype=torch.int32, device=device)


def pack(segments, dtype, device, rest: tuple[int, int] = (0, 0), **case) -> Packed:
    """rest: tokens past the last segment."""
    n_q, n_k = ([n[side] for n in segments] for side in (0, 1))
    x = make_inputs(Case(sum(n_q) + rest[0], sum(n_k) + rest[1], **case), dtype, device)
    return Packed(x, cumulative(n_q, device), cumulative(n_k, device), tuple(segments))


def packed_seen(p: Packed, causal: bool = False, window_size=(-1, -1)) -> Tensor:
    """(total_q, total_k), one block a segment, as the definition has it."""
    window = tuple(None if n == -1 else n for n in window_size)
    seen = torch.zeros(p.x.q.shape[1], p.x.k.shape[1], dtype=torch.bool, device=p.x.q.device)
    i = j = 0
    for n_q, n_k in p.segments:
        seen[i:i + n_q, j:j + n_k] = reference.seen(n_q, n_k, causal=causal, window=window, device=seen.device)
        i, j = i + n_q, j + n_k
    return seen


def varlen(p: Packed, **options):
    longest = (max([n[side] for n in p.segments], default=0) for side in (0, 1))
    return flash_attn_varlen_func(p.x.q[0], p.x.k[0], p.x.v[0], p.cu_q, p.cu_k, *longest, **options)


def varlen_results(p: Packed, **options) -> dict[str, Tensor]:
    """o, lse, dq, dk, dv of the packed call, with the batch of 1 that the references want."""
    o, lse, _ = varlen(p, return_attn_probs=True, **options)
    grads = torch.autograd.grad((o, lse), p.x[:3], (p.x.do[0], p.x.dlse[0]))
    return dict(zip(("o", "lse", "dq", "dk", "dv"), (o.detach()[None], lse.detach()[None], *grads), strict=True))


def fixed_results(x, **options) -> dict[str, Tensor]:
    o, lse, _ = flash_attn_func(x.q, x.k, x.v, return_attn_probs=True, **options)
    return dict(o=o.detach(), lse=lse.detach(), **dict(zip(("dq", "dk", "dv"), torch.autograd.grad(
        (o, lse), (x.q, x.k, x.v), (x.do, x.dlse)), strict=True)))


def on_both_sizes(small, large):
    """`on_both` of segments: float32 anywhere, bfloat16 on a GPU."""
    return pytest.mark.parametrize("segments, dtype", [
        pytest.param(small, torch.float32, id="small"),
        pytest.param(large, torch.bfloat16, id="large", marks=pytest.mark.gpu)])


# ---- the signatures, as flash-attn 2.8 documents them

OPTIONS = [("dropout_p", 0.0), ("softmax_scale", None), ("causal", False), ("window_size", (-1, -1)), ("softcap", 0.0),
           ("alibi_slopes", None), ("deterministic", False), ("return_attn_probs", False)]
REQUIRED = inspect.Parameter.empty
PACKING = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]
SIGNATURES = {
    flash_attn_func: [*[(name, REQUIRED) for name in "qkv"], *OPTIONS],
    flash_attn_varlen_func: [*[(name, REQUIRED) for name in [*"qkv", *PACKING]], *OPTIONS, ("block_table", None)],
}


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: call.__name__)
def test_signature_is_flash_attns(call):
    parameters = inspect.signature(call).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[call]
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_every_option_by_position(device):
    """The last one too, as code written for flash-attn may pass them."""
    x = make_inputs(Case(20, D=16, H=1), torch.float32, device)
    out, lse, probs = flash_attn_func(x.q, x.k, x.v, 0.0, 0.5, True, (3, -1), 2.0, None, True, True)
    expected = flash_attention(x.q, x.k, x.v, causal_mask(4), 0.5, 2.0)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and probs is None
    cu = cumulative((20,), device)
    packed = flash_attn_varlen_func(x.q[0], x.k[0], x.v[0], cu, cu, 20, 20, 0.0, 0.5, True, (3, -1), 2.0, None, True,
                                    True, None)
    assert torch.equal(packed[0], out[0]) and torch.equal(packed[1], lse[0]) and packed[2] is None


def test_the_package_exports_them():
    names = {name for name in flash_attn2.__all__ if name.startswith("flash_attn_")}
    assert {*(call.__name__ for call in SIGNATURES), "varlen_mask"} <= set(flash_attn2.__all__)
    assert all(getattr(flash_attn2, name) is getattr(interface, name) for name in names)


def test_return_attn_probs(device):
    """Out alone without it; out, lse and None with it. lse (B, H, Tq), packed (H, total_q)."""
    x = make_inputs(Case(5, 7, D=16, H=2, B=3), torch.float32, device)
    out = flash_attn_func(x.q, x.k, x.v)
    assert isinstance(out, Tensor) and out.shape == (3, 5, 2, 16)
    again, lse, probs = flash_attn_func(x.q, x.k, x.v, return_attn_probs=True)
    assert torch.equal(again, out) and (lse.shape, lse.dtype, probs) == ((3, 2, 5), torch.float32, None)
    p = pack([(5, 7), (3, 2)], torch.float16, device, D=16)
    out = varlen(p)
    assert isinstance(out, Tensor) and (out.shape, out.dtype) == ((8, 2, 16), torch.float16)
    again, lse, probs = varlen(p, return_attn_probs=True)
    assert torch.equal(again, out) and (lse.shape, lse.dtype, probs) == ((2, 8), torch.float32, None)


def test_lse_is_a_natural_logarithm(device):
    """One key: lse is its logit."""
    x = make_inputs(Case(4, 1, D=16, H=1), torch.float32, device)
    logits = (x.q[0, :, 0] @ x.k[0, 0, 0] * 0.25).detach()
    torch.testing.assert_close(flash_attn_func(x.q, x.k, x.v, return_attn_probs=True)[1][0, 0], logits)


# ---- which keys a query sees

@on_both(Case(130, H=2, H_kv=1, D=16), Case(1000, H=6, H_kv=3))
def test_causal_and_full(case, dtype, device):
    x = make_inputs(case, dtype, device)
    for causal in (False, True):
        seen = reference.seen(case.Tq, case.Tq, causal=causal, device=device)
        assert_as_good_as_torch(fixed_results(x, causal=causal), x, seen)


@on_both(Case(130, 65, H=1), Case(2048, 1024, H=6, H_kv=3))
def test_1778_causal_with_more_queries_than_keys(case, dtype, device):
    """Dao-AILab/flash-attention#1778: the first Tq - Tk rows see no key, and nothing else suffers from it."""
    x = make_inputs(case, dtype, device)
    got = fixed_results(x, causal=True)
    none = case.Tq - case.keys
    assert not got["o"][:, :none].any() and not got["dq"][:, :none].any()
    assert (got["lse"][..., :none] == -torch.inf).all()
    assert_as_good_as_torch(got, x, reference.seen(case.Tq, case.keys, device=device))
    alone = x._replace(q=x.q[:, none:].detach().requires_grad_(), do=x.do[:, none:], dlse=x.dlse[..., none:])
    for name, value in fixed_results(alone, causal=True).items():
        if name in ("dk", "dv"):
            torch.testing.assert_close(got[name], value)


WINDOWS = [0, 1, 63, 64, 65, "S-1", "S"]


@pytest.mark.parametrize("window", WINDOWS, ids="left{}".format)
@on_both(Case(66, H=1, D=16), Case(1000, H=6, H_kv=3))
def test_1133_1366_2199_39408_windows(window, case, dtype, device):
    """Dao-AILab/flash-attention#1133, #1366, #2199, huggingface/transformers#39408: `left` keys before the query's
    position and itself; (S - 1, 0) is causal; fewer or more keys than queries."""
    S = case.Tq
    left = {"S-1": S - 1, "S": S}.get(window, window)
    for Tk in (S - 1, S, S + 1):
        x = make_inputs(case._replace(Tk=Tk), dtype, device)
        got = fixed_results(x, window_size=(left, 0))
        assert_as_good_as_torch(got, x, reference.seen(S, Tk, window=(left, None), device=device))
        assert torch.equal(flash_attn_func(x.q, x.k, x.v, window_size=(left, -1), causal=True), got["o"])
        if Tk == S and left >= S - 1:
            assert torch.equal(flash_attn_func(x.q, x.k, x.v, causal=True), got["o"])


@pytest.mark.parametrize("window_size, causal, sides", [
    ((3, 5), False, (3, 5)), ((3, 5), True, (3, 0)), ((-1, 5), False, (None, 5)), ((-1, 5), True, (None, 0)),
    ((3, -1), False, (3, None)), ((0, 0), False, (0, 0)), ([3, 5], False, (3, 5)),
    ((2**40, 2**40), False, (None, None)),
], ids=str)
def test_window_size_and_causal(window_size, causal, sides, device):
    """Inclusive on both sides, -1 for no bound; causal wins over the right side, as in flash-attn. Packed too."""
    x = make_inputs(Case(20, 23, D=16, H=1), torch.float32, device)
    seen = reference.seen(20, 23, causal=False, window=sides, device=device)
    got = fixed_results(x, window_size=window_size, causal=causal)
    assert_as_good_as_torch(got, x, seen)
    packed = varlen_results(Packed(x, *(cumulative((n,), device) for n in (20, 23)), ((20, 23),)),
                            window_size=window_size, causal=causal)
    assert all(torch.equal(packed[name], value) for name, value in got.items())


def test_defaults_are_flash_attns(device):
    """Every key, 1 / sqrt(D), no softcap; and the options reach the kernel."""
    x = make_inputs(Case(20, 23, D=16, H=1, sides=FULL), torch.float32, device)
    seen = torch.ones(20, 23, dtype=torch.bool, device=device)
    assert_as_good_as_torch(fixed_results(x), x, seen)
    assert_as_good_as_torch(fixed_results(x, softmax_scale=1.0, softcap=3.0), x, seen, 1.0, 3.0)
    p = Packed(x, *(cumulative((n,), device) for n in (20, 23)), ((20, 23),))
    assert_as_good_as_torch(varlen_results(p), x, seen)
    assert_as_good_as_torch(varlen_results(p, softmax_scale=1.0, softcap=3.0), x, seen, 1.0, 3.0)


# ---- packed segments

SMALL_SEGMENTS = [(70, 60), (1, 5), (0, 9), (40, 0), (19, 80), (33, 33)]
LARGE_SEGMENTS = [*zip(packing(3000, 12, 0), packing(2500, 12, 1), strict=True), (0, 130), (200, 0), (1, 1), (64, 64)]


@pytest.mark.parametrize("options", [
    dict(), dict(causal=True), dict(window_size=(20, 0)), dict(window_size=(7, 40)), dict(window_size=(-1, 3)),
], ids=["full", "causal", "window20", "window7_40", "right3"])
@on_both_sizes(SMALL_SEGMENTS, LARGE_SEGMENTS)
def test_varlen_segments(segments, dtype, options, device):
    """Bottom right in each segment, empty ones on either side, tokens of nobody at the end; every gradient."""
    p = pack(segments, dtype, device, rest=(3, 2), H=2, H_kv=1, D=16 if dtype == torch.float32 else 64)
    got = varlen_results(p, **options)
    assert_as_good_as_torch(got, p.x, packed_seen(p, **options))
    assert not got["o"][:, -3:].any() and (got["lse"][..., -3:] == -torch.inf).all()
    assert not any(got[name][:, -n:].any() for name, n in (("dq", 3), ("dk", 2), ("dv", 2)))


def test_varlen_in_float16(device):
    p = pack(SMALL_SEGMENTS, torch.float16, device, H=1)
    assert_as_good_as_torch(varlen_results(p, causal=True), p.x, packed_seen(p, causal=True))


def test_varlen_is_each_segment_alone(device):
    """What flash_attn_func gives for each, to rounding: no key leaks in, no segment takes another's keys."""
    p = pack(SMALL_SEGMENTS, torch.float32, device, H=2, H_kv=1, D=16)
    i = j = 0
    out, lse, _ = varlen(p, causal=True, return_attn_probs=True)
    for n_q, n_k in p.segments:
        alone = flash_attn_func(p.x.q[:, i:i + n_q], p.x.k[:, j:j + n_k], p.x.v[:, j:j + n_k], causal=True,
                                return_attn_probs=True)
        torch.testing.assert_close(out[i:i + n_q], alone[0][0])
        torch.testing.assert_close(lse[:, i:i + n_q], alone[1][0])
        i, j = i + n_q, j + n_k


@on_both_sizes([(76, 1), (34, 1), (146, 1)], [(76, 1), (34, 1), (146, 1)])
def test_443_one_key_for_many_queries(segments, dtype, device):
    """Dao-AILab/flash-attention#443: causal, inputs times 3; dq was NaN. Only each segment's last row sees a key."""
    p = pack(segments, dtype, device, H=2, q_times=3.0)
    p = p._replace(x=p.x._replace(**{name: (getattr(p.x, name) * 3).detach().requires_grad_() for name in "kv"}))
    assert p.cu_q.tolist() == [0, 76, 110, 256] and p.cu_k.tolist() == [0, 1, 2, 3]
    got = varlen_results(p, causal=True)
    assert all(value.isfinite().all() for name, value in got.items() if name != "lse")
    empty = torch.ones(256, dtype=torch.bool, device=device)
    empty[p.cu_q[1:].long() - 1] = False
    assert not got["o"][:, empty].any() and not got["dq"][:, empty].any()
    assert (got["lse"][..., empty] == -torch.inf).all() and got["lse"][..., ~empty].isfinite().all()
    assert_as_good_as_torch(got, p.x, packed_seen(p, causal=True))


@on_both_sizes([(0, 1), (100, 204)], [(0, 1), (1023, 2044)])
def test_1254_a_segment_of_keys_alone(segments, dtype, device):
    """Dao-AILab/flash-attention#1254: the backward hung. dk and dv of that segment are 0."""
    p = pack(segments, dtype, device, H=1, D=64)
    for causal in (False, True):
        got = varlen_results(p, causal=causal)
        assert not got["dk"][:, 0].any() and not got["dv"][:, 0].any()
        assert_as_good_as_torch(got, p.x, packed_seen(p, causal))


@on_both_sizes([(0, 5), (40, 30), (0, 7), (3, 3)], [(0, 500), (300, 200), (0, 70), (130, 130)])
def test_2562_segments_without_queries_of_width_256(segments, dtype, device):
    """Dao-AILab/flash-attention#2562: an illegal address in the backward."""
    p = pack(segments, dtype, device, H=1, D=256)
    assert_as_good_as_torch(varlen_results(p, causal=True), p.x, packed_seen(p, causal=True))


def nothing_seen(got: dict[str, Tensor]) -> bool:
    return (not any(got[name].any() for name in ("o", "dq", "dk", "dv"))) and bool((got["lse"] == -torch.inf).all())


@pytest.mark.parametrize("B, Tq, Tk", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_2470_2515_1159_nothing_to_attend(B, Tq, Tk, causal, poison, device):
    """Dao-AILab/flash-attention#2470, #2515, #1159: no keys, no queries, no batch. Empty or 0, and so the gradients."""
    x = make_inputs(Case(Tq, Tk, B=B, H=2, H_kv=1, D=16), torch.float32, device)
    got = fixed_results(x, causal=causal)
    assert got["o"].shape == x.q.shape and got["lse"].shape == (B, 2, Tq) and nothing_seen(got)


@pytest.mark.parametrize("segments, rest", [
    ([], (0, 0)), ([], (5, 0)), ([], (0, 7)), ([], (5, 7)), ([(0, 0)], (0, 0)), ([(0, 0), (0, 0)], (5, 7)),
    ([(5, 0), (0, 7)], (0, 0)), ([(5, 0)], (0, 0)), ([(0, 7)], (0, 0)), ([(5, 0), (3, 0)], (1, 0)),
], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_2470_2515_1159_nothing_to_attend_packed(segments, rest, causal, poison, device):
    """B = 0 is cu_seqlens = [0]; segments without queries or keys; no tokens; tokens of nobody alone."""
    p = pack(segments, torch.float32, device, rest=rest, H=2, H_kv=1, D=16)
    got = varlen_results(p, causal=causal)
    assert got["o"].shape == p.x.q.shape and got["lse"].shape == p.x.dlse.shape and nothing_seen(got)


@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "varlen"])
@on_both(Case(65, H=8, H_kv=1, D=16), Case(1000, H=16, H_kv=2))
def test_648_lse_of_grouped_heads(packed, case, dtype, device):
    """Dao-AILab/flash-attention#648: eight query heads of one key head each have their own lse, in their own place."""
    x = make_inputs(case, dtype, device)
    segments = ((case.Tq - 25, case.Tq - 25), (25, 25))
    cu = cumulative([n for n, _ in segments], device)
    p = Packed(x, cu, cu, segments)
    got = varlen_results(p, causal=True) if packed else fixed_results(x, causal=True)
    seen = packed_seen(p, causal=True) if packed else reference.seen(case.Tq, case.Tq, device=device)
    assert_as_good_as_torch(got, x, seen)
    exact = reference.attention(x.q.detach(), x.k.detach(), x.v.detach(), seen)[1]
    right = errors(got["lse"], exact)[0]
    assert all(errors(got["lse"].roll(n, 1), exact)[0] > 10 * right for n in range(1, 8)), "heads are told apart"


@pytest.mark.parametrize("call", ["fixed", "varlen"])
def test_gradients_of_out_alone_and_of_lse_alone(call, device):
    """lse is differentiable, with out unused too."""
    p = pack([(20, 20), (15, 15)], torch.float32, device, H=2, H_kv=1, D=16)
    seen = packed_seen(p, causal=True) if call == "varlen" else reference.seen(35, 35, device=device)
    exact_inputs = [t.detach().double().requires_grad_() for t in p.x[:3]]
    exact = reference.attention(*exact_inputs, seen)
    if call == "varlen":
        o, lse, _ = varlen(p, causal=True, return_attn_probs=True)
        outputs = (o[None], lse[None])
    else:
        outputs = flash_attn_func(p.x.q, p.x.k, p.x.v, causal=True, return_attn_probs=True)[:2]
    for mine, theirs, grad, inputs in ((*[x[0] for x in (outputs, exact)], p.x.do, 3),
                                       (*[x[1] for x in (outputs, exact)], p.x.dlse, 2)):
        got = torch.autograd.grad(mine, p.x[:inputs], grad, retain_graph=True)
        want = torch.autograd.grad(theirs, exact_inputs[:inputs], grad.double(), retain_graph=True)
        torch.testing.assert_close([t.double() for t in got], list(want), rtol=1e-4, atol=1e-5)


# ---- the packed tensors of flash-attn

def test_packed_tensors(device):
    """The same numbers and gradients as their parts."""
    x = make_inputs(Case(20, D=16, H=2), torch.float32, device)
    cu = cumulative((12, 8), device)
    qkv, kv = (torch.stack([t.detach() for t in part], 2).requires_grad_() for part in (x[:3], x[1:3]))
    options = (0.0, 0.5, True, (9, -1))
    fixed = flash_attn_func(*x[:3], *options)
    packed = flash_attn_varlen_func(*(t[0] for t in x[:3]), cu, cu, 12, 12, *options)[None]
    for out, parts, whole in (
        (fixed, flash_attn_qkvpacked_func(qkv, *options), qkv),
        (fixed, flash_attn_kvpacked_func(x.q, kv, *options), kv),
        (packed, flash_attn_varlen_qkvpacked_func(qkv[0], cu, 12, *options)[None], qkv),
        (packed, flash_attn_varlen_kvpacked_func(x.q[0], kv[0], cu, cu, 12, 12, *options)[None], kv),
    ):
        assert torch.equal(out, parts)
        want = torch.autograd.grad(out, x[3 - whole.shape[2]:3], x.do, retain_graph=True)
        assert torch.equal(torch.autograd.grad(parts, whole, x.do)[0], torch.stack(want, 2))


@pytest.mark.parametrize("call, shape, rule", [
    (flash_attn_qkvpacked_func, (1, 5, 2, 1, 16), r"qkv is \(1, 5, 2, 1, 16\); its dimension 2 must be the 3 tensors"),
    (functools.partial(flash_attn_kvpacked_func, None), (1, 5, 3, 1, 16), "kv is .* dimension 2 must be the 2 tensors"),
    (functools.partial(flash_attn_varlen_qkvpacked_func, cu_seqlens=None, max_seqlen=5), (5,),
     r"qkv is \(5,\); its dimension 1 must be the 3 tensors"),
    (functools.partial(flash_attn_varlen_kvpacked_func, None), (5, 3, 1, 16), "kv is .* dimension 1 must be the 2"),
], ids=["qkv", "kv", "varlen_qkv", "varlen_kv"])
def test_packed_tensors_of_another_number(call, shape, rule):
    with pytest.raises(ValueError, match=rule):
        call(torch.zeros(shape))


# ---- torch.compile

def step(q, k, v, cu_q, cu_k, do, dlse):
    """A loss of both outputs of a packed call, with work before and after to fuse."""
    out, lse, _ = flash_attn_varlen_func(q.sin(), k, v * 2, cu_q, cu_k, 99, 99, causal=True, window_size=(40, -1),
                                         return_attn_probs=True)
    return (out * do).sum() + (lse.clamp(min=-9) * dlse).sum()


def step_gradients(call, p: Packed):
    q, k, v, do, dlse = (t[0] for t in p.x)
    loss = call(q, k, v, p.cu_q, p.cu_k, do, dlse)
    return loss.detach(), *torch.autograd.grad(loss, p.x[:3])


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_varlen_is_eager(backend, device):
    """fullgraph: no graph break, the mask is built inside."""
    p = pack([(40, 30), (0, 5), (25, 30)], torch.float32, device, rest=(1, 2), H=2, H_kv=1, D=16)
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(step_gradients(compiled, p), step_gradients(step, p))


def test_compiled_fixed_is_eager(device):
    x = make_inputs(Case(65, 70, H=2, H_kv=1, D=16), torch.float32, device)

    def call(q, k, v):
        return flash_attn_func(q, k, v, causal=True, window_size=(30, 5), return_attn_probs=True)[:2]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(*x[:3]), call(*x[:3]), strict=True):
        torch.testing.assert_close(got, want)


def test_new_cu_seqlens_do_not_compile_again(device):
    """Other values in other tensors, in the same ones, and other max_seqlen: one graph, each time the right mask."""
    counter = CompileCounterWithBackend("aot_eager")

    def call(q, k, v, cu_q, cu_k, longest):
        return flash_attn_varlen_func(q, k, v, cu_q, cu_k, longest, longest, causal=True)
    compiled = torch.compile(call, backend=counter, fullgraph=True)
    p = pack([(40, 30), (25, 35)], torch.float32, device, H=1, D=16)
    for (n_q, m_q), (n_k, m_k) in (((40, 25), (30, 35)), ((0, 65), (65, 0)), ((65, 0), (1, 64)), ((20, 20), (60, 5))):
        cu_q, cu_k = cumulative((n_q, m_q), device), cumulative((n_k, m_k), device)
        args = (*(t[0] for t in p.x[:3]), cu_q, cu_k, max(n_q, m_q))
        torch.testing.assert_close(compiled(*args), call(*args))
        cu_q.copy_(cumulative((10, 50), device))
        torch.testing.assert_close(compiled(*args), call(*args))
        assert counter.frame_count == 1, "compiled again"


def test_wrong_values_in_a_graph_touch_no_foreign_memory(device):
    """Not checked there; whatever they are, the call returns, with the right shapes and a finite output."""
    p = pack([(40, 30), (25, 35)], torch.float32, device, H=1, D=16)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for wrong in ([5, 3, 99], [2**31 - 1, 0, -2**31], [-7, -7, 1000], [0, 10**9, 65]):
        p = p._replace(cu_q=torch.tensor(wrong, dtype=torch.int32, device=device))
        loss, *gradients = step_gradients(compiled, p)
        assert loss.isfinite() and [g.shape for g in gradients] == [t.shape for t in p.x[:3]]


def test_fake_tensors_have_shapes_alone(device):
    """Where there are no values to read: how a memory plan is made."""
    p = pack([(40, 30), (25, 35)], torch.float32, device, H=2, H_kv=1, D=16)
    with FakeTensorMode() as mode:
        fake = p._replace(x=type(p.x)(*map(mode.from_tensor, p.x)), cu_q=mode.from_tensor(p.cu_q),
                          cu_k=mode.from_tensor(p.cu_k))
        got = varlen_results(fake)
    assert got["o"].shape == p.x.q.shape and got["lse"].shape == (1, 2, 65) and got["dk"].shape == p.x.k.shape


# ---- the masks that are kept

def call_with(p: Packed, cu_q: Tensor, cu_k: Tensor, **options) -> Tensor:
    return varlen(p._replace(cu_q=cu_q, cu_k=cu_k), **options)


@pytest.fixture
def two_segments(device) -> Packed:
    return pack([(12, 10), (8, 10)], torch.float32, device, D=16, H=1)


def kept() -> int:
    return len(interface._recent_masks.entries)


def test_every_layer_after_the_first_finds_its_mask(two_segments, masks_built):
    """Forward and backward, and with other windows between."""
    for _ in range(3):
        varlen_results(two_segments, causal=True)
        varlen_results(two_segments, window_size=(3, 0))
    assert len(masks_built) == 2


def test_another_tensor_of_the_same_values_is_read(two_segments, masks_built):
    p = two_segments
    call_with(p, p.cu_q, p.cu_k)
    call_with(p, p.cu_q.clone(), p.cu_k)
    call_with(p, p.cu_q, p.cu_k.clone())
    call_with(p, p.cu_k, p.cu_q)
    assert len(masks_built) == 4


def test_another_length_is_another_mask(two_segments, masks_built):
    p = two_segments
    q, k, v = (t[0].detach() for t in p.x[:3])
    for n_q, n_k in ((20, 20), (21, 20), (20, 21)):
        more = (torch.cat([t, t])[:n] for t, n in ((q, n_q), (k, n_k), (v, n_k)))
        assert flash_attn_varlen_func(*more, p.cu_q, p.cu_k, 12, 12).shape == (n_q, 1, 16)
    assert len(masks_built) == 3


def test_a_change_in_place_is_noticed(two_segments):
    p = two_segments
    varlen(p, causal=True)
    for cu, segments in ((p.cu_q, ((4, 10), (16, 10))), (p.cu_k, ((4, 3), (16, 17)))):
        cu[1] = segments[0][0 if cu is p.cu_q else 1]
        changed = p._replace(segments=segments)
        assert_as_good_as_torch(varlen_results(changed, causal=True), p.x, packed_seen(changed, causal=True))
    p.cu_q[1] = 99
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\] = 20 follows 99"):
        varlen(p, causal=True)


@pytest.mark.parametrize("side", ["cu_q", "cu_k"])
def test_a_mask_goes_with_its_cu_seqlens(side, two_segments):
    """When either tensor is freed, at once; and a new tensor in its place is read anew."""
    p = two_segments
    varlen(p)
    assert kept() == 1
    p = two_segments._replace(**{side: None})
    freed = [getattr(two_segments, side).clone()]
    call_with(p, *(freed[0] if x is None else x for x in (p.cu_q, p.cu_k)))
    assert kept() == 2
    freed.clear()
    gc.collect()
    assert kept() == 1


def test_a_new_batch_each_step_keeps_nothing(two_segments):
    p, before = two_segments, None
    for n in range(20):
        cu = cumulative((n, 20 - n), p.cu_q.device)
        changed = Packed(p.x, cu, cu, ((n, n), (20 - n, 20 - n)))
        out = varlen(changed, causal=True)
        assert before is None or not torch.equal(out, before)
        assert kept() == 1
        before = out.detach()
        del cu, changed, out
    assert kept() == 0


def test_another_side_is_another_mask(two_segments, masks_built):
    """causal and not, on the same cu_seqlens: left, right and both totals are part of what a mask is known by."""
    for causal in (True, False, True):
        assert_right(two_segments, causal)
    assert len(masks_built) == 2


def assert_right(p: Packed, causal: bool) -> None:
    out = varlen(p, causal=causal)
    want, _ = reference.attention(*p.x[:3], packed_seen(p, causal))
    torch.testing.assert_close(out.double(), want[0], atol=1e-5, rtol=1e-5)


def test_no_more_than_a_few_masks_are_kept(two_segments, masks_built):
    for left in range(2 * interface.RecentMasks.SIZE):
        varlen(two_segments, window_size=(left, 0))
    assert kept() == interface.RecentMasks.SIZE and len(masks_built) == 2 * kept()
    varlen(two_segments, window_size=(2 * interface.RecentMasks.SIZE - 1, 0))
    assert len(masks_built) == 2 * kept()


def test_the_two_may_be_one_tensor(device, masks_built):
    p = pack([(12, 12), (8, 8)], torch.float32, device, D=16, H=1)
    p = p._replace(cu_k=p.cu_q)
    for _ in range(2):
        assert_as_good_as_torch(varlen_results(p, causal=True), p.x, packed_seen(p, causal=True))
    assert len(masks_built) == 1


def test_a_mask_built_in_inference_mode_serves_training(two_segments, masks_built):
    with torch.inference_mode():
        varlen(two_segments, causal=True)
    assert_as_good_as_torch(varlen_results(two_segments, causal=True), two_segments.x,
                            packed_seen(two_segments, causal=True))
    assert len(masks_built) == 1


def test_cu_seqlens_made_in_inference_mode(two_segments):
    """They count no versions, so nothing is kept of them."""
    p = two_segments
    with torch.inference_mode():
        cu_q, cu_k = p.cu_q.clone(), p.cu_k.clone()
        out = call_with(p, cu_q, cu_k, causal=True)
        cu_q[1] = 3
        assert not torch.equal(call_with(p, cu_q, cu_k, causal=True), out)
    assert torch.equal(out, varlen(p, causal=True))


def test_selective_checkpointing_does_not_see_the_mask(two_segments):
    """A policy that saves everything: the second run finds the mask ready, and must not meet its saved steps."""
    def block(*args):
        q, k, v, cu_q, cu_k, do, dlse = args
        return step(q.clamp(-9, 9), k.minimum(v + 9), v, cu_q, cu_k, do, dlse).clamp(-1e9, 1e9)
    save_all = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    got = step_gradients(functools.partial(checkpoint, block, use_reentrant=False, context_fn=save_all), two_segments)
    interface._recent_masks.entries = ()
    torch.testing.assert_close(got, step_gradients(block, two_segments))


@pytest.mark.gpu
def test_a_mask_of_another_stream_is_not_used(two_segments, masks_built):
    varlen(two_segments)
    with torch.cuda.stream(torch.cuda.Stream()):
        varlen(two_segments)
    torch.cuda.synchronize()
    assert len(masks_built) == 2


@pytest.mark.gpu
def test_a_found_mask_never_waits_for_the_gpu(device):
    p = pack(LARGE_SEGMENTS, torch.bfloat16, device)
    varlen_results(p, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        varlen_results(p, causal=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_captured_cuda_graph_follows_cu_seqlens(device):
    """The mask is built inside the graph, though one was kept before: a replay takes the values of its own time."""
    p = pack([(500, 400), (500, 600)], torch.bfloat16, device)
    p = p._replace(x=p.x._replace(q=p.x.q.detach(), k=p.x.k.detach(), v=p.x.v.detach()))
    varlen(p, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = varlen(p, causal=True)
    for n_q, n_k in ((500, 400), (100, 900)):
        p.cu_q[1], p.cu_k[1] = n_q, n_k
        graph.replay()
        changed = p._replace(segments=((n_q, n_k), (1000 - n_q, 1000 - n_k)))
        assert_as_good_as_torch(dict(o=out[None]), changed.x, packed_seen(changed, causal=True))


# ---- errors

def like(*shape, dtype=torch.float32, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


def cu(*values, dtype=torch.int32, **options):
    return torch.tensor(values, dtype=dtype, **options)


FIXED = dict(q=like(1, 5, 2, 16), k=like(1, 5, 2, 16), v=like(1, 5, 2, 16))
PACKED = dict(q=like(5, 2, 16), k=like(5, 2, 16), v=like(5, 2, 16), cu_seqlens_q=cu(0, 2, 5), cu_seqlens_k=cu(0, 2, 5),
              max_seqlen_q=3, max_seqlen_k=3)
REFUSED = {  # options of both calls: (argument, type, name, value and rule in the message)
    "dropout": (dict(dropout_p=0.1), ValueError, "dropout_p=0.1 must be 0: flash_attn2 has no dropout"),
    "alibi": (dict(alibi_slopes=like(2)), ValueError, "alibi_slopes is a Tensor; it must be None"),
    "left": (dict(window_size=(-2, 0)), ValueError, r"window_size=\(-2, 0\) must be \(left, right\), each a number of"),
    "right": (dict(window_size=(3, -5), causal=True), ValueError, r"window_size=\(3, -5\) must be .* or -1 for no"),
    "one_side": (dict(window_size=(3,)), ValueError, r"window_size=\(3,\) must be \(left, right\)"),
    "a_number": (dict(window_size=128), ValueError, r"window_size=128 must be \(left, right\)"),
    "no_number": (dict(window_size=(None, None)), ValueError, r"window_size=\(None, None\) must be \(left, right\)"),
    "a_fraction": (dict(window_size=(0.5, 0)), ValueError, r"window_size=\(0.5, 0\) must be \(left, right\)"),
    "scale": (dict(softmax_scale=0.0), ValueError, "softmax_scale=0.0 must be positive and finite"),
    "softcap": (dict(softcap=-1.0), ValueError, "softcap=-1.0 must be 0"),
    "unknown": (dict(window=3), TypeError, "unexpected keyword argument 'window'"),
}
WRONG_PACKED = {
    "block_table": (dict(block_table=cu(0)), ValueError, "block_table is a Tensor; it must be None"),
    "q_of_4": (dict(q=like(1, 5, 2, 16)), ValueError, r"q must be \(tokens, heads, head width\), not \(1, 5, 2, 16\)"),
    "k_of_2": (dict(k=like(5, 16)), ValueError, r"k must be \(tokens, heads, head width\), not \(5, 16\)"),
    "v_of_0": (dict(v=like()), ValueError, r"v must be \(tokens, heads, head width\), not \(\)"),
    "v_shorter": (dict(v=like(4, 2, 16)), ValueError, "must have k's shape"),
    "heads": (dict(q=like(5, 3, 16)), ValueError, "q's 3 heads must be a multiple of k's 2"),
    "width": (dict(q=like(5, 2, 32)), ValueError, "head width 32"),
    "float64": (dict(q=like(5, 2, 16, dtype=torch.float64)), TypeError, "q is torch.float64; it must be float16"),
    "a_list": (dict(cu_seqlens_q=[0, 2, 5]), TypeError, "cu_seqlens_q is a list; it must be a tensor"),
    "none": (dict(cu_seqlens_k=None), TypeError, "cu_seqlens_k is a NoneType; it must be a tensor"),
    "int64": (dict(cu_seqlens_q=cu(0, 2, 5, dtype=torch.int64)), ValueError,
              r"cu_seqlens_q is \(3,\) torch.int64 on cpu; it must be contiguous \(B \+ 1,\) int32 on cpu"),
    "two_rows": (dict(cu_seqlens_k=cu(0, 2, 5)[None]), ValueError, r"cu_seqlens_k is \(1, 3\) torch.int32 on cpu; it"),
    "no_values": (dict(cu_seqlens_k=cu()), ValueError, r"cu_seqlens_k is \(0,\) torch.int32 on cpu; it must be"),
    "gaps": (dict(cu_seqlens_q=cu(0, 0, 2, 2, 5, 5)[::2]), ValueError, r"cu_seqlens_q is \(3,\) .* must be contiguous"),
    "elsewhere": (dict(cu_seqlens_k=cu(0, 2, 5, device="meta")), ValueError, "on meta; it must be .* int32 on cpu"),
    "another_B": (dict(cu_seqlens_k=cu(0, 5)), ValueError,
                  "cu_seqlens_q has 2 segments, cu_seqlens_k 1: they must agree"),
    "not_from_0": (dict(cu_seqlens_q=cu(1, 2, 5)), ValueError, "cu_seqlens_q begins with 1; it must begin with 0"),
    "falls": (dict(cu_seqlens_k=cu(0, 3, 2)), ValueError, r"cu_seqlens_k\[2\] = 2 follows 3; it must never decrease"),
    "past_the_queries": (dict(cu_seqlens_q=cu(0, 2, 6)), ValueError,
                         "cu_seqlens_q ends with 6; it must not pass the 5 tokens there are"),
    "past_the_keys": (dict(cu_seqlens_k=cu(0, 2, 6)), ValueError, "cu_seqlens_k ends with 6; it must not pass the 5"),
    "max_seqlen_none": (dict(max_seqlen_q=None), TypeError, "max_seqlen_q=None must be an integer"),
    "max_seqlen_fraction": (dict(max_seqlen_k=3.5), TypeError, "max_seqlen_k=3.5 must be an integer"),
}
ERRORS = [pytest.param(call, right | wrong, error, message, id=f"{call.__name__}-{name}")
          for call, right, table in ((flash_attn_func, FIXED, REFUSED), (flash_attn_varlen_func, PACKED, REFUSED),
                                     (flash_attn_varlen_func, PACKED, WRONG_PACKED))
          for name, (wrong, error, message) in table.items()]


@pytest.fixture
def launches(monkeypatch):
    """One entry for each run of the forward launcher."""
    runs, real = [], flash_attn2.ops.forward

    def counted(*args):
        runs.append(args)
        return real(*args)
    monkeypatch.setattr(flash_attn2.ops, "forward", counted)
    return runs


@pytest.mark.parametrize("call, arguments, error, message", ERRORS)
def test_error(call, arguments, error, message, launches):
    """The name, the value and the rule, before any launch, and nothing wrong is kept."""
    with pytest.raises(error, match=message):
        call(**arguments)
    assert not launches
    assert kept() == 0 or "cu_seqlens" not in message


def test_one_cu_seqlens_of_two_totals_is_checked_against_both():
    one = cu(0, 2, 5)
    arguments = PACKED | dict(cu_seqlens_q=one, cu_seqlens_k=one)
    for fewer in ("q", "kv"):
        with pytest.raises(ValueError, match=f"cu_seqlens_{fewer[0]} ends with 5; it must not pass the 4 tokens"):
            flash_attn_varlen_func(**arguments | {name: like(4, 2, 16) for name in fewer})


@pytest.mark.parametrize("longest", [0, 1, 10**6, torch.tensor(3)], ids=str)
def test_max_seqlen_changes_nothing(longest, device):
    p = pack([(3, 4), (2, 1)], torch.float32, device, D=16, H=1)
    arguments = (*(t[0] for t in p.x[:3]), p.cu_q, p.cu_k)
    assert torch.equal(flash_attn_varlen_func(*arguments, longest, longest), varlen(p))


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_changes_no_bit_of_the_triton_pair(deterministic, device):
    x = make_inputs(Case(20, D=16, H=1), torch.float32, device)
    first = fixed_results(x, causal=True)
    assert all(torch.equal(v, first[n]) for n, v in fixed_results(x, causal=True, deterministic=deterministic).items())


def test_autocast_takes_float32_down(device):
    p = pack([(20, 20)], torch.float32, device, D=16, H=1)
    with torch.autocast(device.type, dtype=torch.float16):
        assert varlen(p).dtype == torch.float16
        assert flash_attn_func(p.x.q, p.x.k, p.x.v).dtype == torch.float16
