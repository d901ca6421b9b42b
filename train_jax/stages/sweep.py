"""`trm sweep list|show|diff`: the table of experiments."""

import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.experiments.data_sets import data_sets
from train_jax.experiments.runs import differences, experiment, experiment_run, plan, remark
from train_jax.experiments.table import EXPERIMENTS, GROUPS

WIDTH = max(map(len, EXPERIMENTS))


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class Show:
    """Show one experiment: changes, steps, share of warm-up, examples, data set."""

    experiment_id: Annotated[str, tyro.conf.Positional]
    """Id of the experiment, such as exp01a."""

    def run(self) -> None:
        row = experiment(self.experiment_id)
        config = experiment_run(self.experiment_id)
        print(f"{self.experiment_id} ({row.group}, {GROUPS[row.group]}): {_changes(self.experiment_id)}")
        sets = data_sets(row)
        lines = plan(config, sum(each.puzzles for each in sets)).lines()
        for line in [*lines, *filter(None, [remark(self.experiment_id)])]:
            print(f"  {line}")
        for each in sets:
            print(f"  data set         {each.folder}, built by")
            print(f"    trm {' '.join(each.command)}")
        print(f"  train            trm train {self.experiment_id}")


@dataclass(frozen=True)
class Diff:
    """Print the fields in which two experiments differ."""

    first: Annotated[str, tyro.conf.Positional]
    """Experiment or baseline."""
    second: Annotated[str, tyro.conf.Positional] = "baseline"
    """Experiment or baseline to compare it with."""

    def run(self) -> None:
        changed = differences(experiment_run(self.first), experiment_run(self.second))
        changed.pop("run_dir", None)
        for name, (old, new) in changed.items():
            print(f"{name}: {self.second} {old}, {self.first} {new}")
        if not changed:
            print(f"{self.first} and {self.second} are the same run")


def _changes(experiment_id: str) -> str:
    changed = differences(experiment_run(experiment_id), experiment_run("baseline"))
    changed.pop("run_dir", None)
    return ", ".join(f"{name} {new}" for name, (_, new) in changed.items()) or "no changes"


COMMANDS = {"list": List, "show": Show, "diff": Diff}


def main(config: List | Show | Diff) -> None:
    config.run()


def cli(argv: list[str]) -> None:
    main(
        parse(
            COMMANDS,
            argv,
            prog="trm sweep",
            reader=tyro.extras.subcommand_cli_from_dict,
            description="The table of experiments.",
        )
    )


if __name__ == "__main__":
    cli(sys.argv[1:])
