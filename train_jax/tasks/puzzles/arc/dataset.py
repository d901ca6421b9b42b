"""Builds an ARC data set: splits, augmentations and tokens, computed in parallel.

Without augmentations, the arrays equal those of the published builder with the same seed, byte for byte. With
augmentations, the originals are still the same. Each puzzle has its own random generator, so its augmentations depend
neither on the number of workers nor on the other puzzles.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from train_jax.errors import UserError
from train_jax.runtime.backend import cores
from train_jax.tasks.puzzles.arc.canvas import Places, place, place_as_published, render
from train_jax.tasks.puzzles.arc.grid import CELLS, PAD_TOKEN, UNKNOWN, VOCAB_SIZE, Example, Puzzle
from train_jax.tasks.puzzles.arc.json import Subset, read_subset
from train_jax.tasks.puzzles.arc.kind import ArcKind
from train_jax.tasks.puzzles.arc.symmetry import Symmetries, canonical, draw, invariant, names_of
from train_jax.tasks.puzzles.format import array_path, write_split
from train_jax.tasks.puzzles.metadata import Metadata, write_json
from train_jax.tasks.puzzles.options import check_disk, check_memory
from train_jax.tasks.puzzles.recipe import content_of, write_record
from train_jax.tasks.puzzles.row_file import RowFile
from train_jax.tasks.puzzles.writing import is_built, new_dataset

MAKER_VERSION = 1
"""Stored in every recipe. Increase it when the same options give different arrays."""
BLANK_IDENTIFIER = 0
BYTES_PER_PUZZLE = 250
"""Peak memory for each augmented puzzle."""

Progress = Callable[[str, int, int], None]
T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True, eq=False)
class Group:
    """One original puzzle, and the splits that contain its examples."""

    name: str
    puzzle: Puzzle
    splits: dict[str, list[Example]]
    """The examples of each split. The train split never contains the test inputs of a puzzle of a test subset."""
    places: Places
    """The places of the original puzzle's grids in the train split."""


def build_arc(
    directory: Path,
    source: str | Path,
    *,
    subsets: Sequence[str],
    test_subsets: Sequence[str],
    num_aug: int,
    seed: int,
    workers: int = 0,
    overwrite: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> bool:
    """Builds a data set from the official files. Returns False if it exists already.

    The test examples of `test_subsets` are the test split; all other examples are the train split. `workers` is the
    number of threads; 0 means one per core. Raises `UserError` if the options or files are invalid, or if `is_built`
    raises it.
    """
    check_subsets(subsets, test_subsets)
    read = [read_subset(source, subset) for subset in subsets]
    recipe = {
        "maker": "arc",
        "maker_version": MAKER_VERSION,
        "files_sha256": {name: digest for subset in read for name, digest in subset.sha256.items()},
        "subsets": list(subsets),
        "test_subsets": list(test_subsets),
        "num_aug": num_aug,
        "seed": seed,
    }
    if is_built(directory, recipe, overwrite=overwrite):
        return False
    groups, findings = arrange(read, test_subsets, seed)
    examples = (1 + num_aug) * sum(len(part) for group in groups for part in group.splits.values())
    check_memory(BYTES_PER_PUZZLE * (1 + num_aug) * len(groups), "use a smaller --num-aug")
    check_disk(directory, 2 * CELLS * examples, "use a smaller --num-aug")
    with new_dataset(directory, recipe, overwrite=overwrite) as building, ExitStack() as files:
        if building is None:
            return False
        workers = workers or cores()
        symmetries = _in_parallel(
            lambda group: draw(group.puzzle, num_aug, _generator(seed, group.name, "symmetries")),
            groups, workers, "puzzles augmented", progress,
        )  # fmt: skip
        splits = _lay_out(building, groups, symmetries, files)
        _in_parallel(
            lambda index: _write_group(groups[index], symmetries[index], index, splits, seed),
            range(len(groups)), workers, "puzzles written", progress,
        )  # fmt: skip
        findings["puzzles_with_fewer_augmentations_than_asked"] = sum(len(each.turns) <= num_aug for each in symmetries)
        names = [name for group, each in zip(groups, symmetries, strict=True) for name in names_of(group.name, each)]
        write_json(building / "identifiers.json", ["<blank>", *names])
        write_json(building / "test_puzzles.json", _test_puzzles(groups), indent=None)
        arrays = {split: (layout.metadata, layout.arrays) for split, layout in splits.items()}
        for split, (metadata, of_split) in arrays.items():
            write_split(building / split, metadata, of_split)
        progress("hashing", 0, 0)
        write_record(building, recipe, ArcKind.key, content_of(arrays), findings)
    return True


def check_subsets(subsets: Sequence[str], test_subsets: Sequence[str]) -> None:
    """Raises `UserError` if the subsets are empty or repeated, or if a test subset is not among `subsets`."""
    for name, values in (("subsets", subsets), ("test-subsets", test_subsets)):
        if not values or len(set(values)) < len(values):
            raise UserError(f"--{name} {' '.join(values)}: expected at least one name, each once; remove repetitions")
    missing = [name for name in test_subsets if name not in subsets]
    if missing:
        raise UserError(
            f"--test-subsets {missing[0]} is not among --subsets {' '.join(subsets)}; add it to --subsets, since the "
            "train split contains the demonstrations of the test puzzles"
        )


def arrange(read: Sequence[Subset], test_subsets: Sequence[str], seed: int) -> tuple[list[Group], dict[str, Any]]:
    """Returns the puzzles in the order of the data set, and statistics for the recipe.

    Raises `UserError` if a puzzle of a test subset has no test examples, or also occurs in another subset, whose
    solutions are trained on.
    """
    rng = np.random.RandomState(seed)  # as in the published builder: its order and places depend on this generator
    _check_names(read, test_subsets)
    chosen: list[tuple[Puzzle, dict[str, list[Example]]]] = []
    seen: set[str] = set()
    for subset in read:
        order = list(range(len(subset.puzzles)))
        rng.shuffle(order)
        for puzzle in (subset.puzzles[index] for index in order):
            if puzzle.name in seen:
                continue
            seen.add(puzzle.name)
            if subset.name in test_subsets:
                if "test" not in puzzle.sections:
                    raise UserError(
                        f"puzzle {puzzle.name} of the test subset {subset.name} is a list of examples, none of which "
                        "is a test example; choose other --test-subsets"
                    )
                chosen.append((puzzle, {name: puzzle.sections[name] for name in ("train", "test")}))
            else:
                known = [example for example in puzzle.examples if example.output is not UNKNOWN]
                chosen.append((puzzle, {"train": known}))
    groups = [Group(puzzle.name, puzzle, splits, place_as_published(splits["train"], rng)) for puzzle, splits in chosen]
    return groups, _findings(read, groups)


def _check_names(read: Sequence[Subset], test_subsets: Sequence[str]) -> None:
    tested = {puzzle.name: subset.name for subset in read if subset.name in test_subsets for puzzle in subset.puzzles}
    for subset in read:
        for puzzle in subset.puzzles:
            if tested.get(puzzle.name, subset.name) != subset.name:
                raise UserError(
                    f"puzzle {puzzle.name} of the test subset {tested[puzzle.name]} is also in {subset.name}, whose "
                    f"solutions are trained on; remove {subset.name} from --subsets, or choose other --test-subsets"
                )


def _findings(read: Sequence[Subset], groups: Sequence[Group]) -> dict[str, Any]:
    tested = [(group.name, example) for group in groups for example in group.splits.get("test", [])]
    known = [(name, example) for name, example in tested if example.output is not UNKNOWN]
    suspects = {invariant(example) for _, example in known}
    trained_on: dict[bytes, set[str]] = {}
    for group in groups:
        for example in group.splits["train"]:
            if invariant(example) in suspects:
                trained_on.setdefault(canonical(example), set()).add(group.name)
    others = [(name, trained_on.get(canonical(example), set()) - {name}) for name, example in known]
    met = [f"{name} in {', '.join(sorted(other))}" for name, other in others if other]
    in_train = sum(len(group.splits["train"]) for group in groups)
    in_files = sum(len(puzzle.examples) for subset in read for puzzle in subset.puzzles)
    counts = {subset.name: len(subset.puzzles) for subset in read}
    return {
        "puzzles": counts,
        "puzzles_left_out_because_another_subset_has_them": sum(counts.values()) - len(groups),
        "original_examples": {"train": in_train, "test": len(tested)},
        "original_examples_left_out": in_files - in_train - len(tested),
        "test_examples_without_a_solution": len(tested) - len(known),
        "test_examples_that_another_puzzle_trains_on": met,
    }


def _generator(seed: int, name: str, purpose: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed} {name} {purpose}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=np.frombuffer(digest[:16], np.uint64)))


@dataclass(frozen=True, eq=False)
class Layout:
    """One split: its index arrays, its token files, and the first row of each group in these files."""

    metadata: Metadata
    arrays: Mapping[str, np.ndarray | RowFile]
    inputs: RowFile
    labels: RowFile
    first_row: dict[int, int]
    """Maps a group number to the row of its first example."""


def _lay_out(
    building: Path, groups: Sequence[Group], symmetries: Sequence[Symmetries], files: ExitStack
) -> dict[str, Layout]:
    in_group = np.array([len(each.turns) for each in symmetries])
    first_identifier = np.concatenate([[1], 1 + np.cumsum(in_group)]).tolist()
    layouts, sizes = {}, {}
    for split in ("train", "test"):
        members = np.array([number for number, group in enumerate(groups) if split in group.splits])
        examples = np.array([len(groups[number].splits[split]) for number in members])
        per_puzzle = np.repeat(examples, in_group[members])
        identifiers = [np.arange(first_identifier[n], first_identifier[n + 1]) for n in members]
        sizes[split] = members, examples, per_puzzle, np.concatenate(identifiers)
    for split, (members, examples, per_puzzle, identifiers) in sizes.items():
        rows = int(per_puzzle.sum())
        metadata = Metadata(
            seq_len=CELLS,
            vocab_size=VOCAB_SIZE,
            pad_id=PAD_TOKEN,
            ignore_label_id=PAD_TOKEN,
            blank_identifier_id=BLANK_IDENTIFIER,
            num_puzzle_identifiers=first_identifier[-1],
            total_groups=len(members),
            mean_puzzle_examples=rows / len(per_puzzle),
            total_puzzles=len(per_puzzle),
            sets=("all",),
            kind=ArcKind.key,
        )
        inputs, labels = (
            RowFile(array_path(building / split, metadata, field), (rows, CELLS), np.dtype(np.uint8))
            for field in ("inputs", "labels")
        )
        files.callback(inputs.close)
        files.callback(labels.close)
        ends = np.cumsum(examples * in_group[members])
        arrays = {
            "inputs": inputs,
            "labels": labels,
            "puzzle_identifiers": identifiers.astype(np.int32),
            "puzzle_indices": np.concatenate([[0], np.cumsum(per_puzzle)]).astype(np.int32),
            "group_indices": np.concatenate([[0], np.cumsum(in_group[members])]).astype(np.int32),
        }
        first_row = dict(zip(members.tolist(), (ends - examples * in_group[members]).tolist(), strict=True))
        layouts[split] = Layout(metadata, arrays, inputs, labels, first_row)
    return layouts


def _write_group(group: Group, symmetries: Symmetries, index: int, splits: Mapping[str, Layout], seed: int) -> None:
    for split, examples in group.splits.items():
        places = Places(*np.zeros((2, len(symmetries.turns), len(examples)), np.intp))
        if split == "train":  # test examples stay in the upper left corner
            others = place(examples, symmetries.turns[1:], _generator(seed, group.name, "places"))
            places = Places(*(np.concatenate(pair) for pair in zip(group.places, others, strict=True)))
        layout = splits[split]
        for file, grids in zip((layout.inputs, layout.labels), zip(*examples, strict=True), strict=True):
            file.write(layout.first_row[index], render(grids, symmetries, places))


def _test_puzzles(groups: Iterable[Group]) -> dict[str, Any]:
    return {
        group.name: {
            name: [{"input": example.input.tolist(), "output": example.output.tolist()} for example in examples]
            for name, examples in group.puzzle.sections.items()
        }
        for group in groups
        if "test" in group.splits
    }


def _in_parallel(
    task: Callable[[Item], T], items: Sequence[Item], workers: int, what: str, progress: Progress
) -> list[T]:
    """Applies `task` to every item on `workers` threads; the expensive NumPy operations release the GIL."""
    results = []
    pool = ThreadPoolExecutor(workers)
    try:
        for result in pool.map(task, items):
            results.append(result)
            progress(what, len(results), len(items))
    finally:
        pool.shutdown(cancel_futures=True)
    return results
