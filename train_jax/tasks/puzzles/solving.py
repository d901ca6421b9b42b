"""Runs a trained model on one puzzle and returns its answer after every ACT step."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from train_jax.errors import UserError
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.batches import IGNORED_LABEL
from train_jax.tasks.puzzles.eval_step import make_eval_step
from train_jax.tasks.puzzles.task import PuzzleTask


class ActAnswers(NamedTuple):
    """Token predictions and halting logits, one row for every ACT step up to the limit."""

    predictions: Integer[np.ndarray, "steps seq"]
    q_halt_logits: Float[np.ndarray, "steps"]


def solve(run: Restored, tokens: Integer[np.ndarray, "seq"], *, puzzle_identifier: int | None = None) -> ActAnswers:
    """With the averaged weights, on one device; `puzzle_identifier`: by default the data set's blank one."""
    devices = Devices(1)
    task = puzzle_task(run)
    identifier = task.metadata.blank_identifier_id if puzzle_identifier is None else puzzle_identifier
    batch = {
        "inputs": tokens[None].astype(np.int32),
        "labels": np.full((1, len(tokens)), IGNORED_LABEL, np.int32),
        "puzzle_identifiers": np.full(1, identifier, np.int32),
    }
    step = devices.parallel_eval_step(make_eval_step(run.objective, task.halt_max_steps))
    _, outputs = step(run.state, devices.split_batch(batch))
    return ActAnswers(np.asarray(outputs["preds"])[0, :, 0], np.asarray(outputs["q_halt_logits"])[0, :, 0])


def puzzle_task(run: Restored) -> PuzzleTask:
    """The run's task. Raises `UserError` if it is not puzzles."""
    if not isinstance(run.task, PuzzleTask):
        raise UserError(f"{run.folder.path} is a run of task {run.config.task}; this command is for puzzles")
    return run.task
