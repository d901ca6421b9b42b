"""A language task whose data set does not exist: its vocabulary is that of the run, its batches are zeros."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from train_jax.run.config import RunConfig
from train_jax.tasks.language.task import LanguageTask


class UnbuiltText(LanguageTask):
    """Enough of a language task to compile its train step, without a data set."""

    def __init__(self, config: RunConfig):
        super().__init__(config, {"vocab_size": config.arch.vocab_size})

    @cached_property
    def token_bytes(self) -> np.ndarray:
        return np.ones(self._vocab_size, np.int32)

    @property
    def examples_per_epoch(self) -> float:
        return float(self.config.global_batch_size)

    def batch(self, step: int, shard: tuple[int, int], state: Any = None) -> dict[str, np.ndarray]:
        tokens = np.zeros((self.config.global_batch_size // shard[1], self.config.arch.seq_len), np.int32)
        return {"inputs": tokens, "targets": tokens}

    def check(self, config: Any, devices: Any) -> None:
        """There is no data to check."""
