"""Logs the metrics of a run: a first line, every window of steps, and its evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from train_jax.core.metrics import Groups, optimizer_figures, window_sums
from train_jax.core.state import Arrays, TrainState
from train_jax.errors import UserError
from train_jax.optim.chain import learning_rates
from train_jax.run.config import RunConfig
from train_jax.run.model_flops import model_flops
from train_jax.run.tracking import Tracker, duration
from train_jax.runtime.devices import Devices
from train_jax.runtime.performance import peak_flops, performance
from train_jax.runtime.stopwatch import Stopwatch
from train_jax.tasks.task import Evaluation, Evaluator, Task


class Record:
    """Logs the metrics of one run to `tracker`; `groups` are the parameter groups whose norms are logged."""

    def __init__(
        self, config: RunConfig, task: Task, devices: Devices, tracker: Tracker, clock: Stopwatch, groups: Groups
    ):
        self._config, self._task, self._devices, self._groups = config, task, devices, groups
        self._tracker, self._clock = tracker, clock
        self._rates = list(learning_rates(itertools.chain(*groups.values()), config.optim, 1))
        self._unit, self._per_example = getattr(task, "unit", ("examples", 1))

    @cached_property
    def _model_flops(self) -> float | None:
        """FLOPs of a step on one device; None if no peak is known, or for a model that changes during the run."""
        changes = self._task.stages(self._total_steps).after(self._start) is not None
        return None if changes or peak_flops() is None else model_flops(self._config, self._task, self._devices.count)

    def begin(self, params: Arrays, start: int, total_steps: int) -> None:
        """Logs one line with model, devices, data and steps."""
        self._start, self._total_steps = start, total_steps
        size = sum(p.size for p in params.values())
        resumed = f", continuing at step {start}" if start else ""
        self._tracker.say(
            f"{self._config.model} with {size:,} parameters on {self._devices.kind}; {self._task.description}; "
            f"{total_steps} steps of {self._config.global_batch_size}{resumed}"
        )

    def say(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._tracker.say(line)

    def window(
        self, window: list[tuple[int, Any]], *, wait_seconds: float = 0.0, step_flops: float | None = None
    ) -> None:
        """Logs `(step, metrics)` of several dispatches. Raises `UserError` if too many consecutive steps were skipped.

        `wait_seconds` is the time that the loop waited for data, `step_flops` the FLOPs that XLA counts
        for one step on one device.
        """
        fetched = self._devices.to_host([metrics for _, metrics in window])
        if self._config.compute.steps_per_dispatch > 1:  # stacked
            fetched = [{n: v[i] for n, v in stack.items()} for stack in fetched for i in range(len(stack["lr"]))]
        step, size = window[-1][0], self._config.global_batch_size
        sums = window_sums(fetched)
        skipped = int(sums.pop("skipped_steps"))
        figures = self._task.figures(sums, size * (len(fetched) - skipped))
        figures |= optimizer_figures(fetched[-1], self._groups, self._rates) | {"skipped_steps": float(skipped)}
        metrics = {f"train/{name}": value for name, value in figures.items()}
        step_seconds = self._clock.lap(len(fetched))
        metrics["data_wait_share"] = wait_seconds / max(step_seconds * len(fetched), 1e-9)
        per_second = {"examples": size / max(step_seconds, 1e-9)}
        per_second[self._unit] = self._per_example * per_second["examples"]
        flops = {"hfu": step_flops, "mfu": self._model_flops}
        if self._config.compute.accumulation_steps > 1:  # XLA counts the parts, which are a scan, once
            del flops["hfu"]
        metrics |= performance(per_second=per_second, flops=flops, step_seconds=step_seconds)
        times = {"train_seconds": self._clock.seconds, "step_seconds": step_seconds}
        self._tracker.log(step, metrics | times)
        shown = [text.format(figures.get(name, 0.0)) for name, text in self._task.console.items()]
        speed = f"{per_second[self._unit]:,.0f} {self._unit}/s"
        self._tracker.progress(step, "  ".join(shown), step_seconds=step_seconds, speed=speed)
        self._check_finite(step, max(int(metrics["consecutive_skipped"]) for metrics in fetched))

    def _check_finite(self, step: int, in_a_row: int) -> None:
        optim = self._config.optim
        if in_a_row >= optim.max_skipped_steps:
            groups = ", and lower ones in --optim.groups" * any(group.lr is not None for group in optim.groups)
            raise UserError(
                f"{in_a_row} consecutive steps up to step {step} had a loss or gradient that is not finite "
                f"(optim.max_skipped_steps is {optim.max_skipped_steps}); start another --run-dir with a lower "
                f"--optim.lr than {optim.lr}{groups}, with --optim.clip-norm 1, or with --arch.forward-dtype float32"
            )

    def evaluate(
        self, step: int, state: TrainState, evaluator: Evaluator, *, limit: int = 0, metrics_only: bool = False
    ) -> Evaluation:
        """Evaluates the state on the first `limit` examples, 0 for all, and logs the metrics."""
        seconds = self._clock.seconds
        evaluation = evaluator(state, limit=limit, metrics_only=metrics_only)
        metrics = {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        self._tracker.log(step, metrics | {"train_seconds": seconds})
        self._tracker.say(f"step {step}: {evaluation.summary} after {duration(seconds)} of training")
        return evaluation
