"""Compiles the steps of a run ahead of time for the devices of an absent TPU slice, on any machine."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from models_torch.uninitialized import Uninitialized
from train_jax.errors import UserError
from train_jax.pods.flops import Products, products
from train_jax.pods.hlo import Program
from train_jax.run.config import RunConfig
from train_jax.runtime.devices import Devices
from train_jax.task import Task
from train_jax.trainer.start import Training, assemble

# ---- topologies

DEFAULT_TOPOLOGY = "v4:2x4x4"
"""32 chips in 8 hosts, which Google Cloud rents as v4-64: it counts TensorCores."""

LIBTPU = "0.0.42.*"
"""The version of the compiler that belongs to the supported version of JAX."""

_NAME = re.compile(r"(?P<chip>v4|v5e|v5p|v6e):(?P<shape>\d+(x\d+)+)")
_MEGACORE_CHIPS = ("v4", "v5p")
"""Chips with two TensorCores, which a program may use as one device."""


@dataclasses.dataclass(frozen=True)
class Topology:
    """The devices of an absent TPU slice."""

    name: str
    devices: Sequence[Any]
    hbm_bytes: int
    """Memory of a device in bytes."""
    peak_flops: float
    """Peak bfloat16 FLOP/s of a device."""
    hbm_bandwidth: float
    """Peak bytes/s between a device and its memory."""
    clock: float | None
    """Cycles/s: peak FLOP/s by the FLOPs of the matrix units in a cycle. None for v6e, where this is no clock."""

    @property
    def hosts(self) -> int:
        return len({device.process_index for device in self.devices})

    def __str__(self) -> str:
        return f"{self.name}: {len(self.devices)} devices ({self.devices[0].device_kind}) in {self.hosts} hosts"


def topology(name: str = DEFAULT_TOPOLOGY) -> Topology:
    """Returns a topology such as `v4:2x4x4`, chips along each axis of the slice.

    The two TensorCores of a v4 or v5p chip are one device, as on Google Cloud. Raises `UserError` for an unknown name,
    and if libtpu, the compiler, is not installed.
    """
    parsed = _NAME.fullmatch(name)
    if parsed is None:
        raise UserError(
            f"unknown topology {name!r}; use a chip and its axes, such as {DEFAULT_TOPOLOGY}, v5e:4x8 or v6e:4x8"
        )
    chip, axes = parsed["chip"], [int(size) for size in parsed["shape"].split("x")]
    expected = 3 if chip in _MEGACORE_CHIPS else 2
    if len(axes) != expected or not all(axes):
        raise UserError(f"topology {name!r}: {chip} has {expected} axes, such as {'x'.join('244'[:expected])}")
    _find_compiler()
    # Without these variables libtpu waits for the metadata server of a TPU machine.
    cores = math.prod(axes) * (2 if chip in _MEGACORE_CHIPS else 1)
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", f"{'v5litepod' if chip == 'v5e' else chip}-{cores}")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    config = {"chip_config_name": "megacore"} if chip in _MEGACORE_CHIPS else {}
    try:
        devices = topologies.get_topology_desc(topology_name=name, platform="tpu", **config).devices
    except Exception as error:  # JAX and libtpu raise RuntimeError, ValueError and errors of their own
        reason = str(error).strip() or type(error).__name__
        raise UserError(f"topology {name!r}: {reason.splitlines()[0]}") from error
    info = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion(chip), 1)  # the figures of one TensorCore
    cores = devices[0].num_cores
    return Topology(
        name,
        devices,
        hbm_bytes=info.hbm_capacity_bytes * cores,
        peak_flops=float(info.bf16_ops_per_second * cores),
        hbm_bandwidth=float(info.mem_bw_bytes_per_second * cores),
        clock=None if chip == "v6e" else info.bf16_ops_per_second / (2 * info.num_mxus * info.mxu_column_size**2),
    )


def _find_compiler() -> None:
    """Names libtpu in `TPU_LIBRARY_PATH` if it lies in the folder `pod` of the environment.

    There JAX does not find it by itself, and does not search for a TPU in every program.
    """
    if "TPU_LIBRARY_PATH" in os.environ or importlib.util.find_spec("libtpu"):
        return
    library = Path(sys.prefix, "pod", "libtpu", "libtpu.so")
    if not library.exists():
        raise UserError(
            "the TPU compiler is not installed; run `source ./environment.sh pod` in the project's folder, or "
            f"`pip install --no-deps --target {library.parents[1]} 'libtpu=={LIBTPU}'`"
        )
    os.environ["TPU_LIBRARY_PATH"] = str(library)


def use_host_backend() -> None:
    """Makes JAX compute on the CPU, so that a TPU of this machine stays free; call it before anything is computed."""
    jax.config.update("jax_platforms", "cpu")


# ---- steps


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
    """FLOPs as XLA counts them in the compiled program, with the body of a loop counted once."""
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
        return assemble(config, task, Devices(runner=config.compute.runner, available=topology.devices))


def compile_train_step(training: Training) -> Compiled:
    """Compiles the train step, with all optimizer steps of a dispatch, for arguments of the shapes of the run.

    Nothing of that size is allocated. Raises `UserError` if the compiler refuses the program, because of its memory
    for example.
    """
    return compile_program(training.parallel_step(), train_step_arguments(training))


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


def first_line(error: Exception) -> str:
    """Returns the first line of a compiler error, which has hundreds."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def compile_eval_step(training: Training) -> Compiled:
    """Compiles the step of an evaluation during training, like `compile_train_step`."""
    task: Any = training.task
    if not hasattr(task, "eval_step"):
        raise UserError(f"task {training.config.task} has no method eval_step, which compiling its evaluation needs")
    step, batch = task.eval_step(training.objective)
    state = _state_shapes(training)
    return compile_program(training.devices.parallel_eval_step(step), (state, _shares(batch, training.devices.count)))


def compile_program(step: Any, arguments: tuple) -> Compiled:
    """Compiles a function of `Devices.parallel` for arguments of these shapes. Raises `UserError` if it is rejected."""
    begin = time.perf_counter()
    lowered = step.lower(*arguments)
    lowering = time.perf_counter()
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the TPU compiler refuses the step: {first_line(error)}") from error
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
