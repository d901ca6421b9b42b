"""`trm STAGE …`: imports the stage and passes it the remaining arguments. A `UserError` is one line and exit status 2.

Only the stage imports torch and JAX, so that `trm --help` and `trm --version` are fast.
"""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from train_jax import plugin
from train_jax.plugin import Stage

# Further modules are imported in `main`, where Ctrl-C is one line.

GROUPS = ("data", "training", "pods", "evaluation", "results")
"""Headings of `trm --help` in their order; those of a plugin of the user follow."""


def usage(stages: Mapping[str, Stage]) -> str:
    width = max(map(len, stages))
    lines = [
        "usage: trm STAGE [arguments]",
        "       trm STAGE --help    arguments of one stage",
        "       trm --help --all    with the stages of installed plugins",
        "       trm --version       version, commit, and versions of torch, torchax and jax",
    ]
    for group in dict.fromkeys([*GROUPS, *(stage.group for stage in stages.values())]):
        lines += ["", f"{group}:"]
        lines += [f"  {name:<{width}}  {stage.text}" for name, stage in stages.items() if stage.group == group]
    return "\n".join(lines)


INTERRUPTED = 130
"""Exit status after Ctrl-C."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    _accept_every_character()
    try:
        return _main(argv)
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141


def _main(argv: list[str]) -> int:
    """Runs one command line; an error that has one line is printed. Raises every other error, and a broken pipe."""
    from train_jax.errors import LostProcessError, PreemptedError

    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        status = INTERRUPTED
        line = "interrupted"
    except (PreemptedError, LostProcessError) as error:
        status = error.STATUS
        line = str(error)
        _exit_soon(status)
    except Exception as error:
        status, line = _in_one_line(error)
        if not line:
            raise
    print(f"trm: {line}", file=sys.stderr)
    return status


def _in_one_line(error: Exception) -> tuple[int, str]:
    """Returns the exit status and the line for an error; no line for one that is not the user's to correct."""
    from train_jax.errors import UserError, missing_package, os_error, out_of_memory

    if isinstance(error, ImportError):
        error = missing_package(error) or error
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
        error = os_error(error) or error
    if isinstance(error, UserError):
        return error.STATUS, str(error)
    return 1, out_of_memory(error)


def _open_closed_streams() -> None:
    """Opens the null device in place of a standard stream that is closed, as after `>&-`.

    Otherwise the next file that the process opens would be the one that libraries print to.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115 (until the process ends)


def _accept_every_character() -> None:
    """Replaces characters that the encoding of the output lacks by question marks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _exit_soon(status: int) -> None:
    """Ends the process without the work of JAX and torch at exit, which takes seconds on a busy machine."""
    exits = sys.modules.get("train_jax.runtime.exits")
    if exits is not None:
        atexit.register(exits.exit_now, status)


def _run(argv: list[str]) -> int:
    from train_jax.errors import UserError

    files, argv = plugin.take_files(argv)
    for path in files:
        plugin.use_file(path)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(plugin.entries("stages", installed="--all" in argv)))
        return 0 if argv else 2
    name = argv[0]
    if name in ("-V", "--version"):
        from train_jax.version import version_text

        print(version_text())
        return 0
    stage = plugin.find("stages", name)
    if stage is None:
        raise UserError(f"unknown stage {name!r}; use one of {', '.join(plugin.entries('stages'))}")
    arguments = argv[1:]
    restarted = any(word.partition("=")[0] == "--restarts" for word in arguments)
    if name in ("train", "sweep") and (restarted or "--dry-run" not in arguments):
        from train_jax.runtime.supervisor import connect_to_supervisor, restarts_option, supervise

        restarts, arguments = restarts_option(arguments) if name == "train" else (0, arguments)
        if restarts and not {"-h", "--help", "--dry-run"} & set(arguments):
            return supervise([*plugin.file_options(), *arguments], restarts)
        connect_to_supervisor()
    with preempted_before_start() if name == "train" else contextlib.nullcontext():
        target = _load(stage)
        from train_jax.command_line import run_stage  # imports tyro, which `trm --help` does not need

        if signal.getsignal(signal.SIGINT) is _end_interrupted:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on there may be something to close
        run_stage(name, target, arguments)
    return 0


def _load(stage: Stage) -> Any:
    """Imports a stage without garbage collections, which would scan the imported objects again and again.

    Later ones leave it out, too: modules stay until the process ends.
    """
    if stage.target.partition(":")[0] in sys.modules or not gc.isenabled():
        return plugin.load_object(stage.target, "stage")
    gc.disable()
    try:
        target = plugin.load_object(stage.target, "stage")
    finally:
        gc.enable()
    gc.freeze()
    return target


@contextlib.contextmanager
def preempted_before_start() -> Iterator[None]:
    """Makes SIGTERM end a run that has not begun as it ends a run later; there is nothing to save yet."""

    from train_jax.errors import PreemptedError

    def stop(*_: object) -> None:
        raise PreemptedError(0)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def command(argv: list[str] | None = None) -> int:
    """Runs the program `trm` in its own process: after `main`, the process ends without dismantling the interpreter.

    While Python dismantles itself, threads of C++ libraries that release Python objects abort the process at times
    ("FATAL: exception not rethrown"), after a run that has finished.
    """
    statuses: list[int] = []
    atexit.register(_end, statuses)  # the first one registered is the last one called, after those of all libraries
    _open_closed_streams()
    handles_interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not under `nohup`
    if handles_interrupts:
        signal.signal(signal.SIGINT, _end_interrupted)
    statuses.append(main(argv))
    if handles_interrupts:
        signal.signal(signal.SIGINT, lambda *_: os._exit(statuses[0]))
    return statuses[0]


def _end_interrupted(*_: object) -> None:
    """Ends the process at once after Ctrl-C, while modules are imported.

    An exception would be lost, or printed, in code of libraries, as after the command.
    """
    with contextlib.suppress(OSError):
        os.write(2, b"trm: interrupted\n")
    os._exit(INTERRUPTED)


def _end(statuses: list[int]) -> None:
    """Ends the process with the status of `main`; does nothing if `main` has raised an error."""
    if statuses:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(statuses[0])


if __name__ == "__main__":
    sys.exit(command())
