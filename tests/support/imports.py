"""Imports between the modules under a directory, read from their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path


def direct_imports(path: Path) -> set[str]:
    """Dotted names that a file imports, inside functions too, but not `if TYPE_CHECKING:`.

    `from a import b` gives `a` and `a.b`, which may be a module.
    """
    return set(_imports(ast.parse(path.read_text())))


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module, "relative imports are not followed"
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        children = node.orelse
    for child in children:
        yield from _imports(child)


def packages(path: Path) -> set[str]:
    """The top-level packages that a file imports."""
    return {name.split(".")[0] for name in direct_imports(path)}


class ImportGraph:
    """The modules under `root`, the folder that contains the top-level packages."""

    def __init__(self, root: Path, *top_level: str):
        self._paths = {_dotted(root, path): path for name in top_level for path in (root / name).rglob("*.py")}
        self._edges: dict[str, set[str]] = {}

    def chain(self, module: str, target: str) -> list[str]:
        """The shortest chain of imports from `module` to `target` or a module in it; empty if there is none."""
        previous: dict[str, str | None] = {module: None}
        queue = [module]
        for current in queue:
            if current == target or current.startswith(f"{target}."):
                return list(reversed([*_back(previous, current)]))
            for name in sorted(self._imported_by(current) - previous.keys()):
                previous[name] = current
                queue.append(name)
        return []

    def _imported_by(self, module: str) -> set[str]:
        """Modules under the root that run when `module` is imported; those of the packages around them too."""
        if module not in self._edges:
            names = direct_imports(self._paths[module])
            with_packages = {".".join(parts[:end]) for parts in (n.split(".") for n in names) for end in range(1, 9)}
            self._edges[module] = with_packages & self._paths.keys()
        return self._edges[module]


def _dotted(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _back(previous: dict[str, str | None], module: str | None) -> Iterator[str]:
    while module is not None:
        yield module
        module = previous[module]
