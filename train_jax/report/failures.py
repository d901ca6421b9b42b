"""Analyses the wrong answers of a run: by cell, by difficulty and by broken rule, with examples."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Integer

from train_jax.report.measured import Answers, counted_labels
from train_jax.tasks.puzzles.kind import Kind

BLOCK = 16_384
"""Puzzles compared at a time, to limit the memory."""
EXAMPLES = 3
"""Number of solved and of failed puzzles that are drawn."""


@dataclass(frozen=True)
class Share:
    """The number of puzzles and of failed puzzles in one range of difficulty."""

    name: str
    count: int
    failed: int


@dataclass(frozen=True)
class Failures:
    """Statistics of failed puzzles. A puzzle fails if its answer after the last ACT step differs from a label."""

    count: int
    failed: int
    wrong_cells: Integer[np.ndarray, "failed"]
    """Number of wrong cells of each failed puzzle."""
    unknown_count: Integer[np.ndarray, "cells"]
    """For each cell, the number of puzzles whose input does not give it."""
    wrong_count: Integer[np.ndarray, "cells"]
    """For each cell, the number of these puzzles in which it is wrong."""
    by_difficulty: dict[str, list[Share]]
    broken_rules: dict[str, int]
    """For each rule, the number of failed answers that break it."""
    no_rule_broken: int
    """Number of failed answers that break no rule."""
    solved_earlier: int
    """Number of failed puzzles that were solved after an earlier ACT step."""
    predicted_correct: int
    """Number of failed puzzles with a halting logit above 0, which predicts a correct answer."""
    solved_examples: list[int]
    failed_examples: list[int]

    @property
    def error_rate(self) -> Float[np.ndarray, "cells"]:
        """The error rate of each cell; NaN if every input gives it."""
        return np.where(self.unknown_count > 0, self.wrong_count / np.maximum(self.unknown_count, 1), np.nan)


RATED = 20_000
"""Up to this number of puzzles, difficulties that need a solver are shown; the hardest puzzles take seconds."""


def failures_of(answers: Answers, kind: Kind, solved: Bool[np.ndarray, "steps examples"]) -> Failures:
    """Computes the statistics; `kind` is the kind of the data set, `solved` the result of `by_act_step`."""
    labelled = np.any(counted_labels(answers.labels, answers.data.ignore_label_id), axis=1)
    failed = labelled & ~solved[-1]
    unknown_count, wrong_count = np.zeros((2, kind.drawing.rows * kind.drawing.cols), int)
    wrong_cells = np.zeros(len(failed), int)
    difficulties: dict[str, list[np.ndarray]] = {}
    rules: dict[str, int] = {}
    no_rule_broken = 0
    for start in range(0, len(failed), BLOCK):
        rows = slice(start, start + BLOCK)
        inputs, answer, solution = (
            kind.values(np.asarray(tokens[rows]))
            for tokens in (answers.inputs, answers.predictions[-1], answers.labels)
        )
        differs = (answer != solution) & kind.checking.scored_cells(solution) & labelled[rows, None]
        unknown = kind.checking.unknown_cells(inputs, solution) & labelled[rows, None]
        unknown_count += unknown.sum(axis=0)
        wrong_count += (differs & unknown).sum(axis=0)
        wrong_cells[rows] = differs.sum(axis=1)
        for name, values in kind.checking.difficulties(inputs, solution, thorough=len(failed) <= RATED).items():
            difficulties.setdefault(name, []).append(values)
        here = failed[rows]
        broken = kind.checking.broken_rules(inputs[here], answer[here], solution[here])
        for name, which in broken.items():
            rules[name] = rules.get(name, 0) + int(which.sum())
        no_rule_broken += int((~np.any(list(broken.values()), axis=0)).sum())
    hard = {name: np.concatenate(parts) for name, parts in difficulties.items()}
    hardest = next(iter(hard.values()))
    return Failures(
        count=int(labelled.sum()),
        failed=int(failed.sum()),
        wrong_cells=wrong_cells[failed],
        unknown_count=unknown_count,
        wrong_count=wrong_count,
        by_difficulty={name: shares(values[labelled], failed[labelled]) for name, values in hard.items()},
        broken_rules=rules,
        no_rule_broken=no_rule_broken,
        solved_earlier=int((failed & solved.any(axis=0)).sum()),
        predicted_correct=int((failed & (answers.q_halt_logits[-1] > 0)).sum()),
        solved_examples=spread(np.flatnonzero(solved[-1]), hardest),
        failed_examples=spread(np.flatnonzero(failed), wrong_cells),
    )


def shares(values: Integer[np.ndarray, "n"], failed: Bool[np.ndarray, "n"], most: int = 8) -> list[Share]:
    """Groups puzzles by value or, for more than `most` values, by ranges with about equally many puzzles."""
    distinct = np.unique(values)
    lows = distinct
    if len(distinct) > most:
        lows = np.unique(np.quantile(values, np.arange(most) / most, method="higher"))
    bins = np.searchsorted(lows, values, side="right") - 1
    ranges = []
    for number, low in enumerate(lows.tolist()):
        inside = bins == number
        high = int(values[inside].max())
        name = f"{low:,}" if high == low else f"{low:,} to {high:,}"
        ranges.append(Share(name, int(inside.sum()), int(failed[inside].sum())))
    return ranges


def spread(examples: Integer[np.ndarray, "n"], values: Integer[np.ndarray, "all"], count: int = EXAMPLES) -> list[int]:
    """Selects the examples with the lowest and the highest value, and others evenly spaced between them."""
    if not len(examples):
        return []
    ordered = examples[np.argsort(values[examples], kind="stable")]
    places = np.unique(np.round(np.linspace(0, len(ordered) - 1, min(count, len(ordered)))).astype(int))
    return ordered[places].tolist()
