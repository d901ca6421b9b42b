"""The script inside the sandbox: runs a program and answers calls of its functions, or runs tests that make such calls.

Messages are JSON, one on each line, on standard input and output. Values go as data, so that whoever compares them has
none of the other side's code.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import io
import json
import os
import resource
import sys
from collections.abc import Iterator

TYPE_CHECKING = False  # as in typing, whose import takes a fifth of the start
if TYPE_CHECKING:
    from typing import Any, BinaryIO

FILES = "/files"
MEMORY_BYTES = 2**30
FILE_BYTES = 2**24
FILE_COUNT = 1024
OPEN_FILES = 64
OUTPUT_CHARACTERS = 2**16

_READ_ONLY = 1
_NO_SUID = 2
_NO_DEVICES = 4
_NO_EXEC = 8
_REMOUNT = 32
_BIND = 4096
_DUMPABLE = 4
_NO_NEW_PRIVILEGES = 38
_SET_SECCOMP = 22
_SECCOMP_FILTER = 2
_CAPABILITIES = 0x20080522
_CONTAINERS = {each.__name__: each for each in (list, tuple, set, frozenset, dict)}
_NUMBERS = {"Decimal": "decimal", "Fraction": "fractions"}


class NoDataError(TypeError):
    """A value is not data of the types that messages have."""


# ---- before the program is run


def _prepare(filter: bytes, seconds: int) -> None:
    """Mounts the folder for the program's files, sets the limits, and gives up all rights. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"size={FILE_BYTES},nr_inodes={FILE_COUNT},mode=700".encode()  # bwrap would limit the size alone
    flags = _NO_SUID | _NO_DEVICES | _NO_EXEC
    _check(libc.mount(b"tmpfs", FILES.encode(), b"tmpfs", flags, options), "mount")
    flags = _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_EXEC
    _check(libc.mount(None, os.devnull.encode(), None, flags, None), "mount")  # else root could change its mode
    os.chdir(FILES)
    limits = {"AS": MEMORY_BYTES, "FSIZE": FILE_BYTES, "NOFILE": OPEN_FILES}
    limits["CPU"] = seconds + 1  # the parent, which has a clock, may be stopped
    for name, most in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(kind)
        lower = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (lower, lower))
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, nothing), "capset")
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    _check(libc.prctl(_DUMPABLE, 0, 0, 0, 0), "dumpable")  # at a crash, the kernel starts no collector of cores outside

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("content", ctypes.c_char_p))

    program = Program(len(filter) // 8, filter)
    _check(libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(program), 0, 0), "seccomp")


def _check(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


# ---- messages


def encode(value: Any) -> Any:
    """Returns a value for JSON: text, a number, None, or a list of a type's name and its content.

    What is like one of the types becomes it, such as a named tuple or a number of NumPy. Raises `NoDataError` for
    other objects.
    """
    if getattr(value, "shape", None) == ():
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 64:
        return ["int", hex(value)]  # Python limits the digits of decimal numbers
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, bytes):
        return ["bytes", value.hex()]
    if isinstance(value, Iterator):
        return ["iterator", [encode(each) for each in value]]
    for name, kind in _CONTAINERS.items():
        if isinstance(value, kind):
            elements = value.items() if isinstance(value, dict) else value
            return [name, [encode(each) for each in elements]]
    kind = type(value)
    if _NUMBERS.get(kind.__name__) == kind.__module__:
        return [kind.__name__, str(value)]
    raise NoDataError(f"{kind.__name__} is not data: a number, text, bytes, list, tuple, set or dict")


def decode(value: Any) -> Any:
    """Returns the value of `encode`. Raises an exception, of any type, for what does not have that form."""
    if not isinstance(value, list):
        return value
    name, content = value
    if name == "int":
        return int(content, 16)
    if name == "complex":
        return complex(*content)
    if name == "bytes":
        return bytes.fromhex(content)
    if name in _NUMBERS:
        return getattr(__import__(_NUMBERS[name]), name)(content)
    elements = [decode(each) for each in content]
    return iter(elements) if name == "iterator" else _CONTAINERS[name](elements)


class Peer:
    """The other end of the pipes."""

    def __init__(self, reads: BinaryIO, writes: BinaryIO):
        self._reads = reads
        self._writes = writes

    def read(self) -> dict[str, Any]:
        """Returns the next message. Raises EOFError at the end."""
        line = self._reads.readline()
        if not line:
            raise EOFError("no further message")
        return json.loads(line)

    def write(self, message: dict[str, Any]) -> None:
        self._writes.write(json.dumps(message).encode() + b"\n")
        self._writes.flush()


# ---- the two roles


def serve_program(peer: Peer, program: str) -> None:
    """Runs a program, reports its output and error, and then answers calls of its functions."""
    del os.system  # it would return a status, which few programs read; all else that starts a process raises OSError
    space: dict[str, Any] = {"__name__": "__main__"}
    output = io.StringIO()
    error = ""
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(program, "<program>", "exec"), space)
    except BaseException as raised:  # also SystemExit and KeyboardInterrupt
        error = _line_of(raised)
    peer.write({"error": error, "output": output.getvalue()[:OUTPUT_CHARACTERS]})
    while True:
        peer.write(_answer(space, peer.read()))


def _answer(space: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            positional, named = decode(message["arguments"])
            return {"value": encode(space[message["call"]](*positional, **named))}
    except BaseException as raised:
        return {"raised": type(raised).__name__, "text": _line_of(raised)}


def run_tests(peer: Peer, tests: str, prompt: str, name: str) -> None:
    """Runs tests, whose `check` gets a function that calls `name` of the program, and reports the verdict."""

    def candidate(*positional: Any, **named: Any) -> Any:
        peer.write({"call": name, "arguments": encode((positional, named))})
        reply = peer.read()
        if "raised" in reply:
            raise _exception_type(str(reply["raised"]))(reply.get("text"))
        return decode(reply["value"])

    space: dict[str, Any] = {"__name__": "__main__"}
    verdict: dict[str, Any] = {"passed": False}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            with contextlib.suppress(SyntaxError):  # a prompt that the answer completes
                exec(compile(prompt, "<prompt>", "exec"), space)  # tests also call functions of the prompt
            space[name] = candidate
            exec(compile(tests, "<tests>", "exec"), space)
            space["check"](candidate)
        verdict["passed"] = True
    except NoDataError as error:
        verdict["refused"] = str(error)
    except BaseException as error:
        verdict["error"] = _line_of(error)
    peer.write(verdict)


def _exception_type(name: str) -> type[Exception]:
    kind = getattr(builtins, name, None)
    return kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError


def _line_of(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return " ".join(text.split())[:OUTPUT_CHARACTERS]


def _main(filter: str, seconds: str, *folders: str) -> None:
    sys.path += folders
    _prepare(bytes.fromhex(filter), int(seconds))
    peer = Peer(os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb"))
    peer.write({"ready": True})
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    os.close(nothing)
    message = peer.read()
    if "program" in message:
        serve_program(peer, **message)
    else:
        run_tests(peer, **message)


if __name__ == "__main__":
    _main(*sys.argv[1:])
