"""The Hopper pair: every shipped launch compiles and fits without a GPU; on an sm_90 card its numbers, bits and faults.

The compiler runs in a subprocess, since this process may have Triton's interpreter on. For the table alone:

    TRITON_INTERPRET=0 python tests/test_hopper.py
"""
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from attention_cases import (
    FULL,
    LARGE,
    Case,
    Inputs,
    assert_as_good_as_torch,
    assert_same_bits,
    make_inputs,
    make_mask,
    ours,
    packing,
    same,
)
from test_compile import SHARED, print_table, resources, table_of

from flash_attn2 import causal_mask, dispatch, flash_attention, reference
from flash_attn2.dispatch import HEAD_DIMS

HERE = Path(__file__).resolve()
# Bytes of stack a thread may spill, the larger of triton 3.6's and 3.7's: backward_kernel at head width 64, by whether
# several query heads share a key head. The others spill nothing.
SPILLS = {False: 40, True: 48}
MAXNREG = {("forward_kernel", 64): 128, ("forward_kernel", 128): 168,
           ("backward_kernel", 64): 168, ("backward_kernel", 128): 168}
# ptxas: wgmma serialized (7510, 7512, 7514), or its registers' limit ignored (7507).
SERIALIZED = ("C7507", "C7510", "C7512", "C7514")
OURS = 6                # first of our named barriers; triton takes lower ones, one a partition
EXPONENTIALS = 64       # of a thread between issuing p v and waiting for it, D 128: a tile of 64 x 128 has that many


class Job(NamedTuple):
    kernel: str
    D: int
    dtype: str
    vectors: bool = False
    grouped: bool = False

    def __str__(self):
        return f"{self.kernel}-D{self.D}-{self.dtype}" + "-vectors" * self.vectors + "-grouped" * self.grouped


def jobs() -> list[Job]:
    """The slowest first."""
    backward = [Job("backward_kernel", D, "bfloat16", vectors, grouped) for D in HEAD_DIMS
                for vectors in (False, True) for grouped in (False, True)]
    forward = [Job("forward_kernel", D, "bfloat16", vectors, True) for D in HEAD_DIMS for vectors in (False, True)]
    half = [Job("backward_kernel", 128, "float16"), Job("forward_kernel", 128, "float16", grouped=True)]
    others = [Job(name, D, "bfloat16") for name in ("prepare_kernel", "finish_kernel") for D in HEAD_DIMS]
    return backward + forward + half + others


class Recorder:
    """In place of a kernel: keeps what it would be launched with."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.record

    def record(self, *args, **named):
        self.arguments = dict(zip(self.kernel.arg_names, args, strict=False)) | named


def launch(job: Job):
    """(kernel, its arguments by name, other options), as the launchers make them, from tensors of a CPU."""
    from flash_attn2.hopper import backward, forward
    module = forward if job.kernel == "forward_kernel" else backward
    recorders = {name: Recorder(getattr(module, name)) for name in
                 ("forward_kernel", "prepare_kernel", "backward_kernel", "finish_kernel") if hasattr(module, name)}
    for name, recorder in recorders.items():
        setattr(module, name, recorder)
    forward.multiprocessors = lambda device: 132        # of an H200
    # Heads of the forward a multiple of 16, as models have them; the backward's H_kv is none.
    H, H_kv = (16, 4) if module is forward else (8, 2) if job.grouped else (2, 2)
    x = make_inputs(Case(256, H=H, H_kv=H_kv, D=job.D), getattr(torch, job.dtype), torch.device("cpu"))
    mask = causal_mask(0, torch.zeros(1, 256, dtype=torch.int64)) if job.vectors else causal_mask()
    try:
        if module is forward:
            forward.forward(*x[:3], mask, job.D ** -0.5)
        else:
            backward.backward(x.do, x.dlse, *x[:3], x.q.detach(), x.dlse, mask, job.D ** -0.5)
    finally:
        for name, recorder in recorders.items():
            setattr(module, name, recorder.kernel)
    kernel, arguments = recorders[job.kernel].kernel, recorders[job.kernel].arguments
    options = {name: arguments.pop(name) for name in list(arguments) if name not in kernel.arg_names}
    return kernel, arguments, options


def specialised(kernel, arguments: dict) -> tuple[dict, dict, dict]:
    """(signature, constants, attributes) of a launch: 1 and None are compiled in, multiples of 16 are told."""
    signature, constants, attributes = {}, {}, {}
    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int32: "i32"}
    for parameter in kernel.params:
        n, name, value = parameter.num, parameter.name, arguments[parameter.name]
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(n,)] = f"*{types[value.dtype]}", [["tt.divisibility", 16]]
        elif isinstance(value, tuple):
            signature[name] = ("i32",) * len(value)
            attributes |= {(n, axis): [["tt.divisibility", 16]] for axis in range(len(value))}
        elif hasattr(value, "block_shape"):
            signature[name] = f"tensordesc<{types[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if type(value) is int and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(n,)] = [["tt.divisibility", 16]]
    return signature, constants, attributes


def measure(job: Job) -> dict:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
    kernel, arguments, options = launch(job)
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    out = triton.compile(source(kernel, *specialised(kernel, arguments)), target=GPUTarget("cuda", 90, 32),
                         options=options)
    row = dict(job._asdict(), shared=out.metadata.shared, said=ptxas(out.asm["ptx"]), maxnreg=options.get("maxnreg"),
               allocations=allocations(out.asm["ttgir"]), **resources(out.asm["cubin"]))
    code = disassembled(out.asm["cubin"])
    row["arrivals"] = [out.asm["ptx"].count("bar.arrive"), code.count("BAR.ARV")]
    row["tritons"] = max(map(int, re.findall(r"\bbar(?:rier)?\.sync\s+(\d+)", out.asm["ptx"])), default=0)
    row["exponentials"] = count_exponentials(code) if job.kernel == "forward_kernel" else []
    return row


def allocations(ttgir: str) -> list[tuple[str, int, int]]:
    """(name, first byte, end) of what a kernel allocates in shared memory, as triton lays it out. Not what the compiler
    adds: scratch, captures."""
    from triton._C.libtriton import ir, nvidia, passes
    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as f:
        f.write(ttgir)
        f.flush()
        module = ir.parse_mlir_module(f.name, context)
    layout = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(layout)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(layout, 90, 80)
    layout.run(module, "layout")
    found = re.findall(r"%(\w+) = ttg\.local_alloc \{allocation\.offset = (\d+).*?memdesc<((?:\d+x)+)[a-z]+(\d+)",
                       str(module))
    return [(name, int(first), int(first) + math.prod(map(int, shape[:-1].split("x"))) * int(bits) // 8)
            for name, first, shape, bits in found]


def on_barriers(found: list[tuple[str, int, int]]) -> list[str]:
    """What lies on a barrier's memory, which the compiler allows once nobody uses the barrier, and the card does not:
    when another process takes its turn there, such memory comes back changed (LOG.md, 2026-11-30)."""
    barriers = [each for each in found if each[0].startswith("bars")]
    return [f"{name} on {bars}" for bars, first, end in barriers
            for name, other_first, other_end in found if name != bars and other_first < end and first < other_end]


def ptxas(ptx: str) -> list[str]:
    """The codes of its remarks, which triton does not show."""
    from triton import knobs
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        ran = subprocess.run([knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", f.name, "-o", "/dev/null"], text=True,
                             capture_output=True, check=True)
    return sorted(set(re.findall(r"\bC\d{4}\b", ran.stdout + ran.stderr)))


def disassembled(cubin: bytes) -> str:
    from triton import knobs
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        return subprocess.check_output([knobs.nvidia.nvdisasm.path, "-c", f.name], text=True, stderr=subprocess.DEVNULL)


def count_exponentials(sass: str) -> list[int]:
    """How many stand between the wait that leaves one product in flight and the next wait for all, for each group."""
    parts = re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1\b", sass)[1:]
    return [re.split(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", part)[0].count("MUFU.EX2") for part in parts]


def faults(job: Job, row: dict) -> list[str]:
    found = []
    if row["shared"] > SHARED["sm_90"]:
        found.append(f"{row['shared']} bytes of shared memory, sm_90 has {SHARED['sm_90']}")
    allowed = SPILLS[job.grouped] if (job.kernel, job.D) == ("backward_kernel", 64) else 0
    if row["stack"] > allowed:
        found.append(f"{row['stack']} bytes of stack, {allowed} allowed")
    registers = MAXNREG.get((job.kernel, job.D))
    if registers and not any(name.startswith("bars") for name, *_ in row["allocations"]):
        found.append("no barriers: not read aright, or named otherwise")
    if overlaps := on_barriers(row["allocations"]):
        found.append(f"shared memory: {', '.join(overlaps)}")
    if said := set(row["said"]) & set(SERIALIZED):
        found.append(f"ptxas says {', '.join(sorted(said))}")
    if registers and not row["regs"] == row["maxnreg"] == registers:
        found.append(f"{row['regs']} registers, {row['maxnreg']} asked for, not {registers}")
    # ptxas may drop a volatile asm in a branch, or double it: a barrier never completes then, or completes early.
    if row["arrivals"][0] != row["arrivals"][1]:
        found.append("{} arrivals at named barriers written, {} assembled".format(*row["arrivals"]))
    if row["tritons"] >= OURS:
        found.append(f"triton takes named barrier {row['tritons']}, ours begin at {OURS}")
    if job.kernel == "forward_kernel" and job.D == 128:
        counts = row["exponentials"]
        if len(counts) != 2 or min(counts) < EXPONENTIALS:
            found.append(f"exponentials under p v, by group: {counts}, not {EXPONENTIALS} in each of 2")
    return found


@pytest.mark.timeout(1800)
def test_every_configuration_fits():
    """One test, so that parallel runs compile once. Triton's cache makes a second run quicker."""
    table = table_of(HERE, Job, jobs())
    bad = [f"{job}: {fault}" for job, row in table.items() for fault in faults(job, row)]
    assert not bad, "\n".join(bad)


FREE = [("bars", 8, 16), ("bars_1", 16, 24), ("tiles", 24, 32)]


@pytest.mark.parametrize("change, message", [
    (dict(shared=227 * 1024 + 1), "shared memory"), (dict(stack=8), "stack"),
    (dict(allocations=[*FREE, ("tiles", 4, 9)]), "tiles on bars"),
    (dict(allocations=[]), "no barriers"),
    (dict(said=["C7510"]), "ptxas says C7510"), (dict(regs=160), "160 registers"),
    (dict(arrivals=[5, 6]), "5 arrivals at named barriers written, 6 assembled"),
    (dict(tritons=6), "triton takes named barrier 6"),
    (dict(exponentials=[66, 63]), "exponentials under p v"), (dict(exponentials=[]), "exponentials under p v")],
    ids=["shared", "stack", "on_a_barrier", "no_barriers", "serialized", "registers", "arrivals", "tritons", "hoisted",
         "no_wait"])
def test_a_fault_is_seen(change, message):
    row = dict(shared=227 * 1024, stack=0, allocations=FREE, said=["C7000"], regs=168, maxnreg=168,
               arrivals=[5, 5], tritons=3, exponentials=[66, 66])
    job = Job("forward_kernel", 128, "bfloat16")
    assert not faults(job, row) and message in faults(job, row | change)[0]


def test_a_wait_above_the_exponentials_is_counted():
    early, late = "WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", "WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"
    assert count_exponentials("MUFU.EX2\n".join([early, late, "", early, late, early, ""])) == [2, 1]


def test_every_configuration_is_measured():
    from flash_attn2.hopper import backward, forward
    assert {job.D for job in jobs()} == set(HEAD_DIMS) == set(forward.CONFIG) == set(backward.CONFIG)
    assert {config.maxnreg for config in forward.CONFIG.values()} <= {n for (name, _), n in MAXNREG.items()}


# ---- on an sm_90 card

@pytest.fixture
def sm_90(device):
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs an sm_90 card")


def on_sm_90(test):
    return pytest.mark.gpu(pytest.mark.usefixtures("sm_90")(test))


CASES = {
    "T1": Case(1, H=6, H_kv=3),
    "T65": Case(65),
    "T130": Case(130, H=6, H_kv=3, B=2),
    "T1000": Case(1000, H=6, H_kv=2, B=2),
    "T1023": Case(1023, H=6, H_kv=1),
    "mha": Case(1024, H=4, B=3),
    "full": Case(1000, H=6, H_kv=3, sides=FULL),
    "full_Tq_below_Tk": Case(130, 1023, H=6, H_kv=3, sides=FULL),
    "full_Tq_above_Tk": Case(1023, 65, H=6, H_kv=3, sides=FULL),
    # Windows narrower than a tile: its first and its last pairs are masked in one and the same tile.
    **{f"window{W}": Case(1000, H=6, H_kv=3, window=W) for W in (1, 10, 63, 64, 65, 127, 128, 129, 300)},
    "window10_Tq_below_Tk": Case(200, 300, window=10),
    "window30_Tq_below_Tk": Case(1000, 1100, H=6, H_kv=3, window=30),
    "window20_Tq_above_Tk": Case(300, 200, window=20),
    "two_sided_10_5": Case(1000, H=6, H_kv=3, sides=(10, 5)),
    "two_sided_0_100": Case(1000, H=6, H_kv=3, sides=(0, 100)),
    "two_sided_200_70": Case(1023, H=6, H_kv=3, sides=(200, 70)),
    "two_sided_Tq_above_Tk": Case(1000, 700, H=6, H_kv=3, sides=(40, 20)),
    "documents": Case(1024, H=6, H_kv=3, B=2, docs=((300, 724), (1, 1023))),
    "documents_of_few_tokens": Case(1000, H=6, H_kv=3, docs=(packing(1000, 60, 0),)),
    "one_token_documents": Case(300, H=6, H_kv=3, docs=((1,) * 300,)),
    "documents_and_window": Case(1000, H=6, H_kv=3, docs=(packing(1000, 9, 2),), window=50),
    "segments": Case(1100, 1500, H=6, H_kv=3, segments=((76, 1), (0, 5), (324, 1294), (600, 0), (100, 200))),
    "segments_empty": Case(70, 75, segments=((0, 3), (60, 0), (10, 70), (0, 2))),
    "one_query": Case(1, 1000, H=6, H_kv=3),
    "one_key": Case(130, 1),
    "Tq_below_Tk": Case(300, 1023, H=6, H_kv=3),
    "rows_without_keys": Case(1023, 300, H=6, H_kv=3),
    "tiles_without_keys": Case(1024, 128, H=6, H_kv=3),
    "large_scores": Case(1025, H=6, H_kv=3, q_times=5.0),
    "scale_1": Case(300, H=6, H_kv=3, softmax_scale=1.0),
} | {name: case for name, case in LARGE.items() if case.D == 64 and not case.softcap and case.Tq > 2000}
HALF = ["T130", "T1000", "window10", "two_sided_10_5", "documents", "rows_without_keys", "large_scores"]


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("name, dtype", [
    *((name, torch.bfloat16) for name in CASES), *((name, torch.float16) for name in HALF)], ids=str)
def test_as_good_as_torch(name, dtype, D, device, poison):
    """By the same rule as the Triton pair, which must pass it on the same inputs."""
    case = CASES[name]._replace(D=D)
    x = make_inputs(case, dtype, device)
    mask, seen = make_mask(case, device)
    got = ours(x, mask, case.softmax_scale, kernels="hopper")
    assert all(got[part].dtype == dtype and got[part].is_contiguous() for part in ("o", "dq", "dk", "dv"))
    assert_as_good_as_torch(got, x, seen, case.softmax_scale)
    assert_as_good_as_torch(ours(x, mask, case.softmax_scale, kernels="triton"), x, seen, case.softmax_scale)
    blind = ~seen.any(-1)
    if blind.dim() == 1 and blind.any():
        assert (got["o"][:, blind] == 0).all() and (got["lse"][..., blind] == float("-inf")).all()
        assert (got["dq"][:, blind] == 0).all()
    unseen = ~seen.any(-2)
    if unseen.dim() == 1 and unseen.any():
        assert (got["dk"][:, unseen] == 0).all() and (got["dv"][:, unseen] == 0).all()


@on_sm_90
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_program_of_many_items(name, programs, device, monkeypatch):
    """As on a card of few multiprocessors: who walks which rows, and after which, changes no bit of o and lse."""
    from flash_attn2.hopper import forward
    case = CASES[name]._replace(D=128)
    q, k, v = (t.detach() for t in make_inputs(case, torch.bfloat16, device)[:3])
    mask = make_mask(case, device)[0]
    expected = forward.forward(q, k, v, mask, 0.1)
    monkeypatch.setattr(forward, "multiprocessors", lambda device: programs)
    o, lse = forward.forward(q, k, v, mask, 0.1)
    assert torch.equal(o, expected[0]) and torch.equal(lse, expected[1])


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_in_a_cuda_graph(D, device):
    """Captured once, replayed on other numbers: the counter of items and the sums of dq begin at 0 again."""
    x = make_inputs(Case(1000, B=8, H=6, H_kv=3, D=D), torch.bfloat16, device)
    q, k, v, do = (t.detach() for t in x[:4])

    def step():
        o, lse = dispatch.forward(q, k, v, causal_mask(), 0.1, kernels="hopper")
        return dict(zip(("o", "lse", "dq", "dk", "dv"), (o, lse, *dispatch.backward(
            do, None, q, k, v, o, lse, causal_mask(), 0.1, kernels="hopper")), strict=True))
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for factor in (1.0, -2.0):
        q *= factor
        graph.replay()
        assert_same_bits(captured, step(), any_order=True, where=f"q times {factor}")


VIEWS = {
    "packed": lambda q, k, v: torch.stack([q, k, v], 2).unbind(2),
    "BHTD": lambda *qkv: [t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv],
    "sequence_first": lambda *qkv: [t.transpose(0, 1).contiguous().transpose(0, 1) for t in qkv],
    "every_other_head": lambda *qkv: [torch.stack([t, -t], 3).flatten(2, 3)[:, :, ::2] for t in qkv],
    "padded_rows": lambda *qkv: [torch.cat([t, torch.full_like(t, float("nan"))], -1)[..., :t.shape[-1]] for t in qkv],
}


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_give_what_copies_give(view, D, device, poison):
    x = make_inputs(Case(1000, B=2, H=4, D=D), torch.bfloat16, device)
    q, k, v = (t.detach().requires_grad_() for t in view(*(t.detach() for t in x[:3])))
    assert not q.is_contiguous() and torch.equal(q, x.q)
    assert_same_bits(ours(x._replace(q=q, k=k, v=v), causal_mask(), kernels="hopper"),
                     ours(x, causal_mask(), kernels="hopper"), any_order=True)


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_gradient_through_a_packed_projection(D, device, poison):
    """d qkv arrives in one tensor, whose neighbours are other tensors' gradients, and no row is past the end of it."""
    qkv = torch.randn(2, 65, 3, 2, D, device=device).bfloat16().requires_grad_()
    x = Inputs(*qkv.detach().unbind(2), torch.randn(2, 65, 2, D, device=device).bfloat16(),
               torch.zeros(2, 2, 65, device=device))
    o, _ = flash_attention(*qkv.unbind(2), causal_mask(), kernels="hopper")
    dqkv, = torch.autograd.grad(o, qkv, x.do)
    assert_as_good_as_torch(dict(zip(("dq", "dk", "dv"), dqkv.unbind(2), strict=True)), x,
                            reference.seen(65, 65, device=device))


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_neighbours_in_memory_stay(D, device, monkeypatch):
    """Outputs of 65 rows between guards: a tile is cut off at the end of each head and each row of the batch."""
    x = make_inputs(Case(65, 130, B=2, H=4, H_kv=2, D=D), torch.bfloat16, device)
    mask = causal_mask()
    expected, guarded, real = ours(x, mask, kernels="hopper"), [], torch.empty

    def between_guards(*size, dtype=None, device=None, **_):
        size = size[0] if isinstance(size[0], tuple | torch.Size) else size
        n = torch.Size(size).numel()
        whole = real(n + 2 * 8192, dtype=dtype, device=device).fill_(7.0)
        guarded.append((whole, n))
        return whole[8192:8192 + n].view(size)
    monkeypatch.setattr(torch, "empty", between_guards)
    monkeypatch.setattr(torch, "empty_like", lambda t, **_: between_guards(t.shape, dtype=t.dtype, device=t.device))
    got = ours(x, mask, kernels="hopper")
    assert_same_bits(got, expected, any_order=True)
    assert len(guarded) >= 7, "o, lse; dq, dk, dv, rows and sums"
    for whole, n in guarded:
        assert (whole[:8192] == 7).all() and (whole[8192 + n:] == 7).all()


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_expanded_do(D, device, poison):
    """o.sum() has a gradient of strides 0, which TMA cannot read."""
    x = make_inputs(Case(1000, H=4, H_kv=2, D=D), torch.bfloat16, device)
    o, _ = flash_attention(*x[:3], causal_mask(), kernels="hopper")
    got = torch.autograd.grad(o.sum(), x[:3], retain_graph=True)
    expected = torch.autograd.grad(o, x[:3], torch.ones_like(o))
    for name, mine, theirs in zip(("dq", "dk", "dv"), got, expected, strict=True):
        assert same(name, mine, theirs, any_order=True), name


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_gradient_of_lse_alone(D, device, poison):
    """Expanded too: lse.sum()."""
    x = make_inputs(Case(1000, H=4, H_kv=2, D=D), torch.bfloat16, device)
    _, lse = flash_attention(*x[:3], causal_mask(), kernels="hopper")
    for dlse in (x.dlse, torch.ones((), device=device).expand_as(lse)):
        dq, dk, dv = torch.autograd.grad(lse, x[:3], dlse, retain_graph=True)
        assert (dv == 0).all()
        assert_as_good_as_torch(dict(dq=dq, dk=dk, dv=dv), x._replace(do=torch.zeros_like(x.do), dlse=dlse),
                                reference.seen(1000, 1000, device=device))


RACES = {"D64": Case(1000, B=8, H=6, H_kv=3), "D128": Case(1000, B=8, H=6, H_kv=3, D=128),
         "D64_full": Case(1023, 2000, B=2, H=4, sides=FULL), "D128_documents": Case(
             1024, B=2, H=6, H_kv=3, D=128, docs=((300, 724), (1, 1023)))}


@on_sm_90
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", RACES.values(), ids=RACES)
def test_repeats_under_load(case, deterministic, device):
    """Fifty runs while another stream multiplies: o, lse, dk and dv to the bit, dq to twice a rounding, which is
    FlashAttention's bound, and to the bit where that is asked for. One look at the GPU in the end."""
    x, mask = make_inputs(case, torch.bfloat16, device), make_mask(case, device)[0]
    side, a = torch.cuda.Stream(), torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    side.wait_stream(torch.cuda.current_stream())
    kernels = "auto" if deterministic else "hopper"
    first = ours(x, mask, kernels=kernels, deterministic=deterministic)
    rounding = 2 * ((first["dq"] + 0.3 - 0.3) - first["dq"]).abs().max()
    always = torch.ones((), dtype=torch.bool, device=device)
    for _ in range(50):
        with torch.cuda.stream(side):
            for _ in range(4):
                torch.mm(a, a)
        for name, value in ours(x, mask, kernels=kernels, deterministic=deterministic).items():
            if name == "dq" and not deterministic:
                always &= ((value - first[name]).abs() <= rounding).all()
            always &= same(name, value, first[name], any_order=not deterministic)
    torch.cuda.synchronize()
    assert always


MULTIPLY = """
import torch
a = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
while True:
    for _ in range(50):
        torch.mm(a, a)
    torch.cuda.synchronize()
    print(flush=True)
"""


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_beside_other_processes(D, device):
    """They take turns on a card, in the middle of a kernel too: what lay on a barrier's memory came back changed."""
    x = make_inputs(Case(2**17, H=4, H_kv=2, D=D), torch.bfloat16, device)
    first = ours(x, causal_mask(), kernels="hopper")
    others = [subprocess.Popen([sys.executable, "-c", MULTIPLY], stdout=subprocess.PIPE) for _ in range(2)]
    try:
        assert all(other.stdout.readline() for other in others)             # they multiply
        for n in range(10):
            assert_same_bits(ours(x, causal_mask(), kernels="hopper"), first, any_order=True, where=f"run {n}")
    finally:
        for other in others:
            other.kill()
            other.communicate()


@on_sm_90
def test_deterministic_is_the_triton_backward(device):
    """For torch's switch as for the flag; the forward repeats as it is."""
    x = make_inputs(Case(1000, H=4, H_kv=2), torch.bfloat16, device)
    flagged = ours(x, causal_mask(), deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        switched = ours(x, causal_mask())
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(switched, flagged)
    by_hand = torch.ops.flash_attn2.backward(x.do, x.dlse, *(t.detach() for t in x[:3]), flagged["o"], flagged["lse"],
                                             *[None] * 4, causal_mask().left, causal_mask().right, 0.125, 0.0, "triton",
                                             False)
    assert_same_bits(dict(zip(("dq", "dk", "dv"), by_hand, strict=True)), flagged)


ELSEWHERE = {
    "float32": (dict(), torch.float32, lambda t: t, 0.0, "float32"),
    "D80": (dict(D=80), torch.bfloat16, lambda t: t, 0.0, "head width 80"),
    "softcap": (dict(), torch.bfloat16, lambda t: t, 15.0, "softcap"),
    "odd_base": (dict(), torch.bfloat16, lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape), 0.0,
                 "strides or base"),
    "odd_rows": (dict(H=1), torch.bfloat16, lambda t: torch.cat([t, t[..., :2]], -1)[..., :64], 0.0, "strides or base"),
    "expanded_heads": (dict(), torch.bfloat16, lambda t: t[:, :, :1].expand_as(t), 0.0, "strides or base"),
    "every_other_column": (dict(), torch.bfloat16, lambda t: torch.stack([t, t], -1).flatten(3)[..., ::2], 0.0,
                           "strides or base"),
}


@on_sm_90
@pytest.mark.parametrize("changes, dtype, layout, softcap, reason", ELSEWHERE.values(), ids=ELSEWHERE)
def test_what_hopper_does_not_take_runs_elsewhere(changes, dtype, layout, softcap, reason, device, poison):
    case = Case(200, **changes)
    x = make_inputs(case, dtype, device)
    q, k, v = (layout(t.detach()).requires_grad_() for t in x[:3])
    x = x._replace(q=q, k=k, v=v)
    got = ours(x, causal_mask(), softcap=softcap)
    assert_as_good_as_torch(got, x, make_mask(case, device)[1], softcap=softcap)
    assert_same_bits(got, ours(x, causal_mask(), softcap=softcap, kernels="triton"))
    with pytest.raises(ValueError, match=f"kernels='hopper' does not take this: .*{reason}"):
        flash_attention(q, k, v, causal_mask(), softcap=softcap, kernels="hopper")


@on_sm_90
@pytest.mark.parametrize("D", HEAD_DIMS)
def test_a_wrong_number_is_seen(D, device):
    """The rule has teeth here too: one row of each result forgotten does not pass."""
    case = Case(300, D=D)
    x = make_inputs(case, torch.bfloat16, device)
    mask, seen = make_mask(case, device)
    got = ours(x, mask, kernels="hopper")
    for name in ("o", "dq", "dk", "dv"):
        wrong = {n: t.clone() for n, t in got.items()}
        wrong[name][:, got[name][0].abs().amax((1, 2)).argmax()] = 0
        with pytest.raises(AssertionError, match=f"{name}: "):
            assert_as_good_as_torch(wrong, x, seen)


MEMCHECK = """
import torch
from flash_attn2 import causal_mask, flash_attention
for D in (64, 128):
    q, k, v = (torch.randn(1, 130, 2, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    o, lse = flash_attention(q, k, v, causal_mask(), kernels="hopper")
    torch.autograd.grad((o, lse), (q, k, v), (torch.ones_like(o), torch.ones_like(lse)))
torch.cuda.synchronize()
"""


@on_sm_90
@pytest.mark.timeout(120)
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_no_access_out_of_bounds():
    ran = subprocess.run(["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c",
                          MEMCHECK], cwd=HERE.parent.parent, text=True, capture_output=True, timeout=110,
                         env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    assert ran.returncode == 0 and "ERROR SUMMARY: 0 errors" in ran.stdout, (ran.stdout + ran.stderr)[-3000:]


if __name__ == "__main__":
    print_table(measure, jobs())
