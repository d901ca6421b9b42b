"""A script: evaluates toy models with trajectories, with refill and with early halting, on virtual devices.

python -m support.trajectories_on_devices DEVICES BATCH_SIZE OUT
"""

import os
import sys
from typing import get_args

count = int(sys.argv[1])
batch_size = int(sys.argv[2])
out = sys.argv[3]
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402

from support.halting_toy import evaluate  # noqa: E402
from support.latent_toy import evaluate_refilled, evaluate_trajectories  # noqa: E402
from train_jax.puzzles.scan import TrajectoryOptions  # noqa: E402
from train_jax.runtime.devices import Devices, Runner  # noqa: E402

IDENTIFIERS = [0, 1, 2, 3, 4, 5, 6] * 3

for runner in get_args(Runner)[:count]:  # one device needs no second one
    devices = Devices(count, runner)
    chosen = evaluate_trajectories(IDENTIFIERS, batch_size, devices, TrajectoryOptions(3, 0.8, 5, "both", seed=1))
    refilled = evaluate_refilled(IDENTIFIERS, batch_size, devices)
    stopped = evaluate_refilled(IDENTIFIERS, batch_size, devices, 0.9, TrajectoryOptions(3, 0.8, 5, seed=1))
    halted = evaluate(IDENTIFIERS[:7], count, devices, threshold=0.5)
    arrays = {f"share {name}": values for name, values in chosen.shares.items()}
    results = {"chosen": chosen.evaluation, "refilled": refilled, "stopped": stopped, "halted": halted}
    for name, evaluation in results.items():
        arrays |= {f"{name} preds": evaluation.predictions, f"{name} logits": evaluation.q_halt_logits}
        arrays |= {f"{name} {metric}": np.float64(value) for metric, value in evaluation.metrics.items()}
    np.savez(f"{out}.{runner}.npz", **arrays)  # pyright: ignore[reportArgumentType]
