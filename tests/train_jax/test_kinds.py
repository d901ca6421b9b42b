"""The kind of a data set: stated by its recipe, kept by a run, recognised by its sizes where nothing states it."""

import dataclasses
import json

import numpy as np
import pytest
from support.arc_files import write_source
from support.puzzle_sets import record_of
from support.small_set import RECIPE, rewrite_json, splits

from train_jax.cli.build_data import main
from train_jax.errors import UserError
from train_jax.plugin import load_object
from train_jax.puzzles import kinds
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.arc.kind import ArcKind
from train_jax.puzzles.batches import load_mixture, mixture_of
from train_jax.puzzles.building import write_dataset
from train_jax.puzzles.evaluate import check_same_puzzles
from train_jax.puzzles.format import load_split
from train_jax.puzzles.inspection import inspect
from train_jax.puzzles.kinds import MIXED, kind_of, trace_of
from train_jax.puzzles.maze.data import MazeData
from train_jax.puzzles.maze.kind import MazeKind
from train_jax.puzzles.metadata import Metadata, read_metadata
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.puzzles.sudoku.grid import GEOMETRIES
from train_jax.puzzles.sudoku.kind import SudokuKind
from train_jax.puzzles.terminal import samples, verdict

CLASSES = [load_object(name, "kind") for name in kinds.kinds().values()]
ALL = [*map(SudokuKind, GEOMETRIES.values()), MazeKind(4), MazeKind(5), MazeKind(30), MazeKind(50), ArcKind()]


def metadata_of(seq_len: int, vocab_size: int, kind: str = "") -> Metadata:
    return Metadata(seq_len, vocab_size, 0, 0, 0, 1, 1, 1.0, 1, ("all",), kind)


@pytest.fixture
def mazes(tmp_path):
    """4x4 mazes, which have the sizes of 4x4 Sudokus."""
    main(MazeData(output_dir=tmp_path / "mazes", size=4, num_train=30, num_test=20, augment=True))
    return tmp_path / "mazes"


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.key)
def test_a_kind_is_rebuilt_from_its_key_or_else_recognised_by_its_sizes(kind):
    assert kind_of(metadata_of(kind.seq_len, kind.vocab_size, kind.key)) == kind
    assert sum(each.from_key(kind.key) is not None for each in CLASSES) == 1
    expected = SudokuKind(GEOMETRIES[4]) if kind == MazeKind(4) else kind
    assert kind_of(metadata_of(kind.seq_len, kind.vocab_size)) == expected
    assert kind_of(metadata_of(kind.seq_len, kind.vocab_size + 20)) is None
    recognised = [each for each in CLASSES if each.recognise(metadata_of(kind.seq_len, kind.vocab_size))]
    assert len(recognised) == 1  # the order of the kinds does not matter, then


@pytest.mark.parametrize(
    ("given", "trained", "refused"),
    [
        ((16, 6, "sudoku-4x4"), (16, 6, "sudoku-4x4"), ""),
        ((16, 6, ""), (16, 6, "sudoku-4x4"), ""),
        ((16, 6, "maze-4"), (16, 6, "sudoku-4x4"), "contains 4x4 mazes, expected 4x4 Sudokus as in training; give"),
        ((81, 11, ""), (16, 6, ""), "contains 9x9 Sudokus, expected 4x4 Sudokus as in training; give a --data-dir"),
        ((16, 7, MIXED), (16, 6, MIXED), "of 16 tokens from a vocabulary of 7, expected sequences of 16"),
    ],
)
def test_a_model_is_scored_on_the_kind_of_puzzle_that_it_was_trained_on(given, trained, refused):
    given = metadata_of(*given)
    trained = metadata_of(*trained)
    if not refused:
        return check_same_puzzles(given, trained)
    with pytest.raises(UserError) as error:
        check_same_puzzles(given, trained)
    assert refused in str(error.value)


def test_a_key_that_is_not_known_gives_no_kind():
    """The kind is not guessed from the sizes, which here are those of a Sudoku."""
    for key in ("sudoku-5x5", "sudoku-9", "maze-51", "maze-05", "maze-", "ARC", MIXED):
        assert kind_of(metadata_of(81, 11, key)) is None


def test_builders_state_the_kind_and_the_published_files_do_not(tmp_path, mazes):
    main(SudokuData(output_dir=tmp_path / "sudoku", size=6, num_train=3, num_test=2))
    main(ArcData(str(write_source(tmp_path / "source")), output_dir=tmp_path / "arc", num_aug=0))
    for directory, key in ((mazes, "maze-4"), (tmp_path / "sudoku", "sudoku-6x6"), (tmp_path / "arc", "arc")):
        record = record_of(directory)
        assert record["kind"] == key
        for split in ("train", "test"):
            puzzles = load_split(directory, split)
            assert puzzles.metadata.kind == key and puzzles.kind is not None and puzzles.kind.key == key
            assert record["content"][split] == puzzles.fingerprint
            assert "kind" not in json.loads((directory / split / "dataset.json").read_text())
    path = tmp_path / "dataset.json"  # that of a run, which keeps the kind
    path.write_text(json.dumps(dataclasses.asdict(load_split(mazes, "train").metadata)))
    assert kind_of(read_metadata(path)) == MazeKind(4)
    rewrite_json(path, kind="absent")
    assert read_metadata(path).kind == ""


@pytest.mark.parametrize("kind", [3, None, ["maze-4"], "../x", "a\nb", "x" * 65, "\x1b[31m"])
def test_a_kind_that_is_no_name_is_ignored_in_a_recipe_and_refused_in_metadata(mazes, tmp_path, kind):
    rewrite_json(mazes / "recipe.json", kind=kind)
    assert load_split(mazes, "train").metadata.kind == "sudoku-4x4"
    rewrite_json(mazes / "train/dataset.json", kind=kind)
    with pytest.raises(UserError, match=r"dataset\.json: kind is .*expected (str|a name such as sudoku-9x9)") as caught:
        load_split(mazes, "train")
    assert str(caught.value).isprintable()
    rewrite_json(mazes / "train/dataset.json", kind="absent")
    rewrite_json(mazes / "recipe.json", kind="maze-30")
    with pytest.raises(UserError, match="kind is maze-30, expected 900 tokens from a vocabulary of 6, found 16 from 6"):
        load_split(mazes, "train")


def test_the_kind_of_several_data_sets_is_that_of_the_largest(mazes, tmp_path):
    for size in (4, 6):
        main(SudokuData(output_dir=tmp_path / f"{size}", size=size, num_train=3, num_test=2))
    sudokus = load_mixture(f"{tmp_path / '4'},{tmp_path / '6'}", "train")
    assert sudokus.metadata.kind == "sudoku-6x6"
    main(MazeData(output_dir=tmp_path / "nine", size=9, num_train=3, num_test=2))
    both = load_mixture(f"{tmp_path / '6'},{tmp_path / 'nine'}", "train")  # 81 tokens from a vocabulary of 8
    assert both.metadata.kind == MIXED and kind_of(both.metadata) is None
    fingerprints = {mixture.fingerprint for mixture in (sudokus, both, mixture_of(both.parts[::-1]), both.part(0))}
    assert len(fingerprints) == 4 and sudokus.fingerprint == mixture_of(sudokus.parts).fingerprint


TOY = """
from dataclasses import dataclass
from train_jax.puzzles.kind import Checking, Drawing, Kind

class Letters(Drawing):
    def character(self, value):
        return "?abcde"[value]

@dataclass(frozen=True)
class Reversed(Kind):
    key, name, seq_len, vocab_size = "reversed", "reversed word", 4, 6
    drawing, checking = Letters(1, 4, fills_inputs=False), Checking()

    @classmethod
    def every_size(cls):
        return [cls()]

    def values(self, tokens):
        return tokens

    def fingerprints(self, inputs, labels):
        return map(bytes, inputs)
"""


def test_a_kind_of_the_user_is_named_by_the_run_and_has_only_what_differs_from_the_defaults(tmp_path, monkeypatch):
    (tmp_path / "toy_kind.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(kinds, "_added", {})
    for key in ("reversed", "toy_kind:Reversed"):
        assert kind_of(metadata_of(4, 6, key)) is None, "a data set cannot name code"
    kinds.add_kind("")
    for name, message in (("wide", "expected package.module:Class"), ("toy_kind:None", "has no 'None'")):
        with pytest.raises(UserError, match=message):
            kinds.add_kind(name)
    kinds.add_kind("toy_kind:Reversed")
    assert type(kind_of(metadata_of(4, 6, "reversed"))).__name__ == "Reversed"
    assert write_dataset(tmp_path / "set", splits(), ["<blank>", "a", "b"], RECIPE)
    facts = inspect(tmp_path / "set", lambda *_: None)
    test = load_split(tmp_path / "set", "test")
    assert facts["data set"]["kind"] == "reversed words" and test.metadata.kind == "reversed"
    assert facts["between train and test"]["test examples that are a symmetry of a train example"] == "4 of 4"
    assert "1 2 3 4" not in (shown := "\n".join(samples(tmp_path / "set", 1, 80, styled=False))) and "? a b c" in shown
    kind = test.kind
    solution = test.labels[0]
    assert kind is not None
    answers = np.array([test.inputs[0], solution])
    logits = np.zeros(2, np.float32)
    trace = trace_of(kind, test.inputs[0], answers, logits, solution)
    assert verdict(trace).startswith("solved: every cell equals the solution, since ACT step 2")
    assert trace.mistakes(1) == ["4 of 4 cells wrong"]
