"""The costs of a compiled program by kind of work, pass, PyTorch module and class: estimated cycles, HBM bytes and
collectives of a TPU program, and the measured time of profiled steps."""

from __future__ import annotations

import dataclasses
import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from train_jax.errors import UserError
from train_jax.pod.hlo import COLLECTIVES, Instruction, Program, Schedules
from train_jax.run.folder import PROFILED_PROGRAM, PROFILED_STEP

FORWARD, BACKWARD, UPDATE, UNNAMED = "forward", "backward", "update", "made by the compiler"
PRODUCTS, COLLECTIVE = "matrix products", "collectives"
KERNELS = "Pallas kernels"
SORTS, ELEMENTWISE = "gathers and sorts", "elementwise, reductions"
CONTROL_FLOW = "loops and branches"
"""The kind of what a loop takes between its operations, in measured time."""
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

    def add(self, instruction: Instruction, times: int, hbm_bytes: float, bundles: int | None) -> None:
        self.cycles += instruction.estimated_cycles * times
        self.hbm_bytes += hbm_bytes * times
        self.instructions += times
        if bundles is not None:
            self.bundles += bundles * times
            self.scheduled += times
        if instruction.is_kernel:
            self.kernels += times
            self.kernel_bundles += (bundles or 0) * times
            self.cycles += (bundles or 0) * times


@dataclasses.dataclass(frozen=True)
class CollectiveOperation:
    """A collective of a program."""

    kind: str
    """Such as `all-reduce`."""
    bytes: float
    """The size of its result on one device."""
    asynchronous: bool
    """True if other work can run meanwhile."""


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
    total, prefetched, collectives = Cost(), 0.0, []
    sums = [defaultdict[str, Cost](Cost) for _ in range(4)]

    def costs(kind: str, op_name: str, module: Module) -> Iterator[Cost]:
        yield total
        yield from (costs[key] for costs, key in zip(sums, (kind, pass_of(op_name), *module), strict=True))

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
        operands = (array for name in instruction.operands for array in program.shapes_of(name))
        size = sum(array.size_bytes for array in (*instruction.results, *operands) if array.in_hbm)
        source, module = source_of(program, instruction)
        bundles = schedules.of(instruction) if schedules else None
        for cost in costs(kind, source.op_name, module):
            cost.add(instruction, times, size, bundles)
    for name, flops in (products or {}).items():
        for cost in costs(PRODUCTS, name, module_of(name)):
            cost.product_flops += flops
    by_kind, by_pass, by_module, by_class = (
        dict(sorted(each.items(), key=lambda item: -item[1].cycles)) for each in sums
    )
    return Yardsticks(total, by_kind, by_pass, by_module, by_class, tuple(collectives), prefetched)


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


# ---- measured time


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of the compiled step."""

    name: str
    """Its name in the compiled program and in the trace."""
    milliseconds: float
    """For a step, on all devices of the process together."""
    runs: float
    """For a step."""
    kind: str
    module: str
    source: str
    """The JAX primitive with the transformations around it."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The traced steps of one process. Times are milliseconds for a step."""

    steps: int
    wall: float
    """From the beginning of the first operation to the end of the last one."""
    busy: float
    """The sum over the operations of all devices of the process."""
    by_kind: Mapping[str, float]
    by_pass: Mapping[str, float]
    by_module: Mapping[str, float]
    by_class: Mapping[str, float]
    operations: tuple[Operation, ...]
    """The longest first."""


def read_profile(folder: Path) -> Measured:
    """Reads what `--profile` wrote in one process. Raises `UserError` if there is none, or if it cannot be read."""
    traces = sorted(folder.glob("plugins/profile/*/perfetto_trace.json.gz"))
    if not traces:
        raise UserError(f"{folder} has no trace; train with --profile 5")
    try:
        events = json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]
        program = Program(gzip.decompress((folder / PROFILED_PROGRAM).read_bytes()).decode())
        return measured(events, program)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        raise UserError(f"{traces[-1]} cannot be read ({error!r}); profile again") from error


def measured(events: Iterable[Mapping[str, Any]], program: Program) -> Measured:
    """Sums the events of the Trace Event format that are operations of `program`, each without what is inside it."""
    spans = [event for event in events if event.get("ph") == "X"]
    steps = len({event["args"]["step_num"] for event in spans if event["name"] == PROFILED_STEP and "args" in event})
    instructions = program.instructions
    times, runs = defaultdict[str, float](float), Counter[str]()
    begin, end = float("inf"), 0.0
    for name, span, own in _own_times(spans, instructions):
        times[name] += own
        runs[name] += 1
        begin, end = min(begin, span["ts"]), max(end, span["ts"] + span["dur"])
    if not steps or not times:
        raise UserError("the trace has no operation of the train step")
    sums = [defaultdict[str, float](float) for _ in range(4)]
    operations = []
    for name, microseconds in sorted(times.items(), key=lambda item: -item[1]):
        instruction, milliseconds = instructions[name], microseconds / 1e3 / steps
        if instruction.opcode in ("while", "conditional"):  # what is inside them has been subtracted
            source, module, kind = instruction, OUTSIDE, CONTROL_FLOW
        else:
            source, module = source_of(program, instruction)
            kind = kind_of(program, instruction)
        for total, key in zip(sums, (kind, pass_of(source.op_name), *module), strict=True):
            total[key] += milliseconds
        operations.append(Operation(name, milliseconds, runs[name] / steps, kind, module.name, source.op_name))
    by_kind, by_pass, by_module, by_class = (dict(sorted(each.items(), key=lambda item: -item[1])) for each in sums)
    wall, busy = (end - begin) / 1e3 / steps, sum(times.values()) / 1e3 / steps
    return Measured(steps, wall, busy, by_kind, by_pass, by_module, by_class, tuple(operations))


def _own_times(
    spans: Iterable[Mapping[str, Any]], instructions: Mapping[str, Instruction]
) -> Iterator[tuple[str, Mapping[str, Any], float]]:
    """Yields each operation with its microseconds without the operations that ran inside it, in the same thread."""
    threads = defaultdict[Any, list](list)
    for span in spans:
        name = (span.get("args") or {}).get("hlo_op", span["name"])
        if name in instructions:
            threads[span["pid"], span["tid"]].append((span["ts"], -span["dur"], name, span))
    for thread in threads.values():
        open_spans: list[list[Any]] = []  # [end, name, span, own time]
        for begin, negative, name, span in sorted(thread, key=lambda each: each[:2]):
            while open_spans and open_spans[-1][0] <= begin:
                yield tuple(open_spans.pop()[1:])  # type: ignore[misc]
            if open_spans:
                open_spans[-1][3] += negative
            open_spans.append([begin - negative, name, span, -negative])
        yield from (tuple(each[1:]) for each in open_spans)  # type: ignore[misc]
