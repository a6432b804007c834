import random

import numpy as np
import pytest

from data import tokenizer

TEXTS = ["", "a", "Hello world", "I'll don't  \n\n\tx", "naïve café — 字\u2028🙂\r\n", "  \u00a0 ",
         "a <|endoftext|> b", "x" * 5000, " " * 5000 + "y"]


@pytest.fixture(scope="module", params=["bytes", "gpt2"])
def tok(request):
    return tokenizer.get(request.param)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_round_trip(tok, text):
    ids = tok.encode(text)
    assert ids.dtype.kind == "u"
    assert tok.decode(ids) == text
    assert tok.end_id not in ids.tolist()       # text that spells the marker is ordinary text


def test_end_id_is_the_last_and_shows(tok):
    assert tok.end_id == tok.vocab_size - 1
    assert tok.decode([*tok.encode("a").tolist(), tok.end_id]) == "a<|endoftext|>"


def test_id_outside_the_vocabulary(tok):
    for bad in (-1, tok.vocab_size):
        with pytest.raises(ValueError, match=f"id {bad} .*{tok.name}.*{tok.vocab_size - 1}"):
            tok.decode([bad])


def test_lone_surrogates_do_not_stop_an_encoder(tok):
    assert tok.decode(tok.encode("a\ud800b")) in ("a?b", "a\ufffdb")


def test_bytes_that_are_no_utf8_become_replacement_characters(tok):
    half = tok.encode("字")[:1]
    assert "\ufffd" in tok.decode(half)


def test_known_gpt2_ids():
    gpt2 = tokenizer.get("gpt2")
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.encode("<|endoftext|>").tolist() == [27, 91, 437, 1659, 5239, 91, 29]


def test_gpt2_ids_are_the_ranks_of_vocab_bpe():
    gpt2 = tokenizer.get("gpt2")
    letters = tokenizer.byte_letters()
    byte_of = {letter: b for b, letter in enumerate(letters)}
    tokens = [bytes([byte_of[letter]]) for letter in sorted(letters)]   # printing bytes, then spare letters
    for line in (gpt2.folder / "vocab.bpe").read_text(encoding="utf-8").splitlines()[1:]:
        tokens.append(bytes(byte_of[letter] for letter in line.replace(" ", "")))
    assert len(tokens) == 50256
    assert [gpt2._bpe.decode_single_token_bytes(i) for i in range(50256)] == tokens


def test_pieces_encode_as_the_whole():
    """Wherever a text is cut into pieces, and however small the encoder's own chunks."""
    gpt2, rng = tokenizer.GPT2(), random.Random(0)
    gpt2.chunk = 3
    for _ in range(300):
        text = "".join(rng.choices(" \n\t\u00a0'slvedma1½字!é\x1c", k=60))
        cut = rng.randrange(60)
        pieces = np.concatenate(list(gpt2.encode_pieces([text[:cut], "", text[cut:]])))
        assert pieces.tolist() == gpt2._ids(text).tolist(), repr(text)


@pytest.mark.parametrize("char", " a字")
def test_a_run_without_a_blank_is_cut_and_survives(char):
    gpt2 = tokenizer.GPT2()
    text = char * 1_000_000
    assert gpt2.decode(gpt2.encode(text)) == text


def test_damaged_gpt2_file_is_named(tmp_path):
    for name in tokenizer.GPT2.files:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(ValueError, match="encoder.json has SHA-256"):
        tokenizer.GPT2(tmp_path).encode("a")


def test_unknown_name():
    with pytest.raises(ValueError, match="'gpt4' must be one of bytes, gpt2"):
        tokenizer.get("gpt4")


def test_hashes_differ():
    assert tokenizer.Bytes.hash != tokenizer.GPT2.hash
