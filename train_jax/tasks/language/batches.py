"""Batches of token streams, as pure functions of the stream, the step and the shard.

Stream packing cuts the stream where a row ends: a row may begin inside a document, and contain several. The rows of a
batch follow each other in the data, or are drawn from all of it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from models_torch.gpt import IGNORED_TARGET
from train_jax.tasks.language.text_set import TokenStream

Batch = dict[str, np.ndarray]
"""`inputs` and `targets`, (rows, seq_len), int32; the target of a position is the token after it."""


def tokens_per_step(rows: int, seq_len: int) -> int:
    """Returns the number of tokens that a step takes from the stream; the last one is only a target.

    The published loader takes as many, so one process of it has the same batches.
    """
    return rows * seq_len + 1


def stream_batch(stream: TokenStream, *, step: int, rows: int, seq_len: int, shard: tuple[int, int]) -> Batch:
    """Returns shard `(index, count)` of the batch at `step`; after the end of the stream follows its beginning."""
    index, count = shard
    first, last = index * rows // count, (index + 1) * rows // count
    start = step * tokens_per_step(rows, seq_len) + first * seq_len
    return _rows(stream.take(start, (last - first) * seq_len + 1), seq_len)


@dataclass(frozen=True)
class ShuffledRows:
    """The rows of a stream in a random order, which is another one in every epoch.

    In an epoch every token is a target once, except the first one and those after the last whole row.
    """

    stream: TokenStream
    seq_len: int
    seed: int

    @property
    def rows_per_epoch(self) -> int:
        return (len(self.stream) - 1) // self.seq_len

    def batch(self, *, step: int, rows: int, shard: tuple[int, int]) -> Batch:
        """Returns shard `(index, count)` of the batch at `step`."""
        index, count = shard
        places = range(step * rows + index * rows // count, step * rows + (index + 1) * rows // count)
        tokens = np.stack([self.stream.take(self._row(place) * self.seq_len, self.seq_len + 1) for place in places])
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def _row(self, place: int) -> int:
        epoch, within = divmod(place, self.rows_per_epoch)
        return int(_order(self.rows_per_epoch, self.seed, epoch)[within])


@functools.lru_cache(maxsize=2)  # a batch may belong to two epochs
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


def _rows(tokens: np.ndarray, seq_len: int) -> Batch:
    return {"inputs": tokens[:-1].reshape(-1, seq_len), "targets": tokens[1:].reshape(-1, seq_len)}


def count_rows(stream: TokenStream, seq_len: int) -> int:
    """Returns the number of rows that contain every token of the stream once as a target, except the first token."""
    return -(-(len(stream) - 1) // seq_len)


def eval_batches(
    stream: TokenStream, *, rows: int, seq_len: int, limit: int, shard: tuple[int, int]
) -> Iterator[Batch]:
    """Yields this shard of each batch with the first `limit` rows of the stream (0: all).

    Rows after the end have only targets that are ignored, as have the positions after the last token.
    """
    index, count = shard
    available = count_rows(stream, seq_len)
    total = min(limit or available, available)
    local = rows // count
    for start in range(0, total, rows):
        first = start + index * local
        filled = max(0, min(local, total - first))
        batch = {
            "inputs": np.zeros((local, seq_len), np.int32),
            "targets": np.full((local, seq_len), IGNORED_TARGET, np.int32),
        }
        if filled:
            size = min(filled * seq_len + 1, len(stream) - first * seq_len)
            tokens = stream.take(first * seq_len, size)
            batch["inputs"].reshape(-1)[: size - 1] = tokens[:-1]
            batch["targets"].reshape(-1)[: size - 1] = tokens[1:]
        yield batch
