"""Builds a data set in a temporary folder, which replaces its folder at the end; and the progress of builders."""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from train_jax.errors import StorageError, UserError, brief, check_options
from train_jax.storage.cache import scratch_folder
from train_jax.storage.files import remove_folder, sync, sync_tree, upload_folder
from train_jax.storage.storage import is_remote, path_of


class Builder:
    """A builder of data sets: `trm build-data NAME` fills its fields, checks them, and prints what `made` returns."""

    @property
    def directory(self) -> Path:
        raise NotImplementedError

    def check(self) -> None:
        """Raises `UserError` if a value is out of range or options conflict."""

    def build(self, progress: "Progress") -> bool:
        """Builds the data set; returns False if it exists already."""
        raise NotImplementedError

    def summary(self, built: bool, seconds: float) -> str:
        """Returns the lines about a data set that was built or existed."""
        return f"{path_of(self.directory)} " + (f"built in {seconds:.1f} s" if built else "already exists")

    def made(self, progress: "Progress") -> str:
        """Builds the data set; returns the lines about it."""
        started = time.monotonic()
        built = self.build(progress)
        return self.summary(built, time.monotonic() - started)

    @staticmethod
    def recognises(directory: Path) -> bool:
        """Returns whether a folder is such a data set, for `trm build-data inspect`."""
        return False

    @staticmethod
    def inspected(directory: Path, examples: int, progress: "Progress") -> Iterator[str]:
        """Yields texts about a data set that `recognises` knows, with this number of examples of each split."""
        raise NotImplementedError


class OutputOptions(Builder):
    """Base class of the options of builders that have an `output_dir`."""

    output_dir: Path

    @property
    def directory(self) -> Path:
        return self.output_dir

    def check(self) -> None:
        """Raises `UserError` if a value is out of range."""
        check_options(self)


@dataclass(frozen=True)
class Layout:
    """The layout of the folder of a kind of data set."""

    entries: frozenset[str]
    """All entries; a directory with any other entry is never replaced."""
    last: tuple[str, ...]
    """Files without which the data set is not complete; they are uploaded last."""
    read_record: Callable[[Path], dict[str, Any] | None]
    """Reads the record with the key `recipe` of a complete data set; None if it is not complete."""


def is_built(directory: str | Path, recipe: Mapping[str, Any], layout: Layout, *, overwrite: bool = False) -> bool:
    """Returns whether `directory` already contains the data set of this recipe.

    Raises `UserError` if it contains anything else that may not be replaced.
    """
    directory = path_of(directory)
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return False
    if not directory.is_dir():
        raise UserError(f"{directory} is a file; choose another --output-dir")
    strangers = sorted(entry.name for entry in directory.iterdir() if entry.name not in layout.entries)
    if strangers:
        raise UserError(
            f"{directory} contains {strangers[0]}, which is not part of a data set; choose another --output-dir"
        )
    record = layout.read_record(directory)
    if record is not None and record["recipe"] == _as_json(recipe):
        return True
    if overwrite:
        return False
    difference = _difference(record, recipe)
    raise UserError(f"{directory} contains {difference}; choose another --output-dir or pass --overwrite")


def _difference(record: dict[str, Any] | None, recipe: Mapping[str, Any]) -> str:
    if record is None:
        return "a data set without a valid recipe.json, or without a split"
    existing = record["recipe"]
    requested = _as_json(recipe)
    name = next(name for name in [*requested, *existing] if existing.get(name) != requested.get(name))
    values = [each.get(name) for each in (existing, requested)]
    while all(isinstance(value, dict) for value in values):  # such as a dict of files: the first one that differs
        key = next(key for key in [*values[1], *values[0]] if values[0].get(key) != values[1].get(key))
        name = f"{name}.{key}"
        values = [value.get(key) for value in values]
    values = map(brief, values)
    return "a data set with other options ({} is {}, requested {})".format(brief(name).strip("'"), *values)


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@contextlib.contextmanager
def new_dataset(
    directory: str | Path, recipe: Mapping[str, Any], layout: Layout, *, overwrite: bool = False
) -> Iterator[Path | None]:
    """Yields a temporary folder, which is renamed to `directory` if the block succeeds.

    Yields None if the data set of this recipe already exists. A killed build leaves `directory` unchanged, and the next
    build removes the temporary folder. For a `gs://` path the folder is uploaded instead, the files of `layout.last`
    at the end. Raises the errors of `is_built`, and `StorageError` if the disk is full.
    """
    directory = path_of(directory).absolute()
    if is_remote(directory):
        with _uploaded(directory, recipe, layout, overwrite=overwrite) as building:
            yield building
        return
    building, replaced = (directory.with_name(f".{directory.name}.{state}") for state in ("building", "replaced"))
    with _only_builder_in(directory.parent):
        for leftover in (building, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        if is_built(directory, recipe, layout, overwrite=overwrite):
            yield None
            return
        try:
            yield building
            sync_tree(building)
            if directory.exists():
                os.rename(directory, replaced)
            os.rename(building, directory)
            sync(directory.parent)
        except OSError as error:
            raise StorageError(
                f"{directory} could not be written ({error.strerror}); free some space or choose another --output-dir"
            ) from None
        finally:
            for leftover in (building, replaced):
                shutil.rmtree(leftover, ignore_errors=True)


@contextlib.contextmanager
def _uploaded(directory: Path, recipe: Mapping[str, Any], layout: Layout, *, overwrite: bool) -> Iterator[Path | None]:
    """Yields a folder that is uploaded after the block. If two builders upload at once, readers find other content."""
    if is_built(directory, recipe, layout, overwrite=overwrite):
        yield None
        return
    with scratch_folder() as building:
        try:
            yield building
        except OSError as error:
            raise StorageError(
                f"{building} could not be written ({error.strerror}); free some space or set TRM_CACHE_DIR"
            ) from None
        for name in reversed(layout.last):
            (directory / name).unlink(missing_ok=True)  # the markers of the replaced data set
        remove_folder(directory)
        upload_folder(building, directory, last=layout.last)


@contextlib.contextmanager
def _only_builder_in(parent: Path) -> Iterator[None]:
    """Holds a lock on the parent directory, which needs no lock file; the kernel releases it if a builder is killed."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(parent, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{parent} is not a writable folder ({error.strerror}); choose another --output-dir") from None
    try:
        # Some network file systems have no locks; the user must then avoid two builds at once.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the amount done, and the total amount (0 if unknown)."""
