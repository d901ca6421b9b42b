"""A script: runs the tests of nanochat's engine on the engine here, through an adapter with its names.

NANOCHAT_DIR=/path/to/nanochat python -m support.nanochat_engine
"""

import sys

import torch
from torch import nn

import bridge
from models_torch.kv_cache import StaticCache
from support.published_tests import run_published
from train_jax.language.engine import Engine, Request
from train_jax.language.sampling import Sampling
from train_jax.runtime.devices import Devices


class KVCache(StaticCache):
    """The cache of a PyTorch model, with the constructor of the published one."""

    def __init__(self, batch_size, num_heads, seq_len, head_dim, num_layers, device, dtype):
        shape = num_layers, batch_size, seq_len, num_heads, head_dim
        self.k_cache, self.v_cache = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        super().__init__(list(self.k_cache), list(self.v_cache), torch.tensor(0))

    def reset(self):
        self.position = torch.tensor(0)
        self.prev_embedding = None

    def prefill(self, other):
        for mine, given in ((self.k_cache, other.k_cache), (self.v_cache, other.v_cache)):
            mine[:, :, : given.shape[2]] = given
        self.position = other.position
        self.prev_embedding = other.prev_embedding


class Adapted(nn.Module):
    """A model that is no module."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx, kv_cache=None):
        return self.model.forward(idx, kv_cache=kv_cache)


class AdaptedEngine:
    """The published interface: columns of tokens with a mask, or whole rows without the token that ends them."""

    CAPACITY = 128
    SLOTS = 16

    def __init__(self, model, tokenizer):
        module = Adapted(model)
        fn = bridge.export(module)
        self._engine = Engine(module, Devices(1), slots=self.SLOTS, capacity=self.CAPACITY)
        self._engine.load(fn.params, fn.buffers)
        self._stop = tokenizer.encode_special("<|assistant_end|>"), tokenizer.get_bos_token_id()

    def _rows(self, tokens, num_samples, max_tokens, temperature, top_k, seed):
        max_tokens = max_tokens or self.CAPACITY - len(tokens)
        sampling = Sampling(temperature=temperature, top_k=top_k or 0)
        fields = {"prompt": tuple(tokens), "max_tokens": max_tokens, "sampling": sampling, "seed": seed}
        requests = [Request(sample=number, stop=self._stop, **fields) for number in range(num_samples)]
        return list(self._engine.complete(requests))

    def generate(self, tokens, num_samples=1, max_tokens=None, temperature=1.0, top_k=None, seed=42):
        rows = self._rows(tokens, num_samples, max_tokens, temperature, top_k, seed)
        for place in range(max(len(row.tokens) for row in rows)):
            here = [(row.tokens[place : place + 1] or [self._stop[0]], row.forced[place : place + 1]) for row in rows]
            yield [tokens[0] for tokens, _ in here], [int(forced != [True]) for _, forced in here]

    def generate_batch(self, tokens, num_samples=1, max_tokens=None, temperature=1.0, top_k=None, seed=42):
        rows = self._rows(tokens, num_samples, max_tokens, temperature, top_k, seed)
        masks = [[0] * len(tokens) + [int(not each) for each in row.forced[: len(row.content)]] for row in rows]
        return [[*tokens, *row.content] for row in rows], masks


if __name__ == "__main__":
    sys.exit(run_published("test_engine", {"nanochat.engine": {"KVCache": KVCache, "Engine": AdaptedEngine}}))
