"""Overhead of the bridge: compares the TRM train step with a hand-written implementation in `jax.numpy`.

    python -m benchmarks.overhead [--batch-size 4] [--pairs 15]

Both sides run the step of the trainer (optimizer, EMA, puzzle rows) with different objectives, with the size of the
baseline in float32. FLOPs and bytes are estimates of the compiler. The steps alternate in one process, so that other
load affects both, and the ratio is the median of the ratios of pairs. Tracing and lowering are measured for the
published baseline (bfloat16, 192 examples per device), without the export of the module.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from typing import Any

import jax
import tyro

from benchmarks import trm_jnp
from benchmarks.example_puzzles import ExamplePuzzles, example_run
from models_torch.trm import TRMConfig
from train_jax.core.objective import Batch, LossSums, Objective
from train_jax.core.state import Arrays
from train_jax.puzzles.metrics import halting_histogram
from train_jax.runtime.devices import Devices
from train_jax.trainer.start import Training, start

VARIANTS = {
    "attention": {"mlp_t": False, "pos_encodings": "rope"},
    "MLP mixer": {"mlp_t": True, "pos_encodings": "none"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare the bridge with hand-written JAX."""

    batch_size: int = 4
    """Examples in a measured step."""
    pairs: int = 15
    """Measured pairs of steps, after a warm-up pair."""


@dataclasses.dataclass(frozen=True)
class ByHand(Objective):
    """`trm_jnp` as an `Objective`, with the state of the bridged module."""

    config: TRMConfig = dataclasses.field(kw_only=True)
    network: trm_jnp.Network = trm_jnp.level

    def initial_carry(self, params: Arrays, buffers: Arrays, batch: Batch) -> Any:
        return trm_jnp.initial_carry(batch, self.config)

    def __call__(
        self, params: Arrays, rows: Arrays, buffers: Arrays, carry: Any, batch: Batch, rng: Any, overrides: Any = None
    ) -> LossSums:
        (table,) = self.tables
        ids = trm_jnp.take_up(carry, batch)["puzzle_identifiers"]
        leaf = rows[table.local_weights]
        filled = leaf + jax.lax.stop_gradient(buffers[table.weights][ids] - leaf)
        state = params | {n: b for n, b in buffers.items() if n.endswith("_init")}
        loss, (carry, metrics) = trm_jnp.loss_fn(
            state, filled, carry, batch, rng.key, self.config, network=self.network
        )
        metrics |= halting_histogram(carry, self.config.halt_max_steps)
        return LossSums(loss, None, metrics, carry, buffers | {table.local_ids: ids})


def trainings(config: TRMConfig, devices: int = 1, **fields: Any) -> dict[str, Training]:
    """Returns both sides of a run with `config`; `fields` are fields of its `RunConfig`."""
    run = example_run("trm", config, steps=1000, **fields)
    bridged = start(run, ExamplePuzzles(run), Devices(devices))
    return {"bridge": bridged, "by hand": by_hand(bridged, config)}


def by_hand(bridged: Training, config: TRMConfig, network: trm_jnp.Network = trm_jnp.level) -> Training:
    """Returns the same run with the hand-written objective; `config` has the sizes of the bridged module."""
    fields = {field.name: getattr(bridged.objective, field.name) for field in dataclasses.fields(Objective)}
    return dataclasses.replace(bridged, objective=ByHand(**fields, config=config, network=network))


class Measured:
    """The train step of one side, with its own state."""

    def __init__(self, training: Training):
        devices = training.devices
        batch = training.batches.at(0)
        state = training.initial_state()
        carry = training.initial_carry(state, batch)
        self._batch = batch
        self._key = devices.random_key(0)
        self._state = devices.replicate(state), devices.shard(carry)
        self._step = training.parallel_step()

    def trace_seconds(self) -> float:
        gc.collect()  # otherwise the garbage of what came before is collected in one of the two
        start = time.perf_counter()
        jax.jit(lambda *a: self._step(*a)).lower(*self._state, self._batch, self._key)
        return time.perf_counter() - start

    def cost(self) -> tuple[float, float]:
        """Returns GFLOP and gigabytes of the compiled step, as estimated by the compiler."""
        lowered = jax.jit(lambda *a: self._step(*a)).lower(*self._state, self._batch, self._key)
        cost: Any = lowered.compile().cost_analysis()
        return cost["flops"] / 1e9, cost["bytes accessed"] / 1e9

    def step_seconds(self) -> float:
        start = time.perf_counter()
        state, carry, _ = self._step(*self._state, self._batch, self._key)
        self._state = jax.block_until_ready((state, carry))
        return time.perf_counter() - start


def main(options: Options) -> None:
    print("| TRM train step | GFLOP bridge | by hand | GB bridge | by hand | ms bridge | by hand | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, variant in VARIANTS.items():
        config = TRMConfig(batch_size=options.batch_size, seq_len=81, vocab_size=11, forward_dtype="float32", **variant)
        sides = {side: Measured(training) for side, training in trainings(config).items()}
        costs = [side.cost() for side in sides.values()]
        pairs = [[side.step_seconds() for side in sides.values()] for _ in range(options.pairs + 1)][1:]
        ours, theirs = (1000 * statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        print(
            f"| {name} | {costs[0][0]:.2f} | {costs[1][0]:.2f} | {costs[0][1]:.2f} | {costs[1][1]:.2f} "
            f"| {ours:.0f} | {theirs:.0f} | {ratio:.3f} |",
            flush=True,
        )
    print("\n| tracing and lowering the baseline | bridge, s | by hand, s |\n|---|---|---|")
    for name, variant in VARIANTS.items():
        config = TRMConfig(batch_size=192, seq_len=81, vocab_size=11, **variant)
        both = trainings(config).values()
        # A new step each time: JAX caches traces.
        seconds = [[Measured(training).trace_seconds() for training in both] for _ in range(4)][1:]
        medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
        print(f"| {name} | {medians[0]:.2f} | {medians[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
