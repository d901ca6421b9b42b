"""What a compiled TPU program costs: estimated cycles, HBM bytes and collectives, by kind of work and by module."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from train_jax.pod.hlo import COLLECTIVES, Instruction, Program
from train_jax.pod.schedule import Schedule, Schedules

FORWARD, BACKWARD, UPDATE, UNNAMED = "forward", "backward", "update", "made by the compiler"
PRODUCTS, COLLECTIVE = "matrix products", "collectives"
KERNELS = "Pallas kernels"
SORTS, ELEMENTWISE = "gathers and sorts", "elementwise, reductions"
CLASS_DEPTH = 2
"""The number of nested modules whose classes are named."""
_SCOPE = re.compile(r"(?:^|[/(])([\w.]*)\[([A-Za-z_]\w*)\](?=[/)]|$)")
_GATHERS = ("gather", "scatter", "sort", "dynamic-slice", "dynamic-update-slice")


class Module(NamedTuple):
    """A PyTorch module of a program."""

    name: str
    """Its qualified name, that of its class for the outermost one, and "" outside of the module."""
    classes: str
    """Its class behind that of the module around it, such as `Block/SwiGLU`."""


OUTSIDE = Module("", "")


@dataclasses.dataclass
class Cost:
    """The sum over some of a program's instructions, for one device and one step."""

    cycles: float = 0
    """The compiler's estimate; of Pallas kernels, which it does not estimate, the bundles."""
    hbm_bytes: float = 0
    """Operands and results that lie in the memory of the device, with the padding of their tiles."""
    instructions: int = 0
    bundles: int = 0
    """Scheduled bundles, each executed in a cycle or more; 0 without schedules."""
    kernels: int = 0
    """Runs of Pallas kernels."""
    kernel_bundles: int = 0
    """Of Pallas kernels; those of blocks that a kernel skips are counted."""
    scheduled: int = 0
    """Instructions whose schedule is known."""
    product_flops: float = 0
    """Of the matrix products as the JAX program names them, before the compiler joins instructions into fusions."""

    def add(self, instruction: Instruction, times: int, hbm_bytes: float, schedule: Schedule | None) -> None:
        self.cycles += instruction.estimated_cycles * times
        self.hbm_bytes += hbm_bytes * times
        self.instructions += times
        if schedule is not None:
            self.bundles += schedule.bundles * times
            self.scheduled += times
        if instruction.is_kernel:
            self.kernels += times
            self.kernel_bundles += schedule.bundles * times if schedule else 0
            self.cycles += schedule.bundles * times if schedule else 0


@dataclasses.dataclass(frozen=True)
class CollectiveOperation:
    """A collective of a program."""

    kind: str
    """Such as `all-reduce`."""
    bytes: float
    """The size of its result on one device."""
    asynchronous: bool
    """Whether other work can run meanwhile."""


@dataclasses.dataclass(frozen=True)
class Yardsticks:
    """The cost of a program for one device and one step, in total and by what the instructions do."""

    total: Cost
    by_kind: Mapping[str, Cost]
    """Matrix products (a fusion with one counts whole), Pallas kernels, collectives, gathers and sorts, and the
    rest."""
    by_pass: Mapping[str, Cost]
    """Forward pass, backward pass (with recomputation), everything outside of the module's gradient, and instructions
    without a name, which are mostly copies."""
    by_module: Mapping[str, Cost]
    """By the qualified names of the PyTorch modules; empty outside of the module and for instructions without a
    name."""
    by_class: Mapping[str, Cost]
    """By the classes of these modules, such as `Block/SwiGLU`: equal layers together."""
    collectives: tuple[CollectiveOperation, ...]
    prefetched_bytes: float
    """Copies between the memory and the caches of the device that run beside the instructions."""

    @property
    def splits(self) -> dict[str, Mapping[str, Cost]]:
        """The sums by what they are split by, in the order of the tables."""
        return {"work": self.by_kind, "pass": self.by_pass, "module": self.by_module, "class": self.by_class}


def yardsticks(
    program: Program, schedules: Schedules | None = None, products: Mapping[str, float] | None = None
) -> Yardsticks:
    """Sums the instructions that have an estimate, and Pallas kernels. Without `schedules` there are no bundles.

    `products` are the FLOPs of matrix products by the names of their operations.
    """
    total, prefetched = Cost(), 0.0
    by_kind, by_pass, by_module, by_class = (defaultdict(Cost) for _ in range(4))
    collectives = []
    for instruction, times in program.executed():
        kind = kind_of(program, instruction)
        if kind == COLLECTIVE and not instruction.opcode.endswith("-done"):
            size = sum(array.size_bytes for array in instruction.results[-1:])
            asynchronous = instruction.opcode.endswith("-start")
            operation = CollectiveOperation(instruction.opcode.removesuffix("-start"), size, asynchronous)
            collectives += [operation] * times
        if instruction.opcode in ("copy-start", "slice-start"):
            prefetched += sum(array.size_bytes for array in instruction.results[1:2]) * times
        if not instruction.estimated_cycles and not instruction.is_kernel:
            continue
        size = _hbm_bytes(program, instruction)
        source, module = source_of(program, instruction)
        groups = by_kind[kind], by_pass[pass_of(source.op_name)], by_module[module.name], by_class[module.classes]
        for cost in (total, *groups):
            cost.add(instruction, times, size, schedules and schedules.of(instruction))
    for name, flops in (products or {}).items():
        module = module_of(name)
        groups = by_kind[PRODUCTS], by_pass[pass_of(name)], by_module[module.name], by_class[module.classes]
        for cost in (total, *groups):
            cost.product_flops += flops
    return Yardsticks(
        total,
        _largest_first(by_kind),
        _largest_first(by_pass),
        _largest_first(by_module),
        _largest_first(by_class),
        tuple(collectives),
        prefetched,
    )


def kind_of(program: Program, instruction: Instruction) -> str:
    """Returns the kind of work of an instruction."""
    if instruction.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return COLLECTIVE
    if instruction.is_kernel:
        return KERNELS
    opcodes = {instruction.opcode, *(each.opcode for each in program.inside(instruction))}
    if opcodes & {"convolution", "dot"}:
        return PRODUCTS
    return SORTS if opcodes.intersection(_GATHERS) else ELEMENTWISE


def pass_of(op_name: str) -> str:
    """Returns the pass that an operation belongs to, by the transformations in its name."""
    if not op_name:
        return UNNAMED
    if "transpose(" in op_name or "checkpoint" in op_name:
        return BACKWARD
    # An evaluation has no gradient, and no "jvp(": its forward pass is what modules compute.
    return FORWARD if "jvp(" in op_name or module_of(op_name).name else UPDATE


def module_of(op_name: str) -> Module:
    """Returns the innermost PyTorch module in the name of an operation, by the scopes of `bridge.export`."""
    scopes = _SCOPE.findall(op_name)
    if not scopes:
        return OUTSIDE
    name, kind = scopes[-1]
    return Module(name or kind, "/".join(kind for _, kind in scopes[-CLASS_DEPTH:]))


def source_of(program: Program, instruction: Instruction) -> tuple[Instruction, Module]:
    """Returns the instruction and the innermost PyTorch module it comes from.

    A fusion that the compiler put together has no source of its own: that is its first instruction which has one.
    """
    for each in (instruction, *program.inside(instruction)):
        module = module_of(each.op_name)
        if module.name:
            return each, module
    return instruction, OUTSIDE


def _hbm_bytes(program: Program, instruction: Instruction) -> float:
    arrays = [*instruction.results, *(each for name in instruction.operands for each in program.shapes.get(name, ()))]
    return sum(array.size_bytes for array in arrays if array.in_hbm)


def _largest_first(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    return dict(sorted(costs.items(), key=lambda item: -item[1].cycles))
