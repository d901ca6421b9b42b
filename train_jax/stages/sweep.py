"""`trm sweep NAME…`: trains experiments one after another; `list`, `show`, `diff` and `status` only print."""

import dataclasses
import os
import shutil
import time
from collections import Counter
from typing import Annotated, Any, Literal

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import PreemptedError, UserError
from train_jax.experiments.jobs import (
    Options,
    check_folders,
    combinations,
    jobs_of,
    select,
    sweep_lines,
    with_copies,
    without_done,
)
from train_jax.experiments.runs import differences, experiment, experiment_run, options_of, plan_lines
from train_jax.experiments.sweeper import Sweeper, SweepFiles, done_elsewhere, other_sweepers, run_command
from train_jax.experiments.table import EXPERIMENTS, GROUPS, data_sets
from train_jax.report.status_table import status_table
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import VARIABLES

WIDTH = max(map(len, EXPERIMENTS))
PROCESSES = VARIABLES[1]
"""Of a run on several hosts."""


@dataclasses.dataclass(frozen=True)
class List:
    """List every experiment: its id and its differences from the baseline."""

    group: Annotated[str | None, tyro.conf.Positional] = None
    """Only list this group, such as exp01."""

    def run(self) -> None:
        if self.group is not None and self.group not in GROUPS:
            raise UserError(f"unknown group {self.group!r}; use one of {', '.join(GROUPS)}")
        for group, title in GROUPS.items():
            if self.group in (None, group):
                print(f"{group}: {title}")
                for name, row in EXPERIMENTS.items():
                    if row.group == group:
                        print(f"  {name:<{WIDTH}} {_changes(name)}")


@dataclasses.dataclass(frozen=True)
class Show:
    """Show one experiment: changes, steps, share of warm-up, examples, data set."""

    experiment_id: Annotated[str, tyro.conf.Positional]
    """Id of the experiment, such as exp01a."""

    def run(self) -> None:
        row = experiment(self.experiment_id)
        config = experiment_run(self.experiment_id)
        print(f"{self.experiment_id} ({row.group}, {GROUPS[row.group]}): {_changes(self.experiment_id)}")
        sets = data_sets(row)
        for line in plan_lines(self.experiment_id, config, sum(each.puzzles for each in sets)):
            print(f"  {line}")
        for each in sets:
            print(f"  data set         {each.folder}, built by")
            print(f"    trm {' '.join(each.command)}")
        print(f"  train            trm train {self.experiment_id}")


@dataclasses.dataclass(frozen=True)
class Diff:
    """Print the fields in which two experiments differ."""

    first: Annotated[str, tyro.conf.Positional]
    """Experiment or baseline."""
    second: Annotated[str, tyro.conf.Positional] = "baseline"
    """Experiment or baseline to compare it with."""

    def run(self) -> None:
        changed = _changed(self.first, self.second)
        for name, (old, new) in changed.items():
            print(f"{name}: {self.second} {old}, {self.first} {new}")
        if not changed:
            print(f"{self.first} and {self.second} are the same run")


@dataclasses.dataclass(frozen=True)
class Run:
    """Train experiments one after another, each in a process of its own; `run` may be omitted. The same command
    continues a sweep: finished runs are skipped, others continue. Several sweepers in one root share the work."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Ids, groups, patterns such as 'exp0[12]*', and presets."""
    all: bool = False
    """Every experiment of the table."""
    over: str = ""
    """Free sweep over fields: 'product(optim.lr=[1e-4, 3e-4], zip(arch.H_cycles=[2, 3], arch.L_cycles=[4, 6]))', or
    chain(…, …)."""
    preset: str | None = None
    """Size of the experiments: tiny, study, sudoku6, sudoku9; by default the full size."""
    seeds: Annotated[int, Range(1, 10_000)] = 1
    """Runs of each experiment, with the seeds 0, 1, …"""
    dry_run: bool = False
    """Only print the plan: order, steps, warm-up, examples, FLOPs, data sets."""
    continue_on_failure: bool = False
    """Go on with the other runs when one has failed."""
    done: tuple[str, ...] = ()
    """Files results.csv of `trm analyze`: the runs that are finished there are left out."""
    copy_equal: bool = True
    """Train runs with the same configuration and seed once, and copy the first one's folder."""
    workers: Annotated[int, Range(1, 1000)] = 1
    """Sweepers of this command on this machine, which share its CPUs."""
    restarts: Annotated[int, Range(0, 1000)] = 3
    """Restarts of each run after a crash, as of `trm train --restarts`."""
    runs_root: str | None = None
    """Folder of the runs, ROOT/GROUP/ID/seed-N, or gs://bucket/folder; by default TRM_RUNS_ROOT, or runs."""
    data_root: str = "data"
    """Folder of the data sets, or gs://bucket/folder."""
    build_data: bool = True
    """Build data sets that are not there."""
    platform: Platform = "auto"
    """Where to compute, as of `trm train`."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """As of `trm train`; the project is trm-GROUP, the group of wandb the id."""
    peak_tflops: Annotated[float, Range(0, 1e9, low_excluded=True)] | None = None
    """Peak TFLOP/s of all devices together; with --utilisation, the plan states hours."""
    utilisation: Annotated[float, Range(0, 1, low_excluded=True)] | None = None
    """Share of the peak that a run reaches, as measured by `perf/mfu`."""

    def run(self) -> None:
        if not (self.names or self.all):
            raise UserError("trm sweep needs ids, groups or presets, or --all; `trm sweep list` shows them")
        if os.environ.get(PROCESSES, "1") != "1":
            raise UserError(
                f"{PROCESSES} is {os.environ[PROCESSES]}, but a sweep trains each run on one host; start `trm sweep` "
                f"on each host without {PROCESSES}, with one --runs-root"
            )
        if (self.peak_tflops is None) != (self.utilisation is None):
            raise UserError("--peak-tflops and --utilisation state hours together; give both")
        files = SweepFiles(self.runs_root or os.environ.get("TRM_RUNS_ROOT", "") or "runs")
        names = select([*EXPERIMENTS, *self.names] if self.all else self.names)
        settings = {"platform": self.platform, "wandb": self.wandb}
        options = Options(files.root_text, self.data_root.rstrip("/"), self.preset, self.seeds, settings)
        jobs = jobs_of(names, combinations(self.over) if self.over else [], options)
        jobs = without_done(jobs, set().union(*map(done_elsewhere, self.done)))
        if self.copy_equal:
            jobs = with_copies(jobs)
        check_folders(jobs)
        if self.dry_run:
            peak = None if self.peak_tflops is None else self.peak_tflops * 1e12 * (self.utilisation or 0)
            print("\n".join(sweep_lines(jobs, files, peak)))
            return
        works = [job.work for job in jobs]
        if not works:
            print(f"every run is finished in {', '.join(self.done)}")
            return
        files.write_plan(works)
        sweeper = Sweeper(
            files,
            works,
            say=lambda line: print(line, flush=True),
            run=lambda words: run_command(words, self.restarts),
            continues_on_failure=self.continue_on_failure,
            builds_data=self.build_data,
        )
        with other_sweepers(self._command, self.workers - 1):
            status = sweeper.sweep()
            if status == PreemptedError.STATUS:
                raise SystemExit(status)
        counts = files.write_results()
        print(f"{files.root}: {_counted(counts)}; results in {files.root / 'batch_results.json'}")
        if status:
            raise SystemExit(status)

    @property
    def _command(self) -> list[str]:
        """The words after `trm` that start one sweeper of this sweep."""
        return ["sweep", "run", *self.names, *options_of(dataclasses.replace(self, names=(), workers=1), Run())]


@dataclasses.dataclass(frozen=True)
class Status:
    """Show the runs of the sweeps in a root: how many are finished, running, failed or waiting, and how far they are.

    Only files are read."""

    root: Annotated[str, tyro.conf.Positional] = "runs"
    """Folder of the runs."""
    watch: Annotated[float, Range(0, 1e6)] = 0.0
    """Show them again after so many seconds, until Ctrl-C; 0 shows them once."""

    def run(self) -> None:
        files = SweepFiles(self.root)
        while True:
            print("\n".join(_status_lines(files)), flush=True)
            if not self.watch:
                return
            time.sleep(self.watch)


def _status_lines(files: SweepFiles) -> list[str]:
    states = {work.name: files.state(work) for work in files.planned()}
    lines = [f"{files.root}: {_counted(Counter(state for state, _ in states.values()))}"]
    started = [status for _, status in states.values() if status is not None]
    if started:
        lines.append(status_table(started, width=max(72, shutil.get_terminal_size().columns)))
    for name, (state, _) in states.items():
        if state == "failed":
            lines.append(f"{name}: {(files.failure(name) or {}).get('reason')}")
    return lines


def _counted(counts: dict) -> str:
    total = sum(counts.values())
    return f"{total} runs: {', '.join(f'{count} {state}' for state, count in counts.items())}"


def _changes(experiment_id: str) -> str:
    return ", ".join(f"{name} {new}" for name, (_, new) in _changed(experiment_id).items()) or "no changes"


def _changed(experiment_id: str, reference: str = "baseline") -> dict[str, tuple[Any, Any]]:
    changed = differences(experiment_run(experiment_id), experiment_run(reference))
    return {name: values for name, values in changed.items() if name != "run_dir"}


COMMANDS = {"run": Run, "list": List, "show": Show, "diff": Diff, "status": Status}


def main(config: Run | List | Show | Diff | Status) -> None:
    config.run()


def cli(argv: list[str]) -> None:
    if argv and argv[0] not in (*COMMANDS, "-h", "--help"):
        argv = ["run", *argv]
    main(
        parse(
            COMMANDS,
            argv,
            prog="trm sweep",
            reader=tyro.extras.subcommand_cli_from_dict,
            description="Trains experiments, or shows their table. `trm sweep exp01` is `trm sweep run exp01`.",
        )
    )
