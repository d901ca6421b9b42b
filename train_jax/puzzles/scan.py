"""The full scan (traced): a batch of puzzles for a fixed number of ACT steps, or noisy trajectories of them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from train_jax.core.metrics import Metrics
from train_jax.core.objective import Batch, Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.puzzles.metrics import answer_sums, curve_sums, halting_logits, score_answers
from train_jax.puzzles.views import in_original_frame, in_view, without_tables

MARKS = (0x00000000, 0x9E3779B9)
"""The two hashes of an answer differ by this number."""
Chooser = Literal["halting", "vote", "both"]
"""Rule that chooses the answer of several trajectories (`trajectories.choose`)."""
EvalStep = Callable[[TrainState, Batch], tuple[Metrics, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class TrajectoryOptions:
    """Number, length and noise of the trajectories of a puzzle, and the rule that chooses its answer."""

    trajectories: int
    noise: float
    """Standard deviation of the noise on the latents after each ACT step."""
    depth: int
    """Number of ACT steps of each trajectory."""
    chooser: Chooser = "halting"
    seed: int = 0
    views: int = 1
    """Number of views of a puzzle (`views.py`), which the trajectories take in turn."""
    runs: int = 1
    """Number of runs, whose weights the trajectories take in turn."""
    agree: bool = False
    """With early halting, compute trajectories until two have the same answer."""

    @property
    def act_steps(self) -> int:
        """Number of ACT steps per puzzle."""
        return self.trajectories * self.depth

    def run_of(self, trajectory: Any) -> Any:
        """Returns the run of a trajectory, a number or a traced one."""
        return trajectory % self.runs

    def view_of(self, trajectory: Any) -> Any:
        """Returns the view of a trajectory; `runs * views` trajectories have all pairs of a run and a view."""
        pairs_in_turn = math.lcm(self.runs, self.views)
        return (trajectory + trajectory // pairs_in_turn) % self.views


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
        losses = {name: values[-1] for name, values in metrics.items() if name.endswith("loss")}
        last = losses | answer_sums(outputs["preds"][-1], outputs["q_halt_logits"][-1], batch["labels"], max_steps)
        if metrics_only:
            return jax.lax.psum(last, AXIS), {}
        curve = curve_sums(outputs["preds"], batch["labels"], halting_logits(outputs))
        return jax.lax.psum(last | {"halting_curve": curve}, AXIS), outputs

    return eval_step


def stack_runs(states: Sequence[TrainState]) -> TrainState:
    """Returns the states of several runs as one, of which `EvalModel` takes one; one state stays as it is."""
    if len(states) == 1:
        return states[0]
    params, buffers = jax.tree.map(
        lambda *arrays: np.stack([np.asarray(array) for array in arrays]),
        *((state.eval_params, state.buffers) for state in states),
    )
    return states[0]._replace(params={}, ema=params, opt_state=(), buffers=buffers)


class EvalModel:
    """The module in evaluation mode with `state.eval_params`; a batch may have views (`views.py`)."""

    def __init__(self, objective: Objective, state: TrainState, run: jax.Array | None = None):
        """`run` is the number of the run in a state of `stack_runs`; None for a state of one run."""
        params = state.eval_params
        buffers = state.buffers
        if run is not None:
            params, buffers = jax.tree.map(lambda array: array[run], (params, buffers))
        self._objective = objective
        self._call = objective.call(params, buffers, train=False)
        self._state = params, buffers
        self._return_keys = ("preds", "q_halt_logits")
        if getattr(objective.task, "bootstrapped_halting", False):  # it halts if `q_halt` exceeds `q_continue`
            self._return_keys += ("q_continue_logits",)

    def initial_carry(self, batch: Batch) -> Any:
        return self._objective.initial_carry(*self._state, without_tables(batch)[0])

    def act_step(self, carry: Any, batch: Batch) -> tuple[Any, Metrics, dict[str, jax.Array]]:
        """Runs one ACT step and returns carry, metrics and outputs; answers to views are those to the puzzles."""
        batch, tables = without_tables(batch)
        if tables:
            batch = in_view(batch, tables)
        outputs, _ = self._call(carry=carry, batch=batch, return_keys=self._return_keys)
        carry, _, metrics, returned, _ = outputs
        if tables:
            returned = {**returned, "preds": in_original_frame(returned["preds"], tables)}
        return carry, metrics, returned


def without_mask(batch: Batch) -> tuple[Batch, jax.Array]:
    """Returns the batch without `is_example`, and the mask; without a mask, all rows are examples."""
    mask = batch.get("is_example", jnp.ones(len(batch["inputs"]), bool))
    return {name: value for name, value in batch.items() if name != "is_example"}, mask


# ---- trajectories


class _Answer(NamedTuple):
    """The outputs of one ACT step for each row."""

    preds: Int[Array, "batch seq"]
    q_halt_logits: Float[Array, "batch"]
    logits: Float[Array, "batch"]
    """The logits that decide halting in training: `halting_logits`."""


def make_trajectory_step(objective: Objective, options: TrajectoryOptions) -> EvalStep:
    """Returns `(state, batch) -> ({}, outputs)`, which runs one trajectory of `options.depth` ACT steps for every row.

    Normal noise is added to all latents after each ACT step. Its random numbers are a function of (seed, `number`,
    `trajectory`, ACT step), where `number` and `trajectory` are given in the batch for each row, the same trajectory
    for all, so they do not depend on the batch and on the devices. The depth may exceed the halt limit of the model.
    The batch has the permutations of the view of the trajectory, if there are several; the state is one of
    `stack_runs`.

    Outputs belong to this replica. With a leading axis of ACT steps: `logits` and `exact` of the answer,
    and `marks`, two hashes of it. With a leading axis of two answers, the one with the highest halting logit so far (of
    equal ones the first) and the one after the last ACT step: `preds` and `q_halt_logits`.
    """

    def trajectory_step(state: TrainState, batch: Batch) -> tuple[Metrics, dict[str, jax.Array]]:
        batch, _ = without_mask(batch)
        trajectories = batch.pop("trajectory")
        keys = row_keys(options.seed, batch.pop("number"), trajectories)
        model = EvalModel(objective, state, options.run_of(trajectories[0]) if options.runs > 1 else None)

        def act_step(carry: Any) -> tuple[Any, _Answer]:
            carry, _, outputs = model.act_step(carry, batch)
            return carry, _Answer(outputs["preds"], outputs["q_halt_logits"], halting_logits(outputs))

        def scan_body(loop: tuple[Any, _Answer, _Answer], step: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
            carry, best, _ = loop
            carry, answer = act_step(carry)
            better = (step == 0) | (answer.logits > best.logits)
            best = jax.tree.map(lambda new, old: jnp.where(beside(better, new), new, old), answer, best)
            scores = score_answers(answer.preds, batch["labels"])
            facts = {"exact": scores.exact, "logits": answer.logits, "marks": answer_marks(answer.preds)}
            return (continued(with_noise(carry, keys, step, options.noise)), best, answer), facts

        carry = model.initial_carry(batch)
        no_answer = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(act_step, carry)[1])
        (_, best, last), facts = jax.lax.scan(scan_body, (carry, no_answer, no_answer), jnp.arange(options.depth))
        answers = jax.tree.map(lambda *both: jnp.stack(both), best, last)
        return {}, facts | {"preds": answers.preds, "q_halt_logits": answers.q_halt_logits}

    return trajectory_step


def row_keys(seed: int, numbers: Int[Array, "batch"], trajectories: Int[Array, "batch"]) -> Any:
    """Returns a random key for each row: a function of the seed, the number of its puzzle and of its trajectory."""
    key = jax.random.key(seed)
    return jax.vmap(lambda number, trajectory: jax.random.fold_in(jax.random.fold_in(key, number), trajectory))(
        numbers, trajectories
    )


def with_noise(carry: Any, keys: Any, step: Int[Array, "*batch"], noise: float | Float[Array, "batch"]) -> Any:
    """Returns the carry with normal noise added to all latents; `step` is one number, or one for each row.

    `noise` is its standard deviation, one number or one for each row. Raises `UserError` if the carry has no latents.
    """
    if isinstance(noise, int | float) and not noise:
        return carry
    if not hasattr(carry, "inner_carry"):
        raise UserError(
            f"--noise {noise} is added to the latents in the field inner_carry of the carry, but the carry of this "
            f"model is a {type(carry).__name__} without it; use --noise 0"
        )
    latents, tree = jax.tree.flatten(carry.inner_carry)
    steps = jnp.broadcast_to(step, keys.shape)
    scale = jnp.broadcast_to(noise, keys.shape)

    def noisy(number: int, latent: jax.Array) -> jax.Array:
        if not jnp.issubdtype(latent.dtype, jnp.floating):
            return latent

        def draw(key: Any, step: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(key, step), number)
            return jax.random.normal(key, latent.shape[1:], jnp.float32)

        drawn = jax.vmap(draw)(keys, steps)
        added = latent.astype(jnp.float32) + beside(scale, drawn) * drawn
        return added.astype(latent.dtype)

    latents = [noisy(number, latent) for number, latent in enumerate(latents)]
    return dataclasses.replace(carry, inner_carry=jax.tree.unflatten(tree, latents))


def continued(carry: Any) -> Any:
    """Returns the carry with no row halted, so that the next ACT step continues at the halt limit too."""
    if not hasattr(carry, "halted"):
        return carry
    return dataclasses.replace(carry, halted=jnp.zeros_like(carry.halted))


def answer_marks(preds: Int[Array, "batch seq"]) -> UInt32[Array, "batch 2"]:
    """Returns two 32-bit hashes of each answer: two different answers have equal ones with probability 2**-64."""
    words = preds.astype(jnp.uint32) * preds.shape[1] + jnp.arange(preds.shape[1], dtype=jnp.uint32)
    return jnp.stack([_mix(words ^ jnp.uint32(mark)).sum(axis=1, dtype=jnp.uint32) for mark in MARKS], axis=1)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """Applies the finaliser of MurmurHash3, a bijection of 32-bit integers."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def beside(rows: jax.Array, values: jax.Array) -> jax.Array:
    """Returns a value of each row in the shape that broadcasts over `values`."""
    return rows.reshape(-1, *[1] * (values.ndim - 1))
