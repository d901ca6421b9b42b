"""Batches as a pure function of (data set, seed, step, shard), without iterator state."""

import bisect
import threading
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.runtime.batch_size import check_divides
from train_jax.tasks.puzzles.augmentation import transform_for, words_for
from train_jax.tasks.puzzles.format import PuzzleSet
from train_jax.tasks.puzzles.kind import Words

IGNORED_LABEL = -100
"""The label that the loss and the metrics ignore, as in PyTorch's cross-entropy."""

BLOCK = 128
"""Rows that are read and converted to int32 at a time; they fit into the CPU cache."""

Batch = dict[str, Integer[np.ndarray, "..."]]
"""`inputs` and `labels` int32 [local, seq_len], `puzzle_identifiers` int32 [local]."""


def examples_per_epoch(puzzles: PuzzleSet) -> float:
    """Returns the mean number of examples in an epoch, which draws all examples of one puzzle of every group.

    This is the definition of the published code.
    """
    return puzzles.num_groups * puzzles.num_examples / puzzles.num_puzzles


def train_batch(
    puzzles: PuzzleSet,
    *,
    seed: int,
    step: int,
    batch_size: int,
    shard: tuple[int, int] = (0, 1),
    augment: bool = False,
) -> Batch:
    """Returns the training batch of shard `(index, count)` at `step`, a slice of the global batch.

    `batch_size` is the size of the global batch. With `augment`, every example is transformed by a random symmetry
    (`augmentation.py`).
    """
    rows = rows_of(shard, batch_size)
    examples, owners = draw_examples(puzzles, seed=seed, step=step, batch_size=batch_size, rows=rows)
    return batch_of(puzzles, examples, owners, words=words_for(seed, step, rows) if augment else None)


def rows_of(shard: tuple[int, int], batch_size: int) -> slice:
    """Returns the rows of the global batch that belong to shard `(index, count)`."""
    index, count = shard
    check_divides(batch_size, count, "shards")
    local = batch_size // count
    return slice(index * local, (index + 1) * local)


def draw_examples(
    puzzles: PuzzleSet, *, seed: int, step: int, batch_size: int, rows: slice
) -> tuple[Integer[np.ndarray, "local"], Integer[np.ndarray, "local"]]:
    """Returns the examples in the given rows of the global batch at `step`, and the puzzle of each.

    Every epoch visits the groups in a new random order and draws one puzzle of each. A batch is filled puzzle by
    puzzle with all examples of the puzzle, in random order. If the last puzzle does not fit completely, a random subset
    of its examples is used, as in the published sampler. Unlike in the published sampler, no incomplete batch is
    dropped: the next epoch continues the batch.

    If every puzzle has one example, step s begins at position s * batch_size.
    """
    begins = _epoch_begins(puzzles, seed, batch_size)
    first, last = step * batch_size + rows.start, step * batch_size + rows.stop
    examples, owners = [], []
    epoch = begins.epoch_at(first)
    while begins[epoch] < last:
        begin = begins[epoch]
        part = slice(max(first - begin, 0), last - begin)
        of_epoch = _epoch(puzzles, seed, epoch, begin % batch_size, batch_size)
        examples.append(of_epoch[0][part])
        owners.append(of_epoch[1][part])
        epoch += 1
    return np.concatenate(examples), np.concatenate(owners)


class _EpochBegins:
    """The position at which each epoch begins: the number of used examples of all epochs before it.

    The number of examples that an epoch uses depends on its position in the batch in which it begins, so the positions
    are computed in order and cached. Computing them up to step 1 000 000 takes seconds.
    """

    def __init__(self, puzzles: PuzzleSet, seed: int, batch_size: int):
        self._puzzles, self._seed, self._batch_size = puzzles, seed, batch_size
        self._known = [0]
        self._lock = threading.Lock()

    def __getitem__(self, epoch: int) -> int:
        if self._puzzles.largest_puzzle == 1:
            return epoch * self._puzzles.num_groups
        with self._lock:
            while len(self._known) <= epoch:
                self._extend()
            return self._known[epoch]

    def epoch_at(self, position: int) -> int:
        """Returns the epoch of the example at `position`."""
        if self._puzzles.largest_puzzle == 1:
            return position // self._puzzles.num_groups
        with self._lock:
            while self._known[-1] <= position:
                self._extend()
            return bisect.bisect_right(self._known, position) - 1

    def _extend(self) -> None:
        begin = self._known[-1]
        _, sizes = _visits(self._puzzles, _generator(self._seed, len(self._known) - 1))
        self._known.append(begin + int(_used(sizes, begin % self._batch_size, self._batch_size).sum()))


_epoch_begins = lru_cache(maxsize=8)(_EpochBegins)


def _generator(seed: int, epoch: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64)))


def _visits(
    puzzles: PuzzleSet, rng: np.random.Generator
) -> tuple[Integer[np.ndarray, "groups"], Integer[np.ndarray, "groups"]]:
    """Returns the puzzles that an epoch draws, in order, and the number of examples of each."""
    groups = rng.permutation(puzzles.num_groups)
    chosen = rng.integers(puzzles.group_indices[groups], puzzles.group_indices[groups + 1])
    return chosen, puzzles.puzzle_indices[chosen + 1] - puzzles.puzzle_indices[chosen]


def _used(sizes: Integer[np.ndarray, "groups"], taken: int, batch_size: int) -> Integer[np.ndarray, "groups"]:
    """Returns the number of examples used of each puzzle, if the first batch already contains `taken` examples."""
    used, ends = sizes.copy(), np.cumsum(sizes)
    full_at = batch_size - taken
    while full_at <= ends[-1]:
        last = int(np.searchsorted(ends, full_at))
        used[last] -= ends[last] - full_at
        full_at = int(ends[last]) + batch_size
    return used


@lru_cache(maxsize=8)
def _epoch(
    puzzles: PuzzleSet, seed: int, epoch: int, taken: int, batch_size: int
) -> tuple[Integer[np.ndarray, "examples"], Integer[np.ndarray, "examples"]]:
    """Returns the used examples of an epoch, in order, and the puzzle of each."""
    rng = _generator(seed, epoch)
    chosen, sizes = _visits(puzzles, rng)
    if puzzles.largest_puzzle == 1:
        return puzzles.puzzle_indices[chosen], chosen
    visit = np.repeat(np.arange(len(chosen)), sizes)
    rank = np.arange(len(visit)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    shuffled = rank[np.argsort(visit + rng.random(len(visit)))]
    keep = rank < _used(sizes, taken, batch_size)[visit]
    owners = chosen[visit[keep]]
    return puzzles.puzzle_indices[owners] + shuffled[keep], owners


def batch_of(
    puzzles: PuzzleSet,
    examples: Integer[np.ndarray, "local"],
    owners: Integer[np.ndarray, "local"],
    *,
    words: Words | None = None,
) -> Batch:
    """Returns a batch of these examples; `owners` are their puzzles, `words` random bits that select symmetries."""
    inputs, labels = (np.empty((len(examples), puzzles.metadata.seq_len), np.int32) for _ in range(2))
    transform = None if words is None else transform_for(puzzles.metadata)
    for start in range(0, len(examples), BLOCK):
        block = slice(start, start + BLOCK)
        tokens, answers = (array.take(examples[block], axis=0) for array in (puzzles.inputs, puzzles.labels))
        if transform is not None and words is not None:
            tokens, answers = (array.astype(np.uint8, copy=False) for array in (tokens, answers))
            tokens, answers = transform(tokens, answers, words[:, block])
        inputs[block] = tokens
        labels[block] = loss_labels(answers, puzzles.metadata.ignore_label_id)
    return {
        "inputs": inputs,
        "labels": labels,
        "puzzle_identifiers": puzzles.puzzle_identifiers[owners].astype(np.int32),
    }


def loss_labels(tokens: Integer[np.ndarray, "n seq"], ignored: int | None) -> Integer[np.ndarray, "n seq"]:
    """Replaces the token that the data set ignores by `IGNORED_LABEL`."""
    if ignored is None:
        return tokens
    if ignored == 0 and tokens.dtype == np.uint8 and tokens.max() < 128:
        # The same as below with bytes: `where` with int32 takes ten times as long.
        return (tokens == 0).view(np.int8) * np.int8(IGNORED_LABEL) + tokens.view(np.int8)
    return np.where(tokens == ignored, np.int32(IGNORED_LABEL), tokens.astype(np.int32))


def eval_batches(
    puzzles: PuzzleSet, *, batch_size: int, shard: tuple[int, int] = (0, 1), limit: int = 0
) -> Iterator[tuple[Batch, Bool[np.ndarray, "local"]]]:
    """Yields every example once, in order, in batches of equal shape, each with a mask of the rows that are examples.

    The last batch is padded with rows without labels, so that all shards yield the same number of batches. `limit` is
    the number of examples; 0 means all.
    """
    rows = rows_of(shard, batch_size)
    total = min(limit or puzzles.num_examples, puzzles.num_examples)
    metadata = puzzles.metadata
    filling = {
        "inputs": metadata.pad_id,
        "labels": IGNORED_LABEL,
        "puzzle_identifiers": metadata.blank_identifier_id,
    }
    for start in range(0, total, batch_size):
        examples = np.arange(start + rows.start, min(start + rows.stop, total))
        owners = np.searchsorted(puzzles.puzzle_indices, examples, side="right") - 1
        batch = batch_of(puzzles, examples, owners)
        missing = rows.stop - rows.start - len(examples)
        for name, value in filling.items():
            widths = [(0, missing)] + [(0, 0)] * (batch[name].ndim - 1)
            batch[name] = np.pad(batch[name], widths, constant_values=value)
        yield batch, np.arange(rows.stop - rows.start) < len(examples)
