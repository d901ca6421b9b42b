"""Rows and files in the format of the public tables."""

from functools import cache
from pathlib import Path

import numpy as np

from train_jax.puzzles.sudoku.generator import generate
from train_jax.puzzles.sudoku.grid import GEOMETRIES


@cache
def sudoku_rows() -> list[str]:
    originals = generate(40, 45, GEOMETRIES[9], np.random.default_rng(0), progress=lambda what, done, total: None)
    texts = [["".join(map(str, grid)) for grid in grids] for grids in originals]
    rows = zip(*texts, strict=True)
    return [
        f"made,{puzzle.replace('0', '.' if i % 2 else '0')},{answer},{i}" for i, (puzzle, answer) in enumerate(rows)
    ]


def write_tables(folder: Path, train: list[str], test: list[str]) -> Path:
    folder.mkdir()
    for name, rows in (("train", train), ("test", test)):
        (folder / f"{name}.csv").write_text("\n".join(["source,question,answer,rating", *rows]) + "\n", "latin-1")
    return folder
