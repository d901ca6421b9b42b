"""Early halting with refill: a row whose puzzle has halted takes the next puzzle of a queue."""

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
from train_jax.tasks.puzzles.batches import IGNORED_LABEL
from train_jax.tasks.puzzles.batches import Batch as HostBatch
from train_jax.tasks.puzzles.eval_step import EvalModel, EvalStep, halting_metrics, without_mask
from train_jax.tasks.puzzles.halting import halting_logits

QUEUE_BATCHES = 32
"""Batches of a queue. Rows are idle only at the end of a queue, for less than the halt limit."""
PUZZLES_PER_ROW = 16
QUEUE_BYTES = 2**30
"""Limit of the inputs, labels and answers of a queue, over all devices of a process."""


class _Loop(NamedTuple):
    """Loop state of the rows of a replica."""

    carry: Any
    example: jax.Array
    """The place in the queue of each row's puzzle; the length of the queue if the row is idle."""
    steps: jax.Array
    """ACT steps of each row's puzzle so far."""
    next: jax.Array
    """The place in the queue of the next puzzle."""
    computed: jax.Array
    """ACT steps of the replica so far."""
    outputs: dict[str, jax.Array]
    """Outputs of each puzzle of the queue when it halted, and its `steps`."""


def make_refill_step(objective: Objective, max_steps: int, threshold_logit: float, rows: int) -> EvalStep:
    """Like `make_halting_eval_step`, for a queue of puzzles that `rows` rows of each replica compute.

    In the batch, which is the queue, padding (`is_example` False) is at the end. A row whose puzzle has halted takes
    the next one of the queue; a replica stops when its queue is empty and all rows have halted. `computed_steps` is the
    sum of the ACT steps that the rows computed, idle ones included. Raises `UserError` if the model's carry has no
    field `halted`, by which a row takes another puzzle.
    """

    def refill_step(state: TrainState, queue: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        queue, is_example = without_mask(queue)
        length, count = len(is_example), is_example.sum(dtype=jnp.int32)
        model = EvalModel(objective, state)

        def act_step(carry: Any, example: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            batch = {name: values.at[example].get(mode="clip") for name, values in queue.items()}
            carry, _, outputs = model.act_step(carry, batch)
            return carry, outputs

        def running(loop: _Loop) -> jax.Array:
            return (loop.example < length).any()

        # No collectives here: replicas leave the loop after different numbers of iterations.
        def body(loop: _Loop) -> _Loop:
            carry, outputs = act_step(_with_halted(loop.carry, loop.steps == 0), loop.example)
            steps = loop.steps + 1
            halts = (loop.example < length) & ((halting_logits(outputs) > threshold_logit) | (steps >= max_steps))
            place = jnp.where(halts, loop.example, length)
            results = outputs | {"steps": steps}
            results = {name: loop.outputs[name].at[place].set(results[name], mode="drop") for name in results}
            following = loop.next + jnp.cumsum(halts, dtype=jnp.int32) - 1
            following = jnp.where(following < count, following, length)
            example = jnp.where(halts, following, loop.example)
            taken = loop.next + halts.sum(dtype=jnp.int32)
            return _Loop(carry, example, jnp.where(halts, 0, steps), taken, loop.computed + 1, results)

        first = jnp.arange(rows, dtype=jnp.int32)
        example = jnp.where(first < count, first, length)
        carry = model.initial_carry({name: values[:rows] for name, values in queue.items()})
        outputs = jax.eval_shape(act_step, carry, example)[1] | {"steps": jax.ShapeDtypeStruct((rows,), jnp.int32)}
        zeros = {name: jnp.zeros((length, *output.shape[1:]), output.dtype) for name, output in outputs.items()}
        zero = jnp.zeros((), jnp.int32)
        loop = _Loop(carry, example, jnp.zeros(rows, jnp.int32), jnp.int32(rows), zero, zeros)
        loop = jax.lax.while_loop(running, body, loop)
        metrics = halting_metrics(loop.outputs, queue["labels"]) | {"computed_steps": loop.computed * rows}
        return jax.lax.psum(metrics, AXIS), {name: value[None] for name, value in loop.outputs.items()}

    return refill_step


def _with_halted(carry: Any, halted: jax.Array) -> Any:
    if not hasattr(carry, "halted"):
        raise UserError(
            f"--refill needs a carry with a field halted, by which a row takes another puzzle, but the carry of this "
            f"model is a {type(carry).__name__} without it; omit --refill"
        )
    return dataclasses.replace(carry, halted=halted)


def rows_of_queues(batch_size: int, examples: int, devices: int) -> int:
    """Returns the rows that a device computes at once: `batch_size`, or fewer for a small data set.

    At the end of a queue, rows wait for the last puzzle. Each row computes at least `PUZZLES_PER_ROW` puzzles, so that
    this is a small part of the time.
    """
    return max(1, min(batch_size, -(-examples // (devices * PUZZLES_PER_ROW))))


@dataclasses.dataclass(frozen=True)
class Queues:
    """The puzzles of several batches as one queue for each device of this process."""

    batches: list[tuple[HostBatch, Bool[np.ndarray, "local"]]]
    devices: int
    length: int
    """Places in each queue, at least the number of its puzzles."""

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Returns the examples, with `is_example`, in the order of the queues of all devices.

        The devices take turns, so that their queues are equally long up to one puzzle.
        """
        valid = np.concatenate([valid for _, valid in self.batches])
        arrays = {}
        for name, filling in (("inputs", 0), ("labels", IGNORED_LABEL), ("puzzle_identifiers", 0)):
            values = np.concatenate([batch[name] for batch, _ in self.batches])
            queues = np.full((self.devices * self.length, *values.shape[1:]), filling, values.dtype)
            queues[self._places] = values[valid]
            arrays[name] = queues
        arrays["is_example"] = np.zeros(self.devices * self.length, bool)
        arrays["is_example"][self._places] = True
        return arrays

    @property
    def _places(self) -> np.ndarray:
        """The place of each example in the queues of all devices."""
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
