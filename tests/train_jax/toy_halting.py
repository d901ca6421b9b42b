"""A made-up model whose every answer and halting logit is known: both are read off tables by puzzle identifier."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.evaluation import evaluate
from train_jax.tasks.puzzles.format import Metadata, PuzzleSet

STEPS = 4
LENGTH = 6
HALT = np.array(
    [
        [-1.0, -1.0, -1.0, -1.0],  # never
        [2.0, -1.0, -1.0, -1.0],  # at once, and takes it back
        [-1.0, 0.5, 3.0, 3.0],
        [-1.0, -1.0, 0.0, 0.1],  # 0 is not above 0
        [-3.0, -1.0, 1.0, -2.0],
        [0.5, 2.0, 0.5, 0.5],
        [-1.0, -1.0, -1.0, 9.0],
    ],
    np.float32,
)
"""By identifier and ACT step."""
CONTINUE = HALT[:, ::-1] - 0.25
RIGHT_CELLS = np.array(
    [[6, 6, 6, 6], [5, 6, 6, 6], [3, 4, 5, 6], [0, 0, 6, 5], [6, 6, 6, 3], [1, 6, 1, 1], [2, 2, 2, 2]]
)
"""So many cells at the start are as in the solution, all of which are 3; the others say which ACT step it is."""


class Learner(NamedTuple):
    """What of a learner is evaluated."""

    ema: dict[str, Any]
    buffers: dict[str, Any]


LEARNER = Learner({"halt": HALT, "continue": CONTINUE, "right": RIGHT_CELLS.astype(np.int32)}, {})


class ToyObjective:
    """Stands for an `Objective`; its carry is the number of the ACT step."""

    def __init__(self, bootstrapped: bool = False):
        self.bootstrapped = bootstrapped

    def initial_carry(self, params, buffers, batch):
        assert set(batch) == {"inputs", "labels", "puzzle_identifiers"}
        return jnp.zeros((), jnp.int32)

    def evaluate(self, params, buffers, carry, batch):
        tables = {name: jnp.asarray(table)[batch["puzzle_identifiers"], carry] for name, table in params.items()}
        right = jnp.arange(LENGTH) < tables["right"][:, None]
        outputs = {"preds": jnp.where(right, 3, 10 + carry), "q_halt_logits": tables["halt"]}
        if self.bootstrapped:
            outputs["q_continue_logits"] = tables["continue"]
        return carry + 1, {"count": jnp.where(carry == STEPS - 1, len(right), 0), "lm_loss": jnp.zeros(())}, outputs


def puzzles_of(identifiers: list[int]) -> PuzzleSet:
    count = len(identifiers)
    metadata = Metadata(LENGTH, 20, 0, 0, 0, len(HALT), count, 1.0, count, ("all",))
    ends = np.arange(count + 1, dtype=np.int32)
    inputs = np.ones((count, LENGTH), np.uint8)
    return PuzzleSet(metadata, inputs, inputs * 3, np.array(identifiers, np.int32), ends, ends)


def evaluated(step, identifiers: list[int], batch_size: int, devices: Devices):
    learner: Any = LEARNER
    return evaluate(devices.evaluate(step), learner, puzzles_of(identifiers), devices, batch_size=batch_size)
