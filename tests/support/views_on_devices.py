"""A script: evaluates the toy of views on virtual devices, with two batch sizes.

python -m support.views_on_devices DEVICES OUT
"""

import os
import sys

count = int(sys.argv[1])
out = sys.argv[2]
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses  # noqa: E402

import numpy as np  # noqa: E402

from support.view_toy import evaluate, states  # noqa: E402
from train_jax.puzzles.scan import TrajectoryOptions, stack_runs  # noqa: E402
from train_jax.runtime.devices import Devices  # noqa: E402

OPTIONS = TrajectoryOptions(6, 0.0, 4, views=3, runs=2)
arrays = {}
for batch_size in (8, 24):
    for agree in (False, True):
        options = dataclasses.replace(OPTIONS, agree=agree)
        result = evaluate(options, stack_runs(states(2)), batch_size=batch_size, threshold=0.8, devices=Devices(count))
        key = f"{batch_size} {agree}"
        arrays |= {f"{key} preds": result.predictions, f"{key} logits": result.q_halt_logits}  # pyright: ignore
        arrays |= {f"{key} {name}": np.float64(value) for name, value in result.metrics.items()}  # pyright: ignore
np.savez(out, **arrays)
