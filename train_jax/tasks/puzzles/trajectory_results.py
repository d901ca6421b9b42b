"""Results of an evaluation with several trajectories: as files, for a terminal, and as points of a curve."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Bool

from train_jax.run.files import local_copy, whole_file, write_text
from train_jax.run.folder import RunFolder
from train_jax.run.untrusted import DamagedError, read_arrays
from train_jax.tasks.puzzles.choosing import CHOOSERS, KEEPS, STOPS, interval
from train_jax.tasks.puzzles.trajectory_evaluation import TrajectoryEvaluation

LARGEST_BYTES = 2**32


@dataclasses.dataclass(frozen=True)
class Results:
    """What the report shows of an evaluation with trajectories."""

    values: dict[str, Any]
    """The content of the JSON file; see `results_of`."""
    solved: Bool[np.ndarray, "trajectories depths examples"] | None
    """The examples that were solved; None if they were not kept."""


def results_of(evaluation: TrajectoryEvaluation, step: int) -> dict[str, Any]:
    """Returns settings, metrics and the curve as JSON: exact accuracies by name, as in `choosing.solved_at`, and with
    early halting, as in `choosing.stopped_at`."""
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
        for i, trajectories in enumerate(evaluation.trajectories)
        for j, depth in enumerate(evaluation.depths)
    ]
    settings = dataclasses.asdict(evaluation.options)
    return {"step": step, **settings, "metrics": evaluation.evaluation.metrics, "points": points}


def save(evaluation: TrajectoryEvaluation, folder: RunFolder, split: str, step: int) -> None:
    """Writes the results, and which examples were solved, to the evaluations of a run."""
    with whole_file(folder.trajectories_solved(split)) as scratch, scratch.open("wb") as file:
        np.savez_compressed(file, solved=evaluation.solved)
    write_text(folder.trajectories(split), json.dumps(results_of(evaluation, step), indent=1))


def load(folder: RunFolder, split: str) -> Results | None:
    """Reads what `save` wrote; None if there is nothing. Raises `ValueError` for files of another format."""
    path = folder.trajectories(split)
    if not path.is_file():
        return None
    values = json.loads(path.read_text())
    _check(values)
    try:
        with local_copy(folder.trajectories_solved(split)) as local:
            solved = read_arrays(local, ("solved",), largest_bytes=LARGEST_BYTES)["solved"]
    except (DamagedError, FileNotFoundError):
        return Results(values, None)
    trajectories, depths = (len({point[name] for point in values["points"]}) for name in ("trajectories", "depth"))
    fits = solved.dtype == bool and solved.ndim == 3 and solved.shape[:2] == (trajectories, depths)
    return Results(values, solved if fits else None)


def _check(values: Any) -> None:
    try:
        for name in ("step", "trajectories", "noise", "depth", "seed"):
            float(values[name])
        names = {f"{values['chooser']}/{keep}" for keep in KEEPS} | {"pass/best", "any_step"}
        for point in values["points"]:
            for name in ("trajectories", "depth", "act_steps"):
                float(point[name])
            for name in names:
                float(point["exact_accuracy"][name])
        if not values["points"]:
            raise ValueError("it has no points")
    except (KeyError, TypeError) as error:
        raise ValueError(f"no results of trajectories: {error!r}") from error


def table(evaluation: TrajectoryEvaluation) -> list[str]:
    """Formats the comparison of the choosers, and the curve of accuracy against ACT steps, for a terminal."""
    options, count = evaluation.options, evaluation.evaluation.metrics["count"]
    lines = ["chosen by     highest halting logit    last ACT step"]
    for name in (*CHOOSERS, "pass"):
        shares = [evaluation.exact_accuracy(f"{name}/{keep}") for keep in KEEPS]
        shown = f"pass@{options.trajectories}" if name == "pass" else name
        lines.append(f"{shown:<12}{_with_interval(shares[0], count):>23}{shares[1]:>17.4f}")
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


def _with_interval(share: float, count: float) -> str:
    low, high = interval(round(share * count), round(count))
    return f"{share:.4f} ({low:.4f}-{high:.4f})"


def settings(values: Mapping[str, Any]) -> str:
    """Describes the settings in words."""
    count = values["trajectories"]
    return (
        f"{count} trajector{'y' if count == 1 else 'ies'} of {values['depth']} ACT steps with noise "
        f"{values['noise']:g}, chosen by {values['chooser']}"
    )
