"""Run in a process of its own: evaluates a made-up model on so many virtual devices and saves its predictions.

python evaluation_process.py DEVICES DATA_DIR OUT.npz
"""

import os
import sys

devices, data_dir, out = int(sys.argv[1]), *sys.argv[2:]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from train_jax.core.step import AXIS  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402
from train_jax.tasks.puzzles.evaluation import evaluate  # noqa: E402
from train_jax.tasks.puzzles.format import load_split  # noqa: E402
from train_jax.tasks.puzzles.predictions import Predictions, save_predictions  # noqa: E402


def eval_step(learner, batch):
    """Right for two identifiers of three, otherwise a cell off; sure of itself to a degree of its own."""
    identifiers = batch["puzzle_identifiers"]
    answer = jnp.maximum(batch["labels"], 0)
    answer = answer.at[:, 0].set(jnp.where(identifiers % 3 == 0, 2 + identifiers % 7, answer[:, 0]))
    metrics = {"count": (batch["labels"] >= 0).any(axis=1).sum(), "lm_loss": jnp.zeros(())}
    return jax.lax.psum(metrics, AXIS), {"preds": answer[None], "q_halt_logits": jnp.sin(identifiers * 1.7)[None]}


placed = Devices(devices)
found = evaluate(placed.evaluate(eval_step), (), load_split(data_dir, "test"), placed, batch_size=16)
save_predictions(
    out, Predictions(found.puzzle_identifiers, found.inputs, found.predictions[-1], found.q_halt_logits[-1])
)
