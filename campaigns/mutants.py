"""Measures which share of random mutants of a package the tests notice.

    python -m campaigns.mutants bridge --count 200 --seed 0 --folder /tmp/mutants [--jobs 2]

A mutant is the package with one place changed: a comparison flipped, `and` for `or`, another constant, a `not` removed
or added, a statement deleted, `+` for `-`, `return None`. The line is drawn at random among all that have a mutant.

First each test file runs once, unchanged, and the lines of the package that each test runs are recorded; a test that
fails here is left out. Then each mutant has the default tests that run its line, at most `--most` of them, the quickest
of each file first, and stops at the first failure. The top level of a module is run by all tests of the module. A
mutant that takes more than `--limit` seconds of the processor is noticed, too. A line that no test runs is not noticed,
at no cost.

Every run is a fork of a process that has imported PyTorch and JAX, in a copy of the tree, so that a mutant costs its
tests and half a second. `coverage/*.json` and `results.jsonl` in the folder are kept: the command continues where
it stopped. Use another folder for another commit, seed or set of tests.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from campaigns.mutations import Mutant, drawn

PRELOADED = ("torch", "jax", "jax.numpy", "torchax", "numpy", "pytest", "optax", "safetensors", "scipy.special")
QUIET = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]


# ---- in a fork


class Observer:
    """A pytest plugin: the first failure, and optionally the lines that each test runs, with its seconds."""

    def __init__(self, tree: Path, package: str, records: bool):
        self.failed = ""
        self.tests = {}
        self.run = 0
        self._prefix = f"{tree / package}/"
        self._start = len(str(tree)) + 1
        self._records = records
        self._lines: dict[str, set[int]] = {}

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.run += 1
        self._lines.clear()
        if self._records:
            threading.settrace(self._trace)  # for threads that the test starts
            sys.settrace(self._trace)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid
        test = self.tests.setdefault(report.nodeid, {"seconds": 0.0, "failed": False})
        test["seconds"] += report.duration
        test["failed"] |= report.failed

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        sys.settrace(None)
        threading.settrace(None)
        lines = {file[self._start :]: sorted(lines) for file, lines in self._lines.items()}
        self.tests.setdefault(nodeid, {"seconds": 0.0, "failed": True})["lines"] = lines

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self._prefix):
            return None
        lines = self._lines.setdefault(file, set())

        def line(frame: Any, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line(frame, event, argument)


def tested(tree: Path, package: str, arguments: list[str], records: bool, output: Path) -> None:
    """Runs pytest in this process, a fork, and writes the outcome."""
    import pytest

    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(entry for entry in sys.path if entry not in ("", os.getcwd()))]
    sys.argv = ["pytest"]
    sys.dont_write_bytecode = True
    observer = Observer(tree, package, records)
    options = [option for option in QUIET if not (records and option == "-x")]
    code = int(pytest.main([*options, *arguments], plugins=[observer]))
    output.write_text(
        json.dumps({"code": code, "failed": observer.failed, "run": observer.run, "tests": observer.tests})
    )


# ---- the process that forks


class Task:
    """A task of a fork: `prepare` changes its tree, `finish` gets the result and the seconds."""

    def __init__(self, arguments: list[str], records: bool, prepare: Callable[[Path], None], finish: Callable):
        self.arguments = arguments
        self.records = records
        self.prepare = prepare
        self.finish = finish


def run_all(tasks: Iterable[Task], options: argparse.Namespace, root: Path) -> None:
    """Runs the tasks, `options.jobs` at a time, each in its own copy of the tree."""
    free = [options.folder / f"tree-{number}" for number in range(options.jobs)]
    running: dict[int, tuple[Task, Path, float]] = {}
    for tree in free:
        copied(root, tree)
    for task in tasks:
        while not free:
            free.append(one_done(running))
        tree = free.pop()
        task.prepare(tree)
        output = tree.with_suffix(".json")
        output.unlink(missing_ok=True)
        child = os.fork()
        if not child:
            in_fork(tree, task, options, output)
        running[child] = task, tree, time.monotonic()
    while running:
        one_done(running)


def in_fork(tree: Path, task: Task, options: argparse.Namespace, output: Path) -> None:
    log = os.open(tree.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if not task.records:
        resource.setrlimit(resource.RLIMIT_CPU, (options.limit, options.limit + 5))
        signal.alarm(2 * options.limit)  # a mutant that waits forever needs no processor
    try:
        tested(tree, options.package, task.arguments, task.records, output)
    finally:
        os._exit(0)


def one_done(running: dict[int, tuple[Task, Path, float]]) -> Path:
    """Waits for a fork; returns the tree that is free again."""
    child, status, usage = os.wait4(-1, 0)
    task, tree, begun = running.pop(child)
    output = tree.with_suffix(".json")
    result = json.loads(output.read_text()) if output.exists() else {"code": -1, "failed": "", "run": 0, "tests": {}}
    result |= {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}
    result |= {"seconds": round(time.monotonic() - begun, 1), "cpu": round(usage.ru_utime + usage.ru_stime, 1)}
    task.finish(result, tree)
    return tree


def copied(root: Path, tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True).stdout
    for name in files.split("\0"):
        if name and (root / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, tree / name)


# ---- which tests run which lines


def coverage(options: argparse.Namespace, root: Path) -> dict[str, dict[str, Any]]:
    """Returns test -> seconds and lines; runs the test files that have no record yet."""
    folder = options.folder / "coverage"
    folder.mkdir(parents=True, exist_ok=True)

    def recorded(path: Path) -> Path:
        return folder / f"{str(path.relative_to(root)).replace('/', '.')}.json"

    def task(path: Path) -> Task:
        def finish(result: dict, tree: Path) -> None:
            usable = {name: test for name, test in result["tests"].items() if not test["failed"] and "lines" in test}
            recorded(path).write_text(json.dumps(usable))
            print(f"{path.relative_to(root)}: {len(usable)} tests, {result['cpu']} s", flush=True)

        return Task([str(path.relative_to(root))], True, lambda tree: None, finish)

    files = [f for t in options.tests for f in ([root / t] if (root / t).is_file() else (root / t).rglob("test_*.py"))]
    run_all([task(path) for path in sorted(files) if not recorded(path).exists()], options, root)
    return {name: test for path in sorted(files) for name, test in json.loads(recorded(path).read_text()).items()}


def chosen(mutant: Mutant, tests: dict[str, dict[str, Any]], most: int) -> list[str]:
    """Returns the tests that run the line, from all files in turn, the quickest first."""
    running = [name for name, test in tests.items() if mutant.line in test["lines"].get(mutant.file, ())]
    if not running and is_top_level(mutant):
        running = [name for name, test in tests.items() if mutant.file in test["lines"]]
    by_file: dict[str, list[str]] = {}
    for name in sorted(running, key=lambda name: tests[name]["seconds"]):
        by_file.setdefault(name.split("::")[0], []).append(name)
    turns = sorted(
        (turn, number, name) for number, names in enumerate(by_file.values()) for turn, name in enumerate(names)
    )
    return [name for _, _, name in turns][: most or None]


def is_top_level(mutant: Mutant) -> bool:
    tree = ast.parse(Path(mutant.file).read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    return not any(f.lineno < mutant.line <= (f.end_lineno or 0) for f in functions)


# ---- the campaign


def campaign(options: argparse.Namespace, root: Path) -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    tests = coverage(options, root)
    results = options.folder / "results.jsonl"
    done = {line["name"] for line in read(results)}
    mutants = drawn(root, options.package, options.count, options.seed)

    def say(mutant: Mutant, verdict: str, facts: dict) -> None:
        line = {"name": mutant.name, "verdict": verdict, "before": mutant.before, "after": mutant.after} | facts
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{verdict:9} {mutant.name} {facts.get('cpu', 0)} s {facts.get('failed', '')}", flush=True)

    def task(mutant: Mutant, names: list[str]) -> Task:
        def prepare(tree: Path) -> None:
            (tree / mutant.file).write_text(mutant.applied((tree / mutant.file).read_text()))

        def finish(result: dict, tree: Path) -> None:
            shutil.copy2(root / mutant.file, tree / mutant.file)
            slow = result["signal"] in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
            verdict = "survived" if result["code"] == 0 else "slow" if slow else "killed"
            say(mutant, verdict, {key: result[key] for key in ("failed", "run", "seconds", "cpu")})

        return Task(names, False, prepare, finish)

    def tasks() -> Iterator[Task]:
        for mutant in [mutant for mutant in mutants if mutant.name not in done]:
            names = chosen(mutant, tests, options.most)
            if names:
                yield task(mutant, names)
            else:
                say(mutant, "not run", {})

    run_all(tasks(), options, root)
    asked = {mutant.name for mutant in mutants}
    lines = [line for line in read(results) if line["name"] in asked]
    verdicts = Counter(line["verdict"] for line in lines)
    noticed = verdicts["killed"] + verdicts["slow"]
    seconds = sum(line.get("cpu", 0) for line in lines)
    share = noticed / max(len(lines), 1)
    print(f"{noticed} of {len(lines)} noticed ({share:.1%}): {dict(verdicts)}; {seconds:.0f} s of the processor")


def read(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", help="folder of the package, such as bridge")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--tests", nargs="+", help="test files or folders, by default tests/PACKAGE")
    parser.add_argument("--most", type=int, default=60, help="tests for a mutant; 0 for all that run its line")
    parser.add_argument("--limit", type=int, default=300, help="seconds of the processor for a mutant")
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/mutants"), help="records, results, copies of the tree"
    )
    options = parser.parse_args()
    options.tests, options.folder = options.tests or [f"tests/{options.package}"], options.folder.resolve()
    campaign(options, Path.cwd())


if __name__ == "__main__":
    main()
