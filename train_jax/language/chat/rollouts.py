"""Reinforcement learning: the model answers problems, and each answer is trained by how much better it is than others.

A step has several answers to each of a few problems. The advantage of an answer is its reward less the mean reward of
the answers to the same problem; there is no KL term. The answers of a step are a pure function of the weights, the
seed and the step, so that a run that is continued has the same answers, and all hosts have the same.

References:
  Shao et al., "DeepSeekMath", 2024, https://arxiv.org/abs/2402.03300 (advantages by group)
  Yu et al., "DAPO", 2025, https://arxiv.org/abs/2503.14476 (the loss is a mean over tokens)
  scripts/chat_rl.py at 92d63d4, https://github.com/karpathy/nanochat (the normalization `published`)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from models_torch.gpt import IGNORED_TARGET
from models_torch.ranges import Range
from train_jax.core.objective import Batch, Call, LossSums
from train_jax.core.state import TrainState
from train_jax.errors import UserError
from train_jax.language.batches import shard_rows, shuffled
from train_jax.language.chat.evaluation import Answering, answer_request, written_text
from train_jax.language.chat.problems import Problems
from train_jax.language.chat.task import ChatConfig, ChatTask
from train_jax.language.chat.task_names import task_name
from train_jax.language.engine import Generation, Request
from train_jax.language.sampling import Sampling
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices

Normalization = Literal["global", "published"]

LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.5}
"""A run stops if the log-probabilities of a token in training program and engine differ by more."""


@dataclasses.dataclass(frozen=True)
class RolloutConfig(ChatConfig):
    """Answers of a step and how they are trained."""

    problems: str = "arithmetic"
    """The problems that are answered, named as for `trm chat-eval --tasks`; their test split is evaluated, too."""
    samples: Annotated[int, Range(2, 10**6)] = 16
    """Answers to each problem; a divisor of the batch size."""
    temperature: Annotated[float, Range(0, 100, low_excluded=True)] = 1.0
    top_k: Annotated[int, Range(0, 2**24)] = 0
    """Draw from this many of the most probable tokens; 0 for all."""
    normalization: Normalization = "global"
    """The divisor of the sum over tokens: global, all trained tokens of the step; published, those of each pass of
    `pass_samples` answers, and then the number of passes."""
    pass_samples: Annotated[int, Range(1, 10**6)] = 8
    """Answers of a pass of the published normalization; a divisor of `samples`."""
    train_end: bool = True
    """Train the token that ends an answer; the published code drops it."""


class RolloutTask(ChatTask):
    """Problems that a language model answers; their rewards train it."""

    config_class = RolloutConfig
    needs_state = True
    console: ClassVar = {"reward": "reward {:.4f}", "answer_tokens": "{:.0f} tokens an answer"}

    def __init__(self, config: RunConfig, facts: dict[str, Any] | None = None):
        super().__init__(config, facts)
        self.fields: RolloutConfig = config.task_config  # pyright: ignore[reportAttributeAccessIssue]

    @cached_property
    def problems(self) -> Problems:
        """The problems of the train split."""
        return task_name(self.fields.problems).open("train", seed=self.config.seed)

    @property
    def examples_per_epoch(self) -> float:
        return float(len(self.problems) * self.fields.samples)

    @property
    def description(self) -> str:
        return f"{len(self.problems):,} problems, {self.fields.samples} answers to each"

    def check(self, config: RunConfig, devices: Devices) -> None:
        fields = self.fields
        rows = config.global_batch_size
        if rows % fields.samples:
            raise UserError(f"samples {fields.samples} does not divide global_batch_size {rows}; use a divisor of it")
        if fields.normalization == "published" and fields.samples % fields.pass_samples:
            raise UserError(
                f"pass_samples {fields.pass_samples} does not divide samples {fields.samples}; use a divisor of it"
            )
        self.check_problems()
        _ = self.token_bytes

    # ---- rollouts

    @property
    def asked(self) -> tuple[str, ...]:
        return (self.fields.problems, *super().asked)

    @property
    def slots(self) -> int:
        return self.config.global_batch_size

    @property
    def eval_sampling(self) -> Sampling:
        """Settings of sampling, those of the answers that are trained."""
        return Sampling(temperature=self.fields.temperature)

    def test_problems(self, text: str, count: int | None = None) -> Problems:
        """The count of `problems` are those to train on."""
        name = task_name(text)
        if text == self.fields.problems:
            name = name._replace(count=None)
        return name.open("test", seed=self.config.seed, count=count)

    def opened(self) -> list[Problems]:
        return [self.problems, *super().opened()]

    def batch(self, step: int, shard: tuple[int, int], state: TrainState | None = None) -> dict[str, np.ndarray]:
        assert state is not None, "the answers depend on the weights"
        self.load(state.params, state.buffers)
        numbers = self._questions(step)
        samples = self.fields.samples
        rows = list(self.answers(self._requests(step, numbers)))
        texts = (written_text(self.tokenizer, row.tokens) for row in rows)
        right = [self.problems.is_right(numbers[place // samples], text) for place, text in enumerate(texts)]
        batch = self._packed(rows, np.array(right, np.float32))
        own = shard_rows(len(rows), shard)
        return {name: values[own.start : own.stop] for name, values in batch.items()}

    def _questions(self, step: int) -> list[int]:
        """Returns the numbers of the problems of a step, in an order that is another one in every epoch."""
        count = self.config.global_batch_size // self.fields.samples
        numbers = range(step * count, (step + 1) * count)
        return [shuffled(number, len(self.problems), self.config.seed) for number in numbers]

    def _requests(self, step: int, numbers: Sequence[int]) -> list[Request]:
        fields = self.fields
        sampling = Sampling(temperature=fields.temperature, top_k=fields.top_k)
        how = Answering(sampling=sampling, max_tokens=fields.max_tokens, seed=(self.config.seed << 32) + step)
        requests = [answer_request(self.tokenizer, self.problems, number, how) for number in numbers]
        return [dataclasses.replace(each, sample=sample) for each in requests for sample in range(fields.samples)]

    def _packed(self, rows: Sequence[Generation], rewards: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the batch of all hosts: one answer in each row, with the weight of each token.

        Rows are as long as the longest answer may be, not as those of the base training.
        """
        fields = self.fields
        count = len(rows)
        length = self.answer_capacity
        groups = rewards.reshape(-1, fields.samples)
        advantages = (groups - groups.mean(axis=1, keepdims=True)).reshape(-1)
        batch = {
            "inputs": np.full((count, length), self.tokenizer.bos, np.int32),
            "targets": np.full((count, length), IGNORED_TARGET, np.int32),
            "log_probs": np.zeros((count, length), np.float32),
        }
        for number, row in enumerate(rows):
            tokens = [*row.request.prompt, *row.tokens]
            first = len(row.request.prompt) - 1
            batch["inputs"][number, : len(tokens) - 1] = tokens[:-1]
            trained = ~np.array(row.forced)
            if not fields.train_end and row.finish == "stop":
                trained[-1] = False
            places = first + np.flatnonzero(trained)
            batch["targets"][number, places] = np.array(row.tokens)[trained]
            batch["log_probs"][number, places] = np.array(row.log_probs, np.float32)[trained]
        trained = (batch["targets"] != IGNORED_TARGET).sum(axis=1).astype(np.float32)
        weights = advantages
        divisor = trained
        if fields.normalization == "published":
            passes = trained.reshape(-1, fields.pass_samples).sum(axis=1).clip(min=1)
            weights = advantages / np.repeat(passes, fields.pass_samples)
            divisor = np.full(count, 1 / fields.pass_samples, np.float32)
        return batch | {
            "weights": weights.astype(np.float32),
            "divisor": divisor,
            "reward": rewards,
            "number": np.arange(count, dtype=np.int32),
        }

    # ---- loss

    def loss(self, call: Call, carry: Any, batch: Batch) -> LossSums:
        losses, buffers = call(batch["inputs"], batch["targets"], loss_reduction="none")
        losses = losses.reshape(batch["targets"].shape)
        counts = batch["targets"] != IGNORED_TARGET
        total = jnp.sum(jnp.where(counts, losses * batch["weights"][:, None], 0))
        largest = jnp.where(counts, jnp.abs(-jax.lax.stop_gradient(losses) - batch["log_probs"]), 0).max(axis=1)
        metrics = {
            "loss": total,
            "divisor": batch["divisor"].sum(),
            "reward": batch["reward"].sum(),
            "answer_tokens": counts.sum().astype(jnp.float32),
            "log_prob_difference": jnp.zeros(self.config.global_batch_size).at[batch["number"]].set(largest),
        }
        counted = jnp.abs(batch["weights"]).sum()
        return LossSums(total, metrics["divisor"], metrics, carry, buffers, counted=counted)

    def figures(self, sums: dict[str, Any], examples: int) -> dict[str, float]:
        """Raises `UserError` if the training program gives a sampled token another probability than the engine."""
        steps = max(1, examples // self.config.global_batch_size)
        difference = float(np.max(sums["log_prob_difference"])) / steps
        dtype = getattr(self.config.arch, "forward_dtype", "float32")
        limit = LARGEST_DIFFERENCE[dtype]
        if not difference <= limit:
            raise UserError(
                f"the log-probability of a sampled token differs by {difference:.1e} between generation and training, "
                f"the limit of {dtype} is {limit:.0e}; the answers are not those of the weights that are trained"
            )
        return {
            "loss": float(sums["loss"]) / max(float(sums["divisor"]), 1e-9),
            "reward": float(sums["reward"]) / max(examples, 1),
            "answer_tokens": float(sums["answer_tokens"]) / max(examples, 1),
            "log_prob_difference": difference,
        }
