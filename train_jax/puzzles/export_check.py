"""Compares the answers of plain PyTorch, with the exported weights, with the answers of JAX for every puzzle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from train_jax.puzzles.batches import Mixture
from train_jax.puzzles.commands import ExportCheck
from train_jax.puzzles.evaluation import PuzzleEvaluation
from train_jax.puzzles.metrics import score_answers
from train_jax.puzzles.solving import puzzle_task
from train_jax.puzzles.task import PuzzleTask
from train_jax.report.commands import Console
from train_jax.run.config import RunConfig
from train_jax.run.model import build_module
from train_jax.run.restore import Restored
from train_jax.runtime.devices import Devices


def check_export(run: Restored, weights: Path, console: Console) -> ExportCheck:
    """Compares the answers on the whole test set of the run, which computes in float32."""
    task = puzzle_task(run)
    with console.progress("answers in JAX") as advance:
        ours = task.evaluator(run.objective, Devices(), progress=advance)(run.state)
    with console.progress("answers in PyTorch") as advance:
        return compare(run.config, task, weights, task.test_set, ours, progress=advance)


def compare(
    config: RunConfig,
    task: PuzzleTask,
    weights: Path,
    puzzles: Mixture,
    ours: PuzzleEvaluation,
    *,
    batch_size: int = 250,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> ExportCheck:
    """Loads `weights` with `strict=True` into the PyTorch module of `config` and runs it eagerly on every puzzle."""
    module = build_module(config, task, batch_size)
    module.load_state_dict(load_file(weights), strict=True)
    module.eval()
    agree = 0
    solved = 0
    gap = 0.0
    done = 0
    for batch, valid in puzzles.eval_batches(batch_size=batch_size):
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in batch.items()}
        predictions, logits = _answer(module, tensors)
        count = int(valid.sum())
        rows = slice(done, done + count)
        agree += int((predictions[valid] == ours.predictions[-1, rows]).all(axis=-1).sum())
        solved += int(score_answers(predictions[valid], batch["labels"][valid]).exact.sum())
        gap = max(gap, float(np.abs(logits[valid] - ours.q_halt_logits[-1, rows]).max()))
        done += count
        progress(done, puzzles.num_examples)
    return ExportCheck(done, agree, solved / done, gap)


@torch.inference_mode()
def _answer(module: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    carry = module.initial_carry(batch)  # pyright: ignore[reportCallIssue]
    while True:
        carry, _, _, outputs, all_halted = module(carry=carry, batch=batch, return_keys=("preds", "q_halt_logits"))
        if all_halted:
            return outputs["preds"].numpy(), outputs["q_halt_logits"].numpy()
