"""`trm evaluate RUN_DIR`: evaluates a checkpoint of a run on its test set, with its averaged weights."""

import dataclasses
from typing import Any, ClassVar

from train_jax.command_line import HelpPage
from train_jax.errors import UserError
from train_jax.plugin import entries, load_object
from train_jax.report.commands import Console, commands_of
from train_jax.report.progress import progress
from train_jax.run.restore import NEWEST, restore
from train_jax.run.resume import check_data
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import all_or_none, join_processes


def _options() -> list[Any]:
    """Returns the classes of the options of the tasks of all plugins, in their order, without bases of others."""
    reports = [load_object(target, "commands") for target in entries("reports").values()]
    classes = [load_object(target, "options") for target in dict.fromkeys(report.options for report in reports)]
    return [each for each in classes if not any(issubclass(other, each) for other in classes if other is not each)]


@dataclasses.dataclass(frozen=True)
class Evaluate(*reversed(_options())):  # the fields of a dataclass are those of its last base first
    """Evaluate a checkpoint of a run with its averaged weights.

    Puzzles: every example once, every sequence to the halt limit, and the curve of accuracy against mean ACT steps for
    early halting. Language: bits per byte of the held-out text, and samples.
    """

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {
        name: page for options in _options() for name, page in options.HELP_PAGES.items()
    }


def main(config: Evaluate) -> None:
    if config.weights is not None and config.step != NEWEST:
        raise UserError(f"--weights and --step {config.step} both select weights; give only one of them")
    config.refuse_conflicts()
    with join_processes(config.platform):
        devices = Devices()
        run = restore(config.run_dir, step=config.step)
        if config.data_dir is None:
            with all_or_none():
                given = getattr(run.task, "fingerprint", run.data)  # a user's task may have none without a batch
                check_data(run.config, run.data, given, run.step, "or the one to evaluate on")
        options: Any = load_object(commands_of(run.config.task).options, "options")
        options.evaluate(config, run, devices, Console(print, progress))
