"""Small ARC files in the official format, and the folders of the published code and the official files."""

import json
import os
from pathlib import Path

import numpy as np

PUBLISHED = os.environ.get("TRM_PUBLISHED")
"""Folder of the published TRM code, for the tests that compare with it."""
OFFICIAL = os.environ.get("ARC_DATA")
"""Folder of the official ARC files, for the tests that read all of them."""

SUBSETS = {"training": 6, "evaluation": 5, "concept": 4}
"""The number of puzzles of each subset."""


def random_grid(rng: np.random.RandomState, largest: int = 8) -> list[list[int]]:
    return rng.randint(0, 10, rng.randint(1, largest + 1, 2)).tolist()


def random_puzzle(rng: np.random.RandomState, largest: int = 8) -> tuple[dict, list]:
    """Returns a puzzle in the format of a challenges file, and the solutions of its test examples."""
    demonstrations = [
        {"input": random_grid(rng, largest), "output": random_grid(rng, largest)} for _ in range(rng.randint(1, 5))
    ]
    test_inputs = [{"input": random_grid(rng, largest)} for _ in range(rng.randint(1, 4))]
    # Both orders occur in the official files.
    sections = [("train", demonstrations), ("test", test_inputs)]
    return dict(sections[:: rng.choice([-1, 1])]), [random_grid(rng, largest) for _ in test_inputs]


def write_files(folder: Path, subset: str, challenges: dict, solutions: dict | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"arc-agi_{subset}_challenges.json").write_text(json.dumps(challenges))
    if solutions is not None:
        (folder / f"arc-agi_{subset}_solutions.json").write_text(json.dumps(solutions))


def write_source(folder: Path, seed: int = 0) -> Path:
    """Writes three subsets of a few puzzles; one puzzle fills the canvas."""
    rng = np.random.RandomState(seed)  # stable over NumPy versions, so that tests can contain hashes
    for subset, count in SUBSETS.items():
        puzzles = {f"{subset}{number}": random_puzzle(rng, 30 if number == 0 else 8) for number in range(count)}
        if subset == "concept":
            full = {"input": np.full((30, 30), 3).tolist(), "output": np.full((30, 2), 4).tolist()}
            puzzles["concept0"][0]["train"].append(full)
        challenges = {name: challenge for name, (challenge, _) in puzzles.items()}
        write_files(folder, subset, challenges, {name: solutions for name, (_, solutions) in puzzles.items()})
    return folder
