"""Files from strangers: read, or refused in one line with the place and the remedy, and nothing is written."""

import json
import os
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
from support.arc_files import write_source
from support.small_set import METADATA, RECIPE, arrays, rewrite_json

from benchmarks.fuzz_data import fuzz
from train_jax.__main__ import main as trm
from train_jax.errors import UserError, brief
from train_jax.report.built import build_summary, inspected
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.tasks.puzzles import predictions
from train_jax.tasks.puzzles.arc import json as arc_json
from train_jax.tasks.puzzles.arc.dataset import build_arc
from train_jax.tasks.puzzles.arc.json import read_subset, read_task
from train_jax.tasks.puzzles.format import load_split, read_identifiers
from train_jax.tasks.puzzles.inspection import inspect
from train_jax.tasks.puzzles.maze.kind import MazeKind
from train_jax.tasks.puzzles.recipe import read_recipe
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES
from train_jax.tasks.puzzles.sudoku.kind import SudokuKind
from train_jax.tasks.puzzles.writing import is_built, write_dataset

GOOD = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}


def refused(folder: Path, challenges: object, solutions: object = None) -> str:
    """What is said of these files; a text is written as it is."""
    for kind, content in (("challenges", challenges), ("solutions", solutions)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"arc-agi_evaluation_{kind}.json").write_text(text)
    before = sorted(folder.rglob("*"))
    with pytest.raises(UserError) as caught:
        build_arc(folder / "set", folder, subsets=("evaluation",), test_subsets=("evaluation",), num_aug=0, seed=0)
    assert sorted(folder.rglob("*")) == before
    said = str(caught.value)
    assert "\n" not in said and len(said) < 500 and "use the official ARC files" in said
    return said


@pytest.mark.parametrize(
    ("challenges", "message"),
    [
        ("", "not JSON that can be read"),
        ('{"a": 1', "not JSON that can be read"),
        ("[" * 100_000, "not JSON that can be read (maximum recursion depth exceeded"),
        ('{"a":' * 100_000, "not JSON that can be read (maximum recursion depth exceeded"),
        ('{"a": %s}' % ("9" * 5000), "not JSON that can be read (Exceeds the limit"),
        ('{"x": {}, "x": {}}', "not JSON that can be read ('x' occurs twice in an object)"),
        ([], "expected puzzles by name, found a list"),
        ({}, "holds no puzzles"),
        ({"../../etc/passwd": GOOD}, "'../../etc/passwd' is no puzzle name"),
        ({"/etc/passwd": GOOD}, "'/etc/passwd' is no puzzle name"),
        ({"..": GOOD}, "'..' is no puzzle name"),
        ({"a|||t0|||0123456789": GOOD}, "is no puzzle name"),
        ({"a\nb": GOOD}, "'a\\nb' is no puzzle name"),
        ({"a\n": GOOD}, "'a\\n' is no puzzle name"),
        ({"": GOOD}, "'' is no puzzle name"),
        ({"x" * 65: GOOD}, "is no puzzle name"),
        ({"<blank>": GOOD}, "'<blank>' is no puzzle name"),
        ({"a": []}, "puzzle a: expected an object with train and test, found list"),
        ({"a": {"train": GOOD["train"]}}, "puzzle a: expected an object with train and test, found ['train']"),
        ({"a": GOOD | {"more": []}}, "found ['more', 'test', 'train']"),
        ({"a": GOOD | {"train": []}}, "puzzle a: train is an empty list"),
        ({"a": GOOD | {"test": []}}, "puzzle a: test is an empty list"),
        ({"a": GOOD | {"train": {}}}, "puzzle a: train is a dict"),
        ({"a": GOOD | {"train": [3]}}, "train example 1: expected an object with input and output, found int"),
        ({"a": GOOD | {"train": [{"input": [[1]]}]}}, "found ['input']"),
        ({"a": GOOD | {"test": [{"output": [[1]]}]}}, "puzzle a, test example 1: expected an object with input, and"),
        ({"a": GOOD | {"test": [{"input": [[1]], "x": 1}]}}, "found ['input', 'x']"),
    ],
)  # fmt: skip
def test_files_that_are_no_puzzles_are_refused(tmp_path, challenges, message):
    assert message in refused(tmp_path, challenges)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (3, "is not a list of rows"),
        ([1, 2], "is not a list of rows"),
        ({"0": [1]}, "is not a list of rows"),
        ([], "has 0 rows and 0 columns, expected 1 to 30 of each"),
        ([[]], "has 1 rows and 0 columns"),
        ([[0]] * 31, "has 31 rows and 1 columns"),
        ([[0] * 31], "has 1 rows and 31 columns"),
        ([[0]] * 10_000, "has 10000 rows"),
        ([[0, 1], [0]], "row 2 has 1 cells, expected 2 as in the first"),
        ([[0], [0, 1]], "row 2 has 2 cells, expected 1 as in the first"),
        ([[0, 10]], "row 1 holds 10, expected colours 0 to 9"),
        ([[0, -1]], "row 1 holds -1"),
        ([[0, 2**64]], "row 1 holds 18446744073709551616"),
        ([[0, True]], "row 1 holds True"),
        ([[0, 1.0]], "row 1 holds 1.0"),
        ([[0, float("nan")]], "row 1 holds nan"),
        ([[0, None]], "row 1 holds None"),
        ([[0, "1"]], "row 1 holds '1'"),
        ([[0, [1]]], "row 1 holds [1]"),
        ([[0, {}]], "row 1 holds a dict"),
    ],
)
def test_grids_that_are_none_are_refused_wherever_they_are(tmp_path, grid, message):
    files = {"a": GOOD}
    assert f"puzzle a, train example 1: input {message}".replace(": input row", ": input: row") in refused(
        tmp_path, {"a": GOOD | {"train": [{"input": grid, "output": [[1]]}]}}
    )
    assert message in refused(tmp_path, {"a": GOOD | {"test": [{"input": [[1]], "output": grid}]}})
    assert f"puzzle a, solution 1{':' * message.startswith('row')} {message}" in refused(tmp_path, files, {"a": [grid]})


@pytest.mark.parametrize(
    ("solutions", "message"),
    [
        ([], "expected puzzles by name"),
        ({}, "puzzle a: expected a list of 1 solutions, found none"),
        ({"a": []}, "puzzle a: expected a list of 1 solutions, found 0"),
        ({"a": [[[1]], [[1]]]}, "found 2"),
        ({"a": {"0": [[1]]}}, "found none"),
        ("{", "not JSON"),
    ],
)
def test_solutions_that_do_not_fit_are_refused(tmp_path, solutions, message):
    assert message in refused(tmp_path, {"a": GOOD}, solutions)


def test_a_huge_file_is_not_even_read(tmp_path):
    path = tmp_path / "arc-agi_evaluation_challenges.json"
    with path.open("wb") as file:
        file.truncate(2**36)
    tracemalloc.start()
    with pytest.raises(UserError, match="68,719,476,736 bytes, expected at most 33,554,432"):
        read_subset(tmp_path, "evaluation")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_the_largest_file_that_is_read_takes_bounded_memory(tmp_path, monkeypatch):
    """A list of empty lists is the worst there is for its size."""
    monkeypatch.setattr(arc_json, "LARGEST_FILE_BYTES", 2**20)
    bomb = "[" + "[]," * (2**20 // 3 - 2) + "[]]"
    (tmp_path / "arc-agi_evaluation_challenges.json").write_text(bomb)
    tracemalloc.start()
    with pytest.raises(UserError, match="expected puzzles by name, found a list"):
        read_subset(tmp_path, "evaluation")
    assert tracemalloc.get_traced_memory()[1] < 40 * 2**20
    tracemalloc.stop()


def test_a_folder_in_place_of_a_file_and_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "arc-agi_evaluation_challenges.json"
    path.write_bytes(b'{"\xff\xfe": 1}')
    with pytest.raises(UserError, match="not JSON that can be read"):
        read_subset(tmp_path, "evaluation")
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="is missing"):
        read_subset(tmp_path, "evaluation")


@pytest.fixture
def data_set(tmp_path) -> Path:
    splits = {"train": (METADATA, arrays()), "test": (METADATA, arrays())}
    assert write_dataset(tmp_path / "set", splits, ["<blank>", "a", "b"], RECIPE)
    return tmp_path / "set"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sets": ["../../other"]}, "sets is ['../../other'], expected names"),
        ({"sets": ["/etc/passwd"]}, "sets is ['/etc/passwd'], expected names"),
        ({"sets": [".."]}, "sets is ['..']"),
        ({"sets": ["a/b"]}, "sets is ['a/b']"),
        ({"sets": ["a\0b"]}, r"sets is ['a\x00b']"),
        ({"sets": ["all\n"]}, r"sets is ['all\n']"),
        ({"sets": [["all"]]}, "sets is [list]"),
        ({"sets": ["all"] * 100}, "sets is ['all', 'all', 'all', …]"),
        ({"sets": "all"}, "sets is 'all', expected list"),
        ({"seq_len": 10**30}, "seq_len is 1000000000000000000000000000000, expected less than 2147483648"),
        ({"seq_len": 4.0}, "seq_len is 4.0, expected int"),
        ({"seq_len": [4] * 1000}, "seq_len is [4, 4, 4, …], expected int"),
        ({"seq_len": {"a": 1}}, "seq_len is a dict, expected int"),
        ({"vocab_size": -1}, "vocab_size is -1, expected at least 1"),
        ({"pad_id": 6}, "pad_id is 6, expected less than vocab_size"),
        ({"blank_identifier_id": -1}, "blank_identifier_id is -1, expected less than num_puzzle_identifiers"),
        ({"mean_puzzle_examples": float("nan")}, "mean_puzzle_examples is nan, expected less than"),
        ({"mean_puzzle_examples": float("inf")}, "mean_puzzle_examples is inf"),
    ],
)
def test_metadata_with_tricks_is_refused(data_set, changes, message):
    rewrite_json(data_set / "train" / "dataset.json", **changes)
    with pytest.raises(UserError) as caught:
        load_split(data_set, "train")
    assert message in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


def header(text: str) -> bytes:
    """A `.npy` file of this header and a few bytes."""
    padded = text.encode().ljust(118 - 10) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded + bytes(64)


@pytest.mark.parametrize("field", ["inputs", "puzzle_indices", "puzzle_identifiers"])
@pytest.mark.parametrize(
    "content",
    [
        header("{'descr': '<i4', 'fortran_order': False, 'shape': (100000000000,), }"),
        header("{'descr': '<i4', 'fortran_order': False, 'shape': (-1,), }"),
        header("{'descr': '<i4', 'fortran_order': False, 'shape': (10**9,), }"),
        header("{'descr': '<i4', 'fortran_order': False, 'shape': (4611686018427387904, 4), }"),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (4,), }"),
        header("{'descr': 'm8[s]', 'fortran_order': False, 'shape': (4,), }"),
        header("{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (4,), }"),
        header("__import__('os').system('touch hacked')"),
        header("(" * 90),
        header("{'descr': '<i4'"),
        header("  {'descr': '<i4',\n\n   }"),
        b"",
        b"\x93NUMPY",
        b"\x93NUMPY\x09\x00" + bytes(100),
        b"PK\x03\x04" + bytes(100),
        b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.",
    ],
    ids=range(16),
)
def test_arrays_with_tricks_are_refused(data_set, field, content):
    path = data_set / "train" / f"all__{field}.npy"
    path.write_bytes(content)
    before = sorted(data_set.rglob("*")), sorted(Path.cwd().iterdir())
    tracemalloc.start()
    with warnings.catch_warnings(record=True) as warned, pytest.raises(UserError, match=f"{field}.npy: ") as caught:
        load_split(data_set, "train")
    assert not warned and tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    assert before == (sorted(data_set.rglob("*")), sorted(Path.cwd().iterdir()))


@pytest.mark.parametrize("kept", [0, 5, 60, 127, 130, 147])
def test_a_truncated_array_is_refused(data_set, kept):
    for field in ("inputs", "labels", "puzzle_indices"):
        path = data_set / "train" / f"all__{field}.npy"
        whole = path.read_bytes()
        if kept < len(whole):
            path.write_bytes(whole[:kept])
            with pytest.raises(UserError, match="not an array"):
                load_split(data_set, "train")
            path.write_bytes(whole)


@pytest.mark.parametrize("dtype", [np.uint64, np.int8, ">i4"])
def test_indices_of_any_integer_type_are_read(data_set, dtype):
    for field in ("puzzle_indices", "group_indices", "puzzle_identifiers"):
        np.save(data_set / "train" / f"all__{field}.npy", arrays()[field].astype(dtype))
    loaded = load_split(data_set, "train")
    assert loaded.puzzle_indices.tolist() == [0, 2, 3, 5] and loaded.largest_puzzle == 2


def test_identifiers_and_recipes_with_tricks_are_refused(data_set):
    for content in ("{", "[1]", "{}", "[" * 100_000, '"x"'):
        (data_set / "identifiers.json").write_text(content)
        with pytest.raises(UserError, match=r"identifiers.json: (not JSON|expected a list of names)"):
            read_identifiers(data_set)
    (data_set / "recipe.json").write_text("[" * 100_000)
    assert read_recipe(data_set) is None


@pytest.mark.parametrize(
    "record",
    [
        {"recipe": RECIPE, "findings": []},
        {"findings": {}},
        {"recipe": RECIPE, "findings": {"a\n\x1b[31mb": ["\ud800", 1, {}]}},
        {"recipe": {"\n\x1b[31m": "\ud800" * 9999}},
        {"recipe": {"a": [[]] * 9999}, "content_sha256": "\x1b[2J" * 9999},
    ],
    ids=range(5),
)
def test_a_recipe_of_somebody_else_stays_on_its_lines(data_set, record, tmp_path):
    (data_set / "recipe.json").write_text(json.dumps(record))
    found = [build_summary(data_set, False, 1.0), inspected(data_set, inspect(data_set, lambda *_: None))]
    try:
        assert is_built(data_set, RECIPE)
    except UserError as error:
        found.append(str(error))
    for text in found:
        assert all(line.isprintable() and len(line) < 1200 for line in text.splitlines()), text


def test_links_to_what_has_no_end_are_not_read(data_set, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for target in (Path("/dev/zero"), tmp_path / "pipe"):
        for name in ("identifiers.json", "recipe.json", "task.json", "train/dataset.json"):
            (data_set / name).unlink(missing_ok=True)
            (data_set / name).symlink_to(target)
        for read in (
            lambda: read_identifiers(data_set),
            lambda: read_task(data_set / "task.json"),
            lambda target=target: MazeKind(5).read(target, data_dir=""),
        ):
            with pytest.raises(UserError, match=r"cannot be read .it is no ordinary file.; "):
                read()
        with pytest.raises(UserError, match="no data set at"):
            load_split(data_set, "train")
        assert read_recipe(data_set) is None
        with pytest.raises(DamagedError, match="no ordinary file"):
            read_whole(target, largest_bytes=9)


def sudoku_row() -> str:
    return f"made,{'.' * 40}{SUDOKU[40:]},{SUDOKU},3"


SUDOKU = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
MAZE_ROW = f",S G{'#' * 22},SoG{'#' * 22},2"
HEADER = "source,question,answer,rating"
TABLES = {
    "nothing": (b"", "line 1: expected the header"),
    "binary": (bytes(range(256)) * 9, "line 1: expected the header"),
    "UTF-16": (f"{HEADER}\n".encode("utf-16"), "line 1: expected the header"),
    "a mark of byte order": (f"{HEADER}\n".encode("utf-8-sig"), "line 1: expected the header"),
    "other columns": (b"question,answer\n1,2\n", "line 1: expected the header source,question,answer,rating; use"),
    "no rows": (f"{HEADER}\n".encode(), "has a header and no rows"),
    "zeros": (f"{HEADER}\n,\0,\0,\0\n".encode(), "line 2: the question has 1 cells"),
    "zeros in cells": (f"{HEADER}\n,{{zeros}},{{zeros}},1\n".encode(), "line 2: the question "),
    "no text": (f"{HEADER}\n,{{odd}},{{odd}},1\n".encode(), "line 2: the question "),
    "a line without an end": (f"{HEADER}\n,".encode() + b"." * 2**20, "line 2: longer than 65,536 characters"),
    "a header without an end": (b"." * 2**20, "line 1: longer than 65,536 characters"),
    "a field over many lines": (f'{HEADER}\n,"'.encode() + b".\n" * 2**18, "field larger than field limit"),
    "many columns": (f"{HEADER}\n{',' * 9999}\n".encode(), "line 2: "),
    "a stray quote": (f'{HEADER}\n,"a"b,c,1\n'.encode(), "line 2: "),
    "a return in a line": (f"{HEADER}\n,a\rb,c,1\n".encode(), "line 2: "),
}


@pytest.mark.parametrize("kind", ["sudoku", "maze"])
@pytest.mark.parametrize("case", TABLES)
def test_tables_with_tricks_are_refused(tmp_path, kind, case, capsys):
    content, message = TABLES[case]
    cells = 81 if kind == "sudoku" else 25
    content = content.replace(b"{zeros}", bytes(cells)).replace(b"{odd}", b"\xff" * cells)
    tables = tmp_path / "tables"
    tables.mkdir()
    whole = f"{HEADER}\n{sudoku_row() if kind == 'sudoku' else MAZE_ROW}\n".encode()
    for bad in ("train.csv", "test.csv"):
        for name in ("train.csv", "test.csv"):
            (tables / name).write_bytes(content if name == bad else whole)
        tracemalloc.start()
        assert trm(["build-data", kind, "--source", str(tables), "--output-dir", str(tmp_path / "set")]) == 2
        assert tracemalloc.get_traced_memory()[1] < 2**23
        tracemalloc.stop()
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and captured.err[:-1].isprintable()
        assert captured.err.startswith(f"trm: {tables / bad} ") and message in captured.err, captured.err
        assert len(captured.err) < 500
        assert [entry.name for entry in tmp_path.iterdir()] == ["tables"]


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "\0" * 81, "." * 80 + "\0", "\ufeff" + "." * 81, "\u0661" * 81, "\u00b2" * 81, "\uff11" * 81,
        "." * 82, "." * 10**6, "\n" * 10**6, "-" * 10**6, "55" + "." * 79, "1234567.." + "." * 7 + "89" + "." * 63,
        "\x1b[31m" + "." * 81, "S", "SG", "S.G..\n" * 5, "\u2028".join([".....", "S...G"]), ".....\n" * 50,
    ],
    ids=range(20),
)  # fmt: skip
def test_texts_with_tricks_are_refused(tmp_path, text):
    path = tmp_path / "puzzle.txt"
    path.write_text(text, encoding="utf-8")
    for kind in (SudokuKind(GEOMETRIES[9]), MazeKind(5)):
        with pytest.raises(UserError) as caught:
            kind.read(path, data_dir="")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 400


def test_predictions_that_unpack_to_too_much_are_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(predictions, "LARGEST_BYTES", 2**20)
    zeros = np.zeros((2**12, 2**14), np.uint8)
    found = predictions.Predictions(np.zeros(2**12, np.int32), zeros, zeros, np.zeros(2**12, np.float32))
    predictions.save_predictions(tmp_path / "p.npz", found)
    assert (tmp_path / "p.npz").stat().st_size < 2**20
    tracemalloc.start()
    with pytest.raises(
        UserError, match=r"holds no predictions \(134,\d+,\d+ bytes unpacked, expected at most 1,048,576"
    ):
        predictions.load_predictions(tmp_path / "p.npz")
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


def test_a_value_is_shown_in_brief():
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    assert [brief(value) for value in (deep, "x" * 999, 1.5, None, {}, [1, "a"], [{}] * 9)] == [
        "[list]", "'" + "x" * 39, "1.5", "None", "a dict", "[1, 'a']", "[dict, dict, dict, …]",
    ]  # fmt: skip


def test_the_command_line_says_it_in_one_line_with_status_2(tmp_path):
    source = write_source(tmp_path / "files")
    path = source / "arc-agi_concept_challenges.json"
    path.write_text(path.read_text().replace("[[", "[[99, ", 1))
    command = [sys.executable, "-m", "train_jax", "build-data", "arc", "--source", str(source), "--num-aug", "3"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    shown = subprocess.run(
        [*command, "--output-dir", str(tmp_path / "set")], capture_output=True, text=True, env=environment
    )
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (2, "", 1)
    assert shown.stderr.startswith(f"trm: {path}: puzzle concept0, ") and "expected" in shown.stderr
    assert [entry.name for entry in tmp_path.iterdir()] == ["files"]


def test_damaged_files_are_read_or_refused():
    """Ten thousand of them: `python -m benchmarks.fuzz_data`."""
    ends, bad = fuzz(300, seed=2026)
    assert not bad, bad[0]
    assert sum(count for (_, end), count in ends.items() if end == "read") > 10
    assert sum(count for (_, end), count in ends.items() if end == "refused in one line") > 150
    assert {how.split(":")[0] for how, _ in ends} == {"build", "load", "score", "sudoku", "maze", "inspect"}
