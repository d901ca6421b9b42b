"""Compiles the steps of a run ahead of time for the devices of a topology, on any machine."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np

from models_torch.uninitialized import Uninitialized
from train_jax.errors import UserError
from train_jax.pod.counted import Products, products
from train_jax.pod.hlo import Program
from train_jax.pod.topology import Topology
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices
from train_jax.start import Training, assemble
from train_jax.task import Task


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    arguments: int
    temporaries: int
    outputs: int
    """Those that do not reuse the memory of a donated argument."""
    code: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs + self.code


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A train step, compiled for a topology."""

    executable: Any
    """`jax.stages.Compiled`."""
    lowered: Any
    """`jax.stages.Lowered`."""
    program: Program
    memory: Memory
    flops: float
    """As XLA counts them in the compiled program, the body of a loop once."""
    products: Products
    """Of the program before XLA's optimization."""
    lower_seconds: float
    """Tracing the PyTorch module and lowering it."""
    compile_seconds: float

    @property
    def product_flops(self) -> float:
        """FLOPs of all matrix products."""
        return self.products.total


def training_for(config: RunConfig, task: Task, topology: Topology) -> Training:
    """Returns the components of a run on all devices of a topology; raises `UserError` as `start` does.

    Only shapes are used, so the values of large weights are not drawn.
    """
    with Uninitialized():
        return assemble(config, task, Devices(runner=config.compute.runner, available=topology.devices))


def compile_train_step(training: Training) -> Compiled:
    """Compiles the train step, with all optimizer steps of a dispatch, for arguments of the shapes of the run.

    Nothing of that size is allocated. Raises `UserError` if the compiler refuses the program, because of its memory
    for example.
    """
    return _compile(training.parallel_step(), train_step_arguments(training))


def train_step_arguments(training: Training) -> tuple:
    """Returns the shapes of the arguments of `Training.parallel_step`; nothing of that size is allocated."""
    count = training.devices.count
    state = _state_shapes(training)
    shares = _shares(training.task.batch(0, (0, 1)), count)
    share = jax.tree.map(lambda x: _shape(x.shape[1:], x.dtype), shares)
    carry = jax.eval_shape(training.objective.initial_carry, state.params, state.buffers, share)
    carry = jax.tree.map(lambda x: _shape((count, *x.shape), x.dtype), carry)
    steps = training.config.compute.steps_per_dispatch
    if steps > 1:
        shares = jax.tree.map(lambda x: _shape((count, steps, *x.shape[1:]), x.dtype), shares)
    devices, placement = training.devices, training.placement
    placed = jax.tree.map(
        lambda axis, part: devices.shapes(part, sharded=axis is not None),
        placement.axes,
        placement.shapes(state),
        is_leaf=lambda axis: axis is None,
    )
    return (
        placed,
        *(devices.shapes(tree, sharded=True) for tree in (carry, shares)),
        devices.shapes(_shape((2,), np.uint32)),
    )


def memory_of(executable: Any) -> Memory:
    """Returns the compiler's own analysis of a compiled program."""
    sizes = executable.memory_analysis()
    return Memory(
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        outputs=sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
    )


def compile_eval_step(training: Training) -> Compiled:
    """Like `compile_train_step`, for the step of an evaluation during training."""
    task: Any = training.task
    if not hasattr(task, "eval_step"):
        raise UserError(f"task {training.config.task} has no method eval_step, which compiling its evaluation needs")
    step, batch = task.eval_step(training.objective)
    state = _state_shapes(training)
    return _compile(training.devices.parallel_eval_step(step), (state, _shares(batch, training.devices.count)))


def _compile(step: Any, arguments: tuple) -> Compiled:
    begin = time.perf_counter()
    lowered = step.lower(*arguments)
    lowering = time.perf_counter()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the TPU compiler refuses the step: {_summary(error)}") from error
    done = time.perf_counter()
    return Compiled(
        executable,
        lowered,
        Program(executable.as_text()),
        memory_of(executable),
        float((executable.cost_analysis() or {}).get("flops", 0)),
        products(jax.make_jaxpr(step)(*arguments)),
        lowering - begin,
        done - lowering,
    )


def _state_shapes(training: Training) -> Any:
    """The shapes of the state; weights of another run, which `init_from` names, need not be there."""
    return jax.eval_shape(lambda: training.initial_state(continues=True))


def _shares(batch: Any, count: int) -> Any:
    """The shapes of a batch on the devices."""
    return jax.tree.map(lambda x: _shape((count, len(x) // count, *x.shape[1:]), x.dtype), batch)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))


def _summary(error: Exception) -> str:
    """The first line of a compiler error, which has hundreds."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
