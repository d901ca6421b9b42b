"""The built-in kinds of puzzles. A new kind is a folder with a `Kind` and one line in `KINDS`."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Integer

from train_jax.errors import UserError
from train_jax.plugins import is_plugin, load_plugin
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.trace import Trace

KINDS: dict[str, str] = {
    "sudoku": "train_jax.tasks.puzzles.sudoku.kind:SudokuKind",
    "maze": "train_jax.tasks.puzzles.maze.kind:MazeKind",
    "arc": "train_jax.tasks.puzzles.arc.kind:ArcKind",
}
"""`Kind` classes by the first word of their keys, imported when a data set has that word in its key; in the order in
which they are tried for a data set that does not name its kind. Kinds of the user are added by their class."""

MIXED = "mixed"
"""The key of a mixture of data sets if no kind has its sizes."""


def add_kind(name: str) -> None:
    """Adds a kind of the user, `package.module:Class`; "" adds nothing.

    A data set cannot name such a kind, because its files must not execute code. Raises `UserError` if the class cannot
    be imported.
    """
    if name:
        if not is_plugin(name):
            raise UserError(f"kind {name!r}: expected package.module:Class; omit it for the built-in kinds")
        load_plugin(name, "kind")
        KINDS[name] = name


def kind_from_key(key: str) -> Kind | None:
    """Returns the kind with this key, such as `sudoku-9x9`; None for an unknown one."""
    own = key.partition("-")[0]
    names = [own] if own in KINDS else [name for name in KINDS if is_plugin(name)]
    kinds = (load_plugin(KINDS[name], "kind").from_key(key) for name in names)
    return next((kind for kind in kinds if kind is not None), None)


def kind_of(data: Metadata) -> Kind | None:
    """Returns the kind that the metadata names, otherwise the one that recognises it; None for an unknown kind.

    Raises `UserError` if the named kind has other sizes.
    """
    if not data.kind:
        kinds = (load_plugin(name, "kind").recognise(data) for name in KINDS.values())
        return next((kind for kind in kinds if kind is not None), None)
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


def fitted_kind(kind: Kind, examples: Sequence[Integer[np.ndarray, "..."]]) -> Kind:
    """Returns the same kind, with the smallest size that contains these sequences of tokens."""
    return kind.fitted(examples)


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
