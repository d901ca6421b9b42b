"""A text data set on disk: memory-mapped shards of token ids, the tokenizer and `recipe.json`.

```text
DIR/recipe.json              options, counts and hashes
DIR/tokenizer.json           also tokenizer.tiktoken
DIR/train/tokens-00000.npy   uint16 or uint32; every document begins with <|bos|>
DIR/train/weights-00000.npy  uint8, only of some data sets; 0 for a token that is no target, such as one of a question
DIR/test/…
```

The tokens of a split are one stream: a document may continue in the next shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from train_jax.errors import UserError, brief
from train_jax.language.tokenizer import JSON_NAME, RANKS_NAME, Tokenizer
from train_jax.storage.cache import local_folder
from train_jax.storage.content import remembered
from train_jax.storage.new_dataset import Layout
from train_jax.storage.storage import path_of
from train_jax.storage.untrusted import DamagedError, map_array, read_whole

SPLITS = ("train", "test")
KIND = "text"
REBUILD = "build it again with `trm build-data text`"
_LARGEST_RECIPE = 2**26
_CHUNK = 2**24
_PART = 2**16
SCANNED_BYTES = 2**28
"""Bytes of tokens that are checked before a run."""


def shard_name(number: int, kind: str = "tokens") -> str:
    return f"{kind}-{number:05}.npy"


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the type in which token ids are stored."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def read_record(directory: str | Path) -> dict[str, Any] | None:
    """Reads `recipe.json` of a text data set; None if there is none that is valid. Its values are untrusted."""
    try:
        record = json.loads(read_whole(path_of(directory) / "recipe.json", largest_bytes=_LARGEST_RECIPE))
        content = {split: _split_record(record["content"][split]) for split in SPLITS}
        valid = record["kind"] == KIND and isinstance(record["recipe"], dict) and type(record["vocab_size"]) is int
    except (OSError, ValueError, KeyError, TypeError, RecursionError, DamagedError):
        return None
    return record | {"content": content} if valid and isinstance(record.get("findings", {}), dict) else None


LAYOUT = Layout(frozenset({*SPLITS, JSON_NAME, RANKS_NAME, "recipe.json"}), ("recipe.json",), read_record)


@dataclass(frozen=True)
class SplitRecord:
    """Counts of a split, and the hash of its stream of tokens."""

    documents: int
    bytes: int
    tokens: int
    shards: tuple[int, ...]
    """Number of tokens in each shard."""
    sha256: str
    weights_sha256: str | None = None
    """The hash of the stream of weights; None if there are no weights, and every token is a target."""


def _stated(record: SplitRecord) -> tuple[str, str | None]:
    return record.sha256, record.weights_sha256


def _split_record(values: Any) -> SplitRecord:
    """Returns the record of a split. Raises ValueError, KeyError or TypeError if `build` did not write it."""
    shards = tuple(values["shards"])
    counts = (values["documents"], values["bytes"], values["tokens"])
    weights = values.get("weights_sha256")
    split = SplitRecord(*counts, shards, values["sha256"], weights)
    if any(type(value) is not int or value <= 0 for value in (*counts, *shards)) or sum(shards) != split.tokens:
        raise ValueError("counts")
    if not isinstance(split.sha256, str) or not isinstance(weights, str | None):
        raise TypeError("sha256")
    return split


class TokenStream:
    """The tokens of a split, which repeat without end."""

    def __init__(
        self, folder: Path, shards: tuple[int, ...], vocab_size: int, *, weighted: bool = False, kind: str = "tokens"
    ):
        """Maps the shards; if `weighted`, also those of the weights.

        Raises `UserError` for a shard that is missing or has another size or type.
        """
        self._folder = folder
        self._vocab_size = vocab_size
        self._kind = kind
        dtype = np.dtype("u1") if kind == "weights" else token_dtype(vocab_size)
        self._shards = [_map_shard(folder / shard_name(n, kind), size, dtype) for n, size in enumerate(shards)]
        self._ends = np.cumsum([0, *shards])
        self.weights = TokenStream(folder, shards, 2, kind="weights") if weighted else None
        """The weight of each token, 0 or 1, as a stream like that of the tokens; None without weights."""

    def __len__(self) -> int:
        return int(self._ends[-1])

    def take(self, start: int, count: int) -> np.ndarray:
        """Returns `count` tokens from a position, int32; the first token follows the last one.

        Raises `UserError` for an id that is not in the vocabulary.
        """
        parts = []
        position = start % len(self)
        while count > 0:
            number = int(np.searchsorted(self._ends, position, side="right")) - 1
            first = position - int(self._ends[number])
            part = self._shards[number][first : first + count]
            parts.append(part)
            count -= len(part)
            position = (position + len(part)) % len(self)
        tokens = np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, np.int32)
        self._check(tokens)
        return tokens

    def check(self) -> None:
        """Raises `UserError` as `take` does, before a run begins; reads evenly spaced parts of a large split."""
        for part in sampled(self._shards):
            self._check(part)
        if self.weights is not None:
            self.weights.check()

    def _check(self, tokens: np.ndarray) -> None:
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            what = f"the {self._kind.removesuffix('s')} {tokens.max()}"
            raise UserError(f"{self._folder} contains {what}, expected less than {self._vocab_size}; {REBUILD}")

    @property
    def hashes(self) -> tuple[str, str | None]:
        """The SHA-256 of the tokens and of the weights, as stored; None without weights."""
        files = [self._folder / shard_name(number, self._kind) for number in range(len(self._shards))]
        own = remembered(files, "stream", lambda: stream_hash(self))
        return own, None if self.weights is None else self.weights.hashes[0]

    def chunks(self) -> Iterator[np.ndarray]:
        """Yields the stored arrays in parts."""
        for shard in self._shards:
            for first in range(0, len(shard), _CHUNK):
                yield shard[first : first + _CHUNK]


def sampled(shards: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields all parts of some vectors, or evenly spaced ones of those with more than `SCANNED_BYTES`."""
    every = -(-sum(shard.nbytes for shard in shards) // SCANNED_BYTES) or 1
    for shard in shards:
        for first in range(0, len(shard), every * _PART):
            yield shard[first : first + _PART]


def _map_shard(path: Path, size: int, dtype: np.dtype) -> np.ndarray:
    try:
        array = map_array(path)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {REBUILD}") from None
    except DamagedError as error:
        raise UserError(f"{path} is not a valid array ({error}); {REBUILD}") from None
    if array.shape != (size,) or array.dtype != dtype:
        raise UserError(
            f"{path} has shape {array.shape} and dtype {array.dtype}, expected ({size},) and {dtype}; {REBUILD}"
        )
    return np.asarray(array)


class TextSet:
    """An opened data set; shards and tokenizer are read when they are needed."""

    def __init__(self, directory: str | Path, vocab_size: int = 0):
        """Raises `UserError` if there is no complete text data set. A remote one is copied and verified.

        `vocab_size`: that of the model, for the remedy; 0 if any is fine.
        """
        folder = local_folder(directory, _check_hashes)
        record = read_record(folder)
        if record is None:
            size = f" --vocab-size {vocab_size}" if vocab_size else ""
            build = f"trm build-data text --source FOLDER{size}"
            remedy = f"build one with `{build} --output-dir {directory}`"
            if (folder / "train").exists():  # a data set of puzzles, into which a build must not write
                remedy = f"give a --data-dir with text, or build one with `{build}`"
            raise UserError(f"{path_of(directory)} is not a text data set; {remedy}")
        self.directory = directory
        self.folder = folder
        self.record = record
        self.vocab_size: int = record["vocab_size"]
        self.splits: dict[str, SplitRecord] = record["content"]

    @cached_property
    def hashes(self) -> dict[str, tuple[str, str | None]]:
        """The hashes of the tokens and of the weights of each split, as the files have them."""
        return {split: self.stream(split).hashes for split in SPLITS}

    @property
    def changed(self) -> bool:
        """True if the files are not those that were built, by the hashes in `recipe.json`."""
        return any(self.hashes[split] != _stated(record) for split, record in self.splits.items())

    @property
    def fingerprint(self) -> str:
        """Hash of the tokens of both splits, of their weights and of the tokenizer."""
        tokens, weights = zip(*(self.hashes[split] for split in SPLITS), strict=True)
        parts = [*tokens, str(self.record.get("tokenizer_sha256")), *(each for each in weights if each)]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]

    @property
    def compressed(self) -> dict[str, float]:
        """Bits per byte of compressors on the held-out documents, by command; empty if these were too large."""
        findings = self.record.get("findings", {})
        names = {"gzip -9": "gzip", "bzip2 -9": "bz2", "xz -9e": "xz"}
        values = {shown: findings.get(f"{name}_bits_per_byte") for shown, name in names.items()}
        return {shown: float(value) for shown, value in values.items() if isinstance(value, (int, float))}

    def stream(self, split: str) -> TokenStream:
        return _stream(self.folder, split, self.splits[split], self.vocab_size)

    def documents(self, split: str) -> Iterator[str]:
        """Yields the text of each document of a split, whose tokens are all read at once."""
        tokenizer = self.tokenizer()
        stream = self.stream(split)
        return decoded(tokenizer, stream.take(0, len(stream)))

    def tokenizer(self) -> Tokenizer:
        """Reads the tokenizer. Raises `UserError` if the tokens were made with another one."""
        tokenizer = Tokenizer.load(self.folder)
        if tokenizer.vocab_size != self.vocab_size or tokenizer.sha256 != self.record.get("tokenizer_sha256"):
            raise UserError(
                f"{self.folder / JSON_NAME} is another tokenizer than recipe.json says "
                f"({brief(self.record.get('tokenizer_sha256'))}); {REBUILD}"
            )
        return tokenizer


def open_beside(directory: str | Path, first: TextSet) -> TextSet:
    """Opens another data set. Raises `UserError` if it was built with another tokenizer than `first`."""
    data = TextSet(directory)
    if data.record.get("tokenizer_sha256") != first.record.get("tokenizer_sha256"):
        raise UserError(
            f"{directory} was built with another tokenizer than {first.directory}; build it with "
            f"`trm build-data text --tokenizer {first.directory}`"
        )
    return data


def _stream(folder: Path, split: str, record: SplitRecord, vocab_size: int) -> TokenStream:
    return TokenStream(folder / split, record.shards, vocab_size, weighted=record.weights_sha256 is not None)


def decoded(tokenizer: Tokenizer, tokens: np.ndarray) -> Iterator[str]:
    """Yields the text of each document in a stream of tokens."""
    for document in np.split(tokens, np.flatnonzero(tokens == tokenizer.bos))[1:]:
        yield tokenizer.decode(document[1:].tolist())


def stream_hash(stream: TokenStream) -> str:
    """Returns the SHA-256 of the tokens or weights of a split, as stored."""
    digest = hashlib.sha256()
    for chunk in stream.chunks():
        digest.update(np.ascontiguousarray(chunk).data)
    return digest.hexdigest()


def _check_hashes(copy: Path) -> None:
    record = read_record(copy)
    if record is None:
        return
    for split in SPLITS:
        each = record["content"][split]
        if _stream(copy, split, each, record["vocab_size"]).hashes != _stated(each):
            raise UserError(f"the {split} split is not what recipe.json says (SHA-256); {REBUILD} and --overwrite")
