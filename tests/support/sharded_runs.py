"""A script: trains the toy language model with the optimizer replicated or sharded, whole or stopped and continued.

python -m support.sharded_runs DATA_DIR OUT_DIR NAME …

Writes OUT_DIR/NAME.npz with the last state of each named run of `RUNS`.
"""

import os
import sys

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

from support.presets import with_fields
from support.stopped_run import save_last_state, stop_at
from support.toy_language import toy_run
from train_jax.core.optim.config import ParameterGroup
from train_jax.runtime.devices import Devices
from train_jax.trainer.loop import train

STEPS = 5
FIELDS = {
    "model": "support.toy_language:DeepTokenModel", "optimizer": "muon_2026", "lr": 1e-2, "warmup_steps": 5,
    "weight_decay": 0.1, "ema_decay": 0.9, "clip_norm": 0.5, "steps": 20, "global_batch_size": 16,
    "groups": (ParameterGroup("model.(embed|head).*", optimizer="adamw", lr=3e-3),),
    "eval_batch_size": 16, "eval_every_steps": 5, "checkpoint_every_steps": 5, "log_every_steps": 5,
}  # fmt: skip
REPLICATED = {"shard_optimizer": False}
SHARDED = {"shard_optimizer": True}
IN_PARTS = SHARDED | {"runner": "shard_map", "accumulation_steps": 2, "steps_per_dispatch": 5}
RUNS = {
    "replicated": [(8, REPLICATED)],
    "continued on others": [(8, IN_PARTS), (1, REPLICATED), (4, SHARDED)],
}
"""Devices and fields of each part of a run; a part but the last is stopped after five steps."""


def main(data_dir, folder, *names):
    for name in names:
        parts = RUNS[name]
        whole = toy_run(data_dir, run_dir=f"{folder}/{name}", **FIELDS)
        for number, (devices, fields) in enumerate(parts, 1):
            config = with_fields(whole, fields)
            on = Devices(devices, config.compute.runner)
            if number < len(parts):
                stop_at(STEPS * number, config, on)
        save_last_state(config, train(config, on), f"{folder}/{name}.npz")


if __name__ == "__main__":
    main(*sys.argv[1:])
