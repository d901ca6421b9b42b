"""Small ARC files in the official form, the same for the same seed, and the published builder run on them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PUBLISHED = os.environ.get("TRM_PUBLISHED")
"""Folder of the published TRM code, for the tests that run it beside ours."""
OFFICIAL = os.environ.get("ARC_DATA")
"""Folder of the official ARC files, for the tests on all of them."""

SUBSETS = {"training": 6, "evaluation": 5, "concept": 4}
"""How many puzzles each has."""


def random_grid(rng: np.random.RandomState, largest: int = 8) -> list[list[int]]:
    return rng.randint(0, 10, rng.randint(1, largest + 1, 2)).tolist()


def random_puzzle(rng: np.random.RandomState, largest: int = 8) -> tuple[dict, list]:
    """A puzzle as a challenges file has it, and the solutions of its test examples."""
    demonstrations = [
        {"input": random_grid(rng, largest), "output": random_grid(rng, largest)} for _ in range(rng.randint(1, 5))
    ]
    questions = [{"input": random_grid(rng, largest)} for _ in range(rng.randint(1, 4))]
    # Both orders occur in the official files.
    sections = [("train", demonstrations), ("test", questions)]
    return dict(sections[:: rng.choice([-1, 1])]), [random_grid(rng, largest) for _ in questions]


def write_files(folder: Path, subset: str, challenges: dict, solutions: dict | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"arc-agi_{subset}_challenges.json").write_text(json.dumps(challenges))
    if solutions is not None:
        (folder / f"arc-agi_{subset}_solutions.json").write_text(json.dumps(solutions))


def write_source(folder: Path, seed: int = 0) -> Path:
    """Three subsets of a few puzzles; one puzzle fills the canvas."""
    rng = np.random.RandomState(seed)  # its numbers never change, so that hashes may be written down
    for subset, count in SUBSETS.items():
        puzzles = {f"{subset}{number}": random_puzzle(rng, 30 if number == 0 else 8) for number in range(count)}
        if subset == "concept":
            full = {"input": np.full((30, 30), 3).tolist(), "output": np.full((30, 2), 4).tolist()}
            puzzles["concept0"][0]["train"].append(full)
        challenges = {name: challenge for name, (challenge, _) in puzzles.items()}
        write_files(folder, subset, challenges, {name: solutions for name, (_, solutions) in puzzles.items()})
    return folder


RUN_PUBLISHED = """
import sys, types
command_line = types.ModuleType("argdantic")
command_line.ArgParser = lambda: types.SimpleNamespace(command=lambda **_: lambda function: function)
sys.modules["argdantic"] = command_line
from dataset.build_arc_dataset import DataProcessConfig, convert_dataset
prefix, output, subsets, test_subset, num_aug, seed = sys.argv[1:]
convert_dataset(DataProcessConfig(input_file_prefix=prefix, output_dir=output, subsets=subsets.split(","),
                                  test_set_name=test_subset, num_aug=int(num_aug), seed=int(seed)))
"""


def run_published(source: Path, output: Path, subsets: str, test_subset: str, num_aug: int, seed: int) -> None:
    assert PUBLISHED is not None
    arguments = [f"{source}/arc-agi", str(output), subsets, test_subset, str(num_aug), str(seed)]
    environment = os.environ | {"PYTHONPATH": PUBLISHED, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", RUN_PUBLISHED, *arguments], check=True, capture_output=True, env=environment)
