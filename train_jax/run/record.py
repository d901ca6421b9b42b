"""What a run tells of itself: a line to begin with, the figures of every window of steps, its evaluations."""

from __future__ import annotations

from typing import Any

from train_jax.core.metrics import Groups, window_means
from train_jax.core.state import Arrays
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.tracking import Tracker, duration
from train_jax.runtime.devices import Devices
from train_jax.runtime.feed import Feed
from train_jax.runtime.stopwatch import Stopwatch
from train_jax.tasks.puzzles.evaluation import Evaluation, evaluate
from train_jax.tasks.puzzles.mixture import Mixture


class Record:
    """The record of one run, kept by `tracker`; `groups`: whose norms of gradients and updates it tells apart."""

    def __init__(
        self, config: RunConfig, devices: Devices, tracker: Tracker, clock: Stopwatch, feed: Feed, groups: Groups
    ):
        self._config, self._devices, self._groups = config, devices, groups
        self._tracker, self._clock, self._feed = tracker, clock, feed

    def begin(self, params: Arrays, train_set: Mixture, test_set: Mixture, start: int, total_steps: int) -> None:
        """One line: model, devices, data, steps."""
        size = sum(p.size for p in params.values())
        resumed = f", continuing at step {start}" if start else ""
        self._tracker.say(
            f"{self._config.model} with {size:,} parameters on {self._devices.kind}; {train_set.num_groups:,} puzzles "
            f"({train_set.num_examples:,} examples), {test_set.num_examples:,} held out; "
            f"{total_steps} steps of {self._config.global_batch_size}{resumed}"
        )

    def window(self, window: list[tuple[int, Any]]) -> None:
        """`(step, metrics)` of some dispatches. Raises `UserError` when too many steps in a row had to be left out."""
        fetched = self._devices.fetch([metrics for _, metrics in window])
        if self._config.compute.steps_per_dispatch > 1:  # stacked
            fetched = [{n: v[i] for n, v in stack.items()} for stack in fetched for i in range(len(stack["lr"]))]
        step, size = window[-1][0], self._config.global_batch_size
        figures = window_means(fetched, self._groups, size)
        metrics = {f"train/{name}": value for name, value in figures.items()}
        step_seconds = self._clock.lap(len(fetched))
        metrics["data_wait_share"] = self._feed.waited() / max(step_seconds * len(fetched), 1e-9)
        times = {"train_seconds": self._clock.seconds, "step_seconds": step_seconds}
        self._tracker.log(step, metrics | times)
        self._tracker.progress(step, metrics, step_seconds=step_seconds, examples=size)
        self._check_finite(step, max(int(metrics["consecutive_skipped"]) for metrics in fetched))

    def _check_finite(self, step: int, in_a_row: int) -> None:
        optim = self._config.optim
        if in_a_row >= optim.max_skipped_steps:
            raise UserError(
                f"{in_a_row} steps in a row up to step {step} had a loss or gradient that is not finite, "
                f"{optim.max_skipped_steps} are too many; start another --run-dir with a lower --optim.lr than "
                f"{optim.lr}, with --optim.clip-norm 1, or with --arch.forward-dtype float32"
            )

    def score(self, step: int, learner: Any, eval_step: Any, puzzles: Mixture, *, limit: int) -> Evaluation:
        """Evaluates what was learned on the first `limit` puzzles, 0 for all."""
        size, seconds = self._config.eval_batch_size, self._clock.seconds
        found = evaluate(eval_step, learner, puzzles, self._devices, batch_size=size, limit=limit)
        metrics = {f"eval/{name}": value for name, value in found.metrics.items()}
        self._tracker.log(step, metrics | {"train_seconds": seconds})
        self._tracker.say(
            f"step {step}: exact accuracy {found.metrics['exact_accuracy']:.4f}, token accuracy "
            f"{found.metrics['accuracy']:.4f} on {found.metrics['count']:.0f} held-out puzzles "
            f"after {duration(seconds)} of training"
        )
        return found
