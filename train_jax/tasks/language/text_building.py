"""Builds a text data set: documents are encoded in parts, which are joined to shards, with bounded memory."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import hashlib
import json
import lzma
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from tyro.conf import arg

from models_torch.ranges import Range, check_ranges
from train_jax.errors import UserError, option_error
from train_jax.run.storage import is_remote, path_of
from train_jax.tasks.language.documents import Skipped, source_facts
from train_jax.tasks.language.options import TextSource, VocabSize
from train_jax.tasks.language.text_parts import Counts, Parts, held_out, part_of
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
from train_jax.tasks.language.tokenizer_training import tokenizer_of
from train_jax.tasks.new_dataset import Progress, new_dataset

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
    parts_dir: Annotated[str | None, arg(help_behavior_hint="(default: beside the output folder)")] = None
    """Folder for encoded parts, also gs://bucket/folder; several machines may share it. It is kept; the default one is
    removed when the data set is complete, and one of an interrupted build is used by the next."""
    part: str = ""
    """N/M: encode only part N of M, on one of M machines; the same command without --part makes the data set."""
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

    def encode_part(self, progress: Progress) -> str:
        """Encodes what `part` says, and makes no data set; returns a line about it."""
        self.check()
        number, count = part_of(self.part)
        if self.tokenizer is None or self.parts_dir is None:
            raise UserError(f"--part {self.part} needs --tokenizer and --parts-dir, which all machines share")
        parts = Parts(self.parts_dir, self, Tokenizer.load(self.tokenizer))
        mine = range(len(parts))[number - 1 :: count]
        encoded = parts.encode(mine, progress)
        return (
            f"{len(mine)} of {len(parts)} parts are in {parts.root}, {encoded} of them encoded now; the same command "
            "without --part makes the data set"
        )

    def parts_folder(self, folder: Path) -> Path:
        """Where the parts go for a build in `folder`: beside the output, where the next build finds them."""
        if self.parts_dir is not None:
            return path_of(self.parts_dir)
        output = path_of(self.output_dir)
        return folder / "parts" if is_remote(output) else output.absolute().with_name(f".{output.name}.parts")

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
        tokenizer = tokenizer_of(options.train_documents, options.vocab_size, _TOKENIZER_CHARACTERS)
    tokenizer.save(folder)
    parts = Parts(options.parts_folder(folder), options, tokenizer)
    try:
        parts.encode(range(len(parts)), progress)
        _join(options, folder, parts, tokenizer, recipe)
    except UserError:
        if options.parts_dir is None:
            parts.remove()
        raise
    if options.parts_dir is None:
        parts.remove()


def _join(options: TextData, folder: Path, parts: Parts, tokenizer: Tokenizer, recipe: dict[str, Any]) -> None:
    """Writes the shards and the record."""
    content = {}
    for split in SPLITS:
        writer = _SplitWriter(folder / split, token_dtype(tokenizer.vocab_size), options.shard_tokens)
        for number in range(len(parts)):
            for tokens in parts.tokens(number, split):
                writer.add(tokens)
        content[split] = writer.close([parts.record(number).splits[split] for number in range(len(parts))])
    skipped = Skipped.total(parts.record(number).skipped for number in range(len(parts)))
    for split, each in content.items():
        if not each.tokens:
            raise UserError(
                f"the {split} split has no documents; use more --source (a .txt file is one document) or another "
                f"--test-share{skipped.note}"
            )
    findings: dict[str, Any] = {
        "skipped_empty": skipped.empty,
        "skipped_not_utf8": skipped.not_utf8,
        "not_utf8": skipped.names,
    }
    text = held_out(parts, tokenizer, _COMPRESSED_BYTES)
    if text is not None:
        findings |= compressed_bits_per_byte(text)
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
        self._waiting: list[np.ndarray] = []
        self._shards: list[int] = []
        self._digest = hashlib.sha256()

    def add(self, tokens: np.ndarray) -> None:
        self._waiting.append(tokens)
        while sum(map(len, self._waiting)) >= self._shard_tokens:
            joined = np.concatenate(self._waiting)
            self._save(joined[: self._shard_tokens])
            self._waiting = [joined[self._shard_tokens :]]

    def _save(self, tokens: np.ndarray) -> None:
        np.save(self._folder / shard_name(len(self._shards)), tokens)
        self._shards.append(len(tokens))
        self._digest.update(np.ascontiguousarray(tokens).data)

    def close(self, counts: Sequence[Counts]) -> SplitRecord:
        """Writes the rest; `counts` are those of the parts."""
        if sum(map(len, self._waiting)):
            self._save(np.concatenate(self._waiting))
        documents, size, tokens = (sum(getattr(c, name) for c in counts) for name in ("documents", "bytes", "tokens"))
        return SplitRecord(documents, size, tokens, tuple(self._shards), self._digest.hexdigest())


def compressed_bits_per_byte(content: bytes) -> dict[str, float]:
    """Returns the bits per byte of `gzip -9`, `bzip2 -9` and `xz -9e` on one file with this content."""
    # A dictionary larger than the content only costs memory: 64 MiB by default.
    xz = {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": max(len(content), 4096)}
    sizes = {
        "gzip": len(gzip.compress(content, 9)),
        "bz2": len(bz2.compress(content, 9)),
        "xz": len(lzma.compress(content, filters=[xz])),
    }
    return {f"{name}_bits_per_byte": round(8 * size / len(content), 4) for name, size in sizes.items()}


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
