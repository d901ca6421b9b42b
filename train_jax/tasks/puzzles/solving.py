"""Runs a trained model on one example and keeps what it answers after every ACT step."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from train_jax.core.step import make_eval_step
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.batches import IGNORED_LABEL


class Thoughts(NamedTuple):
    """Token predictions and halting logits, a row for every ACT step up to the halt limit."""

    predictions: Integer[np.ndarray, "steps seq"]
    q_halt_logits: Float[np.ndarray, "steps"]


def think(run: Restored, tokens: Integer[np.ndarray, "seq"], *, puzzle_identifier: int | None = None) -> Thoughts:
    """With the averaged weights, on one device; `puzzle_identifier` is the data set's blank one if not given."""
    devices = Devices(1)
    identifier = run.data.blank_identifier_id if puzzle_identifier is None else puzzle_identifier
    batch = {
        "inputs": tokens[None].astype(np.int32),
        "labels": np.full((1, len(tokens)), IGNORED_LABEL, np.int32),
        "puzzle_identifiers": np.full(1, identifier, np.int32),
    }
    step = devices.evaluate(make_eval_step(run.objective, run.config.arch.halt_max_steps))
    _, outputs = step(run.learner, devices.split(batch))
    return Thoughts(np.asarray(outputs["preds"])[0, :, 0], np.asarray(outputs["q_halt_logits"])[0, :, 0])
