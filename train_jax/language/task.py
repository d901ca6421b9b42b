"""The language task: next-token prediction on a stream of tokens, evaluated by loss per token and bits per byte."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from models_torch import registry
from models_torch.gpt import IGNORED_TARGET
from models_torch.outside_language import OutsideLanguageConfig
from models_torch.ranges import Range
from train_jax.core.objective import Batch, Call, LossSums, Objective
from train_jax.core.reduction import AXIS
from train_jax.core.state import TrainState
from train_jax.errors import UserError, check_fields
from train_jax.language.batches import (
    BestFit,
    MixedRows,
    Rows,
    ShuffledRows,
    StreamRows,
    count_rows,
    eval_batches,
    tokens_per_step,
)
from train_jax.language.text_set import TextSet, TokenStream, open_beside
from train_jax.run.config import RunConfig
from train_jax.run.folder import RunFolder
from train_jax.run.mixing import CHANGED, names_and_weights
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import process_shard
from train_jax.storage.files import write_text
from train_jax.storage.json_files import COUNT
from train_jax.task import Evaluation, Periodic, Task, TaskConfig

if TYPE_CHECKING:
    from train_jax.run.restore import Restored

Packing = Literal["stream", "shuffled", "bestfit", "bestfit-pad"]


@dataclasses.dataclass(frozen=True)
class LanguageConfig(TaskConfig):
    """Fields of the batches of a language run."""

    packing: Packing = "stream"
    """Tokens of a row: stream takes every token of the data in turn; shuffled takes the same rows in a random order, so
    that the rows of a long document do not share a batch; bestfit begins every row with a document, and fills it with
    whole documents and the start of one, whose other tokens are not used; bestfit-pad does not cut a document, and pads
    the row where none fits. Only a document that is longer than a row is cut."""
    data_weights: str = ""
    """Share of each data set in the rows, for several data sets (3,1: three quarters and one quarter); by default one
    pass over each data set takes the same number of steps."""
    sample_every_steps: Annotated[int, Range(0, 10**9)] = 0
    """Steps between samples during training, and at its end: texts that the model writes after the beginnings of
    held-out documents and without a prompt; 0 for none."""

    def __post_init__(self):
        check_fields(self)


class LanguageTask(Task):
    """Documents for models that predict the next token and compute their loss themselves."""

    config_class = LanguageConfig
    models = tuple(registry.LANGUAGE_MODELS)
    fact_kinds: ClassVar = {"vocab_size": COUNT}
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
        """Unit of the speed of a run, and its number in an example."""
        return "tokens", self.config.arch.seq_len

    # ---- data

    @cached_property
    def sources(self) -> list[TextSet]:
        """The data sets of the run. Raises `UserError` if they have different tokenizers."""
        names, _ = names_and_weights(self.config.data_dir, self._task_config.data_weights)
        first = TextSet(names[0], getattr(self.config.arch, "vocab_size", 0))
        return [first, *(open_beside(name, first) for name in names[1:])]

    @property
    def data(self) -> TextSet:
        """The first data set, on which the run is evaluated."""
        return self.sources[0]

    @cached_property
    def test_stream(self) -> TokenStream:
        return self.data.stream("test")

    @cached_property
    def rows(self) -> Rows:
        """The rows of the train splits."""
        config = self.config
        rows = [self._rows_of(source.stream("train"), number) for number, source in enumerate(self.sources)]
        if len(rows) == 1:
            return rows[0]
        _, weights = names_and_weights(config.data_dir, self._task_config.data_weights)
        return MixedRows(rows, weights or [source.rows_per_epoch for source in rows], config.seed)

    def _rows_of(self, stream: TokenStream, number: int) -> Rows:
        packing = self._task_config.packing
        seq_len = self.config.arch.seq_len
        if packing == "stream":
            return StreamRows(stream, seq_len, self.config.global_batch_size)
        if packing == "shuffled":  # each data set has its own seed, so that equal ones have different orders
            return ShuffledRows(stream, seq_len, self.config.seed + number * 2**32)
        return BestFit(stream, self.data.tokenizer().bos, seq_len, pads=packing == "bestfit-pad")

    @cached_property
    def token_bytes(self) -> np.ndarray:
        return self.data.tokenizer().token_bytes

    @property
    def sizes(self) -> Mapping[str, int]:
        """Sizes of the data; the length of a row, `arch.seq_len`, is a choice of the run."""
        return {"vocab_size": self._vocab_size}

    @property
    def fingerprint(self) -> str:
        each = [source.fingerprint for source in self.sources]
        return each[0] if len(each) == 1 else hashlib.sha256("\n".join(each).encode()).hexdigest()[:32]

    @property
    def examples_per_epoch(self) -> float:
        """Number of rows of a pass over each train split."""
        return self.rows.rows_per_epoch

    @property
    def description(self) -> str:
        train = [source.splits["train"] for source in self.sources]
        test = self.data.splits["test"]
        tokens = sum(each.tokens for each in train)
        documents = sum(each.documents for each in train)
        several = f" in {len(train)} data sets" if len(train) > 1 else ""
        text = f"{tokens:,} tokens of {documents:,} documents{several}, {test.documents:,} documents held out"
        cut = self.rows.cut_documents if self._task_config.packing == "bestfit-pad" else 0
        text += CHANGED * any(source.changed for source in self.sources)
        return text + (f", {cut:,} longer documents cut to {self.config.arch.seq_len + 1:,} tokens" if cut else "")

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        return self.rows.batch(step=step, rows=self.config.global_batch_size, shard=shard)

    def check(self, config: RunConfig, devices: Devices) -> None:
        alone = len(self.sources) == 1
        needed = tokens_per_step(config.global_batch_size if alone else 1, config.arch.seq_len)
        for source in self.sources:
            if source.splits["train"].tokens < needed:
                raise UserError(
                    f"{source.directory} has {source.splits['train'].tokens:,} train tokens, expected at least "
                    f"{needed:,} for one {'batch' if alone else 'row'}; use a smaller "
                    f"{'--global-batch-size or ' * alone}--arch.seq-len, or more text"
                )
            for split in source.splits:
                source.stream(split).check()
        if len(self.test_stream) < 2:
            raise UserError(f"{self.data.directory} has one test token; build it with more text")
        _ = self.rows
        _ = self.token_bytes

    # ---- model and loss

    @classmethod
    def unbuilt(cls, config: RunConfig, kind: str = "", puzzle_identifiers: int = 1) -> Task | None:
        return UnbuiltText(config) if cls is LanguageTask else None  # a chat needs its problems

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        """Computes the sum of weight times negative log-likelihood over the targets, divided by the divisor.

        `weights` of the batch are 1 by default; a target of weight 0 is ignored. The divisor is the sum of `divisor`,
        by default the number of targets, over the global batch. Metrics are those of all targets, without weights.
        """
        targets = batch["targets"]
        weights = batch.get("weights")
        if weights is not None:
            targets = jnp.where(weights == 0, IGNORED_TARGET, targets)
        losses, buffers = call(batch["inputs"], targets, loss_reduction="none")
        sums = token_sums(losses, targets, self.token_bytes)
        loss = sums["loss"]
        divisor = sums["tokens"]
        if weights is not None:
            loss = jnp.where(targets == IGNORED_TARGET, 0, weights * losses.reshape(targets.shape)).sum()
        if "divisor" in batch:
            divisor = batch["divisor"].sum()
        return LossSums(loss, divisor, sums, carry, buffers, counted=sums["tokens"])

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        return {name: value for name, value in figures_of(sums).items() if not math.isnan(value)}

    def evaluator(self, objective: Objective, devices: Devices, **options: Any) -> LanguageEvaluator:
        """Returns an evaluator; `options` are those of `LanguageEvaluator`."""
        return LanguageEvaluator(self, objective, devices, **options)

    def evaluations(self, objective: Objective, devices: Devices) -> list[Periodic]:
        """Returns the evaluation of the text, and samples. Raises `UserError` for a model that cannot write any."""
        text = super().evaluations(objective, devices)
        every = self._task_config.sample_every_steps
        if not every:
            return [*text]
        from train_jax.language.generation import Sampler

        try:
            return [*text, Periodic(Sampler(objective, self.data, devices), every, "samples")]
        except ValueError as error:
            raise UserError(f"sample_every_steps {every}: {error}") from None


def language_task(run: Restored) -> LanguageTask:
    """Returns the task of the run. Raises `UserError` if it is not a language task."""
    if not isinstance(run.task, LanguageTask):
        raise UserError(f"{run.folder.path} is a run of task {run.config.task}, expected language; give a language run")
    return run.task


class UnbuiltText(LanguageTask):
    """The parts of a language task that are needed to compile its train step, without a data set."""

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
        """Does nothing: there is no data to check."""


# ---- evaluation


def token_sums(losses: jax.Array, targets: Int[Array, "batch seq"], token_bytes: np.ndarray) -> dict[str, jax.Array]:
    """Returns `loss` and `tokens`, over targets that count, and `nats` and `bytes`, also without special tokens.

    `losses` are flat, one for each target. `token_bytes` is the number of bytes of each token, 0 for special ones. All
    sums are float32; the bytes of a batch are exact up to 2**24.
    """
    flat = targets.reshape(-1)
    counts = flat != IGNORED_TARGET
    sizes = jnp.where(counts, jnp.asarray(token_bytes)[jnp.where(counts, flat, 0)], 0)
    return {
        "loss": jnp.where(counts, losses, 0).sum(),
        "tokens": counts.sum().astype(jnp.float32),
        "nats": jnp.where(sizes > 0, losses, 0).sum(),
        "bytes": sizes.sum().astype(jnp.float32),
    }


def figures_of(sums: Mapping[str, Any]) -> dict[str, float]:
    """Converts sums to `loss`, the mean over tokens in nats, and `bits_per_byte`, which leaves special tokens out.

    A mean over nothing is NaN.
    """
    loss = float(sums["loss"]) / float(sums["tokens"]) if sums["tokens"] else math.nan
    size = float(sums["bytes"])
    bits_per_byte = float(sums["nats"]) / (math.log(2) * size) if size else math.nan
    return {"loss": loss, "bits_per_byte": bits_per_byte, "tokens": float(sums["tokens"])}


@dataclasses.dataclass(frozen=True)
class LanguageEvaluation(Evaluation):
    """The result of an evaluation, equal on every process."""

    metrics: dict[str, float]
    """`loss`, `bits_per_byte`, `tokens` (targets that count), and `count`, the number of rows."""
    compressed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Bits per byte of compressors on the same documents, by name; empty if the evaluation uses only a part of them."""

    @property
    def summary(self) -> str:
        compressed = ", ".join(f"{name} {value:.4f}" for name, value in self.compressed.items())
        return (
            f"{self.metrics['bits_per_byte']:.4f} bits per byte, loss {self.metrics['loss']:.4f} on "
            f"{self.metrics['tokens']:,.0f} held-out tokens"
        ) + (f" ({compressed})" if compressed else "")

    def save(self, folder: RunFolder, split: str) -> None:
        content = self.metrics | ({"compressed": dict(self.compressed)} if self.compressed else {})
        write_text(folder.evaluation(split), json.dumps(content, indent=1))


class LanguageEvaluator:
    """Evaluates a module on a stream of tokens; compiled at the first call."""

    def __init__(
        self,
        task: LanguageTask,
        objective: Objective,
        devices: Devices,
        *,
        data: TextSet | None = None,
        split: str = "test",
        rows: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ):
        """Evaluates on a split of `data`, by default of the run's; `rows` are those of a batch on all devices together
        (0: as in training)."""
        data = data or task.data
        token_bytes = task.token_bytes
        self._stream = data.stream(split)
        self._devices = devices
        self._progress = progress
        self._rows = rows or task.config.eval_batch_size
        self._seq_len = task.config.arch.seq_len
        self._compressed = data.compressed if split == "test" else {}  # bits per byte of the whole split
        devices.local_batch_size(self._rows)

        def eval_step(state: TrainState, batch: Batch) -> tuple[Any, Any]:
            call = objective.call(state.eval_params, state.buffers, train=False)
            losses, _ = call(batch["inputs"], batch["targets"], loss_reduction="none")
            return jax.lax.psum(token_sums(losses, batch["targets"], token_bytes), AXIS), {}

        self._step = devices.parallel_eval_step(eval_step)

    def __call__(self, state: TrainState, *, limit: int = 0, metrics_only: bool = False) -> LanguageEvaluation:
        state = self._devices.replicate(state)  # otherwise every batch would transfer it again
        sums: dict[str, float] = {}
        batches = eval_batches(self._stream, rows=self._rows, seq_len=self._seq_len, limit=limit, shard=process_shard())
        available = count_rows(self._stream, self._seq_len)
        count = min(limit or available, available)
        for number, batch in enumerate(batches, start=1):
            metrics, _ = self._step(state, self._devices.shard(self._devices.split_batch(batch)))
            for name, value in self._devices.to_host(metrics).items():
                sums[name] = sums.get(name, 0.0) + float(value)
            self._progress(min(number * self._rows, count), count)
        metrics = figures_of(sums) | {"count": float(count)}
        return LanguageEvaluation(metrics, self._compressed if count == available else {})
