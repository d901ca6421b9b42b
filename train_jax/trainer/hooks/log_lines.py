"""Log lines: the metrics of a window of steps."""

from __future__ import annotations

from typing import Any

from train_jax.core.metrics import optimizer_figures, window_sums
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.performance import model_flops, peak_flops, performance
from train_jax.trainer.session import Hook, Session
from train_jax.trainer.start import Training


class Logging(Hook):
    """Logs the metrics of a window of `log_every_steps` steps.

    A full window is fetched one dispatch late, so that the devices always have a step to run.
    """

    def __init__(self, training: Training):
        self._window: list[tuple[int, Any]] = []
        self._rates = list(training.own_optimizer.rates)
        self._model_flops: float | None = None
        """FLOPs of a step on one device; None if no peak is known, or for a model that changes during the run."""
        constant = training.task.variants(training.total_steps).after(0) is None
        if constant and peak_flops() is not None:
            of_replica = model_flops(training.config, training.task, training.devices.count)
            self._model_flops = None if of_replica is None else of_replica / training.devices.per_replica

    def after(self, session: Session, metrics: Any) -> None:
        self._window.append((session.step, metrics))
        if len(self._window) > 1 and self._window[-2][0] % session.training.config.log_every_steps == 0:
            self._log(session, self._window[:-1])
            del self._window[:-1]

    def flush(self, session: Session) -> None:
        """Logs the metrics in the window; the next step starts a new window."""
        if self._window:
            self._log(session, self._window)
            self._window.clear()

    def _log(self, session: Session, window: list[tuple[int, Any]]) -> None:
        """Logs the metrics of a window. Raises `UserError` if too many consecutive steps were skipped."""
        training = session.training
        config = session.training.config
        fetched = training.devices.to_host([metrics for _, metrics in window])
        if config.compute.steps_per_dispatch > 1:  # stacked
            fetched = [{n: v[i] for n, v in stack.items()} for stack in fetched for i in range(len(stack["lr"]))]
        step = window[-1][0]
        size = config.global_batch_size
        count = len(fetched)
        sums = window_sums(fetched)
        left_out = {name: float(sums.pop(name)) for name in ("skipped_steps", "empty_steps") if name in sums}
        figures = training.task.figures(sums, size * (count - int(left_out["skipped_steps"])))
        figures |= optimizer_figures(fetched[-1], training.groups, self._rates) | left_out
        lap = session.clock.lap()
        del lap["compile"]  # it would make the first estimate of the remaining time many times too long
        seconds = max(sum(lap.values()), 1e-9)
        metrics = {f"train/{name}": value for name, value in figures.items()}
        metrics |= {"data_wait_share": lap["data"] / seconds}
        unit, per_example = training.task.unit
        per_second = {"examples": size * count / seconds}
        per_second[unit] = per_example * per_second["examples"]
        flops = {"hfu": session.programs.flops(), "mfu": self._model_flops}
        if config.compute.accumulation_steps > 1:  # XLA counts the parts, which are a scan, once
            del flops["hfu"]
        metrics |= performance(per_second=per_second, flops=flops, step_seconds=seconds / count)
        metrics |= {"train_seconds": session.clock.train_seconds, "step_seconds": seconds / count}
        session.tracker.log(step, metrics)
        shown = [text.format(figures[name]) for name, text in training.task.console.items() if name in figures]
        speed = f"{per_second[unit]:,.0f} {unit}/s"
        session.tracker.progress(step, "  ".join(shown), step_seconds=seconds / count, speed=speed)
        _check_finite(config, step, max(int(metrics["consecutive_skipped"]) for metrics in fetched))
        session.events.progress()


def _check_finite(config: RunConfig, step: int, in_a_row: int) -> None:
    if in_a_row >= config.optim.max_skipped_steps:
        groups = ", and lower ones in --optim.groups" * any(group.lr is not None for group in config.optim.groups)
        raise UserError(
            f"{in_a_row} consecutive steps up to step {step} had a loss or gradient that is not finite "
            f"(optim.max_skipped_steps is {config.optim.max_skipped_steps}); start another --run-dir with a lower "
            f"--optim.lr than {config.optim.lr}{groups}, with --optim.clip-norm 1, or with --arch.forward-dtype float32"
        )
