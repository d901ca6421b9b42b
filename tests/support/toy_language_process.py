"""A script: trains the toy language model on virtual devices, uninterrupted or stopped and continued.

python -m support.toy_language_process DATA_DIR DEVICES RUN_DIR OUT.npz [STOPS_AT] [-- DEVICES RUN_DIR OUT.npz …]

Several runs share one process, which saves the time of the imports.
"""

import itertools
import os
import sys

data_dir, *words = sys.argv[1:]
most = max(int(devices) for before, devices in itertools.pairwise(words) if before == "--")
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={most}"
os.environ["JAX_PLATFORMS"] = "cpu"

from models_torch.outside import OutsideConfig  # noqa: E402
from support.stopped_run import runs_of, train_and_save  # noqa: E402
from support.toy_language import ToyConfig  # noqa: E402
from train_jax.optim.config import OptimConfig  # noqa: E402
from train_jax.run.config import RunConfig  # noqa: E402

CONFIG = RunConfig(
    data_dir=data_dir,
    run_dir="",
    task="support.toy_language:ToyLanguage",
    task_config=ToyConfig(),
    model="support.toy_language:TokenModel",
    arch=OutsideConfig(forward_dtype="float32"),
    optim=OptimConfig(lr=1e-2, warmup_steps=5, weight_decay=0.0, ema_decay=0.0),
    steps=20,
    global_batch_size=16,
    eval_batch_size=16,
    eval_every_steps=5,
    checkpoint_every_steps=5,
    log_every_steps=5,
    wandb="disabled",
)

for devices, *run in runs_of(words):
    train_and_save(CONFIG, devices, *run)
