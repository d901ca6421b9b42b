"""The options of `trm build-data arc`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.tasks.progress import Progress
from train_jax.tasks.puzzles.arc.dataset import build_arc, check_subsets
from train_jax.tasks.puzzles.options import Augmentations, check_option_ranges

SUBSETS = {1: ("training", "evaluation", "concept"), 2: ("training2", "evaluation2", "concept")}
TEST_SUBSETS = {1: ("evaluation",), 2: ("evaluation2",)}


@dataclass(frozen=True)
class ArcData:
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
        check_option_ranges(self)
        if self.subsets and self.output_dir is None:
            raise UserError(
                f"--subsets {' '.join(self.subsets)} needs --output-dir; the default folder is for the default subsets"
            )
        check_subsets(*self._subsets)

    def build(self, progress: Progress) -> bool:
        """Builds the data set; returns False if it exists already."""
        self.check()
        subsets, test_subsets = self._subsets
        return build_arc(
            self.directory,
            self.source,
            subsets=subsets,
            test_subsets=test_subsets,
            num_aug=self.num_aug,
            seed=self.seed,
            workers=self.workers,
            overwrite=self.overwrite,
            progress=progress,
        )
