"""Compares builders, batches and votes with the published ones, for the same work, in one run.

    python -m benchmarks.data --published PATH --arc DIR [--num-aug 100] [--full] [--markdown docs/data.md]

PATH is the folder of the published code, DIR the folder of the official ARC files. The published code needs its own
packages (pydantic, and numba for its evaluator) in this Python environment. Every measurement is a separate process;
the two sides alternate, and the fastest run of each side counts. The time excludes imports. `--full` adds our build and
our vote with 1000 augmentations, for which the published builder needs more memory than most laptops have.
"""

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import published
from train_jax.puzzles.format import PuzzleSet, load_split
from train_jax.puzzles.sudoku.generator import generate
from train_jax.puzzles.sudoku.grid import geometry_of_size
from train_jax.puzzles.voting import Predictions, save_predictions

HEADING = "## Speed"
"""The section of the page `--markdown` that is replaced, up to the end of the page."""
SUBSETS = ("training", "evaluation", "concept")
BATCHES = 40
SUDOKUS, SUDOKU_AUGMENTATIONS = 1000, 200
AUGMENTED_IN_MEMORY = 100_000
BUSY = 1.0
"""Load average above which the table notes that other work was running."""

OURS = {
    "arc": """
from train_jax.puzzles.arc.data import ArcData
from pathlib import Path
source, output, subsets, test_subset, num_aug, seed, workers = sys.argv[1:]
measured(ArcData(source, output_dir=Path(output), subsets=subsets.split(","), test_subsets=[test_subset],
                 num_aug=int(num_aug), seed=int(seed), workers=int(workers)).build)
""",
    "sudoku": """
from train_jax.puzzles.sudoku.data import SudokuData
from pathlib import Path
tables, output, num_aug = sys.argv[1:]
measured(SudokuData(output_dir=Path(output), source=tables, num_aug=int(num_aug)).build)
""",
    "augment": """
import numpy as np
from train_jax.puzzles.sudoku.grid import geometry_of_size
from train_jax.puzzles.sudoku.symmetry import augment, axis_orders
given, geometry = np.load(sys.argv[1]), geometry_of_size(9)
puzzles, solutions = given["puzzles"], given["solutions"]
axis_orders(geometry)
measured(lambda: augment(puzzles, solutions, geometry, np.random.default_rng(0)) and None)
""",
    "sampler": """
from train_jax.puzzles.batches import mixture_of
from train_jax.puzzles.format import load_split
directory, batch_size, batches, augment = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "augment" in sys.argv
puzzles = mixture_of([load_split(directory, "train")])
def work(first):
    for step in range(first, first + batches):
        puzzles.train_batch(seed=0, step=step, batch_size=batch_size, augment=augment)
work(0)
measured(lambda: work(batches))
""",
    "vote": """
from train_jax.puzzles.voting import load_predictions, score_predictions
directory, predictions = sys.argv[1:]
found = load_predictions(predictions)
measured(lambda: score_predictions(directory, [found]).figures)
""",
}
"""The counterparts of `published.PROGRAMS`."""


class Row(NamedTuple):
    """One line of the table."""

    work: str
    amount: float
    """Number of examples, for the rate."""
    ours: dict[str, Any]
    theirs: dict[str, Any] | None

    def __str__(self) -> str:
        cells = [self.work]
        for report in (self.ours, self.theirs):
            if report is None:
                cells += ["", "", "", ""]
                continue
            rate = f"{self.amount / report['seconds']:,.0f}"
            cells += [
                f"{report['seconds']:.2f}",
                f"{report['cpu_seconds']:.2f}",
                rate,
                f"{report['peak_bytes'] / 1e9:.2f}",
            ]
        cells.append("" if self.theirs is None else f"{self.theirs['seconds'] / self.ours['seconds']:.1f}")
        return f"| {' | '.join(cells)} |"


def run_ours(program: str, *arguments: Any) -> dict[str, Any]:
    command = [sys.executable, "-c", published.SET_UP + OURS[program], *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"our {program} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def fastest(times: int, *runs: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the fastest run of each; the runs alternate, so that other load affects all of them."""
    reports = [[run(time) for run in runs] for time in range(times)]
    return [min(each, key=lambda report: report["seconds"]) for each in zip(*reports, strict=True)]


def in_memory(puzzles: PuzzleSet) -> None:
    """Reads the files once, so that no measurement includes disk access."""
    for tokens in (puzzles.inputs, puzzles.labels):
        tokens.max()


def build_rows(options: argparse.Namespace, folder: Path) -> list[Row]:
    rows = []
    for num_aug in (0, options.num_aug):
        places = {side: folder / f"{side}-{num_aug}" for side in ("ours", "theirs")}
        common = (",".join(SUBSETS), "evaluation", num_aug, 42)

        def ours(time: int, places=places, common=common) -> dict[str, Any]:
            return run_ours("arc", options.arc, f"{places['ours']}-{time}", *common, 1)

        def theirs(time: int, places=places, common=common) -> dict[str, Any]:
            return published.run(
                options.published, "arc", Path(options.arc) / "arc-agi", f"{places['theirs']}-{time}", *common
            )

        reports = fastest(options.repeat, ours, theirs)
        examples = load_split(f"{places['ours']}-0", "train").num_examples
        name = f"build ARC-AGI-1, {num_aug} augmentations, {examples:,} train examples, one worker"
        rows.append(Row(name, examples, *reports))
        print(rows[-1], flush=True)
    if options.full:
        reports = run_ours("arc", options.arc, folder / "full", ",".join(SUBSETS), "evaluation", 1000, 42, 2)
        examples = load_split(folder / "full", "train").num_examples
        name = f"build ARC-AGI-1, 1000 augmentations, {examples:,} train examples, two workers"
        rows.append(Row(name, examples, reports, None))
        print(rows[-1], flush=True)
    return rows


def sudoku_rows(options: argparse.Namespace, folder: Path) -> list[Row]:
    tables = folder / "tables"
    tables.mkdir()
    made = generate(SUDOKUS + 10, 50, geometry_of_size(9), np.random.default_rng(0), progress=lambda *_: None)
    lines = [f"made,{''.join(map(str, q))},{''.join(map(str, a))},1" for q, a in zip(*made, strict=True)]
    for name, part in (("train", lines[:SUDOKUS]), ("test", lines[SUDOKUS:])):
        (tables / f"{name}.csv").write_text("\n".join(["source,question,answer,rating", *part]) + "\n")
    reports = fastest(
        options.repeat,
        lambda time: run_ours("sudoku", tables, folder / f"sudoku-ours-{time}", SUDOKU_AUGMENTATIONS),
        lambda time: published.run(
            options.published, "sudoku", tables, folder / f"sudoku-theirs-{time}", SUDOKU_AUGMENTATIONS
        ),
    )
    examples = SUDOKUS * (1 + SUDOKU_AUGMENTATIONS)
    row = Row(
        f"build Sudoku from tables, {SUDOKU_AUGMENTATIONS} augmentations, {examples:,} examples", examples, *reports
    )
    print(row, flush=True)
    copies = -(-AUGMENTED_IN_MEMORY // len(made.puzzles))
    puzzles, solutions = (np.tile(array, (copies, 1))[:AUGMENTED_IN_MEMORY] for array in made)
    np.savez(folder / "sudokus.npz", puzzles=puzzles, solutions=solutions)
    reports = fastest(
        options.repeat,
        lambda _: run_ours("augment", folder / "sudokus.npz"),
        lambda _: published.run(options.published, "augment", folder / "sudokus.npz"),
    )
    alone = Row(f"augment {AUGMENTED_IN_MEMORY:,} Sudokus in memory", AUGMENTED_IN_MEMORY, *reports)
    print(alone, flush=True)
    return [row, alone]


def sampler_rows(options: argparse.Namespace, folder: Path) -> list[Row]:
    rows = []
    sets = {
        "ARC-AGI-1 (900 tokens)": folder / f"ours-{options.num_aug}-0",
        "Sudoku (81 tokens)": folder / "sudoku-ours-0",
    }
    for name, directory in sets.items():
        in_memory(load_split(directory, "train"))
        for batch_size in (768, 6144):
            reports = fastest(
                options.repeat,
                lambda _, d=directory, b=batch_size: run_ours("sampler", d, b, BATCHES),
                lambda _, d=directory, b=batch_size: published.run(options.published, "sampler", d, b, BATCHES),
            )
            rows.append(Row(f"{BATCHES} batches of {batch_size}, {name}", BATCHES * batch_size, *reports))
            print(rows[-1], flush=True)
    (reports,) = fastest(options.repeat, lambda _: run_ours("sampler", directory, batch_size, BATCHES, "augment"))
    name = f"{BATCHES} batches of {batch_size}, Sudoku (81 tokens), augmented on the fly"
    rows.append(Row(name, BATCHES * batch_size, reports, None))
    print(rows[-1], flush=True)
    return rows


def predictions_of(directory: Path, path: Path) -> int:
    """Writes answers of which half are correct and the others have one wrong cell; returns their number."""
    test = load_split(directory, "test")
    owners = np.repeat(np.arange(test.num_puzzles), np.diff(test.puzzle_indices))
    rng = np.random.default_rng(0)
    answers = np.array(test.labels)
    wrong = np.flatnonzero(rng.random(len(answers)) < 0.5)
    answers[wrong, 0] = rng.integers(2, 12, len(wrong))
    logits = rng.normal(size=len(answers)).astype(np.float32)
    save_predictions(path, Predictions(test.puzzle_identifiers[owners], np.asarray(test.inputs), answers, logits))
    return len(answers)


def vote_rows(options: argparse.Namespace, folder: Path) -> list[Row]:
    directory, path = folder / f"ours-{options.num_aug}-0", folder / "predictions.npz"
    answers = predictions_of(directory, path)
    ours, theirs = fastest(
        options.repeat,
        lambda _: run_ours("vote", directory, path),
        lambda _: published.run(options.published, "vote", directory, path, folder),
    )
    if any(abs(ours["found"][name] - value) > 1e-9 for name, value in theirs["found"].items()):
        raise RuntimeError(f"the votes disagree: {ours['found']} and {theirs['found']}")
    rows = [Row(f"vote on {answers:,} answers, ARC-AGI-1", answers, ours, theirs)]
    print(rows[-1], flush=True)
    if options.full:
        answers = predictions_of(folder / "full", path)
        rows.append(
            Row(f"vote on {answers:,} answers, ARC-AGI-1", answers, run_ours("vote", folder / "full", path), None)
        )
        print(rows[-1], flush=True)
    return rows


def processor() -> str:
    reports = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return f"{len(reports)} cores of {reports[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--published", required=True, help="folder of the published code")
    parser.add_argument("--arc", required=True, help="folder of the official ARC files")
    parser.add_argument("--num-aug", type=int, default=100, help="augmentations of a puzzle, for both")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each measurement, of which the fastest counts")
    parser.add_argument("--full", action="store_true", help="ours with 1000 augmentations too (8 GB of disk)")
    parser.add_argument("--scratch", help="folder for the data sets; by default a temporary one")
    parser.add_argument("--markdown", help="page whose last section, Speed, is replaced")
    options = parser.parse_args()
    load_before = os.getloadavg()[0]
    lines = [
        "| work | ours, s | CPU s | per s | GB | published, s | CPU s | per s | GB | times faster |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder = Path(scratch)
        for part in (build_rows, sudoku_rows, sampler_rows, vote_rows):
            lines += map(str, part(options, folder))
    load = f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after"
    note = (
        f"{datetime.date.today()}, {processor()}, {load}, Python {platform.python_version()}, numpy {np.__version__}; "
        f"the fastest of {options.repeat} alternating runs."
    )
    if load_before > BUSY:
        note += " Other work was running: ratios and CPU seconds are valid; repeat the seconds on an idle machine."
    print(note)
    if options.markdown:
        page = Path(options.markdown)
        kept, _, _ = page.read_text().partition(HEADING)
        page.write_text("\n".join([kept + HEADING, "", "    " + command(options), "", note, "", *lines]) + "\n")


def command(options: argparse.Namespace) -> str:
    given = f"--num-aug {options.num_aug} --repeat {options.repeat}" + " --full" * options.full
    return f"python -m benchmarks.data --published PATH --arc DIR {given}"


if __name__ == "__main__":
    main()
