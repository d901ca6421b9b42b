"""Inspects a data set: its contents, repeated examples, and test puzzles that also occur in the train split."""

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer, UInt64

from train_jax.puzzles.format import PuzzleSet, load_split, originals_of
from train_jax.puzzles.kind import Examples, Kind, number_range
from train_jax.puzzles.kinds import describe
from train_jax.puzzles.metadata import SPLITS, arrays_on_disk, content_of, dataset_folder, read_recipe
from train_jax.puzzles.symmetries import mix
from train_jax.storage.new_dataset import Progress

BLOCK = 4096
SAMPLE = 2000
"""Number of puzzles whose solutions are counted, and of augmentations that are compared with their originals."""

Findings = dict[str, Any]


def inspect(directory: str | Path, progress: Progress) -> dict[str, Findings]:
    """Returns facts by heading: data set, each split, both splits. Raises `UserError` if there is no data set."""
    directory = dataset_folder(directory)
    sets = {split: load_split(directory, split) for split in SPLITS}
    facts = {"data set": _whole(directory, sets, progress)}
    rows = {}
    for split, puzzles in sets.items():
        progress(f"{split} examples", 0, puzzles.num_examples)
        rows[split] = row_marks(puzzles.inputs), row_marks(puzzles.labels)
        facts[split] = _counts(puzzles) | _repeated(*rows[split]) | _by_kind(puzzles)
    facts["between train and test"] = _leaks(sets, rows["train"][0], rows["test"][0])
    return facts


def build_summary(directory: Path, built: bool, seconds: float) -> str:
    """Returns the sizes of the data set, the findings of its builder, and its hash."""
    lines = [f"{directory} " + (f"built in {seconds:.1f} s" if built else "already exists")]
    lines += [f"  {split:<5} {_sizes(load_split(directory, split))}" for split in SPLITS]
    record = read_recipe(directory) or {}
    for name, value in record.get("findings", {}).items():
        if isinstance(value, list):
            value = ", ".join(map(str, value)) or "none"
        lines.append(f"  {one_line(name.replace('_', ' '))}: {one_line(value)}")
    return "\n".join([*lines, f"  sha256 {one_line(record.get('content_sha256'))}"])


def _sizes(puzzles: PuzzleSet) -> str:
    text = f"{puzzles.num_groups:>9,} puzzles, "
    if puzzles.num_puzzles not in (puzzles.num_groups, puzzles.num_examples):
        text += f"{puzzles.num_puzzles:>11,} with augmentations, "
    return f"{text}{puzzles.num_examples:>11,} examples"


def row_marks(rows: Integer[np.ndarray, "n cells"]) -> UInt64[np.ndarray, "n"]:
    """Returns a 64-bit hash of every row."""
    n, cells = rows.shape
    marks = np.empty(n, np.uint64)
    salts = mix(np.arange(-(-cells // 4), dtype=np.uint64))
    for start in range(0, n, BLOCK):
        # Two bytes per token, since a vocabulary may have more than 256 tokens.
        block = rows[start : start + BLOCK].astype(np.uint16, order="C")
        words = np.pad(block, ((0, 0), (0, -cells % 4))).view(np.uint64)
        marks[start : start + BLOCK] = mix(words + salts).sum(axis=1)
    return marks


def _whole(directory: Path, sets: dict[str, PuzzleSet], progress: Progress) -> Findings:
    files = [path for path in directory.rglob("*") if path.is_file()]
    facts: Findings = {
        "kind": describe(sets["train"].metadata),
        "size on disk": f"{sum(path.stat().st_size for path in files) / 1e6:,.1f} MB in {len(files)} files",
    }
    record = read_recipe(directory)
    if record is None:
        return facts | {"recipe": "none: not built by this project"}
    for name, value in record["recipe"].items():
        facts |= {f"recipe: {one_line(name)}": one_line(value)}
    progress("hashing", 0, 0)
    on_disk = {split: (each.metadata, arrays_on_disk(directory / split, each.metadata)) for split, each in sets.items()}
    same = content_of(on_disk).sha256 == record.get("content_sha256")
    return facts | {"content": "as it was written (SHA-256)" if same else "CHANGED since it was written (SHA-256)"}


def one_line(value: Any) -> str:
    """Formats a value of a recipe in one printable line; hashes are shortened. The value is untrusted."""
    if isinstance(value, dict):
        value = ", ".join(f"{key} {str(each)[:12]}" for key, each in value.items())
    shown = str(value)[:500]
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)[:500]


def _counts(puzzles: PuzzleSet) -> Findings:
    copies = np.diff(puzzles.group_indices)
    each = np.diff(puzzles.puzzle_indices)
    return {
        "puzzles": f"{puzzles.num_groups:,}",
        "with augmentations": f"{puzzles.num_puzzles:,} ({number_range(copies)} of each)",
        "examples": f"{puzzles.num_examples:,} ({number_range(each)} of each)",
        "puzzle identifiers": f"{len(np.unique(puzzles.puzzle_identifiers)):,}",
    }


def _repeated(inputs: UInt64[np.ndarray, "n"], labels: UInt64[np.ndarray, "n"]) -> Findings:
    pairs = mix(inputs) + labels
    distinct = len(np.unique(pairs))
    distinct_inputs = len(np.unique(inputs))
    return {
        "examples that repeat another": f"{len(pairs) - distinct:,}",
        "inputs with several labels": f"{distinct - distinct_inputs:,} more labels than inputs",
    }


def _by_kind(puzzles: PuzzleSet) -> Findings:
    kind = puzzles.kind
    if kind is None:
        return {}
    originals = originals_of(puzzles)
    sample = originals[np.linspace(0, len(originals) - 1, min(SAMPLE, len(originals))).astype(int)]
    facts = kind.inspect(Examples(puzzles.inputs, puzzles.labels, originals, sample))
    return facts | _unlike_their_original(puzzles, kind)


def _unlike_their_original(puzzles: PuzzleSet, kind: Kind) -> Findings:
    """Counts augmentations that are not equivalent to the first puzzle of their group, for puzzles of one example."""
    if puzzles.num_examples == puzzles.num_groups or puzzles.largest_puzzle > 1:
        return {}
    originals = originals_of(puzzles)
    copies = np.linspace(0, puzzles.num_examples - 1, SAMPLE).astype(int)
    owners = originals[np.searchsorted(originals, copies, side="right") - 1]
    pairs = zip(_fingerprints(puzzles, kind, copies), _fingerprints(puzzles, kind, owners), strict=True)
    unlike = sum(one != other for one, other in pairs)
    return {"augmentations that are not a symmetry of their original": f"{unlike:,} of {SAMPLE:,} checked"}


def _fingerprints(puzzles: PuzzleSet, kind: Kind, rows: Integer[np.ndarray, "n"]) -> list[Any]:
    inputs, labels = (tokens[rows].astype(np.uint8) for tokens in (puzzles.inputs, puzzles.labels))
    return list(kind.fingerprints(inputs, labels))


def _leaks(sets: dict[str, PuzzleSet], train: UInt64[np.ndarray, "n"], test: UInt64[np.ndarray, "m"]) -> Findings:
    facts: Findings = {"test inputs that are also train inputs": f"{np.isin(test, train).sum():,} of {len(test):,}"}
    kind = sets["train"].kind
    if kind is None or kind != sets["test"].kind:
        return facts | {"the same under the puzzle's symmetries": "unknown for this kind of puzzle"}
    known, tested = (_fingerprints(sets[split], kind, _rows_of_originals(sets[split])) for split in SPLITS)
    repeated = sum(map(set(known).__contains__, tested))
    return facts | {"test examples that are a symmetry of a train example": f"{repeated:,} of {len(tested):,}"}


def _rows_of_originals(puzzles: PuzzleSet) -> Integer[np.ndarray, "n"]:
    """Returns every example of the first puzzle of every group."""
    first = puzzles.group_indices[:-1]
    starts = puzzles.puzzle_indices[first]
    ends = puzzles.puzzle_indices[first + 1]
    return np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
