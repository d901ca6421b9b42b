"""Run in a process of its own: the made-up model halts early on so many virtual devices.

python halting_process.py DEVICES RUNNER BATCH_SIZE OUT.npz
"""

import os
import sys

count, runner, batch_size, out = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402
from toy_halting import HALT, STEPS, ToyObjective, evaluated  # noqa: E402

from train_jax.devices import Devices  # noqa: E402
from train_jax.step import make_halting_eval_step  # noqa: E402

objective: object = ToyObjective()
step = make_halting_eval_step(objective, STEPS, 0.0)  # pyright: ignore[reportArgumentType]
found = evaluated(step, list(range(len(HALT))), batch_size, Devices(count, runner))  # pyright: ignore[reportArgumentType]
np.savez(out, predictions=found.predictions, q_halt_logits=found.q_halt_logits, **found.metrics)
