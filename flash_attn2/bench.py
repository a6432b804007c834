"""Speed, memory and error of attention on one GPU: ours beside torch's.

bf16, d_model 2048, 32k tokens in all, or one row where rows are longer. Contenders take turns round by round, so that
the card's clocks are the same for all. What the numbers mean stands above the table, and in the JSON record.
"""
import argparse
import gc
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from . import bench_report, dispatch
from .bench_cases import CONTENDERS, D_MODEL, DTYPE, SEED, SETTINGS, TOKENS, WINDOW, Case, contender, errors, exact_gqa

SWEEP = tuple(512 << n for n in range(9))
LENGTHS = {"causal": (2048, 8192, 32768, 131072), "full": (2048, 32768), "window": (32768, 131072),
           "documents": (32768, 131072)}
SLOW = {"flex": (8192, 32768), "sdpa:efficient": SWEEP[:7], "sdpa": SWEEP[:7]}      # at these alone, unless --T asks
HEAD_DIMS, ROUNDS = (128, 64), 10
CALLS, ROUND_MS = 10, 10    # a round times up to CALLS calls in a row, as many as fit into ROUND_MS, one at least
FLUSH_BYTES, FLUSHES = 2**28, 16    # more than any L2 cache; 4 GiB written in all: about a millisecond


class Contest:
    """The contenders of one case on the same inputs. rows: what was measured of each, or why it was not."""

    def __init__(self, case: Case, device: torch.device):
        self.case, self.device, self.shared = case, device, case.row(device)
        self.rows: dict[str, dict] = {}
        self.running: dict[str, tuple[Callable, int]] = {}          # what to call, and how often in a round

    def prepare(self) -> None:
        """Inputs, and what float64 makes of the last head of the last row: there a wrong stride or offset shows."""
        case = self.case
        generator = torch.Generator(self.device).manual_seed(SEED)
        self.q, self.k, self.v, self.do = (
            torch.randn(case.B, case.T, heads, case.head_dim, device=self.device, dtype=DTYPE, generator=generator)
            for heads in (case.H, case.H_kv, case.H_kv, case.H))
        self.want = exact_gqa(self.q[-1, :, -case.group:], last_head(self.k), last_head(self.v),
                                self.do[-1, :, -case.group:], *case.bounds(self.device))
        for x in (self.q, self.k, self.v):
            x.requires_grad_()
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.device)

    def attempt(self, name: str, step: Callable, *arguments) -> None:
        """step(*arguments), or the contender is out and its row says why."""
        try:
            step(*arguments)
            return
        except torch.OutOfMemoryError:
            self.skip(name, "out of memory")
        except Exception as error:      # of any kind: a compiler's, a driver's
            self.skip(name, str(error) or type(error).__name__)
        gc.collect()                    # what the failed call held, before the next contender counts what is free
        torch.cuda.empty_cache()

    def skip(self, name: str, reason: str) -> None:
        self.running.pop(name, None)
        self.rows[name] = {**self.shared, "contender": name, "skipped": textwrap.shorten(reason, 160)}

    def enter(self, name: str) -> None:
        """Builds, compiles and warms a contender up; takes its memory, its error, and how long a call is."""
        torch.cuda.empty_cache()
        if name == "flex":
            torch.compiler.reset()      # or a second length would be compiled for any length
        before = torch.cuda.memory_allocated()
        attend = contender(name, self.case, self.device, free_bytes())
        self.gradients(attend(self.q, self.k, self.v))
        torch.cuda.reset_peak_memory_stats()
        o = attend(self.q, self.k, self.v)
        got = dict(zip(self.want, map(last_head, (o, *self.gradients(o))), strict=True))
        peak = torch.cuda.max_memory_allocated() - before
        self.rows[name] = {**self.shared, "contender": name, "peak_gib": peak / 2**30,
                           "error": errors(got, self.want), "ms": {"forward": [], "backward": []}}
        self.rows[name] |= {"kernels": dispatch.which(self.q, self.k, self.v)} if name == "flash_attn2" else {}
        self.running[name] = attend, 1
        del o, got
        ms = sum(self.round(name))
        self.running[name] = attend, min(CALLS, max(1, int(ROUND_MS / ms)))

    def gradients(self, o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, (self.q, self.k, self.v), self.do)

    def round(self, name: str, keep: bool = False) -> tuple[float, float]:
        """Milliseconds of one forward and one backward, each the mean of some calls in a row."""
        attend, calls = self.running[name]
        outputs = []
        ms = (milliseconds(lambda: outputs.append(attend(self.q, self.k, self.v)), calls, self.flush),
              milliseconds(lambda: self.gradients(outputs.pop()), calls, self.flush))
        if keep:
            for times, one in zip(self.rows[name]["ms"].values(), ms, strict=True):
                times.append(one)
        return ms


def last_head(x: Tensor) -> Tensor:
    return x.detach()[-1, :, -1]


def milliseconds(call: Callable, calls: int, flush: Tensor) -> float:
    """Of one call, the mean of `calls` in a row. Clearing `flush` empties the L2 cache; doing it for a millisecond lets
    the CPU, which launches slower than a small kernel runs, get ahead: the time is the GPU's alone."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(FLUSHES):
        flush.zero_()
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def compare(case: Case, names: list[str], rounds: int, device: torch.device) -> list[dict]:
    """The row of each contender: measured in turns, or with the reason why not."""
    contest = Contest(case, device)
    try:
        contest.prepare()
    except torch.OutOfMemoryError:
        for name in names:
            contest.skip(name, "out of memory for the inputs and float64")
        return list(contest.rows.values())
    for name in names:
        contest.attempt(name, contest.enter, name)
    for number in range(rounds + 1):
        for name in tuple(contest.running):
            contest.attempt(name, contest.round, name, number > 0)      # round 0 fills the allocator
    for name in contest.running:
        bench_report.complete(contest.rows[name])
    return list(contest.rows.values())


def measure(args: argparse.Namespace, record: dict, device: torch.device) -> Iterator[list[dict]]:
    """Measures what was asked for, shape by shape, into the record and, where wanted, its file."""
    for case in cases(args):
        names = contenders(args, case.mask)
        slow = [name for name in names if not args.T and case.T not in SLOW.get(name, (case.T,))]
        ready = [name for name in names if name not in slow]
        rows = compare(case, ready, args.rounds, device) if ready else []
        rows += [{**case.row(device), "contender": name, "skipped": "slow: measured where --T names the length"}
                 for name in slow]
        record["rows"] += rows
        if args.json:
            bench_report.save(record, args.json)
        yield rows


def cases(args: argparse.Namespace) -> list[Case]:
    def lengths(mask: str) -> tuple[int, ...]:
        if args.sweep:
            return tuple(T for T in SWEEP if T > WINDOW or mask in ("causal", "full"))
        return args.T or LENGTHS[mask]
    return [Case(mask, D, T, args.tokens, args.d_model, args.group) for mask in args.mask if contenders(args, mask)
            for D in args.head_dim or HEAD_DIMS for T in lengths(mask)]


def select(args: argparse.Namespace, rows: list[dict]) -> list[dict]:
    """The rows of a kept record that the options ask for."""
    return [row for row in rows if row["mask"] in args.mask and row["contender"] in contenders(args, row["mask"])
            and (not args.T or row["T"] in args.T) and (not args.head_dim or row["head_dim"] in args.head_dim)]


def contenders(args: argparse.Namespace, mask: str) -> list[str]:
    return [name for name in CONTENDERS[mask] if any(fnmatch(name, pattern) for pattern in args.only)]


def parse(argv: list[str]) -> argparse.Namespace:
    known = sorted({name for names in CONTENDERS.values() for name in names})
    parser = argparse.ArgumentParser(prog="python -m flash_attn2.bench", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=["*"], metavar="NAME,...",
                        help=f"contenders, by name or pattern: flash_attn2,'sdpa:*'; there are {', '.join(known)}")
    parser.add_argument("--mask", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--head-dim", nargs="+", type=int, default=(), metavar="D", help="default: 128 64")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--T", nargs="+", type=int, default=(), help="row lengths; slow contenders run at all of them")
    lengths.add_argument("--sweep", action="store_true", help="every power of two from 512 to 131072")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"in all, or one row of T; default: {TOKENS}")
    parser.add_argument("--d-model", type=int, default=D_MODEL, help=f"of all query heads; default: {D_MODEL}")
    parser.add_argument("--group", type=int, default=1, help="query heads that share a key head; default: 1")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default: {ROUNDS}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the record: every round of every row")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw TFLOP/s over T (needs matplotlib)")
    parser.add_argument("--from", type=Path, metavar="FILE", dest="source",
                        help="show a kept record, or what the options above select of it, and measure nothing")
    args = parser.parse_args(argv)
    for pattern in args.only:
        if not any(fnmatch(name, pattern) for name in known):
            parser.error(f"--only: no contender is called {pattern!r}; known: {', '.join(known)}")
    if not any(contenders(args, mask) for mask in args.mask):
        parser.error(f"--only: none of these contenders takes the mask {' or '.join(args.mask)}")
    if min((args.rounds, args.tokens, args.d_model, args.group, *args.T, *args.head_dim)) < 1:
        parser.error("--rounds, --tokens, --d-model, --group, --T and --head-dim must be at least 1")
    if any(args.d_model % (D * args.group) for D in args.head_dim or HEAD_DIMS):
        parser.error(f"--d-model {args.d_model} must be a multiple of --head-dim times --group {args.group}")
    for path in filter(None, (args.json, args.plot)):
        if not path.absolute().parent.is_dir() or path.is_dir():
            parser.error(f"{path}: there is no folder {path.parent}, or this is one itself")
    if args.source and (args.json or args.sweep):
        parser.error("--from measures nothing: no --json and no --sweep with it")
    return args


def start(args: argparse.Namespace) -> tuple[dict, Iterator[list[dict]]]:
    """A record and its shapes, kept or measured one by one as they are read. ValueError: what the user can mend."""
    if args.plot:
        bench_report.check_plot(args.plot)
    if args.source:
        record = bench_report.load(args.source)
        record["rows"] = select(args, record["rows"])
        if not record["rows"]:
            raise ValueError(f"{args.source} has no rows of what the options select")
        return record, bench_report.shapes(record["rows"])
    if not torch.cuda.is_available():
        raise ValueError("the benchmark needs an NVIDIA GPU; --from FILE shows a kept record without one")
    device = torch.device("cuda")
    record = bench_report.new_record(device, **SETTINGS, d_model=args.d_model, group=args.group, tokens=args.tokens,
                                     rounds=args.rounds)
    return record, measure(args, record, device)


def main(argv: list[str]) -> None:
    args = parse(argv)
    try:
        record, shapes = start(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    with warnings.catch_warnings(action="ignore"):      # torch's on kernels it cannot take: they have their line
        for line in chain(bench_report.head(record), bench_report.table(record, shapes)):
            print(line, flush=True)
    if args.plot:
        if not any("tflops" in row for row in record["rows"]):
            sys.exit("error: nothing was measured, so there is nothing to plot")
        bench_report.plot(record, args.plot)
        print(f"plot: {args.plot}")


if __name__ == "__main__":
    main(sys.argv[1:])
