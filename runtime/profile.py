"""Where a training step's time goes: its kernels, by what they are for, in a run folder's kernels.json.

Times are the device's own (a kernel's from start to end), so their sum leaves out the gaps between kernels. Without a
GPU they are those of torch's CPU operators, each without what it calls.
"""
import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from runtime.metrics import write_whole

KINDS = ("attention", "matmul", "loss", "optimizer", "rest")
LISTED = 0.001          # of the step: a smaller kernel counts in its kind and has no line of its own
SHOWN = 0.01

# Ours by their whole first name, torch's by a word: cutlass is in its attention too, so this is asked first.
ATTENTION = re.compile(r"^(forward|backward|prepare|finish|delta|dq|dkdv)_kernel"
                       r"|flash|fmha|sdpa|scaled_dot_product|flex_attention|cudnn_generated.*[fb]prop", re.I)
LOSS = re.compile(r"^softmax_kernel|logsumexp|log_?softmax|nll_?loss|cross_?entropy", re.I)
OPTIMIZER = re.compile(r"multi_tensor_apply|adam|FusedOptimizer|lpnorm", re.I)
MATMUL = re.compile(r"nvjet|gem[mv]|cutlass|splitKreduce|cublas|triton_tem_fused\w*mm|aten::(add|b|badd)?mm_?$", re.I)
# Inductor names a kernel after all that it fused or only moved: the layout of attention's operands is not attention.
POINTWISE = re.compile(r"^triton_(poi|red|per|for)_")


def kind(kernel_name: str) -> str:
    """attention, matmul (the head's too), loss (what lies between logits and nats), optimizer or rest, by the name."""
    if ATTENTION.search(kernel_name) and not POINTWISE.match(kernel_name):
        return "attention"
    for name, pattern in (("loss", LOSS), ("optimizer", OPTIMIZER), ("matmul", MATMUL)):
        if pattern.search(kernel_name):
            return name
    return "rest"


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Profiles what runs inside, one training step, into folder/kernels.json; where that fails there is no file.

    Recording slows the CPU down: a step inside says nothing about speed."""
    gpu = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    if gpu:
        torch.cuda.synchronize()            # what is still running belongs to the step before
    with torch.profiler.profile(activities=activities) as prof:
        yield
        if gpu:
            torch.cuda.synchronize()
    write_whole(Path(folder) / "kernels.json", json.dumps(summary(prof.key_averages()), indent=1) + "\n")


def summary(events) -> dict:
    """What kernels.json holds, of a profile's averages: all times in milliseconds."""
    kernels = sorted(times(events), key=lambda kernel: -kernel["ms"])
    total = sum(kernel["ms"] for kernel in kernels)
    kinds = {name: sum(kernel["ms"] for kernel in kernels if kernel["kind"] == name) for name in KINDS}
    return {"step_ms": total, "kinds": kinds, "kernels": [k for k in kernels if k["ms"] > LISTED * total]}


def times(events) -> list[dict]:
    """Name, calls, ms and kind of each kernel; where none ran on a GPU, of each operator on the CPU.

    An operator's device time is that of the kernels it started, and an annotation's that of all inside it: counting
    these too would count kernels twice."""
    events = [e for e in events if not getattr(e, "is_user_annotation", False)]
    on_gpu = [(e, e.self_device_time_total) for e in events if e.device_type == DeviceType.CUDA]
    measured = on_gpu or [(e, e.self_cpu_time_total) for e in events if e.device_type == DeviceType.CPU]
    return [{"name": e.key, "calls": e.count, "ms": us / 1000, "kind": kind(e.key)} for e, us in measured]


def kernel_table(folder: Path) -> str:
    """Markdown: the kernels above 1% of the step, the longest first."""
    found = json.loads((Path(folder) / "kernels.json").read_text())
    lines = ["| kernel | kind | calls | ms | share |", "| --- | --- | --- | --- | --- |"]
    for k in found["kernels"]:
        if k["ms"] > SHOWN * found["step_ms"]:
            name, share = k["name"].replace("|", "/"), k["ms"] / found["step_ms"]
            name = name if len(name) <= 70 else name[:67] + "..."
            lines.append(f"| `{name}` | {k['kind']} | {k['calls']} | {k['ms']:.2f} | {share:.1%} |")
    return "\n".join(lines)
