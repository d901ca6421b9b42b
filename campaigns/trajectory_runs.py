"""Runs the same training in PyTorch and in JAX, in separate processes, and compares the results."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from models_torch.registry import architecture, build
from train_jax.core.optim.config import OptimConfig
from train_jax.puzzles.building import write_dataset
from train_jax.puzzles.sudoku.data import split_arrays
from train_jax.puzzles.sudoku.generator import Originals, generate
from train_jax.puzzles.sudoku.grid import geometry_of_size
from train_jax.puzzles.task import PuzzleConfig, PuzzleTask
from train_jax.run.config import RunConfig, to_json
from train_jax.run.model import sized

Side = Literal["torch", "jax"]
ROOT = Path(__file__).parents[1]
"""The format of a job is defined by `torch_trajectory.py` and `jax_trajectory.py`."""
Results = dict[str, np.ndarray]
"""The output of a job: metrics of every step by name, `STEP/params/NAME`, `STEP/ema/NAME`, `STEP/table/weights`."""

STEPS = 100
BATCH_SIZE = 16
HALT_MAX_STEPS = 3
IDENTIFIERS = 6


@dataclasses.dataclass(frozen=True)
class Case:
    """A tiny architecture with an optimizer and a learning rate at which it learns in 100 steps."""

    model: str
    fields: dict[str, Any]
    optim: OptimConfig


def _optim(optimizer: Any, lr: float) -> OptimConfig:
    return OptimConfig(
        optimizer=optimizer, lr=lr, warmup_steps=10, weight_decay=0.1, sparse_weight_decay=1.0, ema_decay=0.95
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
    """Returns a run of the case; `changes` are fields of the architecture."""
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
        run_dir="",
        task_config=PuzzleConfig(),
        model=case.model,
        arch=architecture(case.model).config_class(**(fields | case.fields | changes)),
        optim=case.optim,
        steps=STEPS,
        global_batch_size=BATCH_SIZE,
    )


def in_dtype(config: RunConfig, dtype: str) -> RunConfig:
    """Returns the same run with another dtype."""
    return dataclasses.replace(config, arch=dataclasses.replace(config.arch, forward_dtype=dtype))


def write_puzzles(folder: Path, *, size: int, count: int, num_empty: int) -> None:
    """Writes Sudokus with few empty cells, so that a tiny model learns to solve them in few steps and halts early.

    Unlike in a Sudoku data set, they have several identifiers, so that puzzle embeddings are trained.
    """
    rng = np.random.default_rng(0)
    geometry = geometry_of_size(size)
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
    """Writes the initial state of both sides: that of the module, except for its halting head.

    An untrained model never halts early, so exploration, which only delays halting, would have no effect.
    """
    torch.manual_seed(seed)
    arch = sized(in_dtype(config, "float32").arch, PuzzleTask(config), config.global_batch_size)
    module: Any = build(config.model, arch)
    with torch.no_grad():
        module.model.inner.q_head.weight.normal_(std=0.3)
        module.model.inner.q_head.bias.zero_()
    np.savez(path, **{name: tensor.numpy() for name, tensor in module.state_dict().items()})


def job(folder: Path, name: str, config: RunConfig, **more: Any) -> dict[str, Any]:
    """Writes the run's configuration into `folder` and returns a job that writes `name`.npz there."""
    (folder / f"{name}.json").write_text(to_json(config))
    snapshots = [1, config.steps // 2, config.steps]
    files = {"config": f"{name}.json", "start": "start.npz", "out": f"{name}.npz"}
    return {kind: str(folder / file) for kind, file in files.items()} | {"seed": 0, "snapshots": snapshots} | more


def start_jobs(side: Side, jobs: Sequence[dict[str, Any]], folder: Path) -> subprocess.Popen:
    """Starts a process that runs these jobs one after the other."""
    listed = folder / f"{side}-{jobs[0]['out'].replace('/', '-')}.json"
    listed.write_text(json.dumps(jobs))
    module = {"torch": "tests.references.torch_trajectory", "jax": "campaigns.jax_trajectory"}[side]
    command = [sys.executable, "-m", module, str(listed.absolute())]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment(), **output)


def environment() -> dict[str, str]:
    """Returns the environment of a process that imports from `campaigns` and `tests`."""
    return os.environ | {"PYTHONPATH": str(ROOT)}


def finish(process: subprocess.Popen) -> None:
    """Waits for the process. Raises RuntimeError with its output if it failed."""
    output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{process.args} ended with {process.returncode}:\n{output}")


def load_results(job: dict[str, Any]) -> Results:
    return dict(np.load(job["out"]))


def loss_differences(ours: Results, theirs: Results) -> np.ndarray:
    """Returns the difference at every step, relative to `theirs`."""
    return np.abs(ours["loss"] - theirs["loss"]) / np.abs(theirs["loss"])


def worst_leaf(ours: Results, theirs: Results, kind: str, step: int = STEPS) -> tuple[float, str]:
    """Returns the largest difference in a leaf, relative to its largest entry, and the name of the leaf."""
    names = [name for name in theirs if name.startswith(f"{step}/{kind}/")]
    return max((float(np.abs(ours[n] - theirs[n]).max() / np.abs(theirs[n]).max()), n) for n in names)
