"""Reads the imports between the modules in a directory from their syntax trees."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path


@functools.cache
def direct_imports(path: Path) -> frozenset[str]:
    """Returns the dotted names that a file imports, also in functions, except under `if TYPE_CHECKING:`.

    `from a import b` is `a.b`, even if `b` is not a module.
    """
    return frozenset(_imports(parsed(path.read_text())))


@functools.cache
def parsed(source: str) -> ast.Module:
    """Returns the syntax tree of a source text, parsed once in a process; it must not be changed."""
    return ast.parse(source)


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not followed"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        children = node.orelse
    for child in children:
        yield from _imports(child)


def packages(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports."""
    return {name.split(".")[0] for name in direct_imports(path)}


def modules(root: Path, package: str) -> dict[str, Path]:
    """Returns the files of a package in the folder `root` by their dotted names."""
    names = {path: path.relative_to(root).with_suffix("").parts for path in (root / package).rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}
