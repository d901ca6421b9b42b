"""The example of a run that its report shows in several views: the puzzle that took most of them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from train_jax.storage.files import local_copy, whole_file
from train_jax.storage.untrusted import DamagedError, read_arrays

LARGEST_BYTES = 2**30


class ViewExample(NamedTuple):
    """A puzzle in several views, each computed without noise."""

    number: Integer[np.ndarray, "1"]
    """The number of the puzzle in its data set."""
    inputs: Integer[np.ndarray, "views seq"]
    """The images of the puzzle; the first is the puzzle itself."""
    answers: Integer[np.ndarray, "views seq"]
    """The answer of the highest halting logit of each view, in the frame of the puzzle."""
    q_halt_logits: Float[np.ndarray, "views"]
    """The halting logits of these answers."""
    steps: Integer[np.ndarray, "views"]
    """The ACT steps after which they were given, from 1."""


def save_example(path: Path, example: ViewExample) -> None:
    with whole_file(path) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, **example._asdict())


def read_example(path: Path) -> ViewExample | None:
    """Returns the example; None if there is none. Raises `DamagedError` for a damaged file."""
    if not path.is_file():
        return None
    with local_copy(path) as local:
        example = ViewExample(**read_arrays(local, ViewExample._fields, largest_bytes=LARGEST_BYTES))
    views = len(example.inputs)
    sizes = {len(example.answers), len(example.q_halt_logits), len(example.steps)}
    if example.number.shape != (1,) or sizes != {views} or example.inputs.shape != example.answers.shape:
        raise DamagedError(f"its arrays have shapes {', '.join(str(array.shape) for array in example)}")
    return example
