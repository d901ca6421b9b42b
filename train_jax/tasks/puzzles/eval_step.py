"""Evaluation steps (traced): run a batch of puzzles for a fixed number of ACT steps, or until the model halts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from train_jax.core.metrics import Metrics
from train_jax.core.objective import Batch, Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import Arrays, TrainState
from train_jax.tasks.puzzles.accuracy import score_answers
from train_jax.tasks.puzzles.halting import curve_sums, halting_logits

EvalStep = Callable[[TrainState, Batch], tuple[Metrics, dict[str, jax.Array]]]


def make_eval_step(objective: Objective, max_steps: int, *, metrics_only: bool = False) -> EvalStep:
    """Returns `(state, batch) -> (metrics, outputs)`, which runs `max_steps` ACT steps with `state.eval_params`.

    Metrics are sums over all replicas; `halting_curve` contains the sums of the halting curve. Outputs belong to this
    replica and have a leading axis of ACT steps; with `metrics_only` they are empty. In `batch`, `is_example` may be
    False for padding rows.
    """

    def eval_step(state: TrainState, batch: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        batch, _ = without_mask(batch)
        model = EvalModel(objective, state)

        def scan_body(carry: Any, _: None) -> tuple[Any, tuple[Metrics, dict[str, jax.Array]]]:
            carry, metrics, outputs = model.act_step(carry, batch)
            return carry, (metrics, outputs)

        _, (metrics, outputs) = jax.lax.scan(scan_body, model.initial_carry(batch), length=max_steps)
        # In evaluation no sequence halts before the limit, so only the metrics of the last step are not zero.
        last = jax.tree.map(lambda m: m[-1], metrics)
        if metrics_only:
            return jax.lax.psum(last, AXIS), {}
        curve = curve_sums(outputs["preds"], batch["labels"], halting_logits(outputs))
        return jax.lax.psum(last | {"halting_curve": curve}, AXIS), outputs

    return eval_step


class _HaltingState(NamedTuple):
    """Loop state of a batch whose sequences halt at different ACT steps."""

    carry: Any
    act_steps: jax.Array
    """ACT steps of the batch so far."""
    halted: jax.Array
    steps: jax.Array
    """ACT steps of each sequence until it halted."""
    outputs: dict[str, jax.Array]
    """Outputs of each sequence when it halted, or its latest outputs."""


def make_halting_eval_step(objective: Objective, max_steps: int, threshold_logit: float) -> EvalStep:
    """Like `make_eval_step`, with early halting at the first ACT step whose halting logit exceeds the threshold.

    A replica stops when all of its sequences have halted. The metric `steps` is the sum of the ACT steps of the
    sequences; `computed_steps` is the sum of the ACT steps that their replicas computed. Outputs have a leading axis of
    size 1 and include `steps`.
    """

    def eval_step(state: TrainState, batch: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        batch, is_example = without_mask(batch)
        model = EvalModel(objective, state)

        def act_step(carry: Any) -> tuple[Any, dict[str, jax.Array]]:
            carry, _, outputs = model.act_step(carry, batch)
            return carry, outputs

        def running(loop: _HaltingState) -> jax.Array:
            return (loop.act_steps < max_steps) & ~loop.halted.all()

        # No collectives here: replicas leave the loop after different numbers of iterations.
        def body(loop: _HaltingState) -> _HaltingState:
            carry, outputs = act_step(loop.carry)
            act_steps = loop.act_steps + 1
            kept = {
                name: jnp.where(loop.halted.reshape(-1, *[1] * (new.ndim - 1)), loop.outputs[name], new)
                for name, new in outputs.items()
            }
            steps = jnp.where(loop.halted, loop.steps, act_steps)
            halts = halting_logits(outputs) > threshold_logit
            return _HaltingState(carry, act_steps, loop.halted | halts, steps, kept)

        carry = model.initial_carry(batch)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act_step, carry)[1])
        no_steps = jnp.zeros(len(is_example), jnp.int32)
        loop = _HaltingState(carry, jnp.zeros((), jnp.int32), ~is_example, no_steps, zeros)
        loop = jax.lax.while_loop(running, body, loop)
        outputs = loop.outputs | {"steps": loop.steps}
        metrics = halting_metrics(outputs, batch["labels"])
        metrics["computed_steps"] = metrics["count"] * loop.act_steps
        return jax.lax.psum(metrics, AXIS), {name: value[None] for name, value in outputs.items()}

    return eval_step


def halting_metrics(outputs: dict[str, jax.Array], labels: jax.Array) -> Metrics:
    """Returns the sums of the metrics of answers and their `steps`."""
    scores = score_answers(outputs["preds"], labels)
    predicted_correct = outputs["q_halt_logits"] >= 0
    return {
        "count": scores.labelled.sum(),
        "accuracy": scores.accuracy.sum(),
        "exact_accuracy": scores.exact.sum(),
        "q_halt_accuracy": (scores.labelled & (predicted_correct == scores.exact)).sum(),
        "steps": jnp.where(scores.labelled, outputs["steps"], 0).sum(),
    }


class EvalModel:
    """The module in evaluation mode with `state.eval_params`."""

    def __init__(self, objective: Objective, state: TrainState):
        params: Arrays = state.eval_params
        self._objective = objective
        self._call = objective.call(params, state.buffers, train=False)
        self._state = params, state.buffers
        # The loss head ignores names of outputs that the model does not have.
        self._return_keys = ("preds", "q_halt_logits", *["q_continue_logits"] * is_bootstrapped(objective))

    def initial_carry(self, batch: Batch) -> Any:
        return self._objective.initial_carry(*self._state, batch)

    def act_step(self, carry: Any, batch: Batch) -> tuple[Any, Metrics, dict[str, jax.Array]]:
        """Runs one ACT step and returns carry, metrics and outputs."""
        outputs, _ = self._call(carry=carry, batch=batch, return_keys=self._return_keys)
        carry, _, metrics, returned, _ = outputs
        return carry, metrics, returned


def is_bootstrapped(objective: Objective) -> bool:
    """Returns whether a sequence halts if `q_halt` exceeds `q_continue` instead of 0."""
    return getattr(objective.task, "bootstrapped_halting", False)


def without_mask(batch: Batch) -> tuple[Batch, jax.Array]:
    """Returns the batch without `is_example`, and the mask; without a mask, all rows are examples."""
    mask = batch.get("is_example", jnp.ones(len(batch["inputs"]), bool))
    return {name: value for name, value in batch.items() if name != "is_example"}, mask
