"""Models of a user, for `--model package.module:Class`."""

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn


class CellNet(nn.Module):
    """A plain module: inputs to logits, with running statistics and dropout."""

    def __init__(self, vocab_size, seq_len, hidden=16, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden)
        self.mix = nn.Linear(seq_len, seq_len)
        self.norm = nn.BatchNorm1d(seq_len)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocab_size)

    def forward(self, inputs):
        x = self.embed(inputs)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.drop(F.gelu(self.norm(x))))


@dataclasses.dataclass
class ThinkerCarry:
    memory: torch.Tensor
    steps: torch.Tensor
    halted: torch.Tensor
    current_data: dict


class Thinker(nn.Module):
    """A model with adaptive computation time and its own carry class, configured by one dict."""

    def __init__(self, config_dict: dict):
        super().__init__()
        self.config = config_dict
        self.max_steps = config_dict["halt_max_steps"]
        self.width = config_dict["width"]
        self.embed = nn.Embedding(config_dict["vocab_size"], self.width)
        self.cell = nn.GRUCell(self.width, self.width)
        self.head = nn.Linear(self.width, config_dict["vocab_size"])
        self.halt = nn.Linear(self.width, 1)

    def initial_carry(self, batch):
        count, length = batch["inputs"].shape
        return ThinkerCarry(
            torch.zeros(count, length, self.width),
            torch.zeros(count, dtype=torch.int32),
            torch.ones(count, dtype=torch.bool),
            {key: torch.zeros_like(value) for key, value in batch.items()},
        )

    def forward(self, carry, batch):
        fresh = carry.halted
        data = {k: torch.where(fresh.view(-1, *[1] * (v.ndim - 1)), batch[k], v) for k, v in carry.current_data.items()}
        memory = torch.where(fresh.view(-1, 1, 1), 0.0, carry.memory)
        steps = torch.where(fresh, 0, carry.steps) + 1
        memory = self.cell(self.embed(data["inputs"]).flatten(0, 1), memory.flatten(0, 1)).view_as(memory)
        q_halt = self.halt(memory.mean(1)).squeeze(-1)
        halted = steps >= self.max_steps
        if self.training:
            halted = halted | (q_halt.detach() > 0)
        outputs = {"logits": self.head(memory), "q_halt_logits": q_halt}
        return ThinkerCarry(memory.detach(), steps, halted, data), outputs


class ThinkerWithLoss(Thinker):
    """A model with its own loss head, which is called with keywords and requires `return_keys`."""

    def forward(self, return_keys, **model_kwargs):
        carry, outputs = super().forward(**model_kwargs)
        labels = carry.current_data["labels"]
        loss = F.cross_entropy(outputs["logits"].flatten(0, 1), labels.long().flatten(), reduction="sum")
        outputs["preds"] = outputs["logits"].argmax(-1)
        correct = outputs["preds"] == labels
        metrics = {"count": carry.halted.sum(), "accuracy": (carry.halted * correct.float().mean(-1)).sum()}
        metrics |= {"exact_accuracy": (carry.halted & correct.all(-1)).sum(), "lm_loss": loss.detach()}
        return carry, loss, metrics, {key: outputs[key].detach() for key in return_keys}, carry.halted.all()


class Hasty(Thinker):
    """Violates the interface: halts early in evaluation."""

    def forward(self, carry, batch):
        carry, outputs = super().forward(carry, batch)
        carry.halted = torch.ones_like(carry.halted)
        return carry, outputs


class TooFewLogits(nn.Module):
    """Violates the interface: no logit for the last token."""

    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, vocab_size - 1)

    def forward(self, inputs):
        return self.embed(inputs)


class Fails(nn.Module):
    """Raises an error for its inputs."""

    def forward(self, inputs):
        return F.linear(inputs.float(), torch.zeros(3, 3))


class TwiceInJax(CellNet):
    """Computes something else where the bridge traces it."""

    def forward(self, inputs):
        logits = super().forward(inputs)
        return logits if type(logits) is torch.Tensor else logits * 2
