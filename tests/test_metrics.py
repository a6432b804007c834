import dataclasses
import json
import math
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import Config, change
from runtime import metrics
from runtime.flops import Clock
from runtime.metrics import Metrics, console_lines, cut_rows, environment, read_rows

ROOT = Path(__file__).resolve().parents[1]
SILENT = change(Config(), wandb=dict(mode="disabled"))


def row(step, **more):
    return {"step": step, "tokens": 100 * step, "train/loss": 5.0 - step / 100, **more}


def steps(folder):
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


# -- metrics.jsonl

def test_rows_are_on_disk_as_soon_as_they_are_logged(tmp_path):
    m = Metrics(tmp_path / "new" / "run", SILENT)
    m.log(row(1))
    assert json.loads((tmp_path / "new" / "run" / "metrics.jsonl").read_text()) == row(1)
    m.close()


def test_non_finite_values_survive_as_valid_json(tmp_path):
    m = Metrics(tmp_path, SILENT)
    m.log(row(1, a=math.nan, b=math.inf, c=-math.inf, d=None, e="word"))
    m.close()

    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    text = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(text, parse_constant=refuse)["a"] == "nan"
    back = read_rows(tmp_path / "metrics.jsonl")[0]
    assert math.isnan(back["a"]) and back["b"] == math.inf and back["c"] == -math.inf
    assert back["d"] is None and back["e"] == "word"


def test_numbers_from_torch_and_numpy_are_plain_in_the_file(tmp_path):
    import numpy
    import torch
    m = Metrics(tmp_path, SILENT)
    m.log(row(1, a=torch.tensor(0.5), b=numpy.float32(0.25), c=torch.tensor(float("nan"))))
    m.close()
    back = read_rows(tmp_path / "metrics.jsonl")[0]
    assert (back["a"], back["b"]) == (0.5, 0.25) and math.isnan(back["c"])


@pytest.mark.parametrize("torn", [b"", b'{"step": 16, "tok', b'{"st\xff'], ids=["whole", "torn", "no text"])
def test_resume_from_10_after_15_holds_each_row_once(tmp_path, torn):
    m = Metrics(tmp_path, SILENT)
    for step in range(1, 16):
        m.log(row(step, first=True))
    m.close()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn)
    m = Metrics(tmp_path, SILENT, resume_step=10)
    for step in range(11, 21):
        m.log(row(step, first=False))
    m.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(1, 21))
    assert [r["first"] for r in rows] == [True] * 10 + [False] * 10


def test_a_torn_last_line_does_not_spoil_the_next_one(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n" + json.dumps(row(2)))    # no line end
    m = Metrics(tmp_path, SILENT, resume_step=2)
    m.log(row(3))
    m.close()
    assert steps(tmp_path) == [1, 2, 3]


def test_cut_is_atomic(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row(step)) + "\n" for step in range(5)))

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(metrics.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cut_rows(path, 2)
    assert steps(tmp_path) == [0, 1, 2, 3, 4]


def test_resume_without_a_file_starts_one(tmp_path):
    Metrics(tmp_path, SILENT, resume_step=10).close()
    assert steps(tmp_path) == []


def test_a_new_run_does_not_mix_with_another(tmp_path):
    m = Metrics(tmp_path, SILENT)
    m.log(row(1))
    m.close()
    with pytest.raises(ValueError, match="rows of another run"):
        Metrics(tmp_path, SILENT)
    assert steps(tmp_path) == [1]


def test_damage_in_the_middle_is_an_error_with_its_line(tmp_path):
    row = '{"step": 1, "tokens": 8}\n'
    for damage in ('{"ste\n', '{"a": 1}\n', '{"step": "x", "tokens": 8}\n', "[1]\n"):
        (tmp_path / "metrics.jsonl").write_text(row + damage + row)
        with pytest.raises(ValueError, match="line 2 is not a row"):
            read_rows(tmp_path / "metrics.jsonl")


def test_a_row_without_tokens_is_an_error(tmp_path):
    m = Metrics(tmp_path, SILENT)
    with pytest.raises(ValueError, match="tokens"):
        m.log({"step": 1, "train/loss": 2.0})
    m.close()


# -- terminal

def test_console_line_of_a_training_row():
    rates = {"perf/tokens_per_s": 123_456.0, "perf/mfu": 0.412, "perf/step_ms": 1000.0}
    [line] = console_lines({**row(100), "train/lr": 6e-4, **rates}, 1000)
    assert line == "step 100/1000  loss 4.0000  lr 6.00e-04  123k tok/s  MFU 41.2%  ETA 15m00s"


def test_console_line_without_rates_shows_none():
    assert console_lines(row(100), 1000) == ["step 100/1000  loss 4.0000"]


def test_console_lines_of_an_evaluation_and_of_both():
    assert console_lines({"step": 5, "tokens": 1, "val/loss": 3.25}, 10) == ["eval 5/10  val/loss 3.2500"]
    assert len(console_lines({**row(5), "val/loss": 3.25}, 10)) == 2
    assert console_lines({"step": 5, "tokens": 1, "memory/peak_gib": 3.0}, 10) == []


@pytest.mark.parametrize("loss", [4.0, math.nan, -math.inf, 1e30])
@pytest.mark.parametrize("rate, ms", [(0.5, 1e9), (999_600.0, 1.0), (1.23e9, 86e3)])
@pytest.mark.parametrize("step", [0, 99_999, 99_999_999])
def test_console_line_fits_80_columns(step, rate, ms, loss):
    wide = {"step": step, "tokens": 1, "train/loss": loss, "train/lr": 6e-4, "perf/tokens_per_s": rate,
            "perf/mfu": 1.0, "perf/step_ms": ms}
    [line] = console_lines(wide, 99_999_999)
    assert len(line) <= 80 and f"step {step}/" in line and "ETA" in line and "tok/s" in line


def test_log_prints_the_line(tmp_path, capsys):
    m = Metrics(tmp_path, SILENT)
    m.log(row(7))
    m.close()
    assert capsys.readouterr().out == "step 7/1000  loss 4.9300\n"


# -- rates

class Time:
    now = 0.0

    def __call__(self):
        return self.now


class Device:
    """A GPU of one queue: a step costs the host `launch` seconds and the device, once it is free, `work`."""

    def __init__(self, time, launch=0.1, work=1.0):
        self.time, self.launch, self.work, self.free = time, launch, work, 0.0

    def step(self, work=None):
        self.time.now += self.launch
        self.free = max(self.free, self.time.now) + (work or self.work)

    def synchronize(self):
        self.time.now = max(self.time.now, self.free)


def run(clock, device, steps, every, evaluate_every=0, compile_s=0.0):
    """Rates logged by a loop that trains, logs and evaluates for 35 s."""
    rows = []
    for step in range(1, steps + 1):
        clock.start()
        device.step(compile_s if step == 1 else None)
        clock.stop(tokens=1000, flops=2 * 10**12)
        if evaluate_every and step % evaluate_every == 0:
            clock.settle()
            device.step(35.0)
            device.synchronize()
        if step % every == 0:
            rows.append(clock.rates())
    return rows


@pytest.mark.parametrize("evaluate_every", [0, 5, 3, 1])
@pytest.mark.parametrize("launch, work", [(0.1, 1.0), (1.0, 0.1)], ids=["device-bound", "host-bound"])
def test_rates_leave_out_warmup_compilation_and_evaluation(evaluate_every, launch, work):
    time = Time()
    device = Device(time, launch, work)
    clock = Clock(warmup=2, peak_tflops=4.0, synchronize=device.synchronize, now=time)
    rows = run(clock, device, 40, 5, evaluate_every, compile_s=60.0)
    assert len(rows) == 8 and all(rows)
    for rates in rows:                             # the first steps after a wait also pay the launch
        assert rates["perf/step_ms"] == pytest.approx(1050, rel=0.06)
        assert rates["perf/mfu"] == pytest.approx(2 / 1.05 / 4, rel=0.06)


def test_rows_that_hold_warmup_only_have_no_rates():
    time = Time()
    device = Device(time)
    rows = run(Clock(warmup=2, synchronize=device.synchronize, now=time), device, 4, 1, compile_s=60.0)
    assert rows[:2] == [{}, {}] and all(rows[2:])


def test_the_rates_and_their_units():
    time = Time()
    clock = Clock(world=2, peak_tflops=10.0, full_flops_per_token=4 * 10**9, warmup=0, now=time)
    for _ in range(4):
        time.now += 100.0                          # between two steps: left out
        clock.start()
        time.now += 0.5
        clock.stop(tokens=1000, flops=3 * 10**12)
    assert clock.rates() == pytest.approx({
        "perf/tokens_per_s": 2000, "perf/tokens_per_s_per_gpu": 1000, "perf/step_ms": 500, "perf/tflops": 3.0,
        "perf/mfu": 0.3, "perf/mfu_full": 0.4})
    assert clock.rates() == {}


def test_without_a_peak_there_is_no_mfu_but_a_rate():
    time = Time()
    device = Device(time)
    [rates] = run(Clock(warmup=0, now=time, synchronize=device.synchronize), device, 5, 5)
    assert set(rates) == {"perf/tokens_per_s", "perf/tokens_per_s_per_gpu", "perf/step_ms", "perf/tflops"}


# -- env.json

def git(folder, *arguments):
    subprocess.run(["git", "-C", folder, "-c", "user.name=n", "-c", "user.email=e@x", *arguments], check=True,
                   capture_output=True)


def test_environment_records_commit_and_diff(tmp_path):
    git(tmp_path, "init")
    (tmp_path / "file").write_text("old\n")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "-m", "first")
    clean = environment("cpu", "float32", (None, "no peak"), tmp_path)
    assert len(clean["commit"]) == 40 and clean["diff"] == ""
    (tmp_path / "file").write_text("new\n" * 50_000)
    git(tmp_path, "add", "file")
    changed = environment("cpu", "float32", (None, "no peak"), tmp_path)
    assert changed["commit"] == clean["commit"] and "+new" in changed["diff"]
    assert len(changed["diff"]) < metrics.DIFF_LIMIT + 100 and "[cut: " in changed["diff"]


def test_environment_outside_git_and_without_git(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment("cpu", "float32", (None, "-"), tmp_path)["commit"] is None
    monkeypatch.setenv("PATH", str(tmp_path))
    env = environment("cpu", "float32", (None, "-"), ROOT)
    assert env["commit"] is None and env["diff"] is None


def test_environment_says_what_ran_where(monkeypatch):
    monkeypatch.setattr(metrics, "PACKAGES", ("torch", "no-such-package"))
    env = environment("NVIDIA H200", "bfloat16", (989.5, "datasheet"))
    assert env["torch"][0].isdigit() and env["no-such-package"] is None and env["command"] == sys.argv
    assert (env["device"], env["peak_tflops"], env["peak_source"]) == ("NVIDIA H200", 989.5, "datasheet")
    assert json.loads(json.dumps(env)) == env


# -- Weights & Biases, each in a process of its own: it keeps state, and is what must not stop one

PROGRAM = """
import sys
from pathlib import Path
from config import Config, change
from runtime.metrics import Metrics
{before}
config = change(Config(), run=dict(name="tiny"), wandb=dict(mode={mode!r}, group="g", tags=("a", "b")))
m = Metrics(Path({folder!r}), config, wandb_id={wandb_id!r}, resume_step={resume_step!r},
            extra_config=dict(n_params=7))
for step in range({first}, {first} + 5):
    m.log({{"step": step, "tokens": 100 * step, "train/loss": 5.0 - step, "perf/mfu": 0.5}})
m.log({{"step": step, "tokens": 100 * step, "val/loss": 2.5, "val/loss_by_position/0-1024": float("nan")}})
m.close()
print("id", m.wandb_id)
{after}
print("DONE")
"""


def program(folder, mode="auto", before="", after="", wandb_id=None, resume_step=None, first=1):
    return PROGRAM.format(**locals() | {"folder": str(folder)})


def environment_without_key(tmp_path, **more):
    """No credentials anywhere; the system's own WANDB_* do not reach the test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    (tmp_path / "home").mkdir(exist_ok=True)
    return kept | {"HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT), **more}


def start(tmp_path, code, **more):
    done = subprocess.run([sys.executable, "-c", code], env=environment_without_key(tmp_path, **more),
                          text=True, timeout=50, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT)
    assert done.returncode == 0 and "DONE" in done.stdout, done.stdout
    assert len(steps(tmp_path / "run")) >= 6
    return done.stdout


def inspect(folder, tmp_path):
    """The records of an offline run, read by wandb's own reader."""
    tool = Path(sys.executable).with_name("wandb")
    text = subprocess.run([tool, "leet", "inspect", "--json", str(folder)], capture_output=True, text=True,
                          env=environment_without_key(tmp_path), check=True, timeout=50).stdout
    return [json.loads(line) for line in text.splitlines()]


def test_without_key_or_terminal_the_run_is_offline_and_whole(tmp_path):
    began = time.monotonic()
    output = start(tmp_path, program(tmp_path / "run"))
    assert time.monotonic() - began < 60        # it asked nobody and waited for no network
    [folder] = (tmp_path / "run" / "wandb").glob("offline-run-*")
    ours = [line for line in output.splitlines() if not line.startswith(("step", "eval", "id", "DONE"))]
    assert ours == [f"W&B offline: {folder}"]                    # and no word from wandb itself

    records = inspect(folder, tmp_path)
    history = [r["history"]["item"] for r in records if r["type"] == "history"]
    assert [h["step"] for h in history] == [1, 2, 3, 4, 5, 5]
    assert [h["tokens"] for h in history] == [100, 200, 300, 400, 500, 500]
    assert history[0]["train/loss"] == 4 and history[-1]["val/loss"] == 2.5
    axes = {r["metric"]["glob_name"]: r["metric"]["step_metric"] for r in records
            if r["type"] == "metric" and "glob_name" in r["metric"]}
    assert axes == {f"{section}/*": "tokens" for section in ("train", "val", "perf", "memory")}
    [run] = [r["run"] for r in records if r["type"] == "run"]
    settings = run["config"]["update"]
    assert settings["n_params"] == 7
    assert settings["model"] == json.loads(json.dumps(dataclasses.asdict(Config().model)))
    assert (run["display_name"], run["run_group"], run["tags"]) == ("tiny", "g", ["a", "b"])
    assert f"id {run['run_id']}" in output


def test_a_resumed_run_keeps_its_id_and_its_rows(tmp_path):
    before = ("import types; calls = []\n"
              "ok = lambda *a, **k: None\n"
              "fake = types.SimpleNamespace(define_metric=ok, log=ok,\n"
              "    finish=lambda: None, offline=False, url='there', id='abc123')\n"
              "import wandb; wandb.login = lambda **k: True\n"
              "wandb.init = lambda **k: calls.append(k) or fake")
    after = "print([(c['mode'], c['id'], c['resume']) for c in calls])"
    output = start(tmp_path, program(tmp_path / "run", before=before, after=after))
    assert "[('online', None, None)]" in output
    output = start(tmp_path, program(tmp_path / "run", before=before, after=after, wandb_id="abc123",
                                     resume_step=3, first=4))
    assert "[('online', 'abc123', 'allow')]" in output and "id abc123" in output
    assert steps(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7, 8, 8]


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_at_a_terminal_without_key_nobody_is_asked(tmp_path, mode):
    ours, theirs = pty.openpty()
    child = subprocess.Popen([sys.executable, "-c", program(tmp_path / "run", mode)], start_new_session=True,
                             env=environment_without_key(tmp_path),
                             stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        child.wait(timeout=20)
    finally:
        child.kill()
        text = os.read(ours, 100_000).decode()
        os.close(ours)
    assert child.returncode == 0 and "DONE" in text
    assert "W&B offline: " in text and "online failed" not in text       # it did not come as far as asking
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1


def test_an_unreachable_server_means_offline(tmp_path):
    before = ("import wandb; real = wandb.init\n"
              "def init(mode, **k):\n"
              "    assert k['settings'].init_timeout == 30 and k['settings'].finish_timeout == 60\n"
              "    if mode == 'online': raise wandb.errors.CommError('no\\nroute')\n"
              "    return real(mode=mode, **k)\n"
              "wandb.init = init")
    output = start(tmp_path, program(tmp_path / "run", before=before),
                   WANDB_API_KEY="0" * 40, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "W&B online failed, going on offline: CommError: no route" in output and "W&B offline: " in output
    assert "wandb: " not in output                               # not about the key it found either


BROKEN_RUN = ("import sys, types\n"
              "def fail(*a, **k): raise RuntimeError('broken\\nthing')\n"
              "ok = lambda *a, **k: None\n"
              "broken = types.SimpleNamespace(define_metric=ok, log=fail, finish=fail,\n"
              "    offline=False, url='there', id='x')\n"
              "fake = types.ModuleType('wandb')\n"
              "fake.setup = fake.Settings = ok; fake.login = lambda **k: True\n"
              "sys.modules['wandb'] = fake\n")


@pytest.mark.parametrize("before, line", [
    ("fake.init = fail", "W&B is off: RuntimeError: broken thing"),
    ("fake.login = fail", "W&B is off: RuntimeError: broken thing"),
    ("fake.init = lambda **k: broken", "W&B misses rows: RuntimeError: broken thing"),
    ("fake.init = lambda **k: broken", "W&B did not finish: RuntimeError: broken thing"),
    ("sys.modules['wandb'] = None", "W&B is off: ModuleNotFoundError: "),
], ids=["init", "login", "log", "finish", "not installed"])
def test_no_failure_of_wandb_stops_a_run(tmp_path, before, line):
    output = start(tmp_path, program(tmp_path / "run", before=BROKEN_RUN + before))
    assert output.count(line) == 1


@pytest.mark.parametrize("mode, variable", [("disabled", "online"), ("auto", "disabled")])
def test_disabled_imports_nothing(tmp_path, mode, variable):
    code = program(tmp_path / "run", mode, after="print('imported', 'wandb' in sys.modules)")
    output = start(tmp_path, code, WANDB_MODE=variable)
    assert "imported False" in output and not (tmp_path / "run" / "wandb").exists()


@pytest.mark.parametrize("variable", ["", "garbage"])
def test_a_variable_that_says_nothing_is_offline(tmp_path, variable):
    output = start(tmp_path, program(tmp_path / "run"), WANDB_MODE=variable)
    assert "W&B offline: " in output and "W&B is off" not in output
    assert ("WANDB_MODE='garbage' is none of" in output) == (variable == "garbage")


def test_the_variable_decides_under_auto_and_the_config_otherwise(tmp_path):
    before = BROKEN_RUN + "fake.init = lambda **k: print('mode', k['mode']) or broken"
    output = start(tmp_path, program(tmp_path / "run", before=before), WANDB_MODE="offline")
    assert "mode offline" in output
    output = start(tmp_path, program(tmp_path / "run", "online", before=before, resume_step=0),
                   WANDB_MODE="disabled")
    assert "mode online" in output


def test_offline_opens_no_internet_socket(tmp_path):
    before = ("import socket\n"
              "def refuse(self, address):\n"
              "    assert self.family == socket.AF_UNIX or address[0] in ('127.0.0.1', '::1'), address\n"
              "    return connect(self, address)\n"
              "connect = socket.socket.connect; socket.socket.connect = refuse")
    assert "W&B offline: " in start(tmp_path, program(tmp_path / "run", "offline", before=before))

def test_write_whole_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    metrics.write_whole(path, "old")

    def fail(handle):
        raise OSError("disk full")
    monkeypatch.setattr(metrics.os, "fsync", fail)
    with pytest.raises(OSError):
        metrics.write_whole(path, "new")
    assert path.read_text() == "old"
