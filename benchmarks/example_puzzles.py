"""Runs without a data set: random examples with the sizes in the architecture's configuration."""

import dataclasses
from typing import Any

import numpy as np

from models_torch.registry import example_batch
from train_jax.puzzles.metadata import Metadata
from train_jax.puzzles.task import PuzzleConfig, PuzzleTask
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices


class ExamplePuzzles(PuzzleTask):
    """The puzzle task with batches of `models_torch.registry.example_batch`, with the step as the seed."""

    def __init__(self, config: RunConfig):
        self.arch: Any = config.arch
        self.batch_size = config.global_batch_size
        sizes = self.arch.seq_len, self.arch.vocab_size, 0, 0, 0, self.arch.num_puzzle_identifiers
        super().__init__(config, dataclasses.asdict(Metadata(*sizes, 1, 1.0, 1, ())) | {"sets": ["all"]})

    def check(self, config: RunConfig, devices: Devices) -> None: ...

    def batch(self, step: int, shard: tuple[int, int] = (0, 1), state: Any = None) -> dict[str, np.ndarray]:
        index, count = shard
        rows = slice(index * self.batch_size // count, (index + 1) * self.batch_size // count)
        batch = example_batch(self.arch, self.batch_size, seed=step)
        return {name: tensor.numpy()[rows] for name, tensor in batch.items()}


def example_run(model: str, arch: Any, **fields: Any) -> RunConfig:
    """Returns a run without folders; `arch.batch_size` examples per step unless `fields` has another number."""
    common = {"data_dir": "", "run_dir": "", "task_config": PuzzleConfig(), "global_batch_size": arch.batch_size}
    return RunConfig(model=model, arch=arch, **(common | fields))
