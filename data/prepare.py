"""Turns a source into token shards: `python -m data.prepare books --tokenizer gpt2`.

A folder of shards holds train.tokens, val.tokens and request.json, which says what they were made from. It is
built under a temporary name beside its place and renamed, so a folder that exists is whole.
"""
import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from data import sources
from data import tokenizer as tokenizers
from data.format import Shard, Writer

ROOT = Path(__file__).resolve().parent.parent
SPLITS = ("train", "val")


def shards_dir(source: str, tokenizer: str) -> Path:
    """Where a source's shards go by default: data/shards/SLUG-TOKENIZER, one folder for each path."""
    if source == "books":
        return ROOT / "data" / "shards" / f"books-{tokenizer}"
    full = os.path.abspath(source)
    slug = re.sub(r"[^\w.-]+", "-", os.path.basename(full)).strip("-.")[:40]
    return ROOT / "data" / "shards" / f"{slug}-{hashlib.sha256(full.encode()).hexdigest()[:8]}-{tokenizer}"


def shard_path(folder: Path, split: str) -> Path:
    return Path(folder) / f"{split}.tokens"


def prepare(source: str, tokenizer: str, out_dir: str | Path, *, text_column: str = "text",
            val_fraction: float = 0.05) -> Path:
    """Writes the train and val shards of `source` to `out_dir` and returns it; at once if it holds them.

    tokenizer: a name, or an object with data.tokenizer's interface. ValueError or FileNotFoundError: bad
    arguments, a source that cannot be used, an `out_dir` with something else in it; it is then as it was."""
    tok = tokenizers.get(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if not 0 < val_fraction < 1:
        raise ValueError(f"{val_fraction=} must lie between 0 and 1")
    out, request = Path(out_dir), _request(source, tok, text_column, val_fraction)
    if _holds(out, request):
        return out
    documents = sources.split(source, text_column, val_fraction)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        _write(temporary, documents, tok)
        if sources.fingerprint(source) != request["fingerprint"]:
            raise ValueError(f"source={source!r} changed while it was read; prepare it again")
        (temporary / "request.json").write_text(json.dumps(request, indent=2) + "\n")
        _publish(temporary, out, request)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _request(source: str, tok, text_column: str, val_fraction: float) -> dict:
    """What the shards depend on, and nothing else: `books` has its own split, text files have no columns."""
    books, files = source == "books", sources.find(source)
    return dict(source=source, fingerprint=sources.fingerprint(source),
                tokenizer=tok.name, tokenizer_hash=tok.hash,
                val_fraction=None if books else val_fraction,
                text_column=None if books or files[0].suffix == ".txt" else text_column)


def _holds(out: Path, request: dict) -> bool:
    """Whether `out` holds the shards of this request. ValueError: it holds other things or damaged shards."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / "request.json").is_file():
        raise ValueError(f"{out} exists and is no folder of token shards; choose another folder")
    held = json.loads((out / "request.json").read_text())
    differ = [key for key in request if key != "source" and held.get(key) != request[key]]
    if differ:
        ordered = dict.fromkeys(["source", "tokenizer", *differ])
        def show(r):
            return ", ".join(f"{k}={r.get(k)!r}" for k in ordered)
        raise ValueError(f"{out} holds shards of {show(held)}; asked for {show(request)}; "
                         f"choose another folder or delete this one")
    for split in SPLITS:
        Shard(shard_path(out, split))
    return True


def _write(folder: Path, documents: Iterable[tuple[str, Iterator[str]]], tok) -> None:
    progress = _Progress()
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(Writer(shard_path(folder, split), split, tok))
                   for split in SPLITS}
        for split, pieces in documents:
            writers[split].add(progress.watch(tok.encode_pieces(pieces)))
    progress.show()


def _publish(temporary: Path, out: Path, request: dict) -> None:
    try:
        os.rename(temporary, out)                    # onto nothing or an empty folder; fails on any other
    except OSError:
        if not _holds(out, request):                 # another process was first: the same shards will do
            raise
    parent = os.open(out.parent, os.O_RDONLY)
    os.fsync(parent)
    os.close(parent)


class _Progress:
    """Tokens so far and per second, on stderr every two seconds."""

    def __init__(self):
        self.tokens, self.began = 0, time.monotonic()
        self.shown = self.began

    def watch(self, pieces: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        for ids in pieces:
            self.tokens += len(ids)
            if time.monotonic() - self.shown > 2:
                self.show()
            yield ids

    def show(self) -> None:
        self.shown = time.monotonic()
        seconds = max(self.shown - self.began, 1e-9)
        print(f"{self.tokens:,} tokens, {self.tokens / seconds:,.0f} tokens/s", file=sys.stderr)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m data.prepare",
                                     description="Turn a source into token shards.")
    parser.add_argument("source", help="books, or a file, folder or glob of txt, jsonl or parquet")
    parser.add_argument("--tokenizer", default="bytes", help="bytes (default) or gpt2")
    parser.add_argument("--out", help="folder of the shards; default: data/shards/SOURCE-TOKENIZER")
    parser.add_argument("--text-column", default="text", help="column with the text in jsonl and parquet")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="share held out (not for books)")
    args = parser.parse_args(argv)
    try:
        out = prepare(args.source, args.tokenizer, args.out or shards_dir(args.source, args.tokenizer),
                      text_column=args.text_column, val_fraction=args.val_fraction)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    headers = [Shard(shard_path(out, split)).header for split in SPLITS]
    counts = (f"{h.split} {h.n_documents:,} documents, {h.n_tokens:,} tokens" for h in headers)
    print(f"{out}: {'; '.join(counts)}")


if __name__ == "__main__":
    main()
