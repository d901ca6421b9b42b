"""Evaluates a model with its averaged weights on all examples or on the first ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from train_jax.core.objective import Objective
from train_jax.core.state import TrainState
from train_jax.puzzles.batches import HostBatch, Mixture, mixture_of
from train_jax.puzzles.format import PuzzleSet
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.metrics import HaltingCurve, curve_of, means, threshold_logit, to_json
from train_jax.puzzles.queues import Queues, make_queue_step, queues_of, rows_of_queues
from train_jax.puzzles.scan import TrajectoryOptions, make_eval_step
from train_jax.puzzles.views import with_views
from train_jax.run.folder import RunFolder, write_text
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import gather, process_shard
from train_jax.storage.files import whole_file
from train_jax.task import Evaluation

if TYPE_CHECKING:
    from train_jax.report.commands import Advance

KEPT_BYTES = 2**30
"""Bytes up to which the answers after every ACT step are kept; beyond it (augmented ARC sets), only the last ones."""


@dataclasses.dataclass(frozen=True)
class PuzzleEvaluation(Evaluation):
    """The result of an evaluation, equal on every process. Answers are in the order of the data set."""

    metrics: dict[str, float]
    """Means over the examples: `accuracy` (tokens), `exact_accuracy` (whole puzzles), `q_halt_accuracy`, `steps`,
    `lm_loss`, `q_halt_loss`; and `count`, the number of examples. With early halting, `computed_steps` instead of
    losses: the ACT steps that an example's device computed for its batch."""
    available: int
    """Number of examples in the data set."""
    predictions: np.ndarray
    """Tokens after each ACT step (or after the last one), (ACT steps, examples, seq_len), uint8 or uint16."""
    q_halt_logits: np.ndarray
    """Halting logits, (ACT steps, examples), float32."""
    inputs: np.ndarray
    """Inputs, (examples, seq_len)."""
    puzzle_identifiers: np.ndarray
    """Puzzle identifiers, (examples,), int32, in the model's numbering."""
    halting_curve: HaltingCurve | None = None
    """Accuracy at other halting thresholds, over all hosts; None with early halting, or if no example has labels."""
    solves: np.ndarray | None = None
    """With early halting across trajectories, the number of them that each example took, (examples,), int32."""

    @property
    def summary(self) -> str:
        if not self.metrics["count"]:
            return f"exact accuracy unknown on {self.available} held-out puzzles, none with a public solution,"
        count = f"{self.metrics['count']:.0f}"
        sample = f"{count} of {self.available}" if self.metrics["count"] < self.available else count
        return (
            f"exact accuracy {self.metrics['exact_accuracy']:.4f}, token accuracy {self.metrics['accuracy']:.4f} on "
            f"{sample} held-out puzzles"
        )

    def save(self, folder: RunFolder, split: str) -> None:
        with whole_file(folder.predictions(split)) as scratch, scratch.open("wb") as file:
            np.savez_compressed(file, predictions=self.predictions, q_halt_logits=self.q_halt_logits)
        folder.halting_curve(split).unlink(missing_ok=True)  # an existing file may belong to other weights
        if self.halting_curve is not None:
            write_text(folder.halting_curve(split), to_json(self.halting_curve))
        write_text(folder.evaluation(split), json.dumps(self.metrics, indent=1))


class Evaluator:
    """Evaluates a module on a set of puzzles; compiled at the first call."""

    def __init__(
        self,
        objective: Objective,
        puzzles: PuzzleSet | Mixture,
        devices: Devices,
        *,
        max_steps: int,
        batch_size: int,
        halt_threshold: float | None = None,
        refill: bool = False,
        trajectories: TrajectoryOptions | None = None,
        progress: Advance = lambda done, total: None,
    ):
        """`max_steps` is the number of ACT steps and `batch_size` the number of examples on all devices together. A
        sequence halts above the halting probability `halt_threshold`; None runs all sequences to the limit. With
        `refill`, a row that has halted takes the next example (`queues.py`). With `trajectories`, which imply
        refill, a sequence that does not halt is computed again with other noise."""
        devices.local_batch_size(batch_size)
        self._puzzles = puzzles if isinstance(puzzles, Mixture) else mixture_of([puzzles])
        self._devices = devices
        self._batch_size = batch_size
        self._progress = progress
        self._refill = refill or trajectories is not None
        self._trajectories = trajectories
        limit = threshold_logit(1 if halt_threshold is None else halt_threshold)
        if self._refill:
            max_steps, most = (trajectories.depth, trajectories.act_steps) if trajectories else (max_steps, max_steps)
            rows = rows_of_queues(devices.local_batch_size(batch_size), self._puzzles.num_examples, devices.count, most)
            full = metrics_only = make_queue_step(objective, max_steps, limit, rows, trajectories)
        elif halt_threshold is not None:
            full = metrics_only = make_queue_step(objective, max_steps, limit)
        else:
            full, metrics_only = (make_eval_step(objective, max_steps, metrics_only=only) for only in (False, True))
        self._full, self._metrics_only = (devices.parallel_eval_step(step) for step in (full, metrics_only))

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> PuzzleEvaluation:
        data = self._puzzles
        step = self._metrics_only if metrics_only else self._full
        total = min(limit or data.num_examples, data.num_examples)
        state = self._devices.replicate(state)  # otherwise every batch would transfer it again
        sums: dict[str, float] = {}
        curve = None
        done = 0
        rows = Rows()
        for examples in self._examples(limit):
            shares = self._devices.shard(self._devices.split_batch(examples.arrays))
            metrics, outputs = step(state, shares)
            metrics = self._devices.to_host(metrics)
            part = jax.tree.map(lambda x: np.asarray(x, float), metrics.pop("halting_curve", None))
            curve = part if curve is None else jax.tree.map(np.add, curve, part)
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
            if not metrics_only:
                outputs = self._devices.to_host(outputs)
                outputs = {name: merge_devices(array) for name, array in outputs.items()}
                is_large = len(outputs["preds"]) * total * data.metadata.seq_len > KEPT_BYTES
                for output, batch, valid in examples.of_batches(outputs):
                    rows.add(_answers(output, batch, token_dtype(data.metadata), last=is_large), valid)
            done = min(done + self._batch_size * len(examples.batches), total)
            self._progress(done, total)
        halting_curve = None if curve is None else curve_of(curve)
        found = _no_answers(data.metadata) if metrics_only else rows.joined()
        arrays = found["preds"], found["q_halt_logits"], found["inputs"][0], found["identifiers"][0]
        solves = found["solves"][0] if "solves" in found else None
        return PuzzleEvaluation(means(sums, total), data.num_examples, *arrays, halting_curve, solves)

    def _examples(self, limit: int) -> Iterator[_Examples | Queues]:
        """Yields the examples of this process: a batch at a time or, with refill, several batches as queues."""
        data = self._puzzles
        shard = process_shard()
        batches = data.eval_batches(batch_size=self._batch_size, shard=shard, limit=limit)
        if not self._refill:
            return (_Examples([batch]) for batch in batches)
        numbers = list(data.eval_numbers(batch_size=self._batch_size, shard=shard, limit=limit))
        options = self._trajectories
        if options is not None:
            batches = (
                (with_views(data, batch, number, views=options.views, seed=options.seed) | {"number": number}, valid)
                for (batch, valid), number in zip(batches, numbers, strict=True)
            )
        return queues_of(batches, count=len(numbers), devices=len(self._devices.local))


@dataclasses.dataclass(frozen=True)
class _Examples:
    """One batch, with the mask of its examples; the same attributes as `Queues`."""

    batches: list[tuple[HostBatch, np.ndarray]]

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        batch, valid = self.batches[0]
        return batch | {"is_example": valid}

    def of_batches(
        self, outputs: dict[str, np.ndarray]
    ) -> Iterator[tuple[dict[str, np.ndarray], HostBatch, np.ndarray]]:
        yield outputs, *self.batches[0]


def token_dtype(metadata: Metadata) -> type[np.unsignedinteger]:
    """Returns the type of stored tokens."""
    return np.uint8 if metadata.vocab_size <= 256 else np.uint16


def _answers(
    outputs: Mapping[str, Any], batch: HostBatch, dtype: type[np.unsignedinteger], *, last: bool
) -> dict[str, np.ndarray]:
    """Returns the arrays that are kept of a batch; with `last`, only the answers after the last ACT step."""
    kept = slice(-1 if last else 0, None)
    solves = {"solves": outputs["solves"]} if "solves" in outputs else {}
    return solves | {
        "preds": outputs["preds"][kept].astype(dtype),
        "q_halt_logits": outputs["q_halt_logits"][kept],
        "inputs": batch["inputs"][None].astype(dtype),
        "identifiers": batch["puzzle_identifiers"][None],
    }


def _no_answers(metadata: Metadata) -> dict[str, np.ndarray]:
    tokens = np.zeros((1, 0, metadata.seq_len), token_dtype(metadata))
    logits = np.zeros((1, 0), np.float32)
    identifiers = np.zeros((1, 0), np.int32)
    return {"preds": tokens, "q_halt_logits": logits, "inputs": tokens, "identifiers": identifiers}


class Rows:
    """Collects arrays whose second axis is the examples, of all processes, batch by batch."""

    def __init__(self) -> None:
        self._parts: list[dict[str, np.ndarray]] = []

    def add(self, arrays: Mapping[str, np.ndarray], valid: np.ndarray) -> None:
        gathered = gather({**arrays, "valid": valid[None]}, axis=1)
        valid = gathered.pop("valid")[0]
        self._parts.append({name: array[:, valid] for name, array in gathered.items()})

    def joined(self) -> dict[str, np.ndarray]:
        return {name: np.concatenate([part[name] for part in self._parts], axis=1) for name in self._parts[0]}


def merge_devices(outputs: Any) -> np.ndarray:
    """Reshapes (devices, ACT steps, local, …) to (ACT steps, examples, …)."""
    outputs = np.moveaxis(np.asarray(outputs), 0, 1)
    return outputs.reshape(outputs.shape[0], -1, *outputs.shape[3:])
