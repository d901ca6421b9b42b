"""Checks of the builders' options: ranges, conflicting options, and available memory and disk space."""

import os
import shutil
from pathlib import Path
from typing import Annotated, Any

from models_torch.ranges import Range, check_ranges
from train_jax.errors import UserError, option_error
from train_jax.run.cache import cache_folder
from train_jax.run.storage import is_remote

MAX_PUZZLES = 10**9
Puzzles = Annotated[int, Range(1, MAX_PUZZLES)]
Augmentations = Annotated[int, Range(0, 10**6 - 1)]
Seed = Annotated[int, Range(0, 2**63 - 1)]


def check_option_ranges(options: Any) -> None:
    """Raises `UserError` for the first field outside its declared range."""
    try:
        check_ranges(options)
    except ValueError as error:
        raise option_error(error) from None


def reject_options(options: Any, reason: str, *names: str) -> None:
    """Raises `UserError` if one of these options is given."""
    for name in names:
        if getattr(options, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} {getattr(options, name)} {reason}; omit it")


def check_memory(needed_bytes: int, remedy: str) -> None:
    """Raises `UserError` if the arrays of a data set are larger than the available memory."""
    available_bytes = available_memory_bytes()
    if needed_bytes > available_bytes:
        raise UserError(
            f"building the data set needs about {needed_bytes / 1e9:,.1f} GB of memory, "
            f"{available_bytes / 1e9:,.1f} GB are available; {remedy}"
        )


def check_disk(directory: Path, needed_bytes: int, remedy: str) -> None:
    """Raises `UserError` if the disk of `directory` has too little free space; the directory need not exist."""
    directory = cache_folder() / "building" if is_remote(directory) else directory
    existing = next((folder for folder in directory.absolute().parents if folder.is_dir()), Path("/"))
    free_bytes = shutil.disk_usage(existing).free
    if needed_bytes > free_bytes:
        digits = 1 if needed_bytes > 1e9 else 6
        raise UserError(
            f"{existing} has {free_bytes / 1e9:,.{digits}f} GB of free space, expected at least "
            f"{needed_bytes / 1e9:,.{digits}f} GB; "
            f"free some space, choose another --output-dir or {remedy}"
        )


def available_memory_bytes() -> int:
    """Returns the memory that is available without swapping; the installed memory if the system does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:")))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
