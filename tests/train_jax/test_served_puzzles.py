"""Puzzles behind `trm serve`: the ACT steps as they are computed are those of `trm solve` and of `trm evaluate`."""

import dataclasses
import json
from itertools import islice

import numpy as np
import pytest
from starlette.testclient import TestClient
from support.scripted_model import BYTES
from support.untrained_run import write_run

from train_jax.cli.build_data import main as build_data
from train_jax.errors import UserError
from train_jax.puzzles.batches import IGNORED_LABEL
from train_jax.puzzles.format import load_split
from train_jax.puzzles.kind import Symmetries
from train_jax.puzzles.scan import TrajectoryOptions, make_trajectory_step
from train_jax.puzzles.solving import known_kind, solve
from train_jax.puzzles.stepping import Stepper
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.puzzles.sudoku.grid import geometry_of_size, grids_of
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.views import symmetries_of_views
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices
from train_jax.serve.app import create_app
from train_jax.serve.gate import Gate
from train_jax.serve.limits import Limits
from train_jax.serve.protocol import read_chat
from train_jax.serve.puzzles import TRAJECTORIES, Player, PuzzleService, SolveFields, _cycles
from train_jax.serve.stage import Serve, open_services

STEPS = 3
PUZZLE = "12.. ..12 2... ...."


def write_sudokus(folder):
    """Writes 4x4 Sudokus to `folder/set`, and a run with initial weights to `folder/run`."""
    build_data(SudokuData(output_dir=folder / "set", size=4, num_train=20, num_test=6))
    write_run(folder / "run", folder / "set", act_steps=STEPS, step=7)


@pytest.fixture(scope="module")
def run(made_once):
    """A run whose weights are not zero, so that all outputs differ."""
    run = restore(str(made_once("sudokus", write_sudokus) / "run"))
    rng = np.random.default_rng(0)
    params = {name: array + 0.1 * rng.normal(size=array.shape) for name, array in run.state.eval_params.items()}
    params = {name: array.astype(np.float32) for name, array in params.items()}
    return dataclasses.replace(run, state=run.state._replace(params=params, ema=params))


@pytest.fixture(scope="module")
def inputs(made_once, run):
    return load_split(str(made_once("sudokus", write_sudokus) / "set"), "test").inputs


@pytest.fixture(scope="module")
def stepper(run):
    return Stepper(run)


@pytest.fixture(scope="module")
def client(run, stepper):
    gate = Gate(Limits(requests_per_minute=10**6))
    player = Player("four", run)
    player._stepper = stepper  # whose programs are compiled
    with TestClient(create_app(gate, [PuzzleService(gate, [player])]), base_url="http://127.0.0.1") as own:
        yield own


def stacked(steps):
    return [np.stack(arrays) for arrays in zip(*(step[:2] for step in steps), strict=True)]


@pytest.mark.slow
def test_steps_are_those_of_solve_and_trajectories_have_the_noise_of_an_evaluation(run, inputs, stepper):
    expected = solve(run, inputs[2])
    for trajectories in (1, TRAJECTORIES):
        tokens, logits = stacked(islice(stepper.steps(inputs[2], trajectories=trajectories, noise=1.0), STEPS))
        np.testing.assert_array_equal(tokens[:, 0], expected.tokens[:, 0])
        np.testing.assert_allclose(logits[:, 0], expected.q_halt_logits[:, 0], rtol=1e-5)
    depth = STEPS + 2
    rows = np.arange(TRAJECTORIES, dtype=np.int32)
    _, logits = stacked(islice(stepper.steps(inputs[2], trajectories=TRAJECTORIES, noise=0.5, seed=3), depth))
    devices = Devices(1)
    tiled = np.tile(inputs[2].astype(np.int32), (TRAJECTORIES, 1))
    batch = {"inputs": tiled, "labels": np.full_like(tiled, IGNORED_LABEL), "puzzle_identifiers": 0 * rows}
    batch = devices.shard(devices.split_batch(batch | {"number": 0 * rows, "trajectory": rows}))
    step = devices.parallel_eval_step(make_trajectory_step(run.objective, TrajectoryOptions(2, 0.5, depth, seed=3)))
    _, facts = step(devices.replicate(run.state), batch)
    np.testing.assert_allclose(logits[:, 1:], np.asarray(facts["logits"])[0][:, 1:], rtol=1e-5)
    assert len({*logits[-1].tolist()}) == TRAJECTORIES


@pytest.mark.slow
def test_a_language_model_calls_the_first_sudoku_model_of_the_size(run, monkeypatch):
    """The first one solves Sudokus of 9x9 cells."""
    known = "train_jax.serve.puzzles.known_kind"
    nine = SudokuKind(geometry_of_size(9))
    monkeypatch.setattr(known, lambda metadata, text: nine if text[0] == "a" else known_kind(metadata, text))
    monkeypatch.setattr(Player, "warm_up", lambda self: None)
    monkeypatch.setattr("train_jax.serve.stage.restore", lambda *args, **options: run)
    with pytest.raises(UserError, match="--cycles 3 is for language models"):
        open_services(Serve(("a",), cycles=3), Gate(Limits()))
    texts, puzzles = open_services(Serve(("a", "b", "c")), Gate(Limits()))
    monkeypatch.setattr(puzzles.players["c"], "solution", lambda text: "of the third one")
    expected = solve(run, puzzles.players["b"].kind.parse(PUZZLE).tokens)
    answer = "|".join("".join(map(str, row)) for row in grids_of(expected.answers)[0].reshape(4, 4)).replace("0", ".")
    assert len({*answer}) > 2
    hello = {"messages": [{"role": "user", "content": "hi"}]}
    call = read_chat(hello, BYTES, longest=80, capacity=96, functions=texts._functions)
    special = BYTES.specials

    def output(text):
        tokens = [special["<|python_start|>"], *f'sudoku("{text}")'.encode(), special["<|python_end|>"]]
        return call.requests[0].respond(tokens)

    assert output(PUZZLE) == [special["<|output_start|>"], *answer.encode(), special["<|output_end|>"]]
    monkeypatch.setattr(puzzles.players["c"], "solution", lambda text: None)
    assert output("1" * 16) == output("x") == []


def events_of(response):
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.slow
def test_a_puzzle_is_solved_step_by_step(client):
    fields = {"puzzle": PUZZLE, "trajectories": TRAJECTORIES, "act_steps": 4}
    first, *steps, last = events_of(client.post("/v1/puzzles/solve", json=fields))
    assert first["name"] == "4x4 Sudoku given" and first["input"].startswith("<svg")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert len(step["trajectories"]) == TRAJECTORIES
        for each in step["trajectories"]:
            assert each["board"].startswith("<svg") and 0 < each["halting_probability"] < 1
            assert each["caption"].startswith(f"ACT step {step['step']}, ") and each["solved"] == (each["wrong"] == 0)
    assert len(last["verdicts"]) == TRAJECTORIES and all("solved" in text for text in last["verdicts"])
    (step, *_) = events_of(client.post("/v1/puzzles/solve", json={"puzzle": PUZZLE, "cycles": True}))[1:]
    assert step["trajectories"][0]["cycles"] == [], "the model has one H-cycle in a step"


@pytest.mark.slow
def test_views_of_a_puzzle_are_answered_in_its_frame(run, inputs, stepper):
    """The answers to a view are those that the model gives to the image of the puzzle, brought back."""
    views = TRAJECTORIES
    answers = stacked(islice(stepper.steps(inputs[2], trajectories=views, views=views, seed=4, number=9), STEPS))
    symmetries = symmetries_of_views(stepper.task.metadata, first=9, count=1, views=views, seed=4)
    images = symmetries.image(np.tile(inputs[2], (1, views, 1)))[0]
    for view, image in enumerate(images):
        expected = solve(run, image)
        inverse = Symmetries(*(each[0, view] for each in symmetries.inverse))
        brought_back = [inverse.image(answer) for answer in expected.tokens[:, 0]]
        np.testing.assert_array_equal(answers[0][:, view], brought_back)
        np.testing.assert_allclose(answers[1][:, view], expected.q_halt_logits[:, 0], rtol=1e-4)
    assert len({*answers[1][-1].tolist()}) == views


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"puzzle": 5}, "puzzle", "puzzle is not a text"),
        ({"puzzle": "1" * 16}, "puzzle", "digit 1 more than once in row 1"),
        ({"puzzle": "." * 81}, "puzzle", "the Sudoku is 9x9, expected 4x4 as in training"),
        ({"puzzle": "." * 15}, "puzzle", "the Sudoku has 15 cells, expected 16 (4x4), as in training; write '.'"),
        ({"puzzle": "123. ...4 .... ...."}, "puzzle", "has no solution; correct the givens"),
        ({"puzzle": PUZZLE, "trajectories": 9}, "trajectories", "trajectories is 9; use at most 4"),
        ({"puzzle": PUZZLE, "views": 9}, "views", "views is 9; use at most 4"),
        ({"puzzle": PUZZLE, "act_steps": "x"}, "act_steps", "act_steps is 'x'"),
        ({"puzzle": PUZZLE, "model": "nine"}, "model", "the model 'nine' is not here; use 'four'"),
        ({"puzzle": PUZZLE, "trajectory": 3}, "trajectory", "trajectory is not supported here; leave it out"),
    ],
)
def test_a_wrong_puzzle_is_named(client, fields, param, message):
    response = client.post("/v1/puzzles/solve", json=fields)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and message in error["message"]


def test_puzzles_of_the_test_set(client, run, monkeypatch):
    (described,) = client.get("/v1/puzzles").json()["data"]
    expected = {"id": "four", "kind": "4x4 Sudoku", "rows": 4, "cols": 4, "box": [2, 2], "act_steps": STEPS, "step": 7}
    assert described == expected | {"trajectories": TRAJECTORIES}
    text = client.post("/v1/puzzles/examples", json={"index": 5}).json()["puzzle"]
    assert [len(line) for line in text.split("\n")] == [4] * 4 and set(text) <= set("1234.\n")
    for index, message in ((6, "has puzzles 0 to 5; use one of these"), ("x", "index is not a whole number")):
        response = client.post("/v1/puzzles/examples", json={"index": index})
        assert response.status_code == 400 and message in response.json()["error"]["message"]
    hard = client.post("/v1/puzzles/examples", json={"hard": True}).json()
    assert hard["puzzle"] == client.post("/v1/puzzles/examples", json={"index": hard["index"]}).json()["puzzle"]
    monkeypatch.setattr("train_jax.serve.puzzles._KINDS", ("maze",))
    with pytest.raises(UserError, match="four was trained on 4x4 Sudokus; serve runs of Sudokus or mazes"):
        Player("four", run)


def test_the_h_cycles_within_a_step_are_those_of_a_model_with_fewer(run, inputs, stepper):
    """The run has one H-cycle in a step."""
    player = Player("three", run.with_arch(dataclasses.replace(run.config.arch, H_cycles=2)))
    puzzle = player.kind.parse(PUZZLE)
    answers = next(player.steps(puzzle, SolveFields(cycles=True)))
    np.testing.assert_array_equal(answers.cycles, [next(stepper.steps(puzzle.tokens)).tokens])
    (within,) = _cycles(puzzle, [answers], 0)
    assert within["board"].startswith("<svg") and within["caption"].startswith("ACT step 1, H-cycle 1")


def test_the_search_for_the_solution_of_a_given_puzzle_is_limited(monkeypatch):
    kind = SudokuKind(geometry_of_size(9))
    puzzle = ".....5.8....6.1.43..........1.5........1.6...3.......553.....61........4........."
    monkeypatch.setattr("train_jax.puzzles.sudoku.kind.MOST_GUESSES", 1000)  # millions would prove that
    given = kind.parse(puzzle)  # it has no solution
    assert given.solution is None and given.unique
