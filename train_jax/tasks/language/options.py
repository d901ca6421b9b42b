"""Options of the commands that read documents: sources, splits and the seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional

from models_torch.ranges import Range
from train_jax.tasks.language.documents import (
    STANDARD_LIBRARY,
    Skipped,
    TextFile,
    is_test,
    list_files,
    read_documents,
    shuffled,
)

VocabSize = Annotated[int, Range(265, 2**24)]
Seed = Annotated[int, Range(0, 2**63 - 1)]


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Documents and their splits."""

    source: tuple[str, ...] = (STANDARD_LIBRARY,)
    """Folders and .txt, .md, .rst, .py, .jsonl, .parquet files, also gs://bucket/…; hf://OWNER/NAME[/FOLDER] is a data
    set of the Hugging Face hub, standard-library the source code of the running Python, without its tests."""
    column: str = "text"
    """Field of .jsonl and column of .parquet files with the text."""
    test_share: Annotated[float, Range(0, 0.5, low_excluded=True)] = 0.05
    """Share of the documents in the test split, chosen by a hash of their text."""
    seed: Seed = 0
    """Seed of the order of the files and of the splits."""

    def files(self) -> list[TextFile]:
        """The files in the order in which they are read."""
        return shuffled(list_files(self.source), self.seed)

    def split(self, documents: Iterator[str]) -> Iterator[tuple[str, str]]:
        """Yields the split and the text of every document."""
        for text in documents:
            yield "test" if is_test(text, self.seed, self.test_share) else "train", text

    def documents(self, skipped: Skipped) -> Iterator[tuple[str, str]]:
        """Yields the split and the text of every document of the sources."""
        return self.split(read_documents(self.files(), self.column, skipped))

    def train_documents(self, skipped: Skipped | None = None) -> Iterator[str]:
        return (text for split, text in self.documents(skipped or Skipped()) if split == "train")


@dataclass(frozen=True, kw_only=True)
class TrainTokenizer(TextSource):
    """Trains a byte-level BPE tokenizer on the documents of the train split."""

    output_dir: Path = Path("data/tokenizer")
    """Folder for tokenizer.json and tokenizer.tiktoken (text ranks), or gs://bucket/folder."""
    vocab_size: VocabSize = 4096
    """Number of tokens, including 256 bytes and 9 special tokens."""
    max_characters: Annotated[int, Range(0, 10**12)] = 2 * 10**9
    """Characters to train on; 0 for all."""


@dataclass(frozen=True, kw_only=True)
class EvaluateTokenizer(TextSource):
    """Prints bytes per token on both splits, and compares every document with its decoded tokens and, if the package
    `tokenizers` is installed, its tokens with those of tokenizer.json."""

    folder: Positional[str]
    """Folder with tokenizer.json: of a tokenizer or of a data set."""
    source: tuple[str, ...] = ()
    """Documents to measure, as of `trm tokenizer train`; by default the held-out text of a data set, and
    standard-library for a tokenizer."""


@dataclass(frozen=True, kw_only=True)
class InspectTokenizer:
    """Prints size, special tokens, hash and longest tokens of a tokenizer, and the tokens of a text."""

    folder: Positional[str]
    """Folder with tokenizer.json: of a tokenizer or of a data set."""
    text: str = ""
    """Text to encode."""
    longest: Annotated[int, Range(0, 1000)] = 10
    """Number of longest tokens to show."""
