"""The trainer's speed and memory on the card at hand, row by row, against nanoGPT's own loop: python speed.py [--list]

Each row is a run in a process of its own. Its speed is the median over its steps without the first three, which no run
measures, and the last, whose kernels are recorded. A row of one step has no other: its speed is that of its kernels'
summed time, without the gaps between them. Rows of nanoGPT need --peer: they train the GPT of its unchanged model.py as
its train.py does, on random tokens, by the same clock and count of FLOPs. They come first, and each later row is set
beside its own: "x" is ours over theirs. A row that fails is a line that says why, and exit code 1.
"""
import argparse
import contextlib
import dataclasses
import difflib
import importlib.util
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import torch

import config as configs
from model import GPT
from runtime import flops, metrics, profile

ROOT = Path(__file__).resolve().parent
SMALL, LARGE, DEBUG = "configs/peer_gpt2_124m.py", "configs/peer_gpt2_1300m.py", "configs/debug.py"
K, SELECTIVE, ONE_BATCH = 1024, {"train.checkpointing": "selective"}, {"train.tokens_per_step": 0}
NO_MEMORY = "out of memory"
PEER_VOCAB = 50304          # nanoGPT's, to which the peer configs pad theirs


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    config: str
    overrides: dict         # {"section.name": value}, no booleans
    steps: int = 12         # the first three and the last among them
    offload: bool = False
    beside: str = ""        # the row of nanoGPT's loop that it is set beside
    peer: bool = False      # nanoGPT's loop
    may_run_out: bool = False       # of memory: that is its result


def peers(name: str, config: str, k: int, steps: int = 12, may_run_out: bool = False) -> list[Row]:
    """nanoGPT's row on rows of k * 1024 tokens, ours, and ours with selective checkpointing."""
    size, theirs = {"data.seq_len": k * K}, f"nanogpt_{name}"
    return [Row(theirs, config, size, steps, peer=True, may_run_out=may_run_out),
            Row(f"peer_{name}", config, size, steps, beside=theirs),
            Row(f"peer_{name}_selective", config, size | SELECTIVE, steps, beside=theirs)]


ROWS = [
    *peers("1300m_16k", LARGE, 16),
    *peers("1300m_64k", LARGE, 64, steps=9, may_run_out=True),
    *peers("124m_16k", SMALL, 16),
    *peers("124m_64k", SMALL, 64),
    *peers("124m_128k", SMALL, 128, steps=8),
    Row("1300m_128k", LARGE, {"data.seq_len": 128 * K, **SELECTIVE}, steps=9),
    Row("2700m_8k", LARGE, {"data.seq_len": 8 * K, "data.batch": 4, "model.n_layer": 32, "model.d_model": 2560,
                            "model.n_head": 20}),
    Row("1300m_512k", LARGE, {"data.seq_len": 512 * K, **SELECTIVE}, steps=1, offload=True),
    Row("124m_1m", SMALL, {"data.seq_len": K * K, **SELECTIVE}, steps=1),
    Row("gpt2_124m_32k", "configs/gpt2_124m_32k.py", ONE_BATCH, steps=24),      # as they stand: packed documents
    Row("gpt2_350m_64k", "configs/gpt2_350m_64k.py", ONE_BATCH),
    Row("llama_1300m_128k", "configs/llama_1300m_128k.py", ONE_BATCH, steps=9),
    Row("nanogpt_debug", DEBUG, {}, steps=6, peer=True),        # these two run on a CPU too, and never unasked
    Row("debug", DEBUG, {}, steps=6, beside="nanogpt_debug"),
]
HEADER = ["| row | tok/s (range) | MFU | MFU full | peak GiB | attention ms | matmul | loss | optimizer | rest | "
          "x tok/s | x GiB |", "|" + " --- |" * 12]


def main(argv: list[str]) -> int:
    a = parse(argv)
    if a.list:
        for r in ROWS:
            print(f"{r.name:26} {r.config:28} {r.overrides}{' offload' * r.offload}{' needs --peer' * r.peer}")
        return 0
    if a.peer and not (a.peer / "model.py").is_file():
        raise ValueError(f"--peer {a.peer} must be a folder of nanoGPT: it has no model.py")
    if not a.limit > 0:
        raise ValueError(f"--limit {a.limit} must be a number of seconds above 0")
    rows = chosen(a.rows, bool(a.peer))
    if not torch.cuda.is_available() and any(r.config != DEBUG for r in rows):
        raise ValueError("speed.py needs a GPU; on a CPU only --rows debug,nanogpt_debug run")
    if a.child:
        return train_peer(rows[0], a.peer, a.child)
    return measure(rows, a)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="", metavar="NAME,NAME...", help="these only; nanoGPT's run first")
    parser.add_argument("--list", action="store_true", help="name the rows and stop")
    parser.add_argument("--peer", type=lambda path: Path(path).resolve(), metavar="PATH", help="folder of nanoGPT")
    parser.add_argument("--out", type=Path, default=Path("runs/speed.md"), metavar="FILE",
                        help="the table is appended here, the runs and their kernels.md stay beside it (runs/speed.md)")
    parser.add_argument("--limit", type=float, default=240, metavar="SECONDS", help="of a row (240)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)       # a row of nanoGPT, here, into this folder
    return parser.parse_args(argv)


def chosen(names: str, with_peer: bool) -> list[Row]:
    """Rows by name, or all that run unasked. ValueError: no such row, or one that needs --peer."""
    known, names = {r.name: r for r in ROWS}, dict.fromkeys(filter(None, names.split(",")))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"no row is called {name!r}; nearest: {near}; speed.py --list names them all")
        if known[name].peer and not with_peer:
            raise ValueError(f"row {name} needs --peer PATH, a folder with nanoGPT's model.py")
    rows = [known[name] for name in names] or [r for r in ROWS if r.config != DEBUG and (with_peer or not r.peer)]
    return sorted(rows, key=lambda r: not r.peer)


def config_of(r: Row) -> configs.Config:
    return configs.load(ROOT / r.config, flags(r.overrides))


def flags(overrides: dict) -> list[str]:
    return [word for name, value in overrides.items() for word in ("--" + name.replace("_", "-"), str(value))]


def command(r: Row, folder: Path, peer: Path | None) -> list[str]:
    if r.peer:
        return [sys.executable, "speed.py", "--rows", r.name, "--peer", str(peer), "--child", str(folder)]
    always = {"run.dir": folder, "wandb.mode": "disabled", "log.every": 1, "train.max_steps": r.steps,
              "train.profile_step": r.steps}
    switches = ["--train.no-save", "--train.no-evaluate", *["--train.offload"] * r.offload]
    return [sys.executable, "train.py", r.config, *flags(r.overrides | always), *switches]


def measure(rows: list[Row], a: argparse.Namespace) -> int:
    """Runs and reports row by row: what is told stays, whatever comes later. -> the exit code."""
    env = metrics.environment(torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "", (None, ""))
    folder = a.out.resolve().with_suffix(".runs") / re.sub(r"\D", "", env["started"][:19])
    folder.mkdir(parents=True)
    what = f"{env['started'][:16]}, {(env['commit'] or 'no commit')[:9]}{'-dirty' * bool(env['diff'])}, {env['device']}"
    tell(a.out, f"### {what}, torch {env['torch']}, triton {env['triton']}\n", *HEADER)
    results, failed = {}, False
    for r in rows:
        try:
            run(command(r, folder / r.name, a.peer), folder / r.name, a.limit)
            results[r.name] = x = read(r, folder / r.name)
            tell(a.out, line(r.name, x, results.get(r.beside)))
            (folder / r.name / "kernels.md").write_text(profile.kernel_table(folder / r.name) + "\n")
        except (ValueError, OSError) as error:
            failed |= not (r.may_run_out and str(error) == NO_MEMORY)
            tell(a.out, f"| {r.name} | {' '.join(str(error).replace('|', '/').split())[:200]} |" + " |" * 10)
    tell(a.out, "")
    return int(failed)


def tell(out: Path, *lines: str) -> None:
    print(*lines, sep="\n", flush=True)
    with open(out, "a") as file:
        print(*lines, sep="\n", file=file)


def run(words: list[str], folder: Path, limit_s: float) -> None:
    """A row to its end; what it says goes to FOLDER.out and FOLDER.err. ValueError: it failed, or took too long."""
    said = folder.with_name(folder.name + ".err")
    with open(said.with_suffix(".out"), "wb") as out, open(said, "wb") as err:
        process = subprocess.Popen(words, cwd=ROOT, stdout=out, stderr=err, start_new_session=True)
        try:
            code = process.wait(limit_s)
        except BaseException as stop:                           # ctrl-C too must not leave a GPU busy
            os.killpg(process.pid, signal.SIGKILL)              # its compilers with it
            process.wait()
            if isinstance(stop, subprocess.TimeoutExpired):
                raise ValueError(f"killed after {limit_s:g} s") from None
            raise
    if code:                            # libraries may complain after the line that names the error
        lines = [f"exit code {code}", *said.read_text(errors="replace").strip().splitlines()]
        last = ([text for text in lines if re.match(r"error:|[\w.]*(Error|Exception)\b", text)] or lines)[-1]
        raise ValueError(NO_MEMORY if "OutOfMemoryError" in last or "out of GPU memory" in last else last)


def read(r: Row, folder: Path) -> dict:
    """A finished row's medians (None: unknown here), each step's speed, ms by kind. ValueError: what it lacks."""
    steps = [x for x in metrics.read_rows(folder / "metrics.jsonl") if "train/loss" in x]
    kernels = json.loads((folder / "kernels.json").read_text())
    if len(steps) != r.steps or not all(math.isfinite(x["train/loss"]) for x in steps):
        raise ValueError(f"{r.steps} finite losses expected, found {[x['train/loss'] for x in steps]}")
    timed = [x for x in steps[:-1] if "perf/tokens_per_s" in x]
    speeds = [x["perf/tokens_per_s"] for x in timed]
    if r.steps == 1:
        speed = 1000 * steps[0]["tokens"] / kernels["step_ms"]
        peak = json.loads((folder / "env.json").read_text())["peak_tflops"] or math.inf
        shares = {name: count * speed / 1e12 / peak for name, count in model_flops(config_of(r)).items()}
        timed = [{"perf/tokens_per_s": speed, **shares}]
    middle = {name: statistics.median(values) if (values := [x[name] for x in timed if x.get(name)]) else None
              for name in ("perf/tokens_per_s", "perf/mfu", "perf/mfu_full")}
    gib = max((x["memory/peak_gib"] for x in steps if "memory/peak_gib" in x), default=None)
    return middle | {"speeds": speeds, "gib": gib, "kinds": kernels["kinds"]}


def model_flops(c: configs.Config) -> dict[str, float]:
    """FLOPs a token, as perf/mfu and perf/mfu_full count them, of one document a row and nanoGPT's vocabulary."""
    with torch.device("meta"):
        model = GPT(c.model, PEER_VOCAB, c.data.seq_len, None)
    return dict(zip(("perf/mfu", "perf/mfu_full"), flops.per_token(model, c.data.seq_len), strict=True))


def line(name: str, x: dict, theirs: dict | None) -> str:
    span = f"{min(x['speeds']):,.0f}-{max(x['speeds']):,.0f}" if x["speeds"] else "one step"
    ratios = [x[key] / theirs[key] if theirs and theirs[key] else None for key in ("perf/tokens_per_s", "gib")]
    numbers = [(x["perf/mfu"], ".1%"), (x["perf/mfu_full"], ".1%"), (x["gib"], ".1f"),
               *((x["kinds"][kind], ",.1f") for kind in profile.KINDS), *((ratio, ".2f") for ratio in ratios)]
    cells = ["-" if value is None else format(value, form) for value, form in numbers]
    return "| " + " | ".join([name, f"{x['perf/tokens_per_s']:,.0f} ({span})", *cells]) + " |"


def train_peer(r: Row, path: Path, folder: Path) -> int:
    """nanoGPT's training step on its own model.py, into a folder as train.py leaves it."""
    c, kind = config_of(r), "cuda" if torch.cuda.is_available() else "cpu"
    B, T, (exact, full) = c.data.batch, c.data.seq_len, model_flops(c).values()
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    nanogpt = sys.modules["nanogpt_model"] = importlib.util.module_from_spec(spec)      # its dataclass looks it up
    spec.loader.exec_module(nanogpt)
    torch.set_float32_matmul_precision("high")          # its TF32
    model = nanogpt.GPT(nanogpt.GPTConfig(block_size=T, vocab_size=PEER_VOCAB, n_layer=c.model.n_layer, dropout=0.0,
                                          n_head=c.model.n_head, n_embd=c.model.d_model, bias=False)).to(kind)
    optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=6e-4, betas=(0.9, 0.95), device_type=kind)
    compute = torch.compile(model) if kind == "cuda" else model
    x, y = torch.randint(PEER_VOCAB, (2, B, T), device=kind)
    peak = flops.peak_tflops(torch.cuda.get_device_name(), "bfloat16")[0] if kind == "cuda" else None
    clock = flops.Clock(peak_tflops=peak, full_flops_per_token=full, synchronize=getattr(torch, kind).synchronize)
    record = metrics.Metrics(folder, configs.change(c, wandb=dict(mode="disabled"), train=dict(max_steps=r.steps)))
    for step in range(1, r.steps + 1):
        with profile.recorded(folder) if step == r.steps else contextlib.nullcontext():
            clock.start()
            with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
                loss = compute(x, y)[1]     # its loop holds the logits through the next forward: this is in its favour
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            clock.stop(B * T, B * T * exact)
        memory = {"memory/peak_gib": torch.cuda.max_memory_allocated() / 2**30} if kind == "cuda" else {}
        record.log({"step": step, "tokens": step * B * T, **clock.rates(), "train/loss": loss.item(), **memory})
    record.close()
    return 0


if __name__ == "__main__":
    with configs.one_line_errors():
        sys.exit(main(sys.argv[1:]))
