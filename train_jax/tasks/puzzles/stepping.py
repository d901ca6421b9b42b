"""Computes the ACT steps of one puzzle one by one, for one or several trajectories at the same time."""

import dataclasses
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Integer

from train_jax.core.objective import Batch
from train_jax.core.state import TrainState
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.batches import IGNORED_LABEL
from train_jax.tasks.puzzles.scan import EvalModel, continued, row_keys, with_noise
from train_jax.tasks.puzzles.solving import puzzle_task


class StepAnswers(NamedTuple):
    """The answers of all trajectories after one ACT step."""

    tokens: Integer[np.ndarray, "trajectories seq"]
    q_halt_logits: Float[np.ndarray, "trajectories"]
    cycles: Integer[np.ndarray, "cycles trajectories seq"] | None = None
    """The answers after each H-cycle of the step but the last one, if they were asked for."""


class Stepper:
    """The model of a run with its averaged weights, on one device; a number of trajectories is compiled once."""

    def __init__(self, run: Restored):
        self._run, self._objective, self.task = run, run.objective, puzzle_task(run)
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
    ) -> Iterator[StepAnswers]:
        """Yields the answers to a puzzle after each ACT step, without end; with `cycles`, also those within the step.

        The first trajectory is that of `trm solve`, without noise. The others have normal noise of standard deviation
        `noise` on the latents after each ACT step.
        """
        rows = np.arange(trajectories, dtype=np.int32)
        inputs = np.tile(np.asarray(tokens, np.int32), (trajectories, 1))
        batch = {
            "inputs": inputs,
            "labels": np.full_like(inputs, IGNORED_LABEL),
            "puzzle_identifiers": np.full(trajectories, self.task.metadata.blank_identifier_id, np.int32),
        }
        drawn = {"trajectory": rows, "noise": np.where(rows > 0, np.float32(noise), np.float32(0))}
        batch, drawn = (self._devices.shard(self._devices.split_batch(each)) for each in (batch, drawn))
        carry, step = self._begin(self._state, batch), 0
        while True:
            numbers = {"seed": np.array([seed], np.uint32), "step": np.array([step], np.int32)}
            numbers = self._devices.shard(numbers)
            # The step is computed last, since it takes the memory of the carry.
            within = [np.asarray(program(self._state, carry, batch))[0] for program in self._cycles] if cycles else None
            carry, answers = self._step(self._state, carry, {"batch": batch, **drawn, **numbers})
            yield StepAnswers(*(np.asarray(each)[0] for each in answers), None if within is None else _stacked(within))
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

    def _initial_carry(self, state: TrainState, batch: Batch) -> Any:
        return EvalModel(self._objective, state).initial_carry(batch)

    def _act_step(self, state: TrainState, carry: Any, given: dict[str, Any]) -> tuple[Any, tuple[jax.Array, ...]]:
        carry, _, outputs = EvalModel(self._objective, state).act_step(carry, given["batch"])
        keys = row_keys(given["seed"], jnp.zeros_like(given["trajectory"]), given["trajectory"])
        carry = continued(with_noise(carry, keys, given["step"], given["noise"]))
        return carry, (outputs["preds"], outputs["q_halt_logits"])


def _stacked(answers: list[np.ndarray]) -> np.ndarray | None:
    """Returns the answers with a leading axis; None if there are none."""
    return np.stack(answers) if answers else None
