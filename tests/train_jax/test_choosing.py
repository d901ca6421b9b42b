"""Choosing among trajectories, against published tables and a search without arrays."""

import math

import numpy as np
import pytest

from train_jax.puzzles import trajectories
from train_jax.puzzles.trajectories import Facts, chosen, solved_at, stopped_at


def by_search(facts: Facts, example: int, chooser: str, keep: str, count: int, depth: int) -> tuple[int, int]:
    candidates = []
    for trajectory in range(count):
        logits = facts.logits[trajectory, :depth, example].tolist()
        step = logits.index(max(logits)) if keep == "best" else depth - 1
        candidates.append((logits[step], int(facts.marks[trajectory, step, example]), step))

    def score(trajectory: int) -> float:
        logit, mark, _ = candidates[trajectory]
        if chooser == "halting":
            return logit
        if chooser == "vote":
            return sum(other == mark for _, other, _ in candidates)
        return sum(1 / (1 + math.exp(-logit)) for logit, other, _ in candidates if other == mark)

    scores = [score(trajectory) for trajectory in range(count)]
    best = next(i for i, each in enumerate(scores) if each >= max(scores) - 1e-12)
    return best, candidates[best][2]


def test_every_chooser_equals_a_search():
    rng = np.random.default_rng(0)
    shape = (5, 6, 40)
    marks = rng.integers(0, 4, shape).astype(np.uint64) << np.uint64(61)
    facts = Facts(rng.normal(size=shape).astype(np.float32), marks, marks == 0)
    counts = trajectories.milestones(5)
    depths = trajectories.milestones(6)
    assert (counts, depths) == ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6])
    solved = solved_at(facts, counts, depths)
    for chooser in trajectories.CHOOSERS:
        for keep in trajectories.KEEPS:
            choice = chosen(facts, chooser, keep)
            for example in range(40):
                assert choice[example] == by_search(facts, example, chooser, keep, 5, 6)[0]
                for i, count in enumerate(counts):
                    for j, depth in enumerate(depths):
                        trajectory, step = by_search(facts, example, chooser, keep, count, depth)
                        expected = facts.exact[trajectory, step, example]
                        assert solved[f"{chooser}/{keep}"][i, j, example] == expected
    assert (solved["any_step"] >= np.maximum(solved["pass/best"], solved["pass/last"])).all()
    assert (solved["pass/best"] >= np.maximum(solved["halting/best"], solved["vote/best"])).all()
    assert (solved["any_step"][-1, -1] == facts.exact.any(axis=(0, 1))).all()


def test_early_halting_equals_a_search():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, 4, 50)).astype(np.float32)
    exact = rng.random((3, 4, 50)) < 0.5
    facts = Facts(logits, np.zeros(logits.shape, np.uint64), exact)
    limits = (-math.inf, 0.0, 1.5, math.inf)
    stopped = stopped_at(facts, [1, 3], [2, 4], limits)
    for a, limit in enumerate(limits):
        for b, count in enumerate([1, 3]):
            for c, depth in enumerate([2, 4]):
                for n in range(50):
                    order = [(logits[k, d, n], exact[k, d, n]) for k in range(count) for d in range(depth)]
                    above = [step for step, (logit, _) in enumerate(order) if logit > limit]
                    steps = above[0] + 1 if above else len(order)
                    right = order[above[0]][1] if above else max(order, key=lambda each: each[0])[1]
                    assert (stopped.steps[a, b, c, n], stopped.exact[a, b, c, n]) == (steps, right)


def test_the_interval_is_that_of_published_tables():
    """Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I, method 3."""
    for solved, count, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)):
        assert trajectories.interval(solved, count) == pytest.approx((low, high), abs=1e-4)
