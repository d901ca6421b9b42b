"""Common parts of the builders: their options, checks of free space, public tables, splits."""

import codecs
import csv
import hashlib
import importlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, TextIO, TypeVar

import numpy as np
from jaxtyping import Bool, Integer, UInt8, UInt64
from tyro.conf import arg

from models_torch.ranges import Range
from train_jax.errors import UserError, check_options
from train_jax.puzzles.inspection import build_summary
from train_jax.puzzles.kind import Kind
from train_jax.puzzles.metadata import (
    SPLITS,
    Metadata,
    Splits,
    array_path,
    content_of,
    published_fields,
    read_recipe,
    write_json,
    write_record,
)
from train_jax.puzzles.symmetries import first_of_each
from train_jax.puzzles.terminal import inspection_text
from train_jax.storage.cache import cache_folder
from train_jax.storage.new_dataset import Builder, Layout, Progress, is_built, new_dataset
from train_jax.storage.storage import fetch, is_remote, path_of
from train_jax.storage.untrusted import POINTER, is_lfs_pointer

MAX_PUZZLES = 10**9
Puzzles = Annotated[int, Range(1, MAX_PUZZLES)]
Augmentations = Annotated[int, Range(0, 10**6 - 1)]
Seed = Annotated[int, Range(0, 2**63 - 1)]


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


# ---- public tables

COLUMNS = ["source", "question", "answer", "rating"]
NAMES = {"train": "train.csv", "test": "test.csv"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
URL = re.compile(r"([a-z][a-z0-9+.-]*)://.+")
LONGEST_LINE = 2**16
"""Limit in characters, twelve times that of a 50x50 maze with its answer; longer lines are not read completely."""
CLIENTS = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs"}
"""The package that fsspec needs for each URL scheme."""

TableRow = tuple[int, list[str]]
"""The line number of the end of a row, and its columns."""
Part = TypeVar("Part")


@contextmanager
def local_tables(source: str | None, *, hub_example: str) -> Iterator[dict[str, Path]]:
    """Yields the paths of the train and test tables; `source` is a folder, a bucket or a hub id.

    Files from a bucket are removed at the end of the block. Without a source there are no tables.
    """
    if source is None:
        yield {}
        return
    with tempfile.TemporaryDirectory() as scratch:
        tables = {split: _table(source, name, hub_example, Path(scratch)) for split, name in NAMES.items()}
        try:
            yield tables
        except OSError as error:
            raise UserError(
                f"--source {source} cannot be read ({error.strerror}); give a folder with train.csv and test.csv"
            ) from None


def _table(source: str, name: str, hub_example: str, scratch: Path) -> Path:
    """Returns the local path of a table."""
    path = Path(source) / name
    url = URL.fullmatch(source)
    if path.is_file():
        return path
    if Path(source).exists():
        raise UserError(f"{path} is missing; --source needs a folder with train.csv and test.csv")
    if not url and not HUB_ID.fullmatch(source):
        raise UserError(
            f"--source {source} does not exist; give a folder or a bucket (gs://…) with train.csv and test.csv, or a "
            f"data set of the Hugging Face hub such as {hub_example}"
        )
    package = f"fsspec {CLIENTS.get(url[1], '')}".strip() if url else "huggingface_hub"
    local = "copy train.csv and test.csv to a local folder and give that"
    try:
        if not url:
            return Path(importlib.import_module("huggingface_hub").hf_hub_download(source, name, repo_type="dataset"))
        fetch(f"{source.rstrip('/')}/{name}", scratch / name)
        return scratch / name
    except ImportError:
        raise UserError(f"--source {source}: reading it needs `pip install {package}`; or {local}") from None
    # Every client has its own exception classes, for a missing bucket, missing credentials or no network.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{name} in {source} could not be read ({reason}); check the address, the network and your credentials, or "
            f"{local}"
        ) from None


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_BYTE_ORDER_MARK = codecs.BOM_UTF8.decode("latin-1")


def chunks_of(path: Path, *, rows: int, remedy: str) -> Iterator[list[TableRow]]:
    """Yields the rows of a table, `rows` at a time. Raises `UserError` if the header or a row is invalid."""
    # Latin-1 decodes any byte, so that an invalid one is reported with its line number.
    with path.open(newline="", encoding="latin-1") as file:
        if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
            file.seek(0)
        lines = _rows(path, csv.reader(_lines(path, file), strict=True))
        if next(lines, (1, []))[1] != COLUMNS:
            if is_lfs_pointer(path):
                raise UserError(f"{path} cannot be read: {POINTER}")
            raise UserError(f"{path} line 1: expected the header {','.join(COLUMNS)}; {remedy}")
        empty = True
        while chunk := list(islice(lines, rows)):
            empty = False
            yield chunk
        if empty:
            raise UserError(f"{path} has no rows below its header; {remedy}")


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        if len(line) > LONGEST_LINE:
            raise bad_row(path, number, f"longer than {LONGEST_LINE:,} characters")
        yield line


def _rows(path: Path, reader) -> Iterator[TableRow]:
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise bad_row(path, reader.line_num, str(error)) from None


def bad_row(path: Path, line: int, problem: str) -> UserError:
    return UserError(f"{path} line {line}: {problem}; correct or remove the line (nothing was written)")


def problem_with(row: list[str], cells: int) -> str:
    """Describes why a row is malformed, given the number of cells of its puzzle; "" if it is well formed."""
    if len(row) != len(COLUMNS):
        return f"{len(row)} columns, expected {len(COLUMNS)} ({','.join(COLUMNS)})"
    for name, text in zip(COLUMNS[1:3], row[1:3], strict=True):
        if len(text) != cells:
            return f"the {name} has {len(text)} cells, expected {cells}"
    return ""


def read_rows(
    path: Path,
    read: Callable[[Sequence[TableRow]], tuple[Part, Mapping[str, Bool[np.ndarray, "rows"]]]],
    problem_of: Callable[[list[str]], str],
    *,
    rows: int,
    remedy: str,
    progress: Progress,
) -> Iterator[Part]:
    """Yields what `read` returns for the rows of a table, `rows` at a time, with masks of bad rows by description.

    `problem_of` describes why a row is malformed, "" if it is not; `read` gets only rows before a malformed one. Raises
    `UserError` for the first bad row, whichever check it fails.
    """
    done = 0
    for chunk in chunks_of(path, rows=rows, remedy=remedy):
        problems = ((number, problem_of(row)) for number, (_, row) in enumerate(chunk))
        formed, problem = next((found for found in problems if found[1]), (len(chunk), ""))
        if not formed:
            raise bad_row(path, chunk[0][0], problem)
        part, faults = read(chunk[:formed])
        bad = np.flatnonzero(np.any(list(faults.values()), axis=0))
        if len(bad):
            raise bad_row(path, chunk[bad[0]][0], next(what for what, mask in faults.items() if mask[bad[0]]))
        if problem:
            raise bad_row(path, chunk[formed][0], problem)
        yield part
        done += len(chunk)
        progress(f"rows of {path.name}", done, 0)


# ---- splits of puzzles that follow the same rules

PAD_TOKEN = 0
"""The token of padding, and of labels that the loss ignores."""
BLANK_IDENTIFIER = 0
IDENTIFIERS = ["<blank>"]
"""The names of puzzles that all follow the same rules, so that they share the blank identifier."""
INDEX_BYTES = 12
"""Upper bound of the bytes per example in the three index arrays."""


def split_metadata(kind: Kind, *, identifiers: int, groups: int, puzzles: int, puzzle_examples: float) -> Metadata:
    """Returns the metadata of a split."""
    return Metadata(
        seq_len=kind.seq_len,
        vocab_size=kind.vocab_size,
        pad_id=PAD_TOKEN,
        ignore_label_id=PAD_TOKEN,
        blank_identifier_id=BLANK_IDENTIFIER,
        num_puzzle_identifiers=identifiers,
        total_groups=groups,
        mean_puzzle_examples=puzzle_examples,
        total_puzzles=puzzles,
        sets=("all",),
        kind=kind.key,
    )


def split_of(
    inputs: UInt8[np.ndarray, "groups copies cells"], labels: UInt8[np.ndarray, "groups copies cells"], kind: Kind
) -> tuple[Metadata, dict[str, np.ndarray]]:
    """Returns a split; a group is an original followed by its augmentations, each a puzzle of one example."""
    count, copies, cells = inputs.shape
    return split_metadata(kind, identifiers=1, groups=count, puzzles=count, puzzle_examples=1.0), {
        "inputs": inputs.reshape(-1, cells),
        "labels": labels.reshape(-1, cells),
        "puzzle_identifiers": np.full(count * copies, BLANK_IDENTIFIER, np.int32),
        "puzzle_indices": np.arange(count * copies + 1, dtype=np.int32),
        "group_indices": np.arange(count + 1, dtype=np.int32) * copies,
    }


def check_room(directory: Path, kind: Kind, *, train: int, test: int, copies: int) -> None:
    """Raises `UserError` if copies of the train puzzles and the test puzzles do not fit in memory or on disk."""
    examples = train * copies + test
    bytes_of_set = examples * (2 * kind.seq_len + INDEX_BYTES)
    remedy = "use fewer puzzles or augmentations"
    check_memory(bytes_of_set + (train + test) * 4 * kind.seq_len, remedy)
    check_disk(directory, bytes_of_set, remedy)


def subsample(available: int, size: int, rng: np.random.Generator) -> Integer[np.ndarray, "size"]:
    """Selects `size` of `available` train puzzles at random."""
    if size > available:
        raise UserError(f"--subsample-size {size}: there are {available} train puzzles; use at most {available}")
    return rng.choice(available, size, replace=False)


def equivalents(train: UInt64[np.ndarray, "n"], test: UInt64[np.ndarray, "m"]) -> dict[str, Any]:
    """Counts leaks and repetitions by the fingerprints of two splits."""
    return {
        "test_puzzles_equivalent_to_a_train_puzzle": int(np.isin(test, train).sum()),
        "train_puzzles_equivalent_to_another": int((~first_of_each(train, known=train[:0])).sum()),
    }


# ---- writing


def write_split(folder: Path, metadata: Metadata, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `dataset.json` and the given arrays of one split."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "dataset.json", published_fields(metadata))
    for field, array in arrays.items():
        np.save(array_path(folder, metadata, field), array)


LAYOUT = Layout(
    entries=frozenset({*SPLITS, "identifiers.json", "test_puzzles.json", "recipe.json"}),
    last=(*(f"{split}/dataset.json" for split in SPLITS), "recipe.json"),
    read_record=read_recipe,
)


def write_dataset(
    directory: str | Path,
    splits: Splits,
    identifiers: Sequence[str],
    recipe: Mapping[str, Any],
    *,
    findings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> bool:
    """Writes a data set from memory; returns False if one with the same recipe exists.

    Raises the errors of `is_built`.
    """
    with new_dataset(directory, recipe, LAYOUT, overwrite=overwrite) as folder:
        if folder is None:
            return False
        for split, (metadata, arrays) in splits.items():
            write_split(folder / split, metadata, arrays)
        write_json(folder / "identifiers.json", list(identifiers))
        kinds = {metadata.kind for metadata, _ in splits.values()}
        write_record(folder, recipe, kinds.pop() if len(kinds) == 1 else "", content_of(splits), findings)
    return True


class PuzzleData(Builder):
    """A builder of puzzles."""

    def summary(self, built: bool, seconds: float) -> str:
        return build_summary(path_of(self.directory), built, seconds)

    @staticmethod
    def inspected(directory: Path, examples: int, progress: Progress) -> Iterator[str]:
        return inspection_text(directory, examples, progress)


@dataclass(frozen=True)
class RuleSetData(PuzzleData):
    """The builder of a data set whose puzzles all follow the same rules: generated or, with --source, from tables."""

    output_dir: Path | None = None
    overwrite: bool = False
    """Replace an existing data set that has other options."""
    seed: Seed = 0
    """Random seed; the same options give the same bytes."""
    num_train: Annotated[Puzzles | None, arg(help_behavior_hint="(default: 1000; of 4x4 500)")] = None
    """Generated: number of train puzzles."""
    num_test: Annotated[Puzzles | None, arg(help_behavior_hint="(default: 1000; of 4x4 250)")] = None
    """Generated: number of test puzzles."""
    source: str | None = None
    subsample_size: Annotated[Puzzles | None, arg(help_behavior_hint="(default: all)")] = None
    """Tables: number of train puzzles to draw."""

    MAKER: ClassVar[str]
    """The name in recipes."""
    MAKER_VERSION: ClassVar[int] = 1
    """Stored in every recipe. Increase it when the same options give different puzzles."""
    HUB_EXAMPLE: ClassVar[str]
    """A data set of the Hugging Face hub with such tables."""

    @property
    def directory(self) -> Path:
        raise NotImplementedError

    @property
    def recipe(self) -> dict[str, Any]:
        """Options that determine the content; those of the tables are in the recipe, too."""
        raise NotImplementedError

    def check(self) -> None:
        """Raises `UserError` if a value is out of range or options conflict."""
        check_options(self)
        if self.source is None:
            reject_options(self, "needs --source", "subsample_size")
        else:
            reject_options(self, "does not go with --source", "num_train", "num_test")

    def splits(self, tables: Mapping[str, Path], progress: Progress) -> tuple[Splits, dict[str, Any]]:
        """Returns the splits, of generated puzzles or from the tables of both splits, and findings for the recipe.

        Raises `UserError` if no such puzzles can be generated or the tables are invalid.
        """
        raise NotImplementedError

    def counts(self, size: int) -> tuple[int, int]:
        """Returns the numbers of train and test puzzles to generate; of 4x4, there are about a thousand in all."""
        train, test = (500, 250) if size == 4 else (1000, 1000)
        return train if self.num_train is None else self.num_train, test if self.num_test is None else self.num_test

    def build(self, progress: Progress = lambda what, done, total: None) -> bool:
        """Builds the data set; returns False if it exists already. Raises the errors of `is_built`."""
        self.check()
        with local_tables(self.source, hub_example=self.HUB_EXAMPLE) as tables:
            recipe = {"maker": f"{self.MAKER}{' tables' * bool(tables)}", "maker_version": self.MAKER_VERSION}
            if tables:
                recipe["tables_sha256"] = {split: sha256_of(path) for split, path in tables.items()}
            recipe |= self.recipe
            if is_built(self.directory, recipe, LAYOUT, overwrite=self.overwrite):
                return False
            splits, findings = self.splits(tables, progress)
        source = {} if self.source is None else {"source": self.source}
        return write_dataset(
            self.directory, splits, IDENTIFIERS, recipe, findings=source | findings, overwrite=self.overwrite
        )
