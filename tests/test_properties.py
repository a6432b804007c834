"""What attention must satisfy whatever the numbers: identities that need no reference, and a twin of the algorithm.

Others of the kind live where their subject does: what the future, other documents, batch rows and heads cannot change,
and what doubles or comes back, in test_forward.py and test_backward.py; repeats bit for bit in test_faults.py; random
rows and columns of long sequences in test_numerics.py.
"""
import pytest
import torch
from attention_cases import (
    FULL,
    Case,
    Inputs,
    assert_as_good_as_torch,
    assert_same_bits,
    by_rows,
    double,
    dq_in_any_order,
    errors,
    in_own_dtype,
    make_inputs,
    make_mask,
    on_both,
    ours,
    same,
)
from torch import Tensor

from flash_attn2 import Mask, causal_mask, flash_attention, full_mask, reference
from flash_attn2.masks import from_bounds

LARGE = Case(1024, H=6, H_kv=3, B=2)


@on_both(Case(65, 97, H=1, D=16, sides=FULL), Case(1000, 1500, H=6, H_kv=3, sides=FULL))
def test_keys_in_any_order(case, dtype, device):
    """Keys and values shuffled together: o, lse, dq stay, dk and dv are shuffled alike."""
    x = make_inputs(case, dtype, device)
    order = torch.randperm(case.keys, device=device)
    shuffled = x._replace(k=x.k.detach()[:, order].requires_grad_(), v=x.v.detach()[:, order].requires_grad_())
    got = ours(shuffled, full_mask())
    for name in ("dk", "dv"):
        got[name] = got[name][:, order.argsort()]
    assert_as_good_as_torch(got, x, make_mask(case, device)[1])


@on_both(Case(70, H=2, H_kv=1, D=16), LARGE)
def test_a_constant_on_all_logits_moves_lse_alone(case, dtype, device):
    """Column 0 of q is 1 and of k is 0, then c: every logit grows by c * softmax_scale = 4."""
    x = make_inputs(case, dtype, device)
    with torch.no_grad():
        x.q[..., 0], x.k[..., 0] = 1.0, 0.0
    moved = x._replace(k=x.k.detach().clone().requires_grad_())
    with torch.no_grad():
        moved.k[..., 0] = 4 * case.D ** 0.5
    got, seen = ours(moved, causal_mask()), make_mask(case, device)[1]
    dq0 = 4 * x.dlse.double().transpose(1, 2)            # scale * c * rowsum(ds), and rowsum(ds) is dlse
    torchs = by_rows(in_own_dtype, moved, seen, None)
    error, theirs = (errors(g["dq"][..., 0], dq0)[0] for g in (got, torchs))
    assert error <= 2 * theirs + 1e-5, f"{error:.3e} from the exact dq, torch {theirs:.3e}"
    got["lse"] -= 4
    got["dq"][..., 0] = 0
    assert_as_good_as_torch(got, x, seen)


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from attention over each; o in float32."""
    lse = torch.logaddexp(lse1, lse2)
    w1, w2 = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse1, lse2))
    return w1 * o1.float() + w2 * o2.float(), lse


@on_both(Case(65, 130, H=1, D=16, sides=FULL), Case(1000, 2048, H=6, H_kv=3, sides=FULL))
def test_keys_in_two_parts_merge_into_the_whole(case, dtype, device):
    """As context parallelism has it. The gradients go through both lse."""
    x = make_inputs(case, dtype, device)
    half = case.keys // 2
    parts = [flash_attention(x.q, x.k[:, keys], x.v[:, keys], full_mask())
             for keys in (slice(half), slice(half, None))]
    o, lse = merge(*parts[0], *parts[1])
    dq, dk, dv = torch.autograd.grad((o, lse), (x.q, x.k, x.v), (x.do.float(), x.dlse))
    got = dict(o=o.detach().to(dtype), lse=lse.detach(), dq=dq, dk=dk, dv=dv)
    assert_as_good_as_torch(got, x, make_mask(case, device)[1])


def test_a_part_without_keys_adds_nothing(device):
    """Its lse is -inf: the merge is the other part."""
    x = make_inputs(Case(65, 97, H=2, D=16), torch.float32, device)
    o, lse = flash_attention(x.q, x.k, x.v, full_mask())
    nothing = flash_attention(x.q, x.k[:, :0], x.v[:, :0], full_mask())
    merged, merged_lse = merge(o, lse, *nothing)
    assert torch.equal(merged, o) and torch.equal(merged_lse, lse)


def sums(g: dict[str, Tensor], x: Inputs, scale: float) -> dict[str, Tensor]:
    """Three sums over keys that are 0 in exact arithmetic when every row of p sums to 1 and of ds to dlse.
    Per key head, each over its group of query heads, in float64."""
    B, T, H_kv, D = x.k.shape
    q, do, dq, dlse = (t.double().unflatten(2, (H_kv, -1)) for t in (x.q, x.do, g["dq"], x.dlse.transpose(1, 2)))
    dk, dv, k = g["dk"].double(), g["dv"].double(), x.k.double()
    return dict(dv=dv.sum(1) - do.sum((1, 3)),                                     # columns of dv: those of do
                dk=dk.sum(1) - scale * (dlse[..., None] * q).sum((1, 3)),          # columns of dk: dlse-weighted q
                dq=(q * dq).sum((1, 3, 4)) - (k * dk).sum((1, 3)))                 # <q, dq> = <k, dk> = sum of ds * s


def deviations(g: dict[str, Tensor], x: Inputs) -> dict[str, Tensor]:
    """Standard deviations of `sums` when each gradient is off by up to half a unit in its last place."""
    eps = torch.finfo(g["dq"].dtype).eps
    q, dq = (t.double().unflatten(2, (x.k.shape[2], -1)) for t in (x.q, g["dq"]))
    dk, dv, k = g["dk"].double(), g["dv"].double(), x.k.double()
    squares = dict(dv=dv.square().sum(1), dk=dk.square().sum(1),
                   dq=(q * dq).square().sum((1, 3, 4)) + (k * dk).square().sum((1, 3)))
    return {name: eps * (square / 12).sqrt() for name, square in squares.items()}


@on_both(Case(70, H=2, H_kv=1, D=16), LARGE)
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_sums_over_keys(case, dtype, mask, device):
    """Nearer to 0 than twice what torch's own rounding leaves, or four standard deviations of rounding the gradients
    alone."""
    case = case._replace(window=20 if mask == "window" else 0,
                         docs=((case.Tq // 3, case.Tq - case.Tq // 3),) * case.B if mask == "documents" else None)
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    got = ours(x, mask)
    mine, deviation = sums(got, x, case.D ** -0.5), deviations(got, x)
    torchs = sums(by_rows(in_own_dtype, x, seen, None), x, case.D ** -0.5)
    for name, value in mine.items():
        (error, _), (theirs, _) = (errors(t, torch.zeros_like(t)) for t in (value, torchs[name]))
        rounding = deviation[name].max().item()
        assert error <= max(2 * theirs, 4 * rounding) + 1e-4, (
            f"{name}: {error:.3e} from 0, torch {theirs:.3e}, rounding {rounding:.3e}")


@on_both(Case(70, H=2, H_kv=1, D=16), LARGE)
def test_equal_keys_pass_no_gradient_to_q(case, dtype, device):
    """dq is then scale * k * rowsum(ds), and rowsum(ds) is dlse: nothing without it."""
    x = make_inputs(case, dtype, device)
    x = x._replace(k=x.k.detach()[:, :1].expand_as(x.k).clone().requires_grad_())
    seen = make_mask(case, device)[1]
    for dlse in (x.dlse, torch.zeros_like(x.dlse)):
        x = x._replace(dlse=dlse)
        k = x.k.double()[:, :1].repeat_interleave(case.H // case.H_kv, 2)
        expected = case.D ** -0.5 * k * dlse.double().transpose(1, 2)[..., None]
        torchs = by_rows(in_own_dtype, x, seen, None)
        error, theirs = (errors(g["dq"], expected)[0] for g in (ours(x, causal_mask()), torchs))
        assert error <= 2 * theirs + 1e-5, f"{error:.3e} from the exact dq, torch {theirs:.3e}"


@on_both(Case(70, H=2, H_kv=1, D=16), LARGE)
def test_scale_moves_from_softmax_scale_into_q(case, dtype, device):
    """By a power of two: bit for bit."""
    x = make_inputs(case, dtype, device)
    once = ours(x, causal_mask(), 0.25)
    twice = ours(x._replace(q=(2 * x.q.detach()).requires_grad_()), causal_mask(), 0.125)
    twice["dq"] *= 2
    assert_same_bits(once, twice, dq_in_any_order(x))


def padded(x: Tensor, n: int, dim: int = 1) -> Tensor:
    """n more rows, of numbers that would show."""
    more = 1000 * torch.randn(*x.shape[:dim], n, *x.shape[dim + 1:], device=x.device).to(x.dtype)
    return torch.cat([x.detach(), more], dim)


@on_both(Case(70, H=1, D=16), Case(1000, H=6, H_kv=3))
@pytest.mark.parametrize("queries, keys", [(0, 16), (0, 80), (80, 0)])
def test_padding_changes_no_bit(case, dtype, queries, keys, device, poison):
    """Keys that no query sees, or queries that see no key, behind the rest; the padding itself gets zeros."""
    T = case.Tq
    x = make_inputs(case, dtype, device)
    i = torch.arange(T + queries, device=device)[None]
    plain = ours(x, from_bounds(torch.zeros_like(i[:, :T]), i[:, :T], T))
    longer = Inputs(*(padded(t, n).requires_grad_() for t, n in ((x.q, queries), (x.k, keys), (x.v, keys))),
                    padded(x.do, queries), padded(x.dlse, queries, 2))
    got = ours(longer, from_bounds(torch.where(i < T, 0, T), torch.where(i < T, i, T - 1), T + keys))
    got["lse"], plain["lse"] = got["lse"].transpose(1, 2), plain["lse"].transpose(1, 2)
    for name, value in plain.items():
        assert same(name, got[name][:, :T], value, dq_in_any_order(x)), name
        assert (got[name][:, T:] == (float("-inf") if name == "lse" else 0)).all(), name


FINITE_DIFFERENCES = {
    "window": Case(70, D=16, H=1, window=20),
    "documents_grouped": Case(80, D=16, H=2, H_kv=1, docs=((50, 30),)),
    "full_Tq_above_Tk": Case(70, 40, D=16, H=1, sides=FULL),
    "softcap": Case(65, D=16, H=1, q_times=2.0, softcap=2.0),
}


@pytest.mark.parametrize("case", FINITE_DIFFERENCES.values(), ids=FINITE_DIFFERENCES)
def test_finite_difference_of_each_input(case, device):
    """The kernel's gradient predicts the kernel's change along a random unit direction of q, of k, of v."""
    x = make_inputs(case, torch.float32, device)
    mask, _ = make_mask(case, device)

    def loss(q, k, v):
        with torch.no_grad():
            o, lse = flash_attention(q, k, v, mask, softcap=case.softcap)
        return (o.double() * x.do).sum().item() + (lse.double() * x.dlse).sum().item()
    got = ours(x, mask, softcap=case.softcap)
    for n, name in enumerate(("dq", "dk", "dv")):
        toward = torch.randn_like(x[n])
        toward += got[name] * toward.norm() / got[name].norm()            # so that the slope is not next to nothing
        toward /= toward.norm()
        ahead, behind = (loss(*(t + h * toward if m == n else t for m, t in enumerate(x[:3]))) for h in (0.05, -0.05))
        assert (ahead - behind) / 0.1 == pytest.approx((got[name] * toward).sum().item(), rel=1e-2), name


class Twin(torch.autograd.Function):
    """The kernels' algorithm in plain torch, one head, any dtype: q (Tq, D), k and v (Tk, D), the mask as intervals."""

    @staticmethod
    def forward(ctx, q, k, v, mask, scale, softcap, block_m, block_n):
        o, lse = torch.zeros_like(q), q.new_zeros(len(q))
        for rows in tiles(len(q), block_m):
            m = q.new_full((len(q[rows]),), float("-inf"))
            l, acc = torch.zeros_like(m), torch.zeros_like(q[rows])
            for keys in walk(mask.lo[0], mask.hi[0], rows, len(k), block_n):
                s, _ = logits(q[rows], k[keys], mask, rows, keys, scale, softcap)
                m_new = torch.maximum(m, s.amax(1))
                pivot = torch.where(m_new == float("-inf"), 0.0, m_new)
                p, alpha = (s - pivot[:, None]).exp(), (m - pivot).exp()
                l, acc, m = l * alpha + p.sum(1), acc * alpha[:, None] + p @ v[keys], m_new
            l = torch.where(l == 0, 1.0, l)
            o[rows], lse[rows] = acc / l[:, None], m + l.log()
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.arguments = mask, scale, softcap, block_m, block_n
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse = ctx.saved_tensors
        mask, scale, softcap, block_m, block_n = ctx.arguments
        delta = (do * o).sum(1) - torch.where(lse == float("-inf"), 0.0, dlse)

        def p_and_ds(rows, keys):
            s, slope = logits(q[rows], k[keys], mask, rows, keys, scale, softcap)
            p = torch.where(s == float("-inf"), 0.0, (s - lse[rows, None]).exp())
            return p, p * (do[rows] @ v[keys].T - delta[rows, None]) * slope * scale
        dq, dk, dv = map(torch.zeros_like, (q, k, v))
        for rows in tiles(len(q), block_m):
            for keys in walk(mask.lo[0], mask.hi[0], rows, len(k), block_n):
                dq[rows] += p_and_ds(rows, keys)[1] @ k[keys]
        for keys in tiles(len(k), block_n):
            for rows in walk(mask.q_lo[0], mask.q_hi[0], keys, len(q), block_m):
                p, ds = p_and_ds(rows, keys)
                dv[keys] += p.T @ do[rows]
                dk[keys] += ds.T @ q[rows]
        return dq, dk, dv, *[None] * 5


def tiles(T: int, block: int) -> list[slice]:
    return [slice(i, min(i + block, T)) for i in range(0, T, block)]


def walk(lo: Tensor, hi: Tensor, rows: slice, n: int, block: int) -> list[slice]:
    """Tiles of y between the first row's first and the last row's last; the others are skipped."""
    return [t for t in tiles(n, block) if t.stop > int(lo[rows][0]) and t.start <= int(hi[rows][-1])]


def logits(q: Tensor, k: Tensor, mask: Mask, rows: slice, keys: slice, scale: float, softcap: float):
    """Of one tile, -inf where not seen; and their slope by the uncapped ones."""
    s, slope = q @ k.T * scale, 1.0
    if softcap:
        s = softcap * (s / softcap).tanh()
        slope = 1 - (s / softcap).square()
    j = torch.arange(keys.start, keys.stop, device=q.device)
    seen = (j >= mask.lo[0, rows, None]) & (j <= mask.hi[0, rows, None])
    return s.masked_fill(~seen, float("-inf")), slope


def vectors(case: Case, device) -> tuple[Mask, Tensor]:
    """The case's mask as four vectors whatever its form, found from the dense one, which comes too."""
    seen = make_mask(case, device)[1].expand(1, case.Tq, case.keys)
    j = torch.arange(case.keys, device=device)
    hi = torch.where(seen, j, -1).amax(-1).cummax(-1).values
    lo = torch.where(seen.any(-1), torch.where(seen, j, case.keys).amin(-1), hi + 1).cummax(-1).values
    return from_bounds(lo, hi, case.keys), seen


TWINS = {
    "causal": Case(100, H=1, D=16),
    "Tq_above_Tk": Case(130, 60, H=1, D=16),
    "window_Tq_below_Tk": Case(60, 130, H=1, D=16, window=20),
    "documents": Case(130, H=1, D=16, docs=((30, 1, 99),)),
    "softcap": Case(100, H=1, D=16, q_times=3.0, softcap=3.0),
}
SHAPES = dict(causal=(7, 7), Tq_above_Tk=(7, 4), window_Tq_below_Tk=(5, 8), documents=(7, 7), softcap=(6, 6))


@pytest.mark.parametrize("name", TWINS)
def test_gradcheck_of_the_twin(name):
    """In float64: the tiled backward is the derivative of the tiled forward, of o and of lse."""
    Tq, Tk = SHAPES[name]
    case = TWINS[name]._replace(Tq=Tq, Tk=Tk, window=TWINS[name].window and 3,
                                docs=TWINS[name].docs and ((3, 1, Tq - 4),))
    mask, _ = vectors(case, torch.device("cpu"))
    q, k, v = (torch.randn(T, 3, dtype=torch.float64, requires_grad=True) for T in (Tq, Tk, Tk))

    def call(q, k, v):
        o, lse = Twin.apply(q, k, v, mask, 0.6, case.softcap, 3, 2)
        return o, lse[lse != float("-inf")]
    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("name", TWINS)
def test_kernel_is_its_twin(name, device, poison):
    """In the tile shapes of the interpreter; the twin itself is dense attention to float64's last digits."""
    case = TWINS[name]
    x = make_inputs(case, torch.float32, device)
    mask, seen = vectors(case, device)
    q, k, v = (t.detach()[0, :, 0].double().requires_grad_() for t in x[:3])
    o, lse = Twin.apply(q, k, v, mask, case.D ** -0.5, case.softcap, 64, 64)
    dq, dk, dv = torch.autograd.grad((o, lse), (q, k, v), (x.do[0, :, 0].double(), x.dlse[0, 0].double()))
    twin = {n: t.detach()[None, :, None] for n, t in dict(o=o, dq=dq, dk=dk, dv=dv).items()} | dict(
        lse=lse.detach()[None, None])
    exact = by_rows(reference.attention, double(x), seen, None, case.softcap)
    torch.testing.assert_close(twin, exact, rtol=1e-10, atol=1e-12)
    for n, value in ours(x, make_mask(case, device)[0], softcap=case.softcap).items():
        assert errors(value, twin[n])[0] <= 1e-5 * max(1.0, twin[n].nan_to_num(neginf=0.0).abs().max().item()), n
