"""Batches of token streams, as pure functions of the stream, the step and the shard.

Stream packing cuts the stream where a row ends: a row may begin inside a document, and contain several. The rows of a
batch follow each other in the data, or are drawn from all of it.

Best-fit packing has rows of whole documents, which begin with a document and are filled with the start of another. A
row takes the longest document of a buffer that fits, again and again. If none fits, the shortest one is cut to the rest
of the row, and its remaining tokens are not used. Which documents a row has depends on their lengths and their order
alone, so that every host computes the same rows. With padding, no document is cut: the rest of such a row has no
targets.

The rows of a run may come from several data sets; which one row n comes from depends on n, the seed and the weights.
"""

from __future__ import annotations

import bisect
import functools
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from models_torch.gpt import IGNORED_TARGET
from train_jax.errors import UserError
from train_jax.language.text_set import TokenStream
from train_jax.run.mixing import apportion

Batch = dict[str, np.ndarray]
"""`inputs` and `targets`, (rows, seq_len), int32; the target of a position is the token after it, or `IGNORED_TARGET`.

A task of yours may add `weights`, (rows, seq_len), and `divisor`, (rows,), both float32: see `LanguageTask.loss`.
"""

BUFFER_DOCUMENTS = 1000
"""The buffer is filled before each choice until it has at least as many documents, as in the published loader."""
REFILL_DOCUMENTS = 128
"""Documents that enter the buffer together; fewer at the end of the data."""
PADDED_BUFFER_DOCUMENTS = 100
"""`BUFFER_DOCUMENTS` with padding, as in the published loader of conversations; documents enter one by one."""

BLOCK_ROWS = 1024
"""Number of rows in which each data set has exactly its share."""

Part = tuple[int, int]
"""The number of a document, and the number of its first tokens that are used."""


def tokens_per_step(rows: int, seq_len: int) -> int:
    """Returns the number of tokens that a step takes from the stream; the last one is only a target.

    The published loader takes as many, so one process of it has the same batches.
    """
    return rows * seq_len + 1


class Rows:
    """The rows of a train split by number, with continued counting when the data repeat."""

    rows_per_epoch: float
    cut_documents: int = 0
    """Number of documents that are longer than a row, where all others are whole."""

    def at(self, numbers: range) -> Batch:
        """Returns the rows with these numbers."""
        raise NotImplementedError

    def batch(self, *, step: int, rows: int, shard: tuple[int, int]) -> Batch:
        """Returns shard `(index, count)` of the batch of `rows` rows at `step`."""
        own = shard_rows(rows, shard)
        return self.at(range(step * rows + own.start, step * rows + own.stop))


def shard_rows(rows: int, shard: tuple[int, int]) -> range:
    """Returns the rows of a batch that belong to shard `(index, count)`."""
    index, count = shard
    return range(index * rows // count, (index + 1) * rows // count)


def _take(stream: TokenStream, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns tokens, and the same tokens as targets, without those of weight 0."""
    tokens = stream.take(start, count)
    if stream.weights is None:
        return tokens, tokens
    return tokens, np.where(stream.weights.take(start, count) == 0, np.int32(IGNORED_TARGET), tokens)


def _joined(rows: Iterable[tuple[np.ndarray, np.ndarray]]) -> Batch:
    """Returns the batch of rows, as inputs and targets, that have one token more than a row of the batch."""
    tokens, targets = (np.stack(each) for each in zip(*rows, strict=True))
    return {"inputs": tokens[:, :-1], "targets": targets[:, 1:]}


@dataclass(frozen=True)
class StreamRows(Rows):
    """The rows of a stream in order; the beginning follows the end."""

    stream: TokenStream
    seq_len: int
    step_rows: int
    """Rows of a step; the last token of the last row is only a target."""

    @property
    def rows_per_epoch(self) -> float:
        return self.step_rows * len(self.stream) / tokens_per_step(self.step_rows, self.seq_len)

    def at(self, numbers: range) -> Batch:
        starts = (number * self.seq_len + number // self.step_rows for number in numbers)
        return _joined(_take(self.stream, start, self.seq_len + 1) for start in starts)


@dataclass(frozen=True)
class ShuffledRows(Rows):
    """The rows of a stream in a random order, different in every epoch.

    In an epoch every token is a target once, except the first one and those after the last whole row.
    """

    stream: TokenStream
    seq_len: int
    seed: int

    @property
    def rows_per_epoch(self) -> int:
        return (len(self.stream) - 1) // self.seq_len

    def at(self, numbers: range) -> Batch:
        places = (shuffled(number, self.rows_per_epoch, self.seed) for number in numbers)
        return _joined(_take(self.stream, place * self.seq_len, self.seq_len + 1) for place in places)


def shuffled(number: int, count: int, seed: int) -> int:
    """Returns the place of an example by its number, which continues to count when the data repeat in another order."""
    epoch, within = divmod(number, count)
    return int(_order(count, seed, epoch)[within])


@functools.lru_cache(maxsize=2)  # a batch may belong to two epochs
def _order(count: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count)


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
            tokens, targets = _take(stream, first * seq_len, size)
            batch["inputs"].reshape(-1)[: size - 1] = tokens[:-1]
            batch["targets"].reshape(-1)[: size - 1] = targets[1:]
        yield batch


@dataclass
class Packer:
    """The state of packing between two rows."""

    lengths: np.ndarray
    """Number of tokens of each document, in the order of the data, which repeats without end."""
    capacity: int
    """Number of tokens of a row."""
    pads: bool = False
    """True if a row ends where no document fits; then none is longer than a row."""
    row: int = 0
    """Number of rows packed so far."""
    read: int = 0
    """Number of documents that have entered the buffer so far."""
    buffer: list[tuple[int, int]] = field(default_factory=list)
    """Length and number of each document, sorted; the number continues to count when the data repeat."""

    def next_row(self) -> list[Part]:
        """Packs a row."""
        parts = []
        free = self.capacity
        while free:
            self._refill()
            if self.pads and self.buffer[0][0] > free:
                break
            length, number = self.buffer.pop(self._choice(free))
            used = min(length, free)
            parts.append((number % len(self.lengths), used))
            free -= used
        self.row += 1
        return parts

    @property
    def used(self) -> int:
        """Number of documents used so far, with those that were cut."""
        return self.read - len(self.buffer)

    def _choice(self, free: int) -> int:
        """Returns the place of the longest document that fits, or of the shortest; among equal ones, the earliest."""
        fitting = bisect.bisect_left(self.buffer, (free + 1, 0))
        if fitting == 0:
            return 0
        return bisect.bisect_left(self.buffer, (self.buffer[fitting - 1][0], 0))

    def _refill(self) -> None:
        size, refill = (PADDED_BUFFER_DOCUMENTS, 1) if self.pads else (BUFFER_DOCUMENTS, REFILL_DOCUMENTS)
        if len(self.buffer) >= size:
            return
        while len(self.buffer) < size:
            first = self.read % len(self.lengths)
            added = self.lengths[first : first + refill].tolist()
            self.buffer += [(length, self.read + n) for n, length in enumerate(added)]
            self.read += len(added)
        self.buffer.sort()


class BestFit(Rows):
    """The rows of a split. A row is packed after all rows before it, which takes microseconds for each document."""

    def __init__(self, stream: TokenStream, bos: int, seq_len: int, *, pads: bool = False):
        """`bos` is the token that begins every document; it occurs nowhere else. Reads all tokens once."""
        self._stream = stream
        self._bos = bos
        self._capacity = seq_len + 1
        self._pads = pads
        places = []
        position = 0
        for chunk in stream.chunks():
            places.append(np.flatnonzero(chunk == bos) + position)
            position += len(chunk)
        self._starts = np.concatenate(places)
        self._lengths = np.diff(self._starts, append=position)
        if pads:
            self.cut_documents = int((self._lengths > self._capacity).sum())
            self._lengths = np.minimum(self._lengths, self._capacity)
        self._packer = self._new_packer()
        self._lock = threading.Lock()

    def _new_packer(self) -> Packer:
        return Packer(self._lengths, self._capacity, self._pads)

    def at(self, numbers: range) -> Batch:
        return _joined(self._row(parts) for parts in self._parts(numbers))

    @cached_property
    def rows_per_epoch(self) -> int:
        """The number of rows that use as many documents as the split has."""
        packer = self._new_packer()
        while packer.used < len(self._lengths):
            packer.next_row()
        return packer.row

    def _parts(self, numbers: range) -> list[list[Part]]:
        """Returns the parts of the rows; earlier rows are packed again if they are requested."""
        with self._lock:
            if self._packer.row > numbers.start:
                self._packer = self._new_packer()
            while self._packer.row < numbers.start:
                self._packer.next_row()
            packer = replace(self._packer, buffer=self._packer.buffer.copy())  # the same rows may be asked for again
        return [packer.next_row() for _ in numbers]

    def _row(self, parts: list[Part]) -> tuple[np.ndarray, np.ndarray]:
        row = [_take(self._stream, int(self._starts[number]), used) for number, used in parts]
        rest = self._capacity - sum(used for _, used in parts)
        row.append((np.full(rest, self._bos, np.int32), np.full(rest, IGNORED_TARGET, np.int32)))
        tokens, targets = (np.concatenate(each) for each in zip(*row, strict=True))
        return tokens, targets


class MixedRows(Rows):
    """Rows of several data sets. Each has its share of every `BLOCK_ROWS` rows, and gives its own rows in their order.

    The places of a block are permuted at random, so that a batch has about the shares of the block.
    """

    def __init__(self, sources: Sequence[Rows], weights: Sequence[float], seed: int):
        """Raises `UserError` if a data set has no row in a block."""
        self._sources = sources
        self._seed = seed
        self._counts = tuple(apportion(weights, BLOCK_ROWS))
        if not all(self._counts):
            raise UserError(
                f"{BLOCK_ROWS:,} rows have none of the data set of weight {weights[self._counts.index(0)]:g}, expected "
                "at least one; use --data-weights that differ less"
            )
        self.rows_per_epoch = sum(source.rows_per_epoch for source in sources)
        self.cut_documents = sum(source.cut_documents for source in sources)

    def at(self, numbers: range) -> Batch:
        first, before = divmod(numbers.start, BLOCK_ROWS)
        blocks = range(first, numbers.stop // BLOCK_ROWS + 1)
        places = np.concatenate([_block(self._counts, self._seed, block) for block in blocks])
        own = places[before : before + len(numbers)]
        batch = {}
        for number, (source, count) in enumerate(zip(self._sources, self._counts, strict=True)):
            where = np.flatnonzero(own == number)
            start = first * count + np.count_nonzero(places[:before] == number)
            for name, rows in source.at(range(start, start + len(where))).items() if len(where) else ():
                batch.setdefault(name, np.empty((len(own), *rows.shape[1:]), rows.dtype))[where] = rows
        return batch


@functools.lru_cache(maxsize=2)
def _block(counts: tuple[int, ...], seed: int, block: int) -> np.ndarray:
    """Returns the number of the data set of each row of a block."""
    return np.random.default_rng([seed, block]).permutation(np.repeat(np.arange(len(counts)), counts))
