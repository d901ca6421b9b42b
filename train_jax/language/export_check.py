"""Compares the losses of plain PyTorch, with the exported weights, with the losses of JAX on held-out text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.torch import load_file

from models_torch.gpt import IGNORED_TARGET
from train_jax.core.state import Arrays
from train_jax.language.batches import Batch, eval_batches
from train_jax.language.commands import ExportCheck
from train_jax.language.task import language_task
from train_jax.report.commands import Console
from train_jax.run.model import build_module
from train_jax.run.restore import Restored

_TOKENS = 2**14
_BATCH_TOKENS = 2**12


def check_export(run: Restored, weights: Path, console: Console) -> ExportCheck:
    """Loads `weights` with `strict=True` into the PyTorch module and runs it eagerly; the run computes in float32."""
    task = language_task(run)
    seq_len = run.config.arch.seq_len
    rows = max(1, _BATCH_TOKENS // seq_len)
    limit = max(1, _TOKENS // seq_len)
    batches = list(eval_batches(task.test_stream, rows=rows, seq_len=seq_len, limit=limit, shard=(0, 1)))
    module = build_module(run.config, task, rows)
    module.load_state_dict(load_file(weights), strict=True)
    module.eval()
    state = jax.tree.map(jnp.asarray, (run.state.eval_params, run.state.buffers))

    @jax.jit
    def in_jax(params: Arrays, buffers: Arrays, batch: Any) -> jax.Array:
        call = run.objective.call(params, buffers, train=False)
        return call(batch["inputs"], batch["targets"], loss_reduction="none")[0]

    ours = []
    theirs = []
    with console.progress("losses in JAX and PyTorch") as advance:
        for number, batch in enumerate(batches, start=1):
            counts = batch["targets"].reshape(-1) != IGNORED_TARGET
            ours.append(np.asarray(in_jax(*state, batch))[counts])
            theirs.append(_losses(module, batch)[counts])
            advance(number, len(batches))
    jax_losses, torch_losses = (np.concatenate(parts).astype(np.float64) for parts in (ours, theirs))
    gap = float(np.abs(jax_losses - torch_losses).max())
    return ExportCheck(len(jax_losses), float(torch_losses.mean()), float(jax_losses.mean()), gap)


@torch.inference_mode()
def _losses(module: Any, batch: Batch) -> np.ndarray:
    tokens, targets = (torch.from_numpy(batch[name].astype(np.int64)) for name in ("inputs", "targets"))
    return module(tokens, targets, loss_reduction="none").reshape(-1).numpy()
