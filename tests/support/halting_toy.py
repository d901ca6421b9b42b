"""A toy model with known answers and halting logits, from tables by puzzle identifier."""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from train_jax.core.state import TrainState
from train_jax.puzzles.evaluation import Evaluator, PuzzleEvaluation
from train_jax.puzzles.format import PuzzleSet
from train_jax.puzzles.metadata import Metadata
from train_jax.runtime.devices import Devices

STEPS = 4
LENGTH = 6
HALT = np.array(
    [
        [-1.0, -1.0, -1.0, -1.0],  # never
        [2.0, -1.0, -1.0, -1.0],  # at the first step, and not at later ones
        [-1.0, 0.5, 3.0, 3.0],
        [-1.0, -1.0, 0.0, 0.1],  # 0 is not above 0
        [-3.0, -1.0, 1.0, -2.0],
        [0.5, 2.0, 0.5, 0.5],
        [-1.0, -1.0, -1.0, 9.0],
    ],
    np.float32,
)
"""Halting logits by identifier and ACT step."""
CONTINUE = HALT[:, ::-1] - 0.25
RIGHT_CELLS = np.array(
    [[6, 6, 6, 6], [5, 6, 6, 6], [3, 4, 5, 6], [0, 0, 6, 5], [6, 6, 6, 3], [1, 6, 1, 1], [2, 2, 2, 2]]
)
"""Number of leading cells that equal the solution, 3 in every cell; the others are 10 plus the ACT step from 0."""
NO_ARRAYS: Any = ()
STATE = TrainState(
    step=NO_ARRAYS,
    params={},
    ema={"halt": HALT, "continue": CONTINUE, "right": RIGHT_CELLS.astype(np.int32)},
    opt_state=NO_ARRAYS,
    buffers={},
    guard=NO_ARRAYS,
)


class ToyObjective:
    """An `Objective` whose carry is the number of the ACT step."""

    def __init__(self, bootstrapped: bool = False):
        self.task = types.SimpleNamespace(bootstrapped_halting=bootstrapped)

    def initial_carry(self, params, buffers, batch):
        assert set(batch) == {"inputs", "labels", "puzzle_identifiers"}
        return jnp.zeros((), jnp.int32)

    def call(self, params, buffers, *, train):
        assert not train

        def call(*, carry, batch, return_keys):
            tables = {name: jnp.asarray(table)[batch["puzzle_identifiers"], carry] for name, table in params.items()}
            right = jnp.arange(LENGTH) < tables["right"][:, None]
            preds = jnp.where(right, 3, 10 + carry)
            outputs = {"preds": preds, "q_halt_logits": tables["halt"], "q_continue_logits": tables["continue"]}
            last = carry == STEPS - 1
            metrics = {"count": jnp.where(last, len(right), 0), "lm_loss": jnp.zeros(())}
            return (carry + 1, jnp.zeros(()), metrics, {name: outputs[name] for name in return_keys}, last), buffers

        return call


def make_puzzles(identifiers: list[int]) -> PuzzleSet:
    count = len(identifiers)
    metadata = Metadata(LENGTH, 20, 0, 0, 0, len(HALT), count, 1.0, count, ("all",))
    ends = np.arange(count + 1, dtype=np.int32)
    inputs = np.ones((count, LENGTH), np.uint8)
    return PuzzleSet(metadata, inputs, inputs * 3, np.array(identifiers, np.int32), ends, ends)


def evaluate(
    identifiers: list[int],
    batch_size: int,
    devices: Devices,
    *,
    threshold: float | None = None,
    bootstrapped: bool = False,
) -> PuzzleEvaluation:
    """Evaluates the toy; a sequence halts above the halting probability `threshold`, None runs all steps."""
    objective: Any = ToyObjective(bootstrapped)
    puzzles = make_puzzles(identifiers)
    evaluator = Evaluator(objective, puzzles, devices, max_steps=STEPS, batch_size=batch_size, halt_threshold=threshold)
    return evaluator(STATE)
