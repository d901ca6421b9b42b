"""Scheduled bundles of a compiled TPU program: the instruction words of each kernel, as often as its loops run them.

libtpu writes the final bundles of every kernel as text if it is asked to before it is loaded. Kernels that are equal
are compiled once, under the name of the first instruction that needs one; the others are found by their content.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path

from train_jax.errors import UserError
from train_jax.pod.hlo import Instruction, Program

_VARIABLE = "LIBTPU_INIT_ARGS"
_FILE = re.compile(r"\d+-(?P<name>[^<].*)-\d+-final_bundles\.txt")
_TOP_LEVEL = "TLP"
"""The program that calls the kernels."""
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s*(?P<label>[A-Z]{2})?\s*:(?P<depth>[ >]*)\{(?P<empty>\})?")
_EXIT = re.compile(r"cmp\.ge\.s32\.totalorder [^,]+, (?P<trips>\d+) /\* loop exit test")
_LOOP_BODY = "LB"
_NO_CONTENT = re.compile(
    r", frontend_attributes=\{kernel_metadata=\{[^}]*\}\}"
    r'|, (?:metadata|sharding|control-predecessors)=\{[^}]*\}|(?:calls|to_apply)=%[\w.\-]+|"estimated_cycles":"\d+"'
    r'|"used_scoped_memory_configs":\[[^\]]*\]|(?<= parameter\()\d+'
)
"""Parts of an instruction that may differ between equal kernels."""

_NAME = re.compile(r"%[\w.\-]+")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The bundles of one kernel."""

    bundles: int
    """Those that are executed; of a branch, both sides."""
    unknown_loops: int
    """Loops whose number of trips is not in the text; they are counted once."""


class Schedules:
    """The schedules of the kernels of a program."""

    def __init__(self, program: Program, by_name: Mapping[str, Schedule]):
        """`by_name` has those that were compiled, by the names of instructions."""
        self._program = program
        instructions = (each for part in program.computations.values() for each in part)
        self._by_content = {self._content(each): by_name[each.name] for each in instructions if each.name in by_name}

    def of(self, instruction: Instruction) -> Schedule | None:
        """Returns the schedule of an instruction, or of one with an equal kernel; None for one without a kernel."""
        return self._by_content.get(self._content(instruction))

    def _content(self, instruction: Instruction) -> str:
        """The instruction, its operands in memory and its fusion, with names that do not depend on the place.

        Equal kernels may list the instructions of a fusion in another order, so that of their uses counts.
        """
        order: dict[str, str] = {}
        lines = [str(self._program.shapes.get(name, ())) for name in instruction.operands]

        def add(each: Instruction) -> None:
            for name in each.called:
                part = self._program.computations.get(name, ())
                visit(next((last for last in part if last.text.lstrip().startswith("ROOT ")), None))
            text = _NO_CONTENT.sub("", each.text.strip().removeprefix("ROOT "))
            lines.append(_NAME.sub(lambda name: order.setdefault(name[0], f"%{len(order)}"), text))

        def visit(each: Instruction | None) -> None:
            if each is None or f"%{each.name}" in order:
                return
            for name in each.operands:
                visit(self._program.instructions.get(name))
            add(each)

        add(instruction)
        return "\n".join(lines)


def write_schedules(folder: Path) -> None:
    """Makes libtpu write the schedules of what it compiles from now on; it has to be called before libtpu is loaded."""
    arguments = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    arguments += " --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
    os.environ[_VARIABLE] = " ".join(filter(None, [os.environ.get(_VARIABLE), arguments]))


def read_schedules(folder: Path, program: Program) -> Schedules:
    """Reads what libtpu wrote while it compiled `program`. Raises `UserError` if it wrote nothing."""
    schedules = {}
    for file in folder.glob("*-final_bundles.txt"):
        name = _FILE.fullmatch(file.name)
        if name and name["name"] != _TOP_LEVEL:
            schedules[name["name"]] = schedule(file.read_text())
    if not schedules:
        raise UserError("this version of libtpu writes no scheduled bundles; leave out --bundles")
    return Schedules(program, schedules)


def schedule(text: str) -> Schedule:
    """Counts the bundles in the text of a kernel, those of a loop as often as it runs."""
    loops = [_Loop(trips=1)]  # the innermost one last; the first is the kernel itself
    unknown = 0

    def close() -> None:
        nonlocal unknown
        loop = loops.pop()
        unknown += loop.trips is None
        loops[-1].bundles += loop.bundles * (loop.trips or 1)

    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        # An empty bundle is printed without its depth.
        depth = len(loops) - 1 if bundle["empty"] else bundle["depth"].count(">")
        starts = bundle["label"] == _LOOP_BODY and not bundle["empty"]
        if starts and not depth:
            raise UserError("the scheduled bundles of this chip are text of another form; leave out --bundles")
        while len(loops) - 1 > depth - starts:
            close()
        while len(loops) - 1 < depth:
            loops.append(_Loop(trips=None if starts else 1))
        loops[-1].bundles += 1
        leaves = _EXIT.search(line)
        if leaves:
            loops[-1].trips = int(leaves["trips"])
    while len(loops) > 1:
        close()
    return Schedule(loops[0].bundles, unknown)


@dataclasses.dataclass
class _Loop:
    trips: int | None
    bundles: int = 0
