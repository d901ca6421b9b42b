"""Training on instructions and their responses, as the published HRM-Text does it.

The loss is the cross-entropy over the targets of all rows, divided by their number. The number of updates with
gradients increases over the first share of the steps; each number is a program of its own, compiled ahead.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from functools import cached_property
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from models_torch.gpt import IGNORED_TARGET
from models_torch.hrm_text import HRMTextConfig
from models_torch.ranges import Range
from train_jax.core.objective import Batch, Call, LossSums, Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import TrainState
from train_jax.errors import UserError, check_fields
from train_jax.language.instructions.data import InstructionSet, PackedSteps
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import process_shard
from train_jax.storage.json_files import COUNT
from train_jax.storage.storage import path_of
from train_jax.task import Evaluation, Task, TaskConfig

_HASHED = 2**20


@dataclasses.dataclass(frozen=True)
class InstructionConfig(TaskConfig):
    """Targets, and the schedule of the number of updates with gradients."""

    target_only: bool = True
    """Use only the tokens of responses as targets; otherwise also those of instructions."""
    bp_first: Annotated[int, Range(1, 4096)] = 2
    """Number of updates with gradients at the first step; it increases to `arch.bp_steps`."""
    bp_warmup_share: Annotated[float, Range(0, 1)] = 0.2
    """Share of the steps after which the number of updates is `arch.bp_steps`; 0 begins with it."""

    def __post_init__(self):
        check_fields(self)


@dataclasses.dataclass(frozen=True)
class BackpropSchedule:
    """The number of updates with gradients: from `first`, rounded down, to `last` at `steps`."""

    first: int
    last: int
    steps: float

    def at(self, step: int) -> int:
        """Returns the number of the step that follows `step` completed steps."""
        progress = min(1.0, (step + 1) / self.steps) if self.steps > 0 else 1.0
        return self.first + int(progress * (self.last - self.first))

    def after(self, step: int) -> int | None:
        now = self.at(step)
        later = range(step + 1, int(self.steps) + 1)
        return None if now == self.last else next(number for each in later if (number := self.at(each)) != now)


class InstructionTask(Task):
    """Instructions with responses, several in a row, for models with the arguments of `HRMText.forward`."""

    config_class = InstructionConfig
    fact_kinds: ClassVar = {"vocab_size": COUNT}
    console: ClassVar = {"loss": "loss {:.4f}", "exact_accuracy": "exact {:.3f}"}
    evaluated = ("exact_accuracy", "accuracy", "loss")

    def __init__(self, config: RunConfig, facts: dict[str, Any] | None = None):
        """If `facts` are given (from a run folder), the data set is opened only when it is needed."""
        super().__init__(config, facts)
        self._task_config: InstructionConfig = config.task_config  # pyright: ignore[reportAttributeAccessIssue]
        self.sizes = {"vocab_size": self.data.vocab_size if facts is None else int(facts["vocab_size"])}

    @property
    def unit(self) -> tuple[str, int]:
        return "tokens", self.config.arch.seq_len

    @cached_property
    def data(self) -> InstructionSet:
        return InstructionSet(self.config.data_dir)

    @cached_property
    def held_out(self) -> InstructionSet:
        """The test samples. Raises `UserError` if there are none, or of another vocabulary."""
        folder = path_of(self.config.data_dir) / "test"
        if not (folder / "metadata.json").is_file():
            raise UserError(f"{self.config.data_dir} has no held-out samples in test; build it with a --test-share")
        test = InstructionSet(str(folder))
        if test.vocab_size != self.data.vocab_size:
            raise UserError(f"{folder} has {test.vocab_size} tokens, expected {self.data.vocab_size}; build it again")
        return test

    @cached_property
    def steps(self) -> PackedSteps:
        return PackedSteps(self.data, self.config.global_batch_size, self.config.arch.seq_len)

    @cached_property
    def fingerprint(self) -> str:
        """Returns the fingerprint of earlier versions and, after it, the hash of all files.

        The first one is a hash of counts, first and last tokens and the first epoch's order. `check_data` accepts it.
        """
        content = hashlib.sha256()
        for data in (self.data, self.held_out):
            content.update(json.dumps(data.metadata, sort_keys=True).encode())
            for array in (data.tokens[:_HASHED], data.tokens[-_HASHED:], data.epoch(0).inst_start):
                content.update(np.ascontiguousarray(array).tobytes())
        return content.hexdigest()[:32] + self.data.content + self.held_out.content

    @property
    def examples_per_epoch(self) -> float:
        """Number of rows of a pass over the samples if there were no padding, as the published script counts them."""
        return self.data.total_length / self.config.arch.seq_len

    @property
    def description(self) -> str:
        samples = len(self.data.epoch(0).inst_len)
        test = len(self.held_out.epoch(0).inst_len)
        return f"{samples:,} instructions with {self.data.total_length:,} tokens, {test:,} held out"

    def check(self, config: RunConfig, devices: Devices) -> None:
        if not isinstance(config.arch, HRMTextConfig):
            raise UserError(f"--model {config.model} does not take several samples in a row; use hrm_text")
        if self._task_config.bp_first > config.arch.bp_steps:
            raise UserError(
                f"--bp-first {self._task_config.bp_first} is more than --arch.bp-steps {config.arch.bp_steps}; use less"
            )
        for data in (self.data, self.held_out):
            data.check()
            longest = int(data.epoch(0).lengths.max(initial=0))
            if longest > config.arch.seq_len:
                raise UserError(
                    f"{data.directory} has a sample of {longest} tokens, and a row has {config.arch.seq_len}; use "
                    f"--arch.seq-len {longest}"
                )
        self.steps.at(0)

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        return self.steps.batch(step, shard, target_only=self._task_config.target_only)

    # ---- model and loss

    @classmethod
    def unbuilt(cls, config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task | None:
        return UnbuiltInstructions(config)

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        logits, buffers = _logits(call, batch)
        sums = response_sums(logits, batch)
        return LossSums(sums["loss"], sums["tokens"], sums, carry, buffers)

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        return figures_of(sums)

    def variants(self, total_steps: int) -> BackpropSchedule:
        arch: Any = self.config.arch
        config = self._task_config
        last = arch.bp_steps
        return BackpropSchedule(min(config.bp_first, last), last, total_steps * config.bp_warmup_share)

    def arch_of(self, variant: Any) -> Any:
        return dataclasses.replace(self.config.arch, bp_steps=variant) if variant else self.config.arch

    def evaluator(self, objective: Objective, devices: Devices) -> InstructionEvaluator:
        return InstructionEvaluator(self, objective, devices)


def _logits(call: Call, batch: Batch, **options: Any) -> tuple[jax.Array, Any]:
    parts = {name: batch[name] for name in ("positions", "samples", "instruction")}
    return call(batch["inputs"], **parts, **options)


def response_sums(logits: jax.Array, batch: Batch) -> dict[str, jax.Array]:
    """Returns the sums `loss` (nats), `correct` and `tokens` over the targets, `exact` and `responses` over samples.

    A response is exact if every target of it is the most probable token.
    """
    targets = batch["targets"]
    samples = batch["samples"]
    counts = targets != IGNORED_TARGET
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.where(counts, targets, 0))
    correct = counts & (jnp.argmax(logits, -1) == targets)
    rows, size = targets.shape
    place = jnp.where(samples < 0, rows * size, jnp.arange(rows)[:, None] * size + samples)

    def by_sample(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(values.astype(jnp.float32).ravel(), place.ravel(), num_segments=rows * size + 1)[:-1]

    asked = by_sample(counts)
    right = by_sample(correct)
    return {
        "loss": jnp.where(counts, losses, 0).sum(),
        "correct": correct.sum().astype(jnp.float32),
        "tokens": counts.sum().astype(jnp.float32),
        "exact": ((asked > 0) & (right == asked)).sum().astype(jnp.float32),
        "responses": (asked > 0).sum().astype(jnp.float32),
    }


def figures_of(sums: dict[str, Any]) -> dict[str, float]:
    """Converts sums to means: `loss` and `accuracy` of tokens, `exact_accuracy` of responses; none without targets."""
    means = {"loss": ("loss", "tokens"), "accuracy": ("correct", "tokens"), "exact_accuracy": ("exact", "responses")}
    return {name: float(sums[a]) / float(sums[b]) for name, (a, b) in means.items() if float(sums[b])}


class InstructionEvaluator:
    """Evaluates a module on the held-out samples; compiled at the first call."""

    def __init__(self, task: InstructionTask, objective: Objective, devices: Devices):
        config = task.config
        self._devices = devices
        self._steps = PackedSteps(task.held_out, config.eval_batch_size, config.arch.seq_len, drop_last=False)

        def eval_step(state: TrainState, batch: Batch) -> tuple[Any, Any]:
            call = objective.call(state.eval_params, state.buffers, train=False)
            logits, _ = _logits(call, batch)
            return jax.lax.psum(response_sums(logits, batch), AXIS), {}

        self._step = devices.parallel_eval_step(eval_step)

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> Evaluation:
        """Evaluates on the first `limit` samples, rounded up to whole batches."""
        state = self._devices.replicate(state)
        sums: dict[str, float] = {}
        done = 0
        step = 0
        while (taken := self._steps.at(step)).epoch == 0 and not (limit and done >= limit):
            batch = self._steps.batch(step, process_shard())
            metrics, _ = self._step(state, self._devices.shard(self._devices.split_batch(batch)))
            for name, value in self._devices.to_host(metrics).items():
                sums[name] = sums.get(name, 0.0) + float(value)
            done = done + taken.count
            step = step + 1
        return Evaluation(figures_of(sums) | {"count": float(done)})


class UnbuiltInstructions(InstructionTask):
    """The parts of the task that are needed to compile its train step, without a data set."""

    def __init__(self, config: RunConfig):
        super().__init__(config, {"vocab_size": config.arch.vocab_size})  # pyright: ignore[reportAttributeAccessIssue]

    @property
    def examples_per_epoch(self) -> float:
        return float(self.config.global_batch_size)

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        shape = self.config.global_batch_size // shard[1], self.config.arch.seq_len
        names = ("inputs", "targets", "positions", "samples")
        return {name: np.zeros(shape, np.int32) for name in names} | {"instruction": np.zeros(shape, bool)}

    def check(self, config: RunConfig, devices: Devices) -> None:
        """Accepts any configuration: there is no sample that could be too long."""
