"""Reads damaged files: each must be read, or rejected with one line, and then nothing may be written.

    python -m campaigns.fuzz_data [--cases 10000] [--seed 0]

A case damages one file of a small ARC source, table of Sudokus or mazes, data set, predictions file or run folder
(bytes, JSON structure, arrays, rows and cells), then runs the commands of a user. Prints the results; exits with
status 1 if a case ends in anything but success or a `UserError`. `python -m campaigns.fuzz_commands` runs whole
commands.
"""

import argparse
import collections
import contextlib
import dataclasses
import io
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

import numpy as np

from campaigns.damage import damage
from train_jax.cli import summary
from train_jax.errors import UserError
from train_jax.puzzles.arc.data import ArcData
from train_jax.puzzles.batches import load_mixture
from train_jax.puzzles.format import load_split
from train_jax.puzzles.inspection import build_summary, inspect
from train_jax.puzzles.maze.data import MazeData
from train_jax.puzzles.maze.generator import generate as mazes
from train_jax.puzzles.maze.grid import text_of
from train_jax.puzzles.metadata import FIELDS
from train_jax.puzzles.page import page
from train_jax.puzzles.sudoku.data import SudokuData
from train_jax.puzzles.sudoku.generator import generate as sudokus
from train_jax.puzzles.sudoku.grid import GEOMETRIES
from train_jax.puzzles.terminal import inspected, samples
from train_jax.puzzles.voting import Predictions, save_predictions, score
from train_jax.report.run_page import read_run_files
from train_jax.report.status_table import status_table
from train_jax.research.records import read_study
from train_jax.run.config import to_json
from train_jax.run.folder import RunFolder
from train_jax.run.presets import preset
from train_jax.run.status import read_status


def silent(*_: object) -> None:
    pass


BUILD_TABLES: dict[str, Callable[[Path, Path], bool]] = {
    "sudoku": lambda source, output: SudokuData(output_dir=output, source=str(source), num_aug=1).build(),
    "maze": lambda source, output: MazeData(output_dir=output, source=str(source), augment=True).build(),
}


class Setting:
    """The valid files to damage, and the commands that read them."""

    def __init__(self, folder: Path):
        self.source = folder / "source"
        self.data = folder / "data"
        self.predictions = folder / "predictions.npz"
        self.tables = {kind: folder / f"{kind}-tables" for kind in BUILD_TABLES}
        self.sets = {"arc": self.data} | {kind: folder / f"{kind}-set" for kind in BUILD_TABLES}
        self.source.mkdir(parents=True)
        self.make_tables()
        rng = random.Random(0)
        for subset in ("training", "evaluation"):
            challenges = {}
            solutions = {}
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
        self.run_folder = folder / "runs" / "group" / "one" / "seed-0"
        write_run(self.run_folder, self.sets["sudoku"])

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
            rows = [f"made,{puzzle},{answer},{7}\n" for puzzle, answer in zip(*texts, strict=True)]
            for name, part in (("train", rows[:8]), ("test", rows[8:])):
                (self.tables[kind] / f"{name}.csv").write_text("".join(["source,question,answer,rating\n", *part]))
            BUILD_TABLES[kind](self.tables[kind], self.sets[kind])

    def build(self, source: Path, output: Path) -> None:
        subsets = ("training", "evaluation")
        options = {"subsets": subsets, "test_subsets": subsets[1:], "num_aug": 2, "seed": 0}
        ArcData(str(source), output_dir=output, **options, workers=1).build()

    def targets(self) -> dict[str, list[Path]]:
        """Maps each command to the files that may be damaged for it."""
        arrays = [Path(split) / f"all__{field}.npy" for split in ("train", "test") for field in FIELDS]
        metadata = [Path(split) / "dataset.json" for split in ("train", "test")]
        tables = [Path("train.csv"), Path("test.csv")]
        return {
            "sudoku": tables,
            "maze": tables,
            "inspect": arrays + metadata * 2 + [Path("recipe.json")] * 4,
            "build": [path.relative_to(self.source) for path in sorted(self.source.iterdir())],
            "load": arrays + metadata * 3,
            "run": [path.relative_to(self.run_folder) for path in sorted(self.run_folder.rglob("*")) if path.is_file()],
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
            data.part(0).train_batch(seed=1, step=9, batch_size=64)
            for _ in load_mixture(str(folder), "test").eval_batches(batch_size=4):
                pass
        elif what == "run":
            read_run_folder(folder)
        else:
            score(folder, [folder.parent / self.predictions.name])


def write_run(folder: Path, data_dir: Path) -> None:
    """Writes the files of a finished run of puzzles, without training."""
    config = dataclasses.replace(preset("tiny"), data_dir=str(data_dir), run_dir=str(folder), steps=8)
    puzzles = load_split(data_dir, "test")
    metrics = {"count": float(puzzles.num_examples), "exact_accuracy": 0.0, "accuracy": 0.25, "lm_loss": 1.5}
    spent = {"session": 1, "step": 8, "seconds": {"steps": 2.0, "saving": 0.5}}
    events = [
        {"event": "start", "session": 1, "time": 1.0, "total_steps": 8},
        {"event": "continue", **spent, "time": 2.0, "step": 0},
        {"event": "progress", **spent, "time": 4.0},
        {"event": "end", **spent, "time": 5.0, "reason": "finished"},
    ]
    records = [
        {"step": step, "train/lm_loss": 2.0, "train/count": 3.0, "train/steps": 2.0, "step_seconds": 0.5}
        for step in (4, 8)
    ] + [{"step": 8, **{f"eval/{name}": value for name, value in metrics.items()}}]
    point = {"mean_steps": 2.0, "exact_accuracy": 0.0, "accuracy": 0.25}
    check = {"puzzles": 4, "agree": 4, "torch_exact_accuracy": 0.0, "max_logit_difference": 1e-6}
    early = {"threshold": 0.5, "steps": 2.0, "computed_steps": 3.0, "exact_accuracy": 0.0, "step": 8, "trajectories": 1,
             "depth": 4, "noise": 0.0}  # fmt: skip
    machine = {"devices": "1 x cpu", "parameters": 100, "processor": "one", "cores": 2, "versions": {"jax": "0.10"}}
    figures = metrics | {"train_steps": 8, "train_seconds": 2.5, "summary": "done", "data": "hash"}
    contents = {
        "dataset.json": dataclasses.asdict(puzzles.metadata), "machine.json": machine, "FINISHED": figures,
        "heartbeat.json": spent | {"time": 4.5, "kind": "steps", "step_time": 4.0},
        "evaluation/test.json": metrics, "evaluation/export_check.json": check,
        "evaluation/test_halting_curve.json": {"by_threshold": [point | {"threshold": 0.5}], "by_steps": [point]},
        "evaluation/test_halted_early.json": early,
    }  # fmt: skip
    texts = {name: json.dumps(content, indent=1) for name, content in contents.items()} | {
        "config.json": to_json(config)
    }
    texts |= {name: "".join(f"{json.dumps(line)}\n" for line in lines)
              for name, lines in (("events.jsonl", events), ("metrics.jsonl", records))}  # fmt: skip
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    predictions = np.repeat(np.asarray(puzzles.inputs)[None], 4, 0)
    logits = np.zeros(predictions.shape[:2], np.float32)
    np.savez(folder / "evaluation" / "test_predictions.npz", predictions=predictions, q_halt_logits=logits)


def read_run_folder(folder: Path) -> None:
    """Reads a run as `trm status`, `summary`, `report` and `analyze` do; each must read what the others refuse."""
    root = folder.with_name("root")
    (root / "group" / "one").mkdir(parents=True)
    (root / "group" / "one" / "seed-0").symlink_to(folder)
    read_study(str(root))
    shutil.rmtree(root)
    problems = []
    for read in (
        lambda: status_table([read_status(RunFolder(folder))], width=100),
        lambda: summary.main(summary.Summary(str(folder))),
        lambda: page(read_run_files(str(folder))),
    ):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                read()
        except UserError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def small_grid(rng: random.Random) -> list[list[int]]:
    rows = rng.randrange(1, 4)
    cols = rng.randrange(1, 4)
    return [[rng.randrange(10) for _ in range(cols)] for _ in range(rows)]


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def run_case(setting: Setting, rng: random.Random, folder: Path) -> tuple[str, str]:
    """Runs one case in an empty folder; returns (damage, result). A failure is a text of several lines."""
    often = ["build", "load", "inspect", "run"]
    what = rng.choice([*often, *often, "score", "sudoku", "maze"])
    whole = {"build": setting.source, "run": setting.run_folder, **setting.tables}.get(what, setting.data)
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
    """Runs all cases; returns the number of each result by kind, and the failures with their case numbers."""
    ends: collections.Counter[tuple[str, str]] = collections.Counter()
    bad = []
    with tempfile.TemporaryDirectory() as scratch, warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning would be a second line
        warnings.simplefilter("ignore", ResourceWarning)  # NumPy does not close a file whose header it cannot read
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
    print(f"{options.cases} cases in {time.monotonic() - started:.0f} s: {len(bad)} failures")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
