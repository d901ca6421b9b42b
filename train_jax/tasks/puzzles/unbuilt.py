"""A puzzle task whose data sets do not exist: its sizes are those of their kinds, its batches are zeros."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from types import MappingProxyType
from typing import Any

import numpy as np

from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.tasks.puzzles.kind import Kind
from train_jax.tasks.puzzles.kinds import MIXED, kind_from_key
from train_jax.tasks.puzzles.mixture import data_dirs
from train_jax.tasks.puzzles.task import PuzzleTask

PUZZLES = 1000
"""Train puzzles of a data set of which nothing else is known."""

_FOLDERS = {
    r"sudoku-extreme(-.*)?": "sudoku-9x9",
    r"(?P<key>sudoku-\d+x\d+)(-.*)?": r"\g<key>",
    r"maze-(?P<size>\d+)x(?P=size)(-.*)?": r"maze-\g<size>",
    r"maze-hard(-.*)?": "maze-30",
    r"maze-unique": "maze-9",
    r"arc[12]concept(-.*)?": "arc",
}
"""Names of the folders that `trm build-data` writes and presets read, and the keys of the kinds of their puzzles."""


class UnbuiltPuzzles(PuzzleTask):
    """Enough of a puzzle task to compile its steps, without a data set."""

    def __init__(
        self,
        config: RunConfig,
        kind: str = "",
        puzzle_identifiers: int = 1,
        recipes: Mapping[str, tuple[str, int]] = MappingProxyType({}),
    ):
        """`kind` is a key such as `sudoku-9x9`, by default that of each folder in `config.data_dir`, by its name;
        `puzzle_identifiers` is the number of rows of the puzzle table for each of them. `recipes` has the kind and the
        train puzzles of folders by name.

        Raises `UserError` if a kind is not known.
        """
        names = [PurePath(folder).name for folder in data_dirs(config.data_dir)] or [config.data_dir]
        kinds = [_kind(name, kind or (recipes[name][0] if name in recipes else ""), config) for name in names]
        puzzles = sum(recipes[name][1] if name in recipes else PUZZLES for name in names)
        seq_len, vocab_size = (max(getattr(each, size) for each in kinds) for size in ("seq_len", "vocab_size"))
        whole = (each.key for each in kinds if (each.seq_len, each.vocab_size) == (seq_len, vocab_size))
        facts: dict[str, Any] = {
            "seq_len": seq_len,
            "vocab_size": vocab_size,
            "pad_id": 0,
            "ignore_label_id": 0,
            "blank_identifier_id": 0,
            "num_puzzle_identifiers": puzzle_identifiers * len(names),
            "total_groups": puzzles,
            "mean_puzzle_examples": 1.0,
            "total_puzzles": puzzles,
            "sets": ["all"],
            "kind": next(whole, MIXED),
        }
        super().__init__(config, facts)

    @property
    def examples_per_epoch(self) -> float:
        return float(self.metadata.total_groups)

    def batch(self, step: int, shard: tuple[int, int], state: Any = None) -> dict[str, np.ndarray]:
        rows = self.config.global_batch_size // shard[1]
        tokens = np.zeros((rows, self.metadata.seq_len), np.int32)
        return {"inputs": tokens, "labels": tokens, "puzzle_identifiers": np.zeros(rows, np.int32)}


def _kind(name: str, key: str, config: RunConfig) -> Kind:
    """The kind of puzzles with a key, or in a folder with a name."""
    named = (found.expand(of) for pattern, of in _FOLDERS.items() if (found := re.fullmatch(pattern, name)))
    wanted = key or next(named, name)
    kind = kind_from_key(wanted)
    if kind is None:
        wrong = f"unknown kind {key!r}" if key else f"{config.data_dir} is not built, and does not name its kind"
        raise UserError(f"{wrong}; use --kind with one such as sudoku-9x9, maze-30 or arc")
    return kind
