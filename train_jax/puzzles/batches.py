"""Batches as a pure function of (data set, seed, step, shard): no iterator state, any step at once."""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Integer

from train_jax.errors import UserError
from train_jax.puzzles.format import PuzzleSet

IGNORED_LABEL = -100
"""A label that counts for nothing in the loss, as PyTorch's cross-entropy has it."""

Batch = dict[str, Integer[np.ndarray, "..."]]
"""`inputs` and `labels` int32 [local, seq_len], `puzzle_identifiers` int32 [local]."""


def check_divides(batch_size: int, count: int, what: str) -> None:
    """Raises `UserError` with batch sizes and a count that would do, unless `batch_size` divides over `count` things.

    The batch sizes offered give every one an even share, so that twice the count divides them too.
    """
    if batch_size < 1:
        raise UserError(f"global batch {batch_size} is not a batch size; use {count} or a multiple of it")
    if batch_size % count == 0:
        return
    step = 2 * count if batch_size > 2 * count else count
    below = batch_size // step * step
    sizes = f"{below} or {below + step}" if below else f"{below + step}"
    divisors = [divisor for divisor in range(1, batch_size + 1) if batch_size % divisor == 0]
    nearest = min(divisors, key=lambda divisor: (abs(divisor - count), -divisor))
    noun = what.removesuffix("s") if nearest == 1 else what
    raise UserError(f"global batch {batch_size} does not divide over {count} {what}; use {sizes}, or {nearest} {noun}")


def epochs_to_steps(puzzles: PuzzleSet, epochs: float, batch_size: int) -> int:
    """The whole steps in so many epochs; an epoch draws one example of every group."""
    steps = int(epochs * puzzles.num_groups / batch_size)
    if steps < 1:
        raise UserError(
            f"{epochs} epochs of {puzzles.num_groups} groups are less than one batch of {batch_size}; "
            f"use at least {batch_size / puzzles.num_groups:.3g} epochs"
        )
    return steps


def train_batch(puzzles: PuzzleSet, *, seed: int, step: int, batch_size: int, shard: tuple[int, int] = (0, 1)) -> Batch:
    """What shard `(index, count)` trains on at `step`: its slice of the global batch of `batch_size` examples.

    Every epoch visits the groups in an order of its own, drawing one puzzle of each and one example of that puzzle.
    Epoch follows epoch without a gap, so step s takes the positions from s * batch_size on and no batch is short.
    The published loader draws all examples of a puzzle; for sets with one example a puzzle, as Sudoku, that is the
    same.
    """
    index, count = shard
    check_divides(batch_size, count, "shards")
    local = batch_size // count
    start = step * batch_size + index * local
    rows, owners = [], []
    for epoch in range(start // puzzles.num_groups, (start + local - 1) // puzzles.num_groups + 1):
        first = epoch * puzzles.num_groups
        part = slice(max(start - first, 0), start + local - first)
        examples, drawn = _epoch(puzzles, seed, epoch)
        rows.append(examples[part])
        owners.append(drawn[part])
    return _batch(puzzles, np.concatenate(rows), np.concatenate(owners))


@lru_cache(maxsize=8)
def _epoch(
    puzzles: PuzzleSet, seed: int, epoch: int
) -> tuple[Integer[np.ndarray, "groups"], Integer[np.ndarray, "groups"]]:
    """The examples of an epoch in order, and the puzzles that they belong to."""
    rng = np.random.Generator(np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64)))
    groups = rng.permutation(puzzles.num_groups)
    drawn = rng.integers(puzzles.group_indices[groups], puzzles.group_indices[groups + 1])
    examples = rng.integers(puzzles.puzzle_indices[drawn], puzzles.puzzle_indices[drawn + 1])
    return examples, drawn


def _batch(puzzles: PuzzleSet, examples: np.ndarray, owners: np.ndarray) -> Batch:
    labels = puzzles.labels.take(examples, axis=0).astype(np.int32)
    if puzzles.metadata.ignore_label_id is not None:
        np.putmask(labels, labels == puzzles.metadata.ignore_label_id, IGNORED_LABEL)
    return {
        "inputs": puzzles.inputs.take(examples, axis=0).astype(np.int32),
        "labels": labels,
        "puzzle_identifiers": puzzles.puzzle_identifiers[owners].astype(np.int32),
    }


def eval_batches(
    puzzles: PuzzleSet, *, batch_size: int, shard: tuple[int, int] = (0, 1)
) -> Iterator[tuple[Batch, Bool[np.ndarray, "local"]]]:
    """Every example once and in order, in batches of one shape, each with the mask of its rows that are examples.

    The last batches are filled with padding that has no label, so all shards yield equally many.
    """
    index, count = shard
    check_divides(batch_size, count, "shards")
    local = batch_size // count
    metadata = puzzles.metadata
    for start in range(index * local, puzzles.num_examples + index * local, batch_size):
        examples = np.arange(start, min(start + local, puzzles.num_examples))
        owners = np.searchsorted(puzzles.puzzle_indices, examples, side="right") - 1
        batch = _batch(puzzles, examples, owners)
        missing = local - len(examples)
        filling = {
            "inputs": metadata.pad_id,
            "labels": IGNORED_LABEL,
            "puzzle_identifiers": metadata.blank_identifier_id,
        }
        for name, value in filling.items():
            widths = [(0, missing)] + [(0, 0)] * (batch[name].ndim - 1)
            batch[name] = np.pad(batch[name], widths, constant_values=value)
        yield batch, np.arange(local) < len(examples)
