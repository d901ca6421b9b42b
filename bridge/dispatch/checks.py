"""Checks of values in Python code: an `assert`, or a branch that does nothing but raise.

The bytecode says what becomes of a value: a check is a jump of which one side raises without any further jump. What
the value is does not matter where the check is taken for passed, so nothing else of the program changes.
"""

from __future__ import annotations

import dis
import functools
import sys
import types

from bridge.errors import HERE

COMPUTED = "something is computed of the value"
_ON_THE_STACK = (
    *("LOAD_", "COMPARE_OP", "BINARY_OP", "BINARY_SUBSCR", "IS_OP", "CONTAINS_OP", "UNARY_", "TO_BOOL"),
    *("COPY", "SWAP", "CACHE", "NOP", "EXTENDED_ARG"),
)
"""How the names of instructions begin that only compute with what is on the stack."""


def check_under_way() -> bool | str | None:
    """Returns the truth of a value with which the check passes that asks for it.

    `COMPUTED` if something is computed of the value before; None if it is asked for anything else than a check.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(HERE):
        frame = frame.f_back
    return None if frame is None else _check_at(frame.f_code, frame.f_lasti)


@functools.lru_cache(1024)
def _check_at(code: types.CodeType, offset: int) -> bool | str | None:
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: i for i, instruction in enumerate(instructions)}
    first = i = max(i for place, i in places.items() if place <= offset)
    passes, computed = True, False
    while "JUMP" not in instructions[i].opname:
        name = instructions[i].opname
        passes ^= name == "UNARY_NOT"
        # The instruction at `offset` is the one that asks: a call, or one that needs a truth.
        if i != first:
            if not name.startswith(_ON_THE_STACK):
                return None
            computed |= name.startswith(("COMPARE_OP", "BINARY_", "IS_OP", "CONTAINS_OP"))
        i += 1
    jump = instructions[i]
    if not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    if_taken = jump.opname.endswith("IF_TRUE")
    for side, truth in ((i + 1, if_taken), (places[jump.argval], not if_taken)):
        if _raises(instructions, places, side):
            return COMPUTED if computed else truth == passes
    return None


def _raises(instructions: list[dis.Instruction], places: dict[int, int], i: int) -> bool:
    """True if what follows does nothing but raise."""
    while True:
        name = instructions[i].opname
        if name == "RAISE_VARARGS":
            return True
        if name == "JUMP_FORWARD":
            i = places[instructions[i].argval]
        elif "JUMP" in name or name.startswith(("RETURN", "FOR_", "SEND", "YIELD", "STORE_ATTR", "STORE_SUBSCR")):
            return False
        else:
            i += 1
