"""The Triton backward: every case against float64, any layout of inputs and do, then what must hold to the last bit."""

import pytest
import torch
from attention_cases import (
    Case,
    Inputs,
    assert_as_good_as_torch,
    by_rows,
    cases,
    double,
    dq_in_any_order,
    make_inputs,
    make_mask,
    on_both,
    ours,
    same,
)

from flash_attn2 import causal_mask, flash_attention, reference, tiles

LARGE = Case(1024, H=6, H_kv=3, B=2)
both = on_both(Case(65, H=2, H_kv=1, D=16, B=2), LARGE)


def grads(x: Inputs, mask, do=None) -> tuple[torch.Tensor, ...]:
    o, _ = flash_attention(x.q, x.k, x.v, mask)
    return torch.autograd.grad(o, (x.q, x.k, x.v), x.do if do is None else do)


@pytest.mark.parametrize("case, dtype", cases())
def test_as_good_as_torch(case, dtype, device, poison):
    """With a gradient of lse, in nats, in every case."""
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    got = ours(x, mask, case.softmax_scale, case.softcap, "triton")
    assert all(got[name].dtype == dtype for name in ("dq", "dk", "dv"))
    assert_as_good_as_torch(got, x, seen, case.softmax_scale, case.softcap)


@both
def test_gradient_of_o_alone(case, dtype, device, poison):
    x = make_inputs(case, dtype, device)
    dq, dk, dv = grads(x, causal_mask())
    assert_as_good_as_torch(
        dict(dq=dq, dk=dk, dv=dv), x._replace(dlse=torch.zeros_like(x.dlse)), make_mask(case, device)[1]
    )


@both
def test_gradient_of_lse_alone(case, dtype, device, poison):
    x = make_inputs(case, dtype, device)
    x = x._replace(do=torch.zeros_like(x.do))
    _, lse = flash_attention(x.q, x.k, x.v, causal_mask())
    dq, dk, dv = torch.autograd.grad(lse, (x.q, x.k, x.v), x.dlse)
    assert (dv == 0).all()
    assert_as_good_as_torch(dict(dq=dq, dk=dk, dv=dv), x, make_mask(case, device)[1])


def test_gradient_of_lse_is_in_nats(device):
    """One query, one key: lse = scale q k, so its gradient is scale k, whatever base the kernel works in."""
    q, k = (torch.randn(1, 1, 1, 16, device=device, requires_grad=True) for _ in range(2))
    _, lse = flash_attention(q, k, k, causal_mask())
    torch.testing.assert_close(torch.autograd.grad(lse.sum(), q)[0], k.detach() * 16 ** -0.5)


@on_both(Case(130, 65), Case(2100, 1000, H=6, H_kv=3))
def test_row_without_keys_passes_no_gradient(case, dtype, device, poison):
    """Its do and its dlse, even an infinite one, reach nothing."""
    x = make_inputs(case, dtype, device)
    blind = case.Tq - case.keys
    before = ours(x, causal_mask())
    x.do[:, :blind] *= 1000
    x.dlse[..., :blind] = float("inf")
    after = ours(x, causal_mask())
    assert (after["dq"][:, :blind] == 0).all()
    for name in ("dq", "dk", "dv"):
        assert same(name, before[name], after[name], dq_in_any_order(x)), name


@on_both(Case(70, 75, H=1, D=16, segments=((0, 3), (60, 0), (10, 70), (0, 2))),
         Case(1100, 1500, H=6, H_kv=3, segments=((76, 1), (0, 5), (324, 1294), (600, 0), (100, 200))))
def test_key_that_no_query_sees_gets_zero(case, dtype, device, poison):
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    got = ours(x, mask)
    unseen = ~seen.any(0)
    assert unseen.any() and (got["dk"][:, unseen] == 0).all() and (got["dv"][:, unseen] == 0).all()


DO_LAYOUTS = {
    "sum": lambda do: torch.ones((), dtype=do.dtype, device=do.device).expand_as(do),
    "one_row_for_all": lambda do: do[:, :1].expand_as(do),
    "every_other_batch_row": lambda do: torch.stack([do, -do], 1).flatten(0, 1)[::2],
    "every_other_head": lambda do: torch.stack([do, -do], 3).flatten(2, 3)[:, :, ::2],
    "padded_rows": lambda do: torch.cat([do, -do], -1)[..., :do.shape[-1]],
    "every_other_column": lambda do: torch.stack([do, -do], -1).flatten(3)[..., ::2],
    "BHTD": lambda do: do.transpose(1, 2).contiguous().transpose(1, 2),
    "BTDH": lambda do: do.transpose(2, 3).contiguous().transpose(2, 3),
    "odd_offset": lambda do: torch.cat([do.new_zeros(1), do.flatten()])[1:].view(do.shape),
}


@both
@pytest.mark.parametrize("layout", DO_LAYOUTS.values(), ids=DO_LAYOUTS)
def test_do_of_any_layout(case, dtype, layout, device, poison):
    x = make_inputs(case, dtype, device)
    x = x._replace(do=layout(x.do))
    dq, dk, dv = grads(x, causal_mask())
    assert_as_good_as_torch(
        dict(dq=dq, dk=dk, dv=dv), x._replace(dlse=torch.zeros_like(x.dlse)), make_mask(case, device)[1]
    )


@on_both(Case(65, D=16, H=1), LARGE)
def test_sum_and_transpose_and_cat(case, dtype, device):
    """Autograd's own do: stride 0, transposed, a slice of a concatenation. Each equals that by hand."""
    x = make_inputs(case, dtype, device)
    losses = [(lambda o: o.sum(), torch.ones_like(x.do)),
              (lambda o: (o.transpose(1, 2) * x.do.transpose(1, 2)).sum(), x.do),
              (lambda o: (torch.cat([o, o], 0) * torch.cat([x.do, 0 * x.do], 0)).sum(), x.do)]
    for loss, do in losses:
        o, _ = flash_attention(x.q, x.k, x.v, causal_mask())
        for mine, by_hand in zip(
            torch.autograd.grad(loss(o), (x.q, x.k, x.v)), grads(x, causal_mask(), do), strict=True
        ):
            torch.testing.assert_close(mine, by_hand)


def packed_qkv(x: Inputs):
    """q, k, v cut from one (B, T, heads, D)."""
    return torch.cat([x.q, x.k, x.v], 2).split([x.q.shape[2], x.k.shape[2], x.v.shape[2]], 2)


def five_ways(x: Inputs):
    """Each of q, k, v in a layout of its own."""
    q = x.q.transpose(1, 2).contiguous().transpose(1, 2)                    # BHTD
    k = torch.cat([x.k, -x.k], -1)[..., :x.k.shape[-1]]                     # padded rows
    v = torch.cat([x.v.new_zeros(1), x.v.flatten()])[1:].view(x.v.shape)    # not at a multiple of 16 bytes
    return q, k, v


QKV_LAYOUTS = {
    "packed": packed_qkv,
    "BHTD": lambda x: (t.transpose(1, 2).contiguous().transpose(1, 2) for t in x[:3]),
    "each_its_own": five_ways,
    "every_other_head": lambda x: (torch.stack([t, -t], 3).flatten(2, 3)[:, :, ::2] for t in x[:3]),
    "column_stride_2": lambda x: (torch.stack([t, -t], -1).flatten(3)[..., ::2] for t in x[:3]),
    "row_for_all_heads": lambda x: (t[:, :, :1].expand_as(t) for t in x[:3]),
    "sequence_first": lambda x: (t.transpose(0, 1).contiguous().transpose(0, 1) for t in x[:3]),
}


@both
@pytest.mark.parametrize("layout", QKV_LAYOUTS.values(), ids=QKV_LAYOUTS)
def test_q_k_v_of_any_layout(case, dtype, layout, device, poison):
    x = make_inputs(case, dtype, device)
    q, k, v = (t.detach().requires_grad_() for t in layout(x))
    x = x._replace(q=q, k=k, v=v)
    assert_as_good_as_torch(ours(x, causal_mask()), x, make_mask(case, device)[1])


def test_gradient_through_a_packed_projection(device):
    """d qkv arrives in one tensor, each of q, k, v in its own place."""
    qkv = torch.randn(1, 65, 3, 2, 16, device=device, requires_grad=True)
    do = torch.randn(1, 65, 2, 16, device=device)
    o, _ = flash_attention(*qkv.unbind(2), causal_mask())
    dqkv, = torch.autograd.grad(o, qkv, do)
    x = Inputs(*qkv.detach().unbind(2), do, torch.zeros(1, 2, 65, device=device))
    assert_as_good_as_torch(
        dict(zip(("dq", "dk", "dv"), dqkv.unbind(2), strict=True)), x, reference.seen(65, 65, device=device)
    )


@on_both(
    Case(130, D=16, docs=((70, 60),), B=1), Case(2048, H=6, H_kv=3, B=2, docs=((700, 1348), (700, 1348)))
)
def test_a_document_takes_no_gradient_from_the_others(case, dtype, device):
    x = make_inputs(case, dtype, device)
    mask, _ = make_mask(case, device)
    first = case.docs[0][0]
    do = torch.cat([torch.zeros_like(x.do[:, :first]), x.do[:, first:]], 1)
    for g in grads(x, mask, do):
        assert (g[:, :first] == 0).all() and (g[:, first:] != 0).any()


@on_both(Case(130, D=16), LARGE)
def test_the_past_takes_no_gradient_from_the_future(case, dtype, device):
    """do of the first t rows alone: no key and no query past them gets any."""
    x = make_inputs(case, dtype, device)
    t = 65
    do = torch.cat([x.do[:, :t], torch.zeros_like(x.do[:, t:])], 1)
    for g in grads(x, causal_mask(), do):
        assert (g[:, t:] == 0).all() and (g[:, :t] != 0).any()


@on_both(Case(65, B=2, H=4, H_kv=2, D=16), LARGE)
def test_batch_rows_and_heads_are_independent(case, dtype, device):
    """New numbers in the last batch row and the last key head leave every bit of the rest's gradients."""
    x = make_inputs(case, dtype, device)
    group = x.q.shape[2] // x.k.shape[2]
    before = ours(x, causal_mask())
    with torch.no_grad():
        for t, heads in ((x.q, group), (x.k, 1), (x.v, 1), (x.do, group)):
            t[-1] = torch.randn_like(t[-1])
            t[:, :, -heads:] = torch.randn_like(t[:, :, -heads:])
    after = ours(x, causal_mask())
    for name, heads in (("dq", group), ("dk", 1), ("dv", 1)):
        kept = (g[name][:-1, :, :-heads] for g in (before, after))
        assert same(name, *kept, dq_in_any_order(x)), name


@both
def test_twice_the_gradient_is_twice_the_gradient(case, dtype, device):
    """A power of two moves exponents only: exactly."""
    x = make_inputs(case, dtype, device)
    all_grads = grads(x, causal_mask()), grads(x, causal_mask(), 2 * x.do)
    for name, once, twice in zip(("dq", "dk", "dv"), *all_grads, strict=True):
        assert same(name, 2 * once, twice, dq_in_any_order(x)), name


@both
def test_no_gradient_in_none_out(case, dtype, device, poison):
    x = make_inputs(case, dtype, device)
    assert all((g == 0).all() for g in grads(x, causal_mask(), torch.zeros_like(x.do)))


@pytest.mark.parametrize("T, D", [(97, 16), (127, 40), (129, 16)])
def test_large_scores_past_the_last_row_make_no_nan(T, D, device, poison):
    x = make_inputs(Case(T, H=1, D=D, q_times=5.0), torch.float32, device)
    with torch.no_grad():
        x.k.mul_(3.0)
    assert all(value.isfinite().all() for value in ours(x, causal_mask()).values())


def test_directional_finite_difference(device):
    """The gradient predicts the change of the forward itself, no reference between: central difference."""
    x = make_inputs(Case(65, D=16, H=2), torch.float32, device)
    direction = [torch.randn_like(t) for t in x[:3]]

    def loss(step):
        with torch.no_grad():
            o, lse = flash_attention(
                *(t + step * d for t, d in zip(x[:3], direction, strict=True)), causal_mask()
            )
        return (o.double() * x.do).sum().item() + (lse.double() * x.dlse).sum().item()
    got = ours(x, causal_mask())
    predicted = sum(
        (got[name].double() * d).sum().item() for name, d in zip(("dq", "dk", "dv"), direction, strict=True)
    )
    assert (loss(1e-2) - loss(-1e-2)) / 2e-2 == pytest.approx(predicted, rel=1e-2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tile of the interpreter")
@pytest.mark.parametrize("block_m, block_n", [(16, 32), (32, 16), (32, 128), (128, 32)])
@pytest.mark.parametrize(
    "case",
    [Case(65, 97, H=1, D=16), Case(70, 40, H=1, D=16, window=20), Case(100, H=1, D=16, docs=((33, 1, 66),))],
    ids=["Tq_below_Tk", "window", "documents"],
)
def test_any_tile_shape(case, block_m, block_n, device, poison, monkeypatch):
    """Forward and backward."""
    monkeypatch.setattr(tiles, "INTERPRETER", tiles.Tile(block_m, block_n, 4, 1))
    x = make_inputs(case, torch.float32, device)
    mask, seen = make_mask(case, device)
    assert_as_good_as_torch(ours(x, mask), x, seen)


@pytest.mark.gpu
def test_float32_on_a_gpu(device):
    case = Case(200, H=2, D=64)
    x = make_inputs(case, torch.float32, device)
    assert_as_good_as_torch(ours(x, causal_mask()), x, make_mask(case, device)[1])


@pytest.mark.parametrize("B, Tq, Tk", [(0, 5, 5), (1, 0, 5), (1, 5, 0)], ids=["B0", "Tq0", "Tk0"])
def test_nothing_in_zero_out(B, Tq, Tk, device, poison):
    q = torch.randn(B, Tq, 2, 16, device=device, requires_grad=True)
    k = torch.randn(B, Tk, 2, 16, device=device, requires_grad=True)
    o, lse = flash_attention(q, k, k * 1, causal_mask())
    dq, dk = torch.autograd.grad((o, lse), (q, k), (torch.ones_like(o), torch.zeros_like(lse)))
    assert dq.shape == q.shape and dk.shape == k.shape and (dq == 0).all() and (dk == 0).all()


def test_the_tolerance_can_fail():
    """A relative error of one in a thousand in one gradient does not pass."""
    x = make_inputs(Case(65, D=16), torch.float32, torch.device("cpu"))
    seen = reference.seen(65, 65)
    exact = by_rows(reference.attention, double(x), seen, None)
    assert_as_good_as_torch(exact, x, seen)
    for name in exact:
        with pytest.raises(AssertionError, match=f"{name}: max error"):
            assert_as_good_as_torch({**exact, name: exact[name] * 1.001}, x, seen)
