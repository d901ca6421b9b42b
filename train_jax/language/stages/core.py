"""`trm core RUN BUNDLE`: scores a language run on the tasks of CORE."""

import dataclasses
import json
from typing import Annotated

import tyro

from models_torch.ranges import Range
from train_jax.language.core_evaluation import read_bundle, save_scores, score
from train_jax.language.task import language_task
from train_jax.run.restore import NEWEST, restore
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.storage.files import check_output, write_text
from train_jax.storage.storage import path_of


@dataclasses.dataclass(frozen=True)
class Core:
    """Score a language run on the tasks of CORE, with few-shot prompts: multiple choice, schema and language modeling.

    The score is the mean over the tasks of the accuracy, on a scale on which a random answer has 0. The prompts, their
    random order and the verdicts are those of nanochat. Uses all devices of one process.
    """

    run_dir: Annotated[str, tyro.conf.Positional]
    """The run, as `trm train` made it: a folder, or gs://bucket/folder."""
    bundle: Annotated[str, tyro.conf.Positional]
    """The unpacked evaluation bundle: the folder with core.yaml, or gs://bucket/folder."""
    step: str = NEWEST
    """Checkpoint: newest, best (of a run with --keep-best), or its step."""
    max_per_task: Annotated[int, Range(0, 10**9)] = 0
    """Number of items of each task, the first ones of the random order; 0 uses all."""
    results: str | None = None
    """Write accuracies and verdicts to this JSON file too."""
    platform: Platform = "auto"
    """Platform to compute on."""


def main(config: Core) -> None:
    if config.results is not None:
        check_output(config.results)
    use_on_one_host(config.platform)
    run = restore(config.run_dir, step=config.step)
    task = language_task(run)
    tasks = [each.first(config.max_per_task) for each in read_bundle(config.bundle)]
    figures = score(run, task, tasks, print)
    if config.results is not None:
        write_text(path_of(config.results), json.dumps(figures | {"step": run.step}, indent=1))
    if not config.max_per_task:
        save_scores(run, figures)
