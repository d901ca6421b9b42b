"""The language task: next-token prediction on a stream of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from models_torch import outside, registry
from models_torch.outside_language import OutsideLanguageConfig
from train_jax.core.objective import Batch, Call, LossSums, Objective
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices
from train_jax.task import Task
from train_jax.tasks.language.batches import ShuffledRows, stream_batch, tokens_per_step
from train_jax.tasks.language.best_fit import BestFit
from train_jax.tasks.language.config import LanguageConfig
from train_jax.tasks.language.evaluation import Evaluator, figures_of
from train_jax.tasks.language.loss import token_sums
from train_jax.tasks.language.text_set import TextSet, TokenStream

if TYPE_CHECKING:
    from train_jax.run.restore import Restored


class LanguageTask(Task):
    """Documents for models that predict the next token and compute their loss themselves."""

    config_class = LanguageConfig
    outside_model_config_class = OutsideLanguageConfig
    console: ClassVar = {"loss": "loss {:.4f}", "bits_per_byte": "bits/byte {:.4f}"}
    evaluated = ("bits_per_byte", "loss")

    def __init__(self, config: RunConfig, facts: dict[str, Any] | None = None):
        """If `facts` are given (from a run folder), the data set is opened only when it is needed."""
        super().__init__(config, facts)
        self._task_config: LanguageConfig = config.task_config  # pyright: ignore[reportAttributeAccessIssue]
        self._vocab_size: int = self.data.vocab_size if facts is None else int(facts["vocab_size"])

    @property
    def unit(self) -> tuple[str, int]:
        """What the speed of a run is counted in, and how many of them an example has."""
        return "tokens", self.config.arch.seq_len

    # ---- data

    @cached_property
    def data(self) -> TextSet:
        return TextSet(self.config.data_dir, getattr(self.config.arch, "vocab_size", 0))

    @cached_property
    def train_stream(self) -> TokenStream:
        return self.data.stream("train")

    @cached_property
    def test_stream(self) -> TokenStream:
        return self.data.stream("test")

    @cached_property
    def packed(self) -> BestFit | ShuffledRows | None:
        """The rows of the train split, unless they follow each other in the stream."""
        seq_len = self.config.arch.seq_len
        if self._task_config.packing == "bestfit":
            return BestFit(self.train_stream, self.data.tokenizer().bos, seq_len)
        if self._task_config.packing == "shuffled":
            return ShuffledRows(self.train_stream, seq_len, self.config.seed)
        return None

    @cached_property
    def token_bytes(self) -> np.ndarray:
        return self.data.tokenizer().token_bytes

    @property
    def data_dir(self) -> str:
        return self.config.data_dir

    @property
    def sizes(self) -> Mapping[str, int]:
        """The length of a row is a choice of the run, `arch.seq_len`."""
        return {"vocab_size": self._vocab_size}

    @property
    def fingerprint(self) -> str:
        return self.data.fingerprint

    @property
    def examples_per_epoch(self) -> float:
        """Rows of a pass over the train split."""
        if self.packed is not None:
            return self.packed.rows_per_epoch
        rows = self.config.global_batch_size
        return rows * len(self.train_stream) / tokens_per_step(rows, self.config.arch.seq_len)

    @property
    def description(self) -> str:
        train, test = (self.data.splits[split] for split in ("train", "test"))
        return f"{train.tokens:,} tokens of {train.documents:,} documents, {test.documents:,} documents held out"

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        rows = self.config.global_batch_size
        if self.packed is not None:
            return self.packed.batch(step=step, rows=rows, shard=shard)
        return stream_batch(
            self.train_stream,
            step=step,
            rows=rows,
            seq_len=self.config.arch.seq_len,
            shard=shard,
        )

    def check(self, config: RunConfig, devices: Devices) -> None:
        if config.model not in registry.LANGUAGE_MODELS and not outside.is_outside(config.model):
            names = ", ".join(registry.LANGUAGE_MODELS)
            raise UserError(f"--model {config.model} is no language model; use one of {names}, or package.module:Class")
        needed = tokens_per_step(config.global_batch_size, config.arch.seq_len)
        if len(self.train_stream) < needed:
            raise UserError(
                f"{config.data_dir} has {len(self.train_stream):,} train tokens, expected at least {needed:,} for one "
                "batch; use a smaller --global-batch-size or --arch.seq-len, or more text"
            )
        if len(self.test_stream) < 2:
            raise UserError(f"{config.data_dir} has one test token; build it with more text")
        _ = self.token_bytes

    # ---- model and loss

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        losses, buffers = call(batch["inputs"], batch["targets"], loss_reduction="none")
        sums = token_sums(losses, batch["targets"], self.token_bytes)
        return LossSums(sums["loss"], sums["tokens"], sums, carry, buffers)

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        return figures_of(sums)

    def evaluator(
        self,
        objective: Objective,
        devices: Devices,
        *,
        data: TextSet | None = None,
        split: str = "test",
        rows: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Evaluator:
        """Returns an evaluator of a split of `data`, by default of the run's; `rows` are those of a batch (0: as in
        training)."""
        data = data or self.data
        return Evaluator(
            objective,
            data.stream(split),
            self.token_bytes,
            devices,
            rows=rows or self.config.eval_batch_size,
            seq_len=self.config.arch.seq_len,
            compressed=data.compressed if split == "test" else {},
            progress=progress,
        )


def language_task(run: Restored) -> LanguageTask:
    """Returns the task of the run. Raises `UserError` if it is not a language task."""
    if not isinstance(run.task, LanguageTask):
        raise UserError(f"{run.folder.path} is a run of task {run.config.task}, expected language; give a language run")
    return run.task
