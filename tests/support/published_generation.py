"""A script: continues prompts with the published language model of NANOCHAT_DIR, and compares with PyTorch's tokens.

NANOCHAT_DIR=/path/to/nanochat python -m support.published_generation N_KV_HEAD
"""

import sys

import numpy as np

from support.published_gpt import published_gpt
from support.small_gpt import engine_of, greedy_ties, prompts_of, requests_of, small_gpt
from train_jax.language.sampling import GREEDY
from train_jax.runtime.devices import Devices

SIZES = {"vocab_size": 1024, "n_layer": 3, "n_head": 3, "n_embd": 192}
NEW = 128

if __name__ == "__main__":
    gpt = published_gpt()
    name = "gpt_2026" if hasattr(gpt, "flash_attn") else "gpt"
    heads = int(sys.argv[1])
    module = gpt.GPT(gpt.GPTConfig(sequence_len=256, n_kv_head=heads, **SIZES))
    module.load_state_dict(small_gpt(name, seq_len=256, n_kv_head=heads, **SIZES).state_dict())
    lengths = [1, 200, *np.random.default_rng(0).integers(1, 201, size=30).tolist()]
    prompts = prompts_of(lengths, vocab_size=SIZES["vocab_size"])
    engine = engine_of(module, Devices(1), slots=len(prompts), capacity=200 + NEW)
    completions = [row.tokens for row in engine.complete(requests_of(prompts, NEW, sampling=GREEDY))]
    assert {len(tokens) for tokens in completions} == {NEW}
    ties = [greedy_ties(module, prompt, tokens) for prompt, tokens in zip(prompts, completions, strict=True)]
    without, with_cache = np.sum(ties, axis=0).tolist()
    print(f"{name}: {len(prompts) * NEW} tokens, of which PyTorch chooses another one of equal logit:")
    print(f"{without} without a cache, {with_cache} with one")
