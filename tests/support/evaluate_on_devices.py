"""A script: evaluates a toy model on virtual devices and saves its predictions.

python -m support.evaluate_on_devices DEVICES DATA_DIR OUT.npz
"""

import os
import sys

devices, data_dir, out = int(sys.argv[1]), *sys.argv[2:]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
os.environ["JAX_PLATFORMS"] = "cpu"

from unittest import mock  # noqa: E402

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from train_jax.core.reduction import AXIS  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402
from train_jax.tasks.puzzles import evaluation  # noqa: E402
from train_jax.tasks.puzzles.format import load_split  # noqa: E402
from train_jax.tasks.puzzles.voting import Predictions, save_predictions  # noqa: E402


def eval_step(state, batch):
    """Answers two of three identifiers correctly, the third with a wrong cell; halting logits depend on identifiers."""
    identifiers = batch["puzzle_identifiers"]
    answer = jnp.maximum(batch["labels"], 0)
    answer = answer.at[:, 0].set(jnp.where(identifiers % 3 == 0, 2 + identifiers % 7, answer[:, 0]))
    metrics = {"count": (batch["labels"] >= 0).any(axis=1).sum(), "lm_loss": jnp.zeros(())}
    return jax.lax.psum(metrics, AXIS), {"preds": answer[None], "q_halt_logits": jnp.sin(identifiers * 1.7)[None]}


with mock.patch.object(evaluation, "make_eval_step", lambda *_, **__: eval_step):
    evaluator = evaluation.Evaluator(None, load_split(data_dir, "test"), Devices(devices), max_steps=1, batch_size=16)
result = evaluator(())
save_predictions(
    out, Predictions(result.puzzle_identifiers, result.inputs, result.predictions[-1], result.q_halt_logits[-1])
)
