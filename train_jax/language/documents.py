"""Documents: the texts of folders and of .txt, .jsonl and .parquet files, their splits, and the options that name them.

A text file is one document; a line of .jsonl and a row of .parquet are one each. Files are read one after the other in
an order that depends on the seed, and a document goes to the test split by a hash of its text and the seed, so that
equal documents never are in both splits.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.language.tokenizer import Tokenizer, text_package, train_tokenizer
from train_jax.language.wordnet import glosses, wordnet_files, wordnet_folder
from train_jax.storage.cache import local_folder
from train_jax.storage.files import local_copy
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import POINTER, is_lfs_pointer

STANDARD_LIBRARY = "standard-library"
"""The source that stands for the modules and documentation of the running Python, without its tests."""
DOCSTRINGS = "package:docstrings"
"""The source that stands for the documentation strings and help pages of the running Python."""
GLOSSES = "package:glosses"
"""The source that stands for the words and meanings of WordNet, in the package that `wordnet` names."""
HUB = "hf://"
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".parquet")
_NOT_DOCUMENTS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "_bundled"}
_LARGEST_LINE = 2**28
_SHORTEST_DOCSTRING = 40


@dataclass(frozen=True)
class TextFile:
    """A file with documents."""

    name: str
    """The name of the source, and the path below it."""
    path: Path


@dataclass
class Skipped:
    """Counts of skipped files and documents."""

    not_utf8: int = 0
    empty: int = 0
    names: list[str] = field(default_factory=list)
    """Names of the first files that are not UTF-8."""
    documents: int = 0
    """Number of all documents that were read, with skipped ones."""

    @classmethod
    def total(cls, parts: Iterable[Skipped]) -> Skipped:
        """Returns the sums of several, with the names of the first three files."""
        parts = list(parts)
        return cls(
            not_utf8=sum(each.not_utf8 for each in parts),
            empty=sum(each.empty for each in parts),
            names=[name for each in parts for name in each.names][:3],
            documents=sum(each.documents for each in parts),
        )

    @property
    def note(self) -> str:
        """Returns a note for an error about too few documents; empty if all are UTF-8."""
        if not self.not_utf8:
            return ""
        return (
            f"; {self.not_utf8} of {self.documents} documents are not UTF-8 and were skipped, such as {self.names[0]}: "
            "convert them, for instance by `iconv -f latin1 -t utf-8`"
        )


def list_files(sources: Sequence[str]) -> list[TextFile]:
    """Returns the files of all sources, in the order of their names.

    Raises `UserError` for a source that does not exist, has another suffix, or contains no file with a known suffix.
    """
    files: list[TextFile] = []
    for source in sources:
        found = _files_of(source)
        if not found:
            raise UserError(f"{source} contains no {', '.join(SUFFIXES)} file; choose another --source")
        files += found
    return files


def _files_of(source: str) -> list[TextFile]:
    if source == GLOSSES:
        return [TextFile(f"{source}/{path.name}", path) for path in wordnet_files(wordnet_folder(None))]
    if source in (STANDARD_LIBRARY, DOCSTRINGS):
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in root.rglob("*.py") if not _NOT_DOCUMENTS & set(path.relative_to(root).parts)]
        return [TextFile(f"{source}/{path.relative_to(root).as_posix()}", path) for path in sorted(paths)]
    path = path_of(source) if not source.startswith(HUB) else None
    if path is None or path.is_dir():
        root = _from_hub(source) if path is None else local_folder(path)
        paths = [each for each in sorted(root.rglob("*")) if each.suffix.lower() in SUFFIXES and each.is_file()]
        return [TextFile(f"{source}/{each.relative_to(root).as_posix()}", each) for each in paths]
    if path.suffix.lower() not in SUFFIXES:
        raise UserError(f"{source} is not a folder or a {', '.join(SUFFIXES)} file; choose another --source")
    if not path.is_file():
        raise UserError(f"{source} does not exist; choose another --source, such as {STANDARD_LIBRARY}")
    return [TextFile(source, path)]


def _from_hub(source: str) -> Path:
    """Downloads the files of a data set of the Hugging Face hub; they are kept in the library's cache."""
    owner, _, rest = source.removeprefix(HUB).partition("/")
    name, _, folder = rest.strip("/").partition("/")
    if not (owner and name):
        raise UserError(f"{source}: expected {HUB}OWNER/NAME, or {HUB}OWNER/NAME/FOLDER")
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError:
        raise UserError(
            f"--source {source} needs `pip install huggingface_hub`; or download it and give the folder"
        ) from None
    patterns = [f"{folder}/*{suffix}" if folder else f"*{suffix}" for suffix in SUFFIXES]
    try:
        root = hub.snapshot_download(f"{owner}/{name}", repo_type="dataset", allow_patterns=patterns)
    # The library raises the exceptions of its HTTP client, which differ between versions.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise UserError(
            f"{source} could not be downloaded from the hub ({reason}); check the name and the network"
        ) from None
    return Path(root, folder)


def source_facts(sources: Sequence[str]) -> dict[str, str]:
    """Returns facts about the sources: the version and the licence of Python, and those of WordNet."""
    facts = {}
    if {STANDARD_LIBRARY, DOCSTRINGS} & set(sources):
        version = f"{platform.python_implementation()} {platform.python_version()}"
        facts |= {"python": version, "python_license": "PSF-2.0"}
    if GLOSSES in sources:
        facts["glosses_license"] = "WordNet"
    return facts


def shuffled(files: Sequence[TextFile], seed: int) -> list[TextFile]:
    """Returns the files in an order that depends on the seed; documents keep their order within a file."""
    order = np.random.Generator(np.random.Philox(key=[seed, 0])).permutation(len(files))
    return [files[number] for number in order]


def read_documents(files: Sequence[TextFile], column: str, skipped: Skipped) -> Iterator[str]:
    """Yields the documents of the files. Files and rows that are not UTF-8, and empty
    texts and nulls, are skipped and counted.

    `column` is the field of .jsonl and the column of .parquet with the text. Raises `UserError` if it is missing.
    """
    for file in files:
        with local_copy(file.path) as path:
            for text in _documents_of(file, path, column):
                skipped.documents += 1
                if text is None:
                    skipped.not_utf8 += 1
                    skipped.names += [file.name] * (len(skipped.names) < 3)
                elif not text.strip():
                    skipped.empty += 1
                else:
                    yield text


def _documents_of(file: TextFile, path: Path, column: str) -> Iterator[str | None]:
    if file.name.startswith(DOCSTRINGS):
        yield from docstrings(path.read_bytes())
        return
    if file.name.startswith(GLOSSES):
        yield from (f"{', '.join(gloss.words)} ({gloss.part}): {gloss.meaning}" for gloss in glosses(path))
        return
    match path.suffix.lower():
        case ".jsonl":
            yield from _json_lines(file, path, column)
        case ".parquet":
            yield from _parquet_rows(file, path, column)
        case _:
            yield _valid_utf8(path.read_bytes())


def docstrings(source: bytes) -> Iterator[str]:
    """Yields the documentation strings of a module, and the texts of the table `topics`, such as pydoc's.

    Short ones say little and are left out, as is a module that is no valid Python.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        texts: list[Any] = []
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            texts.append(ast.get_docstring(node))
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "topics":
            texts += [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
        yield from (text for text in texts if isinstance(text, str) and len(text) >= _SHORTEST_DOCSTRING)


def _json_lines(file: TextFile, path: Path, column: str) -> Iterator[str | None]:
    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(_LARGEST_LINE), b""), 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[column]
                text = "" if text is None else text  # like a null in .parquet
                if not isinstance(text, str):
                    raise TypeError
            except UnicodeDecodeError:
                yield None
            except (ValueError, KeyError, TypeError, RecursionError):
                raise UserError(
                    f"{file.name}: line {number} is not a JSON object with a text in {column!r}; "
                    "choose another --column or correct the file"
                ) from None
            else:
                yield _valid_utf8(text.encode("utf-8", errors="surrogatepass"))


def _parquet_rows(file: TextFile, path: Path, column: str) -> Iterator[str | None]:
    parquet = text_package("pyarrow.parquet")
    try:
        table = parquet.ParquetFile(path)
        if column not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names[:5])
            raise UserError(f"{file.name} has no column {column!r}; choose another --column, such as {names}")
        for group in range(table.num_row_groups):
            for text in table.read_row_group(group, columns=[column]).column(column):
                value = text.as_py()
                yield value if isinstance(value, str) else ""
    except (OSError, ValueError) as error:
        reason = POINTER if is_lfs_pointer(path) else str(error).splitlines()[0][:100]
        raise UserError(f"{file.name} is not a readable parquet file ({reason}); correct or remove it") from None


def _valid_utf8(content: bytes) -> str | None:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None


def is_test(text: str, seed: int, share: float) -> bool:
    """Returns whether a document belongs to the test split: a function of its text, the seed and the share."""
    digest = hashlib.sha256(f"{seed}\n".encode() + text.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


VocabSize = Annotated[int, Range(265, 2**24)]


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Documents and their splits."""

    source: tuple[str, ...] = (STANDARD_LIBRARY,)
    """Folders and .txt, .md, .rst, .py, .jsonl, .parquet files, also gs://bucket/…; hf://OWNER/NAME[/FOLDER] is a data
    set of the Hugging Face hub, standard-library the source code of the running Python, without its tests,
    package:docstrings its documentation, package:glosses words and meanings."""
    column: str = "text"
    """Field of .jsonl and column of .parquet files with the text."""
    test_share: Annotated[float, Range(0, 0.5, low_excluded=True)] = 0.05
    """Share of the documents in the test split, chosen by a hash of their text."""
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    """Seed of the order of the files and of the splits."""

    def files(self) -> list[TextFile]:
        """Returns the files in the order in which they are read."""
        return shuffled(list_files(self.source), self.seed)

    def split(self, documents: Iterator[str]) -> Iterator[tuple[str, str]]:
        """Yields the split and the text of every document."""
        for text in documents:
            yield "test" if is_test(text, self.seed, self.test_share) else "train", text

    def documents(self, skipped: Skipped) -> Iterator[tuple[str, str]]:
        """Yields the split and the text of every document of the sources."""
        return self.split(read_documents(self.files(), self.column, skipped))

    def train_tokenizer(self, vocab_size: int, max_characters: int) -> Tokenizer:
        """Returns a tokenizer trained on the first `max_characters` characters of the train split; 0 uses all.

        Raises `UserError` as `train_tokenizer` does, with what was skipped.
        """
        skipped = Skipped()
        texts = (text for split, text in self.documents(skipped) if split == "train")
        try:
            return train_tokenizer(_first_characters(texts, max_characters), vocab_size)
        except UserError as error:
            raise UserError(f"{error}{skipped.note}") from None


def _first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yields texts until they have `limit` characters; 0 yields all."""
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if limit and total >= limit:
            return
