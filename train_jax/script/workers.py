"""The batches of a script, made in worker processes by PyTorch's DataLoader, in the order of the steps.

A worker is spawned, because a process in which JAX has started cannot be forked safely. It gets the data, `collate` and
the form of a batch by pickle from this process, and imports the file of the script. A batch depends on data, seed, step
and shard alone, so the number of workers changes nothing, and a run continues at any step.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from train_jax.errors import UserError
from train_jax.script.data import Shard, Source
from train_jax.script.structure import Form

Arrays = dict[str, np.ndarray]
AHEAD = 2
"""Steps that each worker makes ahead."""


class Steps(Dataset):
    """The parts of the batches of steps, as arrays by name: what a worker computes."""

    def __init__(self, source: Source, form: Form, shards: Sequence[Shard], size: int, seed: int, where: str):
        self._source = source
        self._form = form
        self._shards = tuple(shards)
        self._size = size
        self._seed = seed
        self._where = where

    def __getitem__(self, step: int) -> list[Arrays] | UserError:
        """Returns a `UserError` rather than raising it, because a DataLoader makes several lines of its message."""
        try:
            made = [self._source.batch(step, self._size, shard, self._seed) for shard in self._shards]
            return [self._form.arrays(each, self._where) for each in made]
        except UserError as error:
            return UserError(str(error))


class Workers:
    """Worker processes for a run; they start at the first batch, and end with this object."""

    def __init__(self, count: int, where: str):
        """`where`: the line of `train_data`, for messages."""
        self._count = count
        self._where = where
        self._steps: Iterator[Any] = iter(())
        self._next: tuple[int, tuple[Shard, ...]] | None = None
        """The step and the shards that the workers return next."""

    def batch(self, step: int, shards: Sequence[Shard], steps: Steps) -> list[Arrays]:
        """Returns the shards of the batch of a step, which `steps` computes.

        Steps in their order are made ahead; after another one, the workers start again. Raises `UserError` for a
        mistake of the script in a worker, and for a worker that ends.
        """
        if self._next != (step, tuple(shards)):
            self._steps = self._started(step, steps)
        try:
            made = next(self._steps)
        except RuntimeError as error:  # a DataLoader raises it for a worker that was killed
            text = " ".join(str(error).split())
            raise UserError(f"{self._where}: {text[:200]}; use fewer --workers, or 0") from None
        self._next = step + 1, tuple(shards)
        if isinstance(made, UserError):
            raise made
        return made

    def _started(self, step: int, steps: Steps) -> Iterator[Any]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the number of workers, and what the error says
                loader = DataLoader(
                    steps,
                    batch_size=None,
                    sampler=_Count(step),
                    collate_fn=_same,
                    num_workers=self._count,
                    prefetch_factor=AHEAD,
                    multiprocessing_context="spawn",
                    generator=torch.Generator(),  # of the workers' seeds, so that none is drawn from the global one
                )
                return iter(loader)
        except Exception as error:  # of pickle, or of the system
            text = " ".join(str(error).split())
            raise UserError(
                f"{self._where}: the data cannot be sent to worker processes ({type(error).__name__}: {text[:200]}); "
                "define classes and functions at the top of the file, or omit --workers"
            ) from None


class _Count:
    """The steps from one on, without an end."""

    def __init__(self, first: int):
        self._first = first

    def __iter__(self) -> Iterator[int]:
        return itertools.count(self._first)


def _same(batch: Any) -> Any:
    return batch
