"""Compares the loss of a script in plain PyTorch, with the exported weights, with the loss in JAX."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import torch
from safetensors.torch import load_file

from bridge.parity.sides import watching
from bridge.tensor.arrays import array_of
from train_jax.errors import UserError
from train_jax.run.model import build_module
from train_jax.run.restore import Restored
from train_jax.script.commands import ExportCheck
from train_jax.script.task import LOSS, LOSS_METHOD, ScriptTask, as_given, mean_loss, sums_of

_EXAMPLES = 32


def check_export(run: Restored, weights: Path) -> ExportCheck:
    """Loads `weights` with `strict=True` into the model of the script, and computes the loss of one batch.

    JAX replays what PyTorch draws. Raises `UserError` for a script with an iterable of batches alone.
    """
    task = run.task
    assert isinstance(task, ScriptTask)
    script = task.script
    data = task.test_data or task.train_data
    if data.count is None:
        raise UserError(f"{script.file} has no examples by number to check the weights with; use --no-check")
    examples = min(_EXAMPLES, data.count)
    batch = data.rows(0, examples)
    module = build_module(run.config, task, examples)
    module.load_state_dict(load_file(weights), strict=True)
    module.eval()
    # With gradients, which the loss of a potential needs for its forces.
    with script.errors_of("loss()"), watching(None) as watch:
        theirs = sums_of(script.loss(as_given(module), batch), script.line_of("loss"), task.parts)
    draws = [array_of(draw) for draw in watch.draws]
    arrays = task.form.arrays(batch, "collate()")
    params, buffers = jax.tree.map(jnp.asarray, (run.state.eval_params, run.state.buffers))
    ours, _ = run.objective.call(params, buffers, train=False, rng=draws)(arrays, method=LOSS_METHOD)
    names = task.parts or (LOSS,)
    torch_loss = float(sum(torch.as_tensor(mean_loss(theirs, name)).detach() for name in names))
    jax_loss = float(sum(mean_loss(ours, name) for name in names))
    return ExportCheck(examples, torch_loss, jax_loss)
