"""The loop: it learns, says so, counts its attention calls, and turns bad input into one line and no run folder."""
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from small_run import WORDS, flags, one_line_error, rows

import config as configs
import train
from config import change

REPO = Path(train.__file__).parent


def test_a_run_learns_and_leaves_its_record(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "60"))
    run, out = tmp_path / "run", capsys.readouterr().out
    losses = rows(run)
    assert [step for step, _ in losses] == list(range(1, 61))
    assert abs(losses[0][1] - math.log(257)) < 0.3
    assert losses[-1][1] < 2.9                                      # the entropy of its letters alone is 2.7
    assert rows(run, "val/loss")[-1][0] == 60
    assert {p.name for p in run.iterdir()} == {"config.json", "env.json", "metrics.jsonl", "checkpoints"}
    assert configs.load(run).train.max_steps == 60
    assert json.loads((run / "env.json").read_text())["torch"] == torch.__version__
    assert "attention: sdpa (auto)" in out and "step 60/60" in out and "ETA" in out
    assert "perf/mfu" not in (run / "metrics.jsonl").read_text()    # a CPU has no peak


def test_accumulation_equals_one_large_batch(tmp_path):
    """Rows of a step do not depend on how micro-batches cut them, and every target weighs the same."""
    for name, batch in (("small", "1"), ("large", "4")):
        train.main(flags(tmp_path, "--data.batch", batch, "--train.max-steps", "8", name=name))
    small, large = (torch.tensor(rows(tmp_path / name)) for name in ("small", "large"))
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-4)


def test_uneven_targets_weigh_the_same(tmp_path):
    """Many short documents: micro-batches differ in valid targets, yet the step's loss is the mean over all of them."""
    text = tmp_path / "lines.jsonl"
    text.write_text("".join(json.dumps({"text": WORDS[: 3 + 17 * i % 60]}) + "\n" for i in range(200)))
    for name, batch in (("small", "1"), ("large", "4")):
        train.main(flags(tmp_path, "--data.source", str(text), "--data.batch", batch, "--train.max-steps", "5",
                         name=name))
    small, large = (torch.tensor(rows(tmp_path / name)) for name in ("small", "large"))
    torch.testing.assert_close(small, large, rtol=1e-4, atol=1e-4)


def test_learning_rate_rises_then_falls_along_a_cosine():
    c = change(configs.Config(), optim=dict(lr=1.0, min_lr=0.1, warmup_steps=10), train=dict(max_steps=110))
    lr = [train.learning_rate(step, c) for step in range(110)]
    assert lr[0] == pytest.approx(0.1) and lr[9] == lr[10] == 1.0
    assert lr[-1] == pytest.approx(0.1) and all(a >= b for a, b in zip(lr[10:], lr[11:], strict=False))
    assert lr[59] == pytest.approx(0.55, abs=0.02)


def test_learning_rate_without_warmup_or_with_one_step():
    for steps in (1, 2):
        c = change(configs.Config(), optim=dict(lr=1.0, min_lr=0.1, warmup_steps=0), train=dict(max_steps=steps))
        assert train.learning_rate(0, c) == 1.0


def test_gradients_are_clipped(tmp_path, monkeypatch):
    """grad_norm is the norm before clipping; what reaches the optimizer has the norm asked for, or its own with 0."""
    seen = []
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: seen.append(
        torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm().item()))
    for clip in ("0.01", "0"):
        job = train.set_up(Path("configs/debug.py"), flags(tmp_path, "--optim.grad-clip", clip, name=f"run{clip}")[1:])
        norm, _ = train.train_step(job)
        job.metrics.close()
    assert norm > 0.1 and seen[0] == pytest.approx(0.01, rel=1e-3) and seen[1] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("name, seconds", [("debug", 40), ("interpreter", 120)])
def test_the_small_configs_run_as_they_stand(tmp_path, name, seconds):
    """On the embedded books, prepared on the way."""
    began = time.monotonic()
    train.main([f"configs/{name}.py", "--run.dir", str(tmp_path / "run"), "--data.dir", str(tmp_path / "shards")])
    losses = rows(tmp_path / "run")
    assert losses[-1][1] < losses[0][1] - 0.3
    assert time.monotonic() - began < seconds


def test_a_step_without_targets_leaves_the_weights_whole(tmp_path):
    """seq_len 1: some rows hold only an end id."""
    text = tmp_path / "lines.jsonl"
    text.write_text("".join(json.dumps({"text": letter}) + "\n" for letter in "abcdefghijklmnopqrstuvwxyz"))
    more = ["--data.source", str(text), "--data.seq-len", "1", "--data.batch", "1", "--train.tokens-per-step", "1"]
    train.main(flags(tmp_path, *more, "--data.val-fraction", "0.2"))
    losses = [loss for _, loss in rows(tmp_path / "run")]
    assert all(map(math.isfinite, losses)) and 0.0 in losses


def test_our_kernel_runs_in_every_layer_of_every_micro_step(tmp_path, monkeypatch):
    from flash_attn2 import ops
    calls = {"forward": 0, "backward": 0}
    for name in calls:
        kernel = getattr(ops, name)

        def counted(*args, name=name, kernel=kernel):
            calls[name] += 1
            return kernel(*args)
        monkeypatch.setattr(ops, name, counted)
    job = train.set_up(Path("configs/debug.py"), flags(tmp_path, "--model.attention", "flash_attn2")[1:])
    train.train_step(job)
    job.metrics.close()
    layers, micro_steps = job.config.model.n_layer, job.micro_steps
    assert (layers, micro_steps) == (2, 2)
    assert calls == {"forward": layers * micro_steps, "backward": layers * micro_steps}


def test_backends_train_alike(tmp_path):
    """The same seed and data under each backend: the same losses within rounding, documents masked."""
    losses = []
    for name in ("sdpa", "flash_attn2", "reference"):
        train.main(flags(tmp_path, "--model.attention", name, "--train.max-steps", "4", name=name))
        losses.append(torch.tensor(rows(tmp_path / name)))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(losses[0], losses[2], rtol=1e-4, atol=1e-4)


TRITON_PAIR = {"forward_kernel", "delta_kernel", "dq_kernel", "dkdv_kernel"}
HOPPER_PAIR = {"forward_kernel", "prepare_kernel", "backward_kernel", "finish_kernel"}
SDPA_KERNELS = ("flash_fwd", "flash_bwd", "fmha", "cudnn", "efficient_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["flash_attn2", "sdpa"])
def test_only_the_chosen_attention_shows_in_the_profile(tmp_path, attention):
    """A compiled bf16 training step: the four kernels of one pair and none of SDPA's, or the other way round."""
    more = ["--model.attention", attention, "--data.seq-len", "128", "--train.tokens-per-step", "256", "--model.n-head",
            "1", "--model.d-model", "64", "--data.no-document-mask"]
    job = train.set_up(Path("configs/debug.py"), flags(tmp_path, *more)[1:])
    train.warm_up(job)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        train.train_step(job)
        torch.cuda.synchronize()
    job.metrics.close()
    names = {event.key for event in profile.key_averages()}
    own = {k for k in {*TRITON_PAIR, *HOPPER_PAIR} if any(n.startswith(k) for n in names)}
    torchs = {n for n in names if any(k in n.lower() for k in SDPA_KERNELS)}
    on_hopper = torch.cuda.get_device_capability()[0] == 9
    pair = HOPPER_PAIR if on_hopper else TRITON_PAIR        # their forwards have one name
    assert (own, bool(torchs)) == ((pair, False) if attention == "flash_attn2" else (set(), True)), names


@pytest.mark.gpu
def test_backends_train_alike_on_a_gpu(tmp_path):
    """bf16, compiled, packed documents, a windowed layer: losses agree within the rounding of bf16."""
    more = ["--train.max-steps", "8", "--model.window", "9", "--model.window-pattern", "LS"]
    for name in ("sdpa", "flash_attn2"):
        train.main(flags(tmp_path, "--model.attention", name, *more, name=name))
    losses = [torch.tensor(rows(tmp_path / name)) for name in ("sdpa", "flash_attn2")]
    torch.testing.assert_close(*losses, rtol=5e-3, atol=5e-3)


def test_compiled_equals_eager(tmp_path):
    for name in ("off", "on"):
        train.main(flags(tmp_path, "--train.compile", name, "--train.max-steps", "3", name=name))
    torch.testing.assert_close(*(torch.tensor(rows(tmp_path / name)) for name in ("off", "on")), rtol=1e-4, atol=1e-4)


def test_two_ranks_train_as_one(tmp_path):
    """torchrun on the CPU: the same rows, the same loss."""
    env = dict(os.environ, OMP_NUM_THREADS="1")
    for ranks, name in ((1, "one"), (2, "two")):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
                   "train.py", *flags(tmp_path, "--train.max-steps", "6", name=name)]
        subprocess.run(command, cwd=REPO, env=env, check=True, capture_output=True, timeout=300)
    one, two = (torch.tensor(rows(tmp_path / name)) for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    one, two = (torch.tensor(rows(tmp_path / name, "val/loss")) for name in ("one", "two"))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


def test_a_second_run_takes_the_next_name(tmp_path, monkeypatch):
    c = configs.Config()
    monkeypatch.chdir(tmp_path)
    assert train.run_folder(c, Path("configs/debug.py")) == Path("runs/debug")
    Path("runs/debug").mkdir(parents=True)
    assert train.run_folder(c, Path("configs/debug.py")) == Path("runs/debug-2")
    assert train.run_folder(change(c, run=dict(name="mine")), Path("configs/debug.py")) == Path("runs/mine")


BAD = {
    "head count that does not divide": (["--model.n-head", "3"], "model.d_model=32 must be a multiple of model.n_head"),
    "sequence longer than the data": (["--data.seq-len", "8192", "--train.tokens-per-step", "0"],
                                      "seq_len=8192 needs 8193 tokens"),
    "missing dataset": (["--data.source", "nowhere.txt"], "nowhere.txt", "books"),
    "hub id": (["--data.source", "owner/name"], "owner/name"),
    "mask a backend cannot do": (["--model.attention", "sdpa:flash"], "sdpa:flash takes no mask but causal"),
    "backend this machine lacks": (["--model.attention", "sdpa:cudnn"], "sdpa:cudnn runs on a GPU only"),
    "tokens per step": (["--train.tokens-per-step", "100"], "train.tokens_per_step=100 must be a multiple"),
    "shards of something else": (["--data.dir", "tests"], "tests"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="sdpa:cudnn is no error there")
@pytest.mark.parametrize("case", BAD, ids=str)
def test_bad_input_is_one_line_and_leaves_no_run_folder(tmp_path, capsys, case):
    arguments, *parts = BAD[case]
    with one_line_error(capsys, *parts):
        train.main(flags(tmp_path, *arguments))
    assert not (tmp_path / "run").exists()


def test_a_taken_folder_is_not_written_over(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("mine")
    with one_line_error(capsys, "is not empty", "python train.py"):
        train.main(flags(tmp_path))
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("arguments, parts", [
    (["configs/nosuch.py"], ["no config file 'configs/nosuch.py'"]),
    (["tests"], ["is not a run folder"]),
])
def test_a_config_that_is_not_there(capsys, arguments, parts):
    with one_line_error(capsys, *parts):
        train.main(arguments)


def test_unknown_flag_exits_2(tmp_path, capsys):
    with one_line_error(capsys, "--model.n-layr", "Perhaps you meant: --model.n-layer"):
        train.main(flags(tmp_path, "--model.n-layr", "3"))
    assert not (tmp_path / "run").exists()


def test_usage_without_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main([])
    assert stop.value.code == 2 and "configs/quickstart.py" in capsys.readouterr().out
