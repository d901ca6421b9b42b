"""`trm build-data arc`: splits, augmentations and tokens of ARC puzzles, computed in parallel.

Without augmentations, the arrays equal those of the published builder with the same seed, byte for byte. With
augmentations, the originals are still the same. Each puzzle has its own random generator, so its augmentations depend
neither on the number of workers nor on the other puzzles.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from tyro.conf import arg

from models_torch.ranges import Range
from train_jax.errors import UserError, check_options
from train_jax.puzzles.arc.grid import (
    CELLS,
    UNKNOWN,
    Example,
    Places,
    Puzzle,
    Symmetries,
    canonical,
    draw,
    invariant,
    names_of,
    place,
    place_as_published,
    render,
)
from train_jax.puzzles.arc.json import Subset, read_subset
from train_jax.puzzles.arc.kind import ArcKind
from train_jax.puzzles.building import (
    LAYOUT,
    Augmentations,
    PuzzleData,
    check_disk,
    check_memory,
    split_metadata,
    write_split,
)
from train_jax.puzzles.metadata import (
    SPLITS,
    Metadata,
    array_path,
    arrays_on_disk,
    content_of,
    write_json,
    write_record,
)
from train_jax.runtime.backend import cores
from train_jax.storage.new_dataset import Progress, is_built, new_dataset

MAKER_VERSION = 1
"""Stored in every recipe. Increase it when the same options give different arrays."""
BYTES_PER_PUZZLE = 250
"""Peak memory in bytes for each augmented puzzle."""
SUBSETS = {1: ("training", "evaluation", "concept"), 2: ("training2", "evaluation2", "concept")}
TEST_SUBSETS = {1: ("evaluation",), 2: ("evaluation2",)}

T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(frozen=True)
class ArcData(PuzzleData):
    """ARC-AGI puzzles from JSON files, augmented by rotations, reflections, colours and places.

    The test split holds the test examples of --test-subsets, augmented for voting. All other examples are for training.
    """

    source: str
    """Folder of the official files, or the beginning of their paths up to the name of the subset; or a folder with a
    folder for each subset and in it one JSON file for each task, as the data folder of the ARC-AGI repository."""
    output_dir: Annotated[Path | None, arg(help_behavior_hint="(default: data/arc1concept-aug-1000)")] = None
    """Output folder, or gs://bucket/folder; 1000 augmentations take 7 GB."""
    overwrite: bool = False
    """Replace an existing data set that has other options."""
    edition: Literal[1, 2] = 1
    """ARC-AGI-1 or ARC-AGI-2: selects the default subsets."""
    subsets: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: training evaluation concept)")] = ()
    """Subsets to read."""
    test_subsets: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: evaluation)")] = ()
    """Subsets for testing, each one of --subsets."""
    num_aug: Augmentations = 1000
    """Augmentations of every puzzle; symmetric puzzles have fewer different ones."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 42
    """Random seed; without augmentations the arrays equal the published ones of this seed."""
    workers: Annotated[int, Range(0, 1023), arg(help_behavior_hint="(default: one for each core)")] = 0
    """Number of threads; does not change the result."""

    @property
    def directory(self) -> Path:
        return self.output_dir or Path("data") / f"arc{self.edition}concept-aug-{self.num_aug}"

    @property
    def _subsets(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return self.subsets or SUBSETS[self.edition], self.test_subsets or TEST_SUBSETS[self.edition]

    def check(self) -> None:
        """Raises `UserError` if a value is out of range or options conflict."""
        check_options(self)
        if self.subsets and self.output_dir is None:
            raise UserError(
                f"--subsets {' '.join(self.subsets)} needs --output-dir; the default folder is for the default subsets"
            )
        check_subsets(*self._subsets)

    def build(self, progress: Progress = lambda what, done, total: None) -> bool:
        """Builds the data set; returns False if it exists already.

        Raises `UserError` if the options or files are invalid, and the errors of `is_built`.
        """
        self.check()
        subsets, test_subsets = self._subsets
        read = [read_subset(self.source, subset) for subset in subsets]
        recipe = {
            "maker": "arc",
            "maker_version": MAKER_VERSION,
            "files_sha256": {name: digest for subset in read for name, digest in subset.sha256.items()},
            "subsets": list(subsets),
            "test_subsets": list(test_subsets),
            "num_aug": self.num_aug,
            "seed": self.seed,
        }
        if is_built(self.directory, recipe, LAYOUT, overwrite=self.overwrite):
            return False
        groups, findings = arrange(read, test_subsets, self.seed)
        examples = (1 + self.num_aug) * sum(len(part) for group in groups for part in group.splits.values())
        check_memory(BYTES_PER_PUZZLE * (1 + self.num_aug) * len(groups), "use a smaller --num-aug")
        check_disk(self.directory, 2 * CELLS * examples, "use a smaller --num-aug")
        with new_dataset(self.directory, recipe, LAYOUT, overwrite=self.overwrite) as folder:
            if folder is None:
                return False
            augmented = self._augmented(groups, progress)
            metadata = {split: self._write_split(folder, split, augmented, progress) for split in SPLITS}
            fewer = sum(len(each.symmetries.turns) <= self.num_aug for each in augmented)
            findings["puzzles_with_fewer_augmentations_than_asked"] = fewer
            names = [name for each in augmented for name in names_of(each.group.name, each.symmetries)]
            write_json(folder / "identifiers.json", ["<blank>", *names])
            write_json(folder / "test_puzzles.json", _test_puzzles(groups), indent=None)
            progress("hashing", 0, 0)
            on_disk = {split: (each, arrays_on_disk(folder / split, each)) for split, each in metadata.items()}
            write_record(folder, recipe, ArcKind.key, content_of(on_disk), findings)
        return True

    def _augmented(self, groups: Sequence["Group"], progress: Progress) -> list["Augmented"]:
        def draw_one(group: Group) -> Symmetries:
            return draw(group.puzzle, self.num_aug, _generator(self.seed, group.name, "symmetries"))

        drawn = _in_parallel(draw_one, groups, self.workers, "puzzles augmented", progress)
        augmented = []
        identifier = 1
        for group, symmetries in zip(groups, drawn, strict=True):
            augmented.append(Augmented(group, symmetries, identifier))
            identifier += len(symmetries.turns)
        return augmented

    def _write_split(self, folder: Path, split: str, augmented: Sequence["Augmented"], progress: Progress) -> Metadata:
        members = [each for each in augmented if split in each.group.splits]
        examples = np.array([len(each.group.splits[split]) for each in members])
        copies = np.array([len(each.symmetries.turns) for each in members])
        per_puzzle = np.repeat(examples, copies)
        identifiers = [each.first_identifier + np.arange(len(each.symmetries.turns)) for each in members]
        rows = int(per_puzzle.sum())
        metadata = split_metadata(
            ArcKind(),
            identifiers=augmented[-1].first_identifier + len(augmented[-1].symmetries.turns),
            groups=len(members),
            puzzles=len(per_puzzle),
            puzzle_examples=rows / len(per_puzzle),
        )
        arrays = {
            "puzzle_identifiers": np.concatenate(identifiers).astype(np.int32),
            "puzzle_indices": np.concatenate([[0], np.cumsum(per_puzzle)]).astype(np.int32),
            "group_indices": np.concatenate([[0], np.cumsum(copies)]).astype(np.int32),
        }
        write_split(folder / split, metadata, arrays)
        with ExitStack() as stack:
            files = [stack.enter_context(array_path(folder / split, metadata, name).open("wb")) for name in TOKENS]
            for file in files:
                header = {"descr": "|u1", "fortran_order": False, "shape": (rows, CELLS)}
                np.lib.format.write_array_header_1_0(file, header)
            for tokens in _in_parallel(
                lambda each: self._rendered(each, split), members, self.workers, f"{split} puzzles written", progress
            ):
                for file, array in zip(files, tokens, strict=True):
                    file.write(array.data)
        return metadata

    def _rendered(self, augmented: "Augmented", split: str) -> list[np.ndarray]:
        """Returns the tokens of inputs and outputs of a group in a split."""
        group = augmented.group
        symmetries = augmented.symmetries
        examples = group.splits[split]
        places = Places(*np.zeros((2, len(symmetries.turns), len(examples)), np.intp))
        if split == "train":  # test examples stay in the upper left corner
            others = place(examples, symmetries.turns[1:], _generator(self.seed, group.name, "places"))
            places = Places(*(np.concatenate(pair) for pair in zip(group.places, others, strict=True)))
        return [render(grids, symmetries, places) for grids in zip(*examples, strict=True)]


TOKENS = ("inputs", "labels")


@dataclass(frozen=True, eq=False)
class Group:
    """One original puzzle, and the splits that contain its examples."""

    name: str
    puzzle: Puzzle
    splits: dict[str, list[Example]]
    """The examples of each split. The train split never contains the test inputs of a puzzle of a test subset."""
    places: Places
    """The places of the original puzzle's grids in the train split."""


@dataclass(frozen=True, eq=False)
class Augmented:
    """A group with the symmetries of its puzzles, whose identifiers are consecutive."""

    group: Group
    symmetries: Symmetries
    first_identifier: int


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
) -> Iterator[T]:
    """Yields `task` of every item, in order, computed on threads; the expensive NumPy operations release the GIL.

    0 workers means one per core. At most two items per worker are computed ahead.
    """
    workers = workers or cores()
    pool = ThreadPoolExecutor(workers)
    left = iter(items)
    try:
        ahead = deque(pool.submit(task, item) for item in islice(left, 2 * workers))
        for done in range(1, len(items) + 1):
            yield ahead.popleft().result()
            ahead.extend(pool.submit(task, item) for item in islice(left, 1))
            progress(what, done, len(items))
    finally:
        pool.shutdown(cancel_futures=True)
