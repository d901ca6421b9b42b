"""`trm core RUN BUNDLE`: scores a language run on the tasks of CORE."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro

from models_torch.ranges import Range
from train_jax.command_line import parse
from train_jax.errors import UserError
from train_jax.run.choice import NEWEST
from train_jax.run.files import write_text
from train_jax.run.restore import Restored, restore
from train_jax.run.storage import is_folder, path_of
from train_jax.runtime.backend import Platform
from train_jax.runtime.cluster import use_on_one_host
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.core_evaluation import DeviceScorer, task_verdicts
from train_jax.tasks.language.core_items import CoreTask, Tokens, read_bundle
from train_jax.tasks.language.task import LanguageTask, language_task
from train_jax.tasks.language.tokenizer import Tokenizer


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
    """Items of each task, the first ones of the random order; 0 uses all."""
    results: str | None = None
    """Write accuracies and verdicts to this JSON file too."""
    platform: Platform = "auto"
    """Where to compute."""


def main(config: Core) -> None:
    if config.results is not None and not is_folder(Path(config.results).parent):
        raise UserError(f"{Path(config.results).parent} is not a folder; give a file in an existing folder")
    use_on_one_host(config.platform)
    run = restore(config.run_dir, step=config.step)
    task = language_task(run)
    tasks = [each.first(config.max_per_task) for each in read_bundle(config.bundle)]
    figures = _score(run, task, tasks)
    if config.results is not None:
        write_text(path_of(config.results), json.dumps(figures | {"step": run.step}, indent=1))
    if not config.max_per_task:
        kept = {name: figure for name, figure in figures.items() if name != "verdicts"}
        write_text(run.folder.evaluation("core"), json.dumps(kept | {"step": run.step}, indent=1))


def _score(run: Restored, task: LanguageTask, tasks: Sequence[CoreTask]) -> dict[str, Any]:
    """Prints a line for each task. Returns the score, and accuracies and verdicts of the tasks."""
    tokenizer = task.data.tokenizer()
    positions = _positions(run)
    scorer = DeviceScorer(
        run.objective,
        run.state,
        Devices(),
        positions=positions,
        tokens_at_once=run.config.eval_batch_size * run.config.arch.seq_len,
    )
    figures: dict[str, Any] = {"tasks": {}, "verdicts": {}}
    print(f"{run.folder.path} at step {run.step}, averaged weights:")
    print(f"  {'task':<40} {'examples':>8} {'items':>7} {'accuracy':>9} {'centered':>9}")
    for each in tasks:
        verdicts = task_verdicts(each, scorer, partial(_encode, tokenizer), positions=positions)
        accuracy = sum(verdicts) / len(verdicts)
        centered = each.centered(accuracy)
        print(f"  {each.label:<40} {each.fewshot:>8} {len(verdicts):>7} {accuracy:>9.4f} {centered:>9.4f}")
        figures["tasks"][each.label] = {"items": len(verdicts), "accuracy": accuracy, "centered": centered}
        figures["verdicts"][each.label] = verdicts
    figures["core"] = sum(values["centered"] for values in figures["tasks"].values()) / len(tasks)
    print(f"  {'CORE':<40} {'':>8} {'':>7} {'':>9} {figures['core']:>9.4f}")
    return figures


def _positions(run: Restored) -> int:
    """Returns the length of the longest sequence: that of the tables of rotary positions, if there are any."""
    table = run.objective.buffers.get("cos")
    return run.config.arch.seq_len if table is None else table.shape[1]


def _encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Tokens]:
    try:
        return [[tokenizer.bos, *ids] for ids in tokenizer.encode_batch(texts)]
    except UnicodeEncodeError:
        raise UserError("an item of the bundle is not valid UTF-8; download the CORE bundle again") from None


def cli(argv: list[str]) -> None:
    main(parse(Core, argv, prog="trm core"))


if __name__ == "__main__":
    cli(sys.argv[1:])
