"""Measures the time that the host needs to dispatch a train step, by runner, leaves and steps per dispatch.

    python -m benchmarks.dispatch [--devices 8] [--layers 1 2 4] [--json FILE] [--compare FILE]

The step is a stub with the signature of the published model's: the leaves of state, carry, batch and metrics, their
shardings and donation, but no computation: every array of the state and the carry is handed on in its own memory. So
nearly all of the time is that of the host and of starting the program on every device (virtual ones on a CPU).
`returns` is the time until the call returns, `done` the time until its results are there, both per step, medians over
the calls. The variants of a model take turns in one process. `grouped` is the same program with the parameters, the
moving average and the optimizer state as one array for each dtype, which shows what fewer leaves would gain.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, get_args

import tyro

from benchmarks import tables

TITLES = ("blocks", "leaves", "state", "runner", "steps per dispatch", "returns, ms", "done, ms")


@dataclasses.dataclass(frozen=True)
class Options(tables.Files):
    """Measure the dispatch of stub steps."""

    devices: int = 8
    """Number of devices; virtual ones on a CPU."""
    layers: tuple[int, ...] = (1, 2, 4)
    """Numbers of blocks of the model; the published one has 2."""
    steps: tuple[int, ...] = (1, 8)
    """Numbers of steps per dispatch."""
    hidden_size: int = 128
    """Width of the model, which changes the memory, and not the work of the host."""
    rounds: int = 10
    """Measured rounds of every variant, after one that is not measured."""
    calls: int = 10
    """Calls in a round."""
    here: bool = False
    """Measure in this process, on its devices."""


def stub() -> Callable[..., Any]:
    """Returns a train step that returns state and carry unchanged, and zeros as metrics."""
    import jax
    import jax.numpy as jnp

    def step(state: Any, carry: Any, batch: Any, key: Any) -> tuple[Any, Any, dict[str, Any]]:
        # The compiler removes the barrier, and JAX does not see that the results are the arguments.
        state, carry = jax.lax.optimization_barrier((state, carry))
        return state, carry, dict.fromkeys(METRICS, jnp.zeros(()))

    return step


METRICS = tuple(f"metric_{number}" for number in range(40))
"""Names of the metrics, about as many as the train step of a puzzle run has."""


def grouped(state: Any) -> Any:
    """Returns the arrays of a state, joined into one array for each dtype."""
    import jax
    import numpy as np

    parts: dict[Any, list[np.ndarray]] = {}
    for leaf in jax.tree.leaves(state):
        parts.setdefault(leaf.dtype, []).append(np.asarray(leaf).ravel())
    return {str(dtype): np.concatenate(arrays) for dtype, arrays in parts.items()}


def measure(options: Options, layers: int) -> list[dict[str, Any]]:
    """Returns a row for every variant of the model with `layers` blocks."""
    variants = [
        Variant(options, layers, runner, steps, in_groups)
        for in_groups in (False, True)
        for runner in _runners()
        for steps in options.steps
    ]
    for turn in range(options.rounds + 1):
        for variant in variants:
            times = [variant.call() for _ in range(options.calls)]
            variant.times += times if turn else []
    return [variant.row() for variant in variants]


def _runners() -> tuple[Any, ...]:
    from train_jax.runtime.devices import Runner

    return get_args(Runner)


class Variant:
    """A program with its arguments."""

    def __init__(self, options: Options, layers: int, runner: Any, steps: int, in_groups: bool):
        import jax

        from benchmarks.example_puzzles import ExamplePuzzles, example_run
        from models_torch.trm import TRMConfig
        from train_jax.core.step import several_steps
        from train_jax.run.config import ComputeConfig
        from train_jax.runtime.devices import Devices
        from train_jax.trainer.start import start

        devices = Devices(options.devices, runner)
        width = options.hidden_size
        arch = TRMConfig(
            batch_size=2 * devices.count, seq_len=81, vocab_size=11, L_layers=layers, hidden_size=width,
            puzzle_emb_ndim=width, mlp_t=False, pos_encodings="rope",
        )  # fmt: skip
        every = {name: steps for name in ("eval_every_steps", "checkpoint_every_steps", "log_every_steps")}
        compute = ComputeConfig(runner=runner, steps_per_dispatch=steps)
        run = example_run("trm", arch, steps=1000, compute=compute, **every)
        training = start(run, ExamplePuzzles(run), devices)
        initial = training.initial_state()
        carry = training.initial_carry(initial, training.batches.at(0))
        self._fixed = devices.shard(training.batches.from_step(0)), devices.random_key(0)
        self._changing = [devices.replicate(grouped(initial) if in_groups else initial), devices.shard(carry)]
        step = devices.parallel_train_step(stub() if steps == 1 else several_steps(stub()))
        self._program, _ = devices.compile(step, (*self._changing, *self._fixed))
        leaves = len(jax.tree.leaves((*self._changing, *self._fixed)))
        state = "grouped" if in_groups else "leaves"
        self._facts = {"blocks": layers, "leaves": leaves, "state": state, "runner": runner, "steps": steps}
        self.times: list[tuple[float, float]] = []
        """Seconds until a call returned, and until its results were ready."""

    def call(self) -> tuple[float, float]:
        import jax

        begun = time.perf_counter()
        *self._changing, metrics = self._program(*self._changing, *self._fixed)
        returned = time.perf_counter()
        jax.block_until_ready((self._changing, metrics))
        return returned - begun, time.perf_counter() - begun

    def row(self) -> dict[str, Any]:
        returns, done = (
            1000 * statistics.median(times) / self._facts["steps"] for times in zip(*self.times, strict=True)
        )
        return self._facts | {"returns": returns, "done": done}


def main(options: Options) -> int:
    if not options.here:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={options.devices}"
        command = [sys.executable, "-m", "benchmarks.dispatch", "--here", *sys.argv[1:]]
        return subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, check=False).returncode
    before = tables.figures_before(options)
    print(tables.header(TITLES), flush=True)
    results = []
    for layers in options.layers:
        for each in measure(options, layers):
            cells = [each[name] for name in ("blocks", "leaves", "state", "runner", "steps")]
            print(tables.row([*cells, f"{each['returns']:.2f}", f"{each['done']:.2f}"]), flush=True)
            results.append(each)
    figures = {
        f"{each['blocks']} blocks, {each['state']}, {each['runner']}, {each['steps']} steps, done, ms": each["done"]
        for each in results
    }
    import jax

    device = f"{options.devices} x {jax.devices()[0].device_kind}"
    return tables.finish(options, figures, before, device, results=results)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
