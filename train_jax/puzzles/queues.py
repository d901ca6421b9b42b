"""The queue with refill (traced): a row whose puzzle has halted takes the next puzzle of the queue.

Early halting without refill is a queue of as many puzzles as rows. With trajectories, the puzzles that do not halt are
computed again with other noise, in another view, or with the weights of another run.
"""

import dataclasses
import functools
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
from train_jax.puzzles.batches import IGNORED_LABEL, HostBatch
from train_jax.puzzles.metrics import answer_sums, halting_logits, score_answers
from train_jax.puzzles.scan import (
    EvalModel,
    EvalStep,
    TrajectoryOptions,
    answer_marks,
    beside,
    row_keys,
    with_noise,
    without_mask,
)
from train_jax.puzzles.views import TABLES

QUEUE_BATCHES = 32
"""Number of batches in a queue. Rows are idle only at the end of a queue, for less than the halt limit."""
PUZZLES_PER_ROW = 16
QUEUE_BYTES = 2**30
"""Limit of the inputs, labels, views and answers of a queue, over all devices of a process."""


class _Loop(NamedTuple):
    """Loop state of a replica."""

    carry: Any
    example: jax.Array
    """Place in the queue of each row's puzzle; the length of the queue if the row is idle."""
    steps: jax.Array
    """ACT steps of each row's trajectory so far."""
    answer: dict[str, jax.Array]
    """Outputs that are the answer of each row's trajectory if it ends now."""
    logits: jax.Array
    """The halting logit of each row's answer."""
    trajectory: jax.Array
    """The number of the trajectory that all rows compute, from 0."""
    order: jax.Array
    """Places of the puzzles of this trajectory, in the order in which rows take them."""
    count: jax.Array
    """Number of these puzzles."""
    next: jax.Array
    """Number of puzzles that rows have taken, or tried to take."""
    waiting: jax.Array
    """Places of the puzzles of the next trajectory."""
    num_waiting: jax.Array
    computed: jax.Array
    """ACT steps of the replica so far."""
    puzzles: dict[str, jax.Array]
    """By puzzle: the outputs of its answer so far, its `logits`, its `steps` and `trajectories`, the `marks` of the
    answers of all its trajectories, and whether two of them have `agreed`."""


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

    With `trajectories`, the puzzles that have not halted after `max_steps` are a queue again, for the next trajectory:
    with other noise, in another view, or with the weights of another run (of a state of `stack_runs`). A puzzle that
    does not halt in the last one either has the answer of the highest halting logit of all; its `steps` are those of
    all trajectories. If they have to agree, the step at which a puzzle halts ends its trajectory only; the puzzle halts
    when two trajectories have the same answer. The queue then has the `number` of each puzzle in the data set.

    Metrics are sums over all replicas: `steps`, the ACT steps of the puzzles, and `computed_steps`, those that the rows
    computed, idle ones included; with trajectories `solves`, the trajectories of the puzzles. Outputs have a leading
    axis of size 1 and include `steps`, with trajectories also `solves`.
    """
    options = trajectories or TrajectoryOptions(1, 0.0, max_steps)
    step = _QueueStep(objective, max_steps, threshold_logit, rows, options, has_trajectories=trajectories is not None)

    def queue_step(state: TrainState, queue: Batch) -> tuple[Metrics, dict[str, jax.Array]]:  # names the program
        return step(state, queue)

    return queue_step


@dataclasses.dataclass(frozen=True)
class _QueueStep:
    """The computation of `make_queue_step`."""

    objective: Objective
    max_steps: int
    threshold_logit: float
    rows: int
    options: TrajectoryOptions
    has_trajectories: bool

    def __call__(self, state: TrainState, queue: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        queue, is_example = without_mask(queue)
        length = len(is_example)
        count = is_example.sum(dtype=jnp.int32)
        numbers = queue.pop("number", jnp.arange(length))
        width = self.rows or length
        starts_again = self.options.trajectories > 1 or width < length

        def running(loop: _Loop) -> jax.Array:
            return (loop.example < length).any()

        # No collectives here: replicas leave the loop after different numbers of iterations.
        def body(loop: _Loop) -> _Loop:
            carry = _with_halted(loop.carry, loop.steps == 0) if starts_again else loop.carry
            carry, outputs = self._act_step(state, queue, carry, loop.example, loop.trajectory)
            return self._advanced(loop, carry, outputs, numbers)

        first = self._first(state, queue, is_example[:width], width, count)
        loop = jax.lax.while_loop(running, body, first)
        outputs = {name: loop.puzzles[name] for name in (*first.answer, "steps")}
        if self.has_trajectories:
            outputs["solves"] = loop.puzzles["trajectories"]
        metrics = answer_sums(outputs["preds"], outputs["q_halt_logits"], queue["labels"], outputs["steps"])
        metrics["computed_steps"] = loop.computed * (width if width < length else metrics["count"])
        if self.has_trajectories:
            metrics |= _trajectory_sums(loop.puzzles, queue["labels"])
        return jax.lax.psum(metrics, AXIS), {name: value[None] for name, value in outputs.items()}

    def _act_step(
        self, state: TrainState, queue: Batch, carry: Any, example: jax.Array, trajectory: jax.Array
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Computes an ACT step of each row's puzzle; returns the carry and the outputs."""
        options = self.options
        model = EvalModel(self.objective, state, options.run_of(trajectory) if options.runs > 1 else None)
        carry, _, outputs = model.act_step(carry, _examples(queue, example, options.view_of(trajectory)))
        return carry, outputs

    def _first(self, state: TrainState, queue: Batch, is_example: jax.Array, width: int, count: jax.Array) -> _Loop:
        """Returns the loop state in which each row has its first puzzle."""
        options = self.options
        length = len(next(iter(queue.values())))
        place = jnp.arange(length, dtype=jnp.int32)
        example = jnp.where(is_example, place[:width], length)
        zero = jnp.zeros((), jnp.int32)
        model = EvalModel(self.objective, state, zero if options.runs > 1 else None)
        carry = model.initial_carry({name: values[:width] for name, values in queue.items()})
        shapes = jax.eval_shape(functools.partial(self._act_step, state, queue), carry, example, zero)[1]
        answer = {name: jnp.zeros(shape.shape, shape.dtype) for name, shape in shapes.items()}
        puzzles = {name: jnp.zeros((length, *zeros.shape[1:]), zeros.dtype) for name, zeros in answer.items()}
        puzzles |= {"steps": 0 * place, "trajectories": 0 * place, "agreed": jnp.zeros(length, bool)}
        puzzles["logits"] = halting_logits(puzzles)
        if options.agree:
            puzzles["marks"] = jnp.zeros((length, options.trajectories, 2), jnp.uint32)
        return _Loop(
            carry,
            example,
            steps=jnp.zeros(width, jnp.int32),
            answer=answer,
            logits=halting_logits(answer),
            trajectory=zero,
            order=place,
            count=count,
            next=jnp.int32(width),
            waiting=place,
            num_waiting=zero,
            computed=zero,
            puzzles=puzzles,
        )

    def _decided(self, logits: jax.Array, steps: jax.Array, is_example: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Decides halting in evaluation; `models_torch.act.ACT` does in training.

        Returns whether the answer of each row is sure, and whether its puzzle, or its trajectory, ends here.
        """
        is_sure = logits > self.threshold_logit
        return is_sure, is_example & (is_sure | (steps >= self.max_steps))

    def _advanced(self, loop: _Loop, carry: Any, outputs: dict[str, jax.Array], numbers: jax.Array) -> _Loop:
        """Returns the loop state after an ACT step: puzzles that end have an answer or wait, and rows take others."""
        options = self.options
        length = len(loop.order)
        logits = halting_logits(outputs)
        steps = loop.steps + 1
        # An answer above the threshold is the first one, so it has the highest logit.
        better = (loop.steps == 0) | (logits > loop.logits) | (not self.has_trajectories)
        answer = {name: jnp.where(beside(better, new), new, loop.answer[name]) for name, new in outputs.items()}
        highest = jnp.where(better, logits, loop.logits)
        is_sure, ends = self._decided(logits, steps, is_example=loop.example < length)
        puzzles, agrees = _with_answers(loop, ends, steps, answer, highest, agree=options.agree)
        is_last = loop.trajectory + 1 >= options.trajectories
        waits = ends & ~(agrees if options.agree else is_sure) & ~is_last
        place = jnp.where(waits, loop.num_waiting + jnp.cumsum(waits, dtype=jnp.int32) - 1, length)
        following = loop.next + jnp.cumsum(ends, dtype=jnp.int32) - 1
        following = jnp.where(following < loop.count, loop.order.at[following].get(mode="clip"), length)
        loop = loop._replace(
            carry=_with_noise(carry, loop, numbers, options),
            example=jnp.where(ends, following, loop.example),
            steps=jnp.where(ends | (loop.example == length), 0, steps),
            answer=answer,
            logits=highest,
            next=loop.next + ends.sum(dtype=jnp.int32),
            waiting=loop.waiting.at[place].set(loop.example, mode="drop"),
            num_waiting=loop.num_waiting + waits.sum(dtype=jnp.int32),
            computed=loop.computed + 1,
            puzzles=puzzles,
        )
        return _next_trajectory(loop) if options.trajectories > 1 else loop


def _examples(queue: Batch, example: jax.Array, view: Any) -> Batch:
    """Returns the puzzles at these places of the queue, with the permutations of one view if they have views."""
    batch = {name: values.at[example].get(mode="clip") for name, values in queue.items()}
    return batch | {name: batch[name][:, view] for name in TABLES if name in batch}


def _with_noise(carry: Any, loop: _Loop, numbers: jax.Array, options: TrajectoryOptions) -> Any:
    if not options.noise:
        return carry
    of_rows = numbers.at[loop.example].get(mode="clip")
    keys = row_keys(options.seed, of_rows, jnp.broadcast_to(loop.trajectory, of_rows.shape))
    return with_noise(carry, keys, loop.steps, options.noise)


def _trajectory_sums(puzzles: dict[str, jax.Array], labels: jax.Array) -> dict[str, jax.Array]:
    """Returns the sums of the metrics that only trajectories have, over the puzzles that have labels."""
    scores = score_answers(puzzles["preds"], labels)
    sums = {"solves": (scores.labelled * puzzles["trajectories"]).sum()}
    if "marks" in puzzles:
        sums["agreed"] = (scores.labelled & puzzles["agreed"]).sum()
        sums["agreed_exact"] = (scores.exact & puzzles["agreed"]).sum()
    return sums


def _with_answers(
    loop: _Loop, ends: jax.Array, steps: jax.Array, answer: dict[str, jax.Array], logits: jax.Array, *, agree: bool
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns `loop.puzzles` with the answers of the rows whose trajectory ends, and a mask of those that agree with an
    earlier one of their puzzle. A puzzle keeps the answer of the highest halting logit, or one on which two agree."""
    puzzles = dict(loop.puzzles)
    length = len(loop.order)
    place = jnp.where(ends, loop.example, length)
    wins = (loop.trajectory == 0) | (logits > puzzles["logits"].at[loop.example].get(mode="clip"))
    agrees = jnp.zeros_like(ends)
    if agree:
        marks = answer_marks(answer["preds"])
        known = puzzles["marks"].at[loop.example].get(mode="clip")
        is_earlier = jnp.arange(known.shape[1]) < loop.trajectory
        agrees = ((known == marks[:, None]).all(axis=2) & is_earlier).any(axis=1)
        puzzles["marks"] = puzzles["marks"].at[place, loop.trajectory].set(marks, mode="drop")
        puzzles["agreed"] = puzzles["agreed"].at[place].set(agrees, mode="drop")
    best = jnp.where(wins | agrees, place, length)
    for name, values in (answer | {"logits": logits}).items():
        puzzles[name] = puzzles[name].at[best].set(values, mode="drop")
    puzzles["steps"] = puzzles["steps"].at[place].add(steps, mode="drop")
    puzzles["trajectories"] = puzzles["trajectories"].at[place].add(1, mode="drop")
    return puzzles, agrees


def _next_trajectory(loop: _Loop) -> _Loop:
    """Returns the loop with the puzzles that wait in the rows, if no row has a puzzle of this trajectory any more."""
    length = len(loop.order)
    rows = jnp.arange(len(loop.example), dtype=jnp.int32)
    begins = (loop.example == length).all() & (loop.num_waiting > 0)
    begun = loop._replace(
        example=jnp.where(rows < loop.num_waiting, loop.waiting[: len(rows)], length),
        trajectory=loop.trajectory + 1,
        order=loop.waiting,
        count=loop.num_waiting,
        next=jnp.int32(len(rows)),
        num_waiting=jnp.zeros_like(loop.num_waiting),
    )
    changed = ("example", "trajectory", "order", "count", "next", "num_waiting")
    return loop._replace(**{name: jnp.where(begins, getattr(begun, name), getattr(loop, name)) for name in changed})


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
        places = self._places
        first = 0
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
    group_size = 0
    length = 0
    part: list[tuple[HostBatch, np.ndarray]] = []
    for number, each in enumerate(batches, 1):
        if not group_size:
            inputs = each[0]["inputs"]
            answers_and_arrays = inputs.nbytes + sum(array.nbytes for array in each[0].values())
            group_size = max(1, min(count, QUEUE_BATCHES, QUEUE_BYTES // answers_and_arrays))
            length = group_size * len(inputs) // devices
        part.append(each)
        if len(part) == group_size or number == count:
            yield Queues(part, devices, length)
            part = []
