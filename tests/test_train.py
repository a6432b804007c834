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
from data.loader import Loader
from runtime import checkpoint, memory

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
        torch._dynamo.reset()               # its limit of graphs is of a process, and a run has as many as 8
        train.main(flags(tmp_path, "--model.attention", name, *more, name=name))
    losses = [torch.tensor(rows(tmp_path / name)) for name in ("sdpa", "flash_attn2")]
    torch.testing.assert_close(*losses, rtol=5e-3, atol=5e-3)


def test_compiled_equals_eager(tmp_path):
    for name in ("off", "on"):          # 5 steps: with 3 nothing is warmed up
        train.main(flags(tmp_path, "--train.compile", name, "--train.max-steps", "5", name=name))
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
    assert checkpoint.run_folder(c, Path("configs/debug.py")) == Path("runs/debug")
    Path("runs/debug").mkdir(parents=True)
    assert checkpoint.run_folder(c, Path("configs/debug.py")) == Path("runs/debug-2")
    assert checkpoint.run_folder(change(c, run=dict(name="mine")), Path("configs/debug.py")) == Path("runs/mine")


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


def test_plan_reads_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main([str(REPO / "configs/llama_1300m_128k.py"), "--plan=H100 HBM3", "--data.source", "nowhere.txt",
                "--train.checkpointing", "full"])
    said = capsys.readouterr().out
    assert "checkpointing full" in said and "1,269,401,600" in said and "H100 HBM3: 79.1 GiB" in said
    assert not list(tmp_path.iterdir())


def test_plan_of_a_run_folder_and_of_an_unknown_gpu(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "1"))
    train.main([str(tmp_path / "run"), "--plan"])
    assert "rows              2 x 32 tokens" in capsys.readouterr().out
    for words in (["--plan=Voodoo2"], ["--plan", "Voodoo2", "--data.batch", "1"],
                  ["--data.batch", "1", "--plan", "Voodoo2"]):
        with one_line_error(capsys, "no memory known for the GPU 'Voodoo2'"):
            train.main([str(tmp_path / "run"), *words])
    train.main(["--plan", str(tmp_path / "run"), "--wandb.tags", "a", "b"])
    assert "H200" in capsys.readouterr().out


def test_out_of_memory_says_what_to_change(tmp_path, capsys, monkeypatch):
    def fail(job):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    monkeypatch.setattr(train, "train_step", fail)
    with pytest.raises(SystemExit) as stop:
        train.main(flags(tmp_path))
    assert stop.value.code == 1
    said = capsys.readouterr().err
    assert "error: out of GPU memory after step 0. The largest part of the " in said
    assert "Try --data.batch 1: the predicted peak falls by " in said


def test_nothing_is_saved_or_evaluated_unasked(tmp_path):
    train.main(flags(tmp_path, "--train.max-steps", "2", "--train.no-save", "--train.no-evaluate"))
    assert not (tmp_path / "run" / "checkpoints").exists() and not rows(tmp_path / "run", "val/loss")


def test_a_profiled_step_leaves_its_kernels(tmp_path):
    train.main(flags(tmp_path, "--train.max-steps", "3", "--train.profile-step", "2"))
    found = json.loads((tmp_path / "run" / "kernels.json").read_text())
    assert found["kinds"]["matmul"] > 0 and found["kinds"]["optimizer"] > 0


def test_checkpointing_offload_and_chunks_reach_the_blocks(tmp_path, monkeypatch):
    """And change no loss."""
    parked, real = [], memory.Parked.__init__
    monkeypatch.setattr(memory.Parked, "__init__",
                        lambda self, x, *rest: parked.append(x.shape[1]) or real(self, x, *rest))
    more = ["--train.checkpointing", "full", "--train.offload", "--train.mlp-chunk", "16"]
    for name, arguments in (("plain", []), ("less", more)):
        train.main(flags(tmp_path, "--train.max-steps", "3", *arguments, name=name))
    assert set(parked) == {32, 16}          # rows into attention, chunks into the MLP
    plain, less = (torch.tensor(rows(tmp_path / name)) for name in ("plain", "less"))
    torch.testing.assert_close(plain, less, rtol=1e-4, atol=1e-4)


def test_batches_are_read_one_step_ahead_and_not_beyond_the_last(tmp_path, monkeypatch):
    read, real = [], Loader.batch
    monkeypatch.setattr(Loader, "batch", lambda self, step, *rest: read.append(step) or real(self, step, *rest))
    job = train.set_up(Path("configs/debug.py"), flags(tmp_path, "--train.max-steps", "2", "--data.batch", "4")[1:])
    job.metrics.close()
    train.train_step(job)
    assert read == [0, 1]
    job.step += 1
    train.train_step(job)
    assert read == [0, 1]


def test_a_batch_that_cannot_be_read_fails_its_own_step(tmp_path, monkeypatch):
    """The step before it is logged, evaluated and saved."""
    real = Loader.batch

    def read(self, step, *rest):
        if step == 2:
            raise ValueError("damaged")
        return real(self, step, *rest)
    monkeypatch.setattr(Loader, "batch", read)
    with pytest.raises(ValueError, match="damaged"):
        train.main(flags(tmp_path, "--train.max-steps", "4", "--train.checkpoint-every", "1"))
    assert rows(tmp_path / "run")[-1][0] == 2 and checkpoint.load(tmp_path / "run")["step"] == 2


def test_what_was_never_saved_is_not_trained_over(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "3", "--train.no-save"))
    before = rows(tmp_path / "run")
    with one_line_error(capsys, "was trained with train.save=False: there is nothing to go on from"):
        train.main([str(tmp_path / "run"), "--train.max-steps", "5"])
    assert rows(tmp_path / "run") == before


def test_usage_without_arguments(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main([])
    assert stop.value.code == 2 and "configs/quickstart.py" in capsys.readouterr().out
