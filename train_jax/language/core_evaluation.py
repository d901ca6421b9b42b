"""CORE: the tasks of a bundle on disk, their prompts and verdicts, and the score of a language run.

```text
DIR/core.yaml             icl_tasks: label, icl_task_type, dataset_uri, num_fewshot, continuation_delimiter
DIR/eval_meta_data.csv    columns `Eval Task` and `Random baseline`, in per cent
DIR/eval_data/…           one JSON object in each line
```

References:
  Li et al., "DataComp-LM: In search of the next generation of training sets for language models", 2024,
  https://arxiv.org/abs/2406.11794
"""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train_jax.core.objective import Batch, Objective
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.language.task import LanguageTask
from train_jax.language.tokenizer import Tokenizer, text_package
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.storage.cache import local_folder
from train_jax.storage.files import write_text
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, read_whole

SHUFFLE_SEED = 1337
FEWSHOT_SEED = 1234
"""The published seeds: for the order of the items and, plus the number of an item, for the examples of its prompt."""

Item = Mapping[str, Any]
Tokens = list[int]
Encode = Callable[[Sequence[str]], list[Tokens]]
Scores = list[tuple[np.ndarray, ...]]
"""A scorer's arrays by position, for each sequence, such as the loss of the next token and the most likely one."""
Scorer = Callable[[Sequence[Tokens]], Scores]
Outputs = Callable[[Any, Any], tuple[Any, ...]]
"""Maps the logits and the tokens of a batch to arrays with the axes of rows and positions first."""

_FIELDS = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "language_modeling": {"context": str, "continuation": str},
}
"""The fields of an item of each kind of task."""
_OPTIONS = {"multiple_choice": "choices", "schema": "context_options"}
_LARGEST_BYTES = 2**30
_ITEMS_AT_ONCE = 256
_SHORTEST = 64


@dataclass(frozen=True)
class CoreTask:
    """A task of the bundle."""

    label: str
    kind: str
    fewshot: int
    """Number of examples before the question."""
    delimiter: str
    """Text between a question and its answer."""
    baseline: float
    """Accuracy of a random answer."""
    items: tuple[Item, ...]
    """Items in the published random order."""

    def first(self, limit: int) -> CoreTask:
        """Returns the task with only its first items (0: all). Raises `UserError` if they are too few for a prompt."""
        if limit and limit <= self.fewshot:
            raise UserError(
                f"{self.label} has {self.fewshot} examples in a prompt, not only {limit} items; use more items"
            )
        return dataclasses.replace(self, items=self.items[: limit or None])

    def centered(self, accuracy: float) -> float:
        """Returns the accuracy on a scale from 0, a random answer, to 1."""
        return (accuracy - self.baseline) / (1 - self.baseline)


@dataclass(frozen=True)
class Question:
    """An item as sequences of tokens, one for each possible answer."""

    rows: list[Tokens]
    starts: list[int]
    ends: list[int]
    """Ends of the tokens that decide, from `starts` to `ends` of each row."""
    gold: int | None
    """Number of the correct row; None if the model must predict the tokens of the only row."""


# ---- the bundle


def read_bundle(directory: str | Path) -> list[CoreTask]:
    """Reads all tasks. Raises `UserError` for a missing or invalid file."""
    folder = local_folder(directory)
    yaml = text_package("yaml")
    try:
        listed = yaml.safe_load(_read(folder, "core.yaml"))["icl_tasks"]
        table = csv.DictReader(io.StringIO(_read(folder, "eval_meta_data.csv")))
        baselines = {row["Eval Task"]: 0.01 * float(row["Random baseline"]) for row in table}
        tasks = [_task(folder, entry, baselines) for entry in listed]
    except (yaml.YAMLError, csv.Error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        raise UserError(f"{path_of(directory)} is not a CORE bundle ({reason}); give the unpacked folder") from None
    if not tasks:
        raise UserError(f"{path_of(directory)} is a CORE bundle without tasks; give the unpacked folder")
    return tasks


def _read(folder: Path, name: str) -> str:
    try:
        return read_whole(folder / name, largest_bytes=_LARGEST_BYTES).decode()
    except FileNotFoundError:
        raise UserError(f"{folder / name} does not exist; give the unpacked folder of a CORE bundle") from None
    except (DamagedError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / name} cannot be read ({error}); download the CORE bundle again") from None


def _task(folder: Path, entry: Mapping[str, Any], baselines: Mapping[str, float]) -> CoreTask:
    kind = entry["icl_task_type"]
    uri = PurePosixPath(str(entry["dataset_uri"]))
    if kind not in _FIELDS:
        raise ValueError(f"icl_task_type {kind!r} is not one of {', '.join(_FIELDS)}")
    if uri.is_absolute() or ".." in uri.parts:
        raise ValueError(f"dataset_uri {uri} leaves the folder")
    name = f"eval_data/{uri}"
    fewshot = int(entry["num_fewshot"][0])
    lines = io.StringIO(_read(folder, name), newline=None)  # only line feeds end a line
    items = [_item(kind, json.loads(line), f"{name}, line {number}") for number, line in enumerate(lines, 1)]
    if len(items) <= fewshot:
        raise ValueError(f"{name} has {len(items)} items for {fewshot} examples and a question")
    random.Random(SHUFFLE_SEED).shuffle(items)
    delimiter = str(entry.get("continuation_delimiter", " "))
    return CoreTask(str(entry["label"]), kind, fewshot, delimiter, baselines[entry["label"]], tuple(items))


def _item(kind: str, item: Any, where: str) -> Item:
    """Returns a checked item. Raises ValueError if it cannot be asked."""
    for name, expected in _FIELDS[kind].items():
        if type(item.get(name)) is not expected:
            raise ValueError(f"{where}: {name} is not a {expected.__name__}")
    if kind in _OPTIONS:
        options = item[_OPTIONS[kind]]
        if not all(isinstance(option, str) for option in options) or not 0 <= item["gold"] < len(options):
            raise ValueError(f"{where}: gold {item['gold']} or an option is not valid")
    return item


# ---- prompts


def ask(task: CoreTask, number: int, encode: Encode, limit: int) -> Question:
    """Returns an item of the task as tokens, with its examples in front.

    `encode` puts the token that begins a document in front of each text. The last `limit` tokens of longer prompts are
    kept. Raises `UserError` if the tokens that decide are more.
    """
    rows = encode(_prompts(task, task.items[number], _examples(task, number)))
    gold = None if task.kind == "language_modeling" else int(task.items[number]["gold"])
    ends = [len(row) for row in rows]
    if task.kind == "multiple_choice":
        starts = [_common(rows)] * len(rows)
    elif task.kind == "schema":
        shared = _common([row[::-1] for row in rows])
        starts = [end - shared for end in ends]
    else:
        without, row = rows
        if row[: len(without)] != without or len(row) == len(without):
            raise UserError(
                f"{task.label}: the tokens of an item do not begin with those of the item without its answer; use "
                "another tokenizer"
            )
        rows = [row]
        starts = [len(without)]
        ends = [len(row)]
    cut = [max(0, len(row) - limit) for row in rows]
    if any(start < c for start, c in zip(starts, cut, strict=True)):
        raise UserError(
            f"{task.label}: an answer is longer than the {limit} positions of the model; use a longer model"
        )
    return Question(
        [row[c:] for row, c in zip(rows, cut, strict=True)],
        [start - c for start, c in zip(starts, cut, strict=True)],
        [end - c for end, c in zip(ends, cut, strict=True)],
        gold,
    )


def _examples(task: CoreTask, number: int) -> list[Item]:
    if not task.fewshot:
        return []
    others = [n for n in range(len(task.items)) if n != number]
    return [task.items[n] for n in random.Random(FEWSHOT_SEED + number).sample(others, task.fewshot)]


def _prompts(task: CoreTask, item: Item, examples: Sequence[Item]) -> list[str]:
    """Returns a text for each possible answer; in language modeling one without and one with the answer."""
    render = {"multiple_choice": _choice, "schema": _context, "language_modeling": _continued}[task.kind]
    front = "".join(render(task, example, example.get("gold")) + "\n\n" for example in examples)
    if task.kind == "language_modeling":
        without = front + item["context"].strip() + task.delimiter
        return [without.strip(), front + render(task, item, None)]
    return [front + render(task, item, number) for number in range(len(item[_OPTIONS[task.kind]]))]


def _choice(task: CoreTask, item: Item, number: Any) -> str:
    return item["query"] + task.delimiter + item["choices"][number]


def _context(task: CoreTask, item: Item, number: Any) -> str:
    return item["context_options"][number] + task.delimiter + item["continuation"]


def _continued(task: CoreTask, item: Item, number: Any) -> str:
    return item["context"].strip() + task.delimiter + item["continuation"]


def _common(rows: Sequence[Tokens]) -> int:
    """Returns the number of tokens that all rows have in common at their beginning."""
    length = min(map(len, rows))
    return next((n for n in range(length) if len({row[n] for row in rows}) > 1), length)


# ---- verdicts


def is_right(asked: Question, losses: Sequence[np.ndarray], predictions: Sequence[np.ndarray]) -> bool:
    """Returns whether the model answers a question correctly.

    For each row, `losses` has the loss of the token after each position, and `predictions` the most likely one. The
    answer is the row with the lowest mean loss, the first of equal ones.
    """
    spans = [slice(start - 1, end - 1) for start, end in zip(asked.starts, asked.ends, strict=True)]
    if asked.gold is None:
        expected = asked.rows[0][asked.starts[0] : asked.ends[0]]
        return bool(np.array_equal(predictions[0][spans[0]], expected))
    means = [float(row[span].mean()) if row[span].size else math.nan for row, span in zip(losses, spans, strict=True)]
    return means.index(min(means)) == asked.gold


# ---- losses and predictions


def task_verdicts(task: CoreTask, scorer: Scorer, encode: Encode, *, positions: int) -> list[bool]:
    """Returns whether the model answers each item correctly.

    `positions` is the length of the longest sequence that the model accepts.
    """
    verdicts = []
    total = len(task.items)
    for first in range(0, total, _ITEMS_AT_ONCE):
        asked = [ask(task, n, encode, positions) for n in range(first, min(first + _ITEMS_AT_ONCE, total))]
        scores = iter(scorer([row for each in asked for row in each.rows]))
        for each in asked:
            losses, predictions = zip(*(next(scores) for _ in each.rows), strict=True)
            verdicts.append(is_right(each, losses, predictions))
    return verdicts


def losses_and_predictions(logits: Any, tokens: Any) -> tuple[Any, ...]:
    """Returns the loss of the token after each position, and the most likely one."""
    following = jnp.roll(tokens, -1, axis=1)[..., None]
    log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(log_probabilities, following, axis=-1)[..., 0], jnp.argmax(logits, axis=-1)


class DeviceScorer:
    """Computes `outputs` for each position of sequences; compiled once for each of a few lengths.

    All tokens are given, so one call scores them, without the cache with which the engine writes text.
    """

    def __init__(
        self,
        objective: Objective,
        state: TrainState,
        devices: Devices,
        *,
        positions: int,
        tokens_at_once: int,
        outputs: Outputs = losses_and_predictions,
        both_ways: bool = False,
    ):
        """`tokens_at_once` bounds the tokens of a batch on all devices together, if a device has more than one row.

        With `both_ways`, the module reads each sequence as an instruction, in both directions.
        """
        self._both_ways = both_ways
        self._devices = devices
        self._positions = positions
        self._tokens_at_once = tokens_at_once
        self._state = devices.replicate(state)

        def eval_step(state: TrainState, batch: Batch) -> tuple[Any, Any]:
            tokens = batch["inputs"]
            masks = {name: batch[name] for name in batch if name != "inputs"}
            logits, _ = objective.call(state.eval_params, state.buffers, train=False)(tokens, **masks)
            return {}, outputs(logits, tokens)

        self._step = devices.parallel_eval_step(eval_step)

    def __call__(self, sequences: Sequence[Tokens]) -> Scores:
        scores: list[Any] = [None] * len(sequences)
        for length, numbers in self._batches(sequences):
            batch = self._devices.shard(self._devices.split_batch(self._padded(sequences, numbers, length)))
            outputs = self._step(self._state, batch)[1]
            outputs = self._devices.to_host(outputs)
            outputs = [output.reshape(len(numbers), length, *output.shape[3:]) for output in outputs]
            for row, number in enumerate(numbers):
                if number is not None:
                    size = len(sequences[number])
                    scores[number] = tuple(output[row, :size] for output in outputs)
        return scores

    def _padded(self, sequences: Sequence[Tokens], numbers: Sequence[int | None], length: int) -> dict[str, np.ndarray]:
        tokens = np.zeros((len(numbers), length), np.int32)
        inside = np.zeros((len(numbers), length), bool)
        for row, number in enumerate(numbers):
            if number is not None:
                size = len(sequences[number])
                tokens[row, :size], inside[row, :size] = sequences[number], True
        return {"inputs": tokens} | ({"instruction": inside} if self._both_ways else {})

    def _batches(self, sequences: Sequence[Tokens]) -> Iterator[tuple[int, list[int | None]]]:
        """Yields a length and the sequences of a batch, which may be padded on the right: attention is causal."""
        by_length: dict[int, list[int | None]] = {}
        for number, sequence in enumerate(sequences):
            length = _SHORTEST
            while length < len(sequence):
                length *= 2
            by_length.setdefault(min(length, self._positions), []).append(number)
        for length, numbers in by_length.items():
            rows = max(1, self._tokens_at_once // length // self._devices.count) * self._devices.count
            for first in range(0, len(numbers), rows):
                part = numbers[first : first + rows]
                yield length, part + [None] * (rows - len(part))


# ---- scores


def score(run: Restored, task: LanguageTask, tasks: Sequence[CoreTask], say: Callable[[str], None]) -> dict[str, Any]:
    """Reports a line for each task. Returns the score, and the accuracies and verdicts of the tasks."""
    encode = partial(_encode, task.data.tokenizer())
    positions = positions_of_run(run)
    tokens = run.config.eval_batch_size * run.config.arch.seq_len
    scorer = DeviceScorer(run.objective, run.state, Devices(), positions=positions, tokens_at_once=tokens)
    figures: dict[str, Any] = {"tasks": {}, "verdicts": {}}
    say(f"{run.folder.path} at step {run.step}, {run.weights}:")
    say(f"  {'task':<40} {'examples':>8} {'items':>7} {'accuracy':>9} {'centered':>9}")
    for each in tasks:
        verdicts = task_verdicts(each, scorer, encode, positions=positions)
        accuracy = sum(verdicts) / len(verdicts)
        centered = each.centered(accuracy)
        say(f"  {each.label:<40} {each.fewshot:>8} {len(verdicts):>7} {accuracy:>9.4f} {centered:>9.4f}")
        figures["tasks"][each.label] = {"items": len(verdicts), "accuracy": accuracy, "centered": centered}
        figures["verdicts"][each.label] = verdicts
    figures["core"] = sum(values["centered"] for values in figures["tasks"].values()) / len(tasks)
    say(f"  {'CORE':<40} {'':>8} {'':>7} {'':>9} {figures['core']:>9.4f}")
    return figures


def positions_of_run(run: Restored) -> int:
    """Returns the length of the longest sequence: that of the tables of rotary positions, if there are any."""
    table = run.objective.buffers.get("cos")
    return run.config.arch.seq_len if table is None else table.shape[1]


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    try:
        return [[tokenizer.bos, *ids] for ids in tokenizer.encode_batch(texts)]
    except UnicodeEncodeError:
        raise UserError("an item of the bundle is not valid UTF-8; download the CORE bundle again") from None


def save_scores(run: Restored, figures: dict[str, Any]) -> None:
    """Writes the scores of all items, without the verdicts."""
    kept = {name: figure for name, figure in figures.items() if name != "verdicts"}
    write_text(run.folder.evaluation("core"), json.dumps(kept | {"step": run.step}, indent=1))
