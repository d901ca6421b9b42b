"""A toy model of 4x4 Sudokus whose answers depend on the view, and what follows from it, computed one by one."""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np

from support.halting_toy import HALT, NO_ARRAYS, STEPS
from support.latent_toy import Carry
from train_jax.core.state import TrainState
from train_jax.puzzles.batches import Mixture, mixture_of
from train_jax.puzzles.evaluation import Evaluator, PuzzleEvaluation
from train_jax.puzzles.format import PuzzleSet
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.scan import TrajectoryOptions
from train_jax.puzzles.trajectories import TrajectoryEvaluation, TrajectoryEvaluator
from train_jax.puzzles.views import symmetries_of_views
from train_jax.runtime.devices import Devices

CELLS = 16
VOCAB = 6
RIGHT_STEPS = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 1, 0], [1, 1, 1, 0], [0, 1, 0, 0], [0] * 4])
"""By a hash of what the model sees and by ACT step: True if the answer is right."""
CODE = np.arange(1, CELLS + 1) ** 2
COUNT = 60


def states(runs: int) -> list[TrainState]:
    return [
        TrainState(step=NO_ARRAYS, params={}, ema={"run": np.int32(run)}, opt_state=NO_ARRAYS, buffers={}, guard=())  # pyright: ignore
        for run in range(runs)
    ]


class ViewToy:
    """Its answer to what it sees is the same tokens, with the first one changed where it is wrong."""

    def __init__(self) -> None:
        self.task = types.SimpleNamespace(bootstrapped_halting=False)

    def initial_carry(self, params, buffers, batch):
        assert set(batch) == {"inputs", "labels", "puzzle_identifiers"}
        zeros = jnp.zeros(len(batch["inputs"]), jnp.int32)
        return Carry({"inputs": batch["inputs"]}, zeros, zeros == 0, zeros)

    def call(self, params, buffers, *, train):
        def call(*, carry, batch, return_keys):
            new = carry.halted
            step = jnp.where(new, 0, carry.steps)
            inputs = jnp.where(new[:, None], batch["inputs"], carry.inner_carry["inputs"])
            seen = (inputs @ CODE + params["run"]) % len(HALT), jnp.minimum(step, STEPS - 1)
            wrong = (inputs[:, 0] + 1) % VOCAB
            first = jnp.where(jnp.asarray(RIGHT_STEPS)[seen] > 0, inputs[:, 0], wrong)
            preds = inputs.at[:, 0].set(first)
            outputs = {"preds": preds, "q_halt_logits": jnp.asarray(HALT)[seen]}
            carry = Carry({"inputs": inputs}, step + 1, step + 1 >= STEPS, carry.identifiers)
            returned = {name: outputs[name] for name in return_keys}
            return (carry, jnp.zeros(()), {"count": jnp.zeros(())}, returned, carry.halted.all()), buffers

        return call


def puzzles(count: int = COUNT) -> Mixture:
    """Returns puzzles of random digits, which are their own solutions."""
    metadata = Metadata(CELLS, VOCAB, 0, 0, 0, 1, count, 1.0, count, ("all",), "sudoku-4x4")
    ends = np.arange(count + 1, dtype=np.int32)
    tokens = np.random.default_rng(5).integers(2, VOCAB, (count, CELLS)).astype(np.uint8)
    return mixture_of([PuzzleSet(metadata, tokens, tokens, np.zeros(count, np.int32), ends, ends)])


def evaluate(
    options: TrajectoryOptions,
    state: Any,
    *,
    batch_size: int = 8,
    threshold: float | None,
    devices: Devices | None = None,
) -> PuzzleEvaluation | TrajectoryEvaluation:
    """Evaluates the toy, with early halting if there is a threshold."""
    devices = devices or Devices(1)
    data = puzzles()
    objective = ViewToy()
    if threshold is None:
        return TrajectoryEvaluator(objective, data, devices, options, batch_size=batch_size)(state)  # pyright: ignore
    return Evaluator(
        objective,  # pyright: ignore
        data,
        devices,
        max_steps=STEPS,
        batch_size=batch_size,
        halt_threshold=threshold,
        refill=True,
        trajectories=options,
    )(state)


def expected(options: TrajectoryOptions, limit: float) -> dict[str, np.ndarray]:
    """Returns answers, ACT steps, trajectories and agreement of every puzzle, computed one trajectory at a time."""
    data = puzzles()
    symmetries = symmetries_of_views(data.metadata, first=0, count=COUNT, views=options.views, seed=options.seed)
    found: dict[str, list] = {name: [] for name in ("preds", "steps", "solves", "agreed")}
    for number, tokens in enumerate(data.parts[0].inputs):
        tried = []
        steps = 0
        for trajectory in range(options.trajectories):
            view = options.view_of(trajectory)
            cells = symmetries.cells[number, view]
            names = symmetries.tokens[number, view]
            image = names[tokens[cells]].astype(int)
            seen = (image @ CODE + options.run_of(trajectory)) % len(HALT)
            halts = HALT[seen][: options.depth] > limit
            last = int(np.argmax(halts)) if halts.any() else options.depth - 1
            step = int(np.argmax(HALT[seen][: last + 1]))
            if not RIGHT_STEPS[seen, step]:
                image[0] = (image[0] + 1) % VOCAB
            original = np.empty(CELLS, int)
            for cell in range(CELLS):
                original[cells[cell]] = names.tolist().index(image[cell])
            steps += last + 1
            tried.append((HALT[seen][step], original.tolist()))
            agreed = original.tolist() in [answer for _, answer in tried[:-1]]
            if agreed if options.agree else halts.any():
                break
        answer = tried[-1][1] if options.agree and agreed else max(tried, key=lambda each: each[0])[1]
        for name, value in {"preds": answer, "steps": steps, "solves": len(tried), "agreed": agreed}.items():
            found[name].append(value)
    return {name: np.array(values) for name, values in found.items()}
