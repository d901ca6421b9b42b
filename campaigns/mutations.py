"""Changes of one place of a program, each of which a test should notice."""

from __future__ import annotations

import ast
import dataclasses
import random
from collections.abc import Iterator
from pathlib import Path

FLIPPED = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: ">=",
    ast.GtE: "<",
    ast.Gt: "<=",
    ast.LtE: ">",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One place of a file with other text."""

    file: str
    line: int
    kind: str
    start: int
    """Offset in bytes."""
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.start}:{self.kind}"

    def applied(self, source: str) -> str:
        """Returns the mutated text of the file."""
        text = source.encode()
        before = self.before.encode()
        assert text[self.start : self.start + len(before)] == before
        return (text[: self.start] + self.after.encode() + text[self.start + len(before) :]).decode()


def drawn(root: Path, package: str, count: int, seed: int) -> list[Mutant]:
    """Draws mutants at random: first a line that has any, then one of that line's mutants, each at most once."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path in sorted((root / package).rglob("*.py")):
        for mutant in mutants_of(path.read_text(), str(path.relative_to(root))):
            by_line.setdefault((mutant.file, mutant.line), []).append(mutant)
    draws = random.Random(seed)
    chosen = []
    while by_line and len(chosen) < count:
        place = draws.choice(list(by_line))
        rest = by_line[place]
        mutant = rest.pop(draws.randrange(len(rest)))
        if not rest:
            del by_line[place]
        if differs(mutant, (root / mutant.file).read_text()):
            chosen.append(mutant)
    return chosen


def differs(mutant: Mutant, source: str) -> bool:
    """Returns True if the mutated text is a valid program that differs from the original."""
    try:
        return ast.dump(ast.parse(mutant.applied(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


def mutants_of(source: str, file: str) -> Iterator[Mutant]:
    """Yields every mutant of a file, without annotations, imports and texts that people read."""
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    for node in _visited(ast.parse(source)):
        for changed, kind, after in (*_changed_expressions(node), *_changed_statements(node)):
            start = starts[changed.lineno - 1] + changed.col_offset
            end = starts[(changed.end_lineno or 1) - 1] + (changed.end_col_offset or 0)
            before = b"".join(lines)[start:end].decode()
            yield Mutant(file, changed.lineno, kind, start, before, after)


Change = tuple[ast.expr | ast.stmt, str, str]
"""A node, the kind of change, the new text of the node."""


def _changed_expressions(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            yield node, "comparison", f"({_text(left)} {FLIPPED[type(op)]} {_text(right)})"
        case ast.BoolOp(op=op, values=values):
            word = " or " if isinstance(op, ast.And) else " and "
            yield node, "and/or", f"({word.join(f'({_text(value)})' for value in values)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "not removed", f"({_text(operand)})"
        case ast.BinOp(op=ast.Add() | ast.Sub() as op, left=left, right=right):
            yield node, "+/-", f"({_text(left)} {'-' if isinstance(op, ast.Add) else '+'} {_text(right)})"
        case ast.Constant(value=bool() | int() | float() | str() as value):
            yield from ((node, "constant", other) for other in _other_constants(value))


def _changed_statements(node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Return(value=ast.expr() as value) if _text(value) != "None":
            yield node, "return None", "return None"
        case ast.Expr(value=ast.Constant()):
            pass
        case ast.Expr() | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield node, "statement deleted", "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "statement deleted", "pass"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, "not added", f"(not ({_text(test)}))"


def _other_constants(value: bool | int | float | str) -> Iterator[str]:
    if isinstance(value, bool):
        yield str(not value)
    elif isinstance(value, (int, float)):
        yield repr(value + 1)
    elif isinstance(value, str) and value and " " not in value:
        yield repr(f"{value}_")


def _visited(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns") or isinstance(value, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            skipped = isinstance(child, (ast.Import, ast.ImportFrom, ast.JoinedStr)) or _is_for_types(child)
            if isinstance(child, ast.AST) and not skipped:
                yield from _visited(child)


def _is_for_types(node: object) -> bool:
    return isinstance(node, ast.If) and _text(node.test) == "TYPE_CHECKING"


def _text(node: ast.AST) -> str:
    return ast.unparse(node)
