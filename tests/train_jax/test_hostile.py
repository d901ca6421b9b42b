"""Files from strangers: read, or refused in one line with the place and the remedy, and nothing is written."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.refusal import refusal
from support.scripts import ROOT
from support.small_set import RECIPE, rewrite_json, splits

from campaigns.fuzz_data import fuzz
from train_jax.cli.build_data import builders
from train_jax.errors import UserError
from train_jax.puzzles.arc import json as arc_json
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.arc.json import read_subset, read_task
from train_jax.puzzles.building import LAYOUT, write_dataset
from train_jax.puzzles.format import load_split
from train_jax.puzzles.inspection import build_summary, inspect
from train_jax.puzzles.maze.kind import MazeKind
from train_jax.puzzles.metadata import read_identifiers, read_recipe
from train_jax.puzzles.terminal import inspected
from train_jax.storage.new_dataset import is_built
from train_jax.storage.untrusted import DamagedError, read_whole

GOOD = {"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[3]]}]}
ODD_NAMES = ("../../etc/passwd", "..", "", "<blank>", "a\nb", "a\n", "a|||t0|||0123456789", "x" * 65)
NOT_A = "puzzle a: expected an object with train and test, found"
SOLVED = {"a": GOOD}
FILES = [
    ('{"a": 1', None, "is not valid JSON"), ("[" * 100_000, None, "is not valid JSON (maximum recursion depth"),
    ('{"a": %s}' % ("9" * 5000), None, "is not valid JSON (Exceeds the limit"), ({}, None, "contains no puzzles"),
    ('{"x": {}, "x": {}}', None, "is not valid JSON ('x' occurs twice in an object)"),
    ([], None, "expected an object of puzzles by name, found a list"), ({"a": []}, None, f"{NOT_A} list"),
    *(({name: GOOD}, None, "is not a valid puzzle name") for name in ODD_NAMES),
    ({"a": {"train": []}}, None, f"{NOT_A} ['train']"), ({"a": GOOD | {"train": {}}}, None, "a: train is a dict"),
    ({"a": GOOD | {"test": []}}, None, "a: test is an empty list"),
    ({"a": GOOD | {"train": [3]}}, None, "train example 1: expected an object with input and output, found int"),
    ({"a": GOOD | {"test": [{"output": [[1]]}]}}, None, "puzzle a, test example 1: expected an object with input, and"),
    (SOLVED, [], "expected an object of puzzles by name"), (SOLVED, {"a": []}, "found 0"),
    (SOLVED, {}, "puzzle a: expected a list of 1 solutions, found none"),
]  # fmt: skip
GRIDS = [
    ([1, 2], "is not a list of rows"), ([], "has 0 rows and 0 columns, expected 1 to 30 of each"),
    ([[0] * 31], "has 1 rows and 31 columns"), ([[0, 1], [0]], "row 2 has 1 cells, expected 2 as in the first"),
    ([[0, 10]], "row 1 contains 10, expected colours 0 to 9"), ([[0, {}]], "row 1 contains a dict"),
    *(([[0, cell]], f"row 1 contains {cell!r}") for cell in (-1, 2**64, True, 1.0, float("nan"), None, "1", [1])),
]  # fmt: skip


def arc_refusal(folder: Path, challenges: object, solutions: object = None) -> str:
    """Returns the error for these files; a text is written as it is."""
    for kind, content in (("challenges", challenges), ("solutions", solutions)):
        if content is not None:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / f"arc-agi_evaluation_{kind}.json").write_text(text)
    options = {"subsets": ("evaluation",), "test_subsets": ("evaluation",), "num_aug": 0, "seed": 0}
    message = refusal(folder, lambda: ArcData(str(folder), output_dir=folder / "set", **options).build())
    assert "use the official ARC files" in message
    return message


@pytest.mark.parametrize(("challenges", "solutions", "message"), FILES, ids=range(len(FILES)))
def test_arc_files_that_hold_no_puzzles_are_refused(tmp_path, challenges, solutions, message):
    assert message in arc_refusal(tmp_path, challenges, solutions)


@pytest.mark.parametrize(("grid", "message"), GRIDS, ids=range(len(GRIDS)))
def test_arc_grids_that_are_none_are_refused_wherever_they_are(tmp_path, grid, message):
    colon = ":" * message.startswith("row")
    in_train = {"a": GOOD | {"train": [{"input": grid, "output": [[1]]}]}}
    assert f"puzzle a, train example 1: input{colon} {message}" in arc_refusal(tmp_path, in_train)
    assert message in arc_refusal(tmp_path, {"a": GOOD | {"test": [{"input": [[1]], "output": grid}]}})
    assert f"puzzle a, solution 1{colon} {message}" in arc_refusal(tmp_path, {"a": GOOD}, {"a": [grid]})


def test_arc_files_of_odd_sizes_and_types_are_refused(tmp_path, monkeypatch):
    path = tmp_path / "arc-agi_evaluation_challenges.json"

    def refused(limit_bytes: int = 2**20) -> str:
        return refusal(tmp_path, lambda: read_subset(tmp_path, "evaluation"), limit_bytes=limit_bytes)

    with path.open("wb") as file:
        file.truncate(2**36)
    assert "68,719,476,736 bytes, expected at most 33,554,432" in refused()
    path.write_bytes(b'{"\xff\xfe": 1}')
    assert "is not valid JSON" in refused()
    monkeypatch.setattr(arc_json, "LARGEST_FILE_BYTES", 2**20)
    path.write_text("[" + "[]," * (2**20 // 3 - 2) + "[]]")  # empty lists take the most memory for their size
    assert "expected an object of puzzles by name, found a list" in refused(limit_bytes=40 * 2**20)


@pytest.fixture
def data_set(tmp_path) -> Path:
    assert write_dataset(tmp_path / "set", splits(), ["<blank>", "a", "b"], RECIPE)
    return tmp_path / "set"


def with_header(text: str) -> bytes:
    """Returns a `.npy` file of this header and a few bytes."""
    return b"\x93NUMPY\x01\x00" + (109).to_bytes(2, "little") + text.encode().ljust(108) + b"\n" + bytes(64)


BAD_METADATA = [
    *(({"sets": [name]}, f"sets is [{name!r}]") for name in ("../../x", "/etc/passwd", "..", "a/b", "a\0b", "all\n")),
    ({"sets": [["all"]]}, "sets is [list], expected one name"), ({"vocab_size": -1}, "is -1, expected at least 1"),
    ({"seq_len": 10**30}, f"is {10**30}, expected less than 2147483648"),
    ({"seq_len": [4] * 1000}, "seq_len is [4, 4, 4, …], expected int"),
    ({"pad_id": 6}, "pad_id is 6, expected less than vocab"),
    *(({"mean_puzzle_examples": float(x)}, f"mean_puzzle_examples is {x}, expected less than") for x in ("nan", "inf")),
]  # fmt: skip
FIELDS = "{{'descr': {}, 'fortran_order': False, 'shape': {}, }}"
ARRAYS = [
    *(with_header(FIELDS.format("'<i4'", shape)) for shape in ("(10**9,)", "(-1,)", f"({10**11},)", f"({2**62}, 4)")),
    *(with_header(FIELDS.format(descr, "(4,)")) for descr in ("'|O'", "'m8[s]'", "[('a', '<i4')]")),
    *map(with_header, ("__import__('os').system('touch x')", "(" * 90, "{'descr': '<i4'", "  {'descr': '<i4',\n\n}")),
    b"", b"\x93NUMPY", b"\x93NUMPY\x09\x00" + bytes(100), b"PK\x03\x04" + bytes(100),
    b"\x80\x04cos\nsystem\n(S'touch hacked'\ntR.",
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), BAD_METADATA, ids=range(len(BAD_METADATA)))
def test_metadata_with_tricks_is_refused(data_set, changes, message):
    rewrite_json(data_set / "train" / "dataset.json", **changes)
    assert message in refusal(data_set, lambda: load_split(data_set, "train"))


@pytest.mark.parametrize("field", ["inputs", "labels", "puzzle_indices", "puzzle_identifiers"])
@pytest.mark.parametrize("content", [*ARRAYS, 0, 5, 60, 127, 130, 147], ids=range(len(ARRAYS) + 6))
def test_arrays_with_tricks_and_truncated_ones_are_refused(data_set, field, content):
    path = data_set / "train" / f"all__{field}.npy"
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-1][:content])
    message = refusal(data_set, lambda: load_split(data_set, "train"), limit_bytes=2**20)
    assert f"{field}.npy is not a valid array" in message or f"{field}.npy: dtype" in message


@pytest.mark.parametrize("content", ["{", "[1]", "{}", "[" * 100_000, '"x"'])
def test_identifiers_and_recipes_with_tricks_are_not_read(data_set, content):
    (data_set / "identifiers.json").write_text(content)
    message = refusal(data_set, lambda: read_identifiers(data_set))
    assert "identifiers.json is not valid JSON" in message or "identifiers.json: expected a list of names" in message
    (data_set / "recipe.json").write_text(content)
    assert read_recipe(data_set) is None and load_split(data_set, "train").kind is None


@pytest.mark.parametrize(
    "record",
    [
        {"recipe": RECIPE, "findings": []},
        {"recipe": RECIPE, "findings": {"a\n\x1b[31mb": ["\ud800", 1, {}]}, "kind": "\n\x1b[31m", "content": [3]},
        {"recipe": {"a": [[]] * 9999}, "content_sha256": "\x1b[2J" * 9999, "kind": {}},
    ],
    ids=range(3),
)
def test_a_recipe_of_somebody_else_stays_on_its_lines(data_set, record):
    (data_set / "recipe.json").write_text(json.dumps(record))
    shown = [build_summary(data_set, False, 1.0), inspected(data_set, inspect(data_set, lambda *_: None))]
    try:
        assert is_built(data_set, RECIPE, LAYOUT)
    except UserError as error:
        shown.append(str(error))
    for text in shown:
        assert all(line.isprintable() and len(line) < 1200 for line in text.splitlines()), text


@pytest.mark.parametrize("target", ["/dev/zero", "pipe"])
def test_links_to_what_has_no_end_are_not_read(data_set, tmp_path, target):
    os.mkfifo(tmp_path / "pipe")
    for name in ("identifiers.json", "recipe.json", "task.json", "train/dataset.json"):
        (data_set / name).unlink(missing_ok=True)
        (data_set / name).symlink_to(tmp_path / target)
    for call in (
        lambda: read_identifiers(data_set),
        lambda: read_task(data_set / "task.json"),
        lambda: MazeKind(5).read(tmp_path / target, data_dir=""),
    ):
        assert "cannot be read (it is not a regular file); " in refusal(data_set, call)
    assert "no data set at" in refusal(data_set, lambda: load_split(data_set, "train"))
    assert read_recipe(data_set) is None
    with pytest.raises(DamagedError, match="not a regular file"):
        read_whole(tmp_path / target, largest_bytes=9)


SUDOKU = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
ROWS = {"sudoku": f"made,{'.' * 40}{SUDOKU[40:]},{SUDOKU},3", "maze": f",S G{'#' * 22},SoG{'#' * 22},2"}
HEADER = b"source,question,answer,rating\n"
NO_HEADER = "line 1: expected the header"
NO_PUZZLE = "line 2: the question "
TABLES = {
    "binary": (bytes(range(256)) * 9, NO_HEADER), "no rows": (HEADER, "has no rows"),
    "other columns": (b"question,answer\n1,2\n", f"{NO_HEADER} source,question,answer,rating; use"),
    "odd": (HEADER + b",{odd},{odd},1\n", NO_PUZZLE), "columns": (HEADER + b"," * 9999, "line 2: "),
    "a line without an end": (HEADER + b"," + b"." * 2**20, "line 2: longer than 65,536 characters"),
    "a field over many lines": (HEADER + b',"' + b".\n" * 2**18, "field larger than field limit"),
    "a stray quote": (HEADER + b',"a"b,c,1\n', "line 2: "), "a return in a line": (HEADER + b",a\rb,c,1\n", "line 2: "),
}  # fmt: skip


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("case", TABLES)
@pytest.mark.parametrize("bad", ["train.csv", "test.csv"])
def test_tables_with_tricks_are_refused(tmp_path, kind, case, bad):
    content, message = TABLES[case]
    cells = 81 if kind == "sudoku" else 25
    content = content.replace(b"{odd}", b"\xff" * cells)
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_bytes(content if name == bad else HEADER + ROWS[kind].encode() + b"\n")
    config = builders()[kind](source=str(tmp_path), output_dir=tmp_path / "set")
    said = refusal(tmp_path, lambda: config.build(lambda *_: None), limit_bytes=2**23)
    assert said.startswith(f"{tmp_path / bad} ") and message in said


@pytest.mark.slow
def test_damaged_files_are_read_or_refused():
    """`python -m campaigns.fuzz_data` tests ten thousand files."""
    ends, bad = fuzz(100, seed=2026)
    assert not bad, bad[0]
    assert sum(count for (_, end), count in ends.items() if end == "read") > 3
    assert sum(count for (_, end), count in ends.items() if end == "refused in one line") > 50
    assert {how.split(":")[0] for how, _ in ends} == {"build", "load", "score", "sudoku", "maze", "inspect", "run"}


@pytest.mark.campaign
def test_wrong_commands_are_refused_in_one_line():
    """In a process of its own, which forks before JAX has a backend."""
    command = [sys.executable, "-m", "campaigns.fuzz_commands", "--cases", "300", "--seed", "2026"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
