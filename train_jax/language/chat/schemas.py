"""Answers that are JSON of a schema: before each token, the tokens that would leave the schema are forbidden.

llguidance reads the schema and computes the allowed tokens on the host. No program depends on a schema.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from train_jax.errors import UserError, pip_install
from train_jax.language.biases import FORBIDDEN
from train_jax.language.tokenizer import Tokenizer

_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""A small model could write blanks without end; these separators are those of `json.dumps`."""


class SchemaBias:
    """Forbids the tokens that cannot continue a JSON text of a schema; its end is allowed once the text is complete."""

    changes = True

    def __init__(self, matcher: Any, vocab_size: int):
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._read = 0

    def logits_after(self, tokens: Sequence[int]) -> Float[np.ndarray, " vocab_size"]:
        self._follow(tokens)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(words, bitorder="little")[: self._vocab_size].astype(bool)
        return np.where(allowed, np.float32(0), np.float32(FORBIDDEN))

    def forced_after(self, tokens: Sequence[int]) -> Sequence[int]:
        self._follow(tokens)
        return self._matcher.compute_ff_tokens()

    def fresh(self) -> SchemaBias:
        """Returns a bias for one more answer, from one that has read no token: the schema is compiled only once."""
        return SchemaBias(self._matcher.deep_copy(), self._vocab_size)

    def _follow(self, tokens: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(tokens[self._read :]))
        self._read = len(tokens)


def schema_bias(tokenizer: Tokenizer, end: int, response_format: Any) -> SchemaBias | None:
    """Reads `response_format`; None for a text. `end` is the token that ends the answer.

    Raises `UserError` for another form, for a schema that llguidance does not know, and if it is not installed.
    """
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind in (None, "text"):
        return None
    schema: Any = {"type": "object"} if kind == "json_object" else None
    if kind == "json_schema":
        described = response_format.get("json_schema")
        schema = described.get("schema") if isinstance(described, dict) else None
    if not isinstance(schema, dict | bool):
        expected = '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
        raise UserError(f"response_format is wrong; use {expected}, or the type json_object or text")
    library = _library()
    try:
        grammar = library.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)
        matcher = library.LLMatcher(_tokenizer_of(tokenizer, end), grammar, log_level=0)
        problem = matcher.get_error()
    except ValueError as error:
        problem = str(error)
    if problem:
        reason = " ".join(problem.split())[:200]
        raise UserError(f"response_format has a schema that is not supported ({reason}); simplify it")
    return SchemaBias(matcher, tokenizer.vocab_size)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        message = f"response_format needs the package llguidance on the server; install it with {pip_install('schema')}"
        raise UserError(message) from None


class _Vocabulary:
    """A tokenizer in the form that llguidance reads."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, end: int):
        self.eos_token_id = end
        self.tokens = [tokenizer.bytes_of(number) for number in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.specials.values())
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", errors="replace"))


@functools.lru_cache(maxsize=8)
def _tokenizer_of(tokenizer: Tokenizer, end: int) -> Any:
    library = _library()
    return library.LLTokenizer(library.TokenizerWrapper(_Vocabulary(tokenizer, end)))
