"""A script: evaluates the toy model of `support.halting_toy` with early halting on virtual devices.

python -m support.halt_on_devices DEVICES BATCH_SIZE OUT
"""

import os
import sys
from typing import get_args

count, batch_size, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402

from support.halting_toy import HALT, evaluate  # noqa: E402
from train_jax.runtime.devices import Devices, Runner  # noqa: E402

for runner in get_args(Runner):
    result = evaluate(list(range(len(HALT))), batch_size, Devices(count, runner), threshold=0.5)
    arrays = {"predictions": result.predictions, "q_halt_logits": result.q_halt_logits}
    np.savez(f"{out}.{runner}.npz", **arrays, **result.metrics)  # pyright: ignore[reportArgumentType]
