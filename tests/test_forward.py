"""The Triton forward: every case against float64, then what must hold to the last bit."""
import pytest
import torch
from attention_cases import (
    FULL,
    Case,
    assert_as_good_as_torch,
    cases,
    make_inputs,
    make_mask,
    on_both,
)

from flash_attn2 import causal_mask, flash_attention

LARGE = Case(1024, H=6, H_kv=3, B=2)


@pytest.mark.parametrize("case, dtype", cases())
def test_as_good_as_torch(case, dtype, device, poison):
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    o, lse = flash_attention(x.q, x.k, x.v, mask, case.softmax_scale, case.softcap, "triton")
    assert o.dtype == dtype and lse.dtype == torch.float32
    assert_as_good_as_torch(dict(o=o.detach(), lse=lse.detach()), x, seen, case.softmax_scale, case.softcap)


@on_both(Case(130, 65), Case(2100, 1000, H=6, H_kv=3))
def test_row_without_keys_is_zero_with_lse_minus_infinity(case, dtype, device, poison):
    x = make_inputs(case, dtype, device)
    o, lse = flash_attention(x.q, x.k, x.v, causal_mask())
    blind = case.Tq - case.keys
    assert (o[:, :blind] == 0).all() and (lse[..., :blind] == float("-inf")).all()
    assert (o[:, blind:] != 0).any(-1).all() and lse[..., blind:].isfinite().all()


@on_both(Case(130), Case(1024, H=6, H_kv=3, B=2))
def test_window_of_one_returns_v(case, dtype, device):
    x = make_inputs(case, dtype, device)
    o, _ = flash_attention(x.q, x.k, x.v, causal_mask(window=1))
    assert torch.equal(o, x.v.repeat_interleave(x.q.shape[2] // x.v.shape[2], 2))


@on_both(Case(66, H=1, docs=((1,) * 66,)), Case(1024, H=6, H_kv=3, docs=((1,) * 1024,)))
def test_one_token_documents_return_v(case, dtype, device):
    x = make_inputs(case, dtype, device)
    o, _ = flash_attention(x.q, x.k, x.v, make_mask(case, device)[0])
    assert torch.equal(o, x.v.repeat_interleave(x.q.shape[2] // x.v.shape[2], 2))


@on_both(Case(130, H=1), LARGE)
@pytest.mark.parametrize("window", ["T", "T+1", "2T"])
def test_window_that_reaches_everything_is_causal(case, dtype, window, device):
    x = make_inputs(case, dtype, device)
    width = {"T": case.Tq, "T+1": case.Tq + 1, "2T": 2 * case.Tq}[window]
    for a, b in zip(
        flash_attention(x.q, x.k, x.v, causal_mask(width)),
        flash_attention(x.q, x.k, x.v, causal_mask()),
        strict=True,
    ):
        assert torch.equal(a, b)


@on_both(Case(130, D=16), LARGE)
def test_one_document_is_causal(case, dtype, device):
    """The four vectors and the closed form are two ways to say one mask."""
    x = make_inputs(case, dtype, device)
    one = causal_mask(doc_start=torch.zeros(case.B, case.Tq, dtype=torch.int64, device=device))
    for a, b in zip(
        flash_attention(x.q, x.k, x.v, one), flash_attention(x.q, x.k, x.v, causal_mask()), strict=True
    ):
        assert torch.equal(a, b)


@on_both(Case(130, D=16, docs=((70, 60),)), Case(2048, H=6, H_kv=3, docs=((700, 1348),)))
def test_a_document_knows_nothing_of_the_others(case, dtype, device):
    x = make_inputs(case, dtype, device)
    mask, _ = make_mask(case, device)
    first = case.docs[0][0]
    before = flash_attention(x.q, x.k, x.v, mask)
    with torch.no_grad():
        for t in (x.q, x.k, x.v):
            t[:, :first] = torch.randn_like(t[:, :first])
    after = flash_attention(x.q, x.k, x.v, mask)
    assert torch.equal(before[0][:, first:], after[0][:, first:])
    assert torch.equal(before[1][..., first:], after[1][..., first:])
    assert not torch.equal(before[0][:, :first], after[0][:, :first])


@on_both(Case(130, D=16), LARGE)
@pytest.mark.parametrize("t", [1, 63, 64, 65])
def test_the_future_changes_no_bit_of_the_past(case, dtype, t, device):
    x = make_inputs(case, dtype, device)
    before = flash_attention(x.q, x.k, x.v, causal_mask())
    with torch.no_grad():
        for y in (x.q, x.k, x.v):
            y[:, t:] = 3 * torch.randn_like(y[:, t:])
    after = flash_attention(x.q, x.k, x.v, causal_mask())
    assert torch.equal(before[0][:, :t], after[0][:, :t]) and torch.equal(
        before[1][..., :t], after[1][..., :t]
    )


@on_both(Case(65, B=2, H=4, H_kv=2, D=16), Case(1024, B=3, H=6, H_kv=3))
def test_batch_rows_and_heads_are_independent(case, dtype, device):
    """New numbers in the last batch row and the last key head leave every bit of the rest."""
    x = make_inputs(case, dtype, device)
    group = x.q.shape[2] // x.k.shape[2]
    before = flash_attention(x.q, x.k, x.v, causal_mask())
    with torch.no_grad():
        for t, heads in ((x.q, group), (x.k, 1), (x.v, 1)):
            t[-1] = torch.randn_like(t[-1])
            t[:, :, -heads:] = torch.randn_like(t[:, :, -heads:])
    after = flash_attention(x.q, x.k, x.v, causal_mask())
    assert torch.equal(before[0][:-1, :, :-group], after[0][:-1, :, :-group])
    assert torch.equal(before[1][:-1, :-group], after[1][:-1, :-group])


@on_both(Case(65, sides=FULL), Case(1024, H=6, H_kv=3, sides=FULL))
def test_constant_v_comes_back(case, dtype, device):
    """Rows of p sum to one, up to p's own rounding: the numerator's p is rounded, the denominator's not."""
    x = make_inputs(case, dtype, device)
    o, _ = flash_attention(x.q, x.k, torch.ones_like(x.v), make_mask(case, device)[0])
    assert (o - 1).abs().max() <= torch.finfo(dtype).eps * 4


@pytest.mark.parametrize(
    "B, Tq, Tk, H",
    [(0, 5, 5, 2), (1, 0, 5, 2), (1, 5, 0, 2), (1, 0, 0, 2), (1, 5, 5, 0)],
    ids=["B0", "Tq0", "Tk0", "Tq0_Tk0", "H0"],
)
def test_nothing_in_nothing_out(B, Tq, Tk, H, device, poison):
    q, k = torch.randn(B, Tq, H, 16, device=device), torch.randn(B, Tk, 2, 16, device=device)
    o, lse = flash_attention(q, k, k, causal_mask())
    assert o.shape == q.shape and lse.shape == (B, H, Tq)
    assert (o == 0).all() or Tk                             # without keys: 0 and -inf
    assert (lse == float("-inf")).all() or Tk
