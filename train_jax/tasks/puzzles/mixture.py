"""Mixtures of data sets: each data set has a share of every batch and its own puzzle identifiers.

Every batch contains the same number of rows of a data set, in the order of the data sets, so a weight is a share of the
computation. Identifiers are numbered consecutively over the data sets, including the blank ones, so that no two data
sets share a row of the puzzle table. Sequences are padded at the end to the longest length, without labels. Tokens are
not renumbered: a token may have different meanings in two data sets, which the puzzle embedding distinguishes.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.errors import UserError
from train_jax.tasks.puzzles.augmentation import transform_for, words_for
from train_jax.tasks.puzzles.batches import (
    IGNORED_LABEL,
    Batch,
    batch_of,
    draw_examples,
    eval_batches,
    examples_per_epoch,
    rows_of,
)
from train_jax.tasks.puzzles.format import Metadata, PuzzleSet, load_split
from train_jax.tasks.puzzles.kinds import MIXED


@dataclass(frozen=True, eq=False)
class Mixture:
    """One or more data sets. For a single one, batches equal those of `batches.train_batch` and `eval_batches`."""

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
        exact = np.array(self.weights) / sum(self.weights) * batch_size
        rows = np.floor(exact).astype(int)
        # The sort is stable: among equal remainders the first part gets the row.
        rows[np.argsort(rows - exact, kind="stable")[: batch_size - rows.sum()]] += 1
        if not rows.all():
            raise UserError(
                f"a batch of {batch_size} has no row for the data set of weight {self.weights[int(rows.argmin())]:g}, "
                "expected at least one; use a larger batch or weights that differ less"
            )
        return rows.tolist()

    def train_batch(
        self, *, seed: int, step: int, batch_size: int, shard: tuple[int, int] = (0, 1), augment: bool = False
    ) -> Batch:
        """Returns the training batch of shard `(index, count)` at `step`: a pure function of arguments and data.

        With `augment`, every example is transformed by a random symmetry, which depends on its row in the global batch.
        """
        wanted = rows_of(shard, batch_size)
        batches, first = [], 0
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
    ) -> Iterator[tuple[Batch, Bool[np.ndarray, "local"]]]:
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
        left, first, rows = limit or self.num_examples, 0, rows_of(shard, batch_size)
        for part in self.parts:
            for start in range(0, max(min(left, part.num_examples), 0), batch_size):
                yield np.arange(first + start + rows.start, first + start + rows.stop, dtype=np.int32)
            left, first = left - part.num_examples, first + part.num_examples

    def _as_whole(self, number: int, batch: Batch) -> Batch:
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


def data_dirs(data_dir: str) -> list[str]:
    """Splits the `data_dir` of a run at its commas."""
    return [name.strip() for name in data_dir.split(",") if name.strip()]


def load_mixture(data_dir: str, split: str, data_weights: str = "") -> Mixture:
    """Opens the data sets of `data_dir`; `data_weights` is empty or has one number for each of them."""
    names = data_dirs(data_dir)
    if not names:
        raise UserError(f"--data-dir {data_dir!r} names no data set; give a folder built by `trm build-data`")
    try:
        weights = [float(text) for text in data_weights.split(",")] if data_weights.strip() else []
    except ValueError:
        weights = [0.0]
    if weights and (len(weights) != len(names) or not all(0 < weight < float("inf") for weight in weights)):
        raise UserError(
            f"--data-weights {data_weights!r}: expected {len(names)} numbers above 0, one for each data set in "
            f"--data-dir; use {','.join('1' for _ in names)}"
        )
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
