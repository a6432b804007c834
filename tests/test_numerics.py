"""FlashAttention's own matrix of head widths and lengths, and long sequences by random rows and columns.

The rule is `attention_cases.verdicts`: every case against float64 and against torch in the tested dtype. Each test
prints its cases' worst errors; `pytest -rP` shows those of tests that pass.
"""
import itertools
import random
from typing import NamedTuple

import pytest
import torch
from attention_cases import (
    FULL,
    Case,
    Inputs,
    Verdict,
    double,
    judge,
    make_inputs,
    make_mask,
    ours,
    packing,
    verdicts,
)
from torch import Tensor

from flash_attn2 import Mask, causal_mask, dispatch, reference

HEAD_DIMS = (32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
HALF_HEAD_DIMS = (59, 64, 128, 192)
HEADS = {"mha": (6, 6), "gqa": (6, 3), "mqa": (6, 1)}
# (queries, keys), by what Triton compiles apart: a length of 1, a multiple of 16, any other.
LENGTHS = {
    "1x1": [(1, 1)],
    "any_x_1": [(239, 1)],
    "any_x_any": [(799, 3), (113, 203), (113, 211)],
    "any_x_16": [(113, 128), (108, 256), (1023, 1024)],
    "16_x_any": [(128, 217), (1024, 1023)],
    "16_x_16": [(64, 128), (128, 192), (256, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1024, 1024),
                (4096, 4096), (4224, 4224)],
}
CAPPED = ("any_x_any", "any_x_16", "16_x_any", "16_x_16")


class Design(NamedTuple):
    """What one test runs: lengths that share their compiled kernels, under every kind of mask."""
    dtype: torch.dtype
    D: int
    lengths: str
    heads: str
    kinds: tuple[str, ...]
    kernels: str = "auto"

    def __str__(self):
        return f"{str(self.dtype)[6:]}-D{self.D}-{self.lengths}-{self.heads}-{self.kernels}"

    def cases(self) -> dict[str, Case]:
        return {f"{Tq}x{Tk} {kind}": self.case(Tq, Tk, kind) for Tq, Tk in LENGTHS[self.lengths] for kind in self.kinds}

    def case(self, Tq: int, Tk: int, kind: str) -> Case:
        H, H_kv = HEADS[self.heads]
        case = Case(Tq, Tk, H=H, H_kv=H_kv, D=self.D, B=2 if Tq * Tk <= 2**20 else 1)
        if kind == "capped":
            case = case._replace(q_times=5.0, softcap=15.0)
        if kind in ("local", "capped"):
            rng = random.Random(f"{self.D} {Tq} {Tk} {kind}")
            return case._replace(sides=(rng.randrange(Tk), rng.randrange(Tk)))
        return case._replace(sides=FULL) if kind == "full" else case


def design(dtype: torch.dtype, head_dims: tuple[int, ...], turn: int) -> list[Design]:
    """Every width with every length and every mask; the head groups take turns, so that each meets every width, every
    mask and (over the widths) every length. Compiling costs most, and the group is compiled in."""
    found = []
    for d, D in enumerate(head_dims):
        for n, lengths in enumerate(LENGTHS):
            kinds = ("causal", "full", "local") + (("capped",) if lengths == CAPPED[d % len(CAPPED)] else ())
            one = Design(dtype, D, lengths, list(HEADS)[(d + n + turn) % len(HEADS)], kinds)
            found += on_each_pair(one) if D in dispatch.HEAD_DIMS else [one]
    return found


def on_each_pair(one: Design) -> list[Design]:
    """Hopper's pair has no softcap."""
    uncapped = tuple(kind for kind in one.kinds if kind != "capped")
    return [one._replace(kernels="triton"), one._replace(kernels="hopper", kinds=uncapped)]


DESIGN = design(torch.bfloat16, HEAD_DIMS, 0) + design(torch.float16, HALF_HEAD_DIMS, 1)


def assert_all(results: list[tuple[str, list[Verdict]]]) -> None:
    for name, found in results:
        for kind in sorted({v.kind for v in found}):
            print(f"{name}: {max((v for v in found if v.kind == kind), key=lambda v: v.share)}")
    bad = [f"{name}: {v}" for name, found in results for v in found if not v.error <= v.limit]
    assert not bad, "\n".join(bad)


def run(case: Case, dtype: torch.dtype, device: torch.device, kernels: str = "auto") -> list[Verdict]:
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    got = ours(x, mask, case.softmax_scale, case.softcap, kernels)
    assert got["o"].dtype == got["dq"].dtype == got["dk"].dtype == got["dv"].dtype == dtype
    return judge(got, x, seen, case.softmax_scale, case.softcap)


@pytest.mark.gpu
@pytest.mark.parametrize("design", sorted(DESIGN, key=lambda d: -d.D), ids=str)         # the slowest to compile first
def test_widths_and_lengths(design, device, poison):
    if design.kernels == "hopper" and torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs an sm_90 card")
    assert_all([(name, run(case, design.dtype, device, design.kernels)) for name, case in design.cases().items()])


def test_the_matrix_in_small(device, poison):
    """The same, in float32 anywhere."""
    small = Design(torch.float32, 20, "any_x_any", "gqa", ("causal", "full", "local", "capped"))
    for name, case in list(small.cases().items())[:4]:
        assert_all([(name, run(case._replace(Tq=70, H=2, H_kv=1, B=1), torch.float32, device))])


@pytest.mark.parametrize("other", ["triton", "hopper"])
def test_the_design_covers_every_pair(other):
    """Width, length, mask kind, head group: any two values of two of them meet in bfloat16, whichever pair of kernels
    runs the widths that both take."""
    runs = {(d.D, pair, kind, d.heads) for d in DESIGN if d.dtype == torch.bfloat16 and d.kernels in ("auto", other)
            for pair in LENGTHS[d.lengths] for kind in d.kinds if kind != "capped"}
    values = HEAD_DIMS, list(itertools.chain(*LENGTHS.values())), ("causal", "full", "local"), HEADS
    assert len(values[1]) == len(set(values[1])) == 20
    for a, b in itertools.combinations(range(4), 2):
        assert {(run[a], run[b]) for run in runs} == set(itertools.product(values[a], values[b]))
    capped = {d.D for d in DESIGN if "capped" in d.kinds and d.dtype == torch.bfloat16}
    assert capped == set(HEAD_DIMS)


def bounds(kind: str, T: int, device: torch.device) -> tuple[Mask, Tensor, Tensor]:
    """The mask, and the first and last key of each query by the definition."""
    i = torch.arange(T, device=device)
    if kind == "causal":
        return causal_mask(), torch.zeros_like(i), i
    if kind == "window":
        window = T // 20 + 1
        return causal_mask(window), (i - window + 1).clamp(min=0), i
    lengths = packing(T, 9, T)
    starts = torch.repeat_interleave(torch.tensor(lengths).cumsum(0) - torch.tensor(lengths), torch.tensor(lengths))
    return causal_mask(0, starts[None].to(device)), starts.to(device), i


def some(n: int, T: int, device: torch.device) -> Tensor:
    """The first, the last and n - 2 others of T."""
    return torch.cat([torch.tensor([0, T - 1]), torch.randint(T, (n - 2,))]).to(device)


def judge_rows(got: dict[str, Tensor], x: Inputs, lo: Tensor, hi: Tensor, rows: Tensor) -> list[Verdict]:
    """o, lse and dq of a few queries, each against all of its keys."""
    j = torch.arange(x.k.shape[1], device=lo.device)
    seen = (j >= lo[rows, None]) & (j <= hi[rows, None])
    x = Inputs(x.q[:, rows], x.k, x.v, x.do[:, rows], x.dlse[..., rows])
    return judge(dict(o=got["o"][:, rows], lse=got["lse"][..., rows], dq=got["dq"][:, rows]), x, seen)


@torch.no_grad()
def lse_and_delta(x: Inputs, lo: Tensor, hi: Tensor, chunk: int = 64) -> tuple[Tensor, Tensor]:
    """First pass over every query: lse, and delta = rowsum(do * o) - dlse, both (B, H, T) in float64."""
    T, first, last, parts = x.q.shape[1], lo.tolist(), hi.tolist(), []
    for i in range(0, T, chunk):
        rows, keys = slice(i, i + chunk), slice(first[i], last[min(i + chunk, T) - 1] + 1)
        j = torch.arange(keys.start, keys.stop, device=lo.device)
        seen = (j >= lo[rows, None]) & (j <= hi[rows, None])
        o, lse = reference.attention(x.q[:, rows], x.k[:, keys], x.v[:, keys], seen)
        parts.append((lse, (o * x.do[:, rows]).sum(-1).transpose(1, 2) - x.dlse[..., rows]))
    lse, delta = (torch.cat(p, -1) for p in zip(*parts, strict=True))
    return lse, delta


@torch.no_grad()
def key_gradients(x: Inputs, lse: Tensor, delta: Tensor, seen: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Second pass: dk and dv of a few keys of the one key head from every query, each step in x's dtype."""
    dtype, scale = x.q.dtype, x.q.shape[-1] ** -0.5
    k, v = x.k[:, keys, 0], x.v[:, keys, 0]
    s = torch.einsum("bihd,bjd->bhij", x.q, k * scale)
    p = (s - lse[..., None]).exp().masked_fill(~seen, 0.0).to(dtype)
    dp = torch.einsum("bihd,bjd->bhij", x.do, v)
    ds = (p * (dp - delta[..., None])).to(dtype)
    return dict(dk=torch.einsum("bhij,bihd->bjd", ds, x.q * scale)[:, :, None],
                dv=torch.einsum("bhij,bihd->bjd", p, x.do)[:, :, None])


def judge_keys(got: dict[str, Tensor], x: Inputs, lo: Tensor, hi: Tensor, keys: Tensor) -> list[Verdict]:
    seen = (keys >= lo[:, None]) & (keys <= hi[:, None])                                       # (T, keys)
    lse, delta = lse_and_delta(x, lo, hi)
    exact = key_gradients(double(x), lse, delta, seen, keys)
    return verdicts({n: got[n][:, keys] for n in exact}, exact, key_gradients(x, lse, delta, seen, keys))


LONG = [pytest.param(130, 16, torch.float32, "auto", id="T130-D16-float32")] + [
    pytest.param(T, D, torch.bfloat16, kernels, id=f"T{T}-D{D}-bfloat16-{kernels}", marks=pytest.mark.gpu)
    for T in (2**15, 2**16 - 8, 2**17) for D in (64, 128) for kernels in ("auto", "triton")]


@pytest.mark.parametrize("kind", ["causal", "window", "documents"])
@pytest.mark.parametrize("T, D, dtype, kernels", LONG)
def test_long_sequences(T, D, dtype, kernels, kind, device, poison):
    """128 rows and 128 columns of the last key head and its two query heads."""
    x = make_inputs(Case(T, H=4, H_kv=2, D=D), dtype, device)
    mask, lo, hi = bounds(kind, T, device)
    got = ours(x, mask, kernels=kernels)
    last = Inputs(x.q[:, :, 2:], x.k[:, :, 1:], x.v[:, :, 1:], x.do[:, :, 2:], x.dlse[:, 2:])
    got = dict(o=got["o"][:, :, 2:], lse=got["lse"][:, 2:], dq=got["dq"][:, :, 2:], dk=got["dk"][:, :, 1:],
               dv=got["dv"][:, :, 1:])
    assert_all([("rows", judge_rows(got, last, lo, hi, some(128, T, device))),
                ("columns", judge_keys(got, last, lo, hi, some(128, T, device)))])


def test_a_wrong_row_and_a_wrong_column_are_seen(device):
    """The two partial judges agree with dense attention, and a thousandth of an error in one row does not pass."""
    x = make_inputs(Case(70, H=2, H_kv=1, D=16), torch.float32, device)
    _, lo, hi = bounds("window", 70, device)
    mask = causal_mask(70 // 20 + 1)
    got, every = ours(x, mask), torch.arange(70, device=device)

    def check(got):
        assert_all([("rows", judge_rows(got, x, lo, hi, every)), ("columns", judge_keys(got, x, lo, hi, every))])
    check(got)
    for name in ("o", "lse", "dq", "dk", "dv"):
        wrong = {n: t.clone() for n, t in got.items()}
        (wrong[name] if name != "lse" else wrong["lse"].transpose(1, 2))[:, 35] *= 1.001
        with pytest.raises(AssertionError, match=f"{name}: max error"):
            check(wrong)
