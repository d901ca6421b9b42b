"""Builds a text data set: documents are encoded in parallel and written as shards, with bounded memory."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import arg

from models_torch.ranges import Range, check_ranges
from train_jax.errors import UserError, option_error
from train_jax.run.storage import path_of
from train_jax.tasks.language.documents import Skipped, source_facts
from train_jax.tasks.language.options import TextSource, VocabSize
from train_jax.tasks.language.text_set import (
    KIND,
    LAYOUT,
    SPLITS,
    SplitRecord,
    TextSet,
    shard_name,
    token_dtype,
)
from train_jax.tasks.language.tokenizer import Tokenizer
from train_jax.tasks.language.tokenizer_training import first_characters, train_tokenizer
from train_jax.tasks.new_dataset import new_dataset
from train_jax.tasks.progress import Progress

_CHARACTERS_AT_ONCE = 2**22
_TOKENIZER_CHARACTERS = 2 * 10**9
_COMPRESSED_BYTES = 2**26
"""Held-out text up to this size is also compressed, for comparison."""


@dataclass(frozen=True, kw_only=True)
class TextData(TextSource):
    """Token shards of documents, with a tokenizer that is trained on the train split or given.

    A data set with the same options is kept."""

    output_dir: Path = Path("data/text")
    """Output folder, or gs://bucket/folder."""
    overwrite: bool = False
    """Replace an existing data set that has other options."""
    tokenizer: Annotated[str | None, arg(help_behavior_hint="(default: train one)")] = None
    """Folder with tokenizer.json: of a tokenizer or of another data set."""
    vocab_size: VocabSize = 1024
    """Tokens of the tokenizer to train, including 256 bytes and 9 special tokens."""
    shard_tokens: Annotated[int, Range(1, 2**32)] = 2**26
    """Tokens in a file."""
    license: str = ""
    """Licence of the documents, to be recorded; of the standard library it is known."""

    @property
    def directory(self) -> Path:
        return self.output_dir

    def check(self) -> None:
        """Raises `UserError` if a value is out of range."""
        try:
            check_ranges(self)
        except ValueError as error:
            raise option_error(error) from None

    def build(self, progress: Progress) -> bool:
        """Builds the data set; returns False if it exists already."""
        self.check()
        given = None if self.tokenizer is None else Tokenizer.load(self.tokenizer)
        recipe = self._recipe(given)
        with new_dataset(self.output_dir, recipe, LAYOUT, overwrite=self.overwrite) as folder:
            if folder is None:
                return False
            folder.mkdir(parents=True, exist_ok=True)
            _write(self, folder, given, recipe, progress)
        return True

    def _recipe(self, given: Tokenizer | None) -> dict[str, Any]:
        names = ("source", "column", "test_share", "seed", "license")
        recipe: dict[str, Any] = {name: getattr(self, name) for name in names} | source_facts(self.source)
        if given is None:
            return recipe | {"vocab_size": self.vocab_size}
        return recipe | {"tokenizer_sha256": given.sha256}


def _write(
    options: TextData, folder: Path, given: Tokenizer | None, recipe: dict[str, Any], progress: Progress
) -> None:
    tokenizer = given
    if tokenizer is None:
        progress("training the tokenizer", 0, 0)
        texts = first_characters(options.train_documents(), _TOKENIZER_CHARACTERS)
        tokenizer = train_tokenizer(texts, options.vocab_size)
    tokenizer.save(folder)
    writers = {
        split: _SplitWriter(folder / split, token_dtype(tokenizer.vocab_size), options.shard_tokens) for split in SPLITS
    }
    skipped, held_out = Skipped(), bytearray()
    for part in _parts(options.documents(skipped)):
        encoded = tokenizer.encode_batch([text for _, text in part], threads=os.cpu_count() or 1)
        for (split, text), ids in zip(part, encoded, strict=True):
            writers[split].add([tokenizer.bos, *ids], len(text.encode()))
            if split == "test" and len(held_out) <= _COMPRESSED_BYTES:
                held_out += text.encode()
        progress("tokens", sum(writer.tokens for writer in writers.values()), 0)
    content = {split: writer.close() for split, writer in writers.items()}
    for split, each in content.items():
        if not each.tokens:
            raise UserError(
                f"the {split} split has no documents; use more --source (a .txt file is one document) or another "
                "--test-share"
            )
    findings: dict[str, Any] = {
        "skipped_empty": skipped.empty,
        "skipped_not_utf8": skipped.not_utf8,
        "not_utf8": skipped.names,
    }
    if len(held_out) <= _COMPRESSED_BYTES:
        findings |= compressed_bits_per_byte(bytes(held_out))
    record = {
        "recipe": recipe,
        "kind": KIND,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "content": {split: dataclasses.asdict(each) for split, each in content.items()},
        "findings": findings,
    }
    (folder / "recipe.json").write_text(json.dumps(record, indent=1) + "\n")


class _SplitWriter:
    """Writes a stream of tokens in files of equal size."""

    def __init__(self, folder: Path, dtype: np.dtype, shard_tokens: int):
        folder.mkdir(parents=True)
        self._folder, self._dtype, self._shard_tokens = folder, dtype, shard_tokens
        self._parts: list[np.ndarray] = []
        self._waiting = 0
        self._shards: list[int] = []
        self._digest = hashlib.sha256()
        self.documents = self.bytes = self.tokens = 0

    def add(self, ids: list[int], size: int) -> None:
        """Adds a document of `size` bytes."""
        self._parts.append(np.asarray(ids, self._dtype))
        self._waiting += len(ids)
        self.documents += 1
        self.bytes += size
        self.tokens += len(ids)
        while self._waiting >= self._shard_tokens:
            joined = np.concatenate(self._parts)
            self._save(joined[: self._shard_tokens])
            self._parts = [joined[self._shard_tokens :]]
            self._waiting = len(self._parts[0])

    def _save(self, tokens: np.ndarray) -> None:
        np.save(self._folder / shard_name(len(self._shards)), tokens)
        self._shards.append(len(tokens))
        self._digest.update(np.ascontiguousarray(tokens).data)

    def close(self) -> SplitRecord:
        if self._waiting:
            self._save(np.concatenate(self._parts))
        return SplitRecord(self.documents, self.bytes, self.tokens, tuple(self._shards), self._digest.hexdigest())


def compressed_bits_per_byte(content: bytes) -> dict[str, float]:
    """Returns the bits per byte of `gzip -9` and `xz -9e` on one file with this content."""
    # A dictionary larger than the content only costs memory: 64 MiB by default.
    xz = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(len(content), 4096)}
    sizes = {"gzip": len(gzip.compress(content, 9)), "xz": len(lzma.compress(content, filters=[xz]))}
    return {f"{name}_bits_per_byte": round(8 * size / len(content), 4) for name, size in sizes.items()}


def _parts(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Yields lists of documents with about `_CHARACTERS_AT_ONCE` characters."""
    part: list[tuple[str, str]] = []
    size = 0
    for document in documents:
        part.append(document)
        size += len(document[1])
        if size >= _CHARACTERS_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def build_summary(directory: Path, built: bool, seconds: float) -> str:
    """Returns the counts of both splits, the findings and the hashes of a data set."""
    data = TextSet(directory)
    lines = [f"{path_of(directory)} " + (f"built in {seconds:.1f} s" if built else "already exists")]
    for split, each in data.splits.items():
        lines.append(
            f"  {split:<5} {each.documents:>10,} documents, {each.bytes:>14,} bytes, {each.tokens:>14,} tokens, "
            f"{each.bytes / max(each.tokens, 1):.3f} bytes per token"
        )
    facts = {"vocabulary": f"{data.vocab_size:,} tokens"} | {
        name.replace("_", " "): ", ".join(map(str, value)) if isinstance(value, list) else value
        for name, value in (data.record["recipe"] | data.record.get("findings", {})).items()
        if name not in ("vocab_size", "tokenizer_sha256")
    }
    lines += [
        f"  {name}: {' '.join(str(value).split())[:200]}" for name, value in facts.items() if value not in ("", [])
    ]
    return "\n".join([*lines, f"  sha256 {data.fingerprint}"])
