"""The options of `trm evaluate` for runs of puzzles."""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar

from models_torch.ranges import Range
from train_jax.command_line import HelpPage
from train_jax.errors import UserError
from train_jax.tasks.evaluate import EvaluateOptions
from train_jax.tasks.puzzles.choosing import Chooser


@dataclasses.dataclass(frozen=True)
class PuzzleEvaluateOptions(EvaluateOptions):
    """With --trajectories, --noise or --depth, several noisy trajectories for each example, and the curve of accuracy
    against their ACT steps."""

    halt_early: bool = False
    """Use the answer of the first ACT step at which the model halts; a device stops when its whole batch has
    halted. With trajectories, the next one of a puzzle is computed only if the model has not halted (implies
    --refill)."""
    halt_threshold: Annotated[float, Range(0, 1)] | None = None
    """Halting probability above which a sequence halts; by default 0.5, as in training. 1 is never exceeded. Implies
    --halt-early."""
    refill: bool = False
    """With early halting, a row that has halted takes the next puzzle: the same answers in less time."""
    trajectories: Annotated[int, Range(1, 4096)] = 1
    """Trajectories per puzzle, each with its own noise; an answer is chosen among them."""
    noise: Annotated[float, Range(0, 1000)] = 0.0
    """Standard deviation of normal noise that is added to the latents after each ACT step."""
    depth: Annotated[int, Range(1, 4096)] | None = None
    """ACT steps of each trajectory; by default the halt limit of the run."""
    choose: Chooser = "halting"
    """How to choose the answer among trajectories: the highest halting logit of any ACT step, the vote of the
    trajectories, or the vote weighted by halting probability."""
    seed: Annotated[int, Range(0, 2**31 - 1)] = 0
    """Random seed of the noise."""
    results: str | None = None
    """Write the results with trajectories to this JSON file too."""
    predictions: str | None = None
    """Write inputs, answers and halting logits to this .npz file, for `trm score`."""
    submission: str | None = None
    """Write the two grids with the most votes for every ARC test input to this file, in Kaggle's format."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {
        "halting": HelpPage("early halting", ("halt_early", "halt_threshold", "refill")),
        "trajectories": HelpPage(
            "several noisy trajectories for each example",
            ("trajectories", "noise", "depth", "choose", "seed", "results"),
        ),
    }

    @property
    def halting(self) -> tuple[bool, float]:
        """Whether sequences halt early, and the threshold."""
        threshold = 0.5 if self.halt_threshold is None else self.halt_threshold
        return self.halt_early or self.halt_threshold is not None, threshold

    @property
    def has_trajectories(self) -> bool:
        """Whether the evaluation differs from the ordinary one: one trajectory, without noise, to the halt limit."""
        return self.trajectories > 1 or self.noise > 0 or self.depth is not None

    def refuse_conflicts(self) -> None:
        super().refuse_conflicts()
        halts, _ = self.halting
        if self.refill and not halts:
            raise UserError("--refill replaces sequences that halt early; add --halt-early or --halt-threshold")
        if not self.has_trajectories:
            if self.results is not None:
                raise UserError(f"--results {self.results} is for --trajectories, --noise or --depth; omit it")
        elif halts and self.choose != "halting":
            raise UserError(f"--choose {self.choose} needs all trajectories; omit it or --halt-early")
        elif halts and self.results is not None:
            raise UserError(f"--results {self.results} is for trajectories without --halt-early; omit one of them")
