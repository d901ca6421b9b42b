"""Builds a text data set: documents are encoded in parts, which are joined to shards, with bounded memory.

A part has the documents of consecutive files, about `PART_BYTES` of them, which are not encoded again by a build that
goes on, or by another machine. In the folder of the parts,

```text
00007.train.bin, 00007.test.bin   token ids, one document after the other
00007.json                        counts and hashes; written last
```

The folder belongs to one tokenizer, one list of files and one way to divide documents into splits.
"""

from __future__ import annotations

import bz2
import contextlib
import dataclasses
import gzip
import hashlib
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike
from tyro.conf import arg

from models_torch.ranges import Range
from train_jax.errors import UserError
from train_jax.language.documents import Skipped, TextFile, TextSource, VocabSize, read_documents, source_facts
from train_jax.language.text_set import (
    KIND,
    LAYOUT,
    SPLITS,
    SplitRecord,
    TextSet,
    decoded,
    read_record,
    shard_name,
    token_dtype,
)
from train_jax.language.tokenizer import Tokenizer
from train_jax.storage.files import local_copy, remove_folder, whole_file, write_text
from train_jax.storage.new_dataset import OutputOptions, Progress, new_dataset
from train_jax.storage.storage import is_remote, path_of
from train_jax.storage.untrusted import DamagedError, read_whole

PART_BYTES = 2**26
_CHARACTERS_AT_ONCE = 2**22
_TOKENS_AT_ONCE = 2**24
_LARGEST_RECORD = 2**24
_TOKENIZER_CHARACTERS = 2 * 10**9
_T = TypeVar("_T")
_COMPRESSED_BYTES = 2**26
"""Largest size of the held-out text in bytes that is also compressed, for comparison."""


class TokenData(OutputOptions):
    """A builder of token shards."""

    def summary(self, built: bool, seconds: float) -> str:
        return build_summary(self.directory, built, seconds)

    @staticmethod
    def recognises(directory: Path) -> bool:
        return read_record(directory) is not None

    @staticmethod
    def inspected(directory: Path, examples: int, progress: Progress) -> Iterator[str]:
        yield build_summary(directory, False, 0)


@dataclass(frozen=True, kw_only=True)
class TextData(TokenData, TextSource):
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
    """Number of tokens in a file."""
    parts_dir: Annotated[str | None, arg(help_behavior_hint="(default: beside the output folder)")] = None
    """Folder for encoded parts, also gs://bucket/folder; several machines may share it. It is kept; the default one is
    removed when the data set is complete, and one of an interrupted build is used by the next."""
    part: str = ""
    """N/M: encode only part N of M, on one of M machines; the same command without --part makes the data set."""
    license: str = ""
    """Licence of the documents, which is recorded; that of the standard library is known."""

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

    def made(self, progress: Progress) -> str:
        """Builds the data set, or encodes its part; returns the lines about it."""
        return self.encode_part(progress) if self.part else super().made(progress)

    def encode_part(self, progress: Progress) -> str:
        """Encodes the part in `part` without making a data set; returns a line about it."""
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
        """Returns the folder of the parts of a build in `folder`, beside the output, where the next build finds it."""
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
        tokenizer = options.train_tokenizer(options.vocab_size, _TOKENIZER_CHARACTERS)
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
    records = [parts.record(number) for number in range(len(parts))]
    content = {}
    for split in SPLITS:
        writer = _ShardWriter(folder / split, options.shard_tokens)
        for number in range(len(parts)):
            for tokens in parts.tokens(number, split):
                writer.add(tokens)
        counts = [record.splits[split] for record in records]
        totals = (sum(getattr(each, name) for each in counts) for name in ("documents", "bytes", "tokens"))
        shards, digest = writer.close()
        content[split] = SplitRecord(*totals, shards=shards, sha256=digest)
    skipped = Skipped.total(record.skipped for record in records)
    count = sum(each.documents for each in content.values())
    for split, each in content.items():
        if not each.tokens:
            raise UserError(
                f"the {split} split has no documents: there are {count}, and --test-share is {options.test_share:g}; "
                f"give more --source (a .txt file is one; divide a large one) or another --test-share{skipped.note}"
            )
    findings: dict[str, Any] = {
        "skipped_empty": skipped.empty,
        "skipped_not_utf8": skipped.not_utf8,
        "not_utf8": skipped.names,
    }
    if content["test"].bytes <= _COMPRESSED_BYTES:
        findings |= compressed_bits_per_byte(_held_out(parts, tokenizer))
    _write_record(folder, tokenizer, recipe, content, findings)


def write_documents(
    folder: Path,
    tokenizer: Tokenizer,
    recipe: dict[str, Any],
    splits: Mapping[str, Iterable[tuple[ArrayLike, ArrayLike]]],
    *,
    shard_tokens: int = 2**26,
) -> None:
    """Writes a data set of encoded documents with weights, into the folder that `new_dataset` gives.

    Each document is a pair: token ids, of which the first is <|bos|> and no other, and for each of them the weight 1,
    or 0 if it is no target. The text of a document is counted by the bytes of its tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    content = {}
    for split in SPLITS:
        tokens, weights = (_ShardWriter(folder / split, shard_tokens, kind) for kind in ("tokens", "weights"))
        documents = size = 0
        for ids, mask in splits[split]:
            ids = np.asarray(ids)
            mask = np.asarray(mask)
            if not (ids.shape == mask.shape and np.array_equal(np.flatnonzero(ids == tokenizer.bos), [0])):
                raise ValueError("expected a document that begins with <|bos|>, which occurs once, and as many weights")
            if not np.isin(mask, (0, 1)).all():
                raise ValueError("expected the weights 0 and 1")
            tokens.add(ids.astype(token_dtype(tokenizer.vocab_size)))
            weights.add(mask.astype("u1"))
            documents = documents + 1
            size = size + int(tokenizer.token_bytes[ids].sum())
        if not documents:
            raise UserError(f"the {split} split has no documents; give more")
        shards, digest = tokens.close()
        content[split] = SplitRecord(documents, size, sum(shards), shards, digest, weights.close()[1])
    _write_record(folder, tokenizer, recipe, content, {})


def _write_record(
    folder: Path,
    tokenizer: Tokenizer,
    recipe: dict[str, Any],
    content: dict[str, SplitRecord],
    findings: dict[str, Any],
) -> None:
    record = {
        "recipe": recipe,
        "kind": KIND,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "content": {split: dataclasses.asdict(each) for split, each in content.items()},
        "findings": findings,
    }
    (folder / "recipe.json").write_text(json.dumps(record, indent=1) + "\n")


class _ShardWriter:
    """Writes a stream of tokens or weights in files of equal size."""

    def __init__(self, folder: Path, shard_tokens: int, kind: str = "tokens"):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._kind = kind
        self._waiting: list[np.ndarray] = []
        self._size = 0
        self._shards: list[int] = []
        self._digest = hashlib.sha256()

    def add(self, values: np.ndarray) -> None:
        self._waiting.append(values)
        self._size += len(values)
        while self._size >= self._shard_tokens:
            joined = np.concatenate(self._waiting)
            self._save(joined[: self._shard_tokens])
            self._waiting = [joined[self._shard_tokens :]]
            self._size -= self._shard_tokens

    def _save(self, values: np.ndarray) -> None:
        np.save(self._folder / shard_name(len(self._shards), self._kind), values)
        self._shards.append(len(values))
        self._digest.update(np.ascontiguousarray(values).data)

    def close(self) -> tuple[tuple[int, ...], str]:
        """Writes the rest; returns the sizes of the files, and the hash of all of them."""
        if self._size:
            self._save(np.concatenate(self._waiting))
        return tuple(self._shards), self._digest.hexdigest()


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


@dataclasses.dataclass
class Counts:
    """Counts of the documents of one split in a part."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    sha256: str = ""
    """The hash of the token ids."""


@dataclasses.dataclass
class Part:
    """The record of a part."""

    source: str
    """SHA-256 of the files that the part was made from."""
    splits: dict[str, Counts]
    skipped: Skipped


class Parts:
    """The parts of the documents of `options`, encoded by one tokenizer."""

    def __init__(self, folder: str | Path, options: TextSource, tokenizer: Tokenizer):
        self._options = options
        self._tokenizer = tokenizer
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._groups = list(_in_groups(options.files(), lambda file: file.path.stat().st_size, PART_BYTES))
        names = [[file.name for file in group] for group in self._groups]
        identity = [tokenizer.sha256, options.column, options.test_share, options.seed, names]
        self.root = path_of(folder)
        self._folder = self.root / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._groups)

    def encode(self, numbers: Sequence[int], progress: Progress) -> int:
        """Encodes the missing parts; returns their number."""
        encoded = 0
        tokens = 0
        for number in numbers:
            source = _hash_of(self._groups[number])
            part = self._record(number)
            if part is None or part.source != source:
                part = self._encode(number, source)
                encoded = encoded + 1
            tokens += sum(counts.tokens for counts in part.splits.values())
            progress("tokens", tokens, 0)
        return encoded

    def _encode(self, number: int, source: str) -> Part:
        part = Part(source, {split: Counts() for split in SPLITS}, Skipped())
        digests = {split: hashlib.sha256() for split in SPLITS}
        with contextlib.ExitStack() as stack:
            paths = {split: stack.enter_context(whole_file(self._tokens(number, split))) for split in SPLITS}
            files = {split: stack.enter_context(path.open("wb")) for split, path in paths.items()}
            documents = self._options.split(read_documents(self._groups[number], self._options.column, part.skipped))
            for some in _in_groups(documents, lambda document: len(document[1]), _CHARACTERS_AT_ONCE):
                encoded = self._tokenizer.encode_batch([text for _, text in some], threads=os.cpu_count() or 1)
                for (split, text), ids in zip(some, encoded, strict=True):
                    content = np.asarray([self._tokenizer.bos, *ids], self._dtype).tobytes()
                    counts = part.splits[split]
                    files[split].write(content)
                    digests[split].update(content)
                    counts.documents += 1
                    counts.bytes += len(text.encode())
                    counts.tokens += 1 + len(ids)
        for split, digest in digests.items():
            part.splits[split].sha256 = digest.hexdigest()
        write_text(self._folder / f"{number:05}.json", json.dumps(dataclasses.asdict(part)))
        return part

    def _tokens(self, number: int, split: str) -> Path:
        return self._folder / f"{number:05}.{split}.bin"

    def _record(self, number: int) -> Part | None:
        """Returns the record of a part; None if there is none that is valid."""
        try:
            record = json.loads(read_whole(self._folder / f"{number:05}.json", largest_bytes=_LARGEST_RECORD))
            splits = {split: Counts(**record["splits"][split]) for split in SPLITS}
            return Part(record["source"], splits, Skipped(**record["skipped"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError, DamagedError):
            return None

    def record(self, number: int) -> Part:
        """Returns the record of a part. Raises `UserError` if the part is missing."""
        part = self._record(number)
        if part is None:
            raise UserError(f"{self._folder} has no part {number:05}; run the command again")
        return part

    def tokens(self, number: int, split: str) -> Iterator[np.ndarray]:
        """Yields the token ids of a part. Raises `UserError` if they differ from what was written."""
        path = self._tokens(number, split)
        digest = hashlib.sha256()
        with local_copy(path) as local, local.open("rb") as file:
            while content := file.read(_TOKENS_AT_ONCE * self._dtype.itemsize):
                digest.update(content)
                yield np.frombuffer(content, self._dtype)
        if digest.hexdigest() != self.record(number).splits[split].sha256:
            raise UserError(f"{path} is damaged; remove it and {number:05}.json, and run the command again")

    def remove(self) -> None:
        remove_folder(self.root)


def _in_groups(items: Iterable[_T], size_of: Callable[[_T], int], size: int) -> Iterator[list[_T]]:
    """Yields lists of consecutive items whose sizes add up to at least `size`, except the last list."""
    group: list[_T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if total >= size:
            yield group
            group = []
            total = 0
    if group:
        yield group


def _hash_of(files: Sequence[TextFile]) -> str:
    digest = hashlib.sha256()
    for file in files:
        with local_copy(file.path) as path, path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def part_of(text: str) -> tuple[int, int]:
    """Reads `N/M`: part N, from 1, of M. Raises `UserError`."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise UserError(f"--part {text}: expected N/M with N from 1 to M, such as 1/8")
    return int(number), int(count)


def _held_out(parts: Parts, tokenizer: Tokenizer) -> bytes:
    """Returns the held-out documents one after the other."""
    content = bytearray()
    for number in range(len(parts)):
        for text in decoded(tokenizer, np.concatenate([np.zeros(0, np.int64), *parts.tokens(number, "test")])):
            content += text.encode()
    return bytes(content)
