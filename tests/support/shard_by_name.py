"""A script: trains a model on 8 virtual devices, divided by names over a mesh of 2 x 4, beside one device.

python -m support.shard_by_name FOLDER

Writes FOLDER/found.json; the runs are in FOLDER/runs.
"""

import json
import os
import re
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"

import dataclasses

import jax
import numpy as np

from support.sums_of_squares import DATA_AND_LOSS
from train_jax.errors import UserError
from train_jax.plugin import use_file
from train_jax.run.config import ComputeConfig
from train_jax.run.presets import preset
from train_jax.run.restore import restore
from train_jax.runtime.devices import Devices, devices_of
from train_jax.trainer.loop import train
from train_jax.trainer.start import start

SCRIPT = f"""
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + nn.functional.dropout(self.down(self.up(self.norm(x)).tanh()), 0.1, self.training)


def model():
    return nn.Sequential(nn.Linear(6, 16, bias=False), NORM, nn.Sequential(Block(16), Block(16)), nn.Linear(16, 1))

{DATA_AND_LOSS}

def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def schedule(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 5)
"""
EXACT = SCRIPT.replace("NORM", "nn.Identity()").replace("LOSS", "error.sum(), len(x)")
MEAN = SCRIPT.replace("NORM", "nn.BatchNorm1d(16)").replace("LOSS", "error.mean()")
"""A mean, and statistics, of the examples of a replica."""
BOTH = ComputeConfig(
    shard=("2.*norm.weight=", "2.*up.weight=model,data", "2.*down.weight=data,model", "2.*up.bias=data+model"),
    model_devices=4,
)
MISFITS = ComputeConfig(shard=("2.*weight=data,model", "0.weight=data,model", "layers.*=model"), model_devices=4)
STEPS = 10


def run_of(name, folder, **fields):
    config = dataclasses.replace(preset(name), steps=STEPS, global_batch_size=16, eval_batch_size=16, **fields)
    optim = dataclasses.replace(config.optim, ema_decay=0.9)
    return dataclasses.replace(config, run_dir=str(folder), optim=optim, wandb="disabled", checkpoint_every_steps=5)


def weights_after(config, devices):
    train(config, devices)
    state = restore(config.run_dir).state
    return {name: np.asarray(array) for name, array in (state.eval_params | state.buffers).items()}


def largest_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float(np.abs(ours[name] - theirs[name]).max(initial=0)) for name in theirs)


def divided_step(config):
    """Returns the dimensions of the products of the compiled step, and whether its results stay where they were."""
    training = start(config, devices=devices_of(config.compute))
    devices = training.devices
    state = training.placement.place(training.initial_state())
    places = jax.tree.map(lambda x: x.sharding, state)
    batch = devices.shard(training.batches.at(0))
    arguments = (state, (), batch, devices.random_key(0))
    program, _ = devices.compile(training.parallel_step(), arguments)
    products = re.findall(r"= f32\[([\d,]*)\]\S* dot\(", program.as_text())
    after, _, _ = program(*arguments)
    same = jax.tree.map(lambda x, place: x.sharding.is_equivalent_to(place, x.ndim), after, places)
    return {"products": products, "stays": all(jax.tree.leaves(same)), "table": training.placement.table()}


def misfits(config):
    try:
        start(config, devices=devices_of(config.compute))
    except UserError as error:
        return str(error)
    raise AssertionError("the patterns were accepted")


def continued(config, whole):
    """Returns the weights of a run that stopped on a mesh and continues on another one, then on one device."""
    train(dataclasses.replace(config, steps=5), devices_of(config.compute))
    other = dataclasses.replace(config.compute, model_devices=2)
    return largest_difference(weights_after(dataclasses.replace(config, compute=other), devices_of(other)), whole)


def main(folder):
    folder = Path(folder)
    os.chdir(folder)
    for name, text in (("exact", EXACT), ("mean", MEAN)):
        Path(f"{name}.py").write_text(text)
        use_file(f"{name}.py")
    one = weights_after(run_of("exact", folder / "runs/one"), Devices(1))
    sharded = run_of("exact", folder / "runs/eight", compute=BOTH)
    two = weights_after(run_of("mean", folder / "runs/two"), Devices(2))
    mean = run_of("mean", folder / "runs/mean", compute=BOTH)
    found = {
        "exact": largest_difference(weights_after(sharded, devices_of(BOTH)), one),
        "mean": largest_difference(weights_after(mean, devices_of(BOTH)), two),
        "continued": continued(run_of("exact", folder / "runs/continued", compute=BOTH), one),
        "step": divided_step(sharded),
        "misfits": misfits(run_of("exact", folder / "runs/none", compute=MISFITS)),
    }
    Path("found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
