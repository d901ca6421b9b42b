"""ARC voting: known answers give known figures, however they are spread; a perfect predictor scores 1."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import OFFICIAL, PUBLISHED
from support.arc_votes import AUGMENTATIONS, copy, noisy, perfect, rows_by_test_input, set_answer, write_arc_set

from benchmarks import published
from train_jax.errors import UserError
from train_jax.tasks.puzzles.arc.data import ArcData
from train_jax.tasks.puzzles.arc.json import read_test_puzzles
from train_jax.tasks.puzzles.metadata import read_identifiers
from train_jax.tasks.puzzles.voting import (
    PASSES,
    Predictions,
    count_votes,
    load_predictions,
    outcome,
    save_predictions,
    score,
    score_predictions,
)


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
    predictions, names, puzzles = copy(perfect(arc)), read_identifiers(arc), read_test_puzzles(arc)
    share = {puzzle.name: 1 / len(puzzle.sections["test"]) / len(puzzles) for puzzle in puzzles}
    ranks, expected_submission = {}, {}
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
    names, rng = read_identifiers(arc), np.random.default_rng(0)
    whole = Predictions(*(np.concatenate(pair) for pair in zip(noisy(arc, 0), noisy(arc, 1), strict=True)))
    whole = whole._replace(q_halt_logits=rng.normal(size=len(whole.inputs)).astype(np.float32))
    expected, votes = score_predictions(arc, [whole]), count_votes(names, [whole])
    assert 0 < expected.figures["ARC/pass@1"] < expected.figures["ARC/pass@1000"]
    assert max(candidate.votes for candidates in votes.values() for candidate in candidates) > 4
    for shards in (1, 3, 7):
        files = [tmp_path / f"{number}.npz" for number in range(shards)]
        for path, rows in zip(files, np.array_split(rng.permutation(len(whole.inputs)), shards), strict=True):
            save_predictions(path, Predictions(*(array[rows] for array in whole)))
        assert score(arc, files) == expected and count_votes(names, map(load_predictions, files)) == votes
    with pytest.raises(UserError, match="a file is given more than once"):
        score(arc, [files[0], files[0]])


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


def test_questions_without_an_answer_are_counted_and_submitted(arc):
    predictions, names, puzzles = perfect(arc), read_identifiers(arc), read_test_puzzles(arc)
    rows = rows_by_test_input(predictions, names, puzzles)
    (name, number_of_input), gone = next(iter(rows.items()))
    kept = np.setdiff1d(np.arange(len(predictions.inputs)), gone)
    scores = score_predictions(arc, [Predictions(*(array[kept] for array in predictions))])
    assert scores.unanswered == 1
    assert scores.submission[name][number_of_input] == {"attempt_1": [[0]], "attempt_2": [[0]]}
    num_test_inputs = len(next(p for p in puzzles if p.name == name).sections["test"])
    assert scores.figures["ARC/pass@1000"] == pytest.approx(1 - 1 / num_test_inputs / len(puzzles))


def test_an_empty_answer_is_a_vote_and_is_submitted_as_a_black_cell(arc):
    predictions = copy(perfect(arc))
    predictions.preds[:] = 0
    scores = score_predictions(arc, [predictions])
    assert set(scores.figures.values()) == {0.0} and scores.unanswered == 0
    assert all(pair["attempt_1"] == [[0]] for pairs in scores.submission.values() for pair in pairs)


def test_without_a_public_solution_there_is_only_a_submission(arc):
    puzzles, ballots = read_test_puzzles(arc), count_votes(read_identifiers(arc), [perfect(arc)])
    expected = outcome(puzzles, ballots).submission
    for puzzle in puzzles:
        puzzle.sections["test"] = [each._replace(output=np.zeros((1, 1), np.uint8)) for each in puzzle.sections["test"]]
    scores = outcome(puzzles, ballots)
    assert scores.figures == {} and scores.submission == expected
