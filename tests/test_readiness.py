"""docs/readiness.md: a row is shown only if its tests were run and passed, and every test that it names exists."""

import ast
from pathlib import Path

import pytest

from benchmarks.readiness import ROWS, Outcome, Row, outcomes, page, state

TESTS = Path(__file__).parent
REPORT = """<testsuites><testsuite>
<testcase classname="tests.train_jax.test_one" name="test_a[1]"/>
<testcase classname="tests.train_jax.test_one" name="test_a[2]"><failure/></testcase>
<testcase classname="tests.train_jax.test_one" name="test_b"><skipped/></testcase>
<testcase classname="tests.test_two" name="test_c"/>
</testsuite></testsuites>"""


@pytest.mark.parametrize(
    ("tests", "expected", "words"),
    [
        (("train_jax/test_one.py",), Outcome(1, 1, 1), "**1 failed**"),
        (("train_jax/test_one.py::test_b",), Outcome(0, 0, 1), "**not run**"),
        (("test_two.py", "train_jax/test_one.py::test_b"), Outcome(1, 0, 1), "shown, 1 skipped"),
        (("test_two.py::test_c",), Outcome(1, 0, 0), "shown"),
        (("test_three.py",), Outcome(), "**not run**"),
    ],
)
def test_a_row_is_shown_only_by_tests_that_passed(tests, expected, words):
    row = Row("it works", tests)
    (result,) = outcomes([REPORT], [row])
    assert (result, state(row, result)) == (expected, words)
    assert any(f"| it works | {words} |" in line for line in page([row], [result], {"date": "today", "commit": "abc"}))


@pytest.mark.parametrize("test", sorted({test for row in ROWS for test in row.tests}))
def test_every_test_of_a_row_exists(test):
    path, _, name = test.partition("::")
    functions = {node.name for node in ast.parse((TESTS / path).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in functions | {""}
