"""A task from outside the project: next-token prediction on packed sequences, without carry, halting and tables."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from train_jax.core.objective import LossSums
from train_jax.core.reduction import AXIS
from train_jax.tasks.task import ConstantStage

VOCAB_SIZE, SEQ_LEN, TEST_EXAMPLES = 16, 12, 64


class TinyLM(nn.Module):
    """Predicts each token from the one before it and its position."""

    def __init__(self, vocab_size, seq_len, hidden):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab_size, hidden), nn.Embedding(seq_len, hidden)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, inputs):
        return self.head(F.gelu(self.tokens(inputs) + self.positions.weight))


class NextToken(nn.Module):
    """Summed cross-entropy, number of targets, number of correct predictions; the first token of a document is none."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, starts):
        logits, targets, counted = self.model(tokens[:, :-1]), tokens[:, 1:].long(), ~starts[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        correct = counted & (logits.argmax(-1) == targets)
        return torch.where(counted, losses, 0.0).sum(), counted.sum(), correct.sum()


class PackedTokens:
    """Documents in which each token determines the next one, packed into sequences of one length."""

    needs_state = False
    console: Mapping[str, str] = {"loss": "loss {:.4f}"}
    sizes: Mapping[str, int] = {"vocab_size": VOCAB_SIZE, "seq_len": SEQ_LEN}
    fingerprint, description, examples_per_epoch = "packed tokens", "packed tokens", 1024.0

    def __init__(self, config, facts=None):
        self.config, self.facts = config, facts or {}

    def wrap(self, module, arch):
        return NextToken(module)

    def check(self, config, devices): ...

    def batch(self, step, shard=(0, 1), state=None):
        return examples([self.config.seed, step], self.config.global_batch_size, *shard)

    def initial_carry(self, call, batch):
        return ()

    def loss(self, call, carry, batch):
        (loss, count, correct), buffers = call(batch["tokens"], batch["starts"])
        return LossSums(loss, count.astype(loss.dtype), {"loss": loss, "count": count, "correct": correct}, (), buffers)

    def figures(self, sums, examples):
        return {"loss": sums["loss"] / sums["count"], "accuracy": sums["correct"] / sums["count"]}

    def evaluator(self, objective, devices):
        def step(state, batch):
            out = self.loss(objective.call(state.eval_params, state.buffers, train=False), (), batch)
            return jax.lax.psum(out.metrics, AXIS), {}

        compiled = devices.parallel_eval_step(step)

        def evaluate(state, *, limit=0, metrics_only=False):
            batch = devices.split_batch(examples([1, 0], limit or TEST_EXAMPLES))
            sums = devices.to_host(compiled(devices.replicate(state), devices.shard(batch))[0])
            return Result({name: float(value) for name, value in self.figures(sums, 0).items()})

        return evaluate

    def stages(self, total_steps):
        return ConstantStage()

    def arch_at(self, stage):
        return self.config.arch

    def overrides(self, module, total_steps):
        return {}


def examples(seed: list[int], count: int, index: int = 0, shards: int = 1) -> dict[str, np.ndarray]:
    """The part `index` of `shards` of `count` sequences of `SEQ_LEN + 1` tokens, and where documents start."""
    rng, shape = np.random.default_rng(seed), (count, SEQ_LEN + 1)
    starts, tokens = rng.random(shape) < 0.2, rng.integers(VOCAB_SIZE, size=shape)
    for place in range(1, SEQ_LEN + 1):
        tokens[:, place] = np.where(starts[:, place], tokens[:, place], (5 * tokens[:, place - 1] + 3) % VOCAB_SIZE)
    arrays = {"tokens": tokens.astype(np.int32), "starts": starts}
    return {name: np.split(array, shards)[index] for name, array in arrays.items()}


@dataclasses.dataclass(frozen=True)
class Result:
    metrics: dict[str, float]

    @property
    def summary(self) -> str:
        return f"accuracy {self.metrics['accuracy']:.3f}"

    def save(self, folder: Any, split: str) -> None: ...
