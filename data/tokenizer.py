"""Text to token ids and back: raw bytes, or GPT-2's byte-level BPE built from the files in data/gpt2.

Both have `name, vocab_size, end_id, hash, encode, encode_pieces, decode`. Text that spells <|endoftext|> is
ordinary text; `decode` shows the end id as that marker.
"""
import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

END = "<|endoftext|>"


class Bytes:
    """The 256 bytes of UTF-8, and an end id."""
    name, vocab_size, end_id = "bytes", 257, 256
    hash = hashlib.sha256(b"utf-8 bytes 0-255, end 256").hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """-> uint8 (n,). A lone surrogate, which UTF-8 cannot say, becomes '?'."""
        return np.frombuffer(text.encode("utf-8", errors="replace"), np.uint8)

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of one text that arrives in pieces; joined, they equal `encode` of the whole."""
        return map(self.encode, pieces)

    def decode(self, ids) -> str:
        """Bytes that are no UTF-8 become U+FFFD. ValueError: an id outside the vocabulary."""
        marker = END.encode()
        parts = (marker if i == self.end_id else i.to_bytes() for i in _checked(ids, self))
        return b"".join(parts).decode(errors="replace")


class GPT2:
    """GPT-2's 50,256 byte-level BPE tokens, and an end id. tiktoken is imported at the first text."""
    name, vocab_size, end_id = "gpt2", 50257, 50256
    files = {"encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
             "vocab.bpe":    "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"}
    hash = hashlib.sha256("".join(files.values()).encode()).hexdigest()
    chunk, longest = 1 << 16, 1 << 17       # characters
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

    def __init__(self, folder: Path = Path(__file__).parent / "gpt2"):
        self.folder = folder

    def encode(self, text: str) -> np.ndarray:
        """-> uint32 (n,). A lone surrogate becomes U+FFFD."""
        return np.concatenate([np.empty(0, np.uint32), *self.encode_pieces([text])])

    def encode_pieces(self, pieces: Iterable[str]) -> Iterator[np.ndarray]:
        """The ids of one text that arrives in pieces; joined, they equal `encode` of the whole.

        A run of more than `longest` characters without a place to cut is cut all the same (tiktoken's stack
        overflows on a million blanks): it may take an id more, and decodes to itself."""
        rest = ""
        for piece in pieces:
            for at in range(0, len(piece), self.chunk):
                rest += piece[at:at + self.chunk]
                cut = _last_cut(rest) or (len(rest) if len(rest) > self.longest else 0)
                if cut:
                    yield self._ids(rest[:cut])
                    rest = rest[cut:]
        if rest:
            yield self._ids(rest)

    def _ids(self, text: str) -> np.ndarray:
        return np.array(self._bpe.encode_ordinary(text), np.uint32)

    def decode(self, ids) -> str:
        """Bytes that are no UTF-8 become U+FFFD. ValueError: an id outside the vocabulary."""
        return self._bpe.decode(_checked(ids, self))

    @functools.cached_property
    def _bpe(self):
        import tiktoken
        data = {name: (self.folder / name).read_bytes() for name in self.files}
        for name, expected in self.files.items():
            found = hashlib.sha256(data[name]).hexdigest()
            if found != expected:
                raise ValueError(f"{self.folder / name} has SHA-256 {found}, not GPT-2's {expected}")
        # An id is its token's rank among the merges, so encoder.json alone says both.
        ids = {token: i for token, i in json.loads(data["encoder.json"]).items() if token != END}
        byte_of = {char: byte for byte, char in enumerate(byte_letters())}
        ranks = {bytes(byte_of[char] for char in token): i for token, i in ids.items()}
        return tiktoken.Encoding("gpt2-local", pat_str=self.pattern, mergeable_ranks=ranks,
                                 special_tokens={END: self.end_id}, explicit_n_vocab=self.vocab_size)


def get(name: str) -> Bytes | GPT2:
    """ValueError: no tokenizer of that name."""
    kinds = {kind.name: kind for kind in (Bytes, GPT2)}
    if name not in kinds:
        raise ValueError(f"tokenizer={name!r} must be one of {', '.join(kinds)}")
    return kinds[name]()


def byte_letters() -> list[str]:
    """The letter for each byte in GPT-2's files: itself if it prints, else the next one from U+0100 on."""
    prints = [33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255 for b in range(256)]
    spare = iter(range(256, 512))
    return [chr(b if prints[b] else next(spare)) for b in range(256)]


def _last_cut(text: str) -> int:
    """The last place where GPT-2's pattern surely ends a token: before a blank after a non-blank; 0: none."""
    for cut in range(len(text) - 1, 0, -1):
        if text[cut] in " \n" and not text[cut - 1].isspace():
            return cut
    return 0


def _checked(ids, tokenizer) -> list[int]:
    ids = np.asarray(ids, np.int64).reshape(-1)
    for i in ids[(ids < 0) | (ids >= tokenizer.vocab_size)][:1]:
        raise ValueError(f"id {i} is none of tokenizer {tokenizer.name!r}: 0 to {tokenizer.vocab_size - 1}")
    return ids.tolist()
