"""Reads the text of a compiled XLA program: instructions, their shapes in memory, and the names that JAX gave them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property

BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f8e4m3fn": 1, "f8e5m2": 1} | {
    f"{kind}{bits}": bits // 8 for kind in "suf" for bits in (8, 16, 32, 64)
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_NO_LAUNCH = {
    *("parameter", "constant", "iota", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"),
    *("partition-id", "replica-id", "while", "conditional", "call", "async-start"),
}
_ARRAY = re.compile(r"([a-z]+\d*[a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_LINE = re.compile(r"\s+(ROOT )?%(?P<name>\S+) = ")
_OPCODE = re.compile(r"([a-z][\w-]*)\(")
_HEADING = re.compile(r"(?P<entry>ENTRY )?%(?P<name>\S+) \(.*\{$")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply|branch_computations)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array of a program and its layout in memory."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = ""
    """Order of the axes, tiles and memory space, such as `1,0:T(8,128)S(1)`."""

    @property
    def in_hbm(self) -> bool:
        """True if it lies in the main memory of the device, which is space 0."""
        return re.search(r"S\([1-9]", self.layout) is None

    @property
    def size_bytes(self) -> float:
        """Size in bytes, with the padding of its tiles."""
        dims = list(self.shape)
        order, _, rest = self.layout.partition(":")
        tile = re.match(r"T\((\d+),(\d+)\)", rest)
        if tile and len(dims) >= 2:
            minor, second = (int(axis) for axis in order.split(",")[:2])
            for axis, multiple in ((minor, int(tile[2])), (second, int(tile[1]))):
                dims[axis] = -(-dims[axis] // multiple) * multiple
        return BYTES.get(self.dtype, 0) * math.prod(dims)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    text: str

    @cached_property
    def estimated_cycles(self) -> int:
        """Cycles that the TPU compiler estimates; 0 without an estimate."""
        return self.number(r'"estimated_cycles":"?(\d+)') or 0

    @cached_property
    def target(self) -> str:
        """The function that a custom call calls; empty for other instructions."""
        target = re.search(r'custom_call_target="([^"]*)"', self.text) if self.opcode == "custom-call" else None
        return target[1] if target else ""

    @property
    def is_kernel(self) -> bool:
        """True if it calls a Pallas kernel."""
        return self.target in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2")

    @property
    def launches(self) -> bool:
        """True if a GPU runs it as a kernel, or as a call of a library: all but what only names values or others."""
        return self.opcode not in _NO_LAUNCH and not self.opcode.endswith(("-done", "-update"))

    @property
    def op_name(self) -> str:
        """The JAX primitive with the transformations around it."""
        name = re.search(r'op_name="([^"]*)"', self.text)
        return name[1] if name else ""

    def number(self, pattern: str) -> int | None:
        """Returns an integer of the text; None without it."""
        number = re.search(pattern, self.text)
        return int(number[1]) if number else None


class Program:
    """A compiled program."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        current = None
        for line in text.splitlines():
            if heading := _HEADING.match(line):
                current = self.computations.setdefault(heading["name"], [])
                self.entry = heading["name"] if heading["entry"] else self.entry
            elif current is not None and (instruction := _instruction(line)) is not None:
                current.append(instruction)

    def executed(self, computation: str | None = None, times: int = 1) -> Iterator[tuple[Instruction, int]]:
        """Yields every instruction of a computation, by default the whole program, and how often it runs.

        Those of loops and branches are included; of a branch, every case counts once. The instructions inside of a
        fusion are part of it, and are left out.
        """
        for instruction in self.computations.get(self.entry if computation is None else computation, ()):
            yield instruction, times
            if instruction.opcode in ("while", "conditional", "call", "async-start"):
                for name in instruction.called:
                    yield from self.executed(name, times * self.trips(instruction))

    def trips(self, instruction: Instruction) -> int:
        """Returns how often a `while` runs its body: the compiler's count, or else the times until its counter, which
        begins at 0, is no longer below a constant. 1 if neither is known, and for all other instructions.

        The loops of `jax.lax.scan` increase their counter by 1.
        """
        known = instruction.number(r'known_trip_count":\{"n":"(\d+)"')
        condition = re.search(r"condition=%([\w.\-]+)", instruction.text)
        if instruction.opcode != "while" or known or condition is None:
            return known or 1
        test = next((each for each in self.computations[condition[1]] if each.text.lstrip().startswith("ROOT")), None)
        if test is None or test.opcode != "compare" or "direction=LT" not in test.text:
            return 1
        counter, limit = (self.instructions[name] for name in test.operands)
        start = self.instructions[instruction.operands[0]]
        if counter.opcode != "get-tuple-element" or start.opcode != "tuple":
            return 1
        first = self.instructions[start.operands[counter.number(r"\bindex=(\d+)") or 0]]
        while first.opcode == "copy":
            first = self.instructions[first.operands[0]]
        constant = r" constant\((-?\d+)\)"
        return limit.number(constant) or 1 if first.number(constant) == 0 else 1

    @cached_property
    def instructions(self) -> Mapping[str, Instruction]:
        """Every instruction by its name."""
        return {each.name: each for part in self.computations.values() for each in part}

    def inside(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yields the instructions of a fusion, those of nested fusions included."""
        for name in instruction.called:
            for each in self.computations.get(name, ()):
                yield each
                yield from self.inside(each)

    def shapes_of(self, name: str) -> tuple[Array, ...]:
        """Returns the results of an instruction by its name; nothing for an unknown one."""
        return self.instructions[name].results if name in self.instructions else ()


def _instruction(line: str) -> Instruction | None:
    start = _LINE.match(line)
    if start is None:
        return None
    at = start.end()
    end = _closing(line, at) if line[at] == "(" else at
    opcode = _OPCODE.search(line, end)
    if opcode is None:
        return None
    close = _closing(line, opcode.end() - 1)
    return Instruction(
        name=start["name"],
        opcode=opcode[1],
        results=tuple(
            Array(dtype, tuple(int(dim) for dim in dims.split(",") if dim), layout)
            for dtype, dims, layout in _ARRAY.findall(line[at : opcode.start()])
        ),
        operands=tuple(re.findall(r"%([\w.\-]+)", line[opcode.end() : close])),
        called=tuple(name for names in _CALLED.findall(line, close) for name in re.findall(r"%([\w.\-]+)", names)),
        text=line,
    )


def _closing(line: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for at in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        if not depth:
            return at + 1
    return len(line)
