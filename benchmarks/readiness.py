"""Writes docs/readiness.md: what a run on a v4-64 slice needs, what shows it, and what only a TPU can show.

    python -m benchmarks.readiness [--output docs/readiness.md] [--reports default.xml slow.xml]

The rows are the checklist that the project was founded on. Their tests are run, the slow ones too; a row is only
written as shown if all of its tests have passed.
"""

from __future__ import annotations

import dataclasses
import datetime
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from train_jax.version import commit

ROOT = Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Row:
    """One requirement."""

    requirement: str
    tests: tuple[str, ...]
    """Files below tests/, with `::name` for a single test; several cases of a test count together."""
    needs: str = ""
    """What only a TPU, a bucket or an account can show."""
    compiled: bool = False
    """Whether the tests compile for a TPU without having one."""


ROWS = (
    Row(
        "the train step of every architecture compiles for TPUs; so does evaluation",
        ("train_jax/test_compile_pod.py",),
        "that it runs, and how fast",
        compiled=True,
    ),
    Row(
        "the model computes what PyTorch computes, with every gradient; the compiled step has no PyTorch in it",
        ("bridge/test_trm_ladder.py", "train_jax/test_preflight.py::test_the_model_beside_pytorch_and_its_memory"),
        "the same comparison on the chip: `trm preflight` makes it",
    ),
    Row(
        "JAX finds the devices of the requested platform, and nothing falls back to the CPU",
        ("train_jax/test_cluster.py",),
        "the TPU itself",
    ),
    Row(
        "several processes join; one that is missing is named",
        ("train_jax/test_processes.py", "train_jax/test_preflight_hosts.py"),
        "8 workers over the network of a slice; here they are processes over loopback",
    ),
    Row(
        "the command line of a pod, rehearsed with hosts that are preempted and killed, in one view of all logs",
        ("train_jax/test_rehearsal.py",),
        "the same on a slice",
    ),
    Row(
        "checkpoints and results are written to gs://, read from there, and continued after a kill",
        ("train_jax/test_storage.py", "train_jax/test_storage_runs.py"),
        "a real bucket with its permissions; here a service on this machine that speaks the same protocol",
    ),
    Row(
        "process 0 alone writes metrics and wandb; every process has its own log; keys are in no file",
        ("train_jax/test_run_files.py",),
        "the account of wandb",
    ),
    Row(
        "a run survives: damaged checkpoints, SIGTERM, a lost process, a full disk",
        (
            "train_jax/test_checkpoint.py",
            "train_jax/test_preemption.py",
            "train_jax/test_peers.py",
            "train_jax/test_full_disk.py",
        ),
    ),
    Row(
        "a node is created, used, restarted after preemptions, and deleted",
        ("train_jax/test_launch.py", "train_jax/test_launch_node.py", "train_jax/test_launch_quoting.py"),
        "Google Cloud: here a stand-in for gcloud runs what the workers would run",
    ),
    Row(
        "every one of the 67 experiments is a run by name",
        ("train_jax/test_experiments.py",),
        "their results",
    ),
    Row("the documentation is one set of pages, and true", ("test_docs.py", "test_troubleshooting.py")),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Run the tests behind the readiness for a v4-64, and write the page."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = ROOT / "docs" / "readiness.md"
    """The page."""
    reports: tuple[Path, ...] = ()
    """JUnit reports of complete test runs of this commit (`--junitxml`), to be read instead of running the tests."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the tests of a row ended."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0


def outcomes(reports: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Counts the test cases of JUnit reports by row."""
    cases = [
        (case.get("classname", ""), case.get("name", "").partition("[")[0], {part.tag for part in case})
        for report in reports
        for case in xml.etree.ElementTree.fromstring(report).iter("testcase")
    ]
    return [_outcome(row, cases) for row in rows]


def _outcome(row: Row, cases: Sequence[tuple[str, str, set[str]]]) -> Outcome:
    counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
    for module, name, tags in cases:
        if any(_is_of(test, module, name) for test in row.tests):
            counts["failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"] += 1
    return Outcome(**counts)


def _is_of(test: str, module: str, name: str) -> bool:
    path, _, only = test.partition("::")
    return module == "tests." + path.removesuffix(".py").replace("/", ".") and only in ("", name)


def page(rows: Sequence[Row], results: Sequence[Outcome], facts: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of the page."""
    yield "# Readiness for a v4-64"
    yield ""
    yield "What a run on a TPU slice of 8 hosts needs, what shows it without one, and what only a TPU can show. Written"
    yield f"by `python -m benchmarks.readiness` on {facts['date']}, commit {facts['commit']}; the tests were run then."
    yield ""
    yield "| requirement | state | shown by | cases | needs |"
    yield "|---|---|---|---|---|"
    for row, result in zip(rows, results, strict=True):
        tests = ", ".join(f"`tests/{test}`" for test in row.tests)
        needs = row.needs or "nothing more"
        yield f"| {row.requirement} | {state(row, result)} | {tests} | {result.passed} | {needs} |"
    yield ""
    yield "Nothing on this page was run on a TPU, because none has been available."


def state(row: Row, result: Outcome) -> str:
    """`shown`, `compiled`, or why it is neither."""
    if result.failed:
        return f"**{result.failed} failed**"
    if not result.passed:
        return "**not run**"
    word = "compiled" if row.compiled else "shown"
    return f"{word}, {result.skipped} skipped" if result.skipped else word


def run_tests() -> str:
    """Runs the tests of all rows; returns the JUnit report."""
    tests = sorted({f"tests/{test}" for row in ROWS for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = ["-m", "slow or not slow", f"--junitxml={report}", *tests]
        subprocess.run([sys.executable, "-m", "pytest", "-n", "auto", "--dist", "worksteal", *chosen], cwd=ROOT)
        return report.read_text()


def main(options: Options) -> int:
    reports = [path.read_text() for path in options.reports] or [run_tests()]
    results = outcomes(reports, ROWS)
    facts = {"date": datetime.date.today().isoformat(), "commit": commit(None, ROOT)}
    options.output.write_text("\n".join(page(ROWS, results, facts)) + "\n")
    print(f"{options.output}: {sum(r.passed for r in results)} passed, {sum(r.failed for r in results)} failed")
    return int(any(result.failed or not result.passed for result in results))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
