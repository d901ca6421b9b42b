"""The compiled train steps of a run: one for each recursion depth, the next one compiled ahead in the background."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import optax

from train_jax.core.objective import Objective
from train_jax.core.step import TrainStep, make_train_step, several_steps
from train_jax.errors import UserError
from train_jax.run.config import RunConfig
from train_jax.run.model import at_depth, build_objective, exploration_of
from train_jax.runtime.devices import Devices
from train_jax.tasks.puzzles.batches import epochs_to_steps
from train_jax.tasks.puzzles.mixture import Mixture


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Recursion that deepens: both cycles grow linearly from `start` to `end`, which they have from `steps` on."""

    start: tuple[int, int]
    """H-cycles and L-cycles at the first step."""
    end: tuple[int, int]
    steps: int
    """Optimizer steps over which it grows; 0: `end` from the first."""

    def at(self, step: int) -> tuple[int, int]:
        """The depth of the step that comes after `step` steps."""
        share = min(step / self.steps, 1.0) if self.steps else 1.0
        low, high = ((a + share * (b - a)) for a, b in zip(self.start, self.end, strict=True))
        return int(low + 0.5), int(high + 0.5)

    def after(self, step: int) -> tuple[int, int] | None:
        """The next depth that differs from the one at `step`, if there is one."""
        now = self.at(step)
        if now == self.end:
            return None
        return next(depth for s in range(step + 1, self.steps + 1) if (depth := self.at(s)) != now)


class Programs:
    """Train steps, compiled before they are called."""

    def __init__(self, devices: Devices, step_at: Callable[[tuple[int, int]], Any], curriculum: Curriculum):
        """`step_at(depth)`: the step over all devices, not compiled yet."""
        self._devices, self._step_at, self.curriculum = devices, step_at, curriculum
        self._compiled: dict[tuple[tuple[int, int], int], Future] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="compile")
        self._called: frozenset[Any] = frozenset()
        self.compile_seconds = 0.0
        """Spent compiling so far, in the background or not."""

    def __call__(self, step: int, steps: int, *args: Any) -> Any:
        """Run the `steps` steps that come after `step`."""
        depth = self.curriculum.at(step)
        if (depth, steps) not in self._compiled:
            self._start(depth, steps, args)
        compiled = self._compiled[depth, steps].result()
        following = self.curriculum.after(step)
        if following is not None and (following, steps) not in self._compiled:
            self._start(following, steps, args)
        # Nothing may travel between host and devices while a step is handed over, unless it is being compiled.
        known, self._called = compiled in self._called, self._called | {compiled}
        with jax.transfer_guard("disallow" if known else "allow"):
            return compiled(*args)

    @property
    def compiles(self) -> int:
        return len(self._compiled)

    def _start(self, depth: tuple[int, int], steps: int, args: tuple) -> None:
        shapes = jax.tree.map(_shape, args)

        def compiled() -> Any:
            start = time.perf_counter()
            program = self._devices.compiled(self._step_at(depth), shapes)
            self.compile_seconds += time.perf_counter() - start
            return program

        self._compiled[depth, steps] = self._pool.submit(compiled)

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def objective_for(config: RunConfig, data: Mixture, devices: Devices) -> Objective:
    """The module built for the examples that a device takes at once."""
    local_batch, parts = devices.local_batch_size(config.global_batch_size), config.compute.accumulation_steps
    if local_batch % parts:
        raise UserError(
            f"compute.accumulation_steps {parts} does not divide the {local_batch} examples on a device; "
            "use a divisor of that"
        )
    return build_objective(config, data.metadata, local_batch // parts)


def programs_for(
    config: RunConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    data: Mixture,
    devices: Devices,
    total_steps: int,
) -> Programs:
    """The train step at every depth of the curriculum, to be compiled when its time comes."""
    end = getattr(config.arch, "H_cycles", 0), getattr(config.arch, "L_cycles", 0)
    grows = config.curriculum_epochs > 0
    steps = epochs_to_steps(data.examples_per_epoch, config.curriculum_epochs, config.global_batch_size) if grows else 0
    overrides = {}
    if config.halt_exploration_end is not None:
        first = getattr(config.arch, "halt_exploration_prob")  # noqa: B009
        overrides[exploration_of(objective.fn.module)] = optax.linear_schedule(
            first, config.halt_exploration_end, total_steps
        )

    def step_of(objective: Objective) -> TrainStep:
        return make_train_step(
            objective,
            optimizer,
            config.optim,
            total_steps=total_steps,
            global_batch_size=config.global_batch_size,
            device_count=devices.count,
            halt_max_steps=config.arch.halt_max_steps,
            scales_loss=scales_loss(config),
            accumulation_steps=config.compute.accumulation_steps,
            overrides=overrides,
        )

    last = step_of(objective)  # made now, so that what cannot be is said now

    def step_at(depth: tuple[int, int]) -> Any:
        step = last if depth == end else step_of(objective_for(at_depth(config, depth), data, devices))
        return devices.train(step if config.compute.steps_per_dispatch == 1 else several_steps(step))

    return Programs(devices, step_at, Curriculum(config.curriculum_start if grows else end, end, steps))


def scales_loss(config: RunConfig) -> bool:
    """Whether gradients would vanish in the run's number format without it."""
    return getattr(config.arch, "forward_dtype", None) == "float16"
