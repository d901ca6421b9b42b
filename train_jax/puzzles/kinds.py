"""The kinds of puzzles by name, and the trace of a model on one puzzle."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.errors import UserError
from train_jax.plugin import entries, load_object, names_object
from train_jax.puzzles.kind import Kind
from train_jax.puzzles.metadata import Metadata

_added: dict[str, str] = {}
"""Kinds of the user that `add_kind` added, by their class."""

MIXED = "mixed"
"""The key of a mixture of data sets if no kind has its sizes."""


def add_kind(name: str) -> None:
    """Adds a kind of the user, `package.module:Class`; "" adds nothing.

    A data set cannot name such a kind, because its files must not execute code. Raises `UserError` if the class cannot
    be imported.
    """
    if name:
        if not names_object(name):
            raise UserError(f"kind {name!r}: expected package.module:Class; omit it for the built-in kinds")
        load_object(name, "kind")
        _added[name] = name


def kinds() -> dict[str, str]:
    """Returns the `Kind` classes of all plugins by the first word of their keys, and those of `add_kind`.

    They are in the order in which they are tried for a data set that does not name its kind.
    """
    return {name: data.kind for name, data in entries("data").items() if data.kind} | _added


def kind_from_key(key: str) -> Kind | None:
    """Returns the kind with this key, such as `sudoku-9x9`; None for an unknown one."""
    own = key.partition("-")[0]
    known = kinds()
    targets = [known[own]] if own in known else list(_added)
    found = (load_object(target, "kind").from_key(key) for target in targets)
    return next((kind for kind in found if kind is not None), None)


def kind_of(data: Metadata) -> Kind | None:
    """Returns the kind that the metadata names, otherwise the one that recognises it; None for an unknown kind.

    Raises `UserError` if the named kind has other sizes.
    """
    if not data.kind:
        found = (load_object(target, "kind").recognise(data) for target in kinds().values())
        return next((kind for kind in found if kind is not None), None)
    kind = kind_from_key(data.kind)
    if kind is not None and (kind.seq_len, kind.vocab_size) != (data.seq_len, data.vocab_size):
        raise UserError(
            f"the kind is {data.kind}, expected {kind.seq_len} tokens from a vocabulary of {kind.vocab_size}, found "
            f"{data.seq_len} from {data.vocab_size}"
        )
    return kind


def describe(data: Metadata) -> str:
    """Describes the puzzles of a data set, such as `9x9 Sudokus`."""
    kind = kind_of(data)
    if kind is None:
        return f"sequences of {data.seq_len} tokens from a vocabulary of {data.vocab_size}"
    return f"{kind.name}s"


class Stretch(NamedTuple):
    """Consecutive ACT steps, from `first` to `last` inclusive, that have the same grid. Steps count from 1."""

    first: int
    last: int

    def __str__(self) -> str:
        return f"ACT step {self.first}" if self.first == self.last else f"ACT steps {self.first}-{self.last}"


@dataclass(frozen=True)
class Trace:
    """The answers to one puzzle, as values of its kind. ACT steps count from 1, and step 0 is the input."""

    kind: Kind
    inputs: Integer[np.ndarray, "cells"]
    answers: Integer[np.ndarray, "steps cells"]
    q_halt_logits: Float[np.ndarray, "steps"]
    solution: Integer[np.ndarray, "cells"] | None = None
    """Solution as values of the kind; None if it is unknown."""

    @property
    def given_cells(self) -> Bool[np.ndarray, "cells"]:
        return self.kind.drawing.given_cells(self.inputs)

    @property
    def act_steps(self) -> int:
        return len(self.answers)

    def grid(self, step: int) -> Integer[np.ndarray, "cells"]:
        return self.answers[step - 1] if step else self.inputs

    def changed(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Returns the cells that differ from the step before; none at step 1 unless `kind.drawing.fills_inputs`."""
        if step == 0 or (step == 1 and not self.kind.drawing.fills_inputs):
            return np.zeros(len(self.inputs), bool)
        return self.grid(step) != self.grid(step - 1)

    def wrong(self, step: int) -> Bool[np.ndarray, "cells"]:
        """Returns the scored cells that differ from the solution; none if it is unknown."""
        if self.solution is None or step == 0:
            return np.zeros(len(self.inputs), bool)
        return (self.grid(step) != self.solution) & self.kind.checking.scored_cells(self.solution)

    def mistakes(self, step: int) -> list[str] | None:
        """Returns the mistakes in words; an empty list if the grid is correct, None if that is unknown."""
        return self.kind.checking.mistakes(self.inputs, self.grid(step), self.solution)

    @property
    def stretches(self) -> list[Stretch]:
        """Returns all ACT steps, grouped into runs without a change."""
        starts = [1, *(step for step in range(2, self.act_steps + 1) if self.changed(step).any())]
        return [Stretch(a, b - 1) for a, b in zip(starts, [*starts[1:], self.act_steps + 1], strict=True)]


def halting_probability(logit: float) -> float:
    return float(1 / (1 + np.exp(-np.float64(logit))))


def trace_of(
    kind: Kind,
    inputs: Integer[np.ndarray, "seq"],
    answers: Integer[np.ndarray, "steps seq"],
    q_halt_logits: Float[np.ndarray, "steps"],
    solution: Integer[np.ndarray, "seq"] | None,
) -> Trace:
    """Converts tokens to a trace; `kind` is the kind of the data set."""
    if solution is not None:
        answers = kind.visible_answers(answers, solution)
    kind = kind.fitted([inputs, answers] if solution is None else [inputs, answers, solution])
    values = None if solution is None else kind.values(solution)
    return Trace(kind, kind.values(inputs), kind.values(answers), q_halt_logits, values)
