"""Reads the `recipe.json` of a data set."""

from pathlib import Path

from train_jax.tasks.puzzles.metadata import read_recipe


def record_of(directory: Path) -> dict:
    record = read_recipe(directory)
    assert record is not None
    return record
