"""Run folders side by side: python compare.py runs/A runs/B [runs/C ...]

Reads config.json, env.json and metrics.jsonl of each run and prints one table: what differs between the runs,
then what they reached. In brackets: for speed and memory the ratio to the first run, for losses the
difference. Speeds are medians over the rows that have one; memory is the largest peak.
"""
import argparse
import json
import statistics
import sys
from pathlib import Path

from config import one_line_errors
from runtime.metrics import read_rows

NOT_SHOWN = {"run.name", "run.dir", "env.started", "env.command", "env.diff", "env.peak_source",
             "env.resumed"}
ALWAYS_SHOWN = {"env.device", "env.dtype", "env.peak_tflops"}          # a speed says nothing without them
SPEEDS = {"tokens/s, median": ("perf/tokens_per_s", ",.0f"), "step ms, median": ("perf/step_ms", ",.1f"),
          "MFU, median": ("perf/mfu", ".2%"), "MFU full, median": ("perf/mfu_full", ".2%")}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="run folder")
    folders = parser.parse_args(argv).runs
    if len(folders) < 2:
        raise ValueError(f"compare needs at least two run folders, got {len(folders)}")
    print(table(folders))


def table(folders: list[Path]) -> str:
    """The comparison as text, a column a run, in the given order. ValueError: not a run folder, and why."""
    runs = [read_run(folder) for folder in folders]
    names = [folder.resolve().name for folder in folders]
    titles = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    lines = [["", *titles], *differences(runs), *losses(runs), *speeds(runs)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join([line[0].ljust(widths[0])] +
                               [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)])
                     for line in lines)


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """(settings, rows): config.json as "section.field" and env.json as "env.field"; metrics.jsonl."""
    for name in ("config.json", "env.json", "metrics.jsonl"):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not a run folder: it has no {name}")
    config, env = _json(folder / "config.json"), _json(folder / "env.json")
    settings = {f"env.{name}": value for name, value in env.items()}
    for section, fields in config.items():
        if not isinstance(fields, dict):
            raise ValueError(f"{folder / 'config.json'} is not a config: {section} is no section")
        settings |= {f"{section}.{name}": value for name, value in fields.items()}
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ValueError(f"{folder / 'metrics.jsonl'} has no rows")
    return settings, rows


def differences(runs: list[tuple[dict, list[dict]]]) -> list[list[str]]:
    """A line for each setting that is not the same in all runs; device, dtype and peak in any case."""
    every = dict.fromkeys(name for settings, _ in runs for name in settings)
    lines = []
    for name in every:
        cells = [_spell(settings[name]) if name in settings else "-" for settings, _ in runs]
        if name in ALWAYS_SHOWN or (len(set(cells)) > 1 and name not in NOT_SHOWN):
            lines.append([name, *cells])
    return lines


def losses(runs: list[tuple[dict, list[dict]]]) -> list[list[str]]:
    """Last losses, and losses at the largest token count that all runs have."""
    lines = []
    for name in ("train/loss", "val/loss"):
        curves = [curve(rows, name) for _, rows in runs]
        last = [c[-1][1] if c else None for c in curves]
        lines.append([f"{name}, last", *_cells(last, ".4f", differ=True)])
        if all(curves):
            tokens = min(c[-1][0] for c in curves)
            equal = [loss_at(c, tokens) for c in curves]
            lines.append([f"{name} at {tokens:,} tokens", *_cells(equal, ".4f", differ=True)])
    return lines


def curve(rows: list[dict], name: str) -> list[tuple[int, float]]:
    """(tokens, value) of the rows that have this metric, by tokens."""
    return sorted((row["tokens"], row[name]) for row in rows if row.get(name) is not None)


def loss_at(points: list[tuple[int, float]], tokens: int) -> float | None:
    """The value at `tokens`, linear between its two neighbours; None outside the first and the last."""
    for (before, low), (after, high) in zip(points, points[1:] or points, strict=False):
        if before <= tokens <= after:
            part = (tokens - before) / (after - before) if after > before else 1.0
            return high if part == 1 else low + part * (high - low)
    return None


def speeds(runs: list[tuple[dict, list[dict]]]) -> list[list[str]]:
    lines = []
    for label, (name, form) in SPEEDS.items():
        values = [[row[name] for row in rows if row.get(name) is not None] for _, rows in runs]
        lines.append([label, *_cells([statistics.median(v) if v else None for v in values], form)])
    peaks = [max((row["memory/peak_gib"] for row in rows if "memory/peak_gib" in row), default=None)
             for _, rows in runs]
    return lines + [["peak memory GiB", *_cells(peaks, ".2f")]]


def _cells(values: list[float | None], form: str, differ: bool = False) -> list[str]:
    first, cells = values[0], []
    for place, value in enumerate(values):
        text = "-" if value is None else format(value, form)
        if place and value is not None and first is not None:
            text += f" ({value - first:+.4f})" if differ else f" ({value / first:.2f}x)" if first else ""
        cells.append(text)
    return cells


def _json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def _spell(value) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
