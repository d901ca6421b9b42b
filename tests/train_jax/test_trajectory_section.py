"""The report's section about trajectories: from results written by hand, and what it does with damaged ones."""

import json

import numpy as np
import pytest
from support.documents import Balanced, words

from train_jax.report import puzzle_page as section
from train_jax.report.answers import Answers, PuzzleResults
from train_jax.run.folder import RunFolder
from train_jax.tasks.puzzles.maze.generator import generate
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.trajectories import load

COUNT, SIZE = 40, 6
MAZES = generate(COUNT, SIZE, 6, "corridors", np.random.default_rng(0), lambda *_: None)
METADATA = Metadata(SIZE**2, 6, 0, 0, 0, 1, COUNT, 1.0, COUNT, ("all",), kind=f"maze-{SIZE}")
NAMES = [f"{chooser}/{keep}" for chooser in ("halting", "vote", "both", "pass") for keep in ("best", "last")]


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    """Two trajectories of three steps; with more of both, the first mazes are solved first."""
    folder = RunFolder(tmp_path)
    folder.trajectories("test").parent.mkdir()
    points = [
        {
            "trajectories": count,
            "depth": depth,
            "act_steps": count * depth,
            "exact_accuracy": {name: count * depth / 8 for name in NAMES} | {"any_step": 0.875},
        }
        for count in (1, 2)
        for depth in (1, 2, 3)
    ]
    values = {"step": 1200, "trajectories": 2, "noise": 0.25, "depth": 3, "chooser": "halting", "seed": 0}
    folder.trajectories("test").write_text(json.dumps(values | {"metrics": {}, "points": points}))
    solved = np.array([[np.arange(COUNT) < 6 * count * depth for depth in (1, 2, 3)] for count in (1, 2)])
    np.savez_compressed(folder.trajectories_solved("test"), solved=solved)
    return folder


def answers() -> Answers:
    logits = np.zeros((1, COUNT))
    return Answers(METADATA, MAZES.inputs, MAZES.solutions, MAZES.solutions[None], logits)


def test_the_section_shows_the_curve_and_the_loss_of_the_choice(folder):
    shown = section.trajectory_section(PuzzleResults(answers(), trajectories=load(folder, "test")))
    assert shown is not None
    Balanced(shown)
    text = words(shown)
    assert "2 trajectories of 3 ACT steps with noise 0.25, chosen by halting: 75.00% of the puzzles are solved" in text
    assert "Some trajectory is right for 75.00% (pass@2), and some ACT step of some trajectory for 87.50%" in text
    assert "1 x 2 2 25.00% 25.00% 25.00%" in text and "2 x 3 6 75.00% 75.00% 75.00%" in text
    assert "2 x 1" not in text
    assert "solved by steps of the path" in text


def test_each_range_of_difficulty_has_its_own_shares(folder):
    results = load(folder, "test")
    assert results is not None
    ((name, _, rows),) = section._solved_by_difficulty(answers(), results)
    steps = (MAZES.solutions == 5).sum(axis=1) + 1
    assert name == "steps of the path" and len(rows) == section.GROUPS
    for label, count, one, both in rows:
        low, high = (int(part) for part in (label.split(" to ") * 2)[:2])
        inside = (steps >= low) & (steps <= high)
        assert count == str(inside.sum())
        for shown, solved in ((one, 18), (both, 36)):
            assert shown == f"{100 * np.mean(np.flatnonzero(inside) < solved):.2f}%"


def test_without_results_or_with_others_nothing_is_shown_by_difficulty(folder):
    assert section.trajectory_section(PuzzleResults()) is None
    folder.trajectories_solved("test").write_bytes(b"no archive")
    results = load(folder, "test")
    assert results is not None and results.solved is None
    assert section._solved_by_difficulty(answers(), results) == []
    assert section.trajectory_section(PuzzleResults(trajectories=results)) is not None


@pytest.mark.parametrize("change", [{"points": []}, {"points": 3}, {"noise": "x"}, {"chooser": "other"}])
def test_damaged_results_are_refused(folder, change):
    values = json.loads(folder.trajectories("test").read_text()) | change
    folder.trajectories("test").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"."):
        load(folder, "test")
