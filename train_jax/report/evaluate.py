"""`trm evaluate` for any task: the options that all tasks have, and the evaluation by the protocol alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import tyro

import bridge
from models_torch.ranges import Range
from train_jax.command_line import HelpPage
from train_jax.errors import UserError
from train_jax.report.commands import Console
from train_jax.runtime.backend import Platform
from train_jax.runtime.processes import is_main_process
from train_jax.storage.files import local_copy
from train_jax.storage.storage import path_of

if TYPE_CHECKING:
    from train_jax.run.restore import Restored
    from train_jax.runtime.devices import Devices


@dataclasses.dataclass(frozen=True)
class EvaluateOptions:
    """Options of all tasks; a built-in task adds its own in a subclass."""

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    step: str = "newest"
    """Checkpoint: newest, best (of a run with --keep-best), or its step. The results of a chosen one are in
    RUN/at-step-N."""
    data_dir: str | None = None
    """Data set to evaluate on, by default that of the run; for a run on several data sets, one of them."""
    split: Literal["test", "train"] = "test"
    """Split of the data set."""
    weights: str | None = None
    """Evaluate these weights instead: .pt or .safetensors with PyTorch names (published checkpoints, `trm export`)."""
    batch_size: Annotated[int, Range(0, 2**24)] = 0
    """Examples per batch, on all devices together; 0 uses that of the run."""
    limit: Annotated[int, Range(0, 10**12)] = 0
    """Evaluate only the first examples; 0 uses all."""
    platform: Platform = "auto"
    """Platform to compute on; on a TPU pod, every host runs this command."""

    HELP_PAGES: ClassVar[dict[str, HelpPage]] = {}

    def evaluate(self, run: Restored, devices: Devices, console: Console) -> None:
        """Evaluates a run, prints the results and writes them. Called in every process.

        This one evaluates the test split of a user's task. Raises `UserError` for options that do not fit the task.
        """
        supported = {"run_dir", "step", "weights", "limit", "platform"}
        for field in dataclasses.fields(self):
            if field.name not in supported and getattr(self, field.name) != field.default:
                raise UserError(f"--{field.name.replace('_', '-')} is not for runs of task {run.config.task}; omit it")
        run = with_chosen_weights(self, run)
        with console.progress("evaluating"):
            evaluation = run.task.evaluator(run.objective, devices)(run.state, limit=self.limit)
        if is_main_process():
            if self.belongs_to_run:
                evaluation.save(run.folder, self.split)
            console.say(lines_of(self, run, evaluation.metrics))

    def refuse_conflicts(self) -> None:
        """Raises `UserError` for options that conflict."""

    @property
    def belongs_to_run(self) -> bool:
        """Returns True if the results are those of the run on its whole split, which its folder keeps."""
        return self.weights is None and self.data_dir is None and not self.limit


def refuse_other_options(options: EvaluateOptions, own: type[EvaluateOptions], run: Restored) -> None:
    """Raises `UserError` for options with other values than their defaults that the class `own` does not have."""
    names = {field.name for field in dataclasses.fields(own)}
    for field in dataclasses.fields(options):
        if field.name not in names and getattr(options, field.name) != field.default:
            option = f"--{field.name.replace('_', '-')}"
            raise UserError(f"{option} is not for runs of task {run.config.task}, as {run.folder.path} is; omit it")


def with_chosen_weights(options: EvaluateOptions, run: Restored) -> Restored:
    """Returns the run with the weights in `--weights`. Raises `UserError` if they cannot be read or do not fit."""
    if options.weights is None:
        return run
    try:
        with local_copy(path_of(options.weights)) as weights:
            return run.with_weights(bridge.load_weights(weights), options.weights)
    except bridge.BridgeError as error:
        raise UserError(str(error)) from error


def lines_of(options: EvaluateOptions, run: Restored, metrics: Mapping[str, float], how: str = "") -> str:
    """Returns the lines about the metrics of an evaluation; `how` follows the name of the weights."""
    lines = [f"{options.run_dir} at step {run.step}, {options.split} set, {run.weights}{how}:"]
    for name, value in metrics.items():
        lines.append(f"  {name:<16} {value:.0f}" if name == "count" else f"  {name:<16} {value:.4f}")
    return "\n".join(lines)
