"""A script: trains a small language model on virtual devices, uninterrupted or stopped and continued.

python -m support.language_process DATA_DIR -- DEVICES RUN_DIR OUT.npz [STOPS_AT] [-- DEVICES RUN_DIR OUT.npz …]
"""

import itertools
import os
import sys

data_dir, *words = sys.argv[1:]
most = max(int(devices) for before, devices in itertools.pairwise(words) if before == "--")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={most}"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses  # noqa: E402

from support.presets import with_fields  # noqa: E402
from support.stopped_run import runs_of, train_and_save  # noqa: E402
from train_jax.run.presets import preset  # noqa: E402

CONFIG = with_fields(
    dataclasses.replace(preset("chat-tiny"), data_dir=data_dir),
    {
        "seq_len": 24, "n_layer": 2, "n_head": 2, "n_kv_head": 1, "n_embd": 32, "steps": 20, "global_batch_size": 16,
        "eval_batch_size": 16, "eval_examples": 0, "eval_every_steps": 10, "sample_every_steps": 10,
        "checkpoint_every_steps": 5, "log_every_steps": 5, "wandb": "disabled",
    },
)  # fmt: skip

for devices, *run in runs_of(words):
    train_and_save(CONFIG, devices, *run)
