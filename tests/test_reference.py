"""The judge itself: by hand, and against torch's scaled_dot_product_attention."""
import math

import pytest
import torch
import torch.nn.functional as F

from flash_attn2 import reference


def qkv(Tq: int, Tk: int, H: int = 2, H_kv: int = 2, D: int = 8):
    return (
        torch.randn(2, T, heads, D, dtype=torch.float64) for T, heads in ((Tq, H), (Tk, H_kv), (Tk, H_kv))
    )


def sdpa(q, k, v, **kwargs):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs).transpose(1, 2)


def test_three_tokens_by_hand():
    """Scores (query row, key column) ln 1, ln 2, ln 3 times 1: weights are plain fractions."""
    q = torch.ones(1, 3, 1, 1)
    k = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64).log().view(1, 3, 1, 1)
    v = torch.tensor([6.0, 12.0, 24.0]).view(1, 3, 1, 1)
    o, lse = reference.attention(q, k, v, reference.seen(3, 3), softmax_scale=1.0)
    # row 0 sees 6; row 1 weighs 1/3, 2/3; row 2 weighs 1/6, 2/6, 3/6
    torch.testing.assert_close(o.flatten(), torch.tensor([6.0, 10.0, 17.0], dtype=torch.float64))
    torch.testing.assert_close(
        lse.flatten(), torch.tensor([0.0, math.log(3), math.log(6)], dtype=torch.float64)
    )


@pytest.mark.parametrize("kwargs, expected", [
    (dict(), [[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]),
    (dict(window=(1, None)), [[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]),
    (dict(window=(0, None)), [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]),
    (dict(causal=False), [[1, 1, 1, 1]] * 3),
    (dict(causal=False, window=(0, 1)), [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 1]]),
], ids=["causal", "window2", "window1", "full", "two_sided"])
def test_seen_by_hand_three_queries_four_keys(kwargs, expected):
    assert reference.seen(3, 4, **kwargs).int().tolist() == expected


def test_seen_by_hand_more_queries_than_keys():
    assert reference.seen(4, 2).int().tolist() == [[0, 0], [0, 0], [1, 0], [1, 1]]


def test_seen_by_hand_documents():
    doc = torch.tensor([[0, 0, 2]])
    assert reference.seen(3, 3, doc_q=doc, doc_k=doc).int().tolist() == [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]


def test_causal_is_sdpa():
    q, k, v = qkv(7, 7)
    torch.testing.assert_close(
        reference.attention(q, k, v, reference.seen(7, 7))[0], sdpa(q, k, v, is_causal=True)
    )


def test_full_is_sdpa():
    q, k, v = qkv(5, 7)
    torch.testing.assert_close(
        reference.attention(q, k, v, reference.seen(5, 7, causal=False))[0], sdpa(q, k, v)
    )


def test_softmax_scale_is_sdpas():
    q, k, v = qkv(5, 7)
    o, _ = reference.attention(q, k, v, reference.seen(5, 7, causal=False), softmax_scale=0.7)
    torch.testing.assert_close(o, sdpa(q, k, v, scale=0.7))


@pytest.mark.parametrize("H, H_kv", [(8, 2), (6, 3), (4, 1)])
def test_grouped_heads_are_sdpas(H, H_kv):
    q, k, v = qkv(7, 7, H, H_kv)
    torch.testing.assert_close(
        reference.attention(q, k, v, reference.seen(7, 7))[0], sdpa(q, k, v, is_causal=True)
    )


def test_gradients_are_sdpas():
    q, k, v = (x.requires_grad_() for x in qkv(7, 7, 4, 2))
    do = torch.randn(2, 7, 4, 8, dtype=torch.float64)
    mine = torch.autograd.grad(reference.attention(q, k, v, reference.seen(7, 7))[0], (q, k, v), do)
    theirs = torch.autograd.grad(sdpa(q, k, v, is_causal=True), (q, k, v), do)
    torch.testing.assert_close(mine, theirs)


def test_lse_is_the_log_of_the_sum():
    q, k, v = qkv(4, 6)
    s = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)
    _, lse = reference.attention(q, k, v, reference.seen(4, 6, causal=False))
    torch.testing.assert_close(lse, s.exp().sum(-1).log())


def test_row_without_keys():
    """o is 0, lse is -inf, no gradient comes from it, and the other rows do not notice."""
    q, k, v = (x.requires_grad_() for x in qkv(5, 3))
    o, lse = reference.attention(q, k, v, reference.seen(5, 3))
    alone, lse_alone = reference.attention(q[:, 2:], k, v, reference.seen(3, 3))
    assert (o[:, :2] == 0).all() and (lse[..., :2] == float("-inf")).all()
    assert torch.equal(o[:, 2:], alone) and torch.equal(lse[..., 2:], lse_alone)
    grads = torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))
    assert (grads[0][:, :2] == 0).all() and all(g.isfinite().all() for g in grads)


def test_answers_in_float64():
    q, k, v = (x.half() for x in qkv(3, 3))
    o, lse = reference.attention(q, k, v, reference.seen(3, 3))
    assert o.dtype == lse.dtype == torch.float64
