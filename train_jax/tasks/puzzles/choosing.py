"""Chooses the answer of several trajectories, and computes accuracy against the number of ACT steps."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int, UInt64

Chooser = Literal["halting", "vote", "both"]
Keep = Literal["best", "last"]
"""Which answer of a trajectory is a candidate: that of its highest halting logit, or that of its last ACT step."""
CHOOSERS: tuple[Chooser, ...] = get_args(Chooser)
KEEPS: tuple[Keep, ...] = get_args(Keep)


class Facts(NamedTuple):
    """What is known of every answer, by trajectory, ACT step and example."""

    logits: Float[np.ndarray, "trajectories steps n"]
    """By which training would halt."""
    marks: UInt64[np.ndarray, "trajectories steps n"]
    """Hashes of the answers."""
    exact: Bool[np.ndarray, "trajectories steps n"]
    accuracy: Float[np.ndarray, "trajectories steps n"]


class Choice(NamedTuple):
    """The trajectory whose answer is chosen, and the ACT step (from 0) of the answer, for each example."""

    trajectory: Int[np.ndarray, "n"]
    step: Int[np.ndarray, "n"]


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
    """Returns the trajectory whose candidate is the answer; among equal ones the first.

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


def chosen(facts: Facts, chooser: Chooser, keep: Keep) -> Choice:
    """Chooses among all trajectories after all of their ACT steps."""
    steps = candidate_steps(facts.logits, keep)[:, -1]
    trajectory = choose(chooser, *(_at(values, steps) for values in (facts.logits, facts.marks)))
    return Choice(trajectory, steps[trajectory, np.arange(len(trajectory))])


def milestones(most: int) -> list[int]:
    """Returns the numbers of trajectories or ACT steps of the curve: 1, 2, 3, 4, 6, 8, 12, … `most`."""
    powers = [2**n for n in range(most.bit_length())]
    return sorted({*powers, *(3 * power // 2 for power in powers[1:] if 3 * power // 2 < most), most})


def solved_at(
    facts: Facts, trajectories: Sequence[int], depths: Sequence[int]
) -> dict[str, Bool[np.ndarray, "trajectories depths n"]]:
    """Returns which examples are solved with the first trajectories and the first ACT steps only.

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
            logits, marks, exact = (_at(values, steps[:, depth - 1]) for values in facts[:3])
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
    """What early halting gives, by its threshold, number of trajectories, number of ACT steps, and example."""

    steps: Int[np.ndarray, "stops trajectories depths n"]
    """ACT steps until the example halted, those of all trajectories."""
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
    if not count:
        return math.nan, math.nan
    share, square = solved / count, deviations**2 / count
    middle, half = share + square / 2, deviations * math.sqrt(share * (1 - share) / count + square / count / 4)
    return (middle - half) / (1 + square), (middle + half) / (1 + square)
