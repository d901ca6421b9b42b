"""An exported module and a batch to loss sums, metrics, carry and buffers; what they mean is the task's business."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax

import bridge
from train_jax.core.state import Arrays

Batch = dict[str, jax.Array]

Call = Callable[..., tuple[Any, Arrays]]
"""The module with its state filled in: `(*args, method="forward", **kwargs) -> (outputs, buffers)`."""


class SparseTable(NamedTuple):
    """The qualified names of one sparse embedding: its rows, the rows used by the batch, and their row numbers."""

    weights: str
    local_weights: str
    local_ids: str


class LossSums(NamedTuple):
    """The result of one call of the module in training mode, summed over one replica's examples."""

    loss: jax.Array
    weight: jax.Array | None
    """What the loss of all replicas is divided by after summing, such as a number of tokens; None: the global batch
    size, which is known beforehand."""
    metrics: dict[str, jax.Array]
    """Sums and counts."""
    carry: Any
    buffers: Arrays


class TrainingTask(Protocol):
    """The part of a task that a training step calls. Both methods are traced."""

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        """Calls the module on one batch in training mode."""
        ...

    def initial_carry(self, call: Call, batch: Batch) -> Any:
        """The carry before the first step, for batches shaped like `batch`; `()` for a task without one."""
        ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """A module with its loss head as the training step sees it."""

    fn: bridge.Functional
    task: TrainingTask
    tables: tuple[SparseTable, ...] = ()

    @property
    def params(self) -> Arrays:
        """The dense parameters: all except the leaves of the sparse tables."""
        return {name: array for name, array in self.fn.params.items() if name not in self.local_rows}

    @property
    def buffers(self) -> Arrays:
        """All other state, sparse tables included, except the row numbers of the batch."""
        return {name: array for name, array in self.fn.buffers.items() if name not in self._local_ids}

    @property
    def local_rows(self) -> Arrays:
        """The leaves that the module fills with the batch's rows; their own values are never read."""
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
        """The loss in training mode; `rows`: of `local_rows`; `overrides`: numbers in the module's attributes."""
        call = self.call(params | rows, buffers, rng=rng, train=True, overrides=overrides)
        return self.task.loss(call, carry, batch)

    def call(self, params: Arrays, buffers: Arrays, **options: Any) -> Call:
        """The module with this state; `options` as `bridge.Functional` takes them."""
        state = self.local_rows | params, buffers | self._local_ids

        def call(*args: Any, **kwargs: Any) -> tuple[Any, Arrays]:
            result = self.fn.run(*state, *args, **options, **kwargs)
            written = [n for n in params if n not in self.local_rows and result.params[n] is not state[0][n]]
            if written:
                said = f"the call writes the parameter {written[0]}, which the optimizer would not see"
                raise bridge.BridgeError(said)
            return result.outputs, result.buffers

        return call


def sparse_tables(fn: bridge.Functional) -> tuple[SparseTable, ...]:
    """The sparse embeddings of a module, by the tensor names that published checkpoints and ours use."""
    tables = []
    for name in fn.params:
        prefix, _, last = name.rpartition(".")
        table = SparseTable(f"{prefix}.weights", name, f"{prefix}.local_ids")
        if last == "local_weights" and table.weights in fn.buffers and table.local_ids in fn.buffers:
            tables.append(table)
    return tuple(tables)
