"""Batches as a pure function of (data sets, seed, step, shard), without iterator state.

A mixture has one or more data sets. Every batch contains the same number of rows of a data set, in the order of the
data sets, so a weight is a share of the computation. Identifiers are numbered consecutively over the data sets,
including the blank ones, so that no two data sets share a row of the puzzle table. Sequences are padded at the end to
the longest length, without labels. Tokens are not renumbered: a token may have different meanings in two data sets,
which the puzzle embedding distinguishes."""

import bisect
import hashlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.errors import UserError
from train_jax.puzzles.format import PuzzleSet, load_split
from train_jax.puzzles.kind import Words
from train_jax.puzzles.kinds import MIXED
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.symmetries import transform_for, words_for
from train_jax.run.mixing import apportion, data_dirs, names_and_weights
from train_jax.runtime.batch_size import check_divides

IGNORED_LABEL = -100
"""The label that the loss and the metrics ignore, as in PyTorch's cross-entropy."""

BLOCK = 128
"""Number of rows that are read and converted to int32 at a time; they fit into the CPU cache."""

HostBatch = dict[str, Integer[np.ndarray, "..."]]
"""`inputs` and `labels` int32 [local, seq_len], `puzzle_identifiers` int32 [local]."""


def examples_per_epoch(puzzles: PuzzleSet) -> float:
    """Returns the mean number of examples in an epoch, which draws all examples of one puzzle of every group.

    This is the definition of the published code.
    """
    return puzzles.num_groups * puzzles.num_examples / puzzles.num_puzzles


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
    first = step * batch_size + rows.start
    last = step * batch_size + rows.stop
    examples = []
    owners = []
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
        self._puzzles = puzzles
        self._seed = seed
        self._batch_size = batch_size
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
    used = sizes.copy()
    ends = np.cumsum(sizes)
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
) -> HostBatch:
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
) -> Iterator[tuple[HostBatch, Bool[np.ndarray, "local"]]]:
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


@dataclass(frozen=True, eq=False)
class Mixture:
    """One or more data sets."""

    metadata: Metadata
    """The metadata of the mixture: the sizes that a model needs."""
    parts: tuple[PuzzleSet, ...]
    first_identifiers: tuple[int, ...]
    """The offset of each part's puzzle identifiers."""
    weights: tuple[float, ...]
    """Each part's share of a batch."""

    @property
    def num_examples(self) -> int:
        return sum(part.num_examples for part in self.parts)

    @property
    def num_groups(self) -> int:
        return sum(part.num_groups for part in self.parts)

    @property
    def examples_per_epoch(self) -> float:
        """The sum of the examples per epoch of all parts, independent of the weights."""
        return sum(examples_per_epoch(part) for part in self.parts)

    @property
    def fingerprint(self) -> str:
        """Hash of all parts in order, with their first identifiers and weights."""
        content = json.dumps([*(part.fingerprint for part in self.parts), *self.first_identifiers, *self.weights])
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

    @property
    def changed(self) -> bool:
        """True if the files of a part are not those that were built, by the hash in its `recipe.json`."""
        stated = [part for part in self.parts if part.stated_fingerprint]
        return any(part.fingerprint != part.stated_fingerprint for part in stated)

    def part(self, number: int) -> "Mixture":
        """Returns one part, with the identifiers and the sequence length of the mixture."""
        return replace(
            self,
            parts=self.parts[number : number + 1],
            first_identifiers=self.first_identifiers[number : number + 1],
            weights=(1.0,),
        )

    def rows_of_parts(self, batch_size: int) -> list[int]:
        """Returns the number of rows of each part in a batch: its share, rounded by largest remainder."""
        rows = apportion(self.weights, batch_size)
        if not all(rows):
            raise UserError(
                f"a batch of {batch_size} has no row for the data set of weight {self.weights[rows.index(0)]:g}, "
                "expected at least one; use a larger batch or weights that differ less"
            )
        return rows

    def train_batch(
        self, *, seed: int, step: int, batch_size: int, shard: tuple[int, int] = (0, 1), augment: bool = False
    ) -> HostBatch:
        """Returns the training batch of shard `(index, count)` at `step`: a pure function of arguments and data.

        With `augment`, every example is transformed by a random symmetry, which depends on its row in the global batch.
        """
        wanted = rows_of(shard, batch_size)
        batches = []
        first = 0
        for number, rows in enumerate(self.rows_of_parts(batch_size)):
            own = slice(max(wanted.start - first, 0), min(wanted.stop - first, rows))
            whole = slice(first + own.start, first + own.stop)
            first += rows
            if own.start < own.stop:
                part = self.parts[number]
                # Each part has its own seed, so that equal data sets are sampled independently.
                chosen = draw_examples(part, seed=seed + number * 2**32, step=step, batch_size=rows, rows=own)
                words = words_for(seed, step, whole) if augment else None
                batches.append(self._as_whole(number, batch_of(part, *chosen, words=words)))
        if len(batches) == 1:
            return batches[0]
        return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}

    def eval_batches(
        self, *, batch_size: int, shard: tuple[int, int] = (0, 1), limit: int = 0
    ) -> Iterator[tuple[HostBatch, Bool[np.ndarray, "local"]]]:
        """Yields every example of every part once, in order; a batch contains examples of one part only."""
        left = limit or self.num_examples
        for number, part in enumerate(self.parts):
            if left > 0:
                for batch, valid in eval_batches(part, batch_size=batch_size, shard=shard, limit=left):
                    yield self._as_whole(number, batch), valid
                left -= part.num_examples

    def eval_numbers(
        self, *, batch_size: int, shard: tuple[int, int] = (0, 1), limit: int = 0
    ) -> Iterator[Integer[np.ndarray, "local"]]:
        """Yields, for each batch of `eval_batches`, the numbers of its rows in the mixture; meaningless for padding."""
        left = limit or self.num_examples
        first = 0
        rows = rows_of(shard, batch_size)
        for part in self.parts:
            for start in range(0, max(min(left, part.num_examples), 0), batch_size):
                yield np.arange(first + start + rows.start, first + start + rows.stop, dtype=np.int32)
            left = left - part.num_examples
            first = first + part.num_examples

    def _as_whole(self, number: int, batch: HostBatch) -> HostBatch:
        """Converts a part's batch, in place, to the identifiers and the sequence length of the mixture."""
        batch["puzzle_identifiers"] += np.int32(self.first_identifiers[number])
        missing = self.metadata.seq_len - batch["inputs"].shape[1]
        if missing:
            filling = {"inputs": self.parts[number].metadata.pad_id, "labels": IGNORED_LABEL}
            for name, value in filling.items():
                batch[name] = np.pad(batch[name], ((0, 0), (0, missing)), constant_values=value)
        return batch


def mixture_of(parts: Sequence[PuzzleSet], weights: Sequence[float] = ()) -> Mixture:
    """Returns a mixture; without weights, one pass over each data set takes the same number of steps."""
    sizes = [part.metadata.num_puzzle_identifiers for part in parts]
    metadata = parts[0].metadata
    if len(parts) > 1:
        groups, puzzles = (sum(getattr(part, name) for part in parts) for name in ("num_groups", "num_puzzles"))
        metadata = replace(
            metadata,
            seq_len=max(part.metadata.seq_len for part in parts),
            vocab_size=max(part.metadata.vocab_size for part in parts),
            num_puzzle_identifiers=sum(sizes),
            total_groups=groups,
            mean_puzzle_examples=sum(part.num_examples for part in parts) / puzzles,
            total_puzzles=sum(part.metadata.total_puzzles for part in parts),
        )
        metadata = replace(metadata, kind=_kind_of_whole(metadata, parts))
    first = np.cumsum([0, *sizes[:-1]]).tolist()
    return Mixture(
        metadata, tuple(parts), tuple(first), tuple(weights) or tuple(examples_per_epoch(part) for part in parts)
    )


def _kind_of_whole(metadata: Metadata, parts: Sequence[PuzzleSet]) -> str:
    """Returns the key of the first kind with the sizes of the mixture, whose puzzles the model can solve."""
    kinds = [part.kind for part in parts]
    fitting = (
        kind for kind in kinds if kind and (kind.seq_len, kind.vocab_size) == (metadata.seq_len, metadata.vocab_size)
    )
    return next((kind.key for kind in fitting), MIXED)


def check_augmentable(data_dir: str, mixture: Mixture) -> None:
    """Raises `UserError` if a data set has a kind that does not support augmentation per batch."""
    for name, part in zip(data_dirs(data_dir), mixture.parts, strict=True):
        transform_for(part.metadata, name)


def load_mixture(data_dir: str, split: str, data_weights: str = "") -> Mixture:
    """Opens the data sets of `data_dir`; `data_weights` is empty or has one number for each of them."""
    names, weights = names_and_weights(data_dir, data_weights)
    return mixture_of([load_split(name, split) for name in names], weights)


def load_part(run_data_dir: str, split: str, data_dir: str) -> Mixture:
    """Opens one data set with its identifiers in a run on `run_data_dir`. Raises `UserError` for other ones."""
    names = data_dirs(run_data_dir)
    if len(names) <= 1:
        return mixture_of([load_split(data_dir, split)])
    if data_dir not in names:
        raise UserError(
            f"--data-dir {data_dir} is not a data set that the run was trained on; use one of {', '.join(names)}"
        )
    return load_mixture(run_data_dir, split).part(names.index(data_dir))
