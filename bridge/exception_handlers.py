"""Whether the code that called an operation would catch the exception that PyTorch raises for some values.

Traced values cannot raise, so code that goes another way after `except` would always go the first one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from types import FrameType

from bridge.errors import is_framework


def caught_by_the_module(error: type[BaseException], entry: FrameType | None) -> bool:
    """Whether a `try` or `contextlib.suppress` around the running line catches `error`.

    `entry` is the frame in which the bridge runs the module's code: its forward, or later the backward of a
    `torch.autograd.Function`. What is further out is the caller's.
    """
    frame = sys._getframe(1)
    while frame is not None and frame is not entry:
        if not is_framework(frame.f_code.co_filename) and _catches(frame, error):
            return True
        frame = frame.f_back
    return False


def _catches(frame: FrameType, error: type[BaseException]) -> bool:
    code, globals_ = frame.f_code, frame.f_globals
    for owner, first, last, kinds in _guarded_lines(
        code.co_filename, tuple(linecache.getlines(code.co_filename, globals_))
    ):
        if owner != (code.co_name, code.co_firstlineno) or not first <= frame.f_lineno <= last:
            continue
        try:
            caught = eval(kinds, globals_, {**frame.f_locals, "BaseException": BaseException})
        except Exception:  # whatever the expression does; it is the module's own
            return True
        if issubclass(error, caught):
            return True
    return False


@functools.lru_cache(maxsize=64)
def _guarded_lines(path: str, lines: tuple[str, ...]) -> list:
    """(function's name and first line, first and last guarded line, code that gives the exceptions caught)."""
    try:
        tree = ast.parse("".join(lines), path)
    except SyntaxError:
        return []
    guarded = []

    def visit(node: ast.AST, owner: tuple[str, int]) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            owner = node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])
        for kinds in _caught(node):
            first, last = node.body[0], node.body[-1]  # pyright: ignore[reportAttributeAccessIssue]
            expression = ast.fix_missing_locations(ast.Expression(kinds))
            guarded.append((owner, first.lineno, last.end_lineno, compile(expression, path, "eval")))
        for child in ast.iter_child_nodes(node):
            visit(child, owner)

    visit(tree, ("<module>", 1))
    return guarded


def _caught(node: ast.AST) -> list[ast.expr]:
    """Expressions for the exceptions that a statement catches."""
    if isinstance(node, ast.Try):
        return [h.type or ast.Name("BaseException", ast.Load()) for h in node.handlers]
    if isinstance(node, ast.With):
        calls = [i.context_expr for i in node.items if isinstance(i.context_expr, ast.Call)]
        names = [ast.unparse(c.func).rpartition(".")[2] for c in calls]
        return [
            ast.Tuple(c.args, ast.Load())
            for c, n in zip(calls, names, strict=True)
            if n == contextlib.suppress.__name__
        ]
    return []
