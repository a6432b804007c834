"""Speed of the backends on one GPU: python -m flash_attn2.bench

Causal, bf16, 32k tokens in all, d_model 2048. Contenders take turns round by round, so that the card's clocks are the
same for all. TFLOP/s: forward 4 B H T^2 D / 2, backward 2.5 times that, whatever a kernel really runs; medians
[slowest-fastest].
"""
import statistics
import sys
from collections.abc import Callable

import torch

from . import backends

CONTENDERS = ("flash_attn2", "sdpa:flash", "sdpa:cudnn")
ROUNDS, CALLS = 12, 3


def passes(name: str, q, k, v, do) -> tuple[Callable, Callable]:
    """The forward and the backward of a backend as calls without arguments."""
    attention = backends.build(name, q.device, q.dtype, q.shape[-1], plain=True)
    mask = attention.mask(q.shape[1], 0, None, q.device)
    o = attention(q, k, v, mask)
    return (lambda: attention(q, k, v, mask),
            lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True))


def milliseconds(call: Callable) -> float:
    """Of one call, the mean of CALLS in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / CALLS


def compare(T: int, D: int, device: torch.device) -> dict[str, tuple[list[float], list[float]]]:
    """Milliseconds of each round by backend: (forward, backward)."""
    q, k, v = (torch.randn(32768 // T, T, 2048 // D, D, device=device, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    calls = {name: passes(name, q, k, v, torch.randn_like(q)) for name in CONTENDERS}
    times = {name: ([], []) for name in CONTENDERS}
    for number in range(ROUNDS + 1):
        for name, pair in calls.items():
            for call, times_of_pass in zip(pair, times[name], strict=True):
                elapsed = milliseconds(call)
                if number:                      # round 0 compiles and warms up
                    times_of_pass.append(elapsed)
    return times


def row(name: str, T: int, D: int, forward: list[float], backward: list[float]) -> str:
    flops = 2 * (32768 // T) * (2048 // D) * T * T * D

    def spread(factor: float, times: list[float]) -> str:
        rates = (factor * flops / t / 1e9 for t in (statistics.median(times), max(times), min(times)))
        median, slowest, fastest = rates
        return f"{median:5.0f} [{slowest:.0f}-{fastest:.0f}]"
    both = 3.5 * flops / (statistics.median(forward) + statistics.median(backward)) / 1e9
    return f"hd{D:<4} {T:>7} {name:12} {spread(1, forward):>16} {spread(2.5, backward):>16} {both:6.0f}"


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("error: the benchmark needs an NVIDIA GPU")
    torch.manual_seed(0)
    device = torch.device("cuda")
    print(torch.cuda.get_device_name(device), "torch", torch.__version__)
    print(f"{'':6} {'T':>7} {'backend':12} {'forward':>16} {'backward':>16} {'both':>6}   TFLOP/s")
    for D in (128, 64):
        for T in (8192, 32768):
            for name, times in compare(T, D, device).items():
                print(row(name, T, D, *times), flush=True)


if __name__ == "__main__":
    main()
