"""Views of puzzles: symmetries and their inverses, and evaluations that agree with one trajectory at a time."""

import math
import shutil

import numpy as np
import pytest
from support.markers import slow_unless
from support.scripts import run_script
from support.view_toy import evaluate, expected, puzzles, states

from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.puzzles.arc.kind import ArcKind
from train_jax.puzzles.maze.kind import MazeKind
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.scan import TrajectoryOptions, stack_runs
from train_jax.puzzles.sudoku.grid import GEOMETRIES
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.symmetries import words_for
from train_jax.puzzles.trajectories import STOPS
from train_jax.puzzles.views import symmetries_of_views, with_views
from train_jax.run.folder import RunFolder


def metadata_of(kind) -> Metadata:
    return Metadata(kind.seq_len, kind.vocab_size, 0, 0, 0, 1, 1, 1.0, 1, ("all",), kind.key)


@pytest.mark.parametrize("kind", [*map(SudokuKind, GEOMETRIES.values()), MazeKind(7)], ids=lambda kind: kind.key)
def test_the_symmetries_of_a_kind_are_those_of_its_transformation_and_have_an_inverse(kind):
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(0, kind.vocab_size, (2, 50, kind.seq_len)).astype(np.uint8)
    words = words_for(3, 1, slice(0, 50))
    symmetries = kind.symmetries(words)
    for original, image in zip((tokens, labels), kind.transform(tokens, labels, words), strict=True):
        assert (symmetries.image(original) == image).all()
        assert (symmetries.inverse.image(image) == original).all()


def test_views_are_different_and_depend_on_the_seed_and_the_number_alone():
    mazes = metadata_of(MazeKind(6))
    nine = metadata_of(SudokuKind(GEOMETRIES[9]))
    views = symmetries_of_views(mazes, first=0, count=40, views=8, seed=1)
    assert (views.cells[:, 0] == np.arange(36)).all()
    for of_puzzle in views.cells:
        assert len(np.unique(of_puzzle, axis=0)) == 8
    with pytest.raises(UserError, match=r"--views 9: 6x6 mazes have fewer symmetries; use at most 8"):
        symmetries_of_views(mazes, first=0, count=2, views=9, seed=1)
    whole = symmetries_of_views(nine, first=0, count=40, views=3, seed=1)
    part = symmetries_of_views(nine, first=25, count=5, views=2, seed=1)
    other = symmetries_of_views(nine, first=0, count=40, views=2, seed=2)
    for long, short, differs in zip(whole, part, other, strict=True):
        assert (long[25:30, :2] == short).all()
        assert (long[:, 1] != differs[:, 1]).any(axis=1).all()


def test_a_kind_without_symmetries_is_refused():
    with pytest.raises(UserError, match="contains ARC puzzles, expected Sudokus or mazes; omit --views"):
        symmetries_of_views(metadata_of(ArcKind()), first=0, count=1, views=2, seed=0)
    assert with_views(puzzles(), {}, np.arange(3), views=1, seed=0) == {}


def test_trajectories_take_runs_and_views_in_turn_until_all_pairs_were_there():
    for runs in range(1, 5):
        for views in range(1, 7):
            options = TrajectoryOptions(runs * views, 0.0, 1, views=views, runs=runs)
            pairs = [(options.run_of(t), options.view_of(t)) for t in range(runs * views)]
            assert len(set(pairs)) == runs * views
            assert [run for run, _ in pairs[:runs]] == list(range(runs))
            assert {view for _, view in pairs[: math.lcm(runs, views)]} == set(range(views))


@pytest.mark.parametrize("agree", [False, True])
@pytest.mark.parametrize("sources", slow_unless((4, 1).__eq__, [(4, 1), (1, 3), (3, 2)]), ids=str)
def test_the_answers_are_those_of_one_trajectory_at_a_time(sources, agree):
    views, runs = sources
    options = TrajectoryOptions(max(views, runs), 0.0, 4, views=views, runs=runs, agree=agree)
    by_hand = expected(options, math.log(0.8 / 0.2))
    result = evaluate(options, stack_runs(states(runs)), threshold=0.8)
    labels = puzzles().parts[0].labels
    exact = (by_hand["preds"] == labels).all(axis=1)
    assert (result.predictions[0] == by_hand["preds"]).all()
    assert result.metrics["steps"] == pytest.approx(by_hand["steps"].mean())
    assert result.metrics["solves"] == pytest.approx(by_hand["solves"].mean())
    assert result.metrics["exact_accuracy"] == pytest.approx(exact.mean())
    assert 1 < by_hand["solves"].mean() < options.trajectories and 0 < exact.mean() < 1
    if agree:
        always = views == 1  # the toy has two answers to what it sees
        assert by_hand["agreed"].any() and by_hand["agreed"].all() == always
        assert result.metrics["agreed"] == pytest.approx(by_hand["agreed"].mean())
        assert result.metrics["agreed_exact"] == pytest.approx((exact & by_hand["agreed"]).mean())
        return
    whole = evaluate(options, stack_runs(states(runs)), threshold=None)
    stop = STOPS.index(0.8), -1, -1
    assert whole.stops["steps"][stop] == pytest.approx(result.metrics["steps"])
    assert whole.stops["exact"][stop] == pytest.approx(result.metrics["exact_accuracy"])


@pytest.mark.slow
def test_one_device_and_eight_and_two_batch_sizes_give_the_same(tmp_path):
    for devices in (1, 8):
        run_script("views_on_devices", devices, tmp_path / f"{devices}.npz")
    one, eight = (dict(np.load(tmp_path / f"{devices}.npz")) for devices in (1, 8))
    for name, values in one.items():
        if not name.endswith("computed_steps"):
            other_batch = name.replace("8 ", "24 ", 1) if name.startswith("8 ") else name
            for others in (eight[name], one[other_batch]):
                np.testing.assert_allclose(values, others, rtol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_command_with_views_and_with_several_runs(capsys, finished_run, tmp_path):
    run = RunFolder(shutil.copytree(finished_run, tmp_path / "run"))
    line = ["evaluate", str(run.path), "--views", "3", "--depth", "3"]
    assert main([*line, "--halt-threshold", "0.9", "--predictions", str(tmp_path / "views.npz")]) == 0
    output = capsys.readouterr().out
    assert "3 trajectories of 3 ACT steps in 3 views with noise 0" in output and "solves" in output
    assert main(["summary", str(run.path)]) == 0
    assert "ACT steps on average, up to 3 views of 3, until" in capsys.readouterr().out
    inputs = dict(np.load(tmp_path / "views.npz"))
    assert inputs["preds"].shape == inputs["inputs"].shape
    assert main([*line, "--agree"]) == 0 and "agreed" in capsys.readouterr().out
    assert main([*line, "--results", str(tmp_path / "results.json")]) == 0
    capsys.readouterr()
    ordinary = run.halted_early("test").read_text()
    assert main(["evaluate", str(run.path), str(run.path), "--halt-threshold", "0.9"]) == 0
    assert "2 trajectories of 4 ACT steps of 2 runs" in capsys.readouterr().out
    assert run.halted_early("test").read_text() == ordinary


def test_options_that_do_not_go_together(capsys, finished_run):
    for options, message in (
        (["--views", "3", "--trajectories", "2"], "--trajectories 2 are fewer than the 3 views; use --trajectories 3"),
        (["--agree"], "--agree needs several trajectories; add --views, --trajectories or further runs"),
        ([str(finished_run), "--weights", "w.pt"], "--weights w.pt replaces the weights of one run; give one run"),
        (["--views", "0"], "--views is 0; use at least 1"),
    ):
        assert main(["evaluate", str(finished_run), *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("trm: ") and error.count("\n") == 1 and message in error
