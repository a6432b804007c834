"""What the benchmark measured: rates from times, a table for the terminal, a JSON record, a picture."""
import json
import math
import platform
import statistics
import subprocess
from collections.abc import Iterable, Iterator
from datetime import datetime
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import torch
import triton

FORMAT = "flash_attn2.bench 1"
BASELINE = ("sdpa:flash", "varlen_attn")        # both are torch's FlashAttention-2; a shape has one of them
PASSES = ("forward", "backward")
CONVENTIONS = {
    "ms": "of one call, by round; a round is the mean of a few calls in a row, contenders take turns round by round",
    "pairs": "(query, key) pairs that attend, in all rows of the batch, of one head",
    "tflops": "of median_ms; forward 4 H D pairs, backward 2.5 times that whatever a kernel really runs; "
              "both: 3.5 times that over the sum of the two medians",
    "error": "RMS of the difference from float64 over the RMS of float64, of the same bf16 inputs, in one head",
    "peak_gib": "most memory that one forward and backward held beyond q, k, v, do: mask, o, gradients, all between",
}
NAMES = {"full": "not causal", "window": "causal, window {window}", "documents": "causal, documents, mean {document}"}
COLUMNS = (f"{'T':>8}  {'':18} {'forward':>15} {'backward':>16} {'both':>5} {'/FA2':>5} {'GiB':>6} "
           f"{'err o':>8} {'err grad':>8}")
COLOURS = {"flash_attn2": "#d62728", "flash_attn2:triton": "#e8a0a0", "sdpa:flash": "#1f77b4", "sdpa": "#8c564b",
           "varlen_attn": "#17becf", "sdpa:cudnn": "#2ca02c", "sdpa:efficient": "#9467bd", "sdpa:math": "#7f7f7f",
           "flex": "#ff7f0e"}


def complete(row: dict) -> None:
    """Adds to a measured row its medians and TFLOP/s; needs H, head_dim, pairs and ms, {pass: ms of each round}."""
    flops = 4 * row["H"] * row["head_dim"] * row["pairs"]
    row["median_ms"] = {name: statistics.median(row["ms"][name]) for name in PASSES}
    row["tflops"] = {"forward": flops / row["median_ms"]["forward"] / 1e9,
                     "backward": 2.5 * flops / row["median_ms"]["backward"] / 1e9,
                     "both": 3.5 * flops / sum(row["median_ms"].values()) / 1e9}


def rates(row: dict, name: str) -> tuple[float, float, float]:
    """TFLOP/s of a pass in the median round, the slowest and the fastest."""
    rate, times = row["tflops"][name], row["ms"][name]
    return rate, *(rate * row["median_ms"][name] / t for t in (max(times), min(times)))


def new_record(device: torch.device, **settings) -> dict:
    """The record of a run on `device`, without rows yet; settings are what every row shares."""
    return {"format": FORMAT, "date": datetime.now().astimezone().isoformat(timespec="seconds"), "commit": commit(),
            "gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "python": platform.python_version(),
            "conventions": CONVENTIONS, **settings, "rows": []}


def commit() -> str | None:
    """The commit of this file's repository, -dirty with changes; None where git does not know this file."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True,
                              check=True).stdout.strip()
    try:
        return git("describe", "--always", "--dirty") if git("ls-files", Path(__file__).name) else None
    except (OSError, subprocess.CalledProcessError):
        return None


def save(record: dict, path: Path) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")


def load(path: Path) -> dict:
    """ValueError: no such file, or not a record of this benchmark."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ValueError(f"{path} is not a record of this benchmark ({FORMAT!r})")
    try:
        head(record), list(table(record, shapes(record["rows"])))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a whole record of this benchmark: {error!r}") from error
    return record


def shapes(rows: list[dict]) -> Iterator[list[dict]]:
    """The rows of each shape, all its contenders."""
    for _, shape in groupby(rows, key=lambda row: (row["mask"], row["head_dim"], row["T"])):
        yield list(shape)


def head(record: dict) -> list[str]:
    return [f"{setting(record)}, or one row",
            f"torch {record['torch']}, triton {record['triton']}, cuDNN {record['cudnn']}; "
            f"commit {record['commit'] or 'unknown'}; {record['date']}",
            "TFLOP/s of the pairs that attend, median [slowest-fastest], a backward counted as 2.5 forwards;",
            "both: from the two medians; /FA2: both, over torch's FlashAttention-2; GiB: peak beyond the",
            "inputs; err: RMS of the difference from float64 over RMS, grad: the worst of dq, dk, dv"]


def setting(record: dict) -> str:
    grouped = f", {record['group']} query heads a key head" if record.get("group", 1) > 1 else ""
    return f"{record['gpu']}, {record['dtype']}, d_model {record['d_model']}{grouped}, {record['tokens']} tokens in all"


def table(record: dict, measured: Iterable[list[dict]]) -> Iterator[str]:
    """The lines of a table, each shape's as soon as it is measured: a block for each mask and head width."""
    block, remarks = None, {}      # (contender, why or by which kernels): lengths
    for shape in measured:
        first = shape[0]
        if block != (first["mask"], first["head_dim"]):
            yield from notes(remarks)
            block, remarks = (first["mask"], first["head_dim"]), {}
            yield ""
            yield f"{block_name(record, *block)} ({first['H']} heads)"
            yield COLUMNS
        base = next((row["tflops"]["both"] for row in shape if row["contender"] in BASELINE and "tflops" in row), None)
        for row in shape:
            if "skipped" in row:
                remarks.setdefault((row["contender"], row["skipped"]), []).append(row["T"])
            else:
                yield line(row, base)
                if "kernels" in row:
                    remarks.setdefault((row["contender"], f"kernels: {row['kernels']}"), []).append(row["T"])
    yield from notes(remarks)


def block_name(record: dict, mask: str, head_dim: int) -> str:
    return f"{NAMES.get(mask, mask).format(**record)}, head width {head_dim}"


def line(row: dict, base: float | None) -> str:
    def spread(name: str) -> str:
        rate, slowest, fastest = rates(row, name)
        digits = 0 if slowest >= 20 else 1
        return f"{rate:.{digits}f} [{slowest:.{digits}f}-{fastest:.{digits}f}]"
    both, error = row["tflops"]["both"], row["error"]
    grad = max((error[name] for name in ("dq", "dk", "dv")), key=lambda e: math.inf if math.isnan(e) else e)
    return (f"{row['T']:>8}  {row['contender']:<18} {spread('forward'):>15} {spread('backward'):>16} {both:5.0f} "
            f"{f'{both / base:.2f}' if base else '':>5} {row['peak_gib']:6.2f} {error['o']:8.1e} {grad:8.1e}")


def notes(remarks: dict[tuple[str, str], list[int]]) -> Iterator[str]:
    for (contender, remark), lengths in remarks.items():
        yield f"  {contender}, T = {', '.join(map(str, lengths))}: {remark}"


def check_plot(path: Path) -> None:
    """ValueError: `plot` could not draw into `path`."""
    if path.suffix != ".png":
        raise ValueError(f"--plot {path} must end in .png")
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib, or nanolong[bench]")


def plot(record: dict, path: Path) -> None:
    """TFLOP/s over T: a row of panels for each mask, a column for each head width and pass. Some row has times."""
    from matplotlib.figure import Figure
    rows = [row for row in record["rows"] if "skipped" not in row]
    masks, widths = (list(dict.fromkeys(row[key] for row in rows)) for key in ("mask", "head_dim"))
    columns = [(width, name) for width in widths for name in PASSES]
    figure = Figure(figsize=(1 + 3.1 * len(columns), 1.5 + 2.7 * len(masks)), layout="constrained")
    panels = figure.subplots(len(masks), len(columns), sharex=True, sharey="row", squeeze=False)
    for mask, panels_of_mask in zip(masks, panels, strict=True):
        for (width, name), panel in zip(columns, panels_of_mask, strict=True):
            draw(panel, [row for row in rows if (row["mask"], row["head_dim"]) == (mask, width)], name)
            panel.set_title(f"{NAMES.get(mask, mask).format(**record)}\nhead width {width}, {name}", fontsize=9)
        panels_of_mask[0].set_ylabel("TFLOP/s")
        panels_of_mask[0].set_ylim(bottom=0)
    lengths = sorted({row["T"] for row in rows})
    for panel in panels[-1]:
        panel.set_xticks(lengths, [f"{T // 1024}k" if T % 1024 == 0 else str(T) for T in lengths])
        panel.set_xlabel("row length T, tokens")
    lines = {label: handle for panel in panels.flat
             for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    names = sorted(lines)
    figure.legend([lines[name] for name in names], names, loc="outside lower center", ncols=2 * len(columns),
                  frameon=False)
    figure.suptitle(f"{setting(record)}\ntorch {record['torch']}, commit {record['commit'] or 'unknown'}; "
                    "median, slowest to fastest round", fontsize=10)
    figure.savefig(path, dpi=120)


def draw(panel, rows: list[dict], name: str) -> None:
    """One panel: a line for each contender, ours on top, with bars from its slowest round to its fastest."""
    for contender in sorted({row["contender"] for row in rows}, reverse=True):
        mine = sorted((row for row in rows if row["contender"] == contender), key=lambda row: row["T"])
        T = [row["T"] for row in mine]
        rate, slowest, fastest = zip(*(rates(row, name) for row in mine), strict=True)
        style = dict(color=COLOURS.get(contender), linewidth=2.4 if contender == "flash_attn2" else 1.2)
        panel.plot(T, rate, label=contender, marker="o", markersize=4, **style)
        panel.vlines(T, slowest, fastest, **style)
    panel.set_xscale("log", base=2)
    panel.minorticks_off()
    panel.grid(alpha=0.3)
