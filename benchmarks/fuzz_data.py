"""Throws damaged files at the readers: each must be read, or refused in one line without anything written.

    python -m benchmarks.fuzz_data [--cases 10000] [--seed 0]

A case damages one file of a small ARC source, table of Sudokus or mazes, data set or predictions file (bytes, JSON
structure, arrays, rows and cells), then runs what a user would run. Prints how the cases ended; exit status 1 if one
ended in anything but success or a user's error.
"""

import argparse
import collections
import copy
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from train_jax.errors import UserError
from train_jax.report.built import build_summary, inspected, samples
from train_jax.tasks.puzzles.arc.dataset import build_arc
from train_jax.tasks.puzzles.batches import train_batch
from train_jax.tasks.puzzles.format import FIELDS, load_split
from train_jax.tasks.puzzles.inspection import inspect
from train_jax.tasks.puzzles.maze import dataset as maze_dataset
from train_jax.tasks.puzzles.maze.generator import generate as mazes
from train_jax.tasks.puzzles.maze.grid import text_of
from train_jax.tasks.puzzles.mixture import load_mixture
from train_jax.tasks.puzzles.predictions import Predictions, save_predictions
from train_jax.tasks.puzzles.sudoku import dataset as sudoku_dataset
from train_jax.tasks.puzzles.sudoku.generator import generate as sudokus
from train_jax.tasks.puzzles.sudoku.grid import GEOMETRIES
from train_jax.tasks.puzzles.voting import score

ODD_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 9, 10, 31, 2**31, 2**63, 2**64, 10**400, 0.5, 1e400, float("nan"), "", "0",
    "x" * 10_000, "../../etc/passwd", "/etc/passwd", "a/b", "..", "a\x00b", "\n\nTraceback", "\ud800",
    "|||t0|||0123456789", [], {}, [[]], [[[]]], [[0] * 31], [[0]] * 31, [[0, 1], [0]], [[10]], [[-1]], [[True]],
    [["1"]], [[1.0]], [[None]], {"input": [[1]]},
]  # fmt: skip
TRANSFORMS: dict[str, Callable[[np.ndarray, random.Random], Any]] = {
    "type": lambda array, rng: array.astype(rng.choice([np.float32, bool, "U3", np.complex64, "S2", "m8[s]", "M8[s]"])),
    "integer type": lambda array, rng: array.astype(rng.choice([">i2", "<u8", np.int8, np.uint64, ">i8"])),
    "objects": lambda array, rng: array.astype(object),
    "records": lambda array, rng: np.zeros(array.shape, [("a", int), ("b", float)]),
    "cut": lambda array, rng: array[: rng.randrange(len(array))],
    "longer": lambda array, rng: np.concatenate([array, array]),
    "narrower": lambda array, rng: array[..., : rng.randrange(array.shape[-1])],
    "order": lambda array, rng: array[::-1],
    "columns first": lambda array, rng: np.asfortranarray(array),
    "axes": lambda array, rng: array[None],
    "scalar": lambda array, rng: np.array(rng.choice([0, -1, 2**40])),
    "none": lambda array, rng: array[:0],
    "one value": lambda array, rng: with_value(array, rng, [-1, 5, 200, 2**31 - 1, -(2**31), 2**62]),
    "all values": lambda array, rng: np.full_like(array, rng.randrange(100)),
}


def with_value(array: np.ndarray, rng: random.Random, values: list[int]) -> np.ndarray:
    array = array.astype(np.int64)
    array.flat[rng.randrange(array.size)] = rng.choice(values)
    return array


def damage_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Cut, flipped, repeated, filled in."""
    at = rng.randrange(len(raw) + 1)
    length = rng.choice([1, 2, 8, 100])
    return rng.choice(
        [
            lambda: raw[:at],
            lambda: raw[:at] + bytes(rng.randrange(256) for _ in range(length)) + raw[at + length :],
            lambda: raw[:at] + raw[at + length :],
            lambda: raw[:at] + raw[max(at - length, 0) :],
            lambda: raw[:at] + b"\x00" * length + raw[at:],
            lambda: rng.choice(
                [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe"]
            ),
            lambda: (
                raw[: min(at, 120)] + rng.choice([b"(", b"9" * 30, b"'", b"\n", b"{", b"}", b"-"]) + raw[min(at, 120) :]
            ),
        ]
    )()


def damage_json(raw: bytes, rng: random.Random) -> bytes:
    """One node replaced, removed, repeated or renamed."""
    content = json.loads(raw)
    node = content
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(node[key], (dict, list)) and node[key] and rng.random() < 0.8:
            node = node[key]
            continue
        kind = rng.randrange(4)
        if kind == 0 or (kind == 3 and isinstance(node, list)):
            node[key] = copy.deepcopy(rng.choice(ODD_VALUES))
        elif kind == 1:
            del node[key]
        elif kind == 2 and isinstance(node, list):
            node.append(copy.deepcopy(node[key]))
        elif isinstance(node, dict):
            names = [str(value) for value in ODD_VALUES if isinstance(value, str)]
            node[rng.choice(names)] = copy.deepcopy(node[key]) if kind == 2 else node.pop(key)
        break
    if rng.random() < 0.02:
        content = rng.choice([content, list(content) if isinstance(content, dict) else {}, 3, "x"])
    return json.dumps(content).encode("utf-8", "surrogatepass")


def damage_table(raw: bytes, rng: random.Random) -> bytes:
    """A row, a column or a cell replaced, removed, repeated, exchanged or quoted."""
    rows = [line.split(b",") for line in raw.split(b"\n")]
    row = rng.randrange(len(rows) - 1)
    column = rng.randrange(len(rows[row]))
    text = rows[row][column]
    at = rng.randrange(len(text) + 1)
    odd = rng.choice(
        [b"", b"\0", b'"', b",", b"\r", b"\n", b"0", b"9", b".", b" ", b"#", b"S", b"o", b"\xff", b"x" * 70_000]
    )
    kind = rng.randrange(8)
    if kind == 0:
        rows[row][column] = text[:at] + odd + text[at + len(odd[:1]) :]
    elif kind == 1:
        rows[row][column] = text[:at] + odd + text[at:]
    elif kind == 2:
        rows[row][column] = odd * rng.choice([1, len(text)])
    elif kind == 3:  # fewer givens or walls: several solutions, another path
        rows[row][column] = text[:at] + rng.choice([b".", b" "]) * (len(text) - at)
    elif kind == 4:
        del rows[row][column]
    elif kind == 5:
        rows[row].insert(column, rng.choice([text, odd]))
    elif kind == 6:
        rows[row], rows[-2] = rows[-2], rows[row]
    else:
        rows.insert(rng.randrange(len(rows)), rows[row])
    return b"\n".join(b",".join(each) for each in rows)


def damage_array(path: Path, rng: random.Random) -> str:
    kind = rng.choice(list(TRANSFORMS))
    array = np.load(path)
    np.save(path, TRANSFORMS[kind](array, rng), allow_pickle=True)
    return kind


def damage(path: Path, rng: random.Random) -> str:
    """Damages a file in place; returns how."""
    if rng.random() < 0.02:
        path.unlink()
        if rng.random() < 0.5:
            path.mkdir()
        return "no file"
    if path.suffix == ".npy" and rng.random() < 0.6:
        return "array " + damage_array(path, rng)
    if path.suffix == ".json" and rng.random() < 0.75:
        path.write_bytes(damage_json(path.read_bytes(), rng))
        return "json"
    if path.suffix == ".csv" and rng.random() < 0.75:
        path.write_bytes(damage_table(path.read_bytes(), rng))
        return "table"
    path.write_bytes(damage_bytes(path.read_bytes(), rng))
    return "bytes"


def silent(*_: object) -> None:
    pass


OPTIONS: dict[str, Any] = {"subsample_size": None, "seed": 0, "overwrite": False, "progress": silent}
BUILD_TABLES: dict[str, Callable[[Path, Path], bool]] = {
    "sudoku": lambda source, output: sudoku_dataset.build_from_tables(
        output, str(source), min_difficulty=None, num_aug=1, **OPTIONS
    ),
    "maze": lambda source, output: maze_dataset.build_from_tables(
        output, str(source), min_path=None, augment=True, **OPTIONS
    ),
}


class Setting:
    """Whole files to damage, and what a user does with them."""

    def __init__(self, folder: Path):
        self.source, self.data = folder / "source", folder / "data"
        self.predictions = folder / "predictions.npz"
        self.tables = {kind: folder / f"{kind}-tables" for kind in BUILD_TABLES}
        self.sets = {"arc": self.data} | {kind: folder / f"{kind}-set" for kind in BUILD_TABLES}
        self.source.mkdir(parents=True)
        self.make_tables()
        rng = random.Random(0)
        for subset in ("training", "evaluation"):
            challenges, solutions = {}, {}
            for number in range(2):
                name = f"{subset}{number}"
                challenges[name] = {
                    "train": [{"input": small_grid(rng), "output": small_grid(rng)} for _ in range(2)],
                    "test": [{"input": small_grid(rng)}],
                }
                solutions[name] = [small_grid(rng)]
            for kind, content in (("challenges", challenges), ("solutions", solutions)):
                (self.source / f"arc-agi_{subset}_{kind}.json").write_text(json.dumps(content))
        self.build(self.source, self.data)
        test = load_split(self.data, "test")
        found = (test.puzzle_identifiers, np.asarray(test.inputs), np.asarray(test.labels))
        save_predictions(self.predictions, Predictions(*found, np.zeros(len(found[0]), np.float32)))

    def make_tables(self) -> None:
        rng = np.random.default_rng(0)
        made = {
            "sudoku": [
                ["".join(map(str, each)) for each in array]
                for array in sudokus(12, 45, GEOMETRIES[9], rng, progress=silent)
            ],
            "maze": [
                [text_of(each).replace("\n", "") for each in array]
                for array in mazes(12, 6, 8, "corridors", rng, silent)
            ],
        }
        for kind, texts in made.items():
            self.tables[kind].mkdir()
            rows = [f"made,{question},{answer},{7}\n" for question, answer in zip(*texts, strict=True)]
            for name, part in (("train", rows[:8]), ("test", rows[8:])):
                (self.tables[kind] / f"{name}.csv").write_text("".join(["source,question,answer,rating\n", *part]))
            BUILD_TABLES[kind](self.tables[kind], self.sets[kind])

    def build(self, source: Path, output: Path) -> None:
        subsets = ("training", "evaluation")
        build_arc(output, source, subsets=subsets, test_subsets=subsets[1:], num_aug=2, seed=0, workers=1)

    def targets(self) -> dict[str, list[Path]]:
        """By what is run: the files that may be damaged for it."""
        arrays = [Path(split) / f"all__{field}.npy" for split in ("train", "test") for field in FIELDS]
        metadata = [Path(split) / "dataset.json" for split in ("train", "test")]
        tables = [Path("train.csv"), Path("test.csv")]
        return {
            "sudoku": tables,
            "maze": tables,
            "inspect": arrays + metadata * 2 + [Path("recipe.json")] * 4,
            "build": [path.relative_to(self.source) for path in sorted(self.source.iterdir())],
            "load": arrays + metadata * 3,
            "score": [Path("test_puzzles.json"), Path("identifiers.json"), Path("test/dataset.json"), self.predictions],
        }

    def run(self, what: str, folder: Path) -> None:
        if what == "build":
            self.build(folder, folder.parent / "built")
        elif what in BUILD_TABLES:
            BUILD_TABLES[what](folder, folder.parent / "built")
        elif what == "inspect":
            found = inspected(folder, inspect(folder, silent)) + build_summary(folder, False, 1.0)
            found += "".join(samples(folder, 1, 100, styled=False))
            if not all(line.isprintable() for line in found.split("\n")):
                raise AssertionError(f"not fit for a terminal: {found!r}")
        elif what == "load":
            data = load_mixture(str(folder), "train")
            for step in range(3):
                data.train_batch(seed=0, step=step, batch_size=4)
            train_batch(data.parts[0], seed=1, step=9, batch_size=64)
            for _ in load_mixture(str(folder), "test").eval_batches(batch_size=4):
                pass
        else:
            score(folder, [folder.parent / self.predictions.name])


def small_grid(rng: random.Random) -> list[list[int]]:
    rows, cols = rng.randrange(1, 4), rng.randrange(1, 4)
    return [[rng.randrange(10) for _ in range(cols)] for _ in range(rows)]


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def run_case(setting: Setting, rng: random.Random, folder: Path) -> tuple[str, str]:
    """One case in an empty folder: (what was damaged and how, how it ended). A bad end is a text of several lines."""
    what = rng.choice(["build", "build", "load", "load", "score", "sudoku", "maze", "inspect", "inspect"])
    whole = {"build": setting.source, **setting.tables}.get(what, setting.data)
    if what == "inspect":
        whole = rng.choice(list(setting.sets.values()))
    shutil.copytree(whole, folder / "given")
    shutil.copy(setting.predictions, folder / setting.predictions.name)
    target = rng.choice(setting.targets()[what])
    path = folder / target.name if target.is_absolute() else folder / "given" / target
    how = f"{what}: {path.suffix} {damage(path, rng)}"
    before = listing(folder)
    try:
        setting.run(what, folder / "given")
    except UserError as error:
        if "\n" in str(error) or not str(error).isprintable() or len(str(error)) > 1000:
            return how, f"not one short line:\n{str(error)[:300]!r}"
        if listing(folder) != before:
            return how, f"refused, but written:\n{listing(folder) - before}"
        return how, "refused in one line"
    except Exception:
        return how, f"broke:\n{traceback.format_exc()}"
    return how, "read"


def fuzz(
    cases: int, seed: int, progress: Callable[[int], None] = lambda done: None
) -> tuple[collections.Counter, list[str]]:
    """How many cases ended how, by kind; and the bad ends, each with the number that repeats it."""
    ends: collections.Counter[tuple[str, str]] = collections.Counter()
    bad = []
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning is a line too many
        warnings.simplefilter("ignore", ResourceWarning)  # numpy leaves a file open whose header it cannot read
        setting = Setting(Path(scratch) / "whole")
        for case in range(cases):
            rng = random.Random(f"{seed} {case}")
            folder = Path(scratch) / "case"
            folder.mkdir()
            how, end = run_case(setting, rng, folder)
            shutil.rmtree(folder)
            if "\n" in end:
                bad.append(f"case {case} of seed {seed}, {how}: {end}")
            ends[how.split(" ")[0] + " " + how.split(" ")[1], end.split("\n")[0]] += 1
            progress(case + 1)
    return ends, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.monotonic()
    ends, bad = fuzz(options.cases, options.seed)
    for (how, end), count in sorted(ends.items()):
        print(f"{how:<20} {end:<24} {count:>7}")
    for text in bad[:10]:
        print(text)
    print(f"{options.cases} cases in {time.monotonic() - started:.0f} s: {len(bad)} bad ends")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
