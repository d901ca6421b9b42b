"""The report's section about trajectories, from results written by hand; damaged results are refused."""

import pytest
from support.documents import Balanced, words

from train_jax.report import puzzle_page as section
from train_jax.report.answers import PuzzleResults
from train_jax.tasks.puzzles.trajectories import checked_results

NAMES = [f"{chooser}/{keep}" for chooser in ("halting", "vote", "both", "pass") for keep in ("best", "last")]
POINTS = [
    {
        "trajectories": count,
        "depth": depth,
        "act_steps": count * depth,
        "exact_accuracy": {name: count * depth / 8 for name in NAMES} | {"any_step": 0.875},
    }
    for count in (1, 2)
    for depth in (1, 2, 3)
]
VALUES = {"step": 1200, "trajectories": 2, "noise": 0.25, "depth": 3, "chooser": "halting", "seed": 0}
VALUES |= {"metrics": {}, "points": POINTS}


def test_the_section_shows_the_curve_and_the_loss_of_the_choice():
    shown = section.trajectory_section(PuzzleResults(trajectories=checked_results(VALUES)))
    assert shown is not None
    Balanced(shown)
    text = words(shown)
    assert "2 trajectories of 3 ACT steps with noise 0.25, chosen by halting: 75.00% of the puzzles are solved" in text
    assert "Some trajectory is right for 75.00% (pass@2), and some ACT step of some trajectory for 87.50%" in text
    assert "1 x 2 2 25.00% 25.00% 25.00%" in text and "2 x 3 6 75.00% 75.00% 75.00%" in text
    assert "2 x 1" not in text
    assert section.trajectory_section(PuzzleResults()) is None


@pytest.mark.parametrize("change", [{"points": []}, {"points": 3}, {"noise": "x"}, {"chooser": "other"}])
def test_damaged_results_are_refused(change):
    with pytest.raises(ValueError, match=r"."):
        checked_results(VALUES | change)
