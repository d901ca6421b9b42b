"""Counts the calls that go from one folder of the project to another, on the ways that a reader follows.

    python -m campaigns.ways [WAY …] [--tree ../old] [--calls] [--json FILE]

Each way is followed by `sys.setprofile` in a process of its own, with the packages of `--tree`, by default of this
checkout. A call is a pair of functions of one package, where the second function runs because of the first one, also
through code of libraries. A pair counts once, however often it runs; calls while a module is imported do not count.
docs/dev/ways.md explains the numbers and has them for commits.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import http.client
import importlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

PACKAGES = ("bridge", "models_torch", "train_jax")
UNITS = ("folder", "file")
ROOT = Path(__file__).resolve().parents[1]
COUNTED = ("calls", "arrows", "visited", "returns", "climbs")
"""Of a unit: the calls into another one; the pairs of units among them; the different units that a reader visits who
follows these calls in their order, from the caller to what is called; how often the reader comes back to a unit that
was left; and the calls into a unit that waits for the caller's."""
MODULE = "<module>"

TRAIN = (
    "train tiny --data-dir sudokus --steps 4 --eval-every-steps 2 --checkpoint-every-steps 2 --log-every-steps 1 "
    "--wandb disabled --run-dir "
)
SUDOKUS = "build-data sudoku --size 4 --num-train 32 --num-test 16 --output-dir sudokus"
TEXTS = "build-data text --source texts --vocab-size 280 --test-share 0.2 --output-dir words"
TRAIN_CHAT = (
    "train chat-tiny --data-dir words --run-dir chat --steps 1 --eval-every-steps 0 --checkpoint-every-steps 1 "
    "--global-batch-size 2 --eval-batch-size 2 --arch.seq-len 64 --arch.vocab-size 280 --arch.n-layer 1 "
    "--arch.n-head 2 --arch.n-kv-head 1 --arch.n-embd 16 --wandb disabled"
)


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the followed package; `folder` and `file` are paths below the tree."""

    folder: str
    file: str
    name: str

    @property
    def is_step(self) -> bool:
        """True for the step of the training, of one replica."""
        return self.name.endswith(".<locals>.train_step") and self.file.endswith("/step.py")


@dataclasses.dataclass
class Call:
    """A pair of functions in two files, below the first function of its thread."""

    first: Function
    caller: Function
    callee: Function
    climbs: dict[str, bool] = dataclasses.field(default_factory=lambda: dict.fromkeys(UNITS, False))
    """Whether the callee is in a unit that waits for the unit of the caller."""
    in_step: bool = False
    """Whether the step of the training made the call, while JAX traced it."""

    def places(self, unit: str) -> tuple[str, str]:
        return getattr(self.caller, unit), getattr(self.callee, unit)

    def crosses(self, unit: str) -> bool:
        caller, callee = self.places(unit)
        return caller != callee


class Recorder:
    """Records the calls inside a package while `on` is true, in the threads that start after `install`."""

    def __init__(self, tree: Path, package: str):
        self._root = f"{tree}{os.sep}"
        self._package = package
        self._functions: dict[CodeType, Function | None] = {}
        self._calls: dict[tuple[Function, ...], Call] = {}
        self.on = False

    @property
    def calls(self) -> list[Call]:
        """The calls in the order in which they were first made."""
        return list(self._calls.values())

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.on or event != "call":
            return
        callee = self._function_of(frame.f_code)
        if callee is not None:
            self._note(callee, self._waiting(frame))

    def _function_of(self, code: CodeType) -> Function | None:
        """Returns the function of a code object; None for code of others."""
        if code not in self._functions:
            self._functions[code] = self._new_function(code)
        return self._functions[code]

    def _new_function(self, code: CodeType) -> Function | None:
        if not code.co_filename.startswith(self._root):
            return None
        file = code.co_filename.removeprefix(self._root)
        if Path(file).parts[0] != self._package:
            return None
        # A comprehension or a lambda belongs to its function.
        name = re.sub(r"(\.<locals>)?\.<(listcomp|setcomp|dictcomp|genexpr|lambda)>.*", "", code.co_qualname)
        return Function(str(Path(file).parent), file, name)

    def _waiting(self, frame: FrameType) -> Iterator[Function]:
        """Yields the functions of the package that wait for a frame, the nearest first."""
        above = frame.f_back
        while above is not None:
            function = self._function_of(above.f_code)
            if function is not None:
                yield function
            above = above.f_back

    def _note(self, callee: Function, waiting: Iterator[Function]) -> None:
        caller = next(waiting, None)
        if caller is None or caller.file == callee.file:
            return
        stack = [caller, *waiting]
        if any(function.name == MODULE for function in (callee, *stack)):
            return
        key = (stack[-1], caller, callee)
        call = self._calls.setdefault(key, Call(*key))
        for unit in UNITS:
            units = [getattr(function, unit) for function in stack]
            own = getattr(callee, unit)
            call.climbs[unit] |= own != units[0] and own in units
        call.in_step |= any(function.is_step for function in (callee, *stack))


def export(recorder: Recorder) -> None:
    """Exports a small module."""
    import torch

    import bridge

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    recorder.on = True
    bridge.export(module)
    recorder.on = False


def operation(recorder: Recorder) -> None:
    """Traces `torch.add` of an input and a parameter."""
    import jax
    import jax.numpy as jnp
    import torch

    import bridge

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.weight
            recorder.on = True
            y = torch.add(x, weight)
            recorder.on = False
            return y

    fn = bridge.export(Sum())
    jax.make_jaxpr(lambda params, x: fn(params, fn.buffers, x))(fn.params, jnp.ones((2, 4)))


def command(line: str) -> Callable[[Recorder], None]:
    """Returns a way that runs one command line of `trm`."""

    def run(recorder: Recorder) -> None:
        main = importlib.import_module("train_jax.__main__").main
        recorder.on = True
        status = main(line.split())
        recorder.on = False
        if status:
            raise SystemExit(status)

    return run


def chat(recorder: Recorder) -> None:
    """Serves a run, and follows its second request: the first one may compile programs."""
    main = importlib.import_module("train_jax.__main__").main
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    threading.Thread(target=_request_twice, args=(recorder, port), daemon=True).start()
    main(["serve", "chat", "--port", str(port), "--slots", "1"])


def _request_twice(recorder: Recorder, port: int) -> None:
    sys.setprofile(None)
    while not _answered(port, "GET", "/health"):
        time.sleep(0.2)
    request = {"model": "chat", "messages": [{"role": "user", "content": "1 + 1"}], "max_tokens": 4, "temperature": 0}
    for on in (False, True):
        recorder.on = on
        answered = _answered(port, "POST", "/v1/chat/completions", json.dumps(request))
        time.sleep(0.5)  # for what the server does after its answer
        recorder.on = False
        if not answered:
            os._exit(1)
    os.kill(os.getpid(), signal.SIGINT)


def _answered(port: int, method: str, path: str, body: str | None = None) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@dataclasses.dataclass(frozen=True)
class Way:
    """A way through a package."""

    package: str
    run: Callable[[Recorder], None]
    of_step: bool = False
    """Whether only the calls of the training step are counted."""


WAYS = {
    "export": Way("bridge", export),
    "operation": Way("bridge", operation),
    "step": Way("train_jax", command(TRAIN + "step"), of_step=True),
    "train": Way("train_jax", command(TRAIN + "train")),
    "evaluate": Way("train_jax", command("evaluate evaluated")),
    "chat": Way("train_jax", chat),
}


def follow(name: str, tree: Path) -> dict[str, Any]:
    """Follows a way in this process. Returns the calls, and the number of imported modules by package."""
    way = WAYS[name]
    recorder = Recorder(tree, way.package)
    recorder.install()
    way.run(recorder)
    sys.setprofile(None)
    calls = [call for call in recorder.calls if call.in_step or not way.of_step]
    if not calls:
        raise SystemExit(f"way {name}: no call was seen")
    return {
        "counts": {unit: counts(calls, unit) for unit in UNITS},
        "modules": {package: _imported(package, tree) for package in PACKAGES},
        "calls": [_line(call) for call in calls],
    }


def counts(calls: Sequence[Call], unit: str) -> dict[str, int]:
    """Returns the numbers of COUNTED for a unit."""
    crossing = [call for call in calls if call.crosses(unit)]
    visited = {place for call in crossing for place in call.places(unit)}
    returns = 0
    for first in {call.first for call in crossing}:
        places = [place for call in crossing if call.first == first for place in call.places(unit)]
        walk = [place for place, _ in itertools.groupby(places)]
        returns += len(walk) - len(set(walk))
    numbers = (
        len({(call.caller, call.callee) for call in crossing}),
        len({call.places(unit) for call in crossing}),
        len(visited),
        returns,
        len({(call.caller, call.callee) for call in crossing if call.climbs[unit]}),
    )
    return dict(zip(COUNTED, numbers, strict=True))


def _line(call: Call) -> str:
    mark = "^" if call.climbs["folder"] else "|" if call.crosses("folder") else " "
    return f"{mark} {call.caller.file}:{call.caller.name} -> {call.callee.file}:{call.callee.name}"


def _imported(package: str, tree: Path) -> int:
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    return sum(str(getattr(module, "__file__", "")).startswith(str(tree)) for module in modules)


class Ways:
    """Follows ways in processes with the packages of a tree, in a working folder."""

    def __init__(self, tree: Path, folder: Path):
        self._tree = tree
        self._folder = folder
        self._prepared: set[str] = set()

    def follow(self, name: str) -> dict[str, Any]:
        """Returns what `follow` does, in a process of its own."""
        for line in PREPARATIONS.get(name, ()):
            self._prepare(line)
        out = self._folder / "followed.json"
        self._run([str(Path(__file__).resolve()), name, "--tree", str(self._tree), "--follow", str(out)])
        return json.loads(out.read_text())

    def _prepare(self, line: str) -> None:
        if line in self._prepared:
            return
        self._prepared.add(line)
        if line == TEXTS:
            texts = self._folder / "texts"
            texts.mkdir()
            for number in range(20):
                (texts / f"{number}.txt").write_text(f"{number} + {number} = {2 * number}\n" * 20)
        self._run(["-m", "train_jax", *line.split()])

    def _run(self, arguments: Sequence[str]) -> None:
        """Runs Python. The processes share no programs, so that each way is traced and compiled anew."""
        variables = {
            "PYTHONPATH": str(self._tree),
            "PYTHONHASHSEED": "0",
            "PYTHONSAFEPATH": "1",
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "TRM_CACHE_DIR": str(self._folder / "cache"),
        }
        process = subprocess.run(
            [sys.executable, *arguments], cwd=self._folder, env=os.environ | variables, capture_output=True, text=True
        )
        if process.returncode:
            raise SystemExit(f"{' '.join(arguments)}: exit status {process.returncode}\n{process.stderr[-4000:]}")


PREPARATIONS = {
    "step": [SUDOKUS],
    "train": [SUDOKUS],
    "evaluate": [SUDOKUS, TRAIN + "evaluated"],
    "chat": [TEXTS, TRAIN_CHAT],
}


def import_counts(tree: Path, package: str) -> dict[str, int]:
    """Returns numbers of a package: files, imports inside functions and for types only, rooms and their imports.

    A room is a folder directly in the package, with those below it, or a file directly in it. A room stands one floor
    above the rooms that it imports, also inside functions; rooms that import each other in a circle are on one floor.
    Imports for types only do not count here.
    """
    inside_functions = for_types = 0
    arrows: set[tuple[str, str]] = set()
    rooms: set[str] = set()
    files = sorted((tree / package).rglob("*.py"))
    for file in files:
        parsed = ast.parse(file.read_text())
        typed = _imports_in(parsed, ast.If)
        for_types += len(typed)
        inside_functions += len(_imports_in(parsed, ast.FunctionDef, ast.AsyncFunctionDef) - typed)
        room = _room(".".join(file.relative_to(tree).with_suffix("").parts), package)
        rooms.add(room)
        targets = {_room(name, package) for node in _imports_in(parsed, ast.Module) - typed for name in _names(node)}
        arrows |= {(room, target) for target in targets - {"", room}}
    rooms.discard("")
    arrows = {(room, target) for room, target in arrows if room in rooms and target in rooms}
    reached = _reached(rooms, arrows)
    in_circles = [room for room in rooms if room in reached[room]]
    return {
        "files": len(files),
        "imports inside functions": inside_functions,
        "imports for types": for_types,
        "rooms": len(rooms),
        "arrows": len(arrows),
        "floors": _floors(rooms, reached),
        "rooms in circles": len(in_circles),
    }


def _imports_in(parsed: ast.Module, *kinds: type[ast.AST]) -> set[ast.Import | ast.ImportFrom]:
    """Returns the imports of the project below nodes of these kinds, among which an `if` is `if TYPE_CHECKING`."""
    found: set[ast.Import | ast.ImportFrom] = set()
    for node in ast.walk(parsed):
        of_kind = isinstance(node, kinds)
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            of_kind = False
        if of_kind:
            found |= {below for below in ast.walk(node) if isinstance(below, ast.Import | ast.ImportFrom)}
    return {node for node in found if any(name.partition(".")[0] in PACKAGES for name in _names(node))}


def _names(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names]


def _room(module: str, package: str) -> str:
    """Returns the room of a module; empty for the package itself and for other packages."""
    parts = module.split(".")
    return parts[1] if parts[0] == package and len(parts) > 1 and not parts[1].startswith("__") else ""


def _reached(rooms: Iterable[str], arrows: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """Returns the rooms that each room imports, directly or through others."""
    reached = {room: {target for source, target in arrows if source == room} for room in rooms}
    for through in reached:  # Warshall's algorithm
        for targets in reached.values():
            if through in targets:
                targets |= reached[through]
    return reached


def _floors(rooms: Iterable[str], reached: dict[str, set[str]]) -> int:
    """Returns the number of rooms on the longest way downwards, where a circle counts as one room."""
    floor: dict[str, int] = {}
    for room in sorted(rooms, key=lambda room: len(reached[room] | {room})):
        below = [target for target in reached[room] if room not in reached[target]]
        floor[room] = 1 + max((floor[target] for target in below), default=0)
    return max(floor.values(), default=0)


def table(rows: Sequence[Sequence[Any]]) -> str:
    """Returns a Markdown table, whose first row is the head."""
    head, *body = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=f"{', '.join(WAYS)}; default: all")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout of the project")
    parser.add_argument("--calls", action="store_true", help="print the calls; | goes to another folder, ^ climbs back")
    parser.add_argument("--json", type=Path, help="write the numbers and the calls to this file")
    parser.add_argument("--follow", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    tree = options.tree.resolve()
    unknown = set(options.ways) - set(WAYS)
    if unknown:
        parser.error(f"unknown way {unknown.pop()}; use one of {', '.join(WAYS)}")
    if options.follow:
        options.follow.write_text(json.dumps(follow(options.ways[0], tree)))
        return
    followed = {}
    with tempfile.TemporaryDirectory() as folder:
        ways = Ways(tree, Path(folder))
        for name in options.ways or WAYS:
            print(f"following {name}", file=sys.stderr)
            followed[name] = ways.follow(name)
    print_tables(followed, {package: import_counts(tree, package) for package in PACKAGES})
    if options.calls:
        for name, result in followed.items():
            print(f"\n{name}", *result["calls"], sep="\n")
    if options.json:
        options.json.write_text(json.dumps(followed, indent=1))


def print_tables(followed: dict[str, dict[str, Any]], imports: dict[str, dict[str, int]]) -> None:
    for unit in UNITS:
        rows = [[name, *result["counts"][unit].values()] for name, result in followed.items()]
        print(table([[f"{unit}s", *COUNTED], *rows]))
        print()
    rows = [[name, *result["modules"].values()] for name, result in followed.items()]
    print(table([["imported modules", *PACKAGES], *rows]))
    print()
    print(table([["package", *imports["bridge"]], *([package, *found.values()] for package, found in imports.items())]))


if __name__ == "__main__":
    main()
