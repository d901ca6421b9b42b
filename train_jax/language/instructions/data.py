"""Instructions with responses, in the layout of the published HRM-Text, and their packing into rows.

```text
DIR/metadata.json        counts, and in `tokenizer_info` the size and the special tokens of the vocabulary
DIR/tokens.npy           the tokens of all samples
DIR/epoch_0/inst_start.npy, inst_len.npy, resp_start.npy, resp_len.npy
DIR/epoch_1/…            the samples in another order
DIR/test/…               the same for held-out samples; not in the published layout
```

A step takes as many samples as fit into its rows, in the order of the epoch: the longest first, each into the row with
the fewest tokens. The number is found by bisection. Which samples a step has follows from the lengths alone, so that
every host computes the same ones; they are those of the published sampler, whose ranks are the rows here.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from models_torch.gpt import IGNORED_TARGET
from models_torch.layers import round_up
from train_jax.errors import UserError
from train_jax.language.text_set import sampled
from train_jax.storage.content import remembered
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, map_array, read_whole

PLACES = ("inst_start", "inst_len", "resp_start", "resp_len")
VOCABULARY_MULTIPLE = 256
PADDING = -1
"""Sample number of a position that belongs to no sample."""
_LARGEST_METADATA = 2**24


@dataclass(frozen=True)
class Samples:
    """Positions of the samples of an epoch in `tokens.npy`."""

    inst_start: np.ndarray
    inst_len: np.ndarray
    resp_start: np.ndarray
    resp_len: np.ndarray

    @cached_property
    def lengths(self) -> np.ndarray:
        """Number of positions of each sample: its last token is only a target."""
        return np.asarray(self.inst_len, np.int64) + self.resp_len - 1


class InstructionSet:
    """A folder in the published layout. Raises `UserError` if it is damaged."""

    def __init__(self, directory: str):
        self.directory = directory
        self._last: tuple[int, Samples] | None = None
        folder = path_of(directory)
        try:
            self.metadata = json.loads(read_whole(folder / "metadata.json", largest_bytes=_LARGEST_METADATA))
            self.total_length = int(self.metadata["total_length"])
            self.vocab_size = round_up(int(self.metadata["tokenizer_info"]["vocab_size"]), VOCABULARY_MULTIPLE)
            self.longest = int(self.metadata["max_seq_len"]) - 1
        except FileNotFoundError:
            raise UserError(
                f"no instructions at {directory} (metadata.json is missing); build them with `trm build-data "
                f"instructions --source FILE.jsonl --output-dir {directory}`"
            ) from None
        except (DamagedError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{folder / 'metadata.json'} is not valid ({error!r}); build the data set again") from None
        self.tokens = self._array("tokens.npy")
        self.epochs = sum(1 for entry in folder.iterdir() if entry.name.startswith("epoch_"))
        if not self.epochs or self.tokens.ndim != 1:
            raise UserError(f"{directory} has {self.epochs} epochs, expected at least one; build the data set again")

    @cached_property
    def content(self) -> str:
        """Hash of all files."""
        folder = path_of(self.directory)
        epochs = [folder / f"epoch_{number}" for number in range(self.epochs)]
        places = [epoch / f"{place}.npy" for epoch in epochs for place in PLACES]
        files = [folder / "metadata.json", folder / "tokens.npy", *places]
        return remembered(files, "files", lambda: _hash_of(files))

    def epoch(self, number: int) -> Samples:
        """Returns the samples of an epoch; the first epoch follows the last one. The latest one stays in memory."""
        number = number % self.epochs
        last = self._last
        if last is None or last[0] != number:
            last = self._last = number, self._read(number)
        return last[1]

    def _read(self, number: int) -> Samples:
        samples = Samples(*(self._array(f"epoch_{number}/{place}.npy") for place in PLACES))
        ends = (samples.inst_start + samples.inst_len, samples.resp_start + samples.resp_len)
        shortest = min((int(each.min(initial=1)) for each in (samples.inst_len, samples.resp_len)), default=1)
        if shortest < 1 or any(int(end.max(initial=0)) > len(self.tokens) for end in ends):
            raise UserError(f"{self.directory}/epoch_{number} is not valid; build the data set again")
        return samples

    def take(self, start: int, count: int) -> np.ndarray:
        """Returns tokens, int32. Raises `UserError` for one that is not in the vocabulary."""
        tokens = np.asarray(self.tokens[start : start + count], np.int32)
        self._check(tokens)
        return tokens

    def check(self) -> None:
        """Raises `UserError` as `take` does, before a run begins; reads evenly spaced parts of large data."""
        for part in sampled([self.tokens]):
            self._check(part)

    def _check(self, tokens: np.ndarray) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            raise UserError(f"{self.directory} contains the token {tokens.max()}, expected less than {self.vocab_size}")

    def _array(self, name: str) -> np.ndarray:
        path = path_of(self.directory) / name
        try:
            array = map_array(path)
        except (FileNotFoundError, DamagedError) as error:
            raise UserError(f"{path} cannot be read ({error}); build the data set again") from None
        if array.dtype.kind not in "iu":
            raise UserError(f"{path} has type {array.dtype}, expected integers; build the data set again")
        return array


def _hash_of(files: Sequence[Path]) -> str:
    content = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content.update(hashlib.file_digest(file, "sha256").digest())
    return content.hexdigest()[:32]


def fits(lengths: np.ndarray, rows: int, capacity: int) -> bool:
    """Returns whether samples fit if the longest come first, each into the row with the fewest tokens."""
    loads = [0] * rows
    for length in np.sort(lengths)[::-1].tolist():
        if (load := loads[0] + length) > capacity:
            return False
        heapq.heapreplace(loads, load)
    return True


def assign(lengths: np.ndarray, rows: int) -> list[list[int]]:
    """Returns the numbers of the samples of each row, longest first; of equal ones the last comes first.

    Which of several rows with equally few tokens gets a sample depends on the heap, so this is not `heapq`.
    """
    loads = [0] * rows
    owners = list(range(rows))
    result = [[] for _ in range(rows)]
    for number in np.argsort(lengths, kind="stable")[::-1].tolist():
        result[owners[0]].append(number)
        loads[0] += int(lengths[number])
        place = 0
        while (child := 2 * place + 1) < rows:
            child += child + 1 < rows and loads[child + 1] < loads[child]
            if loads[place] <= loads[child]:
                break
            for each in (loads, owners):
                each[place], each[child] = each[child], each[place]
            place = child
    return result


def count_fitting(lengths: np.ndarray, rows: int, capacity: int) -> int:
    """Returns the number of first samples that a step takes: at least one."""
    candidates = lengths[: int(np.searchsorted(np.cumsum(lengths), rows * capacity)) + 1]
    least = 1
    beyond = len(candidates) + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        if fits(candidates[:middle], rows, capacity):
            least = middle
        else:
            beyond = middle
    return least


@dataclass(frozen=True)
class Step:
    """The samples of a step: `count` samples of an epoch, from `first` on."""

    epoch: int
    first: int
    count: int


class PackedSteps:
    """The samples of each step, without end. A step is chosen after all steps before it, some milliseconds each."""

    def __init__(self, data: InstructionSet, rows: int, seq_len: int, *, drop_last: bool = True):
        """If `drop_last`, the samples at the end of an epoch that do not fill a step are not used; otherwise they
        form a step with free rows."""
        self._data = data
        self._rows = rows
        self._seq_len = seq_len
        self._drop_last = drop_last
        self._found: list[Step] = []
        self._lock = threading.Lock()

    def at(self, step: int) -> Step:
        """Returns the samples of a step. Raises `UserError` if an epoch does not have them."""
        with self._lock:
            while len(self._found) <= step:
                self._found.append(self._next())
            return self._found[step]

    def _next(self) -> Step:
        last = self._found[-1] if self._found else Step(0, 0, 0)
        chosen = self._within(last.epoch, last.first + last.count) or self._within(last.epoch + 1, 0)
        if chosen is None:
            raise UserError(
                f"{self._data.directory} has too few samples for a step of {self._rows} rows of {self._seq_len} "
                "tokens; use a smaller --global-batch-size or --arch.seq-len, or more samples"
            )
        return chosen

    def _within(self, epoch: int, first: int) -> Step | None:
        """Returns the step that begins with a sample, None at the end of the epoch."""
        lengths = self._data.epoch(epoch).lengths
        if first >= len(lengths):
            return None
        count = count_fitting(lengths[first : first + self._rows * self._seq_len], self._rows, self._seq_len)
        whole = count >= self._rows and first + count < len(lengths)
        return Step(epoch, first, count) if whole or not self._drop_last else None

    def batch(self, step: int, shard: tuple[int, int], *, target_only: bool = True) -> dict[str, np.ndarray]:
        """Returns the rows of shard `(index, count)`: `inputs`, `targets`, `positions` and `samples`, int32, and
        `instruction`, bool, all (rows, seq_len)."""
        chosen, (index, count) = self.at(step), shard
        places = self._data.epoch(chosen.epoch)
        rows = assign(places.lengths[chosen.first : chosen.first + chosen.count], self._rows)
        own = rows[index * self._rows // count : (index + 1) * self._rows // count]
        batches = [self._row(places, [chosen.first + n for n in row], target_only) for row in own]
        return {name: np.stack([row[name] for row in batches]) for name in batches[0]}

    def _row(self, places: Samples, numbers: list[int], target_only: bool) -> dict[str, np.ndarray]:
        size = self._seq_len
        row = {
            "inputs": np.zeros(size, np.int32),
            "targets": np.full(size, IGNORED_TARGET, np.int32),
            "positions": np.zeros(size, np.int32),
            "samples": np.full(size, PADDING, np.int32),
            "instruction": np.zeros(size, bool),
        }
        first = 0
        for sample, number in enumerate(numbers):
            asked = self._data.take(int(places.inst_start[number]), int(places.inst_len[number]))
            answered = self._data.take(int(places.resp_start[number]), int(places.resp_len[number]))
            tokens = np.concatenate([asked, answered])
            own = slice(first, first + len(tokens) - 1)
            row["inputs"][own] = tokens[:-1]
            targets = tokens[1:].copy()
            if target_only:
                targets[: len(asked) - 1] = IGNORED_TARGET
            row["targets"][own] = targets
            row["positions"][own] = np.arange(len(tokens) - 1)
            row["samples"][own] = sample
            row["instruction"][first : first + len(asked)] = True
            first += len(tokens) - 1
        return row
