"""`trm sweep NAME…`: trains experiments one after another; `list` prints their table."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse_subcommand
from train_jax.errors import UserError
from train_jax.plugin import file_options
from train_jax.research.equal_flops import with_equal_flops
from train_jax.research.jobs import Options, check_folders, combinations, jobs_of, select, sweep_lines
from train_jax.research.runs import experiment_run
from train_jax.research.sweeper import Sweeper, SweepFiles
from train_jax.research.table import EXPERIMENTS, GROUPS
from train_jax.run.plan import differences
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import VARIABLES
from train_jax.runtime.supervisor import Supervisor

WIDTH = max(map(len, EXPERIMENTS))
PROCESSES = VARIABLES[1]
"""Name of the variable with the number of processes of a run on several hosts."""


@dataclasses.dataclass(frozen=True)
class ListExperiments:
    """List every experiment: its id and its differences from the baseline."""

    group: Annotated[str | None, tyro.conf.Positional] = None
    """Only list this group, such as exp01."""

    def run(self) -> None:
        if self.group is not None and self.group not in GROUPS:
            raise UserError(f"unknown group {self.group!r}; use one of {', '.join(GROUPS)}")
        baseline = experiment_run("baseline")
        for group, title in GROUPS.items():
            if self.group in (None, group):
                print(f"{group}: {title}")
                for name in (name for name, row in EXPERIMENTS.items() if row.group == group):
                    changed = differences(experiment_run(name), baseline)
                    shown = ", ".join(f"{field} {new}" for field, (_, new) in changed.items() if field != "run_dir")
                    print(f"  {name:<{WIDTH}} {shown or 'no changes'}")


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Train experiments one after another, each in its own process; `run` may be omitted. The same command continues a
    sweep: finished runs are skipped, others continue. Started several times, it shares the work."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Ids, groups, patterns such as 'exp0[12]*', and presets."""
    all: bool = False
    """Run every experiment of the table."""
    over: tuple[str, ...] = ()
    """Free sweep: every combination of optim.lr=1e-4,3e-4 seed=0,1 and other fields, or of
    'arch.H_cycles,arch.L_cycles=[[2, 6], [3, 4]]' for fields that change together."""
    preset: str | None = None
    """Size of the experiments: tiny, study, sudoku6, sudoku9; by default the full size."""
    seeds: Annotated[int, Range(1, 10_000)] = 1
    """Runs of each experiment, with the seeds 0, 1, …"""
    equal_flops: bool = False
    """Give every run as many steps as the FLOPs of the first one pay for, to 0.5 %: matrix products of train steps."""
    dry_run: bool = False
    """Only print the plan: order, steps, warm-up, examples, FLOPs, the state of each run, data sets."""
    continue_on_failure: bool = False
    """Continue with the other runs when one has failed."""
    restarts: Annotated[int, Range(0, 1000)] = 3
    """Restarts of each run after a crash, as with `trm train --restarts`."""
    runs_root: str = "runs"
    """Folder of the runs, ROOT/GROUP/ID/seed-N, or gs://bucket/folder."""
    data_root: str = "data"
    """Folder of the data sets, which are built if they do not exist; or gs://bucket/folder."""
    platform: Platform = "auto"
    """Platform to compute on, as with `trm train`."""
    wandb: Literal["auto", "online", "offline", "disabled"] = "auto"
    """Mode of wandb, as with `trm train`; the project is trm-GROUP, and the group in wandb is the id."""

    def run(self) -> None:
        if not (self.names or self.all):
            raise UserError("trm sweep needs ids, groups or presets, or --all; `trm sweep list` shows them")
        if os.environ.get(PROCESSES, "1") != "1":
            raise UserError(
                f"{PROCESSES} is {os.environ[PROCESSES]}, but a sweep trains each run on one host; start `trm sweep` "
                f"on each host without {PROCESSES}, with one --runs-root"
            )
        files = SweepFiles(self.runs_root)
        names = select([*EXPERIMENTS, *self.names] if self.all else self.names)
        settings = {"platform": self.platform, "wandb": self.wandb}
        options = Options(files.root_text, self.data_root.rstrip("/"), self.preset, self.seeds, settings)
        jobs = jobs_of(names, combinations(self.over), options)
        if self.equal_flops:
            jobs = with_equal_flops(jobs, self.preset)
        check_folders(jobs)
        if self.dry_run:
            print("\n".join(sweep_lines(jobs, files)))
            return
        sweeper = Sweeper(files, jobs, say=_say, run=self._train, continues_on_failure=self.continue_on_failure)
        if status := sweeper.sweep():
            raise SystemExit(status)

    def _train(self, words: Sequence[str]) -> int:
        """Runs a command of `trm` in its own process, which ends if this one does, and restarts it after a crash."""
        return Supervisor([sys.executable, "-m", "train_jax", *file_options(), *words], self.restarts, _say).run()


def _say(line: str) -> None:
    print(f"trm sweep: {line}", flush=True)


COMMANDS = {"run": Sweep, "list": ListExperiments}


def main(config: Sweep | ListExperiments) -> None:
    config.run()


def cli(argv: list[str]) -> None:
    named = argv and argv[0] in (*COMMANDS, "-h", "--help")
    config = parse_subcommand(
        COMMANDS,
        argv if named else ["run", *argv],
        prog="trm sweep",
        unknown="command {}",
        description="Trains experiments, or shows their table. `trm sweep exp01` is `trm sweep run exp01`.",
    )
    main(config)
