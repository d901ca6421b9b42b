"""A language model whose most probable token depends on the last one alone: an alphabet, and an answer with a call."""

import itertools

import torch

from train_jax.language.tokenizer import Tokenizer

BYTES = Tokenizer({bytes([number]): number for number in range(256)})
"""A token for each byte; the special ones follow in their order."""
ANSWER = (
    ("<|assistant_start|>", "<|python_start|>", *"6*7", "<|python_end|>"),
    ("<|output_end|>", *"OK.", "<|assistant_end|>"),
)
"""The tokens that follow each other, before and after the output of the calculator."""


def token_of(name):
    return BYTES.specials.get(name, ord(name[0]))


class Scripted(torch.nn.Module):
    """Continues a letter by the next one, and `<|assistant_start|>` by `ANSWER`."""

    def __init__(self):
        super().__init__()
        table = torch.zeros(BYTES.vocab_size, BYTES.vocab_size)
        letters = "abcdefghijklmnopqrstuvwxyza"
        for chain in (letters, *ANSWER):
            for token, following in itertools.pairwise(chain):
                table[token_of(token), token_of(following)] = 3.0
        self.table = torch.nn.Parameter(table)

    def forward(self, idx, kv_cache=None):
        if kv_cache is not None:
            kv_cache.advance(idx.shape[1])
        return self.table[idx]
