"""Module and batch to loss and metrics: which state is dense, which is a puzzle table, what the gradient is of."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

import bridge
from train_jax.core.state import Arrays

Batch = dict[str, jax.Array]


class PuzzleTable(NamedTuple):
    """The qualified names of one sparse embedding: its rows, the rows in the batch, and their numbers."""

    weights: str
    local_weights: str
    local_ids: str


class Step(NamedTuple):
    """What one call of the module gives."""

    loss: jax.Array
    """Summed over the replica's examples."""
    carry: Any
    metrics: dict[str, jax.Array]
    """Sums and counts over the replica's examples."""
    buffers: Arrays


@dataclasses.dataclass(frozen=True)
class Objective:
    """A module with its loss head, `forward(carry, batch) -> (carry, loss, metrics, …)`, seen by the trainer.

    The module is called with `carry`, `batch` and `return_keys` by keyword.
    """

    fn: bridge.Functional
    tables: tuple[PuzzleTable, ...]
    bootstrapped_halting: bool = False
    """Whether a sequence halts where `q_halt` is above `q_continue` instead of above 0."""

    @property
    def params(self) -> Arrays:
        """The dense parameters: everything trained except the leaves of the puzzle tables."""
        return {name: array for name, array in self.fn.params.items() if name not in self.local_rows}

    @property
    def buffers(self) -> Arrays:
        """What the module holds beside them, puzzle tables included; not the notes it takes about one batch."""
        return {name: array for name, array in self.fn.buffers.items() if name not in self._local_ids}

    @property
    def local_rows(self) -> Arrays:
        """Leaves that the module fills with the batch's rows; their own values are never read."""
        return {table.local_weights: self.fn.params[table.local_weights] for table in self.tables}

    @property
    def _local_ids(self) -> Arrays:
        return {table.local_ids: self.fn.buffers[table.local_ids] for table in self.tables}

    def initial_carry(self, params: Arrays, buffers: Arrays, batch: Batch) -> Any:
        carry, _ = self.fn(params | self.local_rows, buffers | self._local_ids, batch, method="initial_carry")
        return carry

    def __call__(
        self,
        params: Arrays,
        rows: Arrays,
        buffers: Arrays,
        carry: Any,
        batch: Batch,
        rng: Any,
        overrides: Mapping[str, Any] | None = None,
    ) -> Step:
        """One ACT step in training mode; `overrides`: numbers in the module's attributes, as `bridge` takes them."""
        outputs, buffers = self.fn(
            params | rows,
            buffers | self._local_ids,
            carry=carry,
            batch=batch,
            return_keys=(),
            rng=rng,
            train=True,
            overrides=overrides,
        )
        carry, loss, metrics, *_ = outputs
        return Step(loss, carry, metrics, buffers)

    def evaluate(self, params: Arrays, buffers: Arrays, carry: Any, batch: Batch) -> tuple[Any, dict, dict]:
        """One ACT step in evaluation mode: carry, metrics, outputs (`preds`, `q_halt_logits`, and `q_continue_logits`
        of a bootstrapped halting)."""
        outputs, _ = self.fn(
            params | self.local_rows,
            buffers | self._local_ids,
            carry=carry,
            batch=batch,
            return_keys=("preds", "q_halt_logits", *["q_continue_logits"] * self.bootstrapped_halting),
            train=False,
        )
        carry, _, metrics, returned, _ = outputs
        return carry, metrics, returned


def objective_of(fn: bridge.Functional, *, bootstrapped_halting: bool = False) -> Objective:
    """Finds the sparse embeddings by the names their tensors have, in published checkpoints and ours."""
    tables = []
    for name in fn.params:
        prefix, _, last = name.rpartition(".")
        table = PuzzleTable(f"{prefix}.weights", name, f"{prefix}.local_ids")
        if last == "local_weights" and table.weights in fn.buffers and table.local_ids in fn.buffers:
            tables.append(table)
    return Objective(fn, tuple(tables), bootstrapped_halting)
