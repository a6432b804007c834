"""What the attention tests share: cases, two torch references (float64 and the tested dtype), FA's rule.

Tolerance is earned, not chosen. Against float64, for o, lse and each gradient:
    largest error     <= 2 x that of the same maths by torch in the tested dtype, + what rounding the exact answer costs
    root mean square  <= 1.2 x torch's, or 1.2 x what rounding the exact answer costs, the larger
each plus a floor for float32 arithmetic (`verdicts`), which only float32 cases and lse ever come near. Of fewer than 32
rows the largest error alone is judged: a row of dq or dk errs as a whole, by a rounding or two, and so few are no mean.
"""
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from flash_attn2 import Mask, causal_mask, dispatch, flash_attention, reference
from flash_attn2.masks import NO_BOUND, from_bounds

FULL = (NO_BOUND, NO_BOUND)


class Case(NamedTuple):
    Tq: int
    Tk: int | None = None                               # None: Tq
    H: int = 2
    H_kv: int | None = None                             # None: H
    D: int = 64
    B: int = 1
    window: int = 0
    sides: tuple[int, int] | None = None                # not causal: (left, right) keys, or FULL
    docs: tuple[tuple[int, ...], ...] | None = None     # per batch row, the lengths of its documents
    segments: tuple[tuple[int, int], ...] | None = None     # (queries, keys) of each document, causal bottom right
    q_times: float = 1.0
    softmax_scale: float | None = None
    softcap: float = 0.0

    @property
    def keys(self) -> int:
        return self.Tq if self.Tk is None else self.Tk


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    do: Tensor
    dlse: Tensor


SMALL = {
    "T1": Case(1),
    "T63": Case(63),
    "T64": Case(64),
    "T65": Case(65),
    "T130": Case(130),
    "window1": Case(130, H=1, window=1),
    "window63": Case(130, H=1, window=63),
    "window64": Case(130, H=1, window=64),
    "window65": Case(130, H=1, window=65),
    "window_T-1": Case(130, H=1, window=129),
    "window_T": Case(130, H=1, window=130),
    "window_T+1": Case(130, H=1, window=131),
    "one_token_documents": Case(66, H=1, docs=((1,) * 66,)),
    "documents_end_on_tiles": Case(192, H=1, D=16, docs=((64, 64, 64),)),
    "documents_skip_tiles": Case(200, H=1, D=16, docs=((5, 130, 65),)),
    "documents_differ_by_row": Case(130, B=2, H=1, D=16, docs=((130,), (1, 64, 65))),
    "documents_and_window": Case(130, H=1, docs=((100, 30),), window=20),
    "full": Case(65, H=1, sides=FULL),
    "full_Tq_below_Tk": Case(63, 130, H=1, D=16, sides=FULL),
    "two_sided_window": Case(130, H=1, sides=(10, 5)),
    "two_sided_window_Tq_above_Tk": Case(130, 70, H=1, D=16, sides=(10, 5)),
    "one_query": Case(1, 130, H=1),
    "Tq_below_Tk": Case(65, 130, H=1),
    "Tq_above_Tk_rows_without_keys": Case(130, 65),
    "Tq_above_Tk_tile_without_keys": Case(128, 64, H=1),
    "Tq_above_Tk_window": Case(130, 65, H=1, window=20),
    "one_key": Case(65, 1, H=1),
    "segments_more_queries": Case(256, 3, H=1, D=16, segments=((76, 1), (34, 1), (146, 1))),
    "segments_empty": Case(70, 75, H=1, D=16, segments=((0, 3), (60, 0), (10, 70), (0, 2))),
    "gqa_8_2": Case(65, H=8, H_kv=2, D=16),
    "gqa_6_3": Case(65, H=6, H_kv=3, D=16),
    "gqa_documents": Case(80, H=2, H_kv=1, D=16, B=2, docs=((20, 60), (79, 1))),
    "mqa": Case(65, H=4, H_kv=1, D=16),
    "D16": Case(65, H=1, D=16),
    "D40_padded": Case(130, H=1, D=40),
    "D80_padded": Case(65, H=1, D=80),
    "D128": Case(130, H=1, D=128),
    "D5_padded_to_16": Case(65, H=1, D=5),
    "q_times_5": Case(97, H=1, q_times=5.0),
    "q_times_5_Tq_above_Tk": Case(127, 97, H=1, q_times=5.0),
    "softmax_scale_1": Case(65, H=1, D=16, softmax_scale=1.0),
    "softcap": Case(130, H=2, H_kv=1, D=16, q_times=5.0, softcap=3.0),
    "softcap_Tq_above_Tk": Case(130, 65, H=1, D=16, softcap=30.0),
}
SMALL_HALF = ["T65", "T130", "window65", "documents_differ_by_row", "Tq_above_Tk_rows_without_keys", "gqa_8_2",
              "D40_padded", "q_times_5"]


def packing(T: int, n: int, seed: int) -> tuple[int, ...]:
    """n random document lengths that add up to T."""
    cuts = torch.randperm(T - 1, generator=torch.Generator().manual_seed(seed))[:n - 1].sort().values + 1
    return tuple(torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([T])).tolist())


# Few combinations of what Triton specialises on (D, documents, divisibility by 16 of lengths and window - 1,
# one group): each costs seconds of compilation.
LARGE = {
    "D64": Case(1024, H=6, H_kv=3, B=2),
    "D64_T1000": Case(1000, H=6, H_kv=3, B=2),
    "D64_window1": Case(1024, H=6, H_kv=3, window=1),
    "D64_window64": Case(1024, H=6, H_kv=3, window=64),
    "D64_window65": Case(1024, H=6, H_kv=3, window=65),
    "D64_window_T+1": Case(1024, H=6, H_kv=3, window=1025),
    "D64_documents": Case(2048, H=6, H_kv=3, B=2, docs=(packing(2048, 40, 0), packing(2048, 3, 1))),
    "D64_one_token_documents": Case(1024, H=6, H_kv=3, docs=((1,) * 1024,)),
    "D64_documents_T1000": Case(1000, H=6, H_kv=3, docs=(packing(1000, 9, 2),), window=129),
    "D64_segments": Case(1100, 1500, H=6, H_kv=3, segments=((76, 1), (0, 5), (324, 1294), (600, 0), (100, 200))),
    "D64_T16384": Case(16384, H=2, H_kv=2, window=1025),
    "D64_documents_T16384": Case(16384, H=6, H_kv=3, docs=(packing(16384, 30, 3),), window=4097),
    "D64_Tq_above_Tk": Case(2100, 1000, H=6, H_kv=3),
    "D64_Tq_below_Tk": Case(1000, 2100, H=6, H_kv=3),
    "D64_q_times_5": Case(1025, H=6, H_kv=3, q_times=5.0),
    "D64_one_head_one_token": Case(1, H=1, softmax_scale=1.0),
    "D64_mqa": Case(1000, H=6, H_kv=1),
    "D128": Case(1024, H=6, H_kv=3, D=128, B=2),
    "D128_T1000": Case(1000, H=6, H_kv=3, D=128, B=2),
    "D128_T16384": Case(16384, H=6, H_kv=3, D=128),
    "D128_documents": Case(2048, H=6, H_kv=3, D=128, B=2, docs=(packing(2048, 40, 4), packing(2048, 3, 5))),
    "D128_q_times_5": Case(1025, H=6, H_kv=3, D=128, q_times=5.0),
    "D32": Case(1000, H=6, H_kv=3, D=32),
    "D40": Case(1000, H=6, H_kv=3, D=40),
    "D96": Case(1000, H=6, H_kv=3, D=96),
    "D256": Case(1000, H=6, H_kv=3, D=256),
    "D64_softcap": Case(1024, H=6, H_kv=3, q_times=5.0, softcap=15.0),
    "D128_softcap": Case(1000, H=6, H_kv=3, D=128, q_times=5.0, softcap=15.0),
}
LARGE_HALF = ["D64_T1000", "D64_documents", "D64_q_times_5", "D128"]


def cases():
    """pytest parameters (case, dtype): SMALL anywhere, LARGE on a GPU."""
    small = [(SMALL, SMALL, torch.float32, ()), (SMALL, SMALL_HALF, torch.float16, ())]
    large = [(LARGE, LARGE, torch.bfloat16, pytest.mark.gpu), (LARGE, LARGE_HALF, torch.float16, pytest.mark.gpu)]
    return [pytest.param(table[name], dtype, id=f"{name}-{str(dtype)[6:]}", marks=marks)
            for table, names, dtype, marks in small + large for name in names]


def on_both(small: Case, large: Case):
    """pytest parameters (case, dtype) of one property: float32 anywhere, bfloat16 on a GPU."""
    return pytest.mark.parametrize("case, dtype", [
        pytest.param(small, torch.float32, id="small"),
        pytest.param(large, torch.bfloat16, id="large", marks=pytest.mark.gpu)])


def make_inputs(case: Case, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Normal random q, k, v (which want gradients), do and dlse."""
    B, Tq, Tk, H, D = case.B, case.Tq, case.keys, case.H, case.D
    H_kv = H if case.H_kv is None else case.H_kv
    q, k, v, do = (torch.randn(B, T, heads, D, device=device)
                   for T, heads in ((Tq, H), (Tk, H_kv), (Tk, H_kv), (Tq, H)))
    q, k, v = (x.to(dtype).requires_grad_() for x in (q * case.q_times, k, v))
    return Inputs(q, k, v, do.to(dtype), torch.randn(B, H, Tq, device=device))


def document_starts(docs: tuple[tuple[int, ...], ...], device: torch.device | None = None) -> Tensor:
    """(B, T): where in the row each token's document begins. It names the document too."""
    rows = [[start for n, start in zip(row, running(row), strict=True) for _ in range(n)] for row in docs]
    return torch.tensor(rows, device=device)


def running(lengths) -> list[int]:
    """Sum of what came before each."""
    return [sum(lengths[:n]) for n in range(len(lengths))]


def make_mask(case: Case, device: torch.device) -> tuple[Mask, Tensor]:
    """The mask as the kernels take it and the dense one, (Tq, Tk) or (B, Tq, Tk), each built its own way."""
    Tq, Tk = case.Tq, case.keys
    if case.segments is not None:
        return segment_mask(case.segments, case.B, device)
    if case.sides is not None:
        return Mask(*case.sides), reference.seen(Tq, Tk, causal=False, window=case.sides, device=device)
    starts = None if case.docs is None else document_starts(case.docs, device)
    window = (case.window - 1, None) if case.window else None
    return (causal_mask(case.window, starts),
            reference.seen(Tq, Tk, window=window, doc_q=starts, doc_k=starts, device=device))


def segment_mask(segments: tuple[tuple[int, int], ...], B: int, device: torch.device) -> tuple[Mask, Tensor]:
    """Packed documents of unequal queries and keys; in each the last query stands at the last key."""
    first_key = running([n_k for _, n_k in segments])
    lo = [start for (n_q, _), start in zip(segments, first_key, strict=True) for _ in range(n_q)]
    hi = [start + i + n_k - n_q for (n_q, n_k), start in zip(segments, first_key, strict=True) for i in range(n_q)]
    lo, hi = (torch.tensor(x, device=device).expand(B, -1) for x in (lo, hi))
    blocks = [reference.seen(n_q, n_k, device=device) for n_q, n_k in segments]
    return from_bounds(lo, hi, sum(n_k for _, n_k in segments)), torch.block_diag(*blocks).bool()


def in_own_dtype(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softmax_scale: float | None = None,
                 softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """The reference's maths with every step rounded to q's dtype. lse, a float32 result, has its value from float32;
    its gradient goes through the rounded scores, as in any kernel that multiplies in q's dtype."""
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    seen = seen[None, None] if seen.dim() == 2 else seen[:, None]
    empty = ~seen.any(-1, keepdim=True)

    def scores(q, k):
        s = torch.einsum("bihd,bjhd->bhij", q, k * scale)
        s = softcap * (s / softcap).tanh() if softcap else s
        return s.masked_fill(~seen, float("-inf")).masked_fill(empty, 0.0)
    s = scores(q, k)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    rounded = s.logsumexp(-1)
    with torch.no_grad():
        lse = scores(q.float(), k.float()).logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", p, v), lse + (rounded - rounded.detach())


def by_rows(attend, x: Inputs, seen: Tensor, softmax_scale: float | None, softcap: float = 0.0,
            chunk: int = 1024) -> dict[str, Tensor]:
    """o, lse, dq, dk, dv of a dense attention, a chunk of query rows at a time: no T^2 scores in memory."""
    q, k, v = (t.detach().requires_grad_() for t in x[:3])
    parts, dk, dv = [], 0, 0
    for i in range(0, q.shape[1], chunk):
        rows = slice(i, i + chunk)
        q_rows = q[:, rows].detach().requires_grad_()
        o, lse = attend(q_rows, k, v, seen[..., rows, :], softmax_scale, softcap)
        grads = torch.autograd.grad((o, lse), (q_rows, k, v),
                                    (x.do[:, rows].to(o.dtype), x.dlse[..., rows].to(lse.dtype)))
        parts.append((o.detach(), lse.detach(), grads[0]))
        dk, dv = dk + grads[1].double(), dv + grads[2].double()
    o, lse, dq = (torch.cat(p, dim) for p, dim in zip(zip(*parts, strict=True), (1, 2, 1), strict=True))
    return dict(o=o, lse=lse, dq=dq, dk=dk.to(k.dtype) if attend is in_own_dtype else dk,
                dv=dv.to(v.dtype) if attend is in_own_dtype else dv)


def double(x: Inputs) -> Inputs:
    return Inputs(*(t.detach().double() for t in x))


def ours(x: Inputs, mask: Mask, softmax_scale: float | None = None, softcap: float = 0.0, kernels: str = "auto",
         deterministic: bool = False) -> dict[str, Tensor]:
    """o, lse, dq, dk, dv of the kernels."""
    o, lse = flash_attention(x.q, x.k, x.v, mask, softmax_scale, softcap, kernels, deterministic)
    dq, dk, dv = torch.autograd.grad((o, lse), (x.q, x.k, x.v), (x.do, x.dlse))
    return dict(o=o.detach(), lse=lse.detach(), dq=dq, dk=dk, dv=dv)


def dq_in_any_order(x: Inputs, softcap: float = 0.0) -> bool:
    """Whether auto takes the Hopper pair, whose sums of dq have no fixed order."""
    return dispatch.why_not_hopper(x.q, x.k, x.v, softcap) is None


def same(name: str, value: Tensor, expected: Tensor, any_order: bool = False) -> Tensor:
    """Whether bit for bit, still on the GPU. With `any_order` dq may be one rounding of its dtype away, and where terms
    cancel 2^-16 of its largest number: float32 sums of at most a few hundred terms."""
    if name != "dq" or not any_order:
        return (value == expected).all()
    value, exact, eps = value.float(), expected.float(), torch.finfo(expected.dtype).eps
    return ((value - exact).abs() <= eps * exact.abs() + 2.0 ** -16 * exact.abs().max()).all()


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor], any_order: bool = False,
                     where: str = "") -> None:
    for name, value in got.items():
        assert value.shape == expected[name].shape and same(name, value, expected[name], any_order), f"{name} {where}"


class Verdict(NamedTuple):
    name: str               # o, lse, dq, dk, dv
    kind: str               # max, rms
    error: float
    torchs: float
    limit: float

    def __str__(self):
        times = self.error / self.torchs if self.torchs else float("inf") if self.error else 0.0
        return (f"{self.name}: {self.kind} error {self.error:.3e} is {times:.2f} times torch's {self.torchs:.3e}, "
                f"{self.share:.2f} of the limit {self.limit:.3e}")

    @property
    def share(self) -> float:
        """Error over limit: at most 1 passes."""
        return self.error / self.limit


def verdicts(got: dict[str, Tensor], exact: dict[str, Tensor], torchs: dict[str, Tensor]) -> list[Verdict]:
    """The rule above, for each name that `got` has."""
    found = []
    for name, value in got.items():
        assert value.shape == exact[name].shape, name
        mine, theirs = errors(value, exact[name]), errors(torchs[name], exact[name])
        rounding = errors(exact[name].to(value.dtype), exact[name])
        # Orders of summation, exp2 for exp, p recomputed from lse: each leaves a few units of 2^-23 of the numbers that
        # are added, and a case small or degenerate enough (one key: dp - delta is 0) gives torch an error of nothing.
        # Measured on the CPU: at most 4 such units in the mean.
        floor = 8 * 2.0 ** -23 * max(1.0, exact[name].masked_fill(exact[name].isinf(), 0.0).abs().max().item())
        found.append(Verdict(name, "max", mine[0], theirs[0], 2 * theirs[0] + rounding[0] + 1e-5))
        if value.numel() >= 32 * (value.shape[-1] if value.dim() == 4 else 1):
            found.append(Verdict(name, "rms", mine[1], theirs[1], 1.2 * max(theirs[1], rounding[1]) + floor))
    return found


def judge(got: dict[str, Tensor], x: Inputs, seen: Tensor, softmax_scale: float | None = None,
          softcap: float = 0.0) -> list[Verdict]:
    """`verdicts` against dense attention on the same inputs."""
    if "dq" not in got:
        x = x._replace(do=torch.zeros_like(x.do), dlse=torch.zeros_like(x.dlse))
    exact = by_rows(reference.attention, double(x), seen, softmax_scale, softcap)
    return verdicts(got, exact, by_rows(in_own_dtype, x, seen, softmax_scale, softcap))


def assert_as_good_as_torch(got: dict[str, Tensor], x: Inputs, seen: Tensor, softmax_scale: float | None = None,
                            softcap: float = 0.0) -> None:
    """The rule, for each of o, lse, dq, dk, dv that `got` has."""
    for verdict in judge(got, x, seen, softmax_scale, softcap):
        assert verdict.error <= verdict.limit, str(verdict)


def errors(x: Tensor, exact: Tensor) -> tuple[float, float]:
    """Largest and root-mean-square error. An infinity must stand where it should; NaN fits nothing."""
    difference = torch.where(x == exact, 0.0, x.double() - exact).abs()
    return difference.max().item(), difference.square().mean().sqrt().item()
