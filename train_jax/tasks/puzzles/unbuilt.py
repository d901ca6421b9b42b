"""A puzzle task whose data set does not exist: its sizes are those of a kind, its batches are zeros."""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

import numpy as np

from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.tasks.puzzles.kinds import KINDS
from train_jax.tasks.puzzles.task import PuzzleTask

_EXTREME = "sudoku-extreme"
"""Folders of the published Sudokus start with this, and not with the key of their kind."""


class UnbuiltPuzzles(PuzzleTask):
    """Enough of a puzzle task to compile its steps, without a data set."""

    def __init__(self, config: RunConfig, kind: str = "", puzzle_identifiers: int = 1, puzzles: int = 1000):
        """`kind` is a key such as `sudoku-9x9`, by default that of the folder in `config.data_dir`;
        `puzzle_identifiers` is the number of rows of the puzzle table, `puzzles` the examples of an epoch.

        Raises `UserError` if the kind is not known.
        """
        name = PurePath(config.data_dir.split(",")[0]).name
        key = kind or ("sudoku-9x9" if name.startswith(_EXTREME) else name)
        puzzle_kind = next((known for each in KINDS if (known := each.from_key(key)) is not None), None)
        if puzzle_kind is None:
            wrong = f"unknown kind {kind!r}" if kind else f"{config.data_dir} is not built, and does not name its kind"
            raise UserError(f"{wrong}; use --kind with one such as sudoku-9x9, maze-30 or arc")
        facts: dict[str, Any] = {
            "seq_len": puzzle_kind.seq_len,
            "vocab_size": puzzle_kind.vocab_size,
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "num_puzzle_identifiers": puzzle_identifiers,
            "total_groups": puzzles,
            "mean_puzzle_examples": 1.0,
            "total_puzzles": puzzles,
            "sets": ["all"],
            "kind": puzzle_kind.key,
        }
        super().__init__(config, facts)

    @property
    def examples_per_epoch(self) -> float:
        return float(self.metadata.total_groups)

    def batch(self, step: int, shard: tuple[int, int], state: Any = None) -> dict[str, np.ndarray]:
        rows = self._config.global_batch_size // shard[1]
        tokens = np.zeros((rows, self.metadata.seq_len), np.int32)
        return {"inputs": tokens, "labels": tokens, "puzzle_identifiers": np.zeros(rows, np.int32)}
