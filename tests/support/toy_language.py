"""A small language model as a separate task: packed tokens, no carry, no halting, a loss per token."""

import dataclasses
import hashlib

import jax
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from models_torch.outside import OutsideConfig
from support.presets import with_fields
from train_jax.core.objective import LossSums
from train_jax.core.optim.config import OptimConfig
from train_jax.core.reduction import AXIS
from train_jax.run.config import RunConfig
from train_jax.runtime.processes import process_shard
from train_jax.task import Evaluation, Task, TaskConfig

VOCAB = 11


def write_tokens(folder):
    """The next token is a function of the last one, most of the time."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 256), ("test", 32)):
        tokens = [rng.integers(11, size=count)]
        for _ in range(12):
            noise = rng.random(count) < 0.1
            tokens.append(np.where(noise, rng.integers(11, size=count), (3 * tokens[-1] + 1) % 11))
        np.save(folder / f"{split}.npy", np.stack(tokens, axis=1).astype(np.int32))


class TokenModel(nn.Module):
    """Next-token logits from a gated sum of earlier embeddings."""

    def __init__(self, vocab_size: int, width: int = 16):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(torch.tanh(self.mix(x.cumsum(dim=1))))


class DeepTokenModel(TokenModel):
    """A model with six hidden matrices of one shape, and one of another."""

    def __init__(self, vocab_size: int, width: int = 16):
        super().__init__(vocab_size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(5))
        self.wide = nn.Linear(width, 3 * width)

    def forward(self, tokens):
        x = torch.tanh(self.mix(self.embed(tokens).cumsum(dim=1)))
        for layer in self.layers:
            x = x + 0.1 * torch.tanh(layer(x))
        return self.head(x + self.wide(x).unflatten(-1, (3, -1)).mean(dim=-2))


class Logarithm(nn.Module):
    """Returns NaN for negative inputs."""

    def forward(self, x):
        return torch.log(x)


class UnstableModel(TokenModel):
    """Computes NaN in a submodule, at the first step."""

    def __init__(self, vocab_size: int, width: int = 16):
        super().__init__(vocab_size, width)
        self.log = Logarithm()

    def forward(self, tokens):
        return super().forward(tokens) + self.log(self.embed.weight.sum() - 1e6)


class TokenLoss(nn.Module):
    """Returns the summed cross-entropy and the sum of token weights; the model has no carry."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, weights):
        logits = self.model(tokens[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten().long(), reduction="none")
        return (losses * weights.flatten()).sum(), weights.sum()


@dataclasses.dataclass(frozen=True)
class ToyConfig(TaskConfig):
    document_share: float = 0.8
    """Share of the tokens that count in the loss."""


class ToyLanguage(Task):
    config_class = ToyConfig

    def __init__(self, config, facts=None):
        super().__init__(config, facts)
        self._tokens = {split: np.load(f"{config.data_dir}/{split}.npy") for split in ("train", "test")}
        self.sizes = {"vocab_size": VOCAB}
        self.fingerprint = hashlib.sha256(b"".join(a.tobytes() for a in self._tokens.values())).hexdigest()
        self.examples_per_epoch = len(self._tokens["train"])

    def wrap(self, module, arch):
        return TokenLoss(module)

    def batch(self, step, shard, state=None):
        index, count = shard
        rng = np.random.Generator(np.random.Philox(key=[self.config.seed, step]))
        rows = rng.integers(len(self._tokens["train"]), size=self.config.global_batch_size)
        weights = rng.random((len(rows), self._tokens["train"].shape[1] - 1)) < self.config.task_config.document_share
        local = slice(index * len(rows) // count, (index + 1) * len(rows) // count)
        return {"tokens": self._tokens["train"][rows[local]], "weights": weights[local].astype(np.float32)}

    def loss(self, call, carry, batch):
        (loss, weight), buffers = call(batch["tokens"], batch["weights"])
        return LossSums(loss, weight, {"loss": loss, "tokens": weight}, carry, buffers)

    def figures(self, sums, examples):
        return {"loss": float(sums["loss"] / max(sums["tokens"], 1)), "tokens": float(sums["tokens"])}

    def evaluator(self, objective, devices):
        def eval_step(state, batch):
            (loss, weight), _ = objective.call(state.eval_params, state.buffers, train=False)(
                batch["tokens"], batch["weights"]
            )
            return jax.lax.psum({"loss": loss, "count": weight}, AXIS), {}

        step = devices.parallel_eval_step(eval_step)

        def evaluate(state, *, limit=0, metrics_only=False):
            index, count = process_shard()
            tokens = self._tokens["test"][: limit or None][index::count]
            batch = {"tokens": tokens, "weights": np.ones((len(tokens), tokens.shape[1] - 1), np.float32)}
            sums, _ = step(devices.replicate(state), devices.shard(devices.split_batch(batch)))
            sums = devices.to_host(sums)
            return Evaluation({"loss": float(sums["loss"] / sums["count"]), "count": float(sums["count"])})

        return evaluate


def toy_run(folder, **fields):
    """Returns the configuration of a run on the tokens in `folder`, with these fields at any level."""
    config = RunConfig(
        data_dir=str(folder),
        run_dir=f"{folder}/run",
        task="support.toy_language:ToyLanguage",
        task_config=ToyConfig(),
        model="support.toy_language:TokenModel",
        arch=OutsideConfig(forward_dtype="float32"),
        optim=OptimConfig(warmup_steps=0),
        global_batch_size=8,
        eval_batch_size=8,
        wandb="disabled",
    )
    return with_fields(config, fields)
