"""Evaluates a language model on the tasks of CORE, on all devices of a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train_jax.core.objective import Batch, Objective
from train_jax.core.state import TrainState
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.core_items import CoreTask, Encode, Tokens, ask, is_right

Scores = list[tuple[np.ndarray, np.ndarray]]
"""Of each sequence: the loss of the token after each position, and the most likely one."""
Scorer = Callable[[Sequence[Tokens]], Scores]

_ITEMS_AT_ONCE = 256
_SHORTEST = 64


def task_verdicts(task: CoreTask, scorer: Scorer, encode: Encode, *, positions: int) -> list[bool]:
    """Returns whether the model answers each item rightly.

    `positions` is the length of the longest sequence that the model accepts.
    """
    verdicts, total = [], len(task.items)
    for first in range(0, total, _ITEMS_AT_ONCE):
        asked = [ask(task, n, encode, positions) for n in range(first, min(first + _ITEMS_AT_ONCE, total))]
        scores = iter(scorer([row for each in asked for row in each.rows]))
        for each in asked:
            losses, predictions = zip(*(next(scores) for _ in each.rows), strict=True)
            verdicts.append(is_right(each, losses, predictions))
    return verdicts


class DeviceScorer:
    """Computes losses and predictions of sequences; compiled once for each of a few lengths."""

    def __init__(
        self, objective: Objective, state: TrainState, devices: Devices, *, positions: int, tokens_at_once: int
    ):
        """`tokens_at_once` bounds the tokens of a batch on all devices together, if a device has more than one row."""
        self._devices, self._positions, self._tokens_at_once = devices, positions, tokens_at_once
        self._state = devices.replicate(state)

        def eval_step(state: TrainState, batch: Batch) -> tuple[Any, Any]:
            tokens = batch["inputs"]
            logits, _ = objective.call(state.eval_params, state.buffers, train=False)(tokens)
            following = jnp.roll(tokens, -1, axis=1)[..., None]
            log_probabilities = jax.nn.log_softmax(logits.astype(jnp.float32))
            losses = -jnp.take_along_axis(log_probabilities, following, axis=-1)[..., 0]
            return {}, {"losses": losses, "predictions": jnp.argmax(logits, axis=-1)}

        self._step = devices.parallel_eval_step(eval_step)

    def __call__(self, sequences: Sequence[Tokens]) -> Scores:
        scores: list[Any] = [None] * len(sequences)
        for length, numbers in self._batches(sequences):
            batch = np.zeros((len(numbers), length), np.int32)
            for row, number in enumerate(numbers):
                if number is not None:
                    batch[row, : len(sequences[number])] = sequences[number]
            outputs = self._step(self._state, self._devices.shard(self._devices.split_batch({"inputs": batch})))[1]
            outputs = self._devices.to_host(outputs)
            losses, predictions = (outputs[name].reshape(-1, length) for name in ("losses", "predictions"))
            for row, number in enumerate(numbers):
                if number is not None:
                    size = len(sequences[number])
                    scores[number] = losses[row, :size], predictions[row, :size]
        return scores

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
