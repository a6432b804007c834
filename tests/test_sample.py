"""sample.py: text of a trained run, the same for the same seed, and one clear line where there is no run."""
import pytest
import torch
from small_run import WORDS, flags, one_line_error

import sample
import train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sample")
    train.main(flags(folder, "--train.max-steps", "150", "--optim.lr", "1e-2"))
    return folder / "run"


def test_a_model_of_one_sentence_says_its_words(run, capsys):
    sample.main([str(run), "--prompt", "the cat sat on", "--tokens", "60", "--temperature", "0.1"])
    text = capsys.readouterr().out
    assert text.startswith("the cat sat on")
    words = text.split()[4:-1]                                  # the last one may be cut
    assert len(words) > 5 and sum(w in WORDS.split() for w in words) / len(words) > 0.8


def test_seed_decides(run, capsys):
    texts = []
    for seed in ("1", "1", "2"):
        sample.main([str(run), "--tokens", "60", "--temperature", "2", "--seed", seed])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_prompt_longer_than_the_row(run, capsys):
    sample.main([str(run), "--prompt", WORDS * 2, "--tokens", "3"])
    assert capsys.readouterr().out.startswith(WORDS * 2)


@pytest.mark.parametrize("arguments, part", [
    (["nowhere"], "nowhere is not a run folder"),
    (["tests", "--temperature", "0"], "--temperature=0.0 must lie between"),
    (["tests", "--prompt", ""], "--prompt='' not be empty"),
    (["tests", "--temperature", "nan"], "--temperature=nan must lie between"),
    (["tests", "--tokens", "-1"], "--tokens=-1"),
])
def test_bad_input_is_one_line(capsys, arguments, part):
    with one_line_error(capsys, part):
        sample.main(arguments)


def test_top_k_of_one_is_the_likeliest(run):
    model, _, seq_len = sample.load(run, torch.device("cpu"))
    tokens = list(b"the cat")
    [token] = sample.generate(model, tokens, 1, seq_len, 1.0, 1, 256)
    assert token == int(model(torch.tensor([tokens]))[0, -1].argmax())
