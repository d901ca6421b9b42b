"""Generation with a cache beside generation without one: the time of a token of a language model, batch of one.

    python -m benchmarks.generation [--preset chat-small] [--tokens 200] [--rounds 5]

Both sides have the same module with random weights, after as many tokens. Without a cache a token is one compiled call
on all of them. The sides alternate in one process, so that other load affects both, and the ratio is the median of the
ratios of rounds.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import bridge
from models_torch import registry
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.generation import Generator, PromptSample, Sampling, Sizes


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare generation with and without a cache."""

    preset: str = "chat-small"
    """Preset of a language model."""
    tokens: int = 200
    """Tokens before the measured ones."""
    rounds: int = 5
    """Measured rounds, after one that compiles; in each, 16 tokens with the cache and 4 without."""


CACHED, UNCACHED = 16, 4
"""Tokens of a round."""


def seconds(function: Callable[[], object], count: int) -> float:
    """Returns the time of one of the `count` tokens that `function` computes."""
    started = time.perf_counter()
    function()
    return (time.perf_counter() - started) / count


def main(options: Options) -> None:
    config = preset(options.preset)
    module = registry.build_model(config.model, config.arch)
    fn = bridge.export(module)
    prompt = tuple(np.random.default_rng(0).integers(config.arch.vocab_size, size=options.tokens).tolist())
    sizes = Sizes(1, len(prompt), CACHED + 1, len(prompt) + CACHED + 1)
    generator = Generator(module, fn.params, fn.buffers, Devices(1), sizes, sampling=Sampling(temperature=0.0))

    @jax.jit
    def next_token(params: dict, buffers: dict, idx: jax.Array) -> jax.Array:
        logits, _ = fn(params, buffers, idx, train=False)
        return jnp.argmax(logits[0, -1])

    idx = jnp.asarray(prompt, jnp.int32)[None]
    rounds = []
    for _ in range(options.rounds + 1):
        tokens = generator.tokens([PromptSample(prompt)])
        next(tokens)  # of the prompt: the next ones depend on it and are computed after it
        cached = seconds(lambda tokens=tokens: list(tokens), CACHED)
        uncached = seconds(
            lambda: [next_token(fn.params, fn.buffers, idx).block_until_ready() for _ in range(UNCACHED)], UNCACHED
        )
        rounds.append((cached, uncached))
    cached, uncached = (statistics.median(side) for side in zip(*rounds[1:], strict=True))
    ratio = statistics.median(without / having for having, without in rounds[1:])
    kind = jax.devices()[0].device_kind
    print(f"{options.preset} after {options.tokens} tokens, {options.rounds} rounds, on {kind}, float32:")
    print(f"with a cache {1e3 * cached:.2f} ms a token, without {1e3 * uncached:.2f} ms, ratio {ratio:.1f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=Options.__doc__))
