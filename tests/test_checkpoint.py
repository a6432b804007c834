"""Checkpoints: whole or absent, loadable with weights_only, and a resumed run is the unbroken one bit for bit."""
import json
import shutil

import pytest
import torch
from small_run import flags, one_line_error, rows

import config as configs
import train
from runtime import checkpoint
from runtime.optimizer import Optimizer


def save(run, step) -> None:
    checkpoint.save(run, step, {**dict.fromkeys(checkpoint.PARTS, 0), "step": step})


def weights(run) -> dict:
    return checkpoint.load(run)["model"]


@pytest.mark.parametrize("attention, steps, log_every", [("sdpa", 20, 1), ("sdpa", 20, 4), ("flash_attn2", 4, 1)])
def test_20_steps_are_10_and_10_bit_for_bit(tmp_path, attention, steps, log_every):
    halves_are_the_whole(tmp_path, steps, "--model.attention", attention, "--log.every", str(log_every))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_so_they_are_with_float32_masters(tmp_path, monkeypatch, name):
    """As on a GPU, but of float16 weights: the interpreter knows no bfloat16."""
    monkeypatch.setattr(train, "make_optimizer", lambda model, c, *_: Optimizer(
        model, c.optim, half=torch.float16, accumulates=True))
    weights = halves_are_the_whole(tmp_path, 4, "--train.dtype", "bfloat16", "--optim.name", name)
    assert all(w.dtype == torch.float32 for w in weights.values())
    assert any((w.half() != w).any() for w in weights.values())             # not the rounded ones


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_so_they_are_on_a_gpu(tmp_path, name):
    weights = halves_are_the_whole(tmp_path, 6, "--optim.name", name)
    assert any((w.bfloat16() != w).any() for w in weights.values())


def halves_are_the_whole(tmp_path, steps: int, *more: str) -> dict:
    """-> the weights at the end."""
    train.main(flags(tmp_path, "--train.deterministic", "--train.max-steps", str(steps), *more,
                     "--train.checkpoint-every", str(steps // 2), name="whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{steps:08d}")      # as if killed after the first half
    train.main([str(tmp_path / "resumed")])
    for metric in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "tokens"):
        assert rows(tmp_path / "whole", metric) == rows(tmp_path / "resumed", metric), metric
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    return whole


def test_a_finished_run_says_so_and_can_go_on(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "4"))
    train.main([str(tmp_path / "run")])
    assert "has done its 4 steps" in capsys.readouterr().out
    train.main([str(tmp_path / "run"), "--train.max-steps", "6"])
    assert [step for step, _ in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert configs.load(tmp_path / "run").train.max_steps == 6


@pytest.mark.parametrize("flag, value, said", [
    ("--model.d-model", "64", "model.d_model 32 -> 64"),
    ("--model.rope-theta", "5", "model.rope_theta 10000.0 -> 5.0"),        # the same shapes
    ("--run.dir", "elsewhere", "-> 'elsewhere'"),
])
def test_a_run_cannot_go_on_as_another(tmp_path, capsys, flag, value, said):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    before = (tmp_path / "run" / "config.json").read_text()
    with one_line_error(capsys, "cannot go on as another run", said):
        train.main([str(tmp_path / "run"), flag, value])
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_checkpoint_of_another_model(tmp_path, capsys):
    """The config says one model, the checkpoint holds another."""
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    path = tmp_path / "run" / "config.json"
    path.write_text(path.read_text().replace('"d_model": 32', '"d_model": 64'))
    with one_line_error(capsys, "is of another model: blocks.0.attention_norm.weight is (32,) in it and (64,) here"):
        train.main([str(tmp_path / "run")])


def test_changed_settings_are_listed(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    train.main([str(tmp_path / "run"), "--train.max-steps", "3", "--model.attention", "reference"])
    out = capsys.readouterr().out
    assert "changed: train.max_steps 2 -> 3\n" in out and "changed: model.attention 'auto' -> 'reference'\n" in out
    assert "resuming at step 2" in out


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    train.main(flags(tmp_path, "--train.max-steps", "3"))
    before = rows(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    train.main([str(tmp_path / "run")])
    assert rows(tmp_path / "run") == before


def test_an_interrupt_is_one_line_and_the_run_goes_on(tmp_path, capsys, monkeypatch):
    step, steps = train.train_step, []

    def interrupted(job):
        steps.append(job.step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return step(job)
    monkeypatch.setattr(train, "train_step", interrupted)
    with pytest.raises(SystemExit) as stop:
        train.main(flags(tmp_path, "--train.max-steps", "6", "--train.checkpoint-every", "2"))
    assert stop.value.code == 130
    assert f"interrupted at step 3; go on with it: python train.py {tmp_path / 'run'}" in capsys.readouterr().out
    train.main([str(tmp_path / "run")])
    assert steps == [0, 1, 2, 3, 2, 3, 4, 5]
    assert [step for step, _ in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "4", "--train.checkpoint-every", "2"))
    before = rows(tmp_path / "run")
    for folder in reversed(checkpoint.steps(tmp_path / "run")):
        path = folder / "state.pt"
        path.write_bytes(path.read_bytes()[:1000])
        if folder.name == "step_00000004":
            train.main([str(tmp_path / "run")])
            assert "damaged, going back to an earlier one" in capsys.readouterr().err
            assert rows(tmp_path / "run") == before
            path.write_bytes(b"")
    with one_line_error(capsys, "has no checkpoint that can be read"):
        train.main([str(tmp_path / "run")])


def test_resume_takes_the_command_lines_optimizer(tmp_path):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    job = train.set_up(tmp_path / "run", ["--optim.weight-decay", "0", "--optim.beta2", "0.5"])
    job.metrics.close()
    assert [(g["weight_decay"], g["betas"]) for g in job.optimizer.adamw.param_groups] == [(0.0, (0.9, 0.5))] * 2
    assert configs.load(tmp_path / "run").optim.weight_decay == 0


def test_another_optimizer_cannot_go_on(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    with one_line_error(capsys, "the checkpoint's optimizer is adamw, not adamw+muon: optim.name cannot change"):
        train.main([str(tmp_path / "run"), "--optim.name", "muon"])


def test_resume_keeps_the_first_environment(tmp_path):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    first = json.loads((tmp_path / "run" / "env.json").read_text())
    train.main([str(tmp_path / "run"), "--train.max-steps", "3"])
    env = json.loads((tmp_path / "run" / "env.json").read_text())
    assert {k: env[k] for k in first} == first and env["resumed"][0]["device"] == "cpu"


@pytest.mark.parametrize("content, said", [({"model": {}}, "it lacks optimizer, random"), ([1], "it lacks model")])
def test_a_file_that_is_no_checkpoint(tmp_path, capsys, content, said):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    torch.save(content, checkpoint.steps(tmp_path / "run")[-1] / "state.pt")
    with pytest.raises(ValueError, match="has no checkpoint that can be read"):
        checkpoint.load(tmp_path / "run")
    assert said in capsys.readouterr().err


def test_only_step_folders_are_checkpoints(tmp_path):
    save(tmp_path, 1)
    for name in ("step_00000002.partial", "step_00000003.old", "step_4"):
        (tmp_path / "checkpoints" / name).mkdir()
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000001"]


def test_holds_only_tensors_and_plain_types(tmp_path):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    state = torch.load(checkpoint.steps(tmp_path / "run")[-1] / "state.pt", weights_only=True)
    assert (state["step"], state["tokens"]) == (2, 256)
    assert not any(name.startswith(("_orig_mod", "module")) for name in state["model"])


def test_a_kill_while_saving_leaves_the_last_one_whole(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def killed(*args):
        args[1].write(b"half of it")
        raise KeyboardInterrupt
    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert checkpoint.load(tmp_path)["step"] == 1
    monkeypatch.undo()
    save(tmp_path, 2)                                               # the rest of the kill is no obstacle
    assert checkpoint.load(tmp_path)["step"] == 2


def test_keeps_the_newest_two(tmp_path):
    for step in (1, 2, 10, 3):
        save(tmp_path, step)
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000003", "step_00000010"]


def test_load_model_names_what_does_not_fit():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"another model: weight is \(3, 4\) in it and \(3, 2\) here"):
        checkpoint.load_model(model, {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"bias is absent in it and \(3,\) here"):
        checkpoint.load_model(model, {"weight": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"extra is \(1,\) in it and absent here"):
        checkpoint.load_model(model, {**model.state_dict(), "extra": torch.zeros(1)})
