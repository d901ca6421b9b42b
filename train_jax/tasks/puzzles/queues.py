"""The queue with refill (traced): a row whose puzzle has halted takes the next puzzle of the queue.

Early halting without refill is a queue of as many puzzles as rows. With trajectories, a puzzle that does not halt is
computed again with other noise.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from train_jax.core.metrics import Metrics
from train_jax.core.objective import Batch, Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.tasks.puzzles.batches import IGNORED_LABEL, HostBatch
from train_jax.tasks.puzzles.metrics import answer_sums, halting_logits
from train_jax.tasks.puzzles.scan import (
    EvalModel,
    EvalStep,
    TrajectoryOptions,
    beside,
    row_keys,
    with_noise,
    without_mask,
)

QUEUE_BATCHES = 32
"""Number of batches in a queue. Rows are idle only at the end of a queue, for less than the halt limit."""
PUZZLES_PER_ROW = 16
QUEUE_BYTES = 2**30
"""Limit of the inputs, labels and answers of a queue, over all devices of a process."""


class _Loop(NamedTuple):
    """Loop state of the rows of a replica."""

    carry: Any
    example: jax.Array
    """Place in the queue of each row's puzzle; the length of the queue if the row is idle."""
    steps: jax.Array
    """ACT steps of each row's trajectory so far."""
    trajectory: jax.Array
    """The number of each row's trajectory, from 0."""
    answer: dict[str, jax.Array]
    """Outputs that are the answer of each row's puzzle if it halts now."""
    logits: jax.Array
    """The halting logit of each row's answer."""
    next: jax.Array
    """The place in the queue of the next puzzle."""
    computed: jax.Array
    """ACT steps of the replica so far."""
    outputs: dict[str, jax.Array]
    """Outputs of each puzzle of the queue when it halted, and its `steps`."""


def make_queue_step(
    objective: Objective,
    max_steps: int,
    threshold_logit: float,
    rows: int = 0,
    trajectories: TrajectoryOptions | None = None,
) -> EvalStep:
    """Returns `(state, queue) -> (metrics, outputs)`, which computes the puzzles of a queue until each has halted.

    A puzzle halts at the first ACT step whose halting logit exceeds the threshold, at the latest after `max_steps`.
    Each replica has `rows` rows, 0 for one for each place of the queue; a row whose puzzle has halted takes the next
    one. In the queue, padding (`is_example` False) is at the end if there are fewer rows than places. Raises
    `UserError` if rows have to take another puzzle and the model's carry has no field `halted`, by which they do.

    With `trajectories`, a puzzle that has not halted after `max_steps` starts again with the noise of the next
    trajectory. If it does not halt in the last one either, its answer is that of the highest halting logit of all; its
    `steps` are those of all trajectories. The queue then has the `number` of each puzzle in the data set.

    Metrics are sums over all replicas: `steps`, the ACT steps of the puzzles, and `computed_steps`, those that the rows
    computed, idle ones included. Outputs have a leading axis of size 1 and include `steps`.
    """
    count_of_trajectories = trajectories.trajectories if trajectories else 1

    def queue_step(state: TrainState, queue: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        queue, is_example = without_mask(queue)
        length, count = len(is_example), is_example.sum(dtype=jnp.int32)
        numbers = queue.pop("number", jnp.arange(length))
        width = rows or length
        starts_again = count_of_trajectories > 1 or width < length
        model = EvalModel(objective, state)

        def act_step(carry: Any, example: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            batch = {name: values.at[example].get(mode="clip") for name, values in queue.items()}
            carry, _, outputs = model.act_step(carry, batch)
            return carry, outputs

        def with_random_noise(carry: Any, loop: _Loop) -> Any:
            if trajectories is None or not trajectories.noise:
                return carry
            keys = row_keys(trajectories.seed, numbers.at[loop.example].get(mode="clip"), loop.trajectory)
            return with_noise(carry, keys, loop.steps, trajectories.noise)

        def running(loop: _Loop) -> jax.Array:
            return (loop.example < length).any()

        # No collectives here: replicas leave the loop after different numbers of iterations.
        def body(loop: _Loop) -> _Loop:
            carry = _with_halted(loop.carry, loop.steps == 0) if starts_again else loop.carry
            carry, outputs = act_step(carry, loop.example)
            logits, steps = halting_logits(outputs), loop.steps + 1
            # An answer above the threshold is the first one, so it has the highest logit.
            better = (loop.trajectory == 0) & (loop.steps == 0) | (logits > loop.logits) | (trajectories is None)
            answer = {name: jnp.where(beside(better, new), new, loop.answer[name]) for name, new in outputs.items()}
            ends = steps >= max_steps
            last = ends & (loop.trajectory + 1 >= count_of_trajectories)
            halts = (loop.example < length) & ((logits > threshold_logit) | last)
            place = jnp.where(halts, loop.example, length)
            results = answer | {"steps": loop.trajectory * max_steps + steps}
            results = {name: loop.outputs[name].at[place].set(results[name], mode="drop") for name in results}
            following = loop.next + jnp.cumsum(halts, dtype=jnp.int32) - 1
            following = jnp.where(following < count, following, length)
            return _Loop(
                with_random_noise(carry, loop),
                example=jnp.where(halts, following, loop.example),
                steps=jnp.where(halts | ends, 0, steps),
                trajectory=jnp.where(halts, 0, loop.trajectory + ends),
                answer=answer,
                logits=jnp.where(better, logits, loop.logits),
                next=loop.next + halts.sum(dtype=jnp.int32),
                computed=loop.computed + 1,
                outputs=results,
            )

        first = jnp.arange(width, dtype=jnp.int32)
        example = jnp.where(is_example[:width], first, length)
        carry = model.initial_carry({name: values[:width] for name, values in queue.items()})
        shapes = jax.eval_shape(act_step, carry, example)[1]
        answer = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        outputs = {name: jnp.zeros((length, *zeros.shape[1:]), zeros.dtype) for name, zeros in answer.items()}
        none, zero = jnp.zeros(width, jnp.int32), jnp.zeros((), jnp.int32)
        loop = _Loop(
            carry,
            example,
            steps=none,
            trajectory=none,
            answer=answer,
            logits=halting_logits(answer),
            next=jnp.int32(width),
            computed=zero,
            outputs=outputs | {"steps": jnp.zeros(length, jnp.int32)},
        )
        loop = jax.lax.while_loop(running, body, loop)
        outputs = loop.outputs
        metrics = answer_sums(outputs["preds"], outputs["q_halt_logits"], queue["labels"], outputs["steps"])
        metrics["computed_steps"] = loop.computed * (width if width < length else metrics["count"])
        return jax.lax.psum(metrics, AXIS), {name: value[None] for name, value in outputs.items()}

    return queue_step


def _with_halted(carry: Any, halted: jax.Array) -> Any:
    if not hasattr(carry, "halted"):
        raise UserError(
            f"--refill needs a carry with a field halted, by which a row takes another puzzle, but the carry of this "
            f"model is a {type(carry).__name__} without it; omit --refill"
        )
    return dataclasses.replace(carry, halted=halted)


def rows_of_queues(batch_size: int, examples: int, devices: int, most_steps: int = 0) -> int:
    """Returns the rows that a device computes at once: `batch_size`, or fewer for a small data set.

    At the end of a queue, rows wait for the last puzzle. Each row computes at least `PUZZLES_PER_ROW` puzzles, or half
    as many as a puzzle may take ACT steps, so that this is a small part of the time.
    """
    return max(1, min(batch_size, -(-examples // (devices * max(PUZZLES_PER_ROW, most_steps // 2)))))


@dataclasses.dataclass(frozen=True)
class Queues:
    """The puzzles of several batches as one queue for each device of this process."""

    batches: list[tuple[HostBatch, Bool[np.ndarray, "local"]]]
    devices: int
    length: int
    """Number of places in each queue, at least the number of its puzzles."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the examples, with `is_example`, in the order of the queues of all devices.

        The devices take turns, so that their queues are equally long up to one puzzle.
        """
        valid = np.concatenate([valid for _, valid in self.batches])
        arrays = {}
        for name in self.batches[0][0]:
            filling = IGNORED_LABEL if name == "labels" else 0
            values = np.concatenate([batch[name] for batch, _ in self.batches])
            queues = np.full((self.devices * self.length, *values.shape[1:]), filling, values.dtype)
            queues[self._places] = values[valid]
            arrays[name] = queues
        arrays["is_example"] = np.zeros(self.devices * self.length, bool)
        arrays["is_example"][self._places] = True
        return arrays

    @property
    def _places(self) -> np.ndarray:
        """Place of each example in the queues of all devices."""
        turns, device = np.divmod(np.arange(sum(int(valid.sum()) for _, valid in self.batches)), self.devices)
        return device * self.length + turns

    def of_batches(
        self, outputs: dict[str, np.ndarray]
    ) -> Iterator[tuple[dict[str, np.ndarray], HostBatch, Bool[np.ndarray, "local"]]]:
        """Yields the outputs, (1, places, …), of the rows of each batch, (1, local, …); those of padding are 0."""
        places, first = self._places, 0
        for batch, valid in self.batches:
            own = places[first : first + int(valid.sum())]
            first += len(own)
            of_batch = {}
            for name, values in outputs.items():
                of_batch[name] = np.zeros((1, len(valid), *values.shape[2:]), values.dtype)
                of_batch[name][:, valid] = values[:, own]
            yield of_batch, batch, valid


def queues_of(
    batches: Iterable[tuple[HostBatch, Bool[np.ndarray, "local"]]], *, count: int, devices: int
) -> Iterator[Queues]:
    """Groups `count` batches into queues of equal length, each for `devices` devices."""
    group_size, length = 0, 0
    part: list[tuple[HostBatch, np.ndarray]] = []
    for number, each in enumerate(batches, 1):
        if not group_size:
            inputs = each[0]["inputs"]
            group_size = max(1, min(count, QUEUE_BATCHES, QUEUE_BYTES // (3 * inputs.nbytes)))
            length = group_size * len(inputs) // devices
        part.append(each)
        if len(part) == group_size or number == count:
            yield Queues(part, devices, length)
            part = []
