"""Computes the ACT steps of one puzzle one by one, for one or several trajectories at the same time."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from train_jax.core.objective import Batch
from train_jax.core.state import TrainState
from train_jax.puzzles.batches import IGNORED_LABEL, Mixture
from train_jax.puzzles.kinds import kind_of
from train_jax.puzzles.scan import EvalModel, TrajectoryOptions, continued, row_keys, with_noise
from train_jax.puzzles.solving import puzzle_task
from train_jax.puzzles.view_example import ViewExample
from train_jax.puzzles.views import symmetries_of_views, tables_of
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices


class StepAnswers(NamedTuple):
    """The answers of all trajectories after one ACT step."""

    tokens: Integer[np.ndarray, "trajectories seq"]
    q_halt_logits: Float[np.ndarray, "trajectories"]
    cycles: Integer[np.ndarray, "cycles trajectories seq"] | None = None
    """The answers after each H-cycle of the step but the last one, if they were asked for."""


def stacked(answers: Sequence[StepAnswers]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the answers and the halting logits with a leading axis of steps."""
    tokens = np.stack([each.tokens for each in answers])
    return tokens, np.stack([each.q_halt_logits for each in answers])


def choose_view(answers: Sequence[StepAnswers], *, agree: bool) -> tuple[int, int, bool]:
    """Returns the row and the ACT step (from 0) of the answer, and whether a row before it has the same one.

    The answer of a row is that of its highest halting logit. With `agree` it is the first one that two rows share;
    otherwise, and if no two do, it is that of the highest halting logit of all.
    """
    tokens, logits = stacked(answers)
    steps = logits.argmax(axis=0)
    best = tokens[steps, np.arange(len(steps))]
    for row in range(1, len(best) if agree else 0):
        if (best[:row] == best[row]).all(axis=1).any():
            return row, int(steps[row]), True
    row = int(logits.max(axis=0).argmax())
    return row, int(steps[row]), bool((best[:row] == best[row]).all(axis=1).any())


class Stepper:
    """The model of a run with its averaged weights, on one device; a number of trajectories is compiled once."""

    def __init__(self, run: Restored):
        self._run = run
        self._objective = run.objective
        self.task = puzzle_task(run)
        self._devices = Devices(1)
        self._state = self._devices.replicate(run.state)
        self._begin = self._devices.parallel(self._initial_carry, (None, 0), 0)
        self._step = self._devices.parallel(self._act_step, (None, 0, 0), (0, 0), donate=(1,))

    def steps(
        self,
        tokens: Integer[np.ndarray, "seq"],
        *,
        trajectories: int = 1,
        noise: float = 0.0,
        seed: int = 0,
        cycles: bool = False,
        views: int = 1,
        number: int = 0,
    ) -> Iterator[StepAnswers]:
        """Yields the answers to a puzzle after each ACT step, without end; with `cycles`, also those within the step.

        The first trajectory is that of `trm solve`, without noise. The others have normal noise of standard deviation
        `noise` on the latents after each ACT step. They take the views of the puzzle of this `number` in turn; answers
        are those to the puzzle itself. Raises `UserError` for several views of a puzzle without symmetries.
        """
        rows = np.arange(trajectories, dtype=np.int32)
        inputs = np.tile(np.asarray(tokens, np.int32), (trajectories, 1))
        batch = {
            "inputs": inputs,
            "labels": np.full_like(inputs, IGNORED_LABEL),
            "puzzle_identifiers": np.full(trajectories, self.task.metadata.blank_identifier_id, np.int32),
        }
        batch |= self._tables(rows, views, seed, number)
        drawn = {"trajectory": rows, "noise": np.where(rows > 0, np.float32(noise), np.float32(0))}
        batch, drawn = (self._devices.shard(self._devices.split_batch(each)) for each in (batch, drawn))
        carry = self._begin(self._state, batch)
        step = 0
        while True:
            numbers = {"seed": np.array([seed], np.uint32), "step": np.array([step], np.int32)}
            numbers = self._devices.shard(numbers)
            # The step is computed last, since it takes the memory of the carry.
            within = [np.asarray(program(self._state, carry, batch))[0] for program in self._cycles] if cycles else None
            carry, answers = self._step(self._state, carry, {"batch": batch, **drawn, **numbers})
            preds, logits = (np.asarray(each)[0] for each in answers)
            yield StepAnswers(preds, logits, np.stack(within) if within else None)
            step += 1

    @cached_property
    def _cycles(self) -> list[Any]:
        """Returns the programs that compute the answer after 1, 2, … H-cycles; they are compiled at their first use.

        An ACT step with fewer H-cycles has the latents that one with more has on its way: only gradients differ.
        """
        arch = self._run.config.arch
        counts = range(1, getattr(arch, "H_cycles", 1))
        return [self._program_of(dataclasses.replace(arch, H_cycles=count)) for count in counts]

    def _program_of(self, arch: Any) -> Any:
        objective = self._run.with_arch(arch).objective

        def answer(state: TrainState, carry: Any, batch: Batch) -> jax.Array:
            return EvalModel(objective, state).act_step(carry, batch)[2]["preds"]

        return self._devices.parallel(answer, (None, 0, 0), 0)

    def _tables(self, rows: np.ndarray, views: int, seed: int, number: int) -> dict[str, np.ndarray]:
        """Returns the permutations of each row's view. They are also there for one view, to compile one program."""
        data = self.task.metadata
        kind = kind_of(data)
        if views == 1 and (kind is None or kind.symmetries is None):
            return {}
        return tables_of(symmetries_of_views(data, first=number, count=1, views=views, seed=seed), rows % views)

    def _initial_carry(self, state: TrainState, batch: Batch) -> Any:
        return EvalModel(self._objective, state).initial_carry(batch)

    def _act_step(self, state: TrainState, carry: Any, given: dict[str, Any]) -> tuple[Any, tuple[jax.Array, ...]]:
        carry, _, outputs = EvalModel(self._objective, state).act_step(carry, given["batch"])
        keys = row_keys(given["seed"], jnp.zeros_like(given["trajectory"]), given["trajectory"])
        carry = continued(with_noise(carry, keys, given["step"], given["noise"]))
        return carry, (outputs["preds"], outputs["q_halt_logits"])


def example_of(run: Restored, puzzles: Mixture, number: int, options: TrajectoryOptions) -> ViewExample:
    """Computes all views of a puzzle of a data set."""
    tokens = np.asarray(puzzles.parts[0].inputs[number])
    views = options.views
    images = symmetries_of_views(puzzles.metadata, first=number, count=1, views=views, seed=options.seed)
    inputs = images.image(np.broadcast_to(tokens, (1, views, len(tokens))))[0]
    steps = Stepper(run).steps(tokens, trajectories=views, views=views, seed=options.seed, number=number)
    found = [next(steps) for _ in range(options.depth)]
    answers, logits = stacked(found)
    at = logits.argmax(axis=0), np.arange(views)
    return ViewExample(np.array([number]), inputs, answers[at], logits[at], at[0] + 1)
