import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_run import one_line_error

import config as configs
import speed
from model import GPT
from runtime import flops

ROOT = Path(speed.__file__).parent
KINDS = {"attention": 1.5, "matmul": 2000.0, "loss": 3.0, "optimizer": 4.0, "rest": 5.25}
PEER = '''
from dataclasses import dataclass
import torch
from torch import nn

@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    bias: bool

class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        print("shape", config)
        self.embed = nn.Embedding(config.vocab_size, 64)
        self.out = nn.Linear(64, 64)
    def forward(self, idx, targets=None):
        assert idx.shape == targets.shape and self.training
        logits = self.out(self.embed(idx))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten() % 64)
    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), lr=learning_rate, betas=betas, weight_decay=weight_decay)
'''


@pytest.fixture
def peer(tmp_path):
    folder = tmp_path / "nanoGPT"
    folder.mkdir()
    (folder / "model.py").write_text(PEER)
    return folder


def make_run(folder, steps, speeds=(), peak_tflops=None, loss=2.0, gib=None):
    """A run folder as train.py leaves it: the last of `speeds` is the recorded step's."""
    folder.mkdir(parents=True)
    rows = [{"step": i, "tokens": 1000 * i, "train/loss": loss} | ({"memory/peak_gib": gib + i} if gib else {})
            for i in range(1, steps + 1)]
    for row, value in zip(rows[len(rows) - len(speeds):], speeds, strict=True):
        row |= {"perf/tokens_per_s": value, "perf/mfu": value / 1e4, "perf/mfu_full": value / 5e3}
    rows.append({"step": steps, "tokens": 1000 * steps, "val/loss": 3.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "kernels.json").write_text(json.dumps({"step_ms": 500.0, "kinds": KINDS, "kernels": []}))
    (folder / "env.json").write_text(json.dumps({"peak_tflops": peak_tflops}))
    return folder


def test_reads_the_steps_between_warm_up_and_the_recorded_one(tmp_path):
    run = make_run(tmp_path / "run", 7, [2000.0, 2400.0, 2100.0, 17.0], gib=10)
    found = speed.read(speed.Row("x", speed.DEBUG, {}, 7), run)
    assert found["speeds"] == [2000.0, 2400.0, 2100.0] and found["perf/tokens_per_s"] == 2100.0
    assert (found["perf/mfu"], found["perf/mfu_full"], found["gib"]) == (0.21, 0.42, 17)
    assert found["kinds"] == KINDS


def test_one_step_is_timed_by_its_kernels(tmp_path):
    run = make_run(tmp_path / "run", 1, peak_tflops=0.5)
    row = speed.Row("x", speed.DEBUG, {}, 1)
    found = speed.read(row, run)
    count = speed.model_flops(speed.config_of(row))
    assert (found["perf/tokens_per_s"], found["speeds"]) == (2000.0, [])       # 1000 tokens in 500 ms
    assert found["perf/mfu"] == pytest.approx(count["perf/mfu"] * 2000 / 0.5e12)
    assert "| 2,000 (one step) |" in speed.line("x", found, None)
    (run / "env.json").write_text('{"peak_tflops": null}')
    assert speed.line("x", speed.read(row, run), None).startswith("| x | 2,000 (one step) | - | - | - | 1.5 |")


@pytest.mark.parametrize("steps, loss, found", [(6, 2.0, r"\[2.0, 2.0"), (7, "nan", "nan")])
def test_a_run_cut_short_or_without_a_loss_is_no_result(tmp_path, steps, loss, found):
    run = make_run(tmp_path / "run", steps, [1.0], loss=loss)
    with pytest.raises(ValueError, match=f"7 finite losses expected, found .*{found}"):
        speed.read(speed.Row("x", speed.DEBUG, {}, 7), run)


@pytest.mark.parametrize("config", ["peer_gpt2_124m", "peer_gpt2_1300m"])
def test_flops_are_those_that_a_run_counts(config):
    c = configs.change(configs.load(ROOT / "configs" / f"{config}.py"), model=dict(n_layer=2, d_model=256, n_head=4),
                       data=dict(seq_len=512, batch=3))
    model = GPT(c.model, 50257, 512, None)
    pairs = flops.attended_pairs(None, 3, 512)
    n_params = sum(p.numel() for p in model.parameters()) - model.positions.weight.numel()
    found = speed.model_flops(c)
    assert found["perf/mfu"] * 3 * 512 == flops.train_flops(model, 3 * 512, [pairs] * 2)
    assert found["perf/mfu_full"] == flops.full_flops_per_token(n_params, 2, 256, 512)
    assert len(model.lm_head.weight) == speed.PEER_VOCAB


def test_a_line_stands_beside_nanogpt(tmp_path):
    ours = speed.read(speed.Row("x", speed.DEBUG, {}, 5), make_run(tmp_path / "a", 5, [3000.0, 1.0], gib=5))
    theirs = speed.read(speed.Row("x", speed.DEBUG, {}, 5), make_run(tmp_path / "b", 5, [2000.0, 1.0], gib=15))
    line = speed.line("x", ours, theirs)
    assert line == "| x | 3,000 (3,000-3,000) | 30.0% | 60.0% | 10.0 | 1.5 | 2,000.0 | 3.0 | 4.0 | 5.2 | 1.50 | 0.50 |"
    assert all(text.count("|") == line.count("|") for text in speed.HEADER)


def fake(monkeypatch, **scripts):
    """Rows of `scripts`' names and code run that code, with the row's folder as its argument."""
    nanogpt = dict(beside="nanogpt_1"), dict(peer=True)
    monkeypatch.setattr(speed, "ROWS", [speed.Row(name, speed.DEBUG, {}, 6, may_run_out=name == "full",
                                                  **nanogpt[name in ("nanogpt_1", "full")]) for name in scripts])
    monkeypatch.setattr(speed, "command", lambda r, folder, peer: [sys.executable, "-c", scripts[r.name], str(folder)])


def good(tmp_path, speeds, gib=None):
    run = make_run(tmp_path / f"made{len(list(tmp_path.iterdir()))}", 6, speeds, gib=gib)
    return f"import shutil, sys; shutil.copytree({str(run)!r}, sys.argv[1])"


def test_a_failing_row_is_a_line_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    error = "import sys; sys.exit('ValueError: a | b\\n[W1 12:00] a library complains')"
    fake(monkeypatch, bad=error, silent="import sys; sys.exit(3)", empty="", fine=good(tmp_path, [100.0, 300.0, 7.0]))
    out = tmp_path / "new" / "speed.md"
    assert speed.main(["--rows", "bad,silent,empty,fine", "--out", str(out)]) == 1
    lines = {line.split(" | ")[0].strip("| "): line for line in out.read_text().splitlines() if line.startswith("| ")}
    assert lines["bad"].startswith("| bad | ValueError: a / b |")
    assert lines["silent"].startswith("| silent | exit code 3 |")
    assert "No such file" in lines["empty"] and "metrics.jsonl" in lines["empty"]
    assert lines["fine"].startswith("| fine | 200 (100-300) | 2.0% | 4.0% | - | 1.5 |")
    assert len({line.count("|") for line in lines.values()}) == 1
    assert capsys.readouterr().out.rstrip() == out.read_text().rstrip()
    assert len(list(out.with_suffix(".runs").glob("*/fine/kernels.md"))) == 1


def test_nanogpt_runs_first_and_may_run_out_of_memory_where_it_must(tmp_path, monkeypatch, peer):
    theirs, ours = good(tmp_path, [200.0, 1.0], gib=14), good(tmp_path, [300.0, 1.0], gib=4)
    full = "import sys; sys.exit('torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9 GiB')"
    fake(monkeypatch, peer_1_selective=ours, nanogpt_1=theirs, full=full)
    rows = ["--rows", "peer_1_selective,nanogpt_1,full,", "--peer", str(peer)]
    assert speed.main([*rows, "--out", str(tmp_path / "a.md")]) == 0
    lines = [line for line in (tmp_path / "a.md").read_text().splitlines() if line.startswith("|")][2:]
    assert [line.split()[1] for line in lines] == ["nanogpt_1", "full", "peer_1_selective"]
    assert lines[0].endswith("| - | - |") and lines[1].startswith("| full | out of memory |")
    assert lines[2].endswith("| 1.50 | 0.50 |")
    fake(monkeypatch, ours=full)                    # anywhere else it is a failure
    assert speed.main(["--rows", "ours", "--out", str(tmp_path / "b.md")]) == 1


def test_a_row_over_its_time_is_killed_with_its_children(tmp_path, monkeypatch):
    sign = tmp_path / "alive"
    child = (f"import time, pathlib\nwhile True: pathlib.Path({str(sign)!r}).write_text(str(time.time())); "
             "time.sleep(.05)")
    slow = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(600)"
    fake(monkeypatch, slow=slow, fine=good(tmp_path, [100.0, 7.0]))
    assert speed.main(["--rows", "slow,fine", "--limit", "3", "--out", str(tmp_path / "speed.md")]) == 1
    text = (tmp_path / "speed.md").read_text()
    assert "| slow | killed after 3 s |" in text and "| fine | 100 (100-100) |" in text
    written = sign.read_text()
    time.sleep(0.5)
    assert sign.read_text() == written


@pytest.mark.parametrize("words, parts", [
    (["--rows", "debug,peer_124m_16"], ["no row is called 'peer_124m_16'", "nearest: peer_124m_16k", "--list"]),
    (["--rows", "nanogpt_124m_16k"], ["nanogpt_124m_16k needs --peer PATH"]),
    (["--peer", "tests", "--rows", "debug"], ["/tests must be a folder of nanoGPT", "no model.py"]),
], ids=["unknown", "no-peer", "empty-peer"])
def test_errors_before_anything_runs(tmp_path, capsys, words, parts):
    with one_line_error(capsys, *parts), configs.one_line_errors():
        speed.main([*words, "--out", str(tmp_path / "out" / "speed.md")])
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_needs_a_gpu(tmp_path):
    done = subprocess.run([sys.executable, "speed.py", "--out", str(tmp_path / "speed.md")], cwd=ROOT,
                          capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: speed.py needs a GPU; on a CPU only --rows debug")


def test_rows_unasked():
    ours = [r.name for r in speed.chosen("", with_peer=False)]
    assert {"peer_124m_16k", "1300m_512k", "124m_1m"} <= set(ours)
    assert not any("nanogpt" in name or "debug" in name for name in ours)
    both = [r.name for r in speed.chosen("", with_peer=True)]
    assert both[5:] == ours and all(name.startswith("nanogpt_") for name in both[:5])


@pytest.mark.parametrize("row", speed.ROWS, ids=lambda r: r.name)
def test_every_row_is_a_config(row, tmp_path):
    """And, for nanoGPT's count of FLOPs to be ours, dense attention over the whole row without biases."""
    c = speed.config_of(row)
    as_it_stands = row.config not in (speed.SMALL, speed.LARGE)
    assert as_it_stands or not (c.model.bias or c.data.document_mask or c.model.window)
    if not row.peer:
        words = speed.command(row, tmp_path, None)
        c = configs.load(ROOT / row.config, words[3:])
        assert (c.train.max_steps, c.train.profile_step, c.log.every) == (row.steps, row.steps, 1)
        assert (c.train.save, c.train.evaluate, c.train.offload) == (False, False, row.offload)


def test_end_to_end(tmp_path, monkeypatch, peer):
    """train.py and nanoGPT's loop, on what there is of a machine, read by the same reader."""
    (tmp_path / "text.txt").write_text("the cat sat on the mat and the dog ate the cake " * 400)
    overrides = {"data.source": tmp_path / "text.txt", "data.dir": tmp_path / "shards"}
    debug = speed.Row("debug", speed.DEBUG, overrides, 6, beside="nanogpt_debug")
    monkeypatch.setattr(speed, "ROWS", [debug, next(r for r in speed.ROWS if r.name == "nanogpt_debug")])
    out = tmp_path / "speed.md"
    assert speed.main(["--rows", "debug,nanogpt_debug", "--peer", str(peer), "--out", str(out)]) == 0, out.read_text()
    title, _, *_, theirs, ours = out.read_text().rstrip().splitlines()
    assert title.startswith("### 20") and f"torch {torch.__version__}" in title
    for name, line in dict(nanogpt_debug=theirs, debug=ours).items():
        assert line.startswith(f"| {name} | "), line
        run, = out.with_suffix(".runs").glob(f"*/{name}")
        kernels = json.loads((run / "kernels.json").read_text())
        assert kernels["step_ms"] > 0 and kernels["kinds"]["matmul"] > 0
        steps = [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]
        assert [s["step"] for s in steps if "train/loss" in s] == [1, 2, 3, 4, 5, 6]
        assert [s["step"] for s in steps if "perf/tokens_per_s" in s] == [4, 5, 6]       # two of them in the table
        assert not (run / "checkpoints").exists()
    assert float(ours.split(" | ")[-2]) > 0
    said = next(out.with_suffix(".runs").glob("*/nanogpt_debug.out")).read_text()
    assert "block_size=256, vocab_size=50304, n_layer=2, n_head=2, n_embd=64, dropout=0.0, bias=False" in said
