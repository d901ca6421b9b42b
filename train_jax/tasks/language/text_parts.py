"""Encodes documents in parts, which are not encoded again by a build that goes on, or by another machine.

A part has the documents of consecutive files, about `PART_BYTES` of them. In the folder of the parts,

```text
00007.train.bin, 00007.test.bin   token ids, one document after the other
00007.json                        counts and hashes; written last
```

The folder belongs to one tokenizer, one list of files and one way to divide documents into splits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from train_jax.errors import UserError
from train_jax.run.files import local_copy, remove_folder, whole_file, write_text
from train_jax.run.storage import path_of
from train_jax.run.untrusted import DamagedError, read_whole
from train_jax.tasks.language.documents import Skipped, TextFile, read_documents
from train_jax.tasks.language.options import TextSource
from train_jax.tasks.language.text_set import SPLITS, token_dtype
from train_jax.tasks.language.tokenizer import Tokenizer
from train_jax.tasks.new_dataset import Progress

PART_BYTES = 2**26
_CHARACTERS_AT_ONCE = 2**22
_TOKENS_AT_ONCE = 2**24
_LARGEST_RECORD = 2**24


@dataclasses.dataclass
class Counts:
    """Of the documents of one split in a part."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    sha256: str = ""
    """Of the token ids."""


@dataclasses.dataclass
class Part:
    """The record of a part."""

    source: str
    """SHA-256 of the files that it was made from."""
    splits: dict[str, Counts]
    skipped: Skipped


class Parts:
    """The parts of the documents of `options`, encoded by one tokenizer."""

    def __init__(self, folder: str | Path, options: TextSource, tokenizer: Tokenizer):
        self._options, self._tokenizer = options, tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._groups = list(_groups(options.files()))
        names = [[file.name for file in group] for group in self._groups]
        identity = [tokenizer.sha256, options.column, options.test_share, options.seed, names]
        self.root = path_of(folder)
        self._folder = self.root / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._groups)

    def encode(self, numbers: Sequence[int], progress: Progress) -> int:
        """Encodes the parts that are not there; returns how many."""
        encoded, tokens = 0, 0
        for number in numbers:
            source = _hash_of(self._groups[number])
            part = self._record(number)
            if part is None or part.source != source:
                part, encoded = self._encode(number, source), encoded + 1
            tokens += sum(counts.tokens for counts in part.splits.values())
            progress("tokens", tokens, 0)
        return encoded

    def _encode(self, number: int, source: str) -> Part:
        part = Part(source, {}, Skipped())
        with contextlib.ExitStack() as stack:
            writers = {
                split: _Writer(
                    stack.enter_context(stack.enter_context(whole_file(self._tokens(number, split))).open("wb"))
                )
                for split in SPLITS
            }
            documents = self._options.split(read_documents(self._groups[number], self._options.column, part.skipped))
            for some in _batches(documents):
                encoded = self._tokenizer.encode_batch([text for _, text in some], threads=os.cpu_count() or 1)
                for (split, text), ids in zip(some, encoded, strict=True):
                    writers[split].add(np.asarray([self._tokenizer.bos, *ids], self._dtype), len(text.encode()))
        part.splits = {split: writer.counts() for split, writer in writers.items()}
        write_text(self._folder / f"{number:05}.json", json.dumps(dataclasses.asdict(part)))
        return part

    def _tokens(self, number: int, split: str) -> Path:
        return self._folder / f"{number:05}.{split}.bin"

    def _record(self, number: int) -> Part | None:
        """The record of a part; None if there is none that is valid."""
        try:
            record = json.loads(read_whole(self._folder / f"{number:05}.json", largest_bytes=_LARGEST_RECORD))
            splits = {split: Counts(**record["splits"][split]) for split in SPLITS}
            return Part(record["source"], splits, Skipped(**record["skipped"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, DamagedError):
            return None

    def record(self, number: int) -> Part:
        """Raises `UserError` if the part is not there."""
        part = self._record(number)
        if part is None:
            raise UserError(f"{self._folder} has no part {number:05}; run the command again")
        return part

    def tokens(self, number: int, split: str) -> Iterator[np.ndarray]:
        """Yields the token ids of a part. Raises `UserError` if they are not what was written."""
        path, digest = self._tokens(number, split), hashlib.sha256()
        with local_copy(path) as local, local.open("rb") as file:
            while content := file.read(_TOKENS_AT_ONCE * self._dtype.itemsize):
                digest.update(content)
                yield np.frombuffer(content, self._dtype)
        if digest.hexdigest() != self.record(number).splits[split].sha256:
            raise UserError(f"{path} is damaged; remove it and {number:05}.json, and run the command again")

    def remove(self) -> None:
        remove_folder(self.root)


class _Writer:
    """Writes the token ids of one split of a part."""

    def __init__(self, file: IO[bytes]):
        self._file, self._digest, self._counts = file, hashlib.sha256(), Counts()

    def add(self, ids: np.ndarray, size: int) -> None:
        """Adds a document of `size` bytes."""
        content = ids.tobytes()
        self._file.write(content)
        self._digest.update(content)
        self._counts.documents += 1
        self._counts.bytes += size
        self._counts.tokens += len(ids)

    def counts(self) -> Counts:
        return dataclasses.replace(self._counts, sha256=self._digest.hexdigest())


def _groups(files: Sequence[TextFile]) -> Iterator[list[TextFile]]:
    """Yields lists of consecutive files of about `PART_BYTES`."""
    group: list[TextFile] = []
    size = 0
    for file in files:
        group.append(file)
        size += file.path.stat().st_size
        if size >= PART_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _hash_of(files: Sequence[TextFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with local_copy(file.path) as path, path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yields lists of documents with about `_CHARACTERS_AT_ONCE` characters."""
    some: list[tuple[str, str]] = []
    size = 0
    for document in documents:
        some.append(document)
        size += len(document[1])
        if size >= _CHARACTERS_AT_ONCE:
            yield some
            some, size = [], 0
    if some:
        yield some


def part_of(text: str) -> tuple[int, int]:
    """Reads `N/M`: part N, from 1, of M. Raises `UserError`."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--part {text}: expected N/M with N from 1 to M, such as 1/8")
    return int(number), int(count)


def held_out(parts: Parts, tokenizer: Tokenizer, largest_bytes: int) -> bytes | None:
    """Returns the held-out documents one after the other; None if they have more bytes."""
    if sum(parts.record(number).splits["test"].bytes for number in range(len(parts))) > largest_bytes:
        return None
    content = bytearray()
    for number in range(len(parts)):
        chunks = list(parts.tokens(number, "test"))
        ids: Any = np.concatenate(chunks) if chunks else np.zeros(0, np.int64)
        for document in np.split(ids, np.flatnonzero(ids == tokenizer.bos))[1:]:
            content += tokenizer.decode(document[1:].tolist()).encode()
    return bytes(content)
