"""Run in a process of its own: the made-up model halts early on so many virtual devices.

python halting_process.py DEVICES BATCH_SIZE OUT
"""

import os
import sys
from typing import Any, get_args

count, batch_size, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402
from toy_halting import HALT, STEPS, ToyObjective, evaluated  # noqa: E402

from train_jax.core.step import make_halting_eval_step  # noqa: E402
from train_jax.runtime.devices import Devices, Runner  # noqa: E402

objective: Any = ToyObjective()
step = make_halting_eval_step(objective, STEPS, 0.0)
for runner in get_args(Runner):
    found = evaluated(step, list(range(len(HALT))), batch_size, Devices(count, runner))
    arrays = {"predictions": found.predictions, "q_halt_logits": found.q_halt_logits}
    np.savez(f"{out}.{runner}.npz", **arrays, **found.metrics)  # pyright: ignore[reportArgumentType]
