"""The measured time of profiled train steps, by kind of work, by pass, by PyTorch module and by operation."""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from train_jax.errors import UserError
from train_jax.pod.hlo import Instruction, Program
from train_jax.pod.yardsticks import OUTSIDE, kind_of, pass_of, source_of
from train_jax.run.folder import PROFILED_PROGRAM, PROFILED_STEP

CONTROL_FLOW = "loops and branches"
"""The kind of what a loop takes between its operations."""


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
    instructions = {each.name: each for part in program.computations.values() for each in part}
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
