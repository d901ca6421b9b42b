"""`trm tokenizer`: trains, evaluates or inspects a tokenizer."""

import dataclasses
import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse_subcommand
from train_jax.errors import UserError
from train_jax.language.documents import STANDARD_LIBRARY, Skipped, TextSource, VocabSize
from train_jax.language.text_set import TextSet, read_record
from train_jax.language.tokenizer import JSON_NAME, RANKS_NAME, SAMPLES, Tokenizer, measure
from train_jax.storage.storage import path_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizer(TextSource):
    """Trains a byte-level BPE tokenizer on the documents of the train split."""

    output_dir: Path = Path("data/tokenizer")
    """Folder for tokenizer.json and tokenizer.tiktoken (text ranks), or gs://bucket/folder."""
    vocab_size: VocabSize = 4096
    """Number of tokens, including 256 bytes and 9 special tokens."""
    max_characters: Annotated[int, Range(0, 10**12)] = 2 * 10**9
    """Characters to train on; 0 for all."""

    def run(self) -> None:
        started = time.monotonic()
        tokenizer = self.train_tokenizer(self.vocab_size, self.max_characters)
        folder = path_of(self.output_dir)
        tokenizer.save(folder)
        print(f"{folder / JSON_NAME} and {RANKS_NAME}: {_size(tokenizer)}, in {time.monotonic() - started:.1f} s")
        print(f"  sha256 {tokenizer.sha256}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateTokenizer(TextSource):
    """Prints bytes per token on documents and on short texts of several kinds; compares every document with its decoded
    tokens and, if the package `tokenizers` is installed, its tokens with those of tokenizer.json."""

    folder: tyro.conf.Positional[str]
    """Folder with tokenizer.json: of a tokenizer or of a data set."""
    source: tuple[str, ...] = ()
    """Documents to measure, as with `trm tokenizer train`; by default the held-out text of a data set, and
    standard-library for a tokenizer."""

    def run(self) -> None:
        tokenizer = Tokenizer.load(self.folder)
        name, documents = self._documents()
        figures, compared = measure(tokenizer, itertools.chain(documents, SAMPLES.items()))
        print(f"{name}, and short texts; {tokenizer.vocab_size:,} tokens:")
        print(f"{'text':<8} {'documents':>10} {'bytes':>14} {'tokens':>14} {'bytes/token':>12}")
        for kind, each in figures.items():
            ratio = each.bytes / max(each.tokens, 1)
            print(f"{kind:<8} {each.documents:>10,} {each.bytes:>14,} {each.tokens:>14,} {ratio:>12.3f}")
        checks = {"differ from their decoded tokens": sum(each.not_restored for each in figures.values())}
        if compared:
            checks[f"have other tokens by {JSON_NAME}"] = sum(each.not_equal for each in figures.values())
        else:
            print(f"{JSON_NAME} was not compared: the package tokenizers is not installed")
        for text, count in checks.items():
            print(f"{count} documents {text}")
        if any(checks.values()):
            raise UserError(f"{self.folder} does not restore every document; train the tokenizer again")

    def _documents(self) -> tuple[str, Iterable[tuple[str, str]]]:
        """Returns a description of the measured documents, and the split and text of each."""
        if not self.source and read_record(self.folder) is not None:
            texts = TextSet(self.folder).documents("test")
            return f"held-out text of {self.folder}", (("test", text) for text in texts)
        chosen = self if self.source else dataclasses.replace(self, source=(STANDARD_LIBRARY,))
        return f"documents of {', '.join(chosen.source)}", chosen.documents(Skipped())


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectTokenizer:
    """Prints size, special tokens, hash and longest tokens of a tokenizer, and the tokens of a text."""

    folder: tyro.conf.Positional[str]
    """Folder with tokenizer.json: of a tokenizer or of a data set."""
    text: str = ""
    """Text to encode."""
    longest: Annotated[int, Range(0, 1000)] = 10
    """Number of longest tokens to show."""

    def run(self) -> None:
        tokenizer = Tokenizer.load(self.folder)
        print(f"{self.folder}: {_size(tokenizer)}, sha256 {tokenizer.sha256}")
        print("special tokens: " + ", ".join(f"{name} {number}" for name, number in tokenizer.specials.items()))
        for token in sorted(tokenizer.ranks, key=len, reverse=True)[: self.longest]:
            print(f"  {tokenizer.ranks[token]:>8}  {len(token):>4} bytes  {_shown(token)}")
        if self.text:
            try:
                ids = tokenizer.encode(self.text)
            except UnicodeEncodeError:
                raise UserError("--text is not valid UTF-8; correct it") from None
            for number in ids:
                print(f"  {number:>8}  {_shown(tokenizer.bytes_of(number))}")
            print(f"{len(self.text.encode())} bytes, {len(ids)} tokens")


COMMANDS = {"train": TrainTokenizer, "evaluate": EvaluateTokenizer, "inspect": InspectTokenizer}


def main(config: TrainTokenizer | EvaluateTokenizer | InspectTokenizer) -> None:
    config.run()


def _shown(token: bytes) -> str:
    """Formats a token; bytes that are a part of a character are `<0xF0>`."""
    text = token.decode(errors="surrogateescape")
    return repr("".join(f"<0x{ord(each) - 0xDC00:02X}>" if 0xDC80 <= ord(each) <= 0xDCFF else each for each in text))


def _size(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.vocab_size:,} tokens, {len(tokenizer.specials)} of them special"


def cli(argv: list[str]) -> None:
    unknown = "command {} of trm tokenizer"
    description = "Trains, evaluates or inspects a tokenizer."
    main(parse_subcommand(COMMANDS, argv, prog="trm tokenizer", unknown=unknown, description=description))
