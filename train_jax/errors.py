"""The exceptions that are one line and an exit status, never a traceback; errors for modules that have moved."""

import errno
import sys
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar

from models_torch.ranges import check_ranges


class UserError(Exception):
    """A mistake of the user; the message contains the value, the expected value and the remedy, in one line."""

    STATUS: ClassVar[int] = 2
    """Exit status."""

    def __init__(self, message: str):
        line = " ".join(message.split())  # a name in it may hold any character
        super().__init__("".join(x if x.isprintable() else repr(x)[1:-1] for x in line))


class StorageError(UserError):
    """Files cannot be read or written although the command is right: a full disk, a service that does not answer. What
    was saved before is intact."""

    STATUS: ClassVar[int] = 74
    """Exit status, that of an input or output error (EX_IOERR)."""


class PreemptedError(Exception):
    """A run that stopped because of SIGTERM, saved after `step`. No mistake: the same command continues it."""

    STATUS: ClassVar[int] = 75
    """Exit status, that of a temporary failure (EX_TEMPFAIL)."""

    def __init__(self, step: int):
        done = f"saved after step {step}" if step else "before the first step"
        super().__init__(f"stopped by SIGTERM, {done}; the same command continues the run")


class LostProcessError(Exception):
    """Another process of the run died or hangs, so this one cannot go on. The same command continues the run."""

    STATUS: ClassVar[int] = 69
    """Exit status, that of a service that is not available (EX_UNAVAILABLE)."""

    def __init__(self, index: int, host: str, reason: str):
        where = f" on {host}" if host else ""
        super().__init__(
            f"process {index}{where} {reason}; stopped. Start all processes again: they continue from the newest "
            "checkpoint"
        )


def out_of_memory(error: BaseException) -> str:
    """Returns the message for JAX's error of a device without free memory; empty for another error."""
    text = str(error)
    if type(error).__name__ not in ("JaxRuntimeError", "XlaRuntimeError") or "RESOURCE_EXHAUSTED" not in text:
        return ""
    reason = text[text.index("RESOURCE_EXHAUSTED") :].splitlines()[0][:200]
    return (
        f"a device is out of memory ({reason}); use a smaller batch, --compute.accumulation-steps, --compute.remat or "
        "more devices; `trm preflight` compares what a train step needs with what a device has"
    )


FULL_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
WRONG_PATH = {
    errno.ENOENT: "give a path that exists",
    errno.ENAMETOOLONG: "use a shorter name",
    errno.EISDIR: "give a file, not a folder",
    errno.ENOTDIR: "give a path whose folders are not files",
    errno.EEXIST: "give a path whose folders are not files",
    errno.ELOOP: "give a path without a circle of links",
}
"""Errors of a path that no disk could have, and what to do."""
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def os_error(error: OSError) -> UserError | None:
    """Returns the error in one line if it concerns a path or a full disk; None for another one, such as of a socket."""
    path = error.filename2 or error.filename
    if error.errno in FULL_DISK:
        return StorageError(f"{_text(path) or 'a file'} cannot be written ({error.strerror}); free some space")
    if not isinstance(path, str | bytes) or not error.strerror:
        return None
    forbidden = "use another path" + ", or change its permissions" * (error.errno in _FORBIDDEN)
    return UserError(f"{_text(path)}: {error.strerror}; {WRONG_PATH.get(error.errno or 0, forbidden)}")


def _text(path: Any) -> str:
    return path.decode(errors="replace") if isinstance(path, bytes) else str(path or "")


def check_fields(config: Any, prefix: str = "") -> None:
    """Raises `UserError` for the first field outside its declared range: "optim.lr is -1; use at least 0"."""
    try:
        check_ranges(config)
    except ValueError as error:
        raise UserError(f"{prefix}{error}") from None


def check_options(options: Any) -> None:
    """Raises `UserError` like `check_fields`, with the name of the option: "--num-aug is -1; use at least 0"."""
    try:
        check_ranges(options)
    except ValueError as error:
        name, _, rest = str(error).partition(" ")
        raise UserError(f"--{name.replace('_', '-')} {rest}") from None


def brief(value: Any) -> str:
    """Formats an untrusted value for a message: shortened, and only the first elements of a list."""
    if isinstance(value, list):
        shown = [repr(each)[:20] if isinstance(each, int | float | str) else type(each).__name__ for each in value[:3]]
        return f"[{', '.join(shown)}{', …' * (len(value) > 3)}]"
    return repr(value)[:40] if isinstance(value, int | float | str | None) else f"a {type(value).__name__}"


EXTRAS = {
    "train": ("optax", "orbax", "wandb", "matplotlib", "jinja2", "rich", "etils", "flatbuffers"),
    "text": ("rustbpe", "tiktoken", "pyarrow", "yaml"),
    "chat": ("chatterbot_corpus",),
    "serve": ("starlette", "uvicorn", "sse_starlette"),
    "gcs": ("gcsfs", "google", "google_crc32c", "aiohttp"),
    "reasoning": ("reasoning_gym",),
}
"""Extra -> the top-level packages that commands import of it."""


def pip_install(extra: str) -> str:
    """Returns the command that installs an extra of this project, as words of an error."""
    if (Path(__file__).parents[1] / "constraints.txt").is_file():
        return f"`pip install -c constraints.txt -e '.[{extra}]'`"
    return f"`pip install 'trm-bridge[{extra}]'`"


def missing_package(error: ImportError) -> UserError | None:
    """Returns the error that names the extra with the package, or the distribution that hides our package `bridge`."""
    package = (error.name or "").partition(".")[0]
    if package == "bridge":
        owners = metadata.packages_distributions().get("bridge", [])
        others = ", ".join(sorted(set(owners) - {"trm-bridge"})) or "another folder"
        return UserError(
            f"the package `bridge` in {error.path} is not that of this project but of {others}; install each in an "
            "environment of its own, or this one with `pip install --target FOLDER` and FOLDER first in PYTHONPATH"
        )
    for extra, packages in EXTRAS.items():
        if package in packages:
            return UserError(f"this command needs the package {package}; install it with {pip_install(extra)}")
    return None


MOVED = {
    "train_jax.hooks": "train_jax.trainer.hooks",
    "train_jax.loop": "train_jax.trainer.loop",
    "train_jax.optim": "train_jax.core.optim",
    "train_jax.session": "train_jax.trainer.session",
    "train_jax.tasks.language": "train_jax.language",
    "train_jax.tasks.puzzles": "train_jax.puzzles",
    "train_jax.tasks": "train_jax.puzzles or train_jax.language",
}
"""Modules that the documentation named before."""


class _Finder:
    """The last of Python's finders: asked for a module that no other one has found."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        for old, new in MOVED.items():
            # A folder that is left with nothing but compiled files is found as an empty package, so names in it count.
            if f"{name}.".startswith(f"{old}."):
                raise ModuleNotFoundError(f"{name} has moved; import {new}{name.removeprefix(old)}", name=name)


def explain_moved_modules() -> None:
    """Makes an import of a module that has moved say where it is now."""
    sys.meta_path.append(_Finder)
