"""Writes data sets of puzzles atomically."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from train_jax.tasks import new_dataset as building
from train_jax.tasks.new_dataset import Layout
from train_jax.tasks.puzzles.format import SPLITS, write_split
from train_jax.tasks.puzzles.metadata import write_json
from train_jax.tasks.puzzles.recipe import Splits, content_of, read_recipe, write_record

LAYOUT = Layout(
    entries=frozenset({*SPLITS, "identifiers.json", "test_puzzles.json", "recipe.json"}),
    last=(*(f"{split}/dataset.json" for split in SPLITS), "recipe.json"),
    read_record=read_recipe,
)


def is_built(directory: str | Path, recipe: Mapping[str, Any], *, overwrite: bool = False) -> bool:
    """Returns whether `directory` already contains the data set of this recipe.

    Raises `UserError` if it contains anything else that may not be replaced.
    """
    return building.is_built(directory, recipe, LAYOUT, overwrite=overwrite)


def new_dataset(
    directory: str | Path, recipe: Mapping[str, Any], *, overwrite: bool = False
) -> AbstractContextManager[Path | None]:
    """Yields a temporary folder for a data set of puzzles; see `train_jax.tasks.new_dataset`."""
    return building.new_dataset(directory, recipe, LAYOUT, overwrite=overwrite)


def write_dataset(
    directory: str | Path,
    splits: Splits,
    identifiers: Sequence[str],
    recipe: Mapping[str, Any],
    *,
    findings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> bool:
    """Writes a data set from memory; returns False if one with the same recipe exists.

    Raises the errors of `is_built`.
    """
    with new_dataset(directory, recipe, overwrite=overwrite) as folder:
        if folder is None:
            return False
        for split, (metadata, arrays) in splits.items():
            write_split(folder / split, metadata, arrays)
        write_json(folder / "identifiers.json", list(identifiers))
        kinds = {metadata.kind for metadata, _ in splits.values()}
        write_record(folder, recipe, kinds.pop() if len(kinds) == 1 else "", content_of(splits), findings)
    return True
