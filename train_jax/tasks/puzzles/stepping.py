"""Computes the ACT steps of one puzzle one by one, for one or several trajectories at the same time."""

from collections.abc import Iterator
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


class Stepper:
    """The model of a run with its averaged weights, on one device; a number of trajectories is compiled once."""

    def __init__(self, run: Restored):
        self._objective, self.task = run.objective, puzzle_task(run)
        self._devices = Devices(1)
        self._state = self._devices.replicate(run.state)
        self._begin = self._devices.parallel(self._initial_carry, (None, 0), 0)
        self._step = self._devices.parallel(self._act_step, (None, 0, 0), (0, 0), donate=(1,))

    def steps(
        self, tokens: Integer[np.ndarray, "seq"], *, trajectories: int = 1, noise: float = 0.0, seed: int = 0
    ) -> Iterator[StepAnswers]:
        """Yields the answers to a puzzle after each ACT step, without end.

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
            carry, answers = self._step(self._state, carry, {"batch": batch, **drawn, **numbers})
            yield StepAnswers(*(np.asarray(each)[0] for each in answers))
            step += 1

    def _initial_carry(self, state: TrainState, batch: Batch) -> Any:
        return EvalModel(self._objective, state).initial_carry(batch)

    def _act_step(self, state: TrainState, carry: Any, given: dict[str, Any]) -> tuple[Any, tuple[jax.Array, ...]]:
        carry, _, outputs = EvalModel(self._objective, state).act_step(carry, given["batch"])
        keys = row_keys(given["seed"], jnp.zeros_like(given["trajectory"]), given["trajectory"])
        carry = continued(with_noise(carry, keys, given["step"], given["noise"]))
        return carry, (outputs["preds"], outputs["q_halt_logits"])
