"""`trm bench-generate NAME`: measures how fast a language model writes: first token, time per token, bandwidth."""

import dataclasses
import json
import statistics
import time
from typing import Annotated, Any

import numpy as np
import tyro

from models_torch.kv_cache import positions_of
from models_torch.ranges import Range
from train_jax.core.objective import Objective
from train_jax.errors import UserError
from train_jax.language.engine import Engine, Request
from train_jax.language.sampling import GREEDY
from train_jax.language.task import UnbuiltText
from train_jax.run.model import build_objective
from train_jax.run.performance import PEAK_BYTES_PER_SECOND
from train_jax.run.presets import preset
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class BenchGenerate:
    """Measure how fast a language model writes, with random weights and prompts: the time to the first token, the time
    per token, tokens per second and the share of the memory bandwidth, by rows at the same time.

    Compilation is not counted. The last line is one JSON object."""

    name: Annotated[str, tyro.conf.Positional]
    """Preset of a language model, such as chat-small or d20."""
    rows: tuple[Annotated[int, Range(1, 10**6)], ...] = (1, 8, 32, 128)
    """Numbers of rows at the same time, on all devices together."""
    prompt_tokens: Annotated[int, Range(1, 10**6)] = 128
    """Tokens of each prompt."""
    tokens: Annotated[int, Range(1, 10**6)] = 64
    """Tokens after each prompt."""
    tokens_per_dispatch: Annotated[int, Range(1, 1024)] = 8
    """Tokens that the devices choose in one call."""
    rounds: Annotated[int, Range(1, 1000)] = 3
    """Rounds after one that compiles; figures are medians."""
    devices: Annotated[int, Range(0, 10**6)] = 1
    """Number of devices of this machine; 0 for all."""
    platform: Platform = "auto"
    """Platform; on one host of a TPU pod, auto is the CPU."""


def main(options: BenchGenerate) -> None:
    config = preset(options.name)
    if config.task != "language":
        raise UserError(f"{options.name} is a preset of the task {config.task}; use one of a language model")
    if options.tokens <= options.tokens_per_dispatch:
        raise UserError(
            f"--tokens {options.tokens} come with the first one, in a dispatch of --tokens-per-dispatch "
            f"{options.tokens_per_dispatch}, so that nothing is left to measure; use more tokens"
        )
    use_on_one_host(options.platform)
    devices = Devices(options.devices)
    for rows in options.rows:
        devices.local_batch_size(rows)
    objective = build_objective(config, UnbuiltText(config), 1)
    module = objective.fn.module
    if options.prompt_tokens + options.tokens > positions_of(module):
        raise UserError(
            f"--prompt-tokens {options.prompt_tokens} and --tokens {options.tokens} are more than the "
            f"{positions_of(module)} positions of the model; use fewer"
        )
    count = sum(array.size for array in objective.params.values())
    print(f"{options.name}: {count:,} parameters, on {devices.kind}, {options.prompt_tokens} tokens before")
    print(f"{'rows':>6} {'first token':>13} {'per token':>12} {'tokens/s':>10} {'GB/s':>8} {'of peak':>8}")
    figures = [_measured(options, objective, devices, rows) for rows in options.rows]
    print(json.dumps({"model": options.name, "parameters": count, "device": devices.kind, "rows": figures}))


def _measured(options: BenchGenerate, objective: Objective, devices: Devices, rows: int) -> dict[str, Any]:
    capacity = options.prompt_tokens + options.tokens
    module: Any = objective.fn.module
    engine = Engine(module, devices, slots=rows, capacity=capacity, tokens_per_dispatch=options.tokens_per_dispatch)
    engine.load(objective.params, objective.buffers)
    generator = np.random.default_rng(0)
    vocab_size = module.config.vocab_size
    first = []
    later = []
    for _ in range(options.rounds + 1):
        prompts = generator.integers(vocab_size, size=(rows, options.prompt_tokens)).tolist()
        started = time.perf_counter()
        for prompt in prompts:
            engine.submit(Request(prompt=tuple(prompt), max_tokens=options.tokens, sampling=GREEDY))
        engine.step()
        first.append(time.perf_counter() - started)
        started = time.perf_counter()
        before = engine.counts.decodes
        while not engine.idle:
            engine.step()
        calls = engine.counts.decodes - before
        later.append((time.perf_counter() - started) / max(1, calls * options.tokens_per_dispatch))
    to_first = statistics.median(first[1:])
    per_token = statistics.median(later[1:])
    # A device reads its weights and, for each row, the keys and values of the prompt and on average half of the others.
    weights = sum(array.nbytes for array in objective.params.values())
    traffic = weights * devices.count + engine.cache_bytes * ((options.prompt_tokens + options.tokens / 2) / capacity)
    peak = PEAK_BYTES_PER_SECOND.get(devices.local[0].device_kind)
    share = None if peak is None else traffic / per_token / (peak * devices.count)
    shown = "n/a" if share is None else f"{share:.1%}"
    print(
        f"{rows:>6} {1e3 * to_first:>10.2f} ms {1e3 * per_token:>9.3f} ms {rows / per_token:>10.1f} "
        f"{traffic / per_token / 1e9:>8.2f} {shown:>8}",
        flush=True,
    )
    return {
        "rows": rows,
        "seconds_to_first_token": to_first,
        "seconds_per_token": per_token,
        "tokens_per_second": rows / per_token,
        "bytes_per_token_step": int(traffic),
        "share_of_peak_bandwidth": share,
    }
