"""Files of predictions, one per host, which can be scored without the model."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from train_jax.errors import UserError
from train_jax.run.files import local_copy, whole_file
from train_jax.run.storage import path_of
from train_jax.run.untrusted import DamagedError, read_arrays

LARGEST_BYTES = 2**36
"""Limit of the uncompressed size of all arrays: fifty times that of an ARC data set with 1000 augmentations."""


class Predictions(NamedTuple):
    """The answers after the last ACT step, in any order."""

    puzzle_identifiers: Integer[np.ndarray, "examples"]
    """In the numbering of `identifiers.json` of the data set."""
    inputs: Integer[np.ndarray, "examples seq"]
    preds: Integer[np.ndarray, "examples seq"]
    q_halt_logits: Float[np.ndarray, "examples"]


def save_predictions(path: str | Path, predictions: Predictions) -> None:
    """Writes the file atomically. Raises `StorageError` if it cannot be written."""
    with whole_file(path_of(path)) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, **predictions._asdict())


def load_predictions(path: str | Path) -> Predictions:
    """Reads a file. Raises `UserError` if it does not have the format of `save_predictions`."""
    try:
        with local_copy(path_of(path)) as local:
            predictions = Predictions(**read_arrays(local, Predictions._fields, largest_bytes=LARGEST_BYTES))
        _check(predictions)
    except (DamagedError, ValueError, FileNotFoundError) as error:
        reason = error.strerror if isinstance(error, FileNotFoundError) else error
        raise UserError(
            f"{path} contains no predictions ({reason}); use a file of `trm evaluate --predictions`"
        ) from None
    return predictions


def _check(predictions: Predictions) -> None:
    count = len(predictions.puzzle_identifiers)
    expected = {"puzzle_identifiers": 1, "inputs": 2, "preds": 2, "q_halt_logits": 1}
    for name, dimensions in expected.items():
        array = getattr(predictions, name)
        kind = np.floating if name == "q_halt_logits" else np.integer
        if array.ndim != dimensions or len(array) != count or not np.issubdtype(array.dtype, kind):
            raise ValueError(f"{name} is {array.dtype} {array.shape}")
    if predictions.preds.shape != predictions.inputs.shape:
        raise ValueError(f"preds are {predictions.preds.shape}, but inputs {predictions.inputs.shape}")
    if not np.isfinite(predictions.q_halt_logits).all():
        raise ValueError("q_halt_logits are not all finite")
