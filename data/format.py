"""A token shard: one split of a corpus in one file.

    header    4096 bytes: magic, version and length (uint32), the fields of `Header` as JSON, zeros
    tokens    little-endian uint16, or uint32 for a vocabulary above 65,536; zeros up to a multiple of 8 bytes
    index     int64 (n_documents,): where each document starts among the tokens

A document is its tokens followed by the end id. Only the index says where one begins: a text may hold the
end id.
"""
import dataclasses
import json
import os
import shutil
import struct
import tempfile
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER_BYTES = b"nanolong", 1, 4096
PREFIX = struct.Struct("<8sII")


@dataclass(frozen=True, kw_only=True)
class Header:
    dtype: str
    vocab_size: int
    end_id: int
    tokenizer: str
    tokenizer_hash: str
    split: str
    n_tokens: int = 0
    n_documents: int = 0

    @property
    def index_at(self) -> int:
        return HEADER_BYTES + -(-self.n_tokens * np.dtype(self.dtype).itemsize // 8) * 8


def dtype_for(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class Writer:
    """Streams documents into a shard; `path` appears, whole and synced, when the `with` block ends well."""

    def __init__(self, path: Path, split: str, tokenizer):
        self.path, self.tokenizer = Path(path), tokenizer
        self.header = Header(dtype=dtype_for(tokenizer.vocab_size), vocab_size=tokenizer.vocab_size,
                             end_id=tokenizer.end_id, tokenizer=tokenizer.name,
                             tokenizer_hash=tokenizer.hash, split=split)
        self.n_tokens = self.n_documents = 0
        self.temporary = self.path.with_name(f".{self.path.name}.{uuid.uuid4().hex}.tmp")

    def __enter__(self):
        self.file = open(self.temporary, "xb")
        self.file.write(bytes(HEADER_BYTES))
        self.starts = tempfile.TemporaryFile(dir=self.path.parent)     # on disk: there may be 10^8
        return self

    def add(self, pieces: Iterable[np.ndarray]) -> None:
        """One document, its ids in pieces of any integer type. ValueError: an id outside the vocabulary."""
        self.starts.write(struct.pack("<q", self.n_tokens))
        self.n_documents += 1
        for ids in pieces:
            self._write(np.asarray(ids))
        self._write(np.array([self.header.end_id]))

    def _write(self, ids: np.ndarray) -> None:
        if ids.size and not 0 <= ids.min() <= ids.max() < self.header.vocab_size:
            raise ValueError(f"ids {ids.min()} to {ids.max()} are not all ids of tokenizer "
                             f"{self.header.tokenizer!r}: 0 to below vocab_size={self.header.vocab_size}")
        self.file.write(ids.astype(self.header.dtype))
        self.n_tokens += ids.size

    def __exit__(self, kind, error, trace):
        try:
            if kind is None:
                self._finish()
        finally:
            self.file.close()
            self.starts.close()
            self.temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        if not self.n_documents:
            raise ValueError(f"{self.path}: no documents for split {self.header.split!r}")
        header = dataclasses.replace(self.header, n_tokens=self.n_tokens, n_documents=self.n_documents)
        self.file.write(bytes(header.index_at - self.file.tell()))
        self.starts.seek(0)
        shutil.copyfileobj(self.starts, self.file)
        fields = json.dumps(dataclasses.asdict(header)).encode()
        self.file.seek(0)
        self.file.write(PREFIX.pack(MAGIC, VERSION, len(fields)) + fields)
        self.file.flush()
        os.fsync(self.file.fileno())
        os.rename(self.temporary, self.path)


class Shard:
    """Reads a shard: `header`, `tokens()`, `starts()`.

    FileNotFoundError: no such file. ValueError: not a shard, another version, truncated or damaged."""

    def __init__(self, path: Path):
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"no token shard {self.path}: run `python -m data.prepare` first")
        with open(self.path, "rb") as file:
            self.header = _parse(self.path, file.read(HEADER_BYTES))
        h, size = self.header, self.path.stat().st_size
        expected = h.index_at + 8 * h.n_documents
        if size != expected:
            what = "truncated" if size < expected else "too long"
            raise ValueError(f"{self.path} is {what}: {size} bytes, but {h.n_tokens} tokens and "
                             f"{h.n_documents} documents take {expected}; prepare it again")
        starts = self.starts()
        if starts[0] != 0 or starts[-1] >= h.n_tokens:
            raise ValueError(f"{self.path} is damaged: document starts run from {starts[0]} to {starts[-1]}, "
                             f"not from 0 to below n_tokens={h.n_tokens}; prepare it again")

    # A map is made anew at each call: pages that a lasting one has touched count as the process's memory.
    def tokens(self) -> np.ndarray:
        """(n_tokens,) uint16 or uint32, a read-only memory map."""
        return np.memmap(self.path, self.header.dtype, "r", HEADER_BYTES, (self.header.n_tokens,))

    def starts(self) -> np.ndarray:
        """(n_documents,) int64, increasing, a read-only memory map."""
        return np.memmap(self.path, "<i8", "r", self.header.index_at, (self.header.n_documents,))


def _parse(path: Path, head: bytes) -> Header:
    if len(head) < HEADER_BYTES and head[:8] == MAGIC:
        raise ValueError(f"{path} is truncated: {len(head)} bytes, less than its header; prepare it again")
    if head[:8] != MAGIC:
        raise ValueError(f"{path} is not a token shard: it starts with {head[:8]!r}, not {MAGIC!r}")
    _, version, length = PREFIX.unpack_from(head)
    if version != VERSION:
        raise ValueError(f"{path} has format version {version}, this code reads {VERSION}; prepare it again")
    try:
        header = Header(**json.loads(head[PREFIX.size:PREFIX.size + length]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has a damaged header ({error}); prepare it again") from error
    if header.dtype != dtype_for(header.vocab_size):
        raise ValueError(f"{path} says dtype {header.dtype!r}, but vocab_size={header.vocab_size} takes "
                         f"{dtype_for(header.vocab_size)!r}; prepare it again")
    if header.n_tokens < 1 or header.n_documents < 1:
        raise ValueError(f"{path} says n_tokens={header.n_tokens}, n_documents={header.n_documents}: "
                         f"both must be positive; prepare it again")
    return header
