"""Every tile of tiles.py compiles for its architecture and fits: memory, spills, wgmma. No GPU needed.

The compiler runs in a subprocess, since this process may have Triton's interpreter on. For the table alone:

    TRITON_INTERPRET=0 python tests/test_compile.py
"""
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).resolve()
# Bytes of shared memory a block can have. sm_80 has 163 KiB, but shares its tiles with three that have 99.
SHARED = {"sm_80": 99 * 1024, "sm_86": 99 * 1024, "sm_89": 99 * 1024, "sm_120": 99 * 1024,
          "sm_90": 227 * 1024, "sm_100": 227 * 1024}
TENSOR_CORE = {"sm_90": "wgmma", "sm_100": "tcgen05"}    # the others: mma

# Bytes of stack a thread may spill, by rows of TILES: the largest of their cards and of triton 3.6's and 3.7's. What is
# not named spills nothing. FLOAT32 is for tests: it may spill.
SPILLS = {
    ("sm_90", 64, "dkdv"): 24, ("sm_90", 128, "dkdv"): 120, ("sm_90", 256, "dkdv"): 176, ("sm_90", 256, "dq"): 40,
    ("sm_100", 64, "dkdv"): 48, ("sm_100", 128, "dkdv"): 280, ("sm_100", 256, "dkdv"): 48,
    ("sm_100", 256, "forward"): 72, ("sm_100", 128, "delta"): 8, ("sm_100", 256, "delta"): 160,
    ("sm_80", 64, "dkdv"): 48, ("sm_80", 256, "dkdv"): 16, ("sm_80", 64, "forward"): 72, ("sm_80", 128, "forward"): 32,
}
OWN_TILES = ("sm_80", "sm_90", "sm_100")


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


def jobs(head_dims=(64, 128, 256)) -> list[Job]:
    """All entries of TILES for each card they are for, FLOAT32 at one width, and delta: the slowest first."""
    tiled = [Job(arch, D, kind, "bf16", vectors) for D in reversed(head_dims) for arch in SHARED
             for kind in ("dkdv", "dq", "forward") for vectors in (True, False) if vectors or arch in OWN_TILES]
    float32 = [Job("sm_80", 64, kind, "fp32", True) for kind in ("dkdv", "dq", "forward")]
    delta = [Job(arch, D, "delta", "bf16", False) for D in head_dims for arch in OWN_TILES]
    return tiled + float32 + delta


def capability(arch: str) -> tuple[int, int]:
    return divmod(int(arch[3:]), 10)


def measure(job: Job) -> dict:
    """Compile one kernel as a launch would specialise it (pointers, strides, lengths: multiples of 16)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flash_attn2.tiles import FLOAT32, TILES, Tile, architecture
    D = job.head_dim
    if job.kind == "delta":
        t = Tile(64, 64, 4, 3)                          # warps and stages: what a launch that names none gets
        constants = dict(BLOCK_M=64)
    else:
        t = FLOAT32 if job.dtype == "fp32" else TILES[architecture(*capability(job.arch)), D][job.kind]
        constants = dict(BLOCK_M=t.BLOCK_M, BLOCK_N=t.BLOCK_N, TMA=t.TMA)
    source = specialised(job, t, constants | dict(D=D, D_PAD=D, tanh_scale=None))
    out = triton.compile(ASTSource(*source), target=GPUTarget("cuda", int(job.arch[3:]), 32),
                         options=dict(num_warps=t.num_warps, num_stages=t.num_stages))
    ptx = out.asm["ptx"]
    tensor_core = next((core for core in ("tcgen05", "wgmma", "mma") if f"{core}.mma" in ptx or f"{core}.sync" in ptx),
                       "none")
    return dict(job._asdict(), name=str(job), **t._asdict(), shared=out.metadata.shared, tensor_core=tensor_core,
                **resources(out.asm["cubin"]))


def specialised(job: Job, t, constants: dict) -> tuple:
    """(kernel, signature, constants, attributes) for ASTSource."""
    from flash_attn2 import backward, forward
    kernel = {"forward": forward.forward_kernel, "dkdv": backward.dkdv_kernel, "dq": backward.dq_kernel,
              "delta": backward.delta_kernel}[job.kind]
    if not job.vectors:
        constants |= {name: None for name in kernel.arg_names if name.endswith(("lo_ptr", "hi_ptr"))}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    rows = t.BLOCK_M if job.kind == "dkdv" else t.BLOCK_N
    signature = {name: argument_type(name, job, rows, t.TMA, constants) for name in kernel.arg_names}
    attrs = {}
    for n, (name, kind) in enumerate(signature.items()):
        if name.endswith("strides"):
            attrs |= {(n, axis): [["tt.divisibility", 16]] for axis in range(3)}
        elif kind.startswith("*") or name in ("Tq", "Tk", "H", "H_kv"):
            attrs[(n,)] = [["tt.divisibility", 16]]
    return kernel, signature, constants, attrs


def argument_type(name: str, job: Job, rows: int, tma: bool, constants: dict):
    if name in constants:
        return "constexpr"
    if name.endswith("strides"):
        return ("i32",) * 3
    if name in ("lse_ptr", "dlse_ptr", "delta_ptr"):
        return "*fp32"
    if name.endswith(("lo_ptr", "hi_ptr")):
        return "*i32"
    if name.endswith("_src") and tma:
        return f"tensordesc<{job.dtype}[1, {rows}, 1, {job.head_dim}]>"
    if name.endswith(("_src", "_ptr")):
        return f"*{job.dtype}"
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


def print_table(measure, jobs: list) -> None:
    sys.path.insert(0, str(HERE.parent.parent))
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for row in pool.map(measure, jobs):
            print(json.dumps(row), flush=True)


def table_of(script: Path, job_type: type, jobs: list) -> dict:
    """What `script` prints of its jobs, compiled in a process of its own, without the interpreter."""
    compiling = subprocess.Popen([sys.executable, script], env=os.environ | {"TRITON_INTERPRET": "0"}, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = compiling.communicate()
    finally:
        if compiling.poll() is None:
            os.killpg(compiling.pid, signal.SIGKILL)        # its workers too
    assert compiling.returncode == 0, err[-3000:]
    rows = [json.loads(line) for line in out.splitlines()]
    table = {job_type(*(row[field] for field in job_type._fields)): row for row in rows}
    assert set(table) == set(jobs)
    return table


def faults(job: Job, row: dict) -> list[str]:
    """Shared memory beyond the card's, a stack beyond SPILLS, or a bf16 kernel without its tensor cores."""
    found = []
    shared = 163 * 1024 if job.dtype == "fp32" else SHARED[job.arch]        # float32 is for tests, on the large cards
    if row["shared"] > shared:
        found.append(f"{row['shared']} bytes of shared memory, {job.arch} has {shared}")
    from flash_attn2.tiles import architecture
    allowed = SPILLS.get((architecture(*capability(job.arch)), job.head_dim, job.kind), 0)
    if job.dtype == "bf16" and row["stack"] > allowed:
        found.append(f"{row['stack']} bytes of stack, {allowed} allowed")
    core = TENSOR_CORE.get(job.arch, "mma")
    if job.dtype == "bf16" and job.kind != "delta" and row["tensor_core"] != core:
        found.append(f"tensor cores: {row['tensor_core']}, not {core}")
    return found


@pytest.mark.timeout(1800)     # three minutes of two quiet cores; a busy machine takes its time
def test_every_tile_fits():
    """One test, so that parallel runs compile once. Triton's cache makes a second run quick."""
    table = table_of(HERE, Job, jobs())
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
    from flash_attn2.tiles import TILES, architecture
    assert {(architecture(*capability(job.arch)), job.head_dim) for job in jobs()} == set(TILES)
    for passes in TILES.values():
        assert set(passes) == {"forward", "dkdv", "dq"}


if __name__ == "__main__":
    print_table(measure, jobs())
