"""Conversion of a function whose branch depends on a traced value: its branches become calls of `dispatch.branches`.

The function is converted from its source once, at the first such branch, and the call starts again. An `if` becomes
`branch(test, then, otherwise)`, with its sides as functions inside of the function; a side that returns takes the rest
of the function with it. A loop that such a side may leave runs to its end, each turn as one side of a branch. Lines
stay those of the source. Only traced calls run the converted code. It does the same with values that are known, so that
`verify` can ask it which sides PyTorch takes; what `verify` compares with is computed by the original code.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import gc
import importlib
import itertools
import linecache
import threading
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from bridge.symbolic.numbers import MATHEMATICS

_RUNTIME = "bridge.dispatch.branches"
"""The module of the functions that converted code calls, a constant of that code."""
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_SUSPENDING = (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor, ast.AsyncWith)
_OF_FRAMES = frozenset({"locals", "vars", "eval", "exec"})
"""Functions that see the names of the frame that calls them."""
_KNOWN = frozenset({"isinstance", "issubclass", "hasattr", "callable"})
"""Functions whose result is known while tracing."""
_OF_NUMBERS = frozenset({"float", "int", "len", "range", "max", "min", *MATHEMATICS})
"""Names of functions that insist on Python's numbers."""
_TURN = "bridge_turn"
_SIDES = ("bridge_then", "bridge_else", "bridge_rest", _TURN)
"""How the names of the functions begin that are made of parts of a function."""

_codes: dict[types.CodeType, types.CodeType] = {}
"""Original code -> converted code."""
FUNCTIONS = dict[weakref.ref, tuple[types.CodeType, types.CodeType]]()
"""Functions that have been converted -> their original and converted code."""
_tries = collections.Counter[types.CodeType]()
_MOST = 100
"""Conversions of one piece of code: a call might make another function of it each time that it starts again."""
_lock = threading.Lock()
_depth = 0


@contextlib.contextmanager
def converted() -> Iterator[None]:
    """Functions that have been converted run their converted code, in all threads."""
    global _depth
    with _lock:
        _depth += 1
        _put(1)
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if not _depth:
                _put(0)


def _put(which: int) -> None:
    for reference, codes in FUNCTIONS.items():
        function = reference()
        if function is not None:
            function.__code__ = codes[which]


def convert(code: types.CodeType) -> bool:
    """Converts the functions with this code; False if there is no source, or nothing is left to convert."""
    _tries[code] += 1
    try:
        new = _compiled(code)
    except (SyntaxError, ValueError):
        return False
    found = len(FUNCTIONS)
    with _lock:
        gc.unfreeze()  # `gc.get_objects` has no objects that a program has frozen after its imports
        functions = [each for each in gc.get_objects() if type(each) is types.FunctionType]
        for function in functions:
            old = function.__code__
            if old.co_filename != code.co_filename or _place(old) not in new:
                continue
            other = new[_place(old)]
            fits = old not in _codes.values() and old.co_freevars == other.co_freevars
            if fits and weakref.ref(function) not in FUNCTIONS:
                FUNCTIONS[weakref.ref(function)] = old, _codes.setdefault(old, other)
        if _depth:
            _put(1)
    return len(FUNCTIONS) > found and _tries[code] < _MOST


def _place(code: types.CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno  # pyright: ignore[reportAttributeAccessIssue]


def _compiled(code: types.CodeType) -> dict[tuple[str, str, int], types.CodeType]:
    """Returns the converted code, and that of the functions around it, by their places.

    Raises `SyntaxError` or `ValueError` for code without a source, or that cannot be converted.
    """
    tree = ast.parse("".join(linecache.getlines(code.co_filename)))
    path = _path_to(tree, code)
    # A function inside of another one is made again at each call, so the outer one is converted with it.
    outer = [each for i, each in enumerate(path) if all(isinstance(p, ast.FunctionDef) for p in path[i:])]
    if not outer:
        raise ValueError("no source")
    _Converter(outer[0]).run()
    ast.fix_missing_locations(outer[0])
    lines = {_first_line(each) for each in path if not isinstance(each, ast.ClassDef)}
    alone = ast.Module([path[0]], [])  # without the rest of the file, which may be long
    flags = code.co_flags & annotations.compiler_flag  # of the file's `from __future__ import annotations`
    todo = [compile(alone, code.co_filename, "exec", flags, dont_inherit=True)]
    found = dict[tuple[str, str, int], types.CodeType]()
    for each in todo:
        todo += [part for part in each.co_consts if isinstance(part, types.CodeType)]
        if each.co_firstlineno in lines and code.co_qualname.startswith(each.co_qualname):  # pyright: ignore
            found[_place(each)] = _linked(each)
    if _place(code) not in found:
        raise ValueError("another source")
    return found


def _path_to(tree: ast.AST, code: types.CodeType) -> list[Any]:
    """Returns the functions and classes around a function, from the outside, and itself; empty if it is not found."""
    todo: list[tuple[ast.AST, list]] = [(tree, [])]
    for node, path in todo:
        if isinstance(node, ast.stmt) and not _first_line(node) <= code.co_firstlineno <= (node.end_lineno or 0):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            path = [*path, node]
            if node.name == code.co_name and _first_line(node) == code.co_firstlineno:
                return path
        todo += [(child, path) for child in ast.iter_child_nodes(node)]
    return []


def _first_line(node: Any) -> int:
    return min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])


def _linked(code: types.CodeType) -> types.CodeType:
    """Returns the code with the module in the place of its name."""
    constants = [_linked(each) if isinstance(each, types.CodeType) else each for each in code.co_consts]
    runtime = importlib.import_module(_RUNTIME)
    constants = [runtime if type(each) is str and each == _RUNTIME else each for each in constants]
    return code.replace(co_consts=tuple(constants))


# ---- the syntax tree


def _inside(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields the nodes and all that they hold, without what is inside of other scopes."""
    todo = list(nodes)
    for node in todo:
        yield node
        if not isinstance(node, _SCOPES):
            todo += ast.iter_child_nodes(node)


def _stored(nodes: Iterable[ast.AST]) -> list[str]:
    """Returns the names that the statements bind, without those of functions that are made of them."""
    held = list(_inside(nodes))
    own = {id(name) for each in held if isinstance(each, ast.comprehension) for name in ast.walk(each.target)}
    names = dict[str, None]()
    for node in held:
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and id(node) not in own:
            names[node.id] = None
        elif isinstance(node, ast.alias):
            names[(node.asname or node.name).partition(".")[0]] = None
        elif name := getattr(node, "name", None):  # a function, a class, an exception that is caught
            names[name] = None
    return [name for name in names if not name.startswith(_SIDES)]


def _jumps(nodes: Iterable[ast.AST]) -> bool:
    """True if the statements may return, or leave or continue a loop that they are in."""
    held = list(_inside(nodes))
    loops = [each for each in held if isinstance(each, (ast.For, ast.While))]
    ours = {id(node) for loop in loops for node in _inside(loop.body) if not isinstance(node, ast.Return)}
    return any(isinstance(node, (ast.Return, ast.Break, ast.Continue)) and id(node) not in ours for node in held)


def _is_known(test: ast.expr) -> bool:
    """True for a condition that no traced value decides."""
    if isinstance(test, ast.BoolOp):
        return all(map(_is_known, test.values))
    if isinstance(test, ast.UnaryOp):
        return _is_known(test.operand)
    if isinstance(test, ast.Call):
        of_runtime = isinstance(test.func, ast.Attribute) and isinstance(test.func.value, ast.Constant)
        return of_runtime or (isinstance(test.func, ast.Name) and test.func.id in _KNOWN)
    if isinstance(test, ast.Compare):
        return all(isinstance(each, (ast.Is, ast.IsNot)) for each in test.ops)
    return isinstance(test, ast.Constant)


def _takes_numbers(node: ast.Call) -> bool:
    """True for a call of `float`, `math.log` and their like, by the names that they have."""
    if not node.args:
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id in _OF_NUMBERS
    return (
        isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "math"
    )


def _may_branch(node: ast.AST) -> bool:
    """True for an `if` that a traced value may decide, other than a check."""
    if not isinstance(node, ast.If) or any(isinstance(each, ast.Match) for each in _inside([node])):
        return False
    simple = not any(hasattr(each, "body") or isinstance(each, ast.BoolOp) for each in _inside(node.body))
    if _raises(node.body[-1]) and not node.orelse and simple:
        return False
    inner = _inside([*node.body, *node.orelse])
    return not _is_known(node.test) or any(_may_branch(each) and _jumps([each]) for each in inner)


def _may_end(node: ast.While) -> bool:
    """True for a loop that a traced value may end, and nothing else."""
    if node.orelse or _jumps(node.body) or _is_known(node.test):
        return False
    return not any(isinstance(each, ast.NamedExpr) for each in ast.walk(node.test))


def _raises(node: ast.stmt) -> bool:
    """True for `raise` and for an assertion of PyTorch's that is False."""
    call = getattr(node, "value", None)
    if not isinstance(node, ast.Expr) or not isinstance(call, ast.Call) or not call.args:
        return isinstance(node, ast.Raise)
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name == "_assert" and isinstance(call.args[0], ast.Constant) and call.args[0].value is False


def _parsed(text: str, at: ast.AST) -> list[Any]:
    """Returns the statements of a text, at the line of a node."""
    body = ast.parse("def f():\n while 1:\n" + "".join(f"  {line}\n" for line in text.splitlines())).body[0]
    for node in ast.walk(body):
        ast.copy_location(node, at)
        if hasattr(node, "lineno"):  # a call would otherwise be at the last line of the branch
            node.end_lineno, node.end_col_offset = _start(at)  # pyright: ignore[reportAttributeAccessIssue]
    return body.body[0].body  # pyright: ignore[reportAttributeAccessIssue]


def _function(name: str, body: list[ast.stmt], at: ast.AST) -> ast.FunctionDef:
    """Returns a function without arguments whose statements bind names of the function around it."""
    stored = _stored(body)
    (made,) = _parsed(f"def {name}():\n  pass", at)
    made.body = [*(_parsed(f"nonlocal {', '.join(stored)}", at) if stored else ()), *body] or made.body
    return made


class _Jumps(ast.NodeTransformer):
    """The jumps out of a turn, as assignments and a return from the turn's function."""

    def __init__(self, number: int):
        self._number = number
        self._loops = 0

    def _loop(self, node: Any) -> Any:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1
        return node

    def _scope(self, node: Any) -> Any:
        return node

    visit_For = visit_While = _loop  # noqa: N815 (names of the base class)
    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = _scope  # noqa: N815

    def visit_Break(self, node: ast.Break) -> Any:
        if self._loops:
            return node
        return _parsed(f"bridge_stop_{self._number} = True\nreturn", node)

    def visit_Continue(self, node: ast.Continue) -> Any:
        if self._loops:
            return node
        return _parsed("return", node)

    def visit_Return(self, node: ast.Return) -> Any:
        n = self._number
        text = f"bridge_value_{n} = None\nbridge_returned_{n} = True\nbridge_stop_{n} = True\nreturn"
        made = _parsed(text, node)
        made[0].value = node.value or made[0].value
        return made


class _Expressions(ast.NodeTransformer):
    """Expressions that ask for a truth, as calls; names on which two sides may disagree are checked where they are
    used."""

    def __init__(self, function: ast.FunctionDef, shared: frozenset[str]):
        self._shared = shared
        self._first = next((each.arg for each in (*function.args.posonlyargs, *function.args.args)), "")
        self._foreign = 0

    def _call(self, text: str, node: Any, *values: Any) -> Any:
        (made,) = _parsed(f"{_RUNTIME!r}.{text}", node)
        made.value.args = [self._made(made.value.args[i], each) for i, each in enumerate(values)]
        return made.value

    def _made(self, pattern: Any, value: Any) -> Any:
        if isinstance(pattern, ast.Lambda):
            pattern.body = value
            return pattern
        return value

    def _plain(self, node: ast.AST) -> bool:
        odd = (ast.NamedExpr, *_SUSPENDING)
        return bool(self._foreign) or any(isinstance(each, odd) for each in ast.walk(node))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        foreign = not node.name.startswith(_SIDES)
        self._foreign += foreign
        node.body = [self.visit(each) for each in node.body]
        self._foreign -= foreign
        return node

    def visit_ClassDef(self, node: Any) -> Any:
        return node

    visit_AsyncFunctionDef = visit_ClassDef  # noqa: N815

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        plain = self._plain(node) or _is_known(node.test)
        self.generic_visit(node)
        if plain:
            return node
        return self._call("branch(0, lambda: 0, lambda: 0)", node, node.test, node.body, node.orelse)

    def visit_Compare(self, node: ast.Compare) -> Any:
        """`a < b < c` is `a < b and b < c`, of which Python would ask the first truth."""
        plain = all(isinstance(each, (ast.Name, ast.Constant)) for each in node.comparators[:-1])
        if len(node.ops) == 1 or not plain:
            self.generic_visit(node)
            return node
        operands = [node.left, *node.comparators]
        parts = [
            ast.copy_location(ast.Compare(operands[i], [op], [operands[i + 1]]), node) for i, op in enumerate(node.ops)
        ]
        return self.visit_BoolOp(ast.copy_location(ast.BoolOp(ast.And(), [*parts]), node))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        plain = self._plain(node) or _is_known(node)
        self.generic_visit(node)
        if plain:
            return node
        name = "both" if isinstance(node.op, ast.And) else "either"
        *others, made = node.values
        for value in reversed(others):
            made = self._call(f"{name}(0, lambda: 0)", node, value, made)
        return made

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        plain = not isinstance(node.op, ast.Not) or self._plain(node) or _is_known(node)
        self.generic_visit(node)
        if plain:
            return node
        return self._call("negated(0)", node, node.operand)

    def visit_Call(self, node: ast.Call) -> Any:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name == "super" and not node.args and not self._foreign:
            node.args = _parsed(f"(__class__, {self._first})", node)[0].value.elts
        if name == "bool" and len(node.args) == 1 and not self._foreign:
            return self._call("truth(0)", node, node.args[0])
        if _takes_numbers(node) and not self._foreign:
            made = self._call("called(0)", node, node.func)
            made.args += node.args
            made.keywords = node.keywords
            return made
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        if node.id not in self._shared or not isinstance(node.ctx, ast.Load):
            return node
        return self._call("used(0)", node, node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        """A name of the function around it cannot be annotated."""
        self.generic_visit(node)
        if not isinstance(node.target, ast.Name) or node.target.id not in self._shared:
            return node
        (made,) = _parsed("x = 0" if node.value else "pass", node)
        if node.value:
            made.targets = [node.target]
            made.value = node.value
        return made


class _Lifetimes:
    """Which names nobody reads after a branch of a function."""

    def __init__(self, function: ast.FunctionDef):
        held = list(_inside(function.body))
        self._outer = {name for each in held if isinstance(each, ast.Nonlocal) for name in each.names}
        self._closed = set[str]()
        """Names that functions inside of the function read, at any time."""
        for each in held:
            if isinstance(each, _SCOPES):
                self._closed |= {node.id for node in ast.walk(each) if isinstance(node, ast.Name)}
        names = [node for node in held if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store)]
        names += [node.target for node in held if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)]
        self._reads = [(name.id, _start(name)) for name in names]
        self._loops = [node for node in held if isinstance(node, (ast.For, ast.While))]

    def ended(self, branch: ast.If, rest: list[ast.stmt]) -> str:
        """Returns names that the branch, and the rest that it takes along, binds, and that nobody reads afterwards."""
        end = _end(rest[-1] if rest else branch)
        starts = [_start(loop) for loop in self._loops if _start(loop) <= _start(branch) < _end(loop)]
        first = min(starts, default=end)
        kept = {name for name, place in self._reads if place >= first} | self._closed | self._outer
        names = (name for name in _stored([branch, *rest]) if not name.startswith("bridge_"))
        return " ".join(name for name in names if name not in kept)


def _start(node: Any) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


class _Converter:
    """Converts a function in place."""

    def __init__(self, function: ast.FunctionDef):
        self._numbers = itertools.count()
        self._function = function
        self._lifetimes = _Lifetimes(function)

    def run(self) -> None:
        node = self._function
        held = list(_inside(node.body))
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if any(isinstance(each, (ast.Global, *_SUSPENDING)) for each in held) or names & _OF_FRAMES:
            raise ValueError("a generator, or code that uses its frame or globals")
        body = self._block(self._loops(node.body, True), True)
        sides = [each for part in body for each in ast.walk(part) if isinstance(each, ast.Nonlocal)]
        given = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        outer = {name for each in held if isinstance(each, ast.Nonlocal) for name in each.names}
        shared = dict.fromkeys(name for each in sides for name in each.names)
        expressions = _Expressions(node, frozenset(shared))
        declared = [name for name in shared if name not in given | outer]
        binding = _parsed(f"if False: {' = '.join(declared)} = None", node) if declared else []
        node.body = [*binding, *(expressions.visit(each) for each in body)]

    def _loops(self, body: list[ast.stmt], whole: bool) -> list[ast.stmt]:
        """Rewrites loops that a branch may leave: each turn is a function, and jumps out of it are assignments.

        `whole`: the statements end a function, so that a branch that returns can take the rest of them with it.
        """
        done = list[ast.stmt]()
        for node in body:
            loop = isinstance(node, (ast.For, ast.While))
            inner = loop or (whole and (isinstance(node, ast.If) or (isinstance(node, ast.With) and node is body[-1])))
            for field in ("body", "orelse", "finalbody"):
                part = getattr(node, field, None)
                if part and not isinstance(node, _SCOPES):
                    setattr(node, field, self._loops(part, inner))
            held = list(_inside(node.body)) if loop else []
            returns = any(isinstance(each, ast.Return) for each in held)
            if any(_may_branch(each) and _jumps([each]) for each in held) and (whole or not returns):
                done += self._turns(node, returns)
            else:
                done.append(node)
        return done

    def _turns(self, node: Any, returns: bool) -> list[ast.stmt]:
        n = next(self._numbers)
        is_for = isinstance(node, ast.For)
        body = list[ast.stmt]()
        for each in node.body:
            made = _Jumps(n).visit(each)
            body += made if isinstance(made, list) else [made]
        ends = "ends" if is_for else "ends_loop"
        text = f"for bridge_item_{n} in ():" if is_for else "while 0:"
        (loop,) = _parsed(f"{text}\n  if {_RUNTIME!r}.{ends}(bridge_stop_{n}): break", node)
        if is_for:
            (assignment,) = _parsed(f"x = bridge_item_{n}", node)
            assignment.targets = [node.target]
            body.insert(0, assignment)
            loop.iter = node.iter
        else:
            loop.test = node.test
        call = f"{_RUNTIME!r}.branch({_RUNTIME!r}.negated(bridge_stop_{n}), {_TURN}_{n}, {_RUNTIME!r}.nothing)"
        loop.body += [_function(f"{_TURN}_{n}", body, node), *_parsed(call, node)]
        made = [*_parsed(f"bridge_stop_{n} = bridge_returned_{n} = False", node), loop]
        if node.orelse:
            made += _parsed(f"if not bridge_stop_{n}: pass", node)
            made[-1].body = node.orelse
        if returns:
            made += _parsed(f"if bridge_returned_{n}: return bridge_value_{n}", node)
        return made

    def _block(self, body: list[ast.stmt], whole: bool) -> list[ast.stmt]:
        """Converts the branches among statements, with `whole` as for `_loops`."""
        done = list[ast.stmt]()
        for place, node in enumerate(body):
            rest = body[place + 1 :]
            if _may_branch(node) and not _jumps([node]):
                done += self._branch(node, [], "")
            elif _may_branch(node) and whole:
                return done + self._branch(node, rest, "return ")
            elif isinstance(node, ast.While) and _may_end(node):
                done += self._repeated(node)
            else:
                self._within(node, whole and not rest)
                done.append(node)
        return done

    def _repeated(self, node: ast.While) -> list[ast.stmt]:
        """Returns the statements for a `while` loop that a traced value may end."""
        n = next(self._numbers)
        is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        tests = node.test.values if is_and else [node.test]  # pyright: ignore[reportAttributeAccessIssue]
        turn = _function(f"{_TURN}_{n}", self._block(node.body, False), node)
        call = _parsed(f"{_RUNTIME!r}.repeat({_TURN}_{n}{', lambda: 0' * len(tests)})", node)
        for made, test in zip(call[0].value.args[1:], tests, strict=True):
            made.body = test
        return [turn, *call]

    def _within(self, node: Any, last: bool) -> None:
        """Converts the branches inside of any other statement."""
        if isinstance(node, ast.FunctionDef) and node.name.startswith(_TURN):
            node.body = self._block(node.body, True)
        elif isinstance(node, ast.FunctionDef):
            with contextlib.suppress(ValueError):
                _Converter(node).run()
        elif not isinstance(node, _SCOPES):
            for field in ("body", "orelse", "finalbody"):
                if part := getattr(node, field, None):
                    setattr(node, field, self._block(part, last and isinstance(node, (ast.If, ast.With))))
            for handler in getattr(node, "handlers", ()):
                handler.body = self._block(handler.body, False)

    def _branch(self, node: Any, rest: list[ast.stmt], returned: str) -> list[ast.stmt]:
        """Returns the statements for an `if` and, if a side returns, for the rest of the function after it."""
        n = next(self._numbers)
        ended = self._lifetimes.ended(node, rest)
        made = list[ast.stmt]()
        for name, part in (("then", node.body), ("else", node.orelse)):
            leaves = part and isinstance(part[-1], (ast.Return, ast.Raise))
            goes_on = _parsed(f"return bridge_rest_{n}()", node) if rest and not leaves else []
            body = self._block([*part, *goes_on], bool(returned))
            made.append(_function(f"bridge_{name}_{n}", body, node))
        if rest:
            made.insert(0, _function(f"bridge_rest_{n}", self._block(rest, True), node))
        made += _parsed(f"{returned}{_RUNTIME!r}.branch(0, bridge_then_{n}, bridge_else_{n}, {ended!r})", node)
        made[-1].value.args[0] = node.test  # pyright: ignore[reportAttributeAccessIssue]
        return made
