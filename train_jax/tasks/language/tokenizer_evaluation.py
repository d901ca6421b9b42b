"""Measures a tokenizer on documents: bytes per token, and whether text comes back from its tokens."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from train_jax.tasks.language.tokenizer import Tokenizer, text_package

_DOCUMENTS_AT_ONCE = 64


@dataclass
class SplitFigures:
    """Sums over the documents of a split."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    not_restored: int = 0
    """Documents that differ from their decoded tokens."""
    not_equal: int = 0
    """Documents with other tokens by `tokenizer.json`."""


def measure(tokenizer: Tokenizer, documents: Iterable[tuple[str, str]]) -> tuple[dict[str, SplitFigures], bool]:
    """Returns the figures of each split, and whether `tokenizer.json` was compared."""
    figures = {"train": SplitFigures(), "test": SplitFigures()}
    reference = _reference(tokenizer)
    for part in _parts(documents, _DOCUMENTS_AT_ONCE):
        encoded = tokenizer.encode_batch([text for _, text in part])
        for (split, text), ids in zip(part, encoded, strict=True):
            of_split = figures[split]
            of_split.documents += 1
            of_split.bytes += len(text.encode())
            of_split.tokens += len(ids)
            of_split.not_restored += tokenizer.decode(ids) != text
            of_split.not_equal += reference is not None and reference(text) != ids
    return figures, reference is not None


def _reference(tokenizer: Tokenizer) -> Callable[[str], list[int]] | None:
    if importlib.util.find_spec("tokenizers") is None:
        return None
    other: Any = text_package("tokenizers").Tokenizer.from_str(tokenizer.to_json())
    other.encode_special_tokens = True  # special tokens in a text are text
    return lambda text: other.encode(text, add_special_tokens=False).ids


def _parts(items: Iterable[Any], size: int) -> Iterator[Sequence[Any]]:
    items = iter(items)
    while part := list(islice(items, size)):
        yield part
