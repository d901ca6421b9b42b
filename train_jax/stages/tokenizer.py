"""`trm tokenizer`: trains, evaluates or inspects a tokenizer."""

import dataclasses
import time
from collections.abc import Iterable

from train_jax.command_line import parse_subcommand
from train_jax.errors import UserError
from train_jax.run.storage import path_of
from train_jax.tasks.language.documents import STANDARD_LIBRARY, Skipped
from train_jax.tasks.language.options import EvaluateTokenizer, InspectTokenizer, TrainTokenizer
from train_jax.tasks.language.text_set import TextSet, read_record
from train_jax.tasks.language.tokenizer import JSON_NAME, RANKS_NAME, Tokenizer
from train_jax.tasks.language.tokenizer_evaluation import measure
from train_jax.tasks.language.tokenizer_training import tokenizer_of

COMMANDS = {"train": TrainTokenizer, "evaluate": EvaluateTokenizer, "inspect": InspectTokenizer}


def main(config: TrainTokenizer | EvaluateTokenizer | InspectTokenizer) -> None:
    match config:
        case TrainTokenizer():
            train(config)
        case EvaluateTokenizer():
            evaluate(config)
        case InspectTokenizer():
            inspect(config)


def train(config: TrainTokenizer) -> None:
    started = time.monotonic()
    tokenizer = tokenizer_of(config.train_documents, config.vocab_size, config.max_characters)
    folder = path_of(config.output_dir)
    tokenizer.save(folder)
    print(f"{folder / JSON_NAME} and {RANKS_NAME}: {_size(tokenizer)}, in {time.monotonic() - started:.1f} s")
    print(f"  sha256 {tokenizer.sha256}")


def evaluate(config: EvaluateTokenizer) -> None:
    tokenizer = Tokenizer.load(config.folder)
    name, documents = _documents(config)
    figures, compared = measure(tokenizer, documents)
    print(f"{name}:")
    print(f"{'split':<6} {'documents':>10} {'bytes':>14} {'tokens':>14} {'bytes/token':>12}")
    for split, each in figures.items():
        if not each.documents:
            continue
        ratio = each.bytes / max(each.tokens, 1)
        print(f"{split:<6} {each.documents:>10,} {each.bytes:>14,} {each.tokens:>14,} {ratio:>12.3f}")
    checks = {"differ from their decoded tokens": sum(each.not_restored for each in figures.values())}
    if compared:
        checks[f"have other tokens by {JSON_NAME}"] = sum(each.not_equal for each in figures.values())
    else:
        print(f"{JSON_NAME} was not compared: the package tokenizers is not installed")
    for text, count in checks.items():
        print(f"{count} documents {text}")
    if any(checks.values()):
        raise UserError(f"{config.folder} does not restore every document; train the tokenizer again")


def _documents(config: EvaluateTokenizer) -> tuple[str, Iterable[tuple[str, str]]]:
    """Returns what is measured, in words, and the split and text of each document."""
    if not config.source and read_record(config.folder) is not None:
        return f"held-out text of {config.folder}", (
            ("test", text) for text in TextSet(config.folder).documents("test")
        )
    chosen = config if config.source else dataclasses.replace(config, source=(STANDARD_LIBRARY,))
    return f"documents of {', '.join(chosen.source)}", chosen.documents(Skipped())


def inspect(config: InspectTokenizer) -> None:
    tokenizer = Tokenizer.load(config.folder)
    print(f"{config.folder}: {_size(tokenizer)}, sha256 {tokenizer.sha256}")
    print("special tokens: " + ", ".join(f"{name} {number}" for name, number in tokenizer.specials.items()))
    longest = sorted(tokenizer.ranks, key=len, reverse=True)[: config.longest]
    for token in longest:
        print(f"  {tokenizer.ranks[token]:>8}  {len(token):>4} bytes  {_shown(token)}")
    if config.text:
        ids = _encoded(tokenizer, config.text)
        for number in ids:
            print(f"  {number:>8}  {_shown(tokenizer.bytes_of(number))}")
        print(f"{len(config.text.encode())} bytes, {len(ids)} tokens")


def _shown(token: bytes) -> str:
    """Formats a token; bytes that are a part of a character are `<0xF0>`."""
    text = token.decode(errors="surrogateescape")
    return repr("".join(f"<0x{ord(each) - 0xDC00:02X}>" if 0xDC80 <= ord(each) <= 0xDCFF else each for each in text))


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.encode(text)
    except UnicodeEncodeError:
        raise UserError("--text is not valid UTF-8; correct it") from None


def _size(tokenizer: Tokenizer) -> str:
    return f"{tokenizer.vocab_size:,} tokens, {len(tokenizer.specials)} of them special"


def cli(argv: list[str]) -> None:
    unknown, description = "command {} of trm tokenizer", "Trains, evaluates or inspects a tokenizer."
    main(parse_subcommand(COMMANDS, argv, prog="trm tokenizer", unknown=unknown, description=description))
