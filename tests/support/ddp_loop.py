"""PyTorch's DistributedDataParallel on the batches of a script: ddp_loop.py SCRIPT STEPS BATCH RANKS RANK PORT OUT."""

import dataclasses
import os
import sys

import torch
import torch.distributed as dist

import train_jax  # noqa: F401 (its plugins)
from train_jax.plugin import use_file
from train_jax.script.presets import run_of
from train_jax.script.task import ScriptTask

path, steps, batch_size, ranks, rank, port, out = sys.argv[1:]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
torch.set_num_threads(1)
dist.init_process_group("gloo", rank=int(rank), world_size=int(ranks))
use_file(path)
config = dataclasses.replace(run_of(os.path.basename(path).removesuffix(".py")), global_batch_size=int(batch_size))
task = ScriptTask(config)
torch.manual_seed(config.seed)
model = task.script.model()
several = isinstance(model, (dict, torch.nn.ModuleDict))
models = dict(model.items()) if several else {"": model}
optimizer = task.script.optimizer(model)
schedule = None if task.script.schedule is None else task.script.schedule(optimizer)
trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
parallels = {
    name: torch.nn.parallel.DistributedDataParallel(each) if any(id(p) in trained for p in each.parameters()) else each
    for name, each in models.items()
}
parallel = parallels if several else parallels[""]
for step in range(int(steps)):
    batch = task.train_data.batch(step, int(batch_size), (int(rank), int(ranks)), config.seed)
    optimizer.zero_grad()
    loss = task.script.loss(parallel, batch)
    (loss[0] if isinstance(loss, tuple) else loss).backward()
    optimizer.step()
    if schedule is not None:
        schedule.step()
if rank == "0":
    named = {f"{prefix}.{name}".strip("."): p for prefix, each in models.items() for name, p in each.named_parameters()}
    torch.save(named, out)
dist.destroy_process_group()
