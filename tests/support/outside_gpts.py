"""Language models of a user, for `--model package.module:Class`."""

import dataclasses
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn


@dataclasses.dataclass
class AverageConfig:
    sequence_len: int = 8
    vocab_size: int = 16
    width: int = 4


class Average(nn.Module):
    """Sees the mean of the tokens so far; computes its own loss, and draws its weights in `init_weights`."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.head = nn.Linear(config.width, config.vocab_size)
        nn.init.zeros_(self.embed.weight)

    def init_weights(self):
        nn.init.normal_(self.embed.weight)

    def logits(self, tokens):
        x = self.embed(tokens)
        return self.head(x.cumsum(1) / torch.arange(1, 1 + x.shape[1])[:, None])

    def forward(self, tokens, targets=None, loss_reduction="mean"):
        logits = self.logits(tokens)
        if targets is None:
            return logits
        flat = logits.flatten(0, 1), targets.flatten().long()
        return F.cross_entropy(*flat, ignore_index=-1, reduction=loss_reduction)


class Outputs(Average):
    """Returns an object with logits, as models of Hugging Face do, and takes keyword arguments."""

    config_class = AverageConfig

    def forward(self, tokens, use_cache=True):
        assert not use_cache
        return SimpleNamespace(logits=self.logits(tokens))


class Words(nn.Module):
    """A model that is made from keyword arguments, has only logits, and sees the whole sequence."""

    def __init__(self, vocab_size, seq_len, causal=False):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, vocab_size)
        self.mix = nn.Linear(seq_len, seq_len)
        self.causal = causal

    def forward(self, tokens):
        x = self.embed(tokens)
        return x if self.causal else x + self.mix(x.transpose(1, 2)).transpose(1, 2)
