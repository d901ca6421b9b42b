"""Trains a tokenizer on documents with rustbpe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from train_jax.errors import UserError
from train_jax.tasks.language.documents import Skipped
from train_jax.tasks.language.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN, Tokenizer, text_package

SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Returns a tokenizer with `vocab_size` tokens, including the special ones.

    Raises `UserError` if the texts have too few different pairs for that many tokens.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise UserError(f"--vocab-size is {vocab_size}; use at least {SMALLEST_VOCABULARY}")
    trainer = text_package("rustbpe").Tokenizer()
    trainer.train_from_iterator(iter(texts), vocab_size - len(SPECIAL_TOKENS), pattern=SPLIT_PATTERN)
    tokenizer = Tokenizer({bytes(token): rank for token, rank in trainer.get_mergeable_ranks()})
    if tokenizer.vocab_size != vocab_size:
        raise UserError(
            f"the texts give only {tokenizer.vocab_size} tokens, --vocab-size is {vocab_size}; use more text or at "
            f"most --vocab-size {tokenizer.vocab_size}"
        )
    return tokenizer


def tokenizer_of(documents: Callable[[Skipped], Iterable[str]], vocab_size: int, max_characters: int) -> Tokenizer:
    """Returns a tokenizer trained on the first characters of the documents, of all with 0.

    Raises `UserError` as `train_tokenizer` does, with what was skipped.
    """
    skipped = Skipped()
    try:
        return train_tokenizer(first_characters(documents(skipped), max_characters), vocab_size)
    except UserError as error:
        raise UserError(f"{error}{skipped.note}") from None


def first_characters(texts: Iterable[str], limit: int) -> Iterator[str]:
    """Yields texts until they have `limit` characters; 0 yields all."""
    total = 0
    for text in texts:
        yield text
        total += len(text)
        if limit and total >= limit:
            return
