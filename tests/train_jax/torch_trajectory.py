"""Run in a process of its own: a plain training loop in PyTorch, as its users train this model; nothing of JAX.

python torch_trajectory.py JOBS.json

A job has `config` (a `RunConfig` as JSON, whose seed is that of the batches), `start` (a state dict as NumPy arrays),
`seed` (of exploration), `snapshots` (after which steps to keep everything), `out`, and perhaps `draws`: what
`rand_like` and `randint_like` are to give at each step. Without it PyTorch draws by itself.
"""

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch_optimizers

from models_torch.registry import build
from train_jax.run.config import from_json, sized_for
from train_jax.tasks.puzzles.mixture import load_mixture


def trained(config, start, draws, snapshots):
    """Every metric of every step, and parameters, average and puzzle table after the steps in `snapshots`."""
    data = load_mixture(config.data_dir, "train")
    module = model(config, data.metadata, start)
    params, optim = dict(module.named_parameters()), config.optim
    ema = {name: p.detach().clone() for name, p in params.items()}
    optimizer = torch_optimizers.counterpart(optim, params)
    table, carry, found = module.model.inner.puzzle_emb, None, {}

    def rate(peak):
        return torch_optimizers.rate(step + 1, peak, optim, config.steps)

    for step in range(config.steps):
        arrays = data.train_batch(seed=config.seed, step=step, batch_size=config.global_batch_size)
        batch = {name: torch.tensor(array) for name, array in arrays.items()}
        if carry is None:
            carry = module.initial_carry(batch)
        with drawing(draws, step):
            carry, loss, metrics, *_ = module(carry=carry, batch=batch)
        (loss / config.global_batch_size).backward()
        with torch.no_grad():
            optimizer.step(rate(optim.lr))
            rows = table.local_ids.numpy(), table.local_weights.grad.numpy()
            moved = torch_optimizers.sparse_sign_sgd(
                table.weights.numpy(), *rows, rate(optim.puzzle_lr), optim.puzzle_weight_decay
            )
            table.weights.copy_(torch.tensor(moved))
            for name, p in params.items():
                ema[name].mul_(optim.ema_decay).add_(p, alpha=1 - optim.ema_decay)
        for leaf in (*params.values(), table.local_weights):
            leaf.grad = None
        for name, value in (metrics | {"loss": loss}).items():
            found.setdefault(name, []).append(value.item())
        if step + 1 in snapshots:
            for kind, tensors in (("params", params), ("ema", ema), ("table", {"weights": table.weights})):
                found |= {f"{step + 1}/{kind}/{n}": t.detach().numpy().copy() for n, t in tensors.items()}
    return found


def model(config, metadata, start):
    module = build(config.model, sized_for(config, metadata, config.global_batch_size)).train()
    if config.arch.forward_dtype == "float64":
        module.double()
    module.load_state_dict({name: torch.tensor(array) for name, array in start.items()}, strict=True)
    return module


@contextlib.contextmanager
def drawing(draws, step):
    """`rand_like` and `randint_like` give what is written down for this step, each of them once."""
    if draws is None:
        yield
        return
    given = {name: [torch.tensor(draws[name][step])] for name in ("rand_like", "randint_like")}
    with contextlib.ExitStack() as patches:
        for name, values in given.items():

            def draw(like, values=values, **_):
                return values.pop().to(like.dtype)

            patches.enter_context(mock.patch.object(torch, name, draw))
        yield
    assert not any(given.values()), "the model drew less than was written down"


def main(jobs):
    torch.set_num_threads(1)
    for job in jobs:
        config = from_json(Path(job["config"]).read_text())
        torch.manual_seed(job["seed"])
        draws = dict(np.load(job["draws"])) if job.get("draws") else None
        np.savez(job["out"], **trained(config, np.load(job["start"]), draws, job["snapshots"]))
    assert not {"jax", "torchax", "bridge"} & set(sys.modules), "this was to be PyTorch alone"


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
