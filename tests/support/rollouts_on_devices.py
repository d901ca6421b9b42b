"""A script: a step of reinforcement learning from one state on virtual devices; saves its answers and gradients.

python -m support.rollouts_on_devices DATA_DIR OUT_DIR DEVICES

With the variables of `support.processes` it is one of several processes, of so many devices each. Two further steps say
 what they compile.
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={sys.argv[3]}"
os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from support.presets import with_fields
from support.small_gpt import small_gpt
from train_jax.core.state import new_state
from train_jax.language.chat.problems import Arithmetic
from train_jax.run.config import with_task
from train_jax.run.presets import preset
from train_jax.runtime.devices import Devices
from train_jax.runtime.processes import join_processes
from train_jax.trainer.start import start

SIZES = {"seq_len": 48, "n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 32}
FIELDS = {
    "global_batch_size": 16, "samples": 8, "max_tokens": 8, "problems": "arithmetic,digits=1", "steps": 3, "seed": 4,
    "wandb": "disabled", "optimizer": f"{__name__}:plain", "lr": 1.0, "warmup_steps": 0,
    "weight_decay": 0.0, "decay": "linear", "lr_min_ratio": 1.0,
}  # fmt: skip


def plain(config):
    """The gradient is the step."""
    return optax.identity()


def run(data_dir, out, devices):
    config = dataclasses.replace(with_task(preset("chat-tiny"), "rollouts"), data_dir=data_dir)
    config = with_fields(config, SIZES | FIELDS)
    config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, groups=(), clip_norm=0.0))
    training = start(config, devices=devices)
    module = small_gpt(**SIZES, vocab_size=training.task.tokenizer.vocab_size)
    params = {name: value.detach().numpy() for name, value in module.named_parameters()}
    state = new_state(jax.tree.map(jnp.array, params), training.objective.buffers, training.optimizer)
    placed = training.placement.place(state)
    program = training.parallel_step()
    key = devices.random_key(0)
    compiled = []
    saved = {}
    for step in range(3):
        if step == 1:  # steps after the first one compile nothing
            jax.monitoring.register_event_duration_secs_listener(
                lambda event, _, **of: compiled.append(of["fun_name"]) if "backend_compile" in event else None
            )
        whole = training.placement.whole(placed)
        if step == 0:
            batch = training.task.batch(0, (0, 1), whole)
            saved |= {f"answers {name}": batch[name] for name in ("inputs", "targets", "reward", "log_probs")}
        parts = devices.shard(training.batches.from_step(step, whole))
        placed, _, metrics = program(placed, (), parts, key)
        if step == 0:
            after = training.placement.whole(placed).params
            saved |= {name: params[name] - np.asarray(after[name]) for name in params}
            saved["difference"] = np.max(devices.to_host(metrics)["log_prob_difference"])
    np.savez(out, **saved, compiled=np.array(compiled, str))


if __name__ == "__main__":
    join_processes()
    Arithmetic.is_right = lambda self, index, text: len(text) % 2 == 0  # an untrained model is never right
    data_dir = sys.argv[1]
    out_dir = Path(sys.argv[2])
    if jax.process_count() > 1:
        run(data_dir, out_dir / f"process {jax.process_index()}.npz", Devices())
    else:
        for devices in (1, 8):
            run(data_dir, out_dir / f"{devices}.npz", Devices(devices))
