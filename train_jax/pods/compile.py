"""Compiles the steps of a run ahead of time for the devices of a topology, on any machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from models_torch.uninitialized import Uninitialized
from train_jax.errors import UserError
from train_jax.pods.flops import Products, products
from train_jax.pods.hlo import Program
from train_jax.pods.topologies import Topology
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import devices_of
from train_jax.task import Task
from train_jax.trainer.start import Training, assemble


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    arguments: int
    temporaries: int
    outputs: int
    """Bytes of the outputs that do not reuse the memory of a donated argument."""
    code: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries + self.outputs + self.code


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program, compiled for a topology."""

    executable: Any
    """`jax.stages.Compiled`."""
    lowered: Any
    """`jax.stages.Lowered`."""
    program: Program
    memory: Memory
    flops: float
    """FLOPs as XLA counts them in the compiled program, with the body of a loop counted once; 0 for a GPU."""
    products: Products
    """The matrix products of the program before XLA's optimization."""
    lower_seconds: float
    """Seconds to trace the PyTorch module and to lower it."""
    compile_seconds: float


def training_for(config: RunConfig, task: Task, topology: Topology) -> Training:
    """Returns the components of a run on all devices of a topology; raises `UserError` as `start` does.

    Only shapes are used, so the values of large weights are not drawn.
    """
    with Uninitialized():
        return assemble(config, task, devices_of(config.compute, topology.devices))


def compile_train_step(training: Training, options: Mapping[str, str] | None = None) -> Compiled:
    """Compiles the train step, with all optimizer steps of a dispatch, for arguments of the shapes of the run.

    `options` are those of a topology for its compiler. Nothing of that size is allocated. Raises `UserError` if the
    compiler refuses the program, because of its memory for example.
    """
    return compile_program(training.parallel_step(), train_step_arguments(training), options)


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
    devices = training.devices
    placement = training.placement
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


def first_line(error: Exception) -> str:
    """Returns the first line of a compiler error, which has hundreds."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def compile_eval_step(training: Training, options: Mapping[str, str] | None = None) -> Compiled:
    """Compiles the step of an evaluation during training, like `compile_train_step`."""
    task: Any = training.task
    if not hasattr(task, "eval_step"):
        raise UserError(f"task {training.config.task} has no method eval_step, which compiling its evaluation needs")
    step, batch = task.eval_step(training.objective)
    state = _state_shapes(training)
    arguments = state, _shares(batch, training.devices.count)
    return compile_program(training.devices.parallel_eval_step(step), arguments, options)


def compile_program(step: Any, arguments: tuple, options: Mapping[str, str] | None = None) -> Compiled:
    """Compiles a function of `Devices.parallel` for arguments of these shapes. Raises `UserError` if it is rejected."""
    begin = time.perf_counter()
    lowered = step.lower(*arguments)
    lowering = time.perf_counter()
    try:
        executable = lowered.compile(compiler_options=dict(options) if options else None)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the compiler refuses the step: {first_line(error)}") from error
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
    # The weights that `init_from` names need not exist, as for a run that continues.
    return jax.eval_shape(lambda: training.initial_state(continues=True))


def _shares(batch: Any, count: int) -> Any:
    """Returns the shapes of a batch on the devices."""
    return jax.tree.map(lambda x: _shape((count, len(x) // count, *x.shape[1:]), x.dtype), batch)


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(dtype))
