"""Sources, shards on disk and prepare."""
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import prepare as prepare_module
from data import sources, tokenizer
from data.format import HEADER_BYTES, PREFIX, Shard, Writer
from data.prepare import main, prepare, shards_dir

ROOT = Path(__file__).resolve().parent.parent
TEXTS = [f"document {i}: naïve 字 <|endoftext|>\r\n" * (i + 1) for i in range(20)]
BYTES = tokenizer.get("bytes")


class Wide:
    """A vocabulary that needs uint32."""
    name, vocab_size, end_id, hash = "wide", 128_000, 127_999, "w"

    def encode_pieces(self, pieces):
        return (np.array([127_998, 65_536, len(piece)]) for piece in pieces)


def write_source(folder: Path, kind: str, texts=TEXTS, column="text") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "txt":
        for i, text in enumerate(texts):
            (folder / f"{i:03}.txt").write_bytes(text.encode())
        return str(folder)
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        rows = [json.dumps({"id": i, column: text}) for i, text in enumerate(texts)]
        path.write_text("\n".join(rows))
    else:
        import pyarrow
        import pyarrow.parquet
        pyarrow.parquet.write_table(pyarrow.table({"id": list(range(len(texts))), column: texts}), path)
    return str(path)


def texts_of(folder: Path, split: str, tok=BYTES) -> list[str]:
    shard = Shard(folder / f"{split}.tokens")
    ends = [*shard.starts()[1:], shard.header.n_tokens]
    tokens = shard.tokens()
    assert all(tokens[end - 1] == tok.end_id for end in ends)
    return [tok.decode(tokens[a:b - 1]) for a, b in zip(shard.starts(), ends, strict=True)]


def write_shard(path: Path, documents=((1, 2, 3), (4,)), tok=BYTES) -> Path:
    with Writer(path, "train", tok) as writer:
        for ids in documents:
            writer.add([np.array(ids)])
    return path


# ---- sources

@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_every_kind_of_source_comes_back(tmp_path, kind, name):
    out = prepare(write_source(tmp_path / "in [1]", kind), name, tmp_path / "out", val_fraction=0.3)
    tok = tokenizer.get(name)
    train, val = texts_of(out, "train", tok), texts_of(out, "val", tok)
    assert sorted(train + val) == sorted(TEXTS)
    assert train and val
    assert train == [text for text in TEXTS if text in train]              # the source's order


def test_split_is_the_same_for_every_kind_of_source(tmp_path):
    outs = [prepare(write_source(tmp_path / kind, kind), "bytes", tmp_path / f"out-{kind}", val_fraction=0.3)
            for kind in ("txt", "jsonl", "parquet")]
    assert len({tuple(texts_of(out, "val")) for out in outs}) == 1


def test_books_hold_out_named_works():
    titles = [document.title for document in sources.documents("books")]
    assert len(titles) == 44
    assert set(sources.HELD_OUT) < set(titles)
    splits = [split for split, _ in sources.split("books", "text", 0.05)]
    assert (splits.count("train"), splits.count("val")) == (41, 3)


def test_long_text_comes_in_bounded_pieces(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("ab\n" * 1_000_000)
    pieces = list(next(sources.documents(str(path))).pieces)
    assert max(map(len, pieces)) <= sources.PIECE
    assert "".join(pieces) == "ab\n" * 1_000_000


def test_folder_skips_hidden_files_and_finds_subfolders(tmp_path):
    for name in ("a.txt", "sub/b.txt", ".git/c.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [p.name for p in sources.find(str(tmp_path))] == ["a.txt", "b.txt"]
    assert [p.name for p in sources.find(f"{tmp_path}/*.txt")] == ["a.txt"]


def test_null_and_empty_texts_are_no_documents(tmp_path):
    rows = '{"text": "one"}\n\n{"text": null}\n{"text": ""}\n{"text": "2020-01-01"}\n'
    (tmp_path / "a.jsonl").write_text(rows)
    out = prepare(str(tmp_path / "a.jsonl"), "bytes", tmp_path / "out", val_fraction=0.5)
    assert sorted(texts_of(out, "train") + texts_of(out, "val")) == ["2020-01-01", "one"]


@pytest.mark.parametrize("fraction", [1e-9, 1 - 1e-9])
def test_neither_split_is_empty(tmp_path, fraction):
    out = prepare(write_source(tmp_path / "in", "jsonl"), "bytes", tmp_path / "out", val_fraction=fraction)
    assert min(len(texts_of(out, "train")), len(texts_of(out, "val"))) == 1


def test_one_document_holds_out_its_tail_and_says_so(tmp_path, capsys):
    text = "".join(chr(65 + i % 50) for i in range(sources.PIECE + 1000))    # the cut is in the second piece
    (tmp_path / "a.txt").write_text(text)
    out = prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "out", val_fraction=0.0005)
    train, val = texts_of(out, "train"), texts_of(out, "val")
    assert train + val == [text[:-len(val[0])], text[-len(val[0]):]]
    assert len(val[0]) == round(len(text) * 0.0005)
    assert len([line for line in capsys.readouterr().err.splitlines() if "one document" in line]) == 1


BAD_SOURCES = {
    "missing":    (lambda d: str(d / "nowhere.txt"), FileNotFoundError, "nowhere.txt.*pass 'books' or"),
    "hub":        (lambda d: "owner/name", FileNotFoundError, "owner/name.*not supported yet"),
    "nothing":    (lambda d: "", FileNotFoundError, "source=''"),
    "no files":   (lambda d: str(d), ValueError, "has no .txt, .jsonl, .parquet file"),
    "mixed":      (lambda d: write_source(d, "jsonl") and write_source(d, "txt"), ValueError, "jsonl and"),
    "empty":      (lambda d: write_source(d, "txt", ["", ""]), ValueError, "holds no text"),
    "one char":   (lambda d: write_source(d, "txt", ["x"]), ValueError, "too short to split"),
    "copies":     (lambda d: write_source(d, "jsonl", ["x", "x", "x"]), ValueError, "one text 3 times"),
    "json col":   (lambda d: write_source(d, "jsonl", column="b"), ValueError, "no column 'text'.*id, b$"),
    "parq col":   (lambda d: write_source(d, "parquet", column="b"), ValueError, "no column 'text'.*id, b$"),
    "json type":  (lambda d: write_source(d, "jsonl", [1, 2]), ValueError, "'text' must be text, not int"),
    "parq type":  (lambda d: write_source(d, "parquet", [1, 2]), ValueError, "'text' must be text, not int"),
}


@pytest.mark.parametrize("case", BAD_SOURCES)
def test_bad_source_is_named_and_leaves_nothing(tmp_path, case):
    make, kind, message = BAD_SOURCES[case]
    (tmp_path / "in").mkdir()
    source = make(tmp_path / "in")
    with pytest.raises(kind, match=message):
        prepare(source, "bytes", tmp_path / "deep" / "out")
    assert os.listdir(tmp_path) == ["in"]


@pytest.mark.parametrize("name, content, message", [
    ("a.txt", b"caf\xe9", "a.txt is not UTF-8"),
    ("a.jsonl", b'{"text": "a"}\n{"te', "a.jsonl:2 is not JSON"),
    ("a.jsonl", b"[1]\n", "a.jsonl:1 must be an object"),
    ("a.parquet", b"not parquet", "cannot read .*a.parquet"),
], ids=["txt", "json", "array", "parquet"])
def test_damaged_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(str(tmp_path / name), "bytes", tmp_path / "out")


# ---- format

def test_wide_vocabulary_survives(tmp_path):
    out = prepare(write_source(tmp_path / "in", "txt"), Wide(), tmp_path / "out")
    tokens = Shard(out / "train.tokens").tokens()
    assert tokens.dtype == np.uint32
    assert tokens[0] == 127_998 and tokens[1] == 65_536 and tokens.max() == 127_999


def test_header_and_index(tmp_path):
    shard = Shard(write_shard(tmp_path / "a"))
    h = shard.header
    assert (h.dtype, h.vocab_size, h.end_id, h.tokenizer, h.split) == ("<u2", 257, 256, "bytes", "train")
    assert (h.n_tokens, h.n_documents, h.tokenizer_hash) == (6, 2, BYTES.hash)
    assert shard.tokens().tolist() == [1, 2, 3, 256, 4, 256]
    assert shard.starts().tolist() == [0, 4]
    assert shard.starts().dtype == np.int64


@pytest.mark.parametrize("bad", [257, -1, 1 << 16])
def test_id_outside_the_vocabulary_is_refused_and_leaves_nothing(tmp_path, bad):
    with pytest.raises(ValueError, match=f"{bad}.*vocab_size=257"):
        write_shard(tmp_path / "a", [[1], [bad]])
    assert not os.listdir(tmp_path)


def test_no_documents_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no documents for split 'train'"):
        write_shard(tmp_path / "a", [])
    assert not os.listdir(tmp_path)


def rewrite(path: Path, version=1, **fields) -> None:
    data = bytearray(path.read_bytes())
    magic, _, length = PREFIX.unpack_from(data)
    body = json.dumps({**json.loads(data[PREFIX.size:PREFIX.size + length]), **fields}).encode()
    data[:HEADER_BYTES] = (PREFIX.pack(magic, version, len(body)) + body).ljust(HEADER_BYTES, b"\0")
    path.write_bytes(data)


DAMAGE = {
    "no header":   (lambda p: p.write_bytes(bytes(9000)), "not a token shard"),
    "empty":       (lambda p: p.write_bytes(b""), "not a token shard"),
    "half header": (lambda p: p.write_bytes(p.read_bytes()[:100]), "truncated: 100 bytes"),
    "truncated":   (lambda p: p.write_bytes(p.read_bytes()[:-1]), "is truncated"),
    "too long":    (lambda p: p.write_bytes(p.read_bytes() + b"x"), "is too long"),
    "version":     (lambda p: rewrite(p, version=2), "version 2, this code reads 1"),
    "dtype":       (lambda p: rewrite(p, dtype="<u4"), "dtype '<u4', but vocab_size=257 takes '<u2'"),
    "vocabulary":  (lambda p: rewrite(p, vocab_size=128_000), "dtype '<u2', but .*128000 takes '<u4'"),
    "counts":      (lambda p: rewrite(p, n_tokens=-1), "n_tokens=-1"),
    "field":       (lambda p: rewrite(p, colour=1), "damaged header.*colour"),
    "index":       (lambda p: p.write_bytes(p.read_bytes()[:-8] + b"\x09" + bytes(7)), "run from 0 to 9"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_shard_says_what_is_wrong(tmp_path, case):
    damage, message = DAMAGE[case]
    path = write_shard(tmp_path / "a.tokens")
    damage(path)
    with pytest.raises(ValueError, match=f"a.tokens.*{message}"):
        Shard(path)


def test_missing_shard_says_what_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m data.prepare"):
        Shard(tmp_path / "a.tokens")


# ---- prepare

def test_same_request_returns_at_once(tmp_path, monkeypatch):
    source = write_source(tmp_path / "in", "jsonl")
    out = prepare(source, "bytes", tmp_path / "out")
    monkeypatch.setattr(prepare_module, "_write", None)                    # writing again would fail
    assert prepare(source, "bytes", tmp_path / "out") == out


@pytest.mark.parametrize("change, message", [
    (dict(tokenizer="gpt2"), "tokenizer='bytes'.*asked for.*tokenizer='gpt2'"),
    (dict(val_fraction=0.5), "val_fraction=0.05.*asked for.*val_fraction=0.5"),
    (dict(text_column="id"), "text_column='text'.*asked for.*text_column='id'"),
    (dict(source="books"), "a.jsonl.*asked for.*'books'"),
], ids=["tokenizer", "val_fraction", "text_column", "source"])
def test_other_shards_in_the_folder_are_kept(tmp_path, change, message):
    request = dict(source=write_source(tmp_path / "in", "jsonl"), tokenizer="bytes", out_dir=tmp_path / "out")
    before = Shard(prepare(**request) / "train.tokens").tokens().tolist()
    with pytest.raises(ValueError, match=message):
        prepare(**{**request, **change})
    assert Shard(tmp_path / "out" / "train.tokens").tokens().tolist() == before


def test_changed_source_is_noticed(tmp_path):
    source = write_source(tmp_path / "in", "jsonl")
    prepare(source, "bytes", tmp_path / "out")
    write_source(tmp_path / "in", "jsonl", TEXTS[:-1])
    with pytest.raises(ValueError, match="fingerprint"):
        prepare(source, "bytes", tmp_path / "out")


def test_tokenizer_of_the_same_name_but_other_hash_is_refused(tmp_path):
    source, other = write_source(tmp_path / "in", "txt"), Wide()
    prepare(source, Wide(), tmp_path / "out")
    other.hash = "x"
    with pytest.raises(ValueError, match="tokenizer_hash='w'.*tokenizer_hash='x'"):
        prepare(source, other, tmp_path / "out")


def test_truncated_shards_are_not_accepted(tmp_path):
    source = write_source(tmp_path / "in", "txt")
    path = prepare(source, "bytes", tmp_path / "out") / "val.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="val.tokens is truncated"):
        prepare(source, "bytes", tmp_path / "out")


def test_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ValueError, match="no folder of token shards"):
        prepare(write_source(tmp_path / "in", "txt"), "bytes", tmp_path / "out")
    assert os.listdir(tmp_path / "out") == ["thesis.tex"]


def test_empty_folder_is_filled(tmp_path):
    (tmp_path / "out").mkdir()
    out = prepare(write_source(tmp_path / "in", "txt"), "bytes", tmp_path / "out")
    assert sorted(os.listdir(out)) == ["request.json", "train.tokens", "val.tokens"]


def test_an_error_half_way_leaves_nothing(tmp_path):
    class Fails(Wide):
        left = 5

        def encode_pieces(self, pieces):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().encode_pieces(pieces)

    source = write_source(tmp_path / "in", "txt")
    with pytest.raises(KeyboardInterrupt):
        prepare(source, Fails(), tmp_path / "out")
    assert os.listdir(tmp_path) == ["in"]


def test_a_kill_half_way_leaves_no_folder_and_the_next_run_works(tmp_path):
    source = write_source(tmp_path / "in", "txt")
    code = ("import sys, time; from data import tokenizer, prepare\n"
            "class Slow(tokenizer.Bytes):\n"
            "    def encode_pieces(self, pieces):\n"
            "        print('begun', flush=True); time.sleep(60)\n"
            "prepare.prepare(sys.argv[1], Slow(), sys.argv[2])\n")
    child = subprocess.Popen([sys.executable, "-c", code, source, str(tmp_path / "out")], cwd=ROOT,
                             stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert not (tmp_path / "out").exists()
    assert len(texts_of(prepare(source, "bytes", tmp_path / "out"), "train")) > 1


def test_another_process_that_was_first_is_accepted(tmp_path, monkeypatch):
    source, write = write_source(tmp_path / "in", "txt"), prepare_module._write

    def write_after_the_other(*args):
        monkeypatch.setattr(prepare_module, "_write", write)
        prepare(source, "bytes", tmp_path / "out")
        write(*args)

    monkeypatch.setattr(prepare_module, "_write", write_after_the_other)
    out = prepare(source, "bytes", tmp_path / "out")
    assert len(texts_of(out, "train") + texts_of(out, "val")) == len(TEXTS)
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]


def test_books_end_to_end_then_again_on_a_machine_without_datasets(tmp_path, capsys):
    """The command line prepares; a process that cannot import datasets or tiktoken accepts the shards."""
    main(["books", "--out", str(tmp_path / "out")])
    assert "train 41 documents" in capsys.readouterr().out
    assert sum(len(text.encode()) for text in texts_of(tmp_path / "out", "val")) > 3 * 64 * 1024
    code = ("import sys, time; sys.modules.update(datasets=None, tiktoken=None, torch=None)\n"
            "from data.prepare import prepare\n"
            "began = time.monotonic(); prepare('books', 'bytes', sys.argv[1])\n"
            "assert time.monotonic() - began < 2\n"
            "assert 'pyarrow' not in sys.modules\n")
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], cwd=ROOT, check=True, timeout=60)


def test_datasets_leaves_nothing_behind_and_needs_no_home(tmp_path):
    source = write_source(tmp_path / "in", "parquet")
    environment = {**os.environ, "HOME": "/dev/null/home", "TMPDIR": str(tmp_path / "tmp")}
    environment.pop("HF_HOME", None)
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-m", "data.prepare", source, "--out", str(tmp_path / "out")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    assert sorted(os.listdir(tmp_path)) == ["in", "out", "tmp"]
    assert not os.listdir(tmp_path / "tmp")


def test_datasets_asks_no_network(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *_, **__: asked.append(host))
    assert len(list(sources.documents(write_source(tmp_path, "parquet")))) == len(TEXTS)
    assert not asked


@pytest.mark.parametrize("args, message", [
    (["nowhere.txt"], "nowhere.txt"), (["books", "--tokenizer", "gpt4"], "gpt4"),
    (["books", "--val-fraction", "1"], "val_fraction=1.0 must lie between 0 and 1"),
], ids=["source", "tokenizer", "fraction"])
def test_command_line_errors_are_one_line(tmp_path, capsys, args, message):
    with pytest.raises(SystemExit) as stopped:
        main([*args, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


def test_default_folders_do_not_collide(tmp_path):
    paths = ["books", "./books", "a/x.txt", "b/x.txt", "a/x txt", str(tmp_path / "é*.jsonl")]
    folders = {shards_dir(path, name) for path in paths for name in ("bytes", "gpt2")}
    assert len(folders) == 12
    assert {folder.parent for folder in folders} == {ROOT / "data" / "shards"}
    assert shards_dir("books", "gpt2").name == "books-gpt2"
    assert shards_dir("data/../x.txt", "bytes") == shards_dir(os.path.abspath("x.txt"), "bytes")


def test_progress_reports_tokens_per_second(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10_000, 3)).__next__)
    prepare(write_source(tmp_path / "in", "txt"), "bytes", tmp_path / "out")
    assert capsys.readouterr().err.count("tokens/s") > len(TEXTS) // 2
