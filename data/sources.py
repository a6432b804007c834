"""A source is a generator of documents: `books`, the corpus in this repository, or txt, jsonl, parquet files.

A file of text is one document; a row of jsonl or parquet is one. A text comes in pieces, so that memory stays
bounded by a row or a piece. Rows without a text (null or empty) and empty files are no documents.
"""
import glob
import hashlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

BOOKS = Path(__file__).parent / "books" / "books.parquet"
HELD_OUT = ("persuasion", "hamlet", "the-tempest")      # long: loss by position must reach 64k
KINDS = (".txt", ".jsonl", ".parquet")
PIECE = 1 << 20                                         # characters
BATCH = 64                                              # rows of parquet in memory at once


class Document(NamedTuple):
    title: str                  # for books the work's, else file:row
    pieces: Iterator[str]       # non-empty, at most PIECE characters each


def find(source: str) -> list[Path]:
    """The files of a source: `books`, or a file, folder (with its subfolders) or glob, all of one kind.

    FileNotFoundError: nothing there. ValueError: an unknown kind, or several."""
    if source == "books":
        return [BOOKS]
    path = Path(source)
    if path.is_file():
        files = [path]
    elif source and path.is_dir():
        files = [Path(p) for p in glob.glob(f"{glob.escape(source)}/**", recursive=True)]   # no .hidden ones
    else:
        files = [Path(p) for p in glob.glob(source, recursive=True)]
    known = sorted(p for p in files if p.suffix in KINDS and p.is_file())
    if not files:
        hub = bool(re.fullmatch(r"[\w.-]+/[\w.-]+", source)) and path.suffix not in KINDS
        hint = " (hub names, owner/name, are not supported yet: download the files)" if hub else ""
        raise FileNotFoundError(f"no file, folder or match for source={source!r}{hint}; pass 'books' or "
                                f"a path, folder or glob of {', '.join(KINDS)}")
    if not known:
        raise ValueError(f"source={source!r} has no {', '.join(KINDS)} file")
    kinds = sorted({p.suffix for p in known})
    if len(kinds) > 1:
        raise ValueError(f"source={source!r} mixes {' and '.join(kinds)}; pass a glob such as *{kinds[0]}")
    return known


def fingerprint(source: str) -> str:
    """Changes when the source does. `books`: by content, on any machine; else by path, size and mtime."""
    files = find(source)
    if source == "books":
        return hashlib.sha256(BOOKS.read_bytes()).hexdigest()
    stats = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()


def documents(source: str, text_column: str = "text") -> Iterator[Document]:
    """Every document, in a fixed order. ValueError: an unreadable file, a column missing or not text."""
    if source == "books":
        for row, _ in _parquet(BOOKS, ["title", "text"]):
            yield Document(row["title"], _cut(row["text"]))
        return
    for path in find(source):
        if path.suffix == ".txt":
            yield Document(str(path), _read(path))
            continue
        rows = _jsonl(path, text_column) if path.suffix == ".jsonl" else _parquet(path, [text_column])
        for row, where in rows:
            text = row[text_column]
            if not isinstance(text, str | None):
                raise ValueError(f"{where}: column {text_column!r} must be text, not {type(text).__name__}")
            yield Document(where, _cut(text or ""))


def split(source: str, text_column: str, val_fraction: float) -> Iterator[tuple[str, Iterator[str]]]:
    """Every document as ("train" or "val", pieces), neither split empty. ValueError: too little text.

    `books` holds out HELD_OUT. Elsewhere a document's key, a hash of its first piece, decides: equal texts
    stay together, and new documents move no old ones. Where that leaves a split empty, the document nearest
    to the threshold moves; a source of one document holds out its tail. To learn which case it is, this reads
    the source once before it returns."""
    if source == "books":
        return (("val" if d.title in HELD_OUT else "train", d.pieces) for d in documents(source))
    print(f"reading {source} to choose what is held out", file=sys.stderr)
    count, lowest, highest = 0, 1 << 64, -1
    for key, _ in _keyed(source, text_column):
        count, lowest, highest = count + 1, min(lowest, key), max(highest, key)
    if count == 0:
        raise ValueError(f"source={source!r} holds no text")
    if count == 1:
        return _split_tail(source, text_column, val_fraction)
    if lowest == highest:
        raise ValueError(f"source={source!r} holds one text {count} times: nothing to hold out")
    below = min(max(int(val_fraction * (1 << 64)), lowest + 1), highest)
    return (("val" if key < below else "train", pieces) for key, pieces in _keyed(source, text_column))


def _split_tail(source: str, text_column: str, val_fraction: float) -> Iterator[tuple[str, Iterator[str]]]:
    length = sum(len(piece) for _, pieces in _keyed(source, text_column) for piece in pieces)
    cut = length - max(1, round(length * val_fraction))
    if cut < 1:
        raise ValueError(f"source={source!r} holds {length} character: too short to split")
    print(f"{source} is one document: held out are the last {length - cut} of its {length} characters",
          file=sys.stderr)
    return ((name, _slice(pieces, *span)) for name, span in (("train", (0, cut)), ("val", (cut, length)))
            for _, pieces in _keyed(source, text_column))


def _keyed(source: str, text_column: str) -> Iterator[tuple[int, Iterator[str]]]:
    for document in documents(source, text_column):
        first = next(document.pieces, "")
        if first:
            digest = hashlib.blake2b(first.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
            yield int.from_bytes(digest), chain([first], document.pieces)


def _slice(pieces: Iterator[str], start: int, stop: int) -> Iterator[str]:
    at = 0
    for piece in pieces:
        part = piece[max(start - at, 0):max(stop - at, 0)]
        at += len(piece)
        if part:
            yield part


def _cut(text: str) -> Iterator[str]:
    return (text[i:i + PIECE] for i in range(0, len(text), PIECE))


def _read(path: Path) -> Iterator[str]:
    try:
        with open(path, encoding="utf-8", newline="") as file:      # newline="": the text as it stands
            while piece := file.read(PIECE):
                yield piece
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason}") from error


def _jsonl(path: Path, column: str) -> Iterator[tuple[dict, str]]:
    """Row by row ourselves: readers that infer a column's type turn texts that look like dates into dates."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            if line.isspace():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{where} must be an object, not {type(row).__name__}")
            _require(column, list(row), where)
            yield row, where


def _parquet(path: Path, columns: list[str]) -> Iterator[tuple[dict, str]]:
    for column in columns:
        _require(column, _stream(path).column_names, str(path))
    number = 0
    for batch in _stream(path, columns=columns).iter(BATCH):        # row by row it is 15 times slower
        for values in zip(*batch.values(), strict=True):
            number += 1
            yield dict(zip(batch, values, strict=True)), f"{path}:{number}"


def _stream(path: Path, **options):
    import datasets
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False       # else it first calls the network, and waits
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        with tempfile.TemporaryDirectory() as cache:        # streaming keeps nothing, yet takes a lock there
            return datasets.load_dataset("parquet", data_files=[glob.escape(str(path))], split="train",
                                         streaming=True, batch_size=BATCH, cache_dir=cache, **options)
    except ValueError as error:                             # pyarrow's errors are, and do not name the file
        raise ValueError(f"cannot read {path}: {error}") from error


def _require(column: str, columns: list[str], where: str) -> None:
    if column not in columns:
        raise ValueError(f"{where} has no column {column!r}; its columns: {', '.join(columns)}")
