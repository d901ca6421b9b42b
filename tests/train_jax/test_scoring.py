"""ARC voting: known answers give known figures, in any order and from any hosts; files of predictions; mistakes."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import OFFICIAL, PUBLISHED, random_puzzle, write_files
from support.arc_votes import AUGMENTATIONS, copy, noisy, perfect, rows_by_test_input, set_answer, write_arc_set
from support.refusal import refusal
from support.untrained_run import write_run

from tests.references import published
from train_jax.__main__ import main
from train_jax.errors import UserError
from train_jax.puzzles import voting
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.arc.json import read_test_puzzles
from train_jax.puzzles.format import load_split
from train_jax.puzzles.metadata import read_identifiers
from train_jax.puzzles.voting import PASSES, Predictions, save_predictions, score, score_predictions


@pytest.fixture(scope="module")
def arc(tmp_path_factory) -> Path:
    return write_arc_set(tmp_path_factory.mktemp("arc"))


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
    options = {"subsets": subsets, "test_subsets": subsets[1:2], "num_aug": 6, "seed": 0}
    ArcData(str(OFFICIAL), output_dir=tmp_path / "set", **options).build()
    scores = score_predictions(tmp_path / "set", [perfect(tmp_path / "set")])
    assert scores.figures == {f"ARC/pass@{k}": 1.0 for k in PASSES}


@pytest.mark.parametrize("known", [True, False])
def test_the_rank_of_the_solution_decides_every_figure(arc, known):
    """The solution of question i is put on rank i % 8 of eight grids: votes tie in pairs, and the logit decides."""
    predictions = copy(perfect(arc))
    names = read_identifiers(arc)
    puzzles = read_test_puzzles(arc)
    share = {puzzle.name: 1 / len(puzzle.sections["test"]) / len(puzzles) for puzzle in puzzles}
    ranks = {}
    expected_submission = {}
    votes = [3, 3, 1, 1, 1, 1, 1, 1]
    assert sum(votes) == AUGMENTATIONS + 1
    for number, ((name, number_of_input), rows) in enumerate(rows_by_test_input(predictions, names, puzzles).items()):
        solution = next(p for p in puzzles if p.name == name).sections["test"][number_of_input].output.tolist()
        grids = [[[n, n, n, n], [n % 3, 0, 0, 1]] for n in range(8)]
        rank = ranks[name, number_of_input] = number % 8
        if known:
            grids[rank] = solution
        logits = [2.0, -2.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4]
        order = np.random.default_rng(number).permutation(AUGMENTATIONS + 1)
        for row, place in zip(np.array(rows)[order], np.repeat(np.arange(8), votes), strict=True):
            set_answer(predictions, row, names, grids[place], logits[place])
        expected_submission[name, number_of_input] = {"attempt_1": grids[0], "attempt_2": grids[1]}
    scores = score_predictions(arc, [predictions])
    for k in PASSES:
        expected = sum(share[name] for (name, _), rank in ranks.items() if known and rank < k)
        assert scores.figures[f"ARC/pass@{k}"] == pytest.approx(expected, abs=1e-12)
    found_submission = {(n, i): pair for n, pairs in scores.submission.items() for i, pair in enumerate(pairs)}
    assert found_submission == expected_submission


def test_the_outcome_depends_neither_on_the_order_of_the_answers_nor_on_their_files(arc, tmp_path):
    """The files of several hosts, or of several checkpoints, vote together; every mean is the same to the last bit."""
    names = read_identifiers(arc)
    rng = np.random.default_rng(0)
    whole = Predictions(*(np.concatenate(pair) for pair in zip(noisy(arc, 0), noisy(arc, 1), strict=True)))
    whole = whole._replace(q_halt_logits=rng.normal(size=len(whole.inputs)).astype(np.float32))
    expected = score_predictions(arc, [whole])
    votes = voting.count_votes(names, [whole])
    assert 0 < expected.figures["ARC/pass@1"] < expected.figures["ARC/pass@1000"]
    assert max(candidate.votes for candidates in votes.values() for candidate in candidates) > 4
    for shards in (1, 3, 7):
        files = [tmp_path / f"{number}.npz" for number in range(shards)]
        for path, rows in zip(files, np.array_split(rng.permutation(len(whole.inputs)), shards), strict=True):
            save_predictions(path, Predictions(*(array[rows] for array in whole)))
        assert score(arc, files) == expected and voting.count_votes(names, map(voting.load_predictions, files)) == votes


@pytest.mark.skipif(PUBLISHED is None, reason="TRM_PUBLISHED does not give the folder of the published code")
def test_the_published_evaluator_finds_the_same(arc, tmp_path):
    pytest.importorskip("numba")
    predictions = noisy(arc, 3)
    # Logits of their own: where ranks tie, the published order is the order of arrival.
    logits = np.random.default_rng(0).normal(size=len(predictions.inputs)).astype(np.float32)
    save_predictions(tmp_path / "predictions.npz", predictions._replace(q_halt_logits=logits))
    theirs = published.run(str(PUBLISHED), "vote", arc, tmp_path / "predictions.npz", tmp_path)["found"]
    ours = score(arc, [tmp_path / "predictions.npz"])
    assert ours.figures == pytest.approx(theirs, abs=1e-12)
    assert ours.submission == json.loads((tmp_path / "submission.json").read_text())


def test_questions_without_an_answer_are_counted_and_empty_answers_are_votes(arc):
    """Both are submitted as a black cell."""
    predictions = copy(perfect(arc))
    names = read_identifiers(arc)
    puzzles = read_test_puzzles(arc)
    rows = rows_by_test_input(predictions, names, puzzles)
    (name, number_of_input), gone = next(iter(rows.items()))
    kept = np.setdiff1d(np.arange(len(predictions.inputs)), gone)
    scores = score_predictions(arc, [Predictions(*(array[kept] for array in predictions))])
    assert scores.unanswered == 1
    assert scores.submission[name][number_of_input] == {"attempt_1": [[0]], "attempt_2": [[0]]}
    num_test_inputs = len(next(p for p in puzzles if p.name == name).sections["test"])
    assert scores.figures["ARC/pass@1000"] == pytest.approx(1 - 1 / num_test_inputs / len(puzzles))
    predictions.preds[:] = 0
    scores = score_predictions(arc, [predictions])
    assert set(scores.figures.values()) == {0.0} and scores.unanswered == 0
    assert all(pair["attempt_1"] == [[0]] for pairs in scores.submission.values() for pair in pairs)


def test_without_a_public_solution_there_is_only_a_submission(arc):
    puzzles = read_test_puzzles(arc)
    ballots = voting.count_votes(read_identifiers(arc), [perfect(arc)])
    expected = voting.outcome(puzzles, ballots).submission
    for puzzle in puzzles:
        puzzle.sections["test"] = [each._replace(output=np.zeros((1, 1), np.uint8)) for each in puzzle.sections["test"]]
    scores = voting.outcome(puzzles, ballots)
    assert scores.figures == {} and scores.submission == expected


# ---- runs and files of predictions


@pytest.fixture(scope="module")
def run_dir(arc, tmp_path_factory) -> str:
    """A run on the ARC set as training leaves it, with its first weights."""
    return write_run(tmp_path_factory.mktemp("runs") / "run", arc, act_steps=2, step=1, eval_batch_size=32)


@pytest.mark.slow
def test_a_run_is_scored_and_its_files_score_the_same(run_dir, arc, tmp_path, capsys):
    predictions, submission, again = (str(tmp_path / name) for name in ("voting.npz", "submission.json", "again.json"))
    assert main(["evaluate", run_dir, "--predictions", predictions, "--submission", submission]) == 0
    figures = [line for line in capsys.readouterr().out.splitlines() if "ARC/pass@" in line]
    assert len(figures) == len(PASSES)
    saved = voting.load_predictions(predictions)
    test = load_split(arc, "test")
    assert (saved.inputs == test.inputs).all() and len(saved.preds) == test.num_examples
    assert main(["score", str(arc), predictions, "--submission", again]) == 0
    assert [line for line in capsys.readouterr().out.splitlines() if "ARC/pass@" in line] == figures
    first = json.loads(Path(submission).read_text())
    assert json.loads(Path(again).read_text()) == first
    assert set(first) == {puzzle.name for puzzle in read_test_puzzles(arc)}


def test_mistakes_are_named_before_the_work(run_dir, arc, data_dir, tmp_path, capsys):
    nowhere = str(tmp_path / "no" / "file")
    good = str(tmp_path / "good.npz")
    save_predictions(good, perfect(arc))
    train_split = ["--submission", str(tmp_path / "s.json"), "--split", "train"]
    for argv, message in (
        (["evaluate", run_dir, "--predictions", nowhere], "no is not a folder; give a file in an existing folder"),
        (["evaluate", run_dir, "--submission", nowhere], "no is not a folder; give a file in an existing folder"),
        (["evaluate", run_dir, *train_split], "is for the test split of one ARC data set"),
        (["score", str(arc)], "no files of predictions"),
        (["score", str(arc), good, good], "a file is given more than once"),
        (["score", str(data_dir), good], "test_puzzles.json is missing; voting needs an ARC data set"),
        (["score", str(arc), nowhere], f"{nowhere} contains no predictions (No such file or directory)"),
    ):
        assert main(argv) == 2
        said = capsys.readouterr().err
        assert message in said and said.count("\n") == 1
    assert not list(tmp_path.glob("*.json"))


def test_files_without_predictions_and_predictions_of_another_data_set_are_refused(arc, tmp_path, monkeypatch):
    good = perfect(arc)
    path = tmp_path / "bad.npz"
    save_predictions(path, good)
    whole = path.read_bytes()
    for content in (b"hello", whole[:2000] + bytes(x ^ 255 for x in whole[2000:2100]) + whole[2100:]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"bad.npz contains no predictions \(.*\); use a file of `trm evaluate"):
            voting.load_predictions(path)
    for changes, message in (
        ({"preds": good.preds[:-1]}, "preds is uint8"),
        ({"preds": good.preds[:, :-1]}, "preds are"),
        ({"inputs": good.inputs.astype(np.float32)}, "inputs is float32"),
        ({"q_halt_logits": np.zeros(len(good.inputs), int)}, "q_halt_logits is int64"),
        ({"q_halt_logits": np.full(len(good.inputs), np.nan, np.float32)}, "are not all finite"),
        ({"puzzle_identifiers": np.array([None] * len(good.inputs))}, "contains no predictions"),
        ({"puzzle_identifiers": good.puzzle_identifiers + 1000}, r"the data set has 0 to 180; give the data set of"),
        ({"puzzle_identifiers": good.puzzle_identifiers - 1000}, "identifiers -"),
        ({"inputs": good.inputs + np.uint8(1)}, "from 0 to 12, expected 900 from 0 to 11"),
        ({"inputs": good.inputs[:, :81], "preds": good.preds[:, :81]}, "are 81 tokens"),
    ):
        np.savez(path, **(good._asdict() | changes), allow_pickle=True)
        with pytest.raises(UserError, match=message):
            score(arc, [path])
    monkeypatch.setattr(voting, "LARGEST_BYTES", 2**20)
    zeros = np.zeros((2**12, 2**14), np.uint8)
    save_predictions(path, Predictions(np.zeros(2**12, np.int32), zeros, zeros, np.zeros(2**12, np.float32)))
    assert path.stat().st_size < 2**20
    message = refusal(tmp_path, lambda: voting.load_predictions(path), limit_bytes=2**20)
    assert "contains no predictions (134," in message and "bytes unpacked, expected at most 1,048,576" in message


@pytest.mark.slow
def test_without_public_solutions_an_evaluation_has_no_accuracy(tmp_path, capsys):
    rng = np.random.RandomState(0)
    challenges = {name: random_puzzle(rng)[0] for name in ("a", "b")}
    write_files(tmp_path / "files", "test", challenges, None)
    options = {"subsets": ("test",), "test_subsets": ("test",), "num_aug": 0, "seed": 0}
    ArcData(str(tmp_path / "files"), output_dir=tmp_path / "set", **options).build()
    run = write_run(tmp_path / "run", tmp_path / "set", act_steps=1, step=3)
    submission = tmp_path / "s.json"
    results = tmp_path / "results.json"
    trajectories = ["--trajectories", "2", "--noise", "0.1", "--results", str(results)]
    for more in ([], trajectories, ["--halt-early", "--trajectories", "2"]):
        assert main(["evaluate", run, "--batch-size", "4", "--submission", str(submission), *more]) == 0
        said = capsys.readouterr().out
        assert "no solution of these puzzles is public, so there is no accuracy" in said
        assert "0.0000" not in said and "nan" not in said
        assert json.loads(submission.read_text()).keys() == challenges.keys()
    files = sorted((tmp_path / "run" / "evaluation").glob("*.json"))
    assert [path.name for path in files] == ["test.json", "test_halted_early.json"]
    metrics = [json.loads(path.read_text(), parse_constant=pytest.fail) for path in (*files, results)]
    assert all("exact_accuracy" not in each and not each.get("points") for each in metrics)
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 3, "train/lm_loss": 1.5, "eval/exact_accuracy": NaN}\n')
    assert main(["report", run]) == 0 and main(["status", run]) == 0
    assert "nan%" not in (tmp_path / "run" / "report" / "index.html").read_text() + capsys.readouterr().out
