"""The report's failures: counts of faults that were put there by hand, and the page of a run in every state."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from support.documents import Balanced, words
from support.presets import with_fields

from train_jax.errors import UserError
from train_jax.report.answers import Answers, Failures, Share, by_act_step, failures_of, read_results, shares
from train_jax.report.puzzle_page import failure_section, page, picture
from train_jax.report.run_page import read_run_files
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.tasks.puzzles.arc.grid import END_TOKEN, SIDE
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.building import write_dataset
from train_jax.tasks.puzzles.kinds import kind_of, trace_of
from train_jax.tasks.puzzles.maze.grid import GOAL, OPEN, PATH, START, WALL
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.metadata import Metadata
from train_jax.tasks.puzzles.metrics import HaltingCurve, Point
from train_jax.tasks.puzzles.metrics import to_json as curve_to_json
from train_jax.tasks.puzzles.sudoku.grid import tokens_of

SOLUTION = np.array([1, 2, 3, 4, 3, 4, 1, 2, 2, 1, 4, 3, 4, 3, 2, 1], np.uint8)
INPUTS = np.where(np.arange(16) % 2, SOLUTION, 0).astype(np.uint8)


def edited(grid: np.ndarray, **changes: int) -> np.ndarray:
    """`c5=2`: cell 5 holds a 2."""
    grid = grid.copy()
    for cell, value in changes.items():
        grid[int(cell[1:])] = value
    return grid


def answers_to(inputs, predictions, labels, vocab_size: int) -> Answers:
    """`predictions`: by ACT step."""
    count, length = len(labels), len(labels[0])
    data = Metadata(length, vocab_size, 0, 0, 0, 1, count, 1.0, count, ("all",))
    logits = np.linspace(1, -1, count)[None].repeat(len(predictions), axis=0).astype(np.float32)
    return Answers(data, np.array(inputs), np.array(labels), np.array(predictions), logits)


def sudoku_answers() -> Answers:
    """Four of six fail: a given overwritten into a clash, a cell left empty, another solution, one once right."""
    wrong_given = edited(SOLUTION, c1=3)
    empty = edited(SOLUTION, c0=0, c2=0)
    exchanged = np.array([0, 2, 1, 3, 4], np.uint8)[SOLUTION]
    open_inputs = np.where(SOLUTION > 2, SOLUTION, 0).astype(np.uint8)
    last = [SOLUTION, wrong_given, empty, exchanged, edited(SOLUTION, c0=2), SOLUTION]
    first = [SOLUTION, wrong_given, SOLUTION, SOLUTION, edited(SOLUTION, c0=2), wrong_given]
    inputs = [INPUTS, INPUTS, INPUTS, open_inputs, INPUTS, edited(INPUTS, c1=0)]
    predictions = [[tokens_of(grid) for grid in step] for step in (first, last)]
    return answers_to([tokens_of(each) for each in inputs], predictions, [tokens_of(SOLUTION)] * 6, 6)


def failures(answers: Answers) -> Failures:
    kind = kind_of(answers.data)
    assert kind is not None
    return failures_of(answers, kind, by_act_step(answers))


def test_failed_sudokus_are_counted():
    answers = sudoku_answers()
    result = failures(answers)
    assert (result.count, result.failed) == (6, 4)
    assert (result.solved_earlier, result.predicted_correct) == (2, 2)
    assert result.wrong_cells.tolist() == [1, 2, 8, 1]
    assert result.by_difficulty == {
        "empty cells": [Share("8", 5, 4), Share("9", 1, 0)],
        "guesses of a solver": [Share("3", 6, 4)],
    }
    answers.labels[1] = 0
    result = failures(answers)
    assert (result.count, result.failed) == (5, 3) and len(result.wrong_cells) == 3, "no labels, so left out"


def test_a_longer_path_through_a_maze_is_a_mistake():
    maze = np.full((5, 5), WALL, np.uint8)
    maze[0, :] = maze[2, :] = maze[1, 0] = maze[1, 4] = OPEN
    maze[0, 0], maze[2, 0] = START, GOAL
    maze = maze.ravel()
    solution = edited(maze, c5=PATH)
    around = np.where((maze == OPEN) & (np.arange(25) != 5), PATH, maze).astype(np.uint8)
    checking = MazeKind(5).checking
    assert "a path of 10 steps, the shortest has 2" in checking.mistakes(maze, around, solution)
    assert checking.difficulties(maze[None], solution[None], thorough=True) == {"steps of the path": [2]}


def canvas(rows: int, cols: int, colour: int) -> np.ndarray:
    grid = np.zeros((SIDE, SIDE), np.uint8)
    grid[:rows, :cols] = colour + 2
    grid[rows, :cols] = grid[:rows, cols] = END_TOKEN
    return grid.ravel()


def test_cells_outside_of_an_arc_grid_are_not_counted():
    solution = canvas(2, 3, 4)
    noise = np.where(solution == 0, 7, solution).astype(np.uint8)
    answers = [canvas(3, 3, 4), canvas(2, 2, 4), edited(solution, c1=9)]
    answers += [edited(solution, c0=END_TOKEN, c1=END_TOKEN), noise]
    result = failures(answers_to([solution] * 5, [answers], [solution] * 5, 12))
    assert (result.failed, result.wrong_cells.tolist()) == (4, [3, 5, 1, 2])
    assert result.by_difficulty == {"cells of the solution": [Share("6", 5, 4)]}
    trace = trace_of(ArcKind(), solution, np.array([noise]), np.zeros(1), solution)
    assert (trace.kind.drawing.rows, trace.kind.drawing.cols) == (3, 4)
    assert not trace.wrong(1).any() and trace.mistakes(1) == []


def test_shares_by_value_and_by_ranges():
    values = np.array([3, 3, 5, 5, 5, 9])
    assert shares(values, values > 4) == [Share("3", 2, 0), Share("5", 3, 3), Share("9", 1, 1)]
    many = np.arange(1000)
    result = shares(many, many >= 900, most=4)
    assert [each.count for each in result] == [250] * 4 and [each.failed for each in result] == [0, 0, 0, 100]
    assert [each.name for each in result] == ["0 to 249", "250 to 499", "500 to 749", "750 to 999"]
    skewed = np.concatenate([np.zeros(990, int), np.arange(1, 11)])
    assert sum(each.count for each in shares(skewed, skewed > 5)) == 1000
    assert shares(skewed, skewed > 5)[0] == Share("0 to 10", 1000, 5)


def test_the_section_counts_the_failures():
    answers = sudoku_answers()
    text = words(failure_section(answers, by_act_step(answers)))
    assert "predicts 2 of these answers to be correct, and 2 had been correct after an earlier step" in text
    assert "by empty cells empty cells puzzles failed share 8 5 4 80.00% 9 1 0 0.00%" in text
    solved = dataclasses.replace(answers, predictions=answers.labels[None].repeat(2, axis=0))
    assert "All 6 test puzzles are solved." in words(failure_section(solved, by_act_step(solved)))
    unknown = dataclasses.replace(answers, data=dataclasses.replace(answers.data, vocab_size=77))
    assert "Not shown: the data set contains neither" in words(failure_section(unknown, by_act_step(unknown)))


CURVE = HaltingCurve(
    tuple(Point(m, e, 0.9, t) for m, e, t in ((1, 0.5, 0.0), (1.5, 0.625, 0.5), (2.0, 0.75, 0.9), (4, 0.75, 1.0))),
    tuple(Point(step, e, 0.9) for step, e in ((1, 0.5), (2, 0.6), (3, 0.7), (4, 0.75))),
)


@pytest.fixture
def run_dir(tmp_path) -> Path:
    answers, folder = sudoku_answers(), RunFolder(tmp_path / "run")
    arrays = {"inputs": answers.inputs, "labels": answers.labels, "puzzle_identifiers": np.zeros(6, np.int32)}
    arrays |= {f"{name}_indices": np.arange(7, dtype=np.int32) for name in ("puzzle", "group")}
    split = (answers.data, arrays)
    write_dataset(tmp_path / "data", {"train": split, "test": split}, ["<blank>"], {"made": "by the tests"})
    folder.evaluation("test").parent.mkdir(parents=True)
    config = with_fields(preset("tiny"), {"halt_max_steps": 2, "data_dir": str(tmp_path / "data")})
    folder.config.write_text(to_json(config))
    folder.evaluation("test").write_text(json.dumps({"exact_accuracy": 2 / 6, "accuracy": 0.9, "count": 6}))
    np.savez(folder.predictions("test"), predictions=answers.predictions, q_halt_logits=answers.q_halt_logits)
    folder.halting_curve("test").write_text(curve_to_json(CURVE))
    return folder.path


def test_a_page_in_every_state(run_dir):
    folder = RunFolder(run_dir)

    def shown():
        return words(page(read_run_files(str(run_dir))))

    early = {"threshold": 0.9, "exact_accuracy": 0.75, "steps": 2.0, "computed_steps": 3.5, "step": 1200}
    folder.halted_early("test").write_text(json.dumps(early))
    assert "script" not in Balanced(page(read_run_files(str(run_dir)))).tags
    text = shown()
    for part in (
        "At 0.5, where training halts, 62.50% are solved after 1.50 steps on average.",
        "At 0.9 the accuracy does not decrease: 75.00% are solved after 2.00 steps on average.",
        "halt probability above 0.9 2.00 75.00% 90.00%",
        "all after 3 3.00 70.00% 90.00%",
        "at step 1,200 of training, threshold 0.9: 75.00% exact after 2.00 steps on average; 3.50 were",
        "4 of 6 test puzzles are not solved",
        "after the last ACT step: 1 of 16 cells wrong; 1 of the givens overwritten; digit 3 more than once",
    ):
        assert part in text
    folder.halted_early("test").write_text(json.dumps(early | {"trajectories": 8, "noise": 0.2, "depth": 16}))
    assert "threshold 0.9, up to 8 trajectories of 16 ACT steps with noise 0.2: 75.00% exact" in shown()
    folder.halted_early("test").write_text("{}")
    folder.halting_curve("test").unlink()
    assert "Not shown: it needs an evaluation on the whole test set" in shown()
    with np.load(folder.predictions("test")) as arrays:
        last = {name: arrays[name][-1:] for name in arrays}
    np.savez(folder.predictions("test"), **last)
    text = shown()
    assert "only the answers after ACT step 2 are kept" in text and "4 of 6 test puzzles are not solved" in text
    with pytest.raises(UserError, match="not kept for large test sets"):
        picture(read_run_files(str(run_dir)))
    config = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps(config | {"data_dir": f"{config['data_dir']},{config['data_dir']}"}))
    assert shown().count("Not shown: answers are shown only for runs on one data set") == 2
    folder.config.write_text(json.dumps(config))
    folder.predictions("test").unlink()
    assert shown().count("Not shown: the run has not been evaluated on its whole test set") == 2
    folder.halting_curve("test").write_text("[]")
    with pytest.raises(UserError, match=r"halting_curve.json is invalid \(no halting curve.*; remove it"):
        read_results(read_run_files(str(run_dir)))
