"""Evaluates a language model on the test split: loss per token and bits per byte."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax

from train_jax import task
from train_jax.core.objective import Batch, Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import TrainState
from train_jax.run.folder import RunFolder, write_text
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import process_shard
from train_jax.tasks.language.batches import count_rows, eval_batches
from train_jax.tasks.language.commands import perplexity_of
from train_jax.tasks.language.loss import token_sums
from train_jax.tasks.language.text_set import TokenStream


def figures_of(sums: Mapping[str, Any]) -> dict[str, float]:
    """Converts sums to `loss`, the mean over tokens in nats, and `bits_per_byte`, which leaves special tokens out."""
    loss = float(sums["loss"]) / max(float(sums["tokens"]), 1)
    size = float(sums["bytes"])
    bits_per_byte = float(sums["nats"]) / (math.log(2) * size) if size else math.nan
    return {"loss": loss, "bits_per_byte": bits_per_byte, "tokens": float(sums["tokens"])}


@dataclasses.dataclass(frozen=True)
class Evaluation(task.Evaluation):
    """The result of an evaluation, equal on every process."""

    metrics: dict[str, float]
    """`loss`, `bits_per_byte`, `tokens` (targets that count), and `count`, the number of rows."""
    compressed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Bits per byte of compressors on the same documents, by name; empty if the evaluation uses only a part of them."""

    @property
    def summary(self) -> str:
        return (
            f"{self.metrics['bits_per_byte']:.4f} bits per byte, loss {self.metrics['loss']:.4f} on "
            f"{self.metrics['tokens']:,.0f} held-out tokens"
            + (
                f" ({', '.join(f'{name} {value:.4f}' for name, value in self.compressed.items())})"
                if self.compressed
                else ""
            )
        )

    @property
    def perplexity(self) -> float:
        """Of a token: the exponential of the mean loss."""
        return perplexity_of(self.metrics["loss"])

    def save(self, folder: RunFolder, split: str) -> None:
        content = self.metrics | ({"compressed": dict(self.compressed)} if self.compressed else {})
        write_text(folder.evaluation(split), json.dumps(content, indent=1))


class Evaluator:
    """Evaluates a module on a stream of tokens; compiled at the first call."""

    def __init__(
        self,
        objective: Objective,
        stream: TokenStream,
        token_bytes: Any,
        devices: Devices,
        *,
        rows: int,
        seq_len: int,
        compressed: Mapping[str, float] | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        """`rows` is the number of rows of a batch on all devices together; `compressed` belongs to the whole stream."""
        devices.local_batch_size(rows)
        self._stream, self._devices, self._rows, self._seq_len = stream, devices, rows, seq_len
        self._compressed, self._progress = dict(compressed or {}), progress

        def eval_step(state: TrainState, batch: Batch) -> tuple[Any, Any]:
            call = objective.call(state.eval_params, state.buffers, train=False)
            losses, _ = call(batch["inputs"], batch["targets"], loss_reduction="none")
            return jax.lax.psum(token_sums(losses, batch["targets"], token_bytes), AXIS), {}

        self._step = devices.parallel_eval_step(eval_step)

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
        state = self._devices.replicate(state)  # otherwise every batch would transfer it again
        sums: dict[str, float] = {}
        batches = eval_batches(self._stream, rows=self._rows, seq_len=self._seq_len, limit=limit, shard=process_shard())
        available = count_rows(self._stream, self._seq_len)
        count = min(limit or available, available)
        for number, batch in enumerate(batches, start=1):
            metrics, _ = self._step(state, self._devices.shard(self._devices.split_batch(batch)))
            for name, value in self._devices.to_host(metrics).items():
                sums[name] = sums.get(name, 0.0) + float(value)
            self._progress(min(number * self._rows, count), count)
        return Evaluation(figures_of(sums) | {"count": float(count)}, self._compressed if count == available else {})
