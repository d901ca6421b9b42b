"""ARC voting: known answers give known figures, however they are spread; a perfect predictor scores 1."""

import dataclasses
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import OFFICIAL, PUBLISHED, write_source

from benchmarks import published
from train_jax.__main__ import main
from train_jax.core.state import Trainee, new_learner
from train_jax.errors import UserError
from train_jax.optim.optimizer import dense_optimizer
from train_jax.run.checkpoint import Checkpoints
from train_jax.run.config import preset
from train_jax.run.folder import open_run
from train_jax.run.model import build_objective
from train_jax.tasks.puzzles.arc.canvas import Places, render
from train_jax.tasks.puzzles.arc.dataset import build_arc
from train_jax.tasks.puzzles.arc.grid import Puzzle
from train_jax.tasks.puzzles.arc.json import read_test_puzzles
from train_jax.tasks.puzzles.arc.symmetry import parse_names
from train_jax.tasks.puzzles.evaluation import evaluate
from train_jax.tasks.puzzles.format import load_split, read_identifiers
from train_jax.tasks.puzzles.predictions import Predictions, load_predictions, save_predictions
from train_jax.tasks.puzzles.voting import PASSES, count_votes, grid_of, key_of, score, score_predictions

AUGMENTATIONS = 11


@pytest.fixture(scope="module")
def arc(tmp_path_factory) -> Path:
    """Five tested puzzles of one to three test inputs, eleven augmentations each."""
    folder = tmp_path_factory.mktemp("arc")
    source = write_source(folder / "files")
    build_arc(
        folder / "set",
        source,
        subsets=("training", "evaluation", "concept"),
        test_subsets=("evaluation",),
        num_aug=AUGMENTATIONS,
        seed=0,
    )
    return folder / "set"


def perfect(directory: Path) -> Predictions:
    """The labels as answers, in the order of the data set."""
    test = load_split(directory, "test")
    owners = np.repeat(np.arange(test.num_puzzles), np.diff(test.puzzle_indices))
    sure = np.zeros(test.num_examples, np.float32)
    return Predictions(test.puzzle_identifiers[owners], np.asarray(test.inputs), np.asarray(test.labels), sure)


def answered(found: Predictions, row: int, names: list[str], grid: list[list[int]], logit: float = 0.0) -> None:
    """Makes `grid`, a grid of the original puzzle, the answer in `row`: drawn as that row's augmentation shows it."""
    _, symmetries = parse_names([names[found.puzzle_identifiers[row]]])
    corner = Places(np.zeros((1, 1), int), np.zeros((1, 1), int))
    found.preds[row] = render([np.array(grid, np.uint8)], symmetries, corner)[0]
    found.q_halt_logits[row] = logit


def rows_by_question(found: Predictions, names: list[str], puzzles: list[Puzzle]) -> dict[tuple[str, int], list[int]]:
    """(puzzle, number of its test input) -> the rows that ask it."""
    rows: dict[tuple[str, int], list[int]] = {}
    asked: dict[int, int] = {}
    for row, identifier in enumerate(found.puzzle_identifiers.tolist()):
        name = parse_names([names[identifier]])[0][0]
        rows.setdefault((name, asked.get(identifier, 0)), []).append(row)
        asked[identifier] = asked.get(identifier, 0) + 1
    assert set(rows) == {(puzzle.name, n) for puzzle in puzzles for n in range(len(puzzle.sections["test"]))}
    return rows


def copy(found: Predictions) -> Predictions:
    return Predictions(*(array.copy() for array in found))


def test_a_perfect_predictor_scores_one(arc):
    scores = score_predictions(arc, [perfect(arc)])
    assert scores.figures == {f"ARC/pass@{k}": 1.0 for k in PASSES}
    assert scores.unanswered == 0
    for puzzle in read_test_puzzles(arc):
        solutions = [example.output.tolist() for example in puzzle.sections["test"]]
        assert scores.submission[puzzle.name] == [{"attempt_1": grid, "attempt_2": grid} for grid in solutions]


@pytest.mark.skipif(OFFICIAL is None, reason="ARC_DATA does not give the folder of the official files")
@pytest.mark.parametrize("edition", ["", "2"])
def test_a_perfect_predictor_scores_one_on_the_official_sets(tmp_path, edition):
    subsets = (f"training{edition}", f"evaluation{edition}", "concept")
    build_arc(tmp_path / "set", str(OFFICIAL), subsets=subsets, test_subsets=subsets[1:2], num_aug=6, seed=0)
    scores = score_predictions(tmp_path / "set", [perfect(tmp_path / "set")])
    assert scores.figures == {f"ARC/pass@{k}": 1.0 for k in PASSES}


@pytest.mark.parametrize("known", [True, False])
def test_the_rank_of_the_solution_decides_every_figure(arc, known):
    """The solution of question i is put on rank i % 8 of eight grids: votes tie in pairs, and the logit decides."""
    found, names, puzzles = copy(perfect(arc)), read_identifiers(arc), read_test_puzzles(arc)
    share = {puzzle.name: 1 / len(puzzle.sections["test"]) / len(puzzles) for puzzle in puzzles}
    ranks, expected_submission = {}, {}
    votes = [3, 3, 1, 1, 1, 1, 1, 1]
    assert sum(votes) == AUGMENTATIONS + 1
    for number, ((name, question), rows) in enumerate(rows_by_question(found, names, puzzles).items()):
        solution = next(p for p in puzzles if p.name == name).sections["test"][question].output.tolist()
        grids = [[[n, n, n, n], [n % 3, 0, 0, 1]] for n in range(8)]
        rank = ranks[name, question] = number % 8
        if known:
            grids[rank] = solution
        logits = [2.0, -2.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
        order = np.random.default_rng(number).permutation(AUGMENTATIONS + 1)
        for row, place in zip(np.array(rows)[order], np.repeat(np.arange(8), votes), strict=True):
            answered(found, row, names, grids[place], logits[place])
        expected_submission[name, question] = {"attempt_1": grids[0], "attempt_2": grids[1]}
    scores = score_predictions(arc, [found])
    for k in PASSES:
        expected = sum(share[name] for (name, _), rank in ranks.items() if known and rank < k)
        assert scores.figures[f"ARC/pass@{k}"] == pytest.approx(expected, abs=1e-12)
    found_submission = {(n, i): pair for n, pairs in scores.submission.items() for i, pair in enumerate(pairs)}
    assert found_submission == expected_submission


def test_more_votes_beat_a_higher_probability(arc):
    found, names, puzzles = copy(perfect(arc)), read_identifiers(arc), read_test_puzzles(arc)
    for rows in rows_by_question(found, names, puzzles).values():
        for number, row in enumerate(rows):
            answered(found, row, names, [[1]] if number < 7 else [[2]], -9.0 if number < 7 else 9.0)
    scores = score_predictions(arc, [found])
    assert all(
        pair == {"attempt_1": [[1]], "attempt_2": [[2]]} for pairs in scores.submission.values() for pair in pairs
    )


def noisy(arc: Path, seed: int) -> Predictions:
    """A few grids to each question, the solution among them, some with stray tokens; many ranks tie."""
    found, names, puzzles = copy(perfect(arc)), read_identifiers(arc), read_test_puzzles(arc)
    rng = np.random.default_rng(seed)
    for rows in rows_by_question(found, names, puzzles).values():
        for row in rows:
            if (number := int(rng.integers(4))) > 0:
                answered(found, row, names, [[number] * 3] * number)
    stray = rng.random(found.preds.shape) < 0.01 * (rng.random(len(found.preds)) < 0.3)[:, None]
    found.preds[stray] = rng.integers(0, 12, stray.sum())
    return found._replace(q_halt_logits=rng.integers(-2, 3, len(stray)).astype(np.float32))


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_the_outcome_does_not_depend_on_how_the_examples_are_spread(arc, tmp_path, shards):
    whole = noisy(arc, 0)
    expected = score_predictions(arc, [whole])
    assert 0 < expected.figures["ARC/pass@1"] < expected.figures["ARC/pass@1000"]
    order = np.random.default_rng(shards).permutation(len(whole.inputs))
    files = []
    for number, rows in enumerate(np.array_split(order, shards)):
        files.append(tmp_path / f"{number}.npz")
        save_predictions(files[-1], Predictions(*(array[rows] for array in whole)))
    assert score(arc, files) == expected


def test_not_even_the_last_bit_depends_on_the_order(arc):
    found, names = noisy(arc, 1), read_identifiers(arc)
    rng = np.random.default_rng(0)
    found = found._replace(q_halt_logits=rng.normal(size=len(found.inputs)).astype(np.float32))
    expected = count_votes(names, [found])
    assert max(candidate.votes for candidates in expected.values() for candidate in candidates) > 4
    for _ in range(5):
        order = rng.permutation(len(found.inputs))
        assert count_votes(names, [Predictions(*(array[order] for array in found))]) == expected


def test_several_evaluations_vote_together(arc, tmp_path):
    """As the published evaluator does over the checkpoints of a run."""
    for seed in (0, 1):
        save_predictions(tmp_path / f"{seed}.npz", noisy(arc, seed))
    files = [tmp_path / "0.npz", tmp_path / "1.npz"]
    both = Predictions(*(np.concatenate(pair) for pair in zip(noisy(arc, 0), noisy(arc, 1), strict=True)))
    assert score(arc, files) == score_predictions(arc, [both])
    with pytest.raises(UserError, match="a file is given twice"):
        score(arc, [files[0], files[0]])


@pytest.mark.skipif(PUBLISHED is None, reason="TRM_PUBLISHED does not give the folder of the published code")
def test_the_published_evaluator_finds_the_same(arc, tmp_path):
    pytest.importorskip("numba")
    found = noisy(arc, 3)
    # Logits of their own: where ranks tie, the published order is the order of arrival.
    logits = np.random.default_rng(0).normal(size=len(found.inputs)).astype(np.float32)
    save_predictions(tmp_path / "predictions.npz", found._replace(q_halt_logits=logits))
    theirs = published.run(str(PUBLISHED), "vote", arc, tmp_path / "predictions.npz", tmp_path)["found"]
    ours = score(arc, [tmp_path / "predictions.npz"])
    assert ours.figures == pytest.approx(theirs, abs=1e-12)
    assert ours.submission == json.loads((tmp_path / "submission.json").read_text())


def test_questions_without_an_answer_are_counted_and_submitted(arc):
    found, names, puzzles = perfect(arc), read_identifiers(arc), read_test_puzzles(arc)
    rows = rows_by_question(found, names, puzzles)
    (name, question), gone = next(iter(rows.items()))
    kept = np.setdiff1d(np.arange(len(found.inputs)), gone)
    scores = score_predictions(arc, [Predictions(*(array[kept] for array in found))])
    assert scores.unanswered == 1
    assert scores.submission[name][question] == {"attempt_1": [[0]], "attempt_2": [[0]]}
    asked = len(next(p for p in puzzles if p.name == name).sections["test"])
    assert scores.figures["ARC/pass@1000"] == pytest.approx(1 - 1 / asked / len(puzzles))


def test_padding_does_not_vote(arc):
    found = perfect(arc)
    padding = Predictions(np.zeros(3, np.int32), *(np.zeros((3, 900), np.uint8),) * 2, np.full(3, 9, np.float32))
    padded = Predictions(*(np.concatenate(pair) for pair in zip(found, padding, strict=True)))
    assert score_predictions(arc, [padded]) == score_predictions(arc, [found])


def test_an_empty_answer_is_a_vote_and_is_submitted_as_a_black_cell(arc):
    found = copy(perfect(arc))
    found.preds[:] = 0
    scores = score_predictions(arc, [found])
    assert set(scores.figures.values()) == {0.0} and scores.unanswered == 0
    assert all(pair["attempt_1"] == [[0]] for pairs in scores.submission.values() for pair in pairs)


def test_where_no_solution_is_public_there_is_only_a_submission(arc, tmp_path):
    secret = tmp_path / "set"
    secret.mkdir()
    for name in ("test", "identifiers.json"):
        (secret / name).symlink_to(arc / name)
    puzzles = json.loads((arc / "test_puzzles.json").read_text())
    for puzzle in puzzles.values():
        for example in puzzle["test"]:
            example["output"] = [[0]]
    (secret / "test_puzzles.json").write_text(json.dumps(puzzles))
    scores = score_predictions(secret, [perfect(arc)])
    assert scores.figures == {} and scores.submission == score_predictions(arc, [perfect(arc)]).submission


def test_a_grid_and_its_key():
    grid = np.array([[1, 0, 9], [4, 4, 4]], np.uint8)
    assert grid_of(key_of(grid)) == grid.tolist()
    assert key_of(grid) != key_of(grid.T)


class Host:
    """One of several hosts, as `evaluate` sees it; its one device computes nothing."""

    def __init__(self, index: int, count: int):
        self.index, self.count = index, count

    def local_batch_size(self, _: int) -> None: ...

    def shard(self) -> tuple[int, int]:
        return self.index, self.count

    def split(self, batch):
        return batch

    spread = fetch = split

    def gathered(self, arrays, axis):
        return arrays


def answer_with_labels(_, batch):
    identifiers, labels = batch["puzzle_identifiers"], batch["labels"]
    outputs = {"preds": np.maximum(labels, 0)[None, None], "q_halt_logits": np.cos(identifiers)[None, None]}
    return {"count": 1.0}, outputs


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_see_every_example_once_between_them(arc, hosts):
    parts = [
        evaluate(answer_with_labels, (), load_split(arc, "test"), Host(n, hosts), batch_size=12) for n in range(hosts)
    ]
    predictions = [Predictions(p.puzzle_identifiers, p.inputs, p.predictions[-1], p.q_halt_logits[-1]) for p in parts]
    assert sum(len(each.inputs) for each in predictions) == load_split(arc, "test").num_examples
    assert score_predictions(arc, predictions).figures["ARC/pass@1"] == 1.0


def test_devices_make_no_difference(arc, tmp_path):
    process = Path(__file__).with_name("evaluation_process.py")
    for devices in (1, 4):
        command = [sys.executable, str(process), str(devices), str(arc), str(tmp_path / f"{devices}.npz")]
        subprocess.run(command, check=True, capture_output=True)
    one, four = (score(arc, [tmp_path / f"{devices}.npz"]) for devices in (1, 4))
    assert one == four and one.unanswered == 0
    assert len({json.dumps(pair["attempt_2"]) for pairs in one.submission.values() for pair in pairs}) > 3


@pytest.fixture(scope="module")
def run_dir(arc, tmp_path_factory) -> str:
    """A run on the ARC set as training leaves it, with its first weights."""
    config = preset("tiny")
    arch = dataclasses.replace(config.arch, H_cycles=1, L_cycles=1, halt_max_steps=2)
    path = tmp_path_factory.mktemp("runs") / "run"
    config = dataclasses.replace(config, arch=arch, data_dir=str(arc), run_dir=str(path), eval_batch_size=32)
    folder, data = open_run(config), load_split(arc, "train").metadata
    folder.data.write_text(json.dumps(dataclasses.asdict(data)))
    objective = build_objective(config, data, 1)
    learner = new_learner(objective.params, objective.buffers, dense_optimizer(config.optim, 1))
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, Trainee(learner, {}), {"train_seconds": 0.0})
    checkpoints.wait()
    checkpoints.close()
    return str(path)


def test_a_run_is_scored_and_its_files_score_the_same(run_dir, arc, tmp_path, capsys):
    predictions, submission = str(tmp_path / "predictions.npz"), str(tmp_path / "submission.json")
    assert main(["evaluate", run_dir, "--predictions", predictions, "--submission", submission]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = [line for line in lines if "ARC/pass@" in line]
    assert len(figures) == len(PASSES)
    test = load_split(arc, "test")
    saved = load_predictions(predictions)
    assert (saved.inputs == test.inputs).all() and len(saved.preds) == test.num_examples
    first = json.loads(Path(submission).read_text())
    again = str(tmp_path / "again.json")
    assert main(["score", str(arc), predictions, "--submission", again]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "ARC/pass@" in line] == figures
    assert json.loads(Path(again).read_text()) == first
    assert set(first) == {puzzle.name for puzzle in read_test_puzzles(arc)}


def mistake(capsys, *argv: str) -> str:
    assert main(list(argv)) == 2
    shown = capsys.readouterr()
    assert len(shown.err.strip().splitlines()) == 1, shown.err
    return shown.err


def test_what_cannot_be_written_is_said_before_the_work(run_dir, arc, data_dir, tmp_path, capsys):
    nowhere = str(tmp_path / "no" / "file")
    for option in ("--predictions", "--submission"):
        assert "no is not a folder; give a file in one that is there" in mistake(
            capsys, "evaluate", run_dir, option, nowhere
        )
    here = str(tmp_path / "s.json")
    said = mistake(capsys, "evaluate", run_dir, "--submission", here, "--split", "train")
    assert "is for the test split of one ARC data set" in said
    assert "no predictions to score" in mistake(capsys, "score", str(arc))
    good = tmp_path / "good.npz"
    save_predictions(good, perfect(arc))
    assert "test_puzzles.json is missing; votes are counted on ARC data sets" in mistake(
        capsys, "score", str(data_dir), str(good)
    )
    assert f"{nowhere} holds no predictions (No such file or directory)" in mistake(capsys, "score", str(arc), nowhere)
    assert not list(tmp_path.glob("*.json"))


def test_files_that_hold_no_predictions_are_said(arc, tmp_path):
    good = perfect(arc)
    path = tmp_path / "bad.npz"
    save_predictions(path, good)
    whole = path.read_bytes()
    cases = {
        "not a zip": b"hello",
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "flipped": whole[:2000] + bytes(x ^ 255 for x in whole[2000:2100]) + whole[2100:],
    }
    for content in cases.values():
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"bad.npz holds no predictions \(.*\); `trm evaluate --predictions` writes"
        ):
            load_predictions(path)
    for changes, message in (
        ({"preds": good.preds[:-1]}, "preds is uint8"),
        ({"preds": good.preds[:, :-1]}, "preds are"),
        ({"inputs": good.inputs.astype(np.float32)}, "inputs is float32"),
        ({"q_halt_logits": np.zeros(len(good.inputs), int)}, "q_halt_logits is int64"),
        ({"q_halt_logits": np.full(len(good.inputs), np.nan, np.float32)}, "hold what is no number"),
        ({"puzzle_identifiers": np.array([None] * len(good.inputs))}, "Object arrays cannot be loaded"),
    ):
        np.savez(path, **(good._asdict() | changes), allow_pickle=True)
        with pytest.raises(UserError, match=message):
            load_predictions(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("inputs.npy", whole)
    with pytest.raises(UserError, match="holds no predictions"):
        load_predictions(path)


def test_predictions_of_another_data_set_are_said(arc):
    good = perfect(arc)
    for changes, message in (
        ({"puzzle_identifiers": good.puzzle_identifiers + 1000}, r"the data set has 0 to 180; give the data set that"),
        ({"puzzle_identifiers": good.puzzle_identifiers - 1000}, "identifiers -"),
        ({"inputs": good.inputs + np.uint8(1), "preds": good.preds}, "from 0 to 12, expected ARC's 900 from 0 to 11"),
        ({"inputs": good.inputs[:, :81], "preds": good.preds[:, :81]}, "are 81 tokens"),
    ):
        with pytest.raises(UserError, match=message):
            score_predictions(arc, [good._replace(**changes)])
