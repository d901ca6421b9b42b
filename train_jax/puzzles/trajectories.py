"""Evaluates a model with several noisy trajectories for each puzzle: chosen answers, metrics, curves, files."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

from train_jax.core.objective import Objective
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.puzzles.batches import IGNORED_LABEL, Mixture
from train_jax.puzzles.evaluation import PuzzleEvaluation, Rows, merge_devices, token_dtype
from train_jax.puzzles.metrics import answer_sums, means, threshold_logit
from train_jax.puzzles.scan import Chooser, TrajectoryOptions, make_trajectory_step
from train_jax.puzzles.views import with_views
from train_jax.report.commands import Advance
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import gather, process_shard

Keep = Literal["best", "last"]
"""The answer of a trajectory that is a candidate: that of its highest halting logit, or of its last ACT step."""
CHOOSERS: tuple[Chooser, ...] = get_args(Chooser)
KEEPS: tuple[Keep, ...] = get_args(Keep)


class Facts(NamedTuple):
    """Facts about every answer, by trajectory, ACT step and example."""

    logits: Float[np.ndarray, "trajectories steps n"]
    """The logits that decide halting in training."""
    marks: UInt64[np.ndarray, "trajectories steps n"]
    """Hashes of the answers."""
    exact: Bool[np.ndarray, "trajectories steps n"]


def candidate_steps(logits: Float[np.ndarray, "trajectories steps n"], keep: Keep) -> Int[np.ndarray, "..."]:
    """Returns, for each number of ACT steps, the step (from 0) of the candidate of each trajectory.

    With `best`, it is the first step with the highest halting logit so far.
    """
    steps = np.arange(logits.shape[1])[:, None]
    if keep == "last":
        return np.broadcast_to(steps, logits.shape)
    before = np.maximum.accumulate(logits, axis=1)
    is_higher = np.ones(logits.shape, bool)
    is_higher[:, 1:] = logits[:, 1:] > before[:, :-1]
    return np.maximum.accumulate(np.where(is_higher, steps, 0), axis=1)


def choose(
    chooser: Chooser, logits: Float[np.ndarray, "trajectories n"], marks: UInt64[np.ndarray, "trajectories n"]
) -> Int[np.ndarray, "n"]:
    """Returns the trajectory whose candidate is the answer; the first among equal ones.

    `halting`: the candidate with the highest halting logit. `vote`: the answer of most trajectories. `both`: the answer
    with the largest sum of halting probabilities.
    """
    if chooser == "halting" or len(logits) == 1:
        return np.argmax(logits, axis=0)
    weights = np.ones(logits.shape) if chooser == "vote" else 1 / (1 + np.exp(-logits.astype(np.float64)))
    return np.argmax(_votes(marks, weights), axis=0)


def _votes(
    marks: UInt64[np.ndarray, "trajectories n"], weights: Float[np.ndarray, "trajectories n"]
) -> Float[np.ndarray, "trajectories n"]:
    """Returns for each candidate the sum of the weights of all candidates of its example with the same answer."""
    order = np.argsort(marks, axis=0, kind="stable")
    in_order = np.take_along_axis(marks, order, axis=0)
    answers = np.zeros(marks.shape, np.intp)  # numbers the different answers of an example
    answers[1:] = np.cumsum(in_order[1:] != in_order[:-1], axis=0)
    answers += np.arange(marks.shape[1]) * len(marks)
    sums = np.bincount(answers.ravel(), np.take_along_axis(weights, order, axis=0).ravel(), minlength=marks.size)
    votes = np.empty(marks.shape)
    np.put_along_axis(votes, order, sums[answers], axis=0)
    return votes


def chosen(facts: Facts, chooser: Chooser, keep: Keep) -> Int[np.ndarray, "n"]:
    """Returns the trajectory whose candidate is the answer after all ACT steps of all trajectories."""
    steps = candidate_steps(facts.logits, keep)[:, -1]
    return choose(chooser, *(_at(values, steps) for values in (facts.logits, facts.marks)))


def milestones(most: int) -> list[int]:
    """Returns the numbers of trajectories or ACT steps of the curve: 1, 2, 3, 4, 6, 8, 12, … `most`."""
    powers = [2**n for n in range(most.bit_length())]
    return sorted({*powers, *(3 * power // 2 for power in powers[1:] if 3 * power // 2 < most), most})


def solved_at(
    facts: Facts, trajectories: Sequence[int], depths: Sequence[int]
) -> dict[str, Bool[np.ndarray, "trajectories depths n"]]:
    """Returns a mask of the examples that are solved with the first trajectories and the first ACT steps only.

    By name: `CHOOSER/KEEP` for the chosen answers, `pass/KEEP` if the candidate of some trajectory is correct, and
    `any_step` if some step of some trajectory is.
    """
    n = facts.logits.shape[2]
    names = [f"{chooser}/{keep}" for keep in KEEPS for chooser in (*CHOOSERS, "pass")] + ["any_step"]
    solved = {name: np.zeros((len(trajectories), len(depths), n), bool) for name in names}
    rows = np.arange(n)
    for keep in KEEPS:
        steps = candidate_steps(facts.logits, keep)
        for place, depth in enumerate(depths):
            logits, marks, exact = (_at(values, steps[:, depth - 1]) for values in facts)
            for number, count in enumerate(trajectories):
                for chooser in CHOOSERS:
                    winner = choose(chooser, logits[:count], marks[:count])
                    solved[f"{chooser}/{keep}"][number, place] = exact[winner, rows]
                solved[f"pass/{keep}"][number, place] = exact[:count].any(axis=0)
    for place, depth in enumerate(depths):
        for number, count in enumerate(trajectories):
            solved["any_step"][number, place] = facts.exact[:count, :depth].any(axis=(0, 1))
    return solved


STOPS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999, 0.9995, 0.9999)
"""Halting probabilities of the curves for early halting."""


class Stopped(NamedTuple):
    """The result of early halting, by threshold, number of trajectories, number of ACT steps, and example."""

    steps: Int[np.ndarray, "stops trajectories depths n"]
    """ACT steps until the example halted, summed over its trajectories."""
    exact: Bool[np.ndarray, "stops trajectories depths n"]


def stopped_at(
    facts: Facts, trajectories: Sequence[int], depths: Sequence[int], threshold_logits: Sequence[float]
) -> Stopped:
    """Returns the steps and the correctness of the answers if the trajectories are computed one after another until a
    halting logit exceeds a threshold, whose answer is then taken; otherwise the one with the highest logit of all."""
    grid = len(threshold_logits), len(trajectories), len(depths), facts.logits.shape[2]
    result = Stopped(np.zeros(grid, np.int32), np.zeros(grid, bool))
    for place, depth in enumerate(depths):
        for number, count in enumerate(trajectories):
            logits, exact = (
                values[:count, :depth].reshape(count * depth, -1) for values in (facts.logits, facts.exact)
            )
            highest = np.argmax(logits, axis=0)
            for stop, limit in enumerate(threshold_logits):
                above = logits > limit
                halts = above.any(axis=0)
                step = np.where(halts, np.argmax(above, axis=0), highest)
                result.steps[stop, number, place] = np.where(halts, step + 1, len(logits))
                result.exact[stop, number, place] = np.take_along_axis(exact, step[None], axis=0)[0]
    return result


def _at(values: np.ndarray, steps: Int[np.ndarray, "trajectories n"]) -> np.ndarray:
    """Returns the values of each trajectory and example at these steps."""
    return np.take_along_axis(values, steps[:, None], axis=1)[:, 0]


def interval(solved: int, count: int, deviations: float = 1.96) -> tuple[float, float]:
    """Returns the Wilson score interval of a share, by default that of 95 %."""
    share = solved / count
    square = deviations**2 / count
    middle = share + square / 2
    half = deviations * math.sqrt(share * (1 - share) / count + square / count / 4)
    return (middle - half) / (1 + square), (middle + half) / (1 + square)


def with_interval(metrics: dict[str, float]) -> dict[str, float]:
    """Adds the interval of the exact accuracy; `metrics` are those of at least one example with labels."""
    low, high = interval(round(metrics["exact_accuracy"] * metrics["count"]), round(metrics["count"]))
    return metrics | {"exact_accuracy_low": low, "exact_accuracy_high": high}


def with_agreement(metrics: dict[str, float]) -> dict[str, float]:
    """Replaces `agreed_exact`, a share of all puzzles, by `agreed_accuracy`, that of the puzzles that agreed."""
    metrics = dict(metrics)
    exact = metrics.pop("agreed_exact", 0.0)
    return metrics | {"agreed_accuracy": exact / metrics["agreed"]} if metrics.get("agreed") else metrics


LARGEST_BATCH_BYTES = 2**32
"""Limit of the data of a batch that a host keeps: the facts of every answer and the candidates of every trajectory."""


@dataclasses.dataclass(frozen=True)
class TrajectoryEvaluation:
    """The result of an evaluation with trajectories, equal on every process."""

    options: TrajectoryOptions
    evaluation: PuzzleEvaluation
    """Metrics and answers of the chooser, each trajectory with the answer of its highest halting logit."""
    trajectories: list[int]
    """The numbers of trajectories of the curves."""
    depths: list[int]
    """The numbers of ACT steps of the curves."""
    shares: dict[str, np.ndarray]
    """Exact accuracy by name (see `solved_at`), number of trajectories and number of ACT steps."""
    stops: dict[str, np.ndarray]
    """The mean `steps` and the share of `exact` answers with early halting, by threshold (`STOPS`), number of
    trajectories and number of ACT steps."""

    def exact_accuracy(self, name: str) -> float:
        """Returns the exact accuracy with all trajectories and ACT steps, by name."""
        return float(self.shares[name][-1, -1])


class TrajectoryEvaluator:
    """Evaluates a module with several trajectories for each puzzle; compiled at the first call."""

    def __init__(
        self,
        objective: Objective,
        puzzles: Mixture,
        devices: Devices,
        options: TrajectoryOptions,
        *,
        batch_size: int,
        progress: Advance = lambda done, total: None,
    ):
        """`batch_size` is the number of examples on all devices together; each is computed one trajectory at a time."""
        devices.local_batch_size(batch_size)
        _check_memory(options, batch_size, puzzles.metadata.seq_len)
        self._puzzles = puzzles
        self._devices = devices
        self._options = options
        self._batch_size = batch_size
        self._progress = progress
        self._step = devices.parallel_eval_step(make_trajectory_step(objective, options))
        self._trajectories = milestones(options.trajectories)
        self._depths = milestones(options.depth)

    def __call__(self, state: TrainState, *, limit: int = 0) -> TrajectoryEvaluation:
        data = self._puzzles
        shard = process_shard()
        state = self._devices.replicate(state)
        total = min(limit or data.num_examples, data.num_examples)
        done = 0
        rows = Rows()
        sums = {}
        batches = data.eval_batches(batch_size=self._batch_size, shard=shard, limit=limit)
        numbers = data.eval_numbers(batch_size=self._batch_size, shard=shard, limit=limit)
        for (batch, valid), number in zip(batches, numbers, strict=True):
            options = self._options
            shares = self._devices.shard(self._devices.split_batch(batch | {"is_example": valid, "number": number}))
            tables = with_views(data, {}, number, views=options.views, seed=options.seed)
            outputs = []
            for trajectory in range(options.trajectories):
                which = {name: values[:, options.view_of(trajectory)] for name, values in tables.items()}
                which["trajectory"] = np.full(len(number), trajectory, np.int32)
                _, output = self._step(state, shares | self._devices.shard(self._devices.split_batch(which)))
                outputs.append({name: merge_devices(x) for name, x in self._devices.to_host(output).items()})
                part = min(self._batch_size, total - done) * (trajectory + 1) // self._options.trajectories
                self._progress(done + part, total)
            facts, answers = self._of_batch(batch, outputs)
            rows.add(answers, valid)
            counted = valid & (batch["labels"] != IGNORED_LABEL).any(axis=1)
            for name, values in self._curves(facts).items():
                sums[name] = sums.get(name, 0) + values[..., counted].sum(axis=-1, dtype=np.int32)
            done = min(done + self._batch_size, total)
        sums = gather({name: values[None] for name, values in sums.items()}, axis=0)
        return self._result(rows.joined(), {name: values.sum(axis=0) for name, values in sums.items()})

    def _of_batch(
        self, batch: Mapping[str, np.ndarray], outputs: list[dict[str, Any]]
    ) -> tuple[Facts, dict[str, np.ndarray]]:
        """Chooses the answers of a batch; every array has one leading axis, then the examples."""
        stacked = {name: np.stack([output[name] for output in outputs]) for name in outputs[0]}
        marks = stacked["marks"].astype(np.uint64)
        marks = marks[..., 0] << np.uint64(32) | marks[..., 1]
        facts = Facts(stacked["logits"], marks, stacked["exact"])
        trajectory = chosen(facts, self._options.chooser, "best")
        answers = {
            name: stacked[name][trajectory, KEEPS.index("best"), np.arange(len(trajectory))]
            for name in ("preds", "q_halt_logits")
        }
        answers |= {"identifiers": batch["puzzle_identifiers"], "inputs": batch["inputs"], "labels": batch["labels"]}
        return facts, {name: values[None] for name, values in answers.items()}

    def _curves(self, facts: Facts) -> dict[str, np.ndarray]:
        """Returns the fields of `Stopped` and what `solved_at` returns; the last axis of each is the examples."""
        limits = [threshold_logit(stop) for stop in STOPS]
        stopped = stopped_at(facts, self._trajectories, self._depths, limits)
        return solved_at(facts, self._trajectories, self._depths) | stopped._asdict()

    def _result(self, rows: dict[str, np.ndarray], sums: dict[str, np.ndarray]) -> TrajectoryEvaluation:
        """Returns the result; `sums` are those of `_curves` over the examples with labels."""
        options = self._options
        labels = rows["labels"][0]
        of_answers = answer_sums(rows["preds"][0], rows["q_halt_logits"][0], labels, options.act_steps)
        metrics = means({name: float(value) for name, value in of_answers.items()}, len(labels))
        count = metrics["count"] or math.nan
        shares = {name: values / count for name, values in sums.items()}
        stops = {name: shares.pop(name) for name in Stopped._fields}
        if metrics["count"]:
            passed = float(shares["pass/best"][-1, -1])
            metrics = with_interval(metrics) | {f"pass@{options.trajectories}": passed}
        dtype = token_dtype(self._puzzles.metadata)
        answers = rows["preds"].astype(dtype), rows["q_halt_logits"], rows["inputs"][0].astype(dtype)
        evaluation = PuzzleEvaluation(metrics, self._puzzles.num_examples, *answers, rows["identifiers"][0])
        return TrajectoryEvaluation(options, evaluation, self._trajectories, self._depths, shares, stops)


def _check_memory(options: TrajectoryOptions, batch_size: int, seq_len: int) -> None:
    """Raises `UserError` if what is kept of a batch is too large for a host."""
    per_answer = 4 + 1 + 8
    example = options.trajectories * (per_answer * options.depth + 2 * 4 * seq_len)
    fits = LARGEST_BATCH_BYTES // example
    if batch_size > max(fits, 1):
        raise UserError(
            f"--trajectories {options.trajectories} --depth {options.depth} in batches of {batch_size} need "
            f"{batch_size * example / 2**30:.0f} GiB of memory; use --batch-size {max(fits, 1)} or less"
        )


# ---- files and tables


def results_of(evaluation: TrajectoryEvaluation, step: int) -> dict[str, Any]:
    """Returns settings, metrics and the curve as JSON: exact accuracies by name, as in `solved_at`, and with
    early halting, as in `stopped_at`. Without labels the curve has no points."""
    metrics = evaluation.evaluation.metrics
    points = [
        {
            "trajectories": trajectories,
            "depth": depth,
            "act_steps": trajectories * depth,
            "exact_accuracy": {name: float(shares[i, j]) for name, shares in evaluation.shares.items()},
            "stops": [
                {"threshold": stop, "steps": float(steps), "exact_accuracy": float(exact)}
                for stop, steps, exact in zip(
                    STOPS, evaluation.stops["steps"][:, i, j], evaluation.stops["exact"][:, i, j], strict=True
                )
            ],
        }
        for i, trajectories in enumerate(evaluation.trajectories if metrics["count"] else ())
        for j, depth in enumerate(evaluation.depths)
    ]
    return {"step": step, **dataclasses.asdict(evaluation.options), "metrics": metrics, "points": points}


def table(evaluation: TrajectoryEvaluation) -> list[str]:
    """Formats the comparison of the choosers, and the curve of accuracy against ACT steps, for a terminal."""
    options = evaluation.options
    count = evaluation.evaluation.metrics["count"]
    lines = ["chosen by     highest halting logit    last ACT step"]
    for name in (*CHOOSERS, "pass"):
        shares = [evaluation.exact_accuracy(f"{name}/{keep}") for keep in KEEPS]
        shown = f"pass@{options.trajectories}" if name == "pass" else name
        low, high = interval(round(shares[0] * count), round(count))
        lines.append(f"{shown:<12}{f'{shares[0]:.4f} ({low:.4f}-{high:.4f})':>23}{shares[1]:>17.4f}")
    lines += [f"{'any ACT step of any trajectory':<35}{evaluation.exact_accuracy('any_step'):.4f}", ""]
    lines.append(f"ACT steps  trajectories  exact ({options.chooser})   last step   pass@K")
    for number, depth, exact, last, passed in curve(evaluation):
        lines.append(f"{number * depth:>9}  {number:>5} x {depth:<4}  {exact:>15.4f}  {last:>10.4f}  {passed:>7.4f}")
    lines += ["", "with --halt-threshold  mean steps   exact"]
    for stop, steps, exact in zip(
        STOPS, *(evaluation.stops[name][:, -1, -1] for name in ("steps", "exact")), strict=True
    ):
        lines.append(f"{stop:>21g}  {steps:>10.2f}  {exact:.4f}")
    return lines


def curve(evaluation: TrajectoryEvaluation) -> list[tuple[int, int, float, float, float]]:
    """Returns (trajectories, depth, chosen, last step, pass) at the full depth, and for one trajectory."""
    names = f"{evaluation.options.chooser}/best", f"{evaluation.options.chooser}/last", "pass/best"
    places = [(0, j) for j in range(len(evaluation.depths))]
    places += [(i, len(evaluation.depths) - 1) for i in range(1, len(evaluation.trajectories))]
    return [
        (evaluation.trajectories[i], evaluation.depths[j], *(float(evaluation.shares[name][i, j]) for name in names))
        for i, j in places
    ]  # pyright: ignore[reportReturnType]


def settings(values: Mapping[str, Any]) -> str:
    """Describes the settings in words."""
    count = values["trajectories"]
    views, runs = (f" in {values[name]} {name}" if values[name] > 1 else "" for name in ("views", "runs"))
    chosen_by = "the first answer that two share" if values["agree"] else f"chosen by {values['chooser']}"
    return (
        f"{count} trajector{'y' if count == 1 else 'ies'} of {values['depth']} ACT steps{views}"
        f"{runs.replace(' in ', ' of ')} with noise {values['noise']:g}, {chosen_by}"
    )
