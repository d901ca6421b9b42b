"""docs/dev/readiness.md: a row is shown only if its tests were run and passed, and every test that it names exists."""

import ast
from pathlib import Path

import pytest

from benchmarks.readiness import FAULTS, ROWS, Options, Outcome, Row, main, outcomes, page, state
from train_jax.pod.prove.parts import PARTS
from train_jax.pod.prove.runs import RUNS

pytestmark = pytest.mark.docs

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
        (("train_jax/test_one.py::test_a[1]",), Outcome(1, 0, 0), "shown"),
        (("train_jax/test_one.py::test_a",), Outcome(1, 1, 0), "**1 failed**"),
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
    name, _, case = name.partition("[")
    text = (TESTS / path).read_text()
    functions = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    assert name in functions or not name
    if case:
        words = [node for each in functions[name].decorator_list for node in ast.walk(each)]
        assert case.removesuffix("]") in {word.value for word in words if isinstance(word, ast.Constant)}


def test_every_part_and_row_of_a_proof_exists():
    """A row by the beginning of its name, which is written in the code of its part."""
    pod = TESTS.parent / "train_jax" / "pod"
    code = "".join(path.read_text() for path in (*pod.glob("prove/*.py"), *pod.glob("preflight/*.py")))
    parts = {part.name for part in PARTS} | {*RUNS}
    for each in [each for row in ROWS for each in row.proved_by.split("; ") if each]:
        part, _, name = each.partition(" / ")
        assert part in parts, each
        assert all(f'"{word}' in code for word in name.split(", ")), each


def test_the_page_of_reports(tmp_path, capsys):
    """Two reports in which every test of a row has passed, and one with a failure beside."""
    tests = sorted({test for row in ROWS for test in row.tests})
    cases = []
    for test in tests:
        path, _, name = test.partition("::")
        module = "tests." + path.removesuffix(".py").replace("/", ".")
        cases.append(f'<testcase classname="{module}" name="{name or "test_it"}"/>')
    for number, part in enumerate((cases[::2], cases[1::2])):
        (tmp_path / f"{number}.xml").write_text(f"<testsuites><testsuite>{''.join(part)}</testsuite></testsuites>")
    reports = tmp_path / "0.xml", tmp_path / "1.xml"
    assert main(Options(tmp_path / "page.md", reports)) == 0
    text = (tmp_path / "page.md").read_text()
    assert all(f"| {row.requirement} | {'compiled' if row.compiled else 'shown'} |" in text for row in ROWS)
    assert " passed, 0 failed" in capsys.readouterr().out
    (tmp_path / "2.xml").write_text(REPORT.replace("tests.train_jax.test_one", "tests.train_jax.test_cluster"))
    assert main(Options(tmp_path / "page.md", (*reports, tmp_path / "2.xml"))) == 1
    assert "**1 failed**" in (tmp_path / "page.md").read_text()
    assert main(Options(tmp_path / "page.md", reports[:1])) == 1 and "**not run**" in (tmp_path / "page.md").read_text()


def test_every_fault_that_preflight_has_to_find_is_a_row():
    assert len(FAULTS) == len(set(FAULTS.values())) == 11
    assert all(any(row.tests == (test,) for row in ROWS) for test in FAULTS.values())
