"""The batches of a script: a pure function of data, seed, step and shard, whatever the script returns as data."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from train_jax.errors import UserError
from train_jax.script.padding import Padding, padding_for
from train_jax.script.source import Script
from train_jax.script.structure import is_array, mapped

Shard = tuple[int, int]
"""Index and number of the equal, consecutive parts of a batch."""
_SAMPLED = 512
"""Number of examples whose sizes are read at first."""


class Source(Protocol):
    """The examples of a split."""

    @property
    def count(self) -> int | None:
        """Number of examples; None if it is not known."""
        ...

    def batch(self, step: int, size: int, shard: Shard, seed: int) -> Any:
        """Returns a part of the batch of `size` examples at `step`, as the script's `collate` makes it.

        The order of the examples is drawn for each epoch from `seed`; a batch may have the last examples of an epoch
        and the first ones of the next.
        """
        ...

    def rows(self, first: int, end: int, whole: tuple[int, int] | None = None) -> Any:
        """Returns a batch of the examples from `first` to `end`, in the order of the data, with the shape of a batch of
        the examples in `whole`, by default the same ones."""
        ...


class MapStyle:
    """Examples by their index: a data set, a list, or the rows of arrays."""

    def __init__(self, script: Script, function: str, data: Any, collate: Any = None):
        self._script = script
        self._function = function
        self._data = data
        self._collate = script.collate or collate
        self.count = len(data)
        if not self.count:
            raise UserError(f"{script.line_of(function)}: {function}() has no examples; return at least one")
        self._order: tuple[tuple[int, int], np.ndarray] | None = None
        self._padding: dict[int, Padding | None] = {}
        self._padded: tuple[list[int], tuple[list[Any], Sequence[Any]]] | None = None
        """The last batch that was padded: its entropy and size, and the results of `_whole`."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_script": self._script.without_functions(), "_padded": None}

    def batch(self, step: int, size: int, shard: Shard, seed: int) -> Any:
        numbers = step * size + np.arange(size)
        epochs = numbers // self.count
        places = numbers % self.count
        chosen = [int(self._permuted(seed, e)[p]) for e, p in zip(epochs.tolist(), places.tolist(), strict=True)]
        index, count = shard
        part = size // count
        return self._made(chosen, slice(index * part, (index + 1) * part), [seed, step])

    def rows(self, first: int, end: int, whole: tuple[int, int] | None = None) -> Any:
        start, stop = whole or (first, end)
        return self._made(range(start, stop), slice(first - start, end - start), [start])

    def _permuted(self, seed: int, epoch: int) -> np.ndarray:
        """Returns the order of the examples in an epoch; the last one is kept."""
        if self._order is None or self._order[0] != (seed, epoch):
            self._order = (seed, epoch), np.random.default_rng([seed, epoch]).permutation(self.count)
        return self._order[1]

    def _made(self, chosen: Sequence[int], part: slice, entropy: Sequence[int]) -> Any:
        """Returns a part of a batch of these examples. Each draws from a seed of its position in the batch."""
        if isinstance(self._data, Rows) and self._collate is None:
            with self._script.errors_of(f"the rows of {self._function}()"):
                return self._data.several(chosen[part])  # nothing draws
        padding = self._padding_of(len(chosen))
        seeds = np.random.SeedSequence(entropy).generate_state(len(chosen)).tolist()
        with own_generators():
            if padding is None:
                examples = self._examples(chosen[part], seeds[part])
                collate = self._collate or default_collate
            else:
                key = [*entropy, len(chosen)]
                if self._padded is None or self._padded[0] != key:  # once for all parts of a batch
                    self._padded = key, self._whole(padding, chosen, seeds)
                whole, longer = self._padded[1]
                examples = whole[part]
                collate = functools.partial(padding.padded, longer=longer)
            seed_generators(seeds[part.start])
            with self._script.errors_of("collate()"):
                return collate(examples)

    def _whole(self, padding: Padding, chosen: Sequence[int], seeds: Sequence[int]) -> tuple[list[Any], Sequence[Any]]:
        """Returns all examples of a batch, and those with which its parts are padded."""
        examples = self._examples(chosen, seeds)
        seed_generators(seeds[0])
        with self._script.errors_of("collate()"):
            return examples, padding.longer(examples)

    def _examples(self, chosen: Sequence[int], seeds: Sequence[int]) -> list[Any]:
        return [self._example(*each) for each in zip(chosen, seeds, strict=True)]

    def _padding_of(self, size: int) -> Padding | None:
        """Returns the padding of batches of a size, chosen from examples that are spread over the data."""
        if self._collate is None:  # PyTorch's own accepts examples of one size only
            return None
        if size not in self._padding:
            sampled = np.unique(np.linspace(0, self.count - 1, _SAMPLED).astype(int)).tolist()
            with own_generators():
                sample = [self._example(number, number) for number in sampled]
                with self._script.errors_of("collate()"):
                    self._padding[size] = padding_for(self._collate, sample, size)
        return self._padding[size]

    def _example(self, number: int, seed: int) -> Any:
        seed_generators(seed)
        with self._script.errors_of(f"example {number} of {self._function}()"):
            return self._data[number]


class Rows(Dataset):
    """The rows of arrays with the same first axis, in a dict or a tuple, as a map-style data set."""

    def __init__(self, arrays: Any):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(next(iter(_values(self._arrays))))

    def __getitem__(self, index: Any) -> Any:
        return mapped(self._arrays, lambda array, _: array[index])

    def several(self, indices: Sequence[int]) -> Any:
        """Returns the rows with these indices, stacked as tensors."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return mapped(self._arrays, lambda array, _: torch.as_tensor(array)[chosen])


class Stream:
    """An iterable of whole batches. A run continues by reading the earlier batches again.

    What it draws from the global generators of PyTorch, NumPy and Python follows from the seed.
    """

    count = None

    def __init__(self, script: Script, function: str, data: Any, seed: int):
        self._script = script
        self._function = function
        self._seed = seed
        self._iterator = iter(data)
        self._next = 0
        self._generators = generator_states()
        """The states between two reads."""
        self._batch: tuple[int, Any] | None = None

    def batch(self, step: int, size: int, shard: Shard, seed: int) -> Any:
        return _part(self._at(step), size, shard, f"{self._script.line_of(self._function)}: {self._function}()")

    def rows(self, first: int, end: int, whole: tuple[int, int] | None = None) -> Any:
        raise UserError(
            f"{self._script.line_of(self._function)}: test_data() needs a length; return a list or a Dataset"
        )

    def _at(self, step: int) -> Any:
        if self._batch is not None and self._batch[0] == step:
            return self._batch[1]
        with own_generators():
            set_generators(self._generators)
            if step < self._next:
                seed_generators(self._seed)
                self._iterator = iter(self._script.call(self._function))
                self._next = 0
            while self._next <= step:
                self._batch = self._next, self._read()
                self._next += 1
            self._generators = generator_states()
        return self._batch[1]  # pyright: ignore[reportOptionalSubscript]

    def _read(self) -> Any:
        with self._script.errors_of(f"{self._function}()"):
            for batch in self._iterator:
                return batch
            self._iterator = iter(self._script.call(self._function))
            for batch in self._iterator:
                return batch
        raise UserError(
            f"{self._script.line_of(self._function)}: {self._function}() has no batches; yield at least one"
        )


def read_data(script: Script, function: str, seed: int) -> Source:
    """Returns the data of `train_data` or `test_data`. Raises `UserError` for what is no data.

    Both functions draw from the same seed, so that a random split in each of them divides the examples alike.
    """
    seed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    with own_generators():
        seed_generators(seed)
        data = script.call(function)
        with script.errors_of(f"the data of {function}()"):  # such as a __len__ that raises
            return _source_of(script, function, data, seed)


def _source_of(script: Script, function: str, data: Any, seed: int) -> Source:
    if isinstance(data, DataLoader) and not isinstance(data.dataset, IterableDataset):
        _check_order(data, f"{script.line_of(function)}: {function}()")
        return MapStyle(script, function, data.dataset, data.collate_fn)
    if _are_arrays(data):
        lengths = {len(array) for array in _values(data)}
        if len(lengths) > 1:
            raise UserError(
                f"{script.line_of(function)}: the arrays of {function}() have {' and '.join(map(str, lengths))} rows; "
                "return arrays with the same first axis"
            )
        return MapStyle(script, function, Rows(data))
    is_data = not isinstance(data, (str, bytes, Mapping)) and not is_array(data)  # an array here has no axis
    if is_data and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return MapStyle(script, function, data)
    if is_data and hasattr(data, "__iter__"):
        return Stream(script, function, data, seed)
    raise UserError(
        f"{script.line_of(function)}: {function}() returns {type(data).__name__}, expected a Dataset, a list, arrays "
        "or an iterable of batches"
    )


@contextlib.contextmanager
def own_generators() -> Iterator[None]:
    """Restores the states of the global generators of PyTorch, NumPy and Python after the block."""
    before = generator_states()
    try:
        yield
    finally:
        set_generators(before)


def generator_states() -> tuple[Any, Any, Any]:
    """Returns the states of the global generators of PyTorch, NumPy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_generators(states: tuple[Any, Any, Any]) -> None:
    """Sets the states of the global generators of PyTorch, NumPy and Python."""
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def seed_generators(seed: int) -> None:
    """Seeds the global generators of PyTorch, NumPy and Python with 32 bits."""
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` formats a traceback for each other kind of device
    np.random.seed(seed)
    random.seed(seed)


def _check_order(loader: DataLoader, where: str) -> None:
    """Raises `UserError` for a loader that does not draw each example once in an epoch, which the order here does."""
    sampler = loader.sampler
    every = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # pyright: ignore
    )
    if not every or type(loader.batch_sampler) not in (BatchSampler, type(None)):
        kind = type(loader.batch_sampler if every else sampler).__name__
        raise UserError(
            f"{where} returns a DataLoader with a {kind}, whose order is not used here; return a generator over the "
            "loader, which gives whole batches"
        )


def _are_arrays(data: Any) -> bool:
    values = list(_values(data))
    return bool(values) and all(is_array(value) and value.shape for value in values)


def _values(data: Any) -> Iterator[Any]:
    """Yields the entries of a dict or a tuple, or the object itself."""
    if isinstance(data, Mapping):
        yield from data.values()
    elif isinstance(data, tuple):
        yield from data
    else:
        yield data


def _part(batch: Any, size: int, shard: Shard, where: str) -> Any:
    """Returns a part of a whole batch: consecutive entries of the first axis of each array."""
    index, count = shard
    rows = size // count

    def sliced(value: Any, name: str) -> Any:
        if not is_array(value):
            return value
        if not value.shape or len(value) != size:
            shape = tuple(value.shape)
            raise UserError(
                f"{where} yields a batch with {name or 'a tensor'} of shape {shape}, expected {size} rows, as "
                "--global-batch-size says; an iterable gives whole batches, a Dataset with __len__ gives examples"
            )
        return value[index * rows : (index + 1) * rows]

    return mapped(batch, sliced)
