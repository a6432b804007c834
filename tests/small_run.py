"""A run small enough for a test: two layers on a text file of a few kilobytes."""
import contextlib
import json
from pathlib import Path

import pytest

WORDS = "the cat sat on the mat and the dog ate the cake that the cat had made for the king "


def flags(tmp_path: Path, *more: str, name: str = "run", text: str = WORDS * 60) -> list[str]:
    """Arguments of train.main for a new run in tmp_path/NAME."""
    source = tmp_path / "text.txt"
    if not source.exists():
        source.write_text(text)
    return ["configs/debug.py", "--run.dir", str(tmp_path / name), "--data.source", str(source),
            "--data.dir", str(tmp_path / "shards"), "--data.seq-len", "32", "--data.batch", "2",
            "--train.tokens-per-step", "128", "--model.d-model", "32", *more]


def rows(run: Path, metric: str = "train/loss") -> list[tuple[int, float]]:
    """(step, value) of every row that has the metric."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row[metric]) for row in lines if metric in row]


@contextlib.contextmanager
def one_line_error(capsys, *parts: str):
    """The block stops with exit code 2 and one line on stderr that has all the parts."""
    with pytest.raises(SystemExit) as stop:
        yield
    assert stop.value.code == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(err) == 1, err
    for part in parts:
        assert part in err[0]
