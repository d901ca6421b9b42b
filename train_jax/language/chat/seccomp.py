"""The system calls that a program of a model may make, as a filter of seccomp, a BPF program that the kernel runs.

Any other call fails like one that the kernel does not have (ENOSYS), for which C libraries have other ways. After the
preparation, no call in the list starts a process or a thread, sends a signal to another process, opens a socket,
mounts, traces, or keeps memory outside of the address space and the files of the sandbox.
"""

from __future__ import annotations

import errno
import platform
import struct

X86 = "x86_64"
ARM = "aarch64"
AUDIT = {X86: 0xC000003E, ARM: 0xC00000B7}
"""AUDIT_ARCH_… of the processors, which a filter compares with that of the call."""

_NUMBERS = {  # on x86-64, on ARM64
    # open files
    "read": (0, 63), "write": (1, 64), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68), "lseek": (8, 62),
    "openat": (257, 56), "close": (3, 57), "close_range": (436, 436), "dup": (32, 23), "dup3": (292, 24),
    "pipe2": (293, 59), "ppoll": (271, 73), "pselect6": (270, 72), "fstat": (5, 80), "ftruncate": (77, 46),
    "fsync": (74, 82), "fdatasync": (75, 83), "getdents64": (217, 61), "fadvise64": (221, 223),
    # names of files; all but the folder for the program's own files are mounted read-only
    "newfstatat": (262, 79), "statx": (332, 291), "faccessat": (269, 48), "faccessat2": (439, 439),
    "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49), "truncate": (76, 45), "mkdirat": (258, 34),
    "unlinkat": (263, 35), "renameat": (264, 38), "renameat2": (316, 276), "linkat": (265, 37), "symlinkat": (266, 36),
    "fchmod": (91, 52), "fchmodat": (268, 53), "utimensat": (280, 88),
    # memory
    "mmap": (9, 222), "munmap": (11, 215), "mremap": (25, 216), "mprotect": (10, 226), "madvise": (28, 233),
    "brk": (12, 214),
    # time, and signals to the process itself
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "nanosleep": (35, 101),
    "gettimeofday": (96, 169), "times": (100, 153), "setitimer": (38, 103), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132), "restart_syscall": (219, 128),
    # the process
    "getpid": (39, 172), "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175),
    "getgid": (104, 176), "getegid": (108, 177), "getgroups": (115, 158), "uname": (63, 160), "sysinfo": (99, 179),
    "getrusage": (98, 165), "prlimit64": (302, 261), "sched_getaffinity": (204, 123), "sched_yield": (24, 124),
    "getcpu": (309, 168), "getrandom": (318, 278), "futex": (202, 98), "set_tid_address": (218, 96),
    "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283), "exit": (60, 93),
    "exit_group": (231, 94),
    # before the program is run: bwrap starts Python, which prepares the rest
    "execve": (59, 221), "mount": (165, 40), "capset": (126, 91), "prctl": (157, 167),
    # with some commands only
    "fcntl": (72, 25), "ioctl": (16, 29),
}  # fmt: skip
_ONLY_X86 = {  # older forms
    "open": 2, "stat": 4, "lstat": 6, "access": 21, "readlink": 89, "dup2": 33, "pipe": 22, "poll": 7, "select": 23,
    "mkdir": 83, "rmdir": 84, "unlink": 87, "rename": 82, "link": 86, "symlink": 88, "chmod": 90, "time": 201,
    "alarm": 37, "getrlimit": 97, "arch_prctl": 158,
}  # fmt: skip
PREPARING = ("execve", "mount", "capset", "prctl")
COMMANDS = {
    "fcntl": (0, 1, 2, 3, 4, 1030),  # duplicate, flags; neither locks and owners, nor the size of a pipe
    "ioctl": (0x5450, 0x5451),  # close on exec
}
"""The commands, the second argument, of the calls that have one."""

_LOAD = 0x20
_IF_EQUAL = 0x15
_IF_AT_LEAST = 0x35
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_KILL = 0x80000000
# in struct seccomp_data; little endian
_NUMBER_OFFSET = 0
_AUDIT_OFFSET = 4
_COMMAND_OFFSET = 24
_OTHER_ABI = 0x40000000
"""From here on, the numbers of x86-64 are those of a second ABI (x32) for the same processor."""


def machine() -> str:
    """Returns the processor as in `AUDIT`. Raises OSError for one that this file does not know."""
    found = platform.machine()
    if found not in AUDIT:
        raise OSError(errno.ENOSYS, f"the processor is {found}, expected {' or '.join(AUDIT)}")
    return found


def calls(machine: str, *, preparing: bool) -> dict[str, int]:
    """Returns the numbers of the allowed calls by their names, with those of `PREPARING` or without."""
    numbers = {name: pair[machine == ARM] for name, pair in _NUMBERS.items()}
    if machine == X86:
        numbers |= _ONLY_X86
    return {name: number for name, number in numbers.items() if preparing or name not in PREPARING}


def compile_filter(machine: str, *, preparing: bool) -> bytes:
    """Returns the filter as an array of `struct sock_filter`, for the kernel."""
    instructions = [
        _instruction(_LOAD, _AUDIT_OFFSET),
        _instruction(_IF_EQUAL, AUDIT[machine], if_true=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_OFFSET),
        _instruction(_IF_AT_LEAST, _OTHER_ABI, if_false=1),
        _instruction(_RETURN, _KILL),
    ]
    for name, number in calls(machine, preparing=preparing).items():
        if name in COMMANDS:
            instructions += _with_commands(number, COMMANDS[name])
        else:
            instructions += [_instruction(_IF_EQUAL, number, if_false=1), _instruction(_RETURN, _ALLOW)]
    instructions.append(_instruction(_RETURN, _ERROR | errno.ENOSYS))
    return b"".join(instructions)


def _with_commands(number: int, commands: tuple[int, ...]) -> list[bytes]:
    """Returns the instructions for one call, allowed if its second argument is one of the commands."""
    body = [_instruction(_LOAD, _COMMAND_OFFSET)]
    for command in commands:
        body += [_instruction(_IF_EQUAL, command, if_false=1), _instruction(_RETURN, _ALLOW)]
    body.append(_instruction(_RETURN, _ERROR | errno.ENOSYS))
    return [_instruction(_IF_EQUAL, number, if_false=len(body)), *body]


def _instruction(code: int, value: int, *, if_true: int = 0, if_false: int = 0) -> bytes:
    """Returns one `struct sock_filter`; the jumps are numbers of instructions to leave out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
