"""Reads the imports between the modules in a directory from their syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path


def direct_imports(path: Path, *, in_functions: bool = True) -> set[str]:
    """Returns the dotted names that a file imports, except under `if TYPE_CHECKING:`.

    `from a import b` is `a.b`, even if `b` is not a module.
    """
    return set(_imports(parsed(path.read_text()), in_functions))


@functools.cache
def parsed(source: str) -> ast.Module:
    """Returns the syntax tree of a source text, parsed once in a process; it must not be changed."""
    return ast.parse(source)


def _imports(node: ast.AST, in_functions: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "relative imports are not followed"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    children: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
        children = node.orelse
    if in_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        for child in children:
            yield from _imports(child, in_functions)


def packages(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports."""
    return {name.split(".")[0] for name in direct_imports(path)}


class ImportGraph:
    """The modules of a package in the folder `root`.

    An import of a module also runs the `__init__.py` of its parent packages, but calls none of their functions, so
    imports inside these functions are not followed.
    """

    def __init__(self, root: Path, package: str):
        self._paths = {dotted(root, path): path for path in (root / package).rglob("*.py")}

    def chain(self, module: str, target: str) -> list[str]:
        """Returns the shortest chain of imports from `module` to `target` or a submodule; empty if there is none."""
        chains = {(module, True): [module]}
        queue = [*chains]
        for current in queue:
            if f"{current[0]}.".startswith(f"{target}."):
                return chains[current]
            for following in self._imported_by(*current):
                if following not in chains:
                    chains[following] = [*chains[current], following[0]]
                    queue.append(following)
        return []

    @functools.cache  # noqa: B019 (there is one graph in a process)
    def _imported_by(self, module: str, in_functions: bool) -> list[tuple[str, bool]]:
        """Returns imported modules of the package, and whether their functions may be called."""
        modules = set()
        for name in direct_imports(self._paths[module], in_functions=in_functions):
            around = [name.rsplit(".", count)[0] for count in range(name.count(".") + 1)]
            known = [each for each in around if each in self._paths]
            modules |= {(each, each == known[0]) for each in known}
        return sorted(modules)


def dotted(root: Path, path: Path) -> str:
    """Returns the dotted name of the module in `path`, relative to the folder `root`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
