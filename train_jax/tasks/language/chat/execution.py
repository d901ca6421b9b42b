"""Runs Python programs that a model wrote, apart from everything else.

A program has namespaces of its own: no network, no other processes, all files read-only. What it writes goes to a small
file system in memory, which also hides the folders where sockets of services are. Its time and memory are limited. This
file is also the script of the process that prepares all that; the script imports only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

SECONDS = 5
MEMORY_BYTES = 2**30
FILE_BYTES = 2**24
_REFUSED = 125
_PASSED = b"passed"
_HIDDEN = ("/run", "/proc", "/tmp", "/var/tmp", "/dev/shm", "/home", "/root")
_WORK = "/run"

_NEW = {"user": 0x10000000, "net": 0x40000000, "mount": 0x00020000, "pid": 0x20000000, "ipc": 0x08000000}
_RECURSIVE, _PRIVATE, _BIND, _NO_SUID, _NO_DEVICES, _DETACH = 0x4000, 0x40000, 0x1000, 2, 4, 2
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 1


def passes(program: str, seconds: int = SECONDS) -> bool:
    """Returns whether a program comes to its end without an error, in time.

    Raises `UserError` where the kernel allows no namespaces: nothing is run then.
    """
    from train_jax.errors import UserError

    command = [sys.executable, "-I", __file__, str(seconds)]
    try:
        done = subprocess.run(command, input=program.encode(), capture_output=True, env={}, timeout=seconds + 20)
    except (subprocess.TimeoutExpired, UnicodeEncodeError):
        return False
    if done.returncode == _REFUSED or sys.platform != "linux":
        reason = done.stderr.decode(errors="replace").strip()[:200]
        raise UserError(f"programs cannot be run apart from the network and files here ({reason}); leave humaneval out")
    return done.stdout == _PASSED


# ---- the script


def _prepare(libc: ctypes.CDLL) -> None:
    """Enters the namespaces. Raises OSError if one of the steps is not allowed."""

    def check(result: int, step: str) -> None:
        if result != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{step}: {os.strerror(number)}")

    user, group = os.getuid(), os.getgid()
    check(libc.unshare(sum(_NEW.values())), "unshare")
    for name, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(content)
    check(libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None), "mount")
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    size = ctypes.sizeof(attributes)
    check(libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, size), "mount_setattr")
    _hide(libc, check)
    os.chdir(_WORK)


def _hide(libc: ctypes.CDLL, check: Callable[[int, str], None]) -> None:
    """Mounts empty file systems over the hidden folders, and Python's own folders into them where they were there."""

    def bind(source: Path, target: Path) -> None:
        target.mkdir(parents=True, exist_ok=True)
        check(libc.mount(bytes(source), bytes(target), None, _BIND | _RECURSIVE, None), f"{source} on {target}")

    hidden = [folder for folder in map(Path, _HIDDEN) if folder.is_dir()]
    python = {Path(each).absolute() for each in (sys.prefix, sys.base_prefix, os.path.dirname(os.__file__))}
    places = {each for path in python for each in (path, path.resolve())}
    inside = sorted(each for each in places if any(each.is_relative_to(folder.resolve()) for folder in hidden))
    kept = [Path(_WORK, f".python{number}") for number in range(len(inside))]
    for folder in hidden:  # the first one is that of the work
        options = f"size={FILE_BYTES}".encode()
        check(libc.mount(b"tmpfs", bytes(folder), b"tmpfs", _NO_SUID | _NO_DEVICES, options), f"tmpfs on {folder}")
        if folder == Path(_WORK):
            for path, place in zip(inside, kept, strict=True):
                bind(path.resolve(), place)
    for path, place in zip(inside, kept, strict=True):
        bind(place, path)
        check(libc.umount2(bytes(place), _DETACH), f"unmount {place}")
        place.rmdir()


def _limit(seconds: int) -> None:
    limits = {"CPU": seconds, "AS": MEMORY_BYTES, "FSIZE": FILE_BYTES, "NOFILE": 64, "CORE": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def _run(program: str, seconds: int) -> None:
    """Runs the program in this process, the first one of its namespace; says so if it comes to its end."""
    says = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    _limit(seconds)
    try:
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
    except BaseException:  # also SystemExit and KeyboardInterrupt
        os._exit(1)
    os.write(says, _PASSED)
    os._exit(0)


def _main(seconds: int) -> int:
    """Starts the program in a process, whose end is the end of all processes that it started."""
    program = sys.stdin.buffer.read().decode()
    try:
        _prepare(ctypes.CDLL(None, use_errno=True))
    except (OSError, AttributeError) as error:
        sys.stderr.write(str(error))
        return _REFUSED
    child = os.fork()
    if child == 0:
        _run(program, seconds)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.alarm(seconds)
    os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(_main(int(sys.argv[1])))
