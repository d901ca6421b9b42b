"""The commands `trm evaluate`, `export`, `report`, `summary` and `status` for runs of puzzles.

Importing this module imports neither JAX nor PyTorch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from train_jax.errors import UserError
from train_jax.report import commands
from train_jax.report.commands import Commands, Console, Metric
from train_jax.run.folder import RunFolder
from train_jax.storage.json_files import COUNT, NUMBER, misfit, optional, read_object

AGREEING_SHARE = 0.999
"""Least share of puzzles with equal answers. The logits of two frameworks differ by rounding, which can change the
argmax of nearly equal logits."""


@dataclasses.dataclass(frozen=True)
class ExportCheck(commands.ExportCheck):
    """Comparison of PyTorch's answers, with the exported weights, with JAX's answers."""

    puzzles: int
    agree: int
    """Number of puzzles whose tokens are all equal after the last ACT step."""
    torch_exact_accuracy: float
    """Share of the puzzles that PyTorch solves."""
    max_logit_difference: float
    """Largest |JAX - PyTorch| of the halting logits after the last ACT step."""

    @property
    def agrees(self) -> bool:
        return self.agree >= AGREEING_SHARE * self.puzzles

    @property
    def details(self) -> str:
        return f"; halting logits differ by at most {self.max_logit_difference:.1e}"

    def __str__(self) -> str:
        return (
            f"PyTorch {'agrees' if self.agrees else 'DISAGREES'}: the same answer on {self.agree} of {self.puzzles} "
            f"puzzles ({self.agree / self.puzzles:.2%}, float32), exact accuracy in PyTorch "
            f"{self.torch_exact_accuracy:.4f}"
        )


class PuzzleCommands(Commands):
    """The commands after training, for runs of puzzles."""

    metric = Metric("exact_accuracy", "exact", "{:.2%}")
    figures: ClassVar = {"count": COUNT} | dict.fromkeys(("exact_accuracy", "accuracy"), optional(NUMBER))
    checks_exports = draws_pictures = True
    check_class = ExportCheck
    options = "train_jax.puzzles.evaluate:PuzzleEvaluateOptions"

    def model(self, run: Any) -> Any:
        from train_jax.puzzles.solving import Predictor

        return Predictor(run)

    def summary(self, finished: dict[str, Any], folder: RunFolder, weights: str) -> str:
        if not finished["count"]:
            return "held-out accuracy unknown: no solution of these puzzles is public"
        if reason := misfit(finished, dict.fromkeys(("exact_accuracy", "accuracy"), NUMBER)):
            raise UserError(f"{folder.finished} cannot be read ({reason}); remove it, and train again to write it")
        line = (
            f"held-out exact accuracy {finished['exact_accuracy']:.4f} with "
            f"{weights} weights on {finished['count']:.0f} puzzles unseen under symmetry "
            f"(token accuracy {finished['accuracy']:.4f})"
        )
        return f"{line}{_with_trajectories(finished, folder)}"

    def check_export(self, run: Any, weights: Path, console: Console) -> ExportCheck:
        from train_jax.puzzles.export_check import check_export

        return check_export(run, weights, console)

    def page(self, files: Any) -> str:
        from train_jax.puzzles.page import page

        return page(files)

    def picture(self, files: Any) -> str:
        from train_jax.puzzles.page import picture

        return picture(files)


def _with_trajectories(finished: dict[str, Any], folder: RunFolder) -> str:
    """Returns a line about the last evaluation with trajectories that halt early; "" if there is none of this step."""
    names = ("trajectories", "depth", "noise", "step", "exact_accuracy", "steps", "threshold")
    try:
        figures = read_object(folder.halted_early("test"), dict.fromkeys(names, NUMBER), remedy="")
    except UserError:
        return ""
    count = figures["trajectories"]
    depth = figures["depth"]
    noise = figures["noise"]
    of_this_step = figures["step"] == finished["train_steps"]
    of_views = figures.get("views") == count  # absent in the files of older versions
    search = f"up to {count} {'views' if of_views else 'trajectories'} of {depth}" if count > 1 else f"up to {depth}"
    noisy = f" with noise {noise:g}" if noise else ""
    until = "until two have the same answer, each " if figures.get("agree") else ""
    line = (
        f"\nexact accuracy {figures['exact_accuracy']:.4f} when thinking longer: {figures['steps']:.2f} ACT steps on "
        f"average, {search}{noisy}, {until}until the halting probability exceeds {figures['threshold']:g}"
    )
    return line if of_this_step else ""
