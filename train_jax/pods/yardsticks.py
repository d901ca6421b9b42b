"""The costs of a compiled program by kind of work, pass, PyTorch module and class: bundles or cycles, HBM bytes,
kernels and collectives, and the measured time of profiled steps."""

from __future__ import annotations

import dataclasses
import gzip
import json
import operator
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from train_jax.errors import UserError
from train_jax.pods.hlo import COLLECTIVES, Instruction, Program
from train_jax.run.folder import PROFILED_PROGRAM, PROFILED_STEP

FORWARD = "forward"
BACKWARD = "backward"
UPDATE = "update"
UNNAMED = "made by the compiler"
PRODUCTS = "matrix products"
COLLECTIVE = "collectives"
KERNELS = "Pallas kernels"
ATTENTION = "fused attention of cuDNN"
SORTS = "gathers and sorts"
ELEMENTWISE = "elementwise, reductions"
CONTROL_FLOW = "loops and branches"
"""Kind of the measured time that a loop takes between its operations."""
CLASS_DEPTH = 2
"""The number of nested modules whose classes are named."""
_SCOPE = re.compile(r"(?:^|[/(])([\w.]*)\[([A-Za-z_]\w*)\](?=[/)]|$)")
_GATHERS = ("gather", "scatter", "sort", "dynamic-slice", "dynamic-update-slice")


class Module(NamedTuple):
    """A PyTorch module of a program."""

    name: str
    """Qualified name of the module, that of its class for the outermost one, and "" outside of the module."""
    classes: str
    """Class of the module after that of the module around it, such as `Block/SwiGLU`."""


OUTSIDE = Module("", "")
SPLITS = ("kind", "pass", "module", "class")
"""Keys by which costs are summed: the kind of work (a fusion with a matrix product counts whole as one); the pass
(backward with recomputation; the update is all outside of the module's gradient; instructions without a name are mostly
copies); the qualified name of the PyTorch module, empty outside of it; and its class, such as `Block/SwiGLU`."""
ROWS_SHOWN = 12
"""The most rows of a table that are printed."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """The sum over some of a program's instructions, for one device and one step."""

    cycles: float = 0
    """Scheduled bundles, or cycles that the compiler estimates; it has no estimate for Pallas kernels."""
    hbm_bytes: float = 0
    """Bytes of operands and results in the memory of the device, with the padding of their tiles."""
    instructions: int = 0
    """Number of runs of instructions that count; on a GPU, of kernels."""
    kernels: int = 0
    """Number of runs of Pallas kernels."""
    product_flops: float = 0
    """The FLOPs of the matrix products of the JAX program, before the compiler joins instructions into fusions."""

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))


C = TypeVar("C", Cost, float)
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CollectiveOperation:
    """A collective of a program."""

    kind: str
    """Name of the operation, such as `all-reduce`."""
    bytes: float
    """The size of its results on one device."""
    asynchronous: bool
    """True if other work can run meanwhile."""


@dataclasses.dataclass(frozen=True)
class Yardsticks:
    """The cost of a program for one device and one step."""

    total: Cost
    splits: Mapping[str, Mapping[str, Cost]]
    """Costs by each of `SPLITS`, the most cycles first, without cycles the most bytes."""
    collectives: tuple[CollectiveOperation, ...]
    prefetched_bytes: float
    """Bytes of copies between the memory and the caches of the device that run beside the instructions."""


def yardsticks(
    program: Program,
    products: Mapping[str, float] | None = None,
    cycles: Callable[[Instruction], float] = lambda instruction: instruction.estimated_cycles,
    counts: Callable[[Instruction], bool] = lambda instruction: instruction.is_kernel,
) -> Yardsticks:
    """Sums the instructions that have `cycles`, and others that `counts` is true for: by default Pallas kernels.

    `products` are the FLOPs of matrix products by the names of their operations. A GPU program has no cycles; there
    every instruction counts that `launches`.
    """
    costs: list[tuple[tuple[str, ...], Cost]] = []
    collectives = []
    prefetched = 0.0
    for instruction, times in program.executed():
        kind = kind_of(program, instruction)
        if instruction.opcode in ("copy-start", "slice-start"):
            prefetched += sum(array.size_bytes for array in instruction.results[1:2]) * times
        if kind == COLLECTIVE and not instruction.opcode.endswith("-start"):  # the end of one has its results alone
            collectives += [_collective(program, instruction)] * times
        own = cycles(instruction)
        if not own and not counts(instruction):
            continue
        operands = (array for name in instruction.operands for array in program.shapes_of(name))
        size = sum(array.size_bytes for array in (*instruction.results, *operands) if array.in_hbm)
        source, module = source_of(program, instruction)
        cost = Cost(own * times, size * times, times, times * instruction.is_kernel)
        costs.append(((kind, pass_of(source.op_name), *module), cost))
    for name, flops in (products or {}).items():
        costs.append(((PRODUCTS, pass_of(name), *module_of(name)), Cost(product_flops=flops)))
    total = sum((cost for _, cost in costs), Cost())
    return Yardsticks(total, _split(costs, lambda cost: (cost.cycles, cost.hbm_bytes)), tuple(collectives), prefetched)


def _collective(program: Program, instruction: Instruction) -> CollectiveOperation:
    size = sum(array.size_bytes for array in instruction.results)
    asynchronous = instruction.opcode.endswith("-done")
    if asynchronous:
        start = program.instructions[instruction.operands[0]]
        asynchronous = '"is_sync":true' not in start.text
    return CollectiveOperation(instruction.opcode.removesuffix("-done"), size, asynchronous)


def _split(costs: Iterable[tuple[tuple[str, ...], C]], size: Callable[[C], Any]) -> dict[str, dict[str, C]]:
    """Sums costs by each of their keys, which are those of `SPLITS`; the largest first."""
    sums: dict[str, dict[str, C]] = {name: {} for name in SPLITS}
    for keys, cost in costs:
        for part, key in zip(sums.values(), keys, strict=True):
            part[key] = part[key] + cost if key in part else cost
    return {
        name: dict(sorted(part.items(), key=lambda item: size(item[1]), reverse=True)) for name, part in sums.items()
    }


def tables(splits: Mapping[str, Mapping[str, T]], columns: Mapping[str, Callable[[T], float]]) -> Iterator[str]:
    """Yields the lines of a table for each split: the columns of every part, with its share of their sum."""
    for split, parts in splits.items():
        yield ""
        yield "  " + " ".join(f"{title:>10} {'share':>6}" for title in columns) + f"  by {split}"
        totals = {title: sum(map(value, parts.values())) or 1 for title, value in columns.items()}
        for name, part in list(parts.items())[:ROWS_SHOWN]:
            cells = (f"{value(part):10.3f} {value(part) / totals[title]:6.1%}" for title, value in columns.items())
            yield f"  {' '.join(cells)}  {name or '(no module)'}"


def kind_of(program: Program, instruction: Instruction) -> str:
    """Returns the kind of work of an instruction."""
    if instruction.opcode.removesuffix("-start").removesuffix("-done") in COLLECTIVES:
        return COLLECTIVE
    if instruction.is_kernel:
        return KERNELS
    if "fmha" in instruction.target:
        return ATTENTION
    if instruction.target.startswith(("__cublas", "__cudnn$conv")):
        return PRODUCTS
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
    """Name of the operation in the compiled program and in the trace."""
    milliseconds: float
    """Milliseconds per step, summed over all devices of the process."""
    runs: float
    """Number of runs per step."""
    kind: str
    module: str
    source: str
    """The JAX primitive with the transformations around it."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """The traced steps of one process. Times are milliseconds for a step."""

    steps: int
    wall: float
    """Time from the beginning of the first operation to the end of the last one."""
    busy: float
    """Sum of the times of the operations on all devices of the process."""
    splits: Mapping[str, Mapping[str, float]]
    """Times by each of `SPLITS`, the longest first."""
    operations: tuple[Operation, ...]
    """Operations, the longest first."""


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
    """Sums the events of the Trace Event format that are operations of `program`, each without the events inside it."""
    spans = [event for event in events if event.get("ph") == "X"]
    steps = len({event["args"]["step_num"] for event in spans if event["name"] == PROFILED_STEP and "args" in event})
    instructions = program.instructions
    times = defaultdict[str, float](float)
    runs = Counter[str]()
    begin = float("inf")
    end = 0.0
    for name, span, own in _own_times(spans, instructions):
        times[name] += own
        runs[name] += 1
        begin = min(begin, span["ts"])
        end = max(end, span["ts"] + span["dur"])
    if not steps or not times:
        raise UserError("the trace has no operation of the train step")
    costs = []
    operations = []
    for name, microseconds in sorted(times.items(), key=lambda item: -item[1]):
        instruction = instructions[name]
        milliseconds = microseconds / 1e3 / steps
        if instruction.opcode in ("while", "conditional"):  # operations inside them have been subtracted
            source = instruction
            module = OUTSIDE
            kind = CONTROL_FLOW
        else:
            source, module = source_of(program, instruction)
            kind = kind_of(program, instruction)
        costs.append(((kind, pass_of(source.op_name), *module), milliseconds))
        operations.append(Operation(name, milliseconds, runs[name] / steps, kind, module.name, source.op_name))
    wall = (end - begin) / 1e3 / steps
    busy = sum(times.values()) / 1e3 / steps
    return Measured(steps, wall, busy, _split(costs, float), tuple(operations))


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
