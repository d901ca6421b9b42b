"""The same training run in PyTorch and in JAX, each side in a process of its own, and how far the two come apart."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from models_torch.registry import architecture, build
from train_jax.run.config import OptimConfig, RunConfig, sized_for, to_json
from train_jax.tasks.puzzles.mixture import load_mixture
from train_jax.tasks.puzzles.sudoku.dataset import split_arrays
from train_jax.tasks.puzzles.sudoku.generator import Originals, generate
from train_jax.tasks.puzzles.sudoku.grid import geometry_of_size
from train_jax.tasks.puzzles.writing import write_dataset

Side = Literal["torch", "jax"]
LOOPS = Path(__file__).parents[1] / "tests" / "train_jax"
"""Where `torch_trajectory.py` and `jax_trajectory.py` are; they say what a job is."""
Found = dict[str, np.ndarray]
"""What a job leaves: figures of every step by name, `STEP/params/NAME`, `STEP/ema/NAME`, `STEP/table/weights`."""

STEPS = 100
BATCH_SIZE = 16
HALT_MAX_STEPS = 3
IDENTIFIERS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """An architecture, tiny, with an optimizer and a learning rate at which 100 steps teach it something."""

    model: str
    fields: dict[str, Any]
    optim: OptimConfig


def _optim(optimizer: Any, lr: float) -> OptimConfig:
    return OptimConfig(
        optimizer=optimizer, lr=lr, warmup_steps=10, weight_decay=0.1, puzzle_weight_decay=1.0, ema_decay=0.95
    )


CASES = {
    "TRM attention": Case("trm", {"L_layers": 1, "puzzle_emb_len": 1}, _optim("adamw", 1e-3)),
    "TRM mixer": Case(
        "trm",
        {"L_layers": 1, "puzzle_emb_len": 1, "mlp_t": True, "pos_encodings": "none"},
        _optim("adam_atan2", 3e-3),
    ),
    "HRM": Case("hrm", {"L_layers": 1, "H_layers": 1}, _optim("adam_atan2", 1e-3)),
}


def tiny_run(case: Case, data_dir: Path, **changes: Any) -> RunConfig:
    """A run of the case; `changes` are of the architecture."""
    fields = {
        "hidden_size": 32,
        "num_heads": 4,
        "mlp_multiple_of": 16,
        "puzzle_emb_ndim": 16,
        "H_cycles": 2,
        "L_cycles": 1,
        "halt_max_steps": HALT_MAX_STEPS,
        "halt_exploration_prob": 0.5,
        "forward_dtype": "float32",
    }
    return RunConfig(
        data_dir=str(data_dir),
        model=case.model,
        arch=architecture(case.model).config_class(**(fields | case.fields | changes)),
        optim=case.optim,
        steps=STEPS,
        global_batch_size=BATCH_SIZE,
    )


def in_dtype(config: RunConfig, dtype: str) -> RunConfig:
    """The same run in another number format."""
    return dataclasses.replace(config, arch=dataclasses.replace(config.arch, forward_dtype=dtype))


def write_puzzles(folder: Path, *, size: int, count: int, num_empty: int) -> None:
    """Sudokus with only so many empty cells, so that few steps teach a tiny model to solve them, and it halts.

    Unlike a Sudoku data set they have several identifiers, so that there are puzzle rows to learn.
    """
    rng, geometry = np.random.default_rng(0), geometry_of_size(size)
    dug = generate(count, geometry.cells // 2, geometry, rng, progress=lambda *_: None)
    empty = dug.puzzles == 0
    given = ~empty | (np.cumsum(empty, axis=1) > num_empty)
    puzzles = Originals(np.where(given, dug.solutions, 0).astype(np.uint8), dug.solutions)
    metadata, arrays = split_arrays(puzzles, geometry, num_aug=0, rng=rng, progress=lambda *_: None)
    arrays |= {"puzzle_identifiers": rng.integers(1, IDENTIFIERS, count).astype(np.int32)}
    split = dataclasses.replace(metadata, num_puzzle_identifiers=IDENTIFIERS), arrays
    names = ["<blank>", *map(str, range(1, IDENTIFIERS))]
    write_dataset(folder, {"train": split, "test": split}, names, {"size": size, "num_empty": num_empty})


def write_start(path: Path, config: RunConfig, *, seed: int) -> None:
    """The state that both sides start from: the module's own, but for its halting.

    An untrained model never wants to halt, and exploration, which only holds back who does, would change nothing.
    """
    torch.manual_seed(seed)
    metadata = load_mixture(config.data_dir, "train").metadata
    module: Any = build(config.model, sized_for(in_dtype(config, "float32"), metadata, config.global_batch_size))
    with torch.no_grad():
        module.model.inner.q_head.weight.normal_(std=0.3)
        module.model.inner.q_head.bias.zero_()
    np.savez(path, **{name: tensor.numpy() for name, tensor in module.state_dict().items()})


def job(folder: Path, name: str, config: RunConfig, **more: Any) -> dict[str, Any]:
    """Writes the run's configuration into `folder` and returns a job that leaves `name`.npz there."""
    (folder / f"{name}.json").write_text(to_json(config))
    snapshots = [1, config.steps // 2, config.steps]
    files = {"config": f"{name}.json", "start": "start.npz", "out": f"{name}.npz"}
    return {kind: str(folder / file) for kind, file in files.items()} | {"seed": 0, "snapshots": snapshots} | more


def start_jobs(side: Side, jobs: Sequence[dict[str, Any]], folder: Path) -> subprocess.Popen:
    """One process that does these jobs in turn."""
    listed = folder / f"{side}-{jobs[0]['out'].replace('/', '-')}.json"
    listed.write_text(json.dumps(jobs))
    command = [sys.executable, str(LOOPS / f"{side}_trajectory.py"), str(listed)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> None:
    """Waits for it. Raises RuntimeError with what it said if it failed."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{output}")


def found(job: dict[str, Any]) -> Found:
    return dict(np.load(job["out"]))


def loss_differences(ours: Found, theirs: Found) -> np.ndarray:
    """Of every step, relative to `theirs`."""
    return np.abs(ours["loss"] - theirs["loss"]) / np.abs(theirs["loss"])


def worst_leaf(ours: Found, theirs: Found, kind: str, step: int = STEPS) -> tuple[float, str]:
    """The largest difference in a leaf, relative to its largest entry, and which leaf that is."""
    names = [name for name in theirs if name.startswith(f"{step}/{kind}/")]
    return max((float(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max()), n) for n in names)
