import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

import compare
from config import Config, change, to_json

ROOT = Path(__file__).resolve().parents[1]


def make_run(folder, config=None, rows=(), **env):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(to_json(config or Config()))
    env = {"device": "NVIDIA H200", "dtype": "bfloat16", "peak_tflops": 989.5, "commit": "c" * 40,
           "started": str(folder), "command": [str(folder)]} | env
    (folder / "env.json").write_text(json.dumps(env))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def rows(every, speed, mfu=None, loss=lambda tokens: 10 - tokens / 1000, last=1000):
    for tokens in range(every, last + 1, every):
        yield {"step": tokens // 10, "tokens": tokens, "train/loss": loss(tokens),
               "memory/peak_gib": tokens / 500,
               "perf/tokens_per_s": speed if tokens > every else 1.0} | ({"perf/mfu": mfu} if mfu else {})
    yield {"step": last // 10, "tokens": last, "val/loss": loss(last) + 1}


@pytest.fixture
def two(tmp_path):
    sdpa = change(Config(), model=dict(attention="sdpa"), run=dict(name="a"))
    ours = change(Config(), model=dict(attention="flash_attn2"), run=dict(name="b"))
    return [make_run(tmp_path / "sdpa", sdpa, rows(100, 1000.0, 0.2)),
            make_run(tmp_path / "ours", ours, rows(300, 2500.0, 0.5, lambda t: 9.5 - t / 1000, last=1200))]


def cells(table):
    """{label: cells} of a printed table."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in table.splitlines()]
    return {line[0]: line[1:] for line in lines[1:]}


def test_table_of_two_runs(two):
    table = compare.table(two)
    found = cells(table)
    assert table.splitlines()[0].split() == ["sdpa", "ours"]
    assert found["model.attention"] == ["sdpa", "flash_attn2"]
    assert found["env.device"] == ["NVIDIA H200", "NVIDIA H200"] and found["env.peak_tflops"] == ["989.5"] * 2
    assert found["train/loss, last"] == ["9.0000", "8.3000 (-0.7000)"]
    # 1000 tokens lie between the second run's rows at 900 and 1200: on a straight line 9.5 - 1.0
    assert found["train/loss at 1,000 tokens"] == ["9.0000", "8.5000 (-0.5000)"]
    assert found["val/loss, last"] == ["10.0000", "9.3000 (-0.7000)"]
    assert found["tokens/s, median"] == ["1,000", "2,500 (2.50x)"]
    assert found["MFU, median"] == ["20.00%", "50.00% (2.50x)"]
    assert found["peak memory GiB"] == ["2.00", "2.40 (1.20x)"]


def test_only_differences_are_shown(two):
    found = cells(compare.table(two))
    settings = [label for label in found if "." in label.split(",")[0] and " " not in label]
    assert set(settings) == {"model.attention", "env.device", "env.dtype", "env.peak_tflops"}


def test_a_measure_that_one_run_lacks_is_a_dash(two, tmp_path):
    third = make_run(tmp_path / "third", rows=[{"step": 1, "tokens": 500, "train/loss": math.nan}])
    third.joinpath("metrics.jsonl").write_text('{"step": 1, "tokens": 500, "train/loss": "nan"}\n')
    found = cells(compare.table([*two, third]))
    assert found["MFU, median"] == ["20.00%", "50.00% (2.50x)", "-"]
    assert found["train/loss at 500 tokens"] == ["9.5000", "9.0000 (-0.5000)", "nan (+nan)"]
    assert found["val/loss, last"][2] == "-" and "val/loss at 500 tokens" not in found


@pytest.mark.parametrize("tokens, value", [(10, 4.0), (15, 3.0), (20, 2.0), (25, 2.5), (9, None), (31, None)])
def test_loss_between_rows_lies_on_a_line(tokens, value):
    assert compare.loss_at([(10, 4.0), (20, 2.0), (30, 3.0)], tokens) == value


def test_loss_of_a_single_row():
    assert compare.loss_at([(10, 4.0)], 10) == 4.0 and compare.loss_at([(10, 4.0)], 11) is None


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    runs = [make_run(tmp_path / side / "run", rows=rows(100, 1.0)) for side in "ab"]
    assert compare.table(runs).splitlines()[0].split() == [str(run) for run in runs]


def test_a_config_of_another_version_is_compared_too(two):
    fields = dataclasses.asdict(Config())
    fields["model"] |= {"attention": "sdpa", "removed_since": 3}
    two[0].joinpath("config.json").write_text(json.dumps(fields))
    assert cells(compare.table(two))["model.removed_since"] == ["3", "-"]


def command(*arguments):
    return subprocess.run([sys.executable, "compare.py", *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True)


def test_command_prints_the_table(two):
    done = command(*two)
    assert done.returncode == 0 and done.stdout == compare.table(two) + "\n" and done.stderr == ""


@pytest.mark.parametrize("spoil, words", [
    (lambda run: run.joinpath("config.json").unlink(), "it has no config.json"),
    (lambda run: run.joinpath("env.json").unlink(), "it has no env.json"),
    (lambda run: run.joinpath("metrics.jsonl").unlink(), "it has no metrics.jsonl"),
    (lambda run: run.joinpath("metrics.jsonl").write_text(""), "has no rows"),
    (lambda run: run.joinpath("metrics.jsonl").write_text('{"step": 1, "tokens": 8}\nx\n{"step": 2, "tokens": 9}\n'),
     "line 2"),
    (lambda run: run.joinpath("config.json").write_text("{"), "is not JSON"),
    (lambda run: run.joinpath("config.json").write_text('{"a": 1}'), "is not a config"),
    (lambda run: run.joinpath("env.json").write_text("[]"), "is not a JSON object")])
def test_a_bad_folder_is_one_line(two, spoil, words):
    spoil(two[1])
    with pytest.raises(ValueError) as error:
        compare.table(two)
    assert words in str(error.value) and str(two[1]) in str(error.value)


@pytest.mark.parametrize("arguments, words", [
    (["no/such/folder", "."], "no/such/folder is not a run folder"), ([], "at least two"),
    (["."], "at least two")])
def test_command_errors_are_one_line_and_code_2(arguments, words):
    done = command(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert words in done.stderr and done.stderr.count("\n") == 1


def test_environments_of_resumed_parts_are_not_shown(two):
    path = two[0] / "env.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"resumed": [{"device": "another"}]}))
    assert "resumed" not in compare.table(two)
