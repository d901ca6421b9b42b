"""A small language model whose weights are not zero, rows to continue, and PyTorch's logits for what was generated."""

from typing import Any

import torch

import bridge
from models_torch import registry
from models_torch.kv_cache import cached_model
from train_jax.language.engine import Engine, Request

VOCAB_SIZE = 61
TIE = 1e-5
"""The largest difference of two logits that counts as a tie."""


def small_gpt(name="gpt", *, seed=0, **sizes):
    """Returns a language model by name, of 16 times 10 positions.

    Weights that start at zero are drawn, without which all logits are zero.
    """
    fields = {"seq_len": 16, "vocab_size": VOCAB_SIZE, "n_layer": 2, "n_head": 4, "n_kv_head": 2, "n_embd": 32}
    torch.manual_seed(seed)
    config = registry.config_class(name)(**(fields | {"forward_dtype": "float32"} | sizes))
    module: Any = registry.build_model(name, config)
    with torch.no_grad():
        for weight, parameter in module.named_parameters():
            if not parameter.any() or weight == "lm_head.weight":
                parameter.normal_(std=0.1)
    return module


def prompts_of(lengths, vocab_size=VOCAB_SIZE):
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(vocab_size, (length,), generator=generator).tolist()) for length in lengths]


def engine_of(module, devices, *, slots, capacity, **options):
    engine = Engine(module, devices, slots=slots, capacity=capacity, **options)
    fn = bridge.export(module)
    engine.load(fn.params, fn.buffers)
    return engine


def requests_of(prompts, max_tokens, **fields):
    return [Request(prompt=prompt, max_tokens=max_tokens, **fields) for prompt in prompts]


def _logits(output):
    return getattr(output, "logits", output)


@torch.no_grad()
def uncached_logits(module, prompt, tokens):
    """PyTorch's logits at the positions of `tokens`, by one call without a cache."""
    return _logits(module(torch.tensor([[*prompt, *tokens[:-1]]])))[0, len(prompt) - 1 :]


@torch.no_grad()
def cached_logits(module, prompt, tokens):
    """Returns the same logits, token by token with a cache."""
    cached = cached_model(module)
    capacity = len(prompt) + len(tokens)
    logits, buffers = cached.prefill(torch.tensor([prompt]), torch.tensor([prompt[-1:]]), capacity)
    rows = [logits[0, -1]]
    for position, token in enumerate(tokens[:-1], start=len(prompt)):
        logits, buffers = cached.decode(torch.tensor([[token]]), buffers, torch.tensor(position), capacity)
        rows.append(logits[0, 0])
    return torch.stack(rows)


def greedy_ties(module, prompt, tokens):
    """Returns how many tokens differ from PyTorch's choice, without and with a cache, each within `TIE` of it.

    Raises AssertionError for a token that is further away.
    """
    ties = []
    for logits_of in (uncached_logits, cached_logits):
        logits = logits_of(module, prompt, tokens).float()
        chosen = logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
        gaps = logits.amax(-1) - chosen
        assert gaps.max() <= TIE, (logits_of.__name__, len(prompt), gaps)
        ties.append(int((logits.argmax(-1) != torch.tensor(tokens)).sum()))
    return tuple(ties)
