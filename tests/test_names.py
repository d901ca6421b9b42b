"""The names in the code, read from the syntax trees, and the length of its files."""

import ast
from pathlib import Path

import pytest
from support.identifiers import identifiers, wide_uses

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
FOLDERS = ("train_jax", "models_torch", "tests", "benchmarks")
ABOLISHED = frozenset(
    [
        "Trainee",
        "Silence",
        "Found",
        "judged",
        "kept_if",
        "moved",
        "told",
        "together",
        "own_part",
        "spanning",
        "one_rule",
        "looks",
        "question",
        "think",
        "Level",
    ]
)
"""Names of earlier versions that readers had to look up."""
FOUND_LINES = 5
"""Lines that a local variable `found` may span: a longer life deserves a name that says what was found."""
MOST_LINES = 600


def violations(source):
    """`line: name` of each identifier that must not occur."""
    tree = ast.parse(source)
    places = {(line, name) for name, line in identifiers(tree) if name in ABOLISHED}
    places |= {(line, "found") for line in wide_uses(tree, "found", FOUND_LINES)}
    return [f"{line}: {name}" for line, name in sorted(places)]


@pytest.mark.parametrize("folder", FOLDERS)
def test_abolished_names_do_not_occur(folder):
    by_file = {
        str(path.relative_to(ROOT)): violations(path.read_text()) for path in sorted((ROOT / folder).rglob("*.py"))
    }
    assert not {path: places for path, places in by_file.items() if places}


@pytest.mark.parametrize(
    "source",
    [
        "together = 1",
        "x.moved",
        "f(told=1)",
        "def f(question): ...",
        "def judged(): ...",
        "class Level: ...",
        "from a import looks",
        "import think.b",
        "import a as Found",
        "found = 1",
        "def found(): ...",
        "def f(found): return found",
        "def f():\n  found = 1\n\n\n\n\n  return found",
    ],
)
def test_abolished_names_are_detected(source):
    assert violations(source)


def test_other_uses_are_accepted():
    assert not violations("'together'  # moved\nmoved_steps = 1\ndef f():\n  found = 1\n\n\n\n  return found")


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_is_too_long(folder):
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py")
    }
    assert not {path: length for path, length in lengths.items() if length > MOST_LINES}
