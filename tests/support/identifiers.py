"""Reads the identifiers of a Python file from its syntax tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator


def identifiers(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields every identifier with its line: names, attributes, arguments, keywords, functions, classes, imports."""
    line = 1
    for node in ast.walk(tree):
        line = getattr(node, "lineno", line)
        if isinstance(node, ast.alias):
            names = [*node.name.split("."), node.asname]
        elif isinstance(node, ast.Global | ast.Nonlocal):
            names = node.names
        else:
            names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "rest")]
        yield from ((name, line) for name in names if isinstance(name, str))


def wide_uses(tree: ast.AST, name: str, most_lines: int) -> list[int]:
    """Returns the lines of `name`, except as a local variable whose uses span at most `most_lines` lines."""
    lines = {line for identifier, line in identifiers(tree) if identifier == name}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            used = [node.lineno for node in ast.walk(function) if isinstance(node, ast.Name) and node.id == name]
            other = [node for node in ast.walk(function) if _is_no_local(node, name)]
            if used and not other and max(used) - min(used) < most_lines:
                lines -= set(used)
    return sorted(lines)


def _is_no_local(node: ast.AST, name: str) -> bool:
    return any(getattr(node, field, None) == name for field in ("attr", "arg", "name"))
