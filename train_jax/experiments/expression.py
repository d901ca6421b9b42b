"""Free sweeps in one expression: `product`, `zip` and `chain` of lists of values for fields.

    product(optim.lr=[1e-4, 3e-4], zip(arch.hidden_size=[256, 512], arch.num_heads=[4, 8]))

Values are JSON, or words without quotes. Nothing is evaluated.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from train_jax.errors import UserError

Settings = dict[str, Any]
"""Values by dotted field name."""
EXAMPLE = "product(optim.lr=[1e-4, 3e-4], seed=[0, 1])"
LARGEST = 100_000
"""Combinations; more are a mistake."""
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|[()\[\],=]|[^\s()\[\],="]+)')


def combinations(text: str) -> list[Settings]:
    """Returns the settings of every run of an expression, in order. Raises `UserError` for an invalid expression."""
    parser = _Parser(text)
    settings = parser.expression()
    parser.end()
    return settings


def _product(parts: Sequence[list[Settings]]) -> list[Settings]:
    size = 1
    for part in parts:
        size *= len(part)
    if size > LARGEST:
        raise UserError(f"the sweep has {size:,} runs; use at most {LARGEST:,}")
    return [_merged(each) for each in itertools.product(*parts)]


def _zip(parts: Sequence[list[Settings]]) -> list[Settings]:
    lengths = [len(part) for part in parts]
    if len(set(lengths)) > 1:
        raise UserError(
            f"zip needs lists of equal length, found {', '.join(map(str, lengths))}; use product, or one zip"
        )
    return [_merged(each) for each in zip(*parts, strict=True)]


def _chain(parts: Sequence[list[Settings]]) -> list[Settings]:
    return list(itertools.chain(*parts))


def _merged(parts: Sequence[Settings]) -> Settings:
    merged: Settings = {}
    for part in parts:
        twice = merged.keys() & part.keys()
        if twice:
            raise UserError(f"{min(twice)} occurs twice in one combination; give it once")
        merged |= part
    return merged


_FUNCTIONS: dict[str, Callable[[Sequence[list[Settings]]], list[Settings]]] = {
    "product": _product,
    "zip": _zip,
    "chain": _chain,
}


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str):
        self._text, self._tokens, position = text, [], 0
        while position < len(text.rstrip()):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(f"a quote at {text[position:].strip()[:20]!r} has no end")
            self._tokens.append(match[1])
            position = match.end()

    def expression(self) -> list[Settings]:
        """`function(expression, …)` or `field=[value, …]`."""
        name = self._take("the name of a field, or product, zip or chain")
        if self._next() == "(":
            if name not in _FUNCTIONS:
                raise self._error(f"unknown function {name!r}, expected {', '.join(_FUNCTIONS)}")
            return _FUNCTIONS[name](self._listed("(", ")", self.expression))
        if not re.fullmatch(r"[A-Za-z_][\w.]*", name):
            raise self._error(f"{name!r} is not the name of a field")
        self._expect("=")
        return [{name: value} for value in self._listed("[", "]", self._value)]

    def end(self) -> None:
        if self._tokens:
            raise self._error(f"{self._tokens[0]!r} follows the end of the expression")

    def _listed(self, opening: str, closing: str, item: Callable[[], Any]) -> list[Any]:
        self._expect(opening)
        items = [item()]
        while self._next() == ",":
            self._take(",")
            items.append(item())
        self._expect(closing)
        return items

    def _value(self) -> Any:
        if self._next() == "[":
            return tuple(self._listed("[", "]", self._value))
        word = self._take("a value")
        if word in "()[],=":
            raise self._error(f"expected a value, found {word!r}")
        try:
            return json.loads(word)
        except ValueError:
            return {"True": True, "False": False, "None": None}.get(word, word)

    def _next(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def _take(self, expected: str) -> str:
        if not self._tokens:
            raise self._error(f"it ends where {expected} is expected")
        return self._tokens.pop(0)

    def _expect(self, token: str) -> None:
        word = self._take(repr(token))
        if word != token:
            raise self._error(f"expected {token!r}, found {word!r}")

    def _error(self, problem: str) -> UserError:
        return UserError(f"the sweep {self._text!r} cannot be read: {problem}; write it as '{EXAMPLE}'")
