"""Runs a trained puzzle model on one puzzle or a batch: returns answers and halting logits after every ACT step."""

import dataclasses
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from train_jax.errors import UserError
from train_jax.puzzles.batches import IGNORED_LABEL
from train_jax.puzzles.format import load_split
from train_jax.puzzles.kind import Kind, PuzzleInput
from train_jax.puzzles.kinds import describe, kind_of
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.scan import make_eval_step
from train_jax.puzzles.task import PuzzleTask
from train_jax.run.config import RunConfig
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The answers to a batch, after every ACT step up to the limit."""

    tokens: Integer[np.ndarray, "steps batch seq"]
    q_halt_logits: Float[np.ndarray, "steps batch"]

    @property
    def answers(self) -> Integer[np.ndarray, "batch seq"]:
        """The tokens after the last ACT step."""
        return self.tokens[-1]

    @property
    def halting_probability(self) -> Float[np.ndarray, "steps batch"]:
        return 1 / (1 + np.exp(-self.q_halt_logits.astype(np.float64)))


class Predictor:
    """The model of a run with its averaged weights, on one device; see `train_jax.load_run`."""

    def __init__(self, run: Restored):
        self._run = run
        self._task = puzzle_task(run)
        self._devices = Devices(1)

    @property
    def config(self) -> RunConfig:
        return self._run.config

    @property
    def step(self) -> int:
        """The optimizer step of the checkpoint."""
        return self._run.step

    @cached_property
    def _eval_step(self) -> Any:
        return self._devices.parallel_eval_step(make_eval_step(self._run.objective, self._task.halt_max_steps))

    @cached_property
    def _state(self) -> Any:
        return self._devices.replicate(self._run.state)

    def predict(
        self, inputs: Integer[np.ndarray, "batch seq"], puzzle_identifiers: Integer[np.ndarray, "batch"] | None = None
    ) -> Prediction:
        """Predicts the answers to tokens in the encoding of the data set. Every new batch size is compiled once.

        `puzzle_identifiers` are blank by default. Raises `UserError` for invalid shapes, types or values.
        """
        metadata = self._task.metadata
        inputs = np.asarray(inputs)
        if puzzle_identifiers is None:
            puzzle_identifiers = np.full(len(inputs), metadata.blank_identifier_id)
        identifiers = np.asarray(puzzle_identifiers)
        if inputs.shape != (len(identifiers), metadata.seq_len) or not len(inputs):
            raise UserError(
                f"inputs have shape {inputs.shape} and puzzle_identifiers {identifiers.shape}, expected "
                f"[batch, {metadata.seq_len}] and [batch]; reshape them"
            )
        for name, values, end in (
            ("inputs", inputs, metadata.vocab_size),
            ("puzzle_identifiers", identifiers, metadata.num_puzzle_identifiers),
        ):
            if values.dtype.kind not in "iu" or not 0 <= values.min() <= values.max() < end:
                raise UserError(f"{name} are {values.dtype} from {values.min()} to {values.max()}; use 0 to {end - 1}")
        batch = {
            "inputs": inputs.astype(np.int32),
            "labels": np.full(inputs.shape, IGNORED_LABEL, np.int32),
            "puzzle_identifiers": identifiers.astype(np.int32),
        }
        _, outputs = self._eval_step(self._state, self._devices.shard(self._devices.split_batch(batch)))
        return Prediction(*(np.asarray(outputs[name])[0] for name in ("preds", "q_halt_logits")))


def solve(run: Restored, tokens: Integer[np.ndarray, "seq"], *, puzzle_identifier: int | None = None) -> Prediction:
    """Predicts the answers to one puzzle, as a batch of one."""
    identifiers = None if puzzle_identifier is None else np.array([puzzle_identifier])
    return Predictor(run).predict(tokens[None], identifiers)


def puzzle_task(run: Restored) -> PuzzleTask:
    """Returns the task of the run. Raises `UserError` if it is not a puzzle task."""
    if not isinstance(run.task, PuzzleTask):
        raise UserError(f"{run.folder.path} is a run of task {run.config.task}, expected puzzles; give a puzzle run")
    return run.task


def from_test_set(data_dir: str, index: int) -> PuzzleInput:
    """Returns a puzzle of the test set. Raises `UserError` if there is none, or if its kind is unknown."""
    try:
        puzzles = load_split(data_dir, "test")
    except UserError as error:
        raise UserError(f"{error}; or give --puzzle TEXT or --file FILE, or another --data-dir") from error
    if not 0 <= index < puzzles.num_examples:
        raise UserError(
            f"--index {index}: the test set in {data_dir} has puzzles 0 to {puzzles.num_examples - 1}; use one of these"
        )
    owner = np.searchsorted(puzzles.puzzle_indices, index, side="right") - 1
    return PuzzleInput(
        f"puzzle {index} of the test set in {data_dir}",
        known_kind(puzzles.metadata, f"{data_dir} contains"),
        puzzles.inputs[index],
        puzzles.labels[index],
        puzzle_identifier=int(puzzles.puzzle_identifiers[owner]),
    )


def known_kind(data: Metadata, whose: str) -> Kind:
    """Returns the kind of a data set. Raises `UserError` if it is unknown; `whose` is the beginning of the message."""
    kind = kind_of(data)
    if kind is None:
        raise UserError(
            f"{whose} {describe(data)}, but `trm solve` can only show Sudokus, mazes and ARC puzzles; give another "
            "--data-dir"
        )
    return kind
