"""A script: evaluates the toy model of `support.latent_toy` with trajectories, and with refill, on virtual devices.

python -m support.trajectories_on_devices DEVICES BATCH_SIZE OUT
"""

import os
import sys
from typing import get_args

count, batch_size, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402

from support.latent_toy import evaluate_refilled, evaluate_trajectories  # noqa: E402
from train_jax.runtime.devices import Devices, Runner  # noqa: E402
from train_jax.tasks.puzzles.scan import TrajectoryOptions  # noqa: E402

IDENTIFIERS = [0, 1, 2, 3, 4, 5, 6] * 3

for runner in get_args(Runner):
    chosen = evaluate_trajectories(
        IDENTIFIERS, batch_size, Devices(count, runner), TrajectoryOptions(3, 0.8, 5, "both", seed=1)
    )
    refilled = evaluate_refilled(IDENTIFIERS, batch_size, Devices(count, runner))
    stopped = evaluate_refilled(
        IDENTIFIERS, batch_size, Devices(count, runner), 0.9, TrajectoryOptions(3, 0.8, 5, seed=1)
    )
    arrays = {f"share {name}": values for name, values in chosen.shares.items()}
    for name, evaluation in (("chosen", chosen.evaluation), ("refilled", refilled), ("stopped", stopped)):
        arrays |= {f"{name} preds": evaluation.predictions, f"{name} logits": evaluation.q_halt_logits}
        arrays |= {f"{name} {metric}": np.float64(value) for metric, value in evaluation.metrics.items()}
    np.savez(f"{out}.{runner}.npz", **arrays)  # pyright: ignore[reportArgumentType]
