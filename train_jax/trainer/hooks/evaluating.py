"""Evaluations during training, and at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from train_jax.core.state import TrainState
from train_jax.run.tracking import duration
from train_jax.runtime.processes import is_main_process
from train_jax.storage.lease import check_writer
from train_jax.task import Evaluation, Periodic
from train_jax.trainer.session import Hook, Session


class Evaluating(Hook):
    """Evaluates at the steps of each evaluation, and at the end on all examples."""

    def __init__(self, evaluations: Sequence[Periodic]):
        self._evaluations = evaluations
        self.final: Evaluation | None = None
        """The main evaluation at the end of the run."""

    def after(self, session: Session, metrics: Any) -> None:
        due = [each for each in self._evaluations if each.every and session.step % each.every == 0]
        if not due or session.step == session.total_steps:
            return
        with session.pausing("evaluation"):
            whole = session.training.placement.whole(session.state)
            for each in due:
                self._evaluate(session, each, whole, limit=each.limit, metrics_only=True)

    def end(self, session: Session) -> None:
        with session.pausing("evaluation"):
            whole = session.training.placement.whole(session.state)
            for each in self._evaluations:
                evaluation = self._evaluate(session, each, whole)
                if is_main_process():
                    evaluation.save(session.folder, each.name or "test")
                if not each.name:
                    self.final = evaluation

    def _evaluate(self, session: Session, which: Periodic, state: TrainState, **options: Any) -> Evaluation:
        evaluation = which.evaluator(state, **options)
        prefix = f"{which.name}/" if which.name else ""
        metrics = {f"{prefix}{name}": value for name, value in evaluation.metrics.items()}
        session.metrics |= metrics
        seconds = session.clock.train_seconds
        session.tracker.log(session.step, {f"eval/{n}": v for n, v in metrics.items()} | {"train_seconds": seconds})
        what = f"{which.name}: " if which.name else ""
        said = f"step {session.step}: {what}{evaluation.summary} after {duration(seconds)} of training"
        session.say([said, *evaluation.details])
        if is_main_process():
            check_writer(session.folder.path)
            evaluation.record(session.folder, session.step)
        return evaluation
