"""Checkpoints: whole or absent, loadable with weights_only, and a resumed run is the unbroken one bit for bit."""
import shutil

import pytest
import torch
from small_run import flags, one_line_error, rows

import config as configs
import train
from runtime import checkpoint


def weights(run) -> dict:
    return checkpoint.load(run)["model"]


@pytest.mark.parametrize("attention, steps", [("sdpa", 20), ("flash_attn2", 4)])
def test_20_steps_are_10_and_10_bit_for_bit(tmp_path, attention, steps):
    train.main(flags(tmp_path, "--train.deterministic", "--train.max-steps", str(steps), "--model.attention", attention,
                     "--train.checkpoint-every", str(steps // 2), name="whole"))
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / f"step_{steps:08d}")      # as if killed after the first half
    train.main([str(tmp_path / "resumed")])
    for metric in ("train/loss", "train/grad_norm", "train/lr", "val/loss", "tokens"):
        assert rows(tmp_path / "whole", metric) == rows(tmp_path / "resumed", metric), metric
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "resumed")
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_finished_run_says_so_and_can_go_on(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "4"))
    train.main([str(tmp_path / "run")])
    assert "has done its 4 steps" in capsys.readouterr().out
    train.main([str(tmp_path / "run"), "--train.max-steps", "6"])
    assert [step for step, _ in rows(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert configs.load(tmp_path / "run").train.max_steps == 6


def test_checkpoint_of_another_model(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    before = (tmp_path / "run" / "config.json").read_text()
    with one_line_error(capsys, "is of another model: blocks.0.attention_norm.weight is (32,) in it and (64,) here"):
        train.main([str(tmp_path / "run"), "--model.d-model", "64"])
    assert (tmp_path / "run" / "config.json").read_text() == before


def test_a_run_without_a_checkpoint(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with one_line_error(capsys, "has no checkpoint to go on from"):
        train.main([str(tmp_path / "run")])


def test_a_damaged_checkpoint(tmp_path, capsys):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    path = checkpoint.steps(tmp_path / "run")[-1] / "state.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with one_line_error(capsys, "state.pt cannot be read"):
        train.main([str(tmp_path / "run")])


def test_holds_only_tensors_and_plain_types(tmp_path):
    train.main(flags(tmp_path, "--train.max-steps", "2"))
    state = torch.load(checkpoint.steps(tmp_path / "run")[-1] / "state.pt", weights_only=True)
    assert (state["step"], state["tokens"]) == (2, 256)
    assert not any(name.startswith(("_orig_mod", "module")) for name in state["model"])


def test_a_kill_while_saving_leaves_the_last_one_whole(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, {"step": 1})

    def killed(*args):
        args[1].write(b"half of it")
        raise KeyboardInterrupt
    monkeypatch.setattr(torch, "save", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, {"step": 2})
    assert checkpoint.load(tmp_path) == {"step": 1}
    monkeypatch.undo()
    checkpoint.save(tmp_path, 2, {"step": 2})                       # the rest of the kill is no obstacle
    assert checkpoint.load(tmp_path) == {"step": 2}


def test_keeps_the_newest_two(tmp_path):
    for step in (1, 2, 10, 3):
        checkpoint.save(tmp_path, step, {"step": step})
    assert [p.name for p in checkpoint.steps(tmp_path)] == ["step_00000003", "step_00000010"]


def test_load_model_names_what_does_not_fit():
    model = torch.nn.Linear(2, 3)
    with pytest.raises(ValueError, match=r"another model: weight is \(3, 4\) in it and \(3, 2\) here"):
        checkpoint.load_model(model, {"weight": torch.zeros(3, 4), "bias": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"bias is absent in it and \(3,\) here"):
        checkpoint.load_model(model, {"weight": torch.zeros(3, 2)})
    with pytest.raises(ValueError, match=r"extra is \(1,\) in it and absent here"):
        checkpoint.load_model(model, {**model.state_dict(), "extra": torch.zeros(1)})
