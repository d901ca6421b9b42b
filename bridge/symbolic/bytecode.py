"""Uses of a value in Python code, found in its bytecode: checks, and loops that only write into tensors.

A check is an `assert`, or a branch of which one side raises without any further jump; `all(… for …)` and `any(… for …)`
may be what it asks. Where the code may catch what it
raises, `bridge.module.call` tries out whether it does: such a raise is control flow.
"""

from __future__ import annotations

import dis
import functools
import os
import sys
import types
from typing import Any

from bridge.errors import FRAMEWORK, HERE

_CALL = os.path.join(HERE, "module", "call.py")
"""The file that runs the module's code."""
COMPUTED = "something is computed from the value"
_ON_THE_STACK = (
    *("LOAD_", "COMPARE_OP", "BINARY_OP", "BINARY_SUBSCR", "IS_OP", "CONTAINS_OP", "UNARY_", "TO_BOOL"),
    *("COPY", "SWAP", "CACHE", "NOP", "EXTENDED_ARG"),
)
"""Prefixes of instructions that only compute with what is on the stack."""
_COMPUTES = ("COMPARE_OP", "BINARY_", "IS_OP", "CONTAINS_OP")


def check_under_way() -> bool | str | None:
    """Returns the truth value with which the check passes that is asking for the value of a tensor.

    Returns `COMPUTED` if the code first computes something from the value; None if no check is asking.
    """
    frame = _frame_that_asks()
    check = _check_at(frame.f_code, frame.f_lasti)
    if check is not None or frame.f_code.co_name != "<genexpr>" or frame.f_back is None:
        return check
    yielded = _yielded_at(frame.f_code, frame.f_lasti)
    if yielded is None or not _is_judged(frame.f_code, frame.f_back.f_code):
        return None
    passes = _check_at(frame.f_back.f_code, frame.f_back.f_lasti)
    if passes is None:
        return None
    if COMPUTED in (passes, yielded):
        return COMPUTED
    return passes == yielded


def code_that_asks() -> types.CodeType:
    """Returns the code that is asking for the value of a tensor."""
    return _frame_that_asks().f_code


def _frame_that_asks() -> types.FrameType:
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(HERE) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def places_inside_handlers() -> tuple:
    """Returns the places in the code from the check under way up to the call's beginning, those of frameworks left out.

    Empty if none of them is inside of `try` or `with`, so that nothing can catch what the check raises.
    """
    frame: types.FrameType | None = sys._getframe(1)
    places: list[tuple[types.CodeType, int]] = []
    inside = False
    while frame is not None and frame.f_code.co_filename != _CALL:
        code = frame.f_code
        offset = frame.f_lasti
        if not code.co_filename.startswith(FRAMEWORK):
            places.append((code, offset))
            entries: Any = dis.Bytecode(code).exception_entries  # pyright: ignore[reportAttributeAccessIssue]
            inside = inside or any(entry.start <= offset < entry.end for entry in entries)
        frame = frame.f_back
    if inside:
        return tuple(places)
    return ()


def _asking(instructions: list[dis.Instruction], offset: int) -> int:
    """Returns the index of the instruction at an offset; Python 3.11 may run a call in the one that prepares it."""
    at = max(i for i, each in enumerate(instructions) if each.offset <= offset)
    return at + (instructions[at].opname == "PRECALL")


@functools.lru_cache(1024)
def _yielded_at(code: types.CodeType, offset: int) -> bool | str | None:
    """Returns True if the expression yields the truth that it asks for, False if it yields the opposite.

    Returns `COMPUTED` if it first computes something from the value; None if it does something else.
    """
    instructions = list(dis.get_instructions(code))
    same = True
    computed = False
    for instruction in instructions[_asking(instructions, offset) + 1 :]:
        name = instruction.opname
        if name == "YIELD_VALUE":
            return COMPUTED if computed else same
        if not name.startswith(_ON_THE_STACK):
            return None
        same ^= name == "UNARY_NOT"
        computed |= name.startswith(_COMPUTES)
    return None


@functools.lru_cache(1024)
def _is_judged(expression: types.CodeType, around: types.CodeType) -> bool:
    """True if the code around a generator expression gives it to `all` or `any`."""
    loaded = ""
    for instruction in dis.get_instructions(around):
        if instruction.argval is expression:
            return loaded in ("all", "any")
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            loaded = instruction.argval
    return False


@functools.lru_cache(1024)
def _check_at(code: types.CodeType, offset: int) -> bool | str | None:
    instructions = list(dis.get_instructions(code))
    places = {instruction.offset: i for i, instruction in enumerate(instructions)}
    first = i = _asking(instructions, offset)
    passes = True
    computed = False
    while "JUMP" not in instructions[i].opname:
        name = instructions[i].opname
        passes ^= name == "UNARY_NOT"
        # The first instruction is the one that asks: a call, or one that needs a truth value.
        if i != first:
            if not name.startswith(_ON_THE_STACK):
                return None
            computed |= name.startswith(_COMPUTES)
        i += 1
    jump = instructions[i]
    if not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    if_taken = jump.opname.endswith("IF_TRUE")
    for side, truth in ((i + 1, if_taken), (places[jump.argval], not if_taken)):
        if _raises(instructions, places, side):
            if computed:
                return COMPUTED
            return truth == passes
    return None


def _raises(instructions: list[dis.Instruction], places: dict[int, int], i: int) -> bool:
    """True if the following instructions do nothing but raise, if only by an assertion that is False."""
    while True:
        name = instructions[i].opname
        if name == "RAISE_VARARGS" or _asserts_false(instructions[i : i + 3]):
            return True
        if name == "JUMP_FORWARD":
            i = places[instructions[i].argval]
        elif "JUMP" in name or name.startswith(("RETURN", "FOR_", "SEND", "YIELD", "STORE_ATTR", "STORE_SUBSCR")):
            return False
        else:
            i += 1


def _asserts_false(instructions: list[dis.Instruction]) -> bool:
    first, *rest = instructions
    arguments = [each for each in rest if each.opname not in ("PUSH_NULL", "EXTENDED_ARG")]
    of_torch = first.opname.startswith("LOAD_") and first.argval == "_assert"
    return of_torch and bool(arguments) and arguments[0].opname.startswith("LOAD_") and arguments[0].argval is False


def _as_of_python_3_11(instruction: dis.Instruction) -> list[dis.Instruction]:
    """Returns the two instructions that Python 3.13 has as one, such as `STORE_FAST_LOAD_FAST`."""
    if instruction.opname == "LOAD_FAST_CHECK":  # of a name that may have no value, since Python 3.12
        return [instruction._replace(opname="LOAD_FAST")]
    if type(instruction.argval) is not tuple or "_FAST_" not in instruction.opname:
        return [instruction]
    middle = instruction.opname.index("_FAST_") + len("_FAST")
    names = instruction.opname[:middle], instruction.opname[middle + 1 :]
    pairs = zip(names, instruction.argval, strict=True)
    return [instruction._replace(opname=name, argval=argument) for name, argument in pairs]


def only_writes(frame: types.FrameType, rows: Any) -> bool:
    """True if the code is a loop over the rows that leaves nothing behind except what it writes into tensors.

    No name that a turn stores is read by another turn or after the loop, and the loop holds no list, set or dict.
    """
    code = list[dis.Instruction]()
    places = dict[int, int]()
    stored = set[str]()
    for each in dis.get_instructions(frame.f_code):
        places[each.offset] = len(code)
        if each.opname != "EXTENDED_ARG":
            code += _as_of_python_3_11(each)
    start = places[frame.f_lasti]
    end = places.get(code[start].argval, 0)
    of = code[start - 2]  # a name, or a call such as `mask.nonzero()`
    if of.opname == "CALL":
        over_rows = of.argval == 0
    else:
        over_rows = frame.f_locals.get(of.argval) is rows
    if code[start].opname != "FOR_ITER" or "JUMP" not in code[end - 1].opname or not over_rows:
        return False
    body = code[start + 1 : end]
    names = {each.argval for each in body if each.opname == "STORE_FAST"}
    for each in body:
        name = each.opname
        argument = each.argval
        held = frame.f_locals.get(argument) if name == "LOAD_FAST" else None
        if type(held) in (list, dict, set) or (name == "LOAD_FAST" and argument in names - stored):
            return False
        left = "JUMP" in name and not start <= places[argument] < end
        if left or name.startswith(_KEEPS) or name.endswith(("_APPEND", "_ADD")) or "_FAST_" in name:
            return False
        if name == "STORE_FAST":
            stored.add(argument)
    outside = {each.argval for each in (*code[:start], *code[end:]) if each.opname.startswith("LOAD_")}
    return not stored & outside


_KEEPS = ("RETURN", "YIELD", "RAISE", "DELETE", "STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL")
"""Prefixes of instructions that leave something or end a loop, besides `LIST_APPEND` and `SET_ADD`."""
