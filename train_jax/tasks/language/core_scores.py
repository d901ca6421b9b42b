"""Scores a language run on the tasks of CORE, with a line for each task, and writes the result into its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from train_jax.errors import UserError
from train_jax.run.files import write_text
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices
from train_jax.tasks.language.core_evaluation import DeviceScorer, task_verdicts
from train_jax.tasks.language.core_items import CoreTask, Tokens
from train_jax.tasks.language.task import LanguageTask
from train_jax.tasks.language.tokenizer import Tokenizer


def score(run: Restored, task: LanguageTask, tasks: Sequence[CoreTask], say: Callable[[str], None]) -> dict[str, Any]:
    """Says a line for each task. Returns the score, and accuracies and verdicts of the tasks."""
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
    say(f"{run.folder.path} at step {run.step}, {run.weights}:")
    say(f"  {'task':<40} {'examples':>8} {'items':>7} {'accuracy':>9} {'centered':>9}")
    for each in tasks:
        verdicts = task_verdicts(each, scorer, partial(_encode, tokenizer), positions=positions)
        accuracy = sum(verdicts) / len(verdicts)
        centered = each.centered(accuracy)
        say(f"  {each.label:<40} {each.fewshot:>8} {len(verdicts):>7} {accuracy:>9.4f} {centered:>9.4f}")
        figures["tasks"][each.label] = {"items": len(verdicts), "accuracy": accuracy, "centered": centered}
        figures["verdicts"][each.label] = verdicts
    figures["core"] = sum(values["centered"] for values in figures["tasks"].values()) / len(tasks)
    say(f"  {'CORE':<40} {'':>8} {'':>7} {'':>9} {figures['core']:>9.4f}")
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


def save_scores(run: Restored, figures: dict[str, Any]) -> None:
    """Writes the scores of all items, without the verdicts."""
    kept = {name: figure for name, figure in figures.items() if name != "verdicts"}
    write_text(run.folder.evaluation("core"), json.dumps(kept | {"step": run.step}, indent=1))
