"""Token shards to batches, each a pure function of (step, micro, rank, world) and the seed: no state to save.

Row r of a split is tokens[r*T : r*T + T + 1] of its stream: documents with their end ids, one after another.
"""
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.format import Shard


class Batch(NamedTuple):
    tokens: Tensor                  # (B, T) int64
    targets: Tensor                 # (B, T) int64; -1, nothing to predict: after an end id, in padding
    doc_start: Tensor | None        # (B, T) int32: where in the row this token's document begins, 0 if before
                                    # the row; None if every row holds one document, or document_mask=False


class Loader:
    """Batches of `batch` rows of `seq_len` tokens from one split of a folder of shards.

    FileNotFoundError: no shards there. ValueError: a damaged shard, numbers that do not fit each other, or
    fewer tokens than one row (only for "train": `sequential` pads, so another split may be shorter)."""

    def __init__(self, folder: str | Path, split: str, *, seq_len: int, batch: int, tokens_per_step: int,
                 seed: int, document_mask: bool = True):
        for name, value in dict(seq_len=seq_len, batch=batch, tokens_per_step=tokens_per_step).items():
            if value < 1:
                raise ValueError(f"{name}={value} must be positive")
        if seed < 0:
            raise ValueError(f"{seed=} must not be negative")
        if tokens_per_step % (batch * seq_len):
            raise ValueError(f"{tokens_per_step=} must be a multiple of batch * seq_len = {batch * seq_len}")
        self.shard = Shard(Path(folder) / f"{split}.tokens")
        h = self.shard.header
        self.vocab_size, self.end_id, self.tokenizer_name = h.vocab_size, h.end_id, h.tokenizer
        self.n_tokens, self.n_rows = h.n_tokens, (h.n_tokens - 1) // seq_len
        self.seq_len, self.rows, self.rows_per_step = seq_len, batch, tokens_per_step // seq_len
        self.seed, self.document_mask = seed, document_mask
        if split == "train":
            self._require_a_row()

    def batch(self, step: int, micro: int, rank: int = 0, world: int = 1) -> Batch:
        """Micro-batch `micro` of optimizer step `step` on `rank`.

        The rows of all steps run through one permutation of the split after another: each row comes once an
        epoch, and the rows of a step depend neither on `world` nor on how micro-batches cut them.
        ValueError: a step that does not divide over `world`, or a `micro` or `rank` beyond its end."""
        self._require_a_row()
        together = self.rows * world
        if self.rows_per_step % together:
            raise ValueError(f"tokens_per_step / seq_len = {self.rows_per_step} rows must be a multiple of "
                             f"batch * world = {together}")
        micro_steps = self.rows_per_step // together
        if step < 0 or not 0 <= rank < world or not 0 <= micro < micro_steps:
            raise ValueError(f"no batch {step=}, {micro=}, {rank=} where {world=} and {micro_steps=}")
        first = step * self.rows_per_step + (micro * world + rank) * self.rows
        places = (divmod(n, self.n_rows) for n in range(first, first + self.rows))
        rows = [_permutation(self.seed, epoch, self.n_rows)[i] for epoch, i in places]
        return self._read(rows, self.n_tokens - 1)

    def sequential(self, max_tokens: int | None = None, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The split, or its first `max_tokens` positions, in order: every target once over all ranks.

        Every rank gets the same number of batches, all of the same shape; beyond the end, tokens are the end
        id and targets -1 (a batch may be all padding)."""
        stop = self.n_tokens - 1 if max_tokens is None else min(max_tokens, self.n_tokens - 1)
        together = self.rows * world
        for first in range(0, -(-stop // self.seq_len), together):
            first += rank * self.rows
            yield self._read(range(first, first + self.rows), stop)

    def _read(self, rows, stop: int) -> Batch:
        """These rows, with positions from `stop` on as padding."""
        T, shape = self.seq_len, (self.rows, self.seq_len)
        tokens, targets = np.full(shape, self.end_id, np.int64), np.full(shape, -1, np.int64)
        doc_start = np.zeros(shape, np.int32)
        stream, starts = self.shard.tokens(), self.shard.starts()
        for b, row in enumerate(rows):
            at = int(row) * T
            n = min(T, stop - at)
            if n <= 0:
                continue
            block = stream[at:at + n + 1].astype(np.int64)
            if block.max() >= self.vocab_size:
                raise ValueError(f"{self.shard.path} is damaged: token {block.max()} near position {at} is "
                                 f"not below vocab_size={self.vocab_size}")
            tokens[b, :n], targets[b, :n] = block[:-1], block[1:]
            first, last = np.searchsorted(starts, [at, at + n], side="right")
            begins = starts[first:last] - at                # 1 to n: documents that do not begin with the row
            targets[b, begins - 1] = -1                     # their first token follows an end id
            begins = begins[begins < n]
            doc_start[b, begins] = begins
        one_document = not doc_start.any()
        np.maximum.accumulate(doc_start, axis=1, out=doc_start)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets),
                     torch.from_numpy(doc_start) if self.document_mask and not one_document else None)

    def _require_a_row(self) -> None:
        if self.n_rows < 1:
            raise ValueError(f"seq_len={self.seq_len} needs {self.seq_len + 1} tokens, but "
                             f"{self.shard.path} has only {self.n_tokens}")


@functools.lru_cache(maxsize=4)
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(n)
