"""What the bridge costs: the bridged TRM train step beside the same mathematics written by hand in `jax.numpy`.

    python -m benchmarks.overhead [--batch-size 4] [--pairs 15]

Both sides are the trainer's own step (optimizer, averages, puzzle rows) with another objective inside, at the
baseline's size in float32. Compiled FLOPs and bytes are the compiler's; the steps take turns in one process, so that
a noisy machine slows both, and the ratio is the median of the pairs' ratios. Tracing and lowering is that of the
published baseline (bfloat16, 192 examples a device), the module's export not counted.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import torch
import tyro

import bridge
from benchmarks import trm_jnp
from models_torch.registry import build, example_batch
from models_torch.trm import TRMConfig
from train_jax.core.objective import Objective, PuzzleTable, Step, objective_of
from train_jax.core.state import Arrays, new_learner
from train_jax.core.step import make_train_step
from train_jax.optim.optimizer import dense_optimizer
from train_jax.run.config import OptimConfig
from train_jax.runtime.devices import Devices

VARIANTS = {
    "attention": {"mlp_t": False, "pos_encodings": "rope"},
    "MLP mixer": {"mlp_t": True, "pos_encodings": "none"},
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure the bridge against JAX by hand."""

    batch_size: int = 4
    """Examples in a measured step."""
    pairs: int = 15
    """Measured pairs of steps, after one that is not counted."""


@dataclasses.dataclass(frozen=True)
class ByHand:
    """`trm_jnp` behind the face of an `Objective`, its state taken from the bridged one."""

    bridged: Objective
    config: TRMConfig
    tables: tuple[PuzzleTable, ...]

    @property
    def params(self) -> Arrays:
        return self.bridged.params

    @property
    def buffers(self) -> Arrays:
        return self.bridged.buffers

    @property
    def local_rows(self) -> Arrays:
        return self.bridged.local_rows

    def initial_carry(self, params: Arrays, buffers: Arrays, batch: dict) -> Any:
        return trm_jnp.initial_carry(batch, self.config)

    def __call__(
        self, params: Arrays, rows: Arrays, buffers: Arrays, carry: Any, batch: dict, rng: Any, overrides: Any
    ) -> Step:
        (table,) = self.tables
        ids = trm_jnp.take_up(carry, batch)["puzzle_identifiers"]
        leaf = rows[table.local_weights]
        filled = leaf + jax.lax.stop_gradient(buffers[table.weights][ids] - leaf)
        state = params | {n: b for n, b in buffers.items() if n.endswith("_init")}
        loss, (carry, metrics) = trm_jnp.loss_fn(state, filled, carry, batch, rng.key, self.config)
        return Step(loss, carry, metrics, buffers | {table.local_ids: ids})


def objectives(config: TRMConfig) -> dict[str, Any]:
    torch.manual_seed(0)
    bridged = objective_of(bridge.export(build("trm", config)))
    return {"bridge": bridged, "by hand": ByHand(bridged, config, bridged.tables)}


class Measured:
    """One side's train step with a state of its own."""

    def __init__(self, objective: Any, config: TRMConfig):
        optim, devices = OptimConfig(), Devices(1)
        self._optimizer, self._objective = dense_optimizer(optim, 1000), objective
        step = make_train_step(
            objective,
            self._optimizer,
            optim,
            total_steps=1000,
            global_batch_size=config.batch_size,
            device_count=1,
        )
        self._batch = devices.split({k: v.numpy() for k, v in example_batch(config, config.batch_size, seed=0).items()})
        self._key = devices.key(0)
        learner = new_learner(objective.params, objective.buffers, self._optimizer)
        carry = devices.for_each(objective.initial_carry)(learner.params, learner.buffers, self._batch)
        # Donated arrays go away: each side gets copies.
        self._state = devices.replicate(jax.tree.map(jnp.copy, learner)), devices.spread(carry)
        self._step = devices.train(step)

    def trace_seconds(self) -> float:
        start = time.perf_counter()
        jax.jit(lambda *a: self._step(*a)).lower(*self._state, self._batch, self._key)
        return time.perf_counter() - start

    def cost(self) -> tuple[float, float]:
        """GFLOP and gigabytes of the compiled step, by the compiler's count."""
        lowered = jax.jit(lambda *a: self._step(*a)).lower(*self._state, self._batch, self._key)
        found: Any = lowered.compile().cost_analysis()
        return found["flops"] / 1e9, found["bytes accessed"] / 1e9

    def step_seconds(self) -> float:
        start = time.perf_counter()
        learner, carry, _ = self._step(*self._state, self._batch, self._key)
        self._state = jax.block_until_ready((learner, carry))
        return time.perf_counter() - start


def main(options: Options) -> None:
    print("| TRM train step | GFLOP bridge | by hand | GB bridge | by hand | ms bridge | by hand | ratio |")
    print("|---|---|---|---|---|---|---|---|")
    for name, variant in VARIANTS.items():
        config = TRMConfig(batch_size=options.batch_size, seq_len=81, vocab_size=11, forward_dtype="float32", **variant)
        sides = {side: Measured(objective, config) for side, objective in objectives(config).items()}
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
        both = objectives(config).values()
        # A step of its own each time: JAX remembers what it traced.
        seconds = [[Measured(objective, config).trace_seconds() for objective in both] for _ in range(4)][1:]
        medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
        print(f"| {name} | {medians[0]:.2f} | {medians[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
