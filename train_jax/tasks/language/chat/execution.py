"""Runs Python programs that a model wrote, apart from everything else.

A program has namespaces of its own: no network, no other processes, all files read-only. What it writes goes to one
small file system in memory, which also hides the folders where sockets of services are. It has one process without
rights, so that it can undo none of this, and one limit of memory, as of time; an attempt at another process is its end.
This file is also the script of the process that prepares all that; the script imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import os
import resource
import secrets
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

SECONDS = 5
MEMORY_BYTES = 2**30
FILE_BYTES = 2**24
OUTPUT_CHARACTERS = 2**16
_REFUSED, _TIMED_OUT = 125, 124
_HIDDEN = ("/run", "/proc", "/tmp", "/var/tmp", "/dev/shm", "/home", "/root")
_WORK = "/run"

_NEW = {"user": 0x10000000, "net": 0x40000000, "mount": 0x00020000, "pid": 0x20000000, "ipc": 0x08000000}
_RECURSIVE, _PRIVATE, _BIND, _NO_SUID, _NO_DEVICES = 0x4000, 0x40000, 0x1000, 2, 4
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _SECCOMP_FILTER, _CAPABILITIES = 38, 22, 2, 0x20080522


class Machine(NamedTuple):
    """Numbers of Linux on a processor."""

    audit: int
    clone: int
    kill: int
    ending: tuple[int, ...]
    """Calls that start a program or a process, enter namespaces, or have memory without a limit: the program's end."""


_MACHINES = {  # ending: execve, execveat, unshare, setns, shmget; fork and vfork
    "x86_64": Machine(0xC000003E, 56, 62, (59, 322, 272, 308, 29, 57, 58)),
    "aarch64": Machine(0xC00000B7, 220, 129, (221, 281, 97, 268, 194)),
}
_CLONE3, _CLONE_THREAD, _OTHER_ABI = 435, 0x10000, 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_BY_LIMIT = (signal.SIGKILL, signal.SIGXCPU)


class Execution(NamedTuple):
    """The result of a program."""

    passed: bool
    """True if the program ended without an error, in time."""
    output: str = ""
    """The text that the program printed; empty if it did not come to its end."""
    error: str = ""
    timed_out: bool = False


def passes(program: str, seconds: int = SECONDS) -> bool:
    """Returns True if a program ends without an error, in time. Raises `UserError` as `execute` does."""
    return execute(program, seconds).passed


def execute(program: str, seconds: int = SECONDS) -> Execution:
    """Runs a program. Raises `UserError` where the kernel does not keep it apart: nothing is run then."""
    from train_jax.errors import UserError

    mark = secrets.token_hex(16)  # begins the report, so that a program cannot write one at a guess
    command = [sys.executable, "-I", __file__, str(seconds)]
    try:
        content = f"{mark}{program}".encode()
        done = subprocess.run(command, input=content, capture_output=True, env={}, timeout=seconds + 20)
    except UnicodeEncodeError as error:
        return Execution(False, error=f"UnicodeEncodeError: {error}")
    except subprocess.TimeoutExpired:
        return Execution(False, error=f"it did not end in {seconds} s", timed_out=True)
    if done.returncode == _REFUSED or sys.platform != "linux":
        reason = done.stderr.decode(errors="replace").strip()[:200]
        raise UserError(f"programs cannot be run apart from the network and files here ({reason}); leave humaneval out")
    if done.returncode == _TIMED_OUT:
        return Execution(False, error=f"it did not end in {seconds} s", timed_out=True)
    said, error, output = (*done.stdout.decode(errors="replace").split("\n", 2), "", "")[:3]
    if said != mark:
        return Execution(False, error="it ended its process, or did what ends it")
    return Execution(not error, output, error)


# ---- the script


def _prepare(libc: ctypes.CDLL) -> None:
    """Enters the namespaces. Raises OSError if one of the steps is not allowed."""
    user, group = os.getuid(), os.getgid()
    _check(libc.unshare(sum(_NEW.values())), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(content)
    _check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "mount")
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    _check(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, size), "mount_setattr")
    _hide(libc)
    os.chdir(_WORK)


def _check(result: int, step: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{step}: {os.strerror(number)}")


def _hide(libc: ctypes.CDLL) -> None:
    """Mounts an empty folder over each hidden one, with Python's own folders in it if they were there.

    The empty folders are in one file system in memory, so that there is one limit. The last one hides its root.
    """

    def bind(source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        _check(libc.mount(bytes(source), bytes(target), None, _BIND | _RECURSIVE, None), f"{source} on {target}")

    hidden = [folder for folder in map(Path, _HIDDEN) if folder.is_dir()]
    python = {Path(each).absolute() for each in (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))}
    places = {each for path in python for each in (path, path.resolve())}
    sources = {path: path.resolve() for path in sorted(places)}
    options = f"size={FILE_BYTES}".encode()
    _check(libc.mount(b"tmpfs", _WORK.encode(), b"tmpfs", _NO_SUID | _NO_DEVICES, options), "tmpfs")
    for number, folder in enumerate(reversed(hidden)):  # the last one is that of the work
        empty, place = Path(_WORK, f"{number}"), folder.resolve()
        empty.mkdir()
        for path, source in sources.items():
            if path.is_relative_to(place):
                bind(source, empty / path.relative_to(place))
        bind(empty, folder)


def _limit(seconds: int) -> None:
    limits = {"CPU": seconds, "AS": MEMORY_BYTES, "FSIZE": FILE_BYTES, "NOFILE": 64, "CORE": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _give_up_rights(libc: ctypes.CDLL) -> None:
    """Drops rights for good: the process can then neither change its mounts nor start another process."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"the processor is {machine}")
    header, none = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0), (ctypes.c_uint32 * 6)()
    _check(libc.capset(header, none), "capset")
    _check(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    program = _filter(_MACHINES[machine])
    content = b"".join(code.to_bytes(2, sys.byteorder) + bytes(jumps) + value.to_bytes(4, sys.byteorder)
                       for code, jumps, value in program)  # fmt: skip

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("content", ctypes.c_char_p))

    _check(libc.prctl(_SET_SECCOMP, _SECCOMP_FILTER, ctypes.byref(Filter(len(program), content)), 0, 0), "seccomp")


def _filter(machine: Machine) -> list[tuple[int, tuple[int, int], int]]:
    """Returns the instructions that the kernel follows at each call: code, jumps if true and false, value."""

    def when(code: int, value: int, action: int) -> list[tuple[int, tuple[int, int], int]]:
        return [(code, (0, 1), value), (_RETURN, (0, 0), action)]

    ending = [each for number in machine.ending for each in when(_IF_EQUAL, number, _KILL)]
    return [
        *((_LOAD, (0, 0), 4), (_IF_EQUAL, (1, 0), machine.audit), (_RETURN, (0, 0), _KILL)),
        *((_LOAD, (0, 0), 0), *when(_IF_AT_LEAST, _OTHER_ABI, _KILL), *ending),
        *when(_IF_EQUAL, machine.kill, _ERROR | errno.EPERM),
        *when(_IF_EQUAL, _CLONE3, _ERROR | errno.ENOSYS),  # its flags are in memory; the C library then calls clone
        *((_IF_EQUAL, (1, 0), machine.clone), (_RETURN, (0, 0), _ALLOW)),
        *((_LOAD, (0, 0), 16), *when(_IF_SET, _CLONE_THREAD, _ALLOW), (_RETURN, (0, 0), _KILL)),
    ]


def _run(program: str, seconds: int, mark: str) -> None:
    """Runs the program in this process, the first one of its namespace, and reports its output and error."""
    says, write = os.dup(1), os.write
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    _limit(seconds)
    output, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException as raised:  # also SystemExit and KeyboardInterrupt
        error = " ".join(traceback.format_exception_only(raised)[-1].split())[:OUTPUT_CHARACTERS] or "an error"
    write(says, f"{mark}\n{error}\n{output.getvalue()[:OUTPUT_CHARACTERS]}".encode(errors="replace"))


def _main(seconds: int) -> int:
    """Starts the program in a process, whose end is the end of all that it did."""
    content = sys.stdin.buffer.read().decode()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        _prepare(libc)
    except (OSError, AttributeError) as error:
        sys.stderr.write(str(error))
        return _REFUSED
    ready, reports = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _give_up_rights(libc)
        except (OSError, AttributeError) as error:
            sys.stderr.write(str(error))
            sys.stderr.flush()
            os._exit(_REFUSED)
        os.write(reports, b"1")
        for each in (ready, reports):
            os.close(each)
        try:
            _run(content[32:], seconds, content[:32])
        finally:
            os._exit(0)
    os.close(reports)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(seconds)
    if not os.read(ready, 1):
        return _REFUSED
    _, status = os.waitpid(child, 0)
    return _TIMED_OUT if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _BY_LIMIT else 0


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1])))
