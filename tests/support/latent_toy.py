"""The toy model of `support.halting_toy` with a carry for each row, as the real models have: latents, steps, halted."""

import types
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

import bridge
from support.halting_toy import LENGTH, STATE, STEPS, make_puzzles
from train_jax.puzzles.batches import mixture_of
from train_jax.puzzles.evaluation import Evaluator, PuzzleEvaluation
from train_jax.puzzles.scan import TrajectoryOptions
from train_jax.puzzles.trajectories import TrajectoryEvaluation, TrajectoryEvaluator
from train_jax.runtime.devices import Devices


@bridge.register
@dataclass
class Carry:
    inner_carry: Any
    steps: Any
    halted: Any
    identifiers: Any


class LatentToy:
    """Reads answers and halting logits from tables by identifier and ACT step; latents are added to both.

    A row halts after `STEPS` ACT steps, and a row that has halted takes the example at its place in the batch.
    """

    def __init__(self) -> None:
        self.task = types.SimpleNamespace(bootstrapped_halting=False)

    def initial_carry(self, params, buffers, batch):
        assert set(batch) == {"inputs", "labels", "puzzle_identifiers"}
        rows = len(batch["inputs"])
        zeros = jnp.zeros(rows, jnp.int32)
        latents = {"H": jnp.full((rows, 2), 7.0), "L": jnp.full((rows, 3), 7.0)}
        return Carry(latents, zeros, zeros == 0, zeros)

    def call(self, params, buffers, *, train):
        def call(*, carry, batch, return_keys):
            new = carry.halted
            identifiers = jnp.where(new, batch["puzzle_identifiers"], carry.identifiers)
            step = jnp.where(new, 0, carry.steps)
            latents = {name: jnp.where(new[:, None], 0.0, z) for name, z in carry.inner_carry.items()}
            offset = latents["H"].sum(axis=1) + latents["L"].sum(axis=1)
            place = identifiers, jnp.minimum(step, STEPS - 1)
            right = jnp.clip(params["right"][place] + offset.astype(jnp.int32), 0, LENGTH)
            preds = jnp.where(jnp.arange(LENGTH) < right[:, None], 3, 10 + step[:, None])
            outputs = {"preds": preds, "q_halt_logits": params["halt"][place] + offset}
            carry = Carry(latents, step + 1, step + 1 >= STEPS, identifiers)
            metrics = {"count": jnp.where(carry.halted, 1, 0).sum(), "lm_loss": jnp.zeros(())}
            returned = {name: outputs[name] for name in return_keys}
            return (carry, jnp.zeros(()), metrics, returned, carry.halted.all()), buffers

        return call


def evaluate_refilled(
    identifiers: list[int],
    batch_size: int,
    devices: Devices,
    threshold: float = 0.5,
    trajectories: TrajectoryOptions | None = None,
) -> PuzzleEvaluation:
    objective: Any = LatentToy()
    return Evaluator(
        objective,
        make_puzzles(identifiers),
        devices,
        max_steps=STEPS,
        batch_size=batch_size,
        halt_threshold=threshold,
        refill=True,
        trajectories=trajectories,
    )(STATE)


def evaluate_trajectories(
    identifiers: list[int], batch_size: int, devices: Devices, options: TrajectoryOptions
) -> TrajectoryEvaluation:
    objective: Any = LatentToy()
    puzzles = mixture_of([make_puzzles(identifiers)])
    return TrajectoryEvaluator(objective, puzzles, devices, options, batch_size=batch_size)(STATE)
