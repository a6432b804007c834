"""Every tile of tiles.py compiles for its architecture and fits: memory, spills, wgmma. No GPU needed.

The compiler runs in a subprocess, since this process may have Triton's interpreter on. For the table alone:

    TRITON_INTERPRET=0 python tests/test_compile.py
"""
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve()
SHARED = {"sm_80": 99 * 1024, "sm_90": 227 * 1024}       # bytes a block can have; sm_80 is sm_86's and sm_89's too

# Bytes of stack a thread may spill, the larger of triton 3.6's and 3.7's; what is not named spills nothing.
# FLOAT32 is for tests: it may spill.
SPILLS = {
    ("sm_90", 64, "dkdv"): 152, ("sm_90", 128, "dkdv"): 184, ("sm_90", 256, "dkdv"): 160,
    ("sm_90", 128, "forward"): 16, ("sm_90", 256, "dq"): 16,
    ("sm_80", 64, "dkdv"): 40, ("sm_80", 128, "dkdv"): 8,
    ("sm_80", 64, "forward"): 16, ("sm_80", 128, "forward"): 32,
}


class Job(NamedTuple):
    arch: str
    head_dim: int
    kind: str           # forward, dkdv, dq, delta
    dtype: str
    vectors: bool

    def __str__(self):
        return (
            f"{self.arch}-D{self.head_dim}-{self.kind}-{self.dtype}-{'vectors' if self.vectors else 'closed'}"
        )


def jobs(head_dims=(64, 128, 256), archs=("sm_90", "sm_80")) -> list[Job]:
    """All entries of TILES, FLOAT32 at every width, and delta: the slowest to compile first."""
    tiled = [Job(arch, D, kind, "bf16", vectors) for D in reversed(head_dims) for arch in archs
             for kind in ("dkdv", "dq", "forward") for vectors in (True, False)]
    float32 = [Job(arch, D, kind, "fp32", True) for D in reversed(head_dims) for arch in archs
               for kind in ("dkdv", "dq", "forward")]
    delta = [Job(arch, D, "delta", "bf16", False) for D in head_dims for arch in archs]
    return tiled + float32 + delta


def measure(job: Job) -> dict:
    """Compile one kernel as a launch would specialise it (pointers, strides, lengths: multiples of 16)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flash_attn2 import backward, forward
    from flash_attn2.tiles import FLOAT32, TILES
    kernel = {"forward": forward.forward_kernel, "dkdv": backward.dkdv_kernel, "dq": backward.dq_kernel,
              "delta": backward.delta_kernel}[job.kind]
    D = job.head_dim
    constants = dict(D=D, D_PAD=D, tanh_scale=None)
    options = dict(num_warps=4, num_stages=3)           # what a launch that names none gets
    block = (64, None)
    if job.kind == "delta":
        constants |= dict(BLOCK_M=64, HAS_DLSE=True)
    else:
        t = FLOAT32 if job.dtype == "fp32" else TILES[job.arch, D][job.kind]
        constants |= dict(BLOCK_M=t.BLOCK_M, BLOCK_N=t.BLOCK_N, VECTORS=job.vectors)
        options = dict(num_warps=t.num_warps, num_stages=t.num_stages)
        block = (t.BLOCK_M, t.BLOCK_N)
        if not job.vectors:
            constants |= {name: None for name in kernel.arg_names if name.endswith(("lo_ptr", "hi_ptr"))}
    signature = {name: argument_type(name, job.dtype, constants) for name in kernel.arg_names}
    attrs = {(n,): [["tt.divisibility", 16]] for n, (name, kind) in enumerate(signature.items())
             if kind.startswith("*") or name.startswith("stride") or name in ("Tq", "Tk", "H", "H_kv")}
    target = GPUTarget("cuda", int(job.arch[3:]), 32)
    out = triton.compile(ASTSource(kernel, signature, constants, attrs), target=target, options=options)
    ptx = out.asm["ptx"]
    tensor_core = "wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "none"
    return dict(
        job._asdict(),
        name=str(job),
        block_m=block[0],
        block_n=block[1],
        **options,
        shared=out.metadata.shared,
        tensor_core=tensor_core,
        **resources(out.asm["cubin"]),
    )


def argument_type(name: str, dtype: str, constants: dict) -> str:
    if name in constants:
        return "constexpr"
    if name in ("lse_ptr", "dlse_ptr", "delta_ptr"):
        return "*fp32"
    if name.endswith(("lo_ptr", "hi_ptr")):
        return "*i32"
    if name.endswith("_ptr"):
        return f"*{dtype}"
    return "fp32" if "scale" in name else "i32"


def resources(cubin: bytes) -> dict:
    """Registers a thread and bytes of stack a thread: without arrays, what it spills."""
    from triton import knobs
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(cubin)
        f.flush()
        text = subprocess.check_output([knobs.nvidia.cuobjdump.path, "-res-usage", f.name], text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    return dict(regs=int(found[1]), stack=int(found[2]))


def main() -> None:
    sys.path.insert(0, str(HERE.parent.parent))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, jobs()):
            print(json.dumps(row), flush=True)


def faults(job: Job, row: dict) -> list[str]:
    """Shared memory beyond the card's, a stack beyond SPILLS, or a bf16 kernel without its tensor cores."""
    found = []
    shared = 163 * 1024 if job.dtype == "fp32" else SHARED[job.arch]        # float32 is for tests, on the large cards
    if row["shared"] > shared:
        found.append(f"{row['shared']} bytes of shared memory, {job.arch} has {shared}")
    allowed = SPILLS.get((job.arch, job.head_dim, job.kind), 0)
    if job.dtype == "bf16" and row["stack"] > allowed:
        found.append(f"{row['stack']} bytes of stack, {allowed} allowed")
    core = {"sm_90": "wgmma", "sm_80": "mma"}[job.arch]
    if job.dtype == "bf16" and job.kind != "delta" and row["tensor_core"] != core:
        found.append(f"tensor cores: {row['tensor_core']}, not {core}")
    return found


def test_every_tile_fits():
    """One test, so that parallel runs compile once. Triton's cache makes a second run quick."""
    env = os.environ | {"TRITON_INTERPRET": "0"}
    ran = subprocess.run([sys.executable, HERE], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    table = {Job(*(row[field] for field in Job._fields)): row for row in rows}
    assert set(table) == set(jobs())
    bad = [f"{job}: {fault}" for job, row in table.items() for fault in faults(job, row)]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("change, message", [
    (dict(shared=2**20), "shared memory"), (dict(stack=9999), "stack"),
    (dict(tensor_core="mma"), "not wgmma")], ids=["shared", "stack", "tensor_core"])
def test_a_fault_is_seen(change, message):
    row = dict(shared=0, stack=0, tensor_core="wgmma")
    job = Job("sm_90", 128, "forward", "bf16", True)
    assert not faults(job, row) and message in faults(job, row | change)[0]


def test_every_entry_is_measured():
    from flash_attn2.tiles import TILES
    assert {(job.arch, job.head_dim) for job in jobs()} == set(TILES)
    for passes in TILES.values():
        assert set(passes) == {"forward", "dkdv", "dq"}


if __name__ == "__main__":
    main()
