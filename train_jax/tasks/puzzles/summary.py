"""The lines of `trm summary` about a finished run of puzzles."""

import json
from typing import Any

from train_jax.run.folder import RunFolder


def summary(finished: dict[str, Any], folder: RunFolder, weights: str) -> str:
    if not finished["count"]:
        return "held-out accuracy unknown: no solution of these puzzles is public"
    line = (
        f"held-out exact accuracy {finished['exact_accuracy']:.4f} with "
        f"{weights} weights on {finished['count']:.0f} puzzles unseen under symmetry "
        f"(token accuracy {finished['accuracy']:.4f})"
    )
    return f"{line}{_with_trajectories(finished, folder)}"


def _with_trajectories(finished: dict[str, Any], folder: RunFolder) -> str:
    """Returns a line about the last evaluation with trajectories that halt early; "" if there is none of this step."""
    try:
        figures = json.loads(folder.halted_early("test").read_text())
        count, depth, noise = figures["trajectories"], figures["depth"], figures["noise"]
        of_this_step = figures["step"] == finished["train_steps"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""
    search = f"up to {count} trajectories of {depth}" if count > 1 else f"up to {depth}"
    noisy = f" with noise {noise:g}" if noise else ""
    line = (
        f"\nexact accuracy {figures['exact_accuracy']:.4f} when thinking longer: {figures['steps']:.2f} ACT steps on "
        f"average, {search}{noisy}, until the halting probability exceeds {figures['threshold']:g}"
    )
    return line if of_this_step else ""
