"""A calculator for language models: arithmetic, how often a text contains another one, and functions of a text.

An expression is read as syntax and computed by the few operations below; nothing is executed. The outputs in training
data are written by `calculate`, too, so that a model reads the same text when it is served.
"""

from __future__ import annotations

import ast
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from train_jax.language.chat.conversations import special_tokens
from train_jax.language.tokenizer import Tokenizer

Functions = Mapping[str, Callable[[str], str | None]]
"""Functions of a text, by their names in a call; None is no output."""

_LOG = logging.getLogger(__name__)
_LONGEST = 200
_LARGEST_DIGITS = 60
"""Digits of the largest whole number that is an output."""
_BINARY = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str, functions: Functions | None = None) -> str | None:
    """Returns the value of an expression, or None for what the calculator does not compute.

    The value is exact: `0.2*50` is 10, and `6*0.1` is 0.6. Only a fraction that needs more digits than a float has is
    rounded, as Python rounds it.
    It knows `+ - * / // %`, parentheses, numbers, in which commas are left out, `"text".count("part")`, and calls such
    as `name("text")` of `functions`.
    """
    expression = expression.strip()
    if not expression or len(expression) > _LONGEST:
        return None
    if not any(quote in expression for quote in "\"'"):
        expression = expression.replace(",", "")
    try:
        node = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    match node:
        case ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=str() as text)], keywords=[]):
            function = (functions or {}).get(name)
            return function(text) if function else None
    try:
        value = _value(node)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return None
    if abs(value) >= 10**_LARGEST_DIGITS:
        return None
    return str(value.numerator if value.denominator == 1 else float(value))


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return Fraction(str(value))  # 0.1 is a tenth, not the float that is nearest to it
        case ast.UnaryOp() if type(node.op) in _UNARY:
            return _UNARY[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in _BINARY:
            return Fraction(_BINARY[type(node.op)](_value(node.left), _value(node.right)))  # of //: an int
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            return Fraction(text.count(part))
    raise ValueError(f"the calculator does not know {type(node).__name__}")


def answer_ends(tokenizer: Tokenizer, *, has_tool: bool = True, functions: Functions | None = None) -> dict[str, Any]:
    """Returns the fields of a `Request` for an assistant's message: its last tokens, and the calculator for its calls.

    Without the calculator, a call ends the message. After an instruction, there are no calls.
    """
    if tokenizer.instructions:
        return {"stop": (tokenizer.stop,), "respond": None}
    special = special_tokens(tokenizer)
    stop = (special["<|assistant_end|>"], tokenizer.bos, special["<|python_end|>"])
    return {"stop": stop, "respond": tool_of(tokenizer, functions) if has_tool else None}


def tool_of(tokenizer: Tokenizer, functions: Functions | None = None) -> Callable[[Sequence[int]], list[int] | None]:
    """Returns a function for `Request.respond`: after a call of Python, the tokens of its output.

    It returns no tokens after a call that the calculator does not compute or whose function fails, and None after
    another stop token.
    """
    special = special_tokens(tokenizer)
    start = special["<|python_start|>"]
    end = special["<|python_end|>"]

    def respond(tokens: Sequence[int]) -> list[int] | None:
        if tokens[-1] != end:
            return None
        if start not in tokens:
            return []
        last = len(tokens) - 1 - list(reversed(tokens)).index(start)
        expression = tokenizer.decode(tokens[last + 1 : -1])
        try:
            value = calculate(expression, functions)
        except Exception:  # an error of a function here would end the engine, and with it all other answers
            _LOG.exception("the call %r failed", expression)
            value = None
        if value is None:
            return []
        return [special["<|output_start|>"], *tokenizer.encode(value), special["<|output_end|>"]]

    return respond
