"""The scheduled bundles of the kernels of a compiled program: the instruction words of a TPU v4.

libtpu writes the final bundles of every kernel as text if it is asked to before it is loaded. Kernels that are equal
are compiled once, under the name of the first instruction that needs one; the others are found by their content.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from train_jax.errors import UserError
from train_jax.pods.hlo import Instruction, Program

_VARIABLE = "LIBTPU_INIT_ARGS"
_SCHEDULE_FILE = re.compile(r"\d+-(?P<name>[^<].*)-\d+-final_bundles\.txt")
_TOP_LEVEL = "TLP"
"""Name of the program that calls the kernels."""
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s*(?P<label>[A-Z]{2})?\s*:(?P<depth>[ >]*)\{(?P<empty>\})?")
_EXIT = re.compile(r"cmp\.ge\.s32\.totalorder [^,]+, (?P<trips>\d+) /\* loop exit test")
_LOOP_BODY = "LB"
_NO_CONTENT = re.compile(
    r", frontend_attributes=\{kernel_metadata=\{[^}]*\}\}"
    r'|, (?:metadata|sharding|control-predecessors)=\{[^}]*\}|(?:calls|to_apply)=%[\w.\-]+|"estimated_cycles":"\d+"'
    r'|"used_scoped_memory_configs":\[[^\]]*\]|(?<= parameter\()\d+'
)
"""Parts of an instruction that may differ between equal kernels."""

_REFERENCE = re.compile(r"%[\w.\-]+")


class Schedules:
    """The scheduled bundles of the kernels of a program."""

    def __init__(self, program: Program, by_name: Mapping[str, int]):
        """`by_name` maps the names of compiled instructions to their numbers of bundles."""
        self._program = program
        compiled = (each for name, each in program.instructions.items() if name in by_name)
        self._by_content = {self._content(each): by_name[each.name] for each in compiled}

    def of(self, instruction: Instruction) -> int | None:
        """Returns the bundles of an instruction, or of one with an equal kernel; None for one without a kernel."""
        return self._by_content.get(self._content(instruction))

    def _content(self, instruction: Instruction) -> str:
        """Returns the instruction, its operands in memory and its fusion, with names that do not depend on the place.

        Equal kernels may list the instructions of a fusion in another order, so the order of their uses counts.
        """
        order: dict[str, str] = {}
        lines = [str(self._program.shapes_of(name)) for name in instruction.operands]

        def add(each: Instruction) -> None:
            for name in each.called:
                part = self._program.computations.get(name, ())
                visit(next((last for last in part if last.text.lstrip().startswith("ROOT ")), None))
            text = _NO_CONTENT.sub("", each.text.strip().removeprefix("ROOT "))
            lines.append(_REFERENCE.sub(lambda name: order.setdefault(name[0], f"%{len(order)}"), text))

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


@functools.cache
def folder_of_process() -> Path:
    """Returns a folder of `write_schedules`, the same for all programs of this process: libtpu reads its name once."""
    folder = Path(tempfile.mkdtemp(prefix="bundles-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write_schedules(folder)
    return folder


def read_schedules(folder: Path, program: Program) -> Schedules:
    """Reads what libtpu wrote while it compiled `program`. Raises `UserError` if it wrote nothing."""
    schedules = {}
    for file in folder.glob("*-final_bundles.txt"):
        name = _SCHEDULE_FILE.fullmatch(file.name)
        if name and name["name"] != _TOP_LEVEL:
            schedules[name["name"]] = bundles_of(file.read_text())
        file.unlink()  # the next program of the process is written into the same folder
    if not schedules:
        raise UserError("this version of libtpu writes no scheduled bundles; use --no-bundles")
    return Schedules(program, schedules)


def bundles_of(text: str) -> int:
    """Counts the bundles in the text of a kernel: those of a loop as often as it runs, and both sides of a branch.

    A loop whose number of trips is not in the text counts once.
    """
    loops = [_Loop()]  # the innermost one last; the first is the kernel itself

    def close() -> None:
        loop = loops.pop()
        loops[-1].bundles += loop.bundles * loop.trips

    for line in text.splitlines():
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        # An empty bundle is printed without its depth.
        depth = len(loops) - 1 if bundle["empty"] else bundle["depth"].count(">")
        starts = bundle["label"] == _LOOP_BODY and not bundle["empty"]
        if starts and not depth:
            raise UserError("the scheduled bundles of this chip are text of another form; use --no-bundles")
        while len(loops) - 1 > depth - starts:
            close()
        while len(loops) - 1 < depth:
            loops.append(_Loop())
        loops[-1].bundles += 1
        if leaves := _EXIT.search(line):
            loops[-1].trips = max(1, int(leaves["trips"]))
    while len(loops) > 1:
        close()
    return loops[0].bundles


@dataclasses.dataclass
class _Loop:
    trips: int = 1
    bundles: int = 0
