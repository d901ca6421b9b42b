"""Computes the loss sums, metrics, carry and buffers of an exported module for a batch, as defined by the task."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

import bridge
from train_jax.core.state import Arrays

Batch = dict[str, jax.Array]

Call = Callable[..., tuple[Any, Arrays]]
"""The module with bound state: `(*args, method="forward", **kwargs) -> (outputs, buffers)`."""


class SparseTable(NamedTuple):
    """The qualified names of the tensors of a sparse embedding: the table, the rows of the batch, and their indices."""

    weights: str
    local_weights: str
    local_ids: str


class LossSums(NamedTuple):
    """The result of one call of the module in training mode, summed over the examples of one replica."""

    loss: jax.Array
    weight: jax.Array | None
    """The divisor of the loss, summed over all replicas, such as a number of tokens; None for the global batch size."""
    metrics: dict[str, jax.Array]
    """Sums and counts."""
    carry: Any
    buffers: Arrays
    counted: jax.Array | None = None
    """Number of terms of the loss, such as targets, summed over all replicas; by default `weight`. A step with 0 terms
    is not applied."""


class TrainingTask(Protocol):
    """The part of a task that a training step calls. Both methods are traced."""

    keeps_unreached: bool
    """True if a parameter that the loss does not depend on stays as it is, without weight decay, as in PyTorch, where
    it has no gradient."""

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        """Calls the module on one batch in training mode."""
        ...

    def initial_carry(self, call: Call, batch: Batch) -> Any:
        """Returns the carry before the first step, for batches shaped like `batch`; `()` for a task without one."""
        ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """An exported module with its loss head."""

    fn: bridge.Functional
    task: TrainingTask
    tables: tuple[SparseTable, ...] = ()

    def of_part(self, name: str) -> Objective:
        """Returns the objective of a part of the step, for a task with a method `part`."""
        task: Any = self.task
        return dataclasses.replace(self, task=task.part(name))

    @property
    def params(self) -> Arrays:
        """The dense parameters: all except the leaves of the sparse tables."""
        return {name: array for name, array in self.fn.params.items() if name not in self.local_rows}

    @property
    def buffers(self) -> Arrays:
        """All other state, including sparse tables, except the row indices of the batch."""
        return {name: array for name, array in self.fn.buffers.items() if name not in self._local_ids}

    @property
    def local_rows(self) -> Arrays:
        """The leaves that the module fills with the rows of the batch; their initial values are never read."""
        return {table.local_weights: self.fn.params[table.local_weights] for table in self.tables}

    @property
    def _local_ids(self) -> Arrays:
        return {table.local_ids: self.fn.buffers[table.local_ids] for table in self.tables}

    def initial_carry(self, params: Arrays, buffers: Arrays, batch: Batch) -> Any:
        return self.task.initial_carry(self.call(params, buffers), batch)

    def __call__(
        self,
        params: Arrays,
        rows: Arrays,
        buffers: Arrays,
        carry: Any,
        batch: Batch,
        rng: Any,
        overrides: Mapping[str, Any] | None = None,
    ) -> LossSums:
        """Computes the loss in training mode; `rows` are the values of `local_rows`, `overrides` module attributes."""
        call = self.call(params | rows, buffers, rng=rng, train=True, overrides=overrides)
        return self.task.loss(call, carry, batch)

    def call(self, params: Arrays, buffers: Arrays, **options: Any) -> Call:
        """Binds the module to this state; `options` are arguments of `bridge.Functional`."""
        state = self.local_rows | params, buffers | self._local_ids

        def call(*args: Any, **kwargs: Any) -> tuple[Any, Arrays]:
            result = self.fn.run(*state, *args, module_kwargs={}, **options, **kwargs)
            written = [n for n in params if n not in self.local_rows and result.params[n] is not state[0][n]]
            if written:
                said = f"the call writes the parameter {written[0]}, which the optimizer would not see"
                raise bridge.BridgeError(said)
            return result.outputs, result.buffers

        return call


def sparse_tables(fn: bridge.Functional) -> tuple[SparseTable, ...]:
    """Returns the sparse embeddings of a module, recognized by the tensor names of published checkpoints."""
    tables = []
    for name in fn.params:
        prefix, _, last = name.rpartition(".")
        table = SparseTable(f"{prefix}.weights", name, f"{prefix}.local_ids")
        if last == "local_weights" and table.weights in fn.buffers and table.local_ids in fn.buffers:
            tables.append(table)
    return tuple(tables)
