"""What a run tells: metrics.jsonl (the truth), the terminal and W&B (views of it), env.json.

A row is a flat dict with `step`, `tokens` (of the whole run so far) and slash-named metrics.
"""
import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SECTIONS = ("train", "val", "perf", "memory")
PACKAGES = ("torch", "triton", "numpy", "wandb")
NON_FINITE = ("nan", "inf", "-inf")             # JSON has no such numbers: rows hold them as these strings
WANDB_MODES = ("online", "offline", "disabled", "shared")
DIFF_LIMIT = 100_000                                                    # characters of `git diff` in env.json


class Metrics:
    """Owner of a run's metrics.jsonl, its lines on the terminal and its W&B run; on rank 0 only.

    folder: the run folder. config: the config.Config used. wandb_id: of the W&B run to go on with.
    resume_step: step of the checkpoint the run goes on from: later rows are cut off; None: the run is
    new. extra_config: plain values that W&B shows beside the config. The checkpoint keeps .wandb_id (None:
    there was no W&B run yet). ValueError: a new run over rows of another, or a damaged file."""

    def __init__(self, folder: Path, config, *, wandb_id: str | None = None, resume_step: int | None = None,
                 extra_config: dict | None = None):
        self.folder, self.config, self.wandb_id = Path(folder), config, wandb_id
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        if resume_step is not None:
            cut_rows(path, resume_step)
        elif path.exists() and path.stat().st_size:
            raise ValueError(f"{path} holds rows of another run: resume that one or choose a new run.dir")
        self._file = open(path, "a")
        self._run, self._told = None, set()
        self._try("W&B is off", lambda: self._start_wandb(extra_config or {}))

    def log(self, row: dict) -> None:
        """Append one row to metrics.jsonl, then show it. ValueError: no step or no tokens in it."""
        if not {"step", "tokens"} <= row.keys():
            raise ValueError(f"a row needs step and tokens, this one has {sorted(row)}")
        row = {name: value.item() if hasattr(value, "item") else value for name, value in row.items()}
        self._file.write(_line(row))
        self._file.flush()
        for line in console_lines(row, self.config.train.max_steps):
            print(line, flush=True)
        if self._run:
            self._try("W&B misses rows", lambda: self._run.log(row))

    def close(self, exit_code: int = 0) -> None:
        """Close the file and end the W&B run, which waits for uploads for at most a minute."""
        self._file.close()
        if self._run:
            run, self._run = self._run, None
            self._try("W&B did not finish", lambda: run.finish(exit_code=exit_code))

    def _start_wandb(self, extra_config: dict) -> None:
        asked = self.config.wandb.mode
        said = os.environ.get("WANDB_MODE", "")
        if said and said not in WANDB_MODES:
            print(f"WANDB_MODE={said!r} is none of {', '.join(WANDB_MODES)}: taken as offline", flush=True)
            os.environ["WANDB_MODE"] = said = "offline"
        elif not said:
            os.environ.pop("WANDB_MODE", None)              # W&B takes an empty one for an error
        mode = said if asked == "auto" else asked
        if mode == "disabled":
            return
        import wandb
        wandb.setup(settings=wandb.Settings(silent=True))
        # Without a key init waits for ever at a terminal and raises elsewhere; this login asks nobody.
        if mode != "offline" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
        settings = wandb.Settings(silent=True, init_timeout=30, finish_timeout=60, console="wrap")
        w, name = self.config.wandb, self.config.run.name or self.folder.name
        options = dict(dir=str(self.folder), project=w.project, group=w.group or None, tags=list(w.tags),
                       name=name, id=self.wandb_id, resume="allow" if self.wandb_id else None,
                       config=dataclasses.asdict(self.config) | extra_config, settings=settings)
        try:
            self._run = wandb.init(mode=mode or "online", **options)
        except Exception as error:
            if mode == "offline":
                raise
            print(f"W&B online failed, going on offline: {_one_line(error)}", flush=True)
            self._run = wandb.init(mode="offline", **options)
        self.wandb_id = self._run.id
        self._run.define_metric("tokens", hidden=True)
        for section in SECTIONS:
            self._run.define_metric(f"{section}/*", step_metric="tokens")
        where = f"offline: {Path(self._run.dir).parent}" if self._run.offline else self._run.url
        print(f"W&B {where}", flush=True)

    def _try(self, consequence: str, call: Callable) -> None:
        """W&B must never stop a run: any failure of `call` is one line, the first time it happens."""
        try:
            call()
        except Exception as error:
            if consequence not in self._told:
                print(f"{consequence}: {_one_line(error)}", flush=True)
            self._told.add(consequence)


def read_rows(path: Path) -> list[dict]:
    """The rows of a metrics.jsonl, NaN and infinities as floats again; a torn last line (a kill) is left out.

    ValueError, with the line's number: another line is no JSON object."""
    lines = Path(path).read_text(errors="replace").splitlines(keepends=True)
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or not all(isinstance(row.get(key), int) for key in ("step", "tokens")):
                raise ValueError("no row")
        except ValueError as error:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path}, line {number} is not a row (a JSON object with step and tokens)") from error
        rows.append({name: float(value) if value in NON_FINITE else value for name, value in row.items()})
    return rows


def write_whole(path: Path, text: str) -> None:
    """The old file or the new one, whenever the power goes."""
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def cut_rows(path: Path, step: int) -> None:
    """Drop the rows after `step`, atomically: a kill leaves the old file or the new. No file: no change."""
    if not path.exists():
        return
    write_whole(path, "".join(_line(row) for row in read_rows(path) if row["step"] <= step))


def console_lines(row: dict, max_steps: int) -> list[str]:
    """A row's lines for the terminal, at most 80 columns: one for train/loss, one for val/loss; else none.

    The ETA counts the training of the steps left at this row's perf/step_ms, not their evaluations."""
    place, lines = f"{row['step']}/{max_steps}", []
    if "train/loss" in row:
        parts = [f"step {place}", f"loss {_short(row['train/loss'])}"]
        if "perf/tokens_per_s" in row:
            parts.append(f"{_count(row['perf/tokens_per_s'])} tok/s")
        if "perf/mfu" in row:
            parts.append(f"MFU {row['perf/mfu']:.1%}")
        if "perf/step_ms" in row:
            seconds = (max_steps - row["step"]) * row["perf/step_ms"] / 1000
            parts.append(f"ETA {_duration(seconds)}")
        if "train/lr" in row and len("  ".join(parts)) <= 80 - len("  lr 6.00e-04"):
            parts.insert(2, f"lr {row['train/lr']:.2e}")
        lines.append("  ".join(parts))
    if "val/loss" in row:
        lines.append(f"eval {place}  val/loss {_short(row['val/loss'])}")
    return lines


def environment(device_name: str, dtype: str, peak: tuple[float | None, str],
                repo: Path | None = None) -> dict:
    """What env.json holds: the code (commit, diff), versions, command, start, device and its peak.

    peak: what flops.peak_tflops() returned (TFLOP/s, source). repo: a folder of the code. commit and diff are
    None without git or outside a repository; diff is against the commit, without untracked files, cut
    when long. Versions of packages that are not installed are None."""
    repo = repo or Path(__file__).parent
    diff = _git(repo, "diff", "--no-color", "--no-ext-diff", "HEAD")
    if diff and len(diff) > DIFF_LIMIT:
        diff = diff[:DIFF_LIMIT] + f"\n[cut: {len(diff)} characters]\n"
    commit = _git(repo, "rev-parse", "HEAD")
    return {"started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": sys.argv, "commit": commit and commit.strip(), "diff": diff,
            "python": platform.python_version(), **{name: _version(name) for name in PACKAGES},
            "device": device_name, "dtype": dtype, "peak_tflops": peak[0], "peak_source": peak[1]}


def _git(repo: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(repo), *arguments],
                              capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _line(row: dict) -> str:
    spelt = {name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
             for name, value in row.items()}
    return json.dumps(spelt, allow_nan=False) + "\n"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _short(loss: float) -> str:
    return f"{loss:.4f}" if not math.isfinite(loss) or abs(loss) < 1e4 else f"{loss:.3e}"


def _count(number: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}" if number < 999.5 * size else f"{number / size:.0f}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s"
