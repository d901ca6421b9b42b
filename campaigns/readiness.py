"""Writes docs/dev/readiness.md: what a run on a v4-64 slice needs, which tests show it, and what only a TPU can show.

    python -m campaigns.readiness [--output docs/dev/readiness.md] [--reports default.xml slow.xml]

The rows are those of the checklist that the project was founded on, and further needs of a run on a pod. Their tests
are run, the slow ones too; a row is only written as shown if all of its tests have passed.
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
    """Files below tests/, with `::name` for a single test and `::name[id]` for one of its cases; all cases count
    together."""
    needs: str = ""
    """The part that only a TPU, a bucket or an account can show."""
    proved_by: str = ""
    """The rows that answer it on the hardware: parts of `trm prove`, or `part / row`, the beginning of a row's name."""
    compiled: bool = False
    """True if the tests compile for a TPU without having one."""


_PREFLIGHT = "train_jax/test_preflight.py::test_a_fault_is_caught"
FAULTS = {
    "a host with other code": f"{_PREFLIGHT}[code]",
    "a host with other data": f"{_PREFLIGHT}[other-data]",
    "a host that is missing": f"{_PREFLIGHT}[missing]",
    "a host on another backend": f"{_PREFLIGHT}[backend]",
    "a folder that cannot be written": f"{_PREFLIGHT}[unwritable]",
    "a local folder that the hosts do not share": f"{_PREFLIGHT}[not-shared]",
    "a wrong number of devices": "train_jax/test_preflight.py::test_another_number_than_expected_fails[devices]",
    "a clock that is wrong": f"{_PREFLIGHT}[clock]",
    "a batch that does not divide over the devices": f"{_PREFLIGHT}[batch]",
    "a model that does not fit": f"{_PREFLIGHT}[memory]",
    "a device that computes wrongly": f"{_PREFLIGHT}[lowering]",
}
"""Faults that `trm preflight` finds before a run, and the test that plants each of them."""

ROWS = (
    Row(
        "the train step of every architecture compiles for TPUs; so does evaluation",
        ("train_jax/test_compile_pod.py",),
        "that it runs, and how fast",
        compiled=True,
        proved_by="steps / step, plain; steps / step, fused; steps / MFU",
    ),
    Row(
        "whatever a stage runs over devices compiles for TPUs: no 64-bit type, no shape that depends on data",
        ("train_jax/test_stages_on_tpus.py",),
        "that it runs",
        compiled=True,
        proved_by="steps / step, plain; profile / run",
    ),
    Row(
        "every experiment is assembled for a v4-64 up to the compiler: model, sizes of its data, a batch that divides",
        ("train_jax/test_compile_pod.py::test_an_experiment_is_assembled",),
        "that it runs",
    ),
    Row(
        "the model computes what PyTorch computes, with every gradient",
        ("bridge/test_trm_ladder.py", "train_jax/test_preflight.py::test_two_hosts_that_are_ready"),
        "the same comparison on the chip: `trm preflight` makes it",
        proved_by="preflight / model beside PyTorch; preflight / matrix product; foreign modules",
    ),
    Row(
        "PyTorch defines the models and computes nothing: it is imported where a model is built or read, and a step is "
        "one program without a transfer to the host",
        (
            "test_doors.py::test_train_jax_imports_torch_only_where_a_model_is_built_or_read",
            "test_imports.py::test_the_contracts_are_kept",
            "train_jax/test_compute_options.py::test_the_programs_of_runs",
        ),
    ),
    Row(
        "JAX finds the devices of the requested platform, and nothing falls back to the CPU",
        ("train_jax/test_cluster.py",),
        "the TPU itself",
        proved_by="preflight / devices",
    ),
    Row(
        "the processes of a pod join, without variables of the user or with them; one that is missing is named",
        ("train_jax/test_cluster.py", "train_jax/test_processes.py", "train_jax/test_preflight.py"),
        "8 workers over the network of a slice; here they are 2 processes over loopback",
        proved_by="preflight / processes",
    ),
    Row(
        "batches and gradients are shared: several devices and processes learn what one device learns",
        ("train_jax/test_compute_options.py", "train_jax/test_processes.py"),
        "the network of a slice",
        proved_by="preflight / collective; steps / step, plain",
    ),
    Row(
        "the command line of a pod, rehearsed with hosts that are preempted and killed, in one view of all logs",
        ("train_jax/test_rehearsal.py",),
        "the same on a slice; 8 hosts of 4 devices are `pytest -m campaign tests/train_jax/test_rehearsal.py`",
    ),
    *(
        Row(f"`trm preflight` finds {fault}", (test,), "the same on a slice", proved_by="preflight")
        for fault, test in FAULTS.items()
    ),
    Row(
        "checkpoints and results are written to gs://, read from there, and continued after a kill",
        ("train_jax/test_storage.py", "train_jax/test_storage_runs.py"),
        "a real bucket with its permissions; here a service on this machine that speaks the same protocol",
    ),
    Row(
        "one option puts the runs of all experiments into a bucket, each into a folder of its own",
        (
            "train_jax/test_sweep_plan.py::test_runs_have_folders_commands_and_seeds",
            "train_jax/test_sweep_plan.py::test_a_sweep_in_storage",
        ),
        "a real bucket",
    ),
    Row(
        "process 0 alone writes metrics and wandb; every process has its own log; keys are in no file",
        (
            "train_jax/test_run_files.py",
            "train_jax/test_processes.py::test_a_run_continues_with_another_number_of_processes",
        ),
        "the account of wandb",
    ),
    Row(
        "a run survives: damaged checkpoints, SIGTERM, a lost process, a full disk",
        (
            "train_jax/test_checkpoint.py",
            "train_jax/test_preemption.py",
            "train_jax/test_peers.py",
        ),
        proved_by="kill and continuation",
    ),
    Row(
        "a compiled step comes with the run: as a file to load, or as an entry of JAX's compilation cache",
        ("train_jax/test_saved_program.py",),
        "a TPU whose key of the cache is the same, and that runs a program compiled elsewhere",
        proved_by="program, loaded; program, shipped",
    ),
    Row(
        "a node is created, used, restarted after preemptions, and deleted",
        ("train_jax/test_launch.py",),
        "Google Cloud: here a stand-in for gcloud runs what the workers would run",
    ),
    Row(
        "every command from the account to the deleted node, installation included, prints what its page says",
        ("train_jax/test_deploy_page.py",),
        "the account; here a stand-in for gcloud",
    ),
    Row(
        "every one of the 67 experiments is a run by name",
        ("train_jax/test_experiments.py",),
        "their results",
    ),
    Row(
        "one experiment from end to end, by name: data, training, evaluation, export, report, analysis",
        ("train_jax/test_sweep_runs.py::test_an_experiment_by_its_name_and_stage_by_stage",),
        "the same on a slice, at full size",
    ),
    Row(
        "every group of experiments has a guide: its question, runs, commands and analysis, and what would answer it",
        ("train_jax/test_guides.py",),
    ),
    Row(
        "results are analysed by a command, and runs are watched while they train",
        ("train_jax/test_analysis.py", "train_jax/test_watching.py"),
    ),
    Row("the documentation is one set of pages, and true", ("test_docs.py",)),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Run the tests behind the readiness for a v4-64, and write the page."""

    output: Annotated[Path, tyro.conf.arg(metavar="FILE")] = ROOT / "docs" / "dev" / "readiness.md"
    """File to write the page to."""
    reports: tuple[Path, ...] = ()
    """JUnit reports of complete test runs of this commit (`--junitxml`), which are read instead of running the tests.
    """


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of the tests of a row."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0


def outcomes(reports: Sequence[str], rows: Sequence[Row]) -> list[Outcome]:
    """Counts the test cases of JUnit reports by row."""
    cases = [
        (case.get("classname", ""), case.get("name", ""), {part.tag for part in case})
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
    return module == "tests." + path.removesuffix(".py").replace("/", ".") and only in (
        "",
        name,
        name.partition("[")[0],
    )


def page(rows: Sequence[Row], results: Sequence[Outcome], facts: Mapping[str, str]) -> Iterator[str]:
    """Yields the lines of the page."""
    yield "# Readiness for a v4-64"
    yield ""
    yield "What a run on a TPU slice of 8 hosts needs, what shows it without one, and what only a TPU can show. Written"
    yield f"by `python -m campaigns.readiness` on {facts['date']}, commit {facts['commit']}; the tests were run then."
    yield ""
    yield "| requirement | state | shown by | cases | needs | part of `trm prove`, or part / row |"
    yield "|---|---|---|---|---|---|"
    for row, result in zip(rows, results, strict=True):
        tests = ", ".join(f"`tests/{test}`" for test in row.tests)
        needs = row.needs or "nothing more"
        cells = (row.requirement, state(row, result), tests, str(result.passed), needs, row.proved_by or "-")
        yield f"| {' | '.join(cells)} |"
    yield ""
    yield "Nothing on this page was run on a TPU, because none has been available. With one,"
    yield "the last column is answered by `trm prove sudoku-extreme --minutes 15`, and"
    yield "`python -m benchmarks.step --sizes baseline` times PyTorch beside it."


def state(row: Row, result: Outcome) -> str:
    """Returns `shown`, `compiled`, or the reason why it is neither."""
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
        chosen = ["-m", "slow or not slow or docs", f"--junitxml={report}", *tests]
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
