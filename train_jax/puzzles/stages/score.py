"""`trm score DATA_DIR FILE …`: counts the votes in files of predictions for an ARC data set."""

import dataclasses
from typing import Annotated

import tyro

from train_jax.errors import UserError
from train_jax.puzzles.voting import score, write_submission


@dataclasses.dataclass(frozen=True)
class Score:
    """Count the votes in files of predictions for an ARC data set: from all hosts of an evaluation, or from several.

    The answer to every augmentation is transformed back and votes for its puzzle; grids are ranked by votes, then by
    mean halting probability. pass@K is the share of test inputs whose solution is among the first K grids, averaged
    over puzzles.
    """

    data_dir: Annotated[str, tyro.conf.Positional]
    """Data set of the predictions, built by `trm build-data arc` or the published builder."""
    files: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Files of `trm evaluate --predictions`, in any order."""
    submission: str | None = None
    """Write the two grids with the most votes for every test input to this file, in Kaggle's format."""


def main(config: Score) -> None:
    if not config.files:
        raise UserError("no files of predictions; give at least one file of `trm evaluate --predictions`")
    scores = score(config.data_dir, config.files)
    print(f"{config.data_dir}, votes of {len(config.files)} file{'s' * (len(config.files) > 1)}:")
    for name, value in scores.figures.items():
        print(f"  {name:<16} {value:.4f}")
    if not scores.figures:
        print("  no solution is public, so there are no scores")
    if scores.unanswered:
        print(f"  {scores.unanswered} test inputs have no vote")
    if config.submission is not None:
        write_submission(config.submission, scores)
        print(f"  {config.submission}: two attempts for every test input")
