"""The engine of generation beside other ways to compute the same tokens.

    python -m benchmarks.generation decode [--preset chat-small] [--tokens 200]
    python -m benchmarks.generation requests [--preset chat-tiny] [--requests 500] [--slots 16]

`decode`: the time of one greedy token of one row, after as many tokens: the engine, the same model written by hand in
`jax.numpy`, both with 8 tokens a dispatch, and PyTorch with a cache that grows. `requests`: tokens per second of many
requests of different lengths, where a row that ends makes room for the next one, and in batches that wait for their
longest row. Weights are random. The sides alternate in one process, in every order, so that other load affects all; the
ratios are medians over rounds. Other load changes the time of the processor, of all threads, less than the time that
elapses.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import tyro

import bridge
from models_torch import registry
from train_jax.language.engine import Counts, Engine, Request
from train_jax.language.sampling import GREEDY
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices

DISPATCH = 8
_PAUSE = 0.2
"""Seconds to wait before each side is measured, because the threads of PyTorch stay busy for a while after its last
operation.
"""


@dataclasses.dataclass(frozen=True)
class Decode:
    """The time of one token."""

    preset: str = "chat-small"
    """Preset of a language model of 2025, computed in float32."""
    tokens: int = 200
    """Tokens before the measured ones."""
    rounds: int = 12
    """Measured rounds, after one that compiles."""


@dataclasses.dataclass(frozen=True)
class Requests:
    """Tokens per second of many requests."""

    preset: str = "chat-tiny"
    requests: int = 500
    slots: int = 16
    longest: int = 400
    """Largest number of tokens after a prompt; numbers are drawn from 1 on, uniformly and log-uniformly."""


def module_of(name: str) -> tuple[Any, Any]:
    config = preset(name)
    torch.manual_seed(0)
    module: Any = registry.build_model(config.model, config.arch).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            if not parameter.any():
                parameter.normal_(std=0.05)
    return module, config.arch


def engine_of(module: Any, slots: int, capacity: int) -> Engine:
    engine = Engine(module, Devices(1), slots=slots, capacity=capacity, tokens_per_dispatch=DISPATCH)
    fn = bridge.export(module)
    engine.load(fn.params, fn.buffers)
    return engine


# ---- one token


def norm(x: jax.Array) -> jax.Array:
    """Scales the last axis to a mean square of 1."""
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + jnp.finfo(jnp.float32).eps)


def by_hand(module: Any, arch: Any, prompt: list[int], capacity: int) -> Callable[[], list[int]]:
    """Returns a function that computes the next `DISPATCH` tokens of one row, written in `jax.numpy`."""
    weights = {name: jnp.asarray(value.detach().numpy()) for name, value in module.named_parameters()}
    cos, sin = (jnp.asarray(table.float().numpy())[0, :, 0] for table in (module.cos, module.sin))
    heads = arch.n_head
    size = arch.n_embd // arch.n_head

    def rotate(x: jax.Array, position: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        c = cos[position]
        s = sin[position]
        return jnp.concatenate([first * c + second * s, second * c - first * s], axis=-1)

    def decode(weights: Mapping[str, jax.Array], cache: jax.Array, token: jax.Array, position: jax.Array) -> tuple:
        x = norm(weights["transformer.wte.weight"][token])
        for layer in range(arch.n_layer):
            name = f"transformer.h.{layer}."
            y = norm(x)
            q, k, v = ((weights[f"{name}attn.c_{each}.weight"] @ y).reshape(heads, size) for each in "qkv")
            q = norm(rotate(q, position))
            k = norm(rotate(k, position))
            cache = cache.at[layer, 0, :, position].set(k).at[layer, 1, :, position].set(v)
            scores = jnp.einsum("hd,htd->ht", q, cache[layer, 0]) / size**0.5
            shares = jax.nn.softmax(jnp.where(jnp.arange(capacity) <= position, scores, -jnp.inf))
            x = x + weights[f"{name}attn.c_proj.weight"] @ jnp.einsum("ht,htd->hd", shares, cache[layer, 1]).reshape(-1)
            y = jnp.square(jax.nn.relu(weights[f"{name}mlp.c_fc.weight"] @ norm(x)))
            x = x + weights[f"{name}mlp.c_proj.weight"] @ y
        logits = 15 * jnp.tanh(weights["lm_head.weight"] @ norm(x) / 15)
        return cache, jnp.argmax(logits).astype(jnp.int32), position + 1

    def dispatch(weights: Mapping[str, jax.Array], state: tuple) -> tuple[tuple, jax.Array]:
        def step(state: tuple, _: None) -> tuple[tuple, jax.Array]:
            state = decode(weights, *state)
            return state, state[1]

        return jax.lax.scan(step, state, length=DISPATCH)

    compiled = jax.jit(dispatch, donate_argnums=1)
    state = jnp.zeros((arch.n_layer, 2, heads, capacity, size)), jnp.int32(prompt[0]), jnp.int32(0)
    one = jax.jit(decode)
    for token in prompt:
        state = one(weights, state[0], jnp.int32(token), state[2])
    rest: dict[str, Any] = {"state": state}

    def run() -> list[int]:
        first = int(rest["state"][1])
        rest["state"], tokens = compiled(weights, rest["state"])
        return [first, *tokens[:-1].tolist()]

    return run


class GrowingCache:
    """The cache that a PyTorch user would write: new keys and values are concatenated to the earlier ones."""

    def __init__(self, layers: int):
        self.pairs: list[Any] = [None] * layers

    def get_pos(self) -> int:
        return 0 if self.pairs[-1] is None else self.pairs[-1][0].shape[2]

    def insert_kv(self, layer: int, key: Any, value: Any) -> tuple[Any, Any]:
        if self.pairs[layer] is not None:
            key, value = (torch.cat(pair, dim=2) for pair in zip(self.pairs[layer], (key, value), strict=True))
        self.pairs[layer] = key, value
        return key, value


def by_torch(module: Any, arch: Any, prompt: list[int]) -> Callable[[], list[int]]:
    """Returns a function that computes the next `DISPATCH` tokens of one row in PyTorch."""
    cache = GrowingCache(arch.n_layer)
    with torch.inference_mode():
        rest = {"token": int(module(torch.tensor([prompt]), kv_cache=cache)[0, -1].argmax())}

    @torch.inference_mode()
    def run() -> list[int]:
        tokens = []
        for _ in range(DISPATCH):
            tokens.append(rest["token"])
            rest["token"] = int(module(torch.tensor([[rest["token"]]]), kv_cache=cache)[0, -1].argmax())
        return tokens

    return run


def by_engine(module: Any, prompt: list[int], capacity: int) -> Callable[[], list[int]]:
    engine = engine_of(module, 1, capacity)
    row = engine.submit(Request(prompt=tuple(prompt), max_tokens=capacity - len(prompt), sampling=GREEDY))
    engine._admit()
    jax.block_until_ready(engine._state)

    def run() -> list[int]:
        engine.step()
        return row.tokens[-DISPATCH:]

    return run


def decode(options: Decode) -> None:
    module, arch = module_of(options.preset)
    prompt = np.random.default_rng(0).integers(arch.vocab_size, size=options.tokens).tolist()
    capacity = len(prompt) + DISPATCH * (options.rounds + 2)
    sides = {
        "engine": by_engine(module, prompt, capacity),
        "by hand": by_hand(module, arch, prompt, capacity),
        "PyTorch": by_torch(module, arch, prompt),
    }
    clocks = {"elapsed": time.perf_counter, "processor": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in sides} for clock in clocks}
    orders = itertools.cycle(itertools.permutations(sides))
    for _, order in zip(range(options.rounds + 1), orders, strict=False):
        tokens = {}
        for name in order:
            time.sleep(_PAUSE)
            started = {clock: read() for clock, read in clocks.items()}
            tokens[name] = sides[name]()
            for clock, read in clocks.items():
                seconds[clock][name].append((read() - started[clock]) / DISPATCH)
        assert tokens["engine"] == tokens["by hand"] == tokens["PyTorch"], tokens
    print(f"{options.preset} after {options.tokens} tokens, {options.rounds} rounds, on {kind()}, float32:")
    for clock, of_sides in seconds.items():
        for name, times in of_sides.items():
            ratios = [mine / other for mine, other in zip(of_sides["engine"][1:], times[1:], strict=True)]
            print(
                f"  {clock:<9} {name:<8} {1e3 * min(times[1:]):8.3f} ms a token at least, "
                f"{1e3 * statistics.median(times[1:]):8.3f} median; engine / it {statistics.median(ratios):.2f}"
            )


def kind() -> str:
    return jax.devices()[0].device_kind


# ---- many requests


def lengths(options: Requests) -> Iterator[tuple[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    yield "uniform", generator.integers(1, options.longest + 1, options.requests)
    drawn = np.exp(generator.uniform(0, np.log(options.longest + 1), options.requests))
    yield "log-uniform", drawn.astype(int)


def requests(options: Requests) -> None:
    module, arch = module_of(options.preset)
    generator = np.random.default_rng(1)
    prompts = [
        tuple(generator.integers(arch.vocab_size, size=n).tolist()) for n in generator.integers(4, 17, options.requests)
    ]
    engine = engine_of(module, options.slots, options.longest + 16)
    for _ in engine.complete(Request(prompt=prompt, max_tokens=9) for prompt in prompts[: options.slots + 1]):
        pass  # compiles
    print(f"{options.preset}, {options.requests} requests, {options.slots} slots, on {kind()}:")
    for name, each in lengths(options):
        wanted = [Request(prompt=prompt, max_tokens=int(n)) for prompt, n in zip(prompts, each, strict=True)]
        refilled, occupancy = until_drained(engine, wanted)
        started = time.perf_counter()
        for first in range(0, len(wanted), options.slots):
            for _ in engine.complete(wanted[first : first + options.slots]):
                pass
        batches = each.sum() / (time.perf_counter() - started)
        print(
            f"  {name:<11} {refilled:8.0f} tokens/s at occupancy {occupancy:.1%}; in batches {batches:8.0f} tokens/s, "
            f"ratio {refilled / batches:.2f}"
        )


def until_drained(engine: Engine, wanted: list[Request]) -> tuple[float, float]:
    """Returns tokens per second and the occupancy until the last request has a slot."""
    engine.counts = Counts()
    started = time.perf_counter()
    rows = [engine.submit(request) for request in wanted]
    while engine.waiting:
        engine.step()
    rate = engine.counts.tokens / (time.perf_counter() - started)
    occupancy = engine.counts.occupancy
    while rows and not engine.idle:
        engine.step()
    return rate, occupancy


if __name__ == "__main__":
    options = tyro.cli(
        Annotated[Decode, tyro.conf.subcommand("decode")] | Annotated[Requests, tyro.conf.subcommand("requests")],
        description=__doc__,
    )
    decode(options) if isinstance(options, Decode) else requests(options)
