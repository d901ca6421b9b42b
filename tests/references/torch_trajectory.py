"""A script: a plain PyTorch training loop without JAX.

python -m tests.references.torch_trajectory JOBS.json

A job has `config` (a `RunConfig` as JSON, with the seed of the batches), `start` (a state dict as NumPy arrays), `seed`
(of exploration), `snapshots` (the steps after which everything is saved), `out`, and optionally `draws`, the results of
`rand_like` and `randint_like` at each step. Without `draws`, PyTorch draws random numbers.
"""

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from models_torch.registry import build, config_class
from tests.references import torch_optimizers
from train_jax.core.optim.config import from_fields
from train_jax.puzzles.batches import load_mixture


def train(config, start, draws, snapshots):
    """Trains; returns the metrics of every step, and parameters, EMA and puzzle table at the steps in `snapshots`."""
    data = load_mixture(config.data_dir, "train")
    module: Any = build_module(config, data.metadata, start)
    params = dict(module.named_parameters())
    optim = config.optim
    ema = {name: p.detach().clone() for name, p in params.items()}
    optimizer: Any = torch_optimizers.counterpart(optim, params)
    table = module.model.inner.puzzle_emb
    carry = None
    results = {}

    def rate(peak):
        return torch_optimizers.rate(step + 1, peak, optim, config.steps)

    for step in range(config.steps):
        arrays = data.train_batch(seed=config.seed, step=step, batch_size=config.global_batch_size)
        batch = {name: torch.tensor(array) for name, array in arrays.items()}
        if carry is None:
            carry = module.initial_carry(batch)
        with replayed(draws, step):
            carry, loss, metrics, *_ = module(carry=carry, batch=batch)
        (loss / config.global_batch_size).backward()
        with torch.no_grad():
            optimizer.step(rate(optim.lr))
            rows = table.local_ids.numpy(), table.local_weights.grad.numpy()
            updated = torch_optimizers.sparse_sign_sgd(
                table.weights.numpy(), *rows, rate(optim.sparse_lr), optim.sparse_weight_decay
            )
            table.weights.copy_(torch.tensor(updated))
            for name, p in params.items():
                ema[name].mul_(optim.ema_decay).add_(p, alpha=1 - optim.ema_decay)
        for leaf in (*params.values(), table.local_weights):
            leaf.grad = None
        for name, value in (metrics | {"loss": loss}).items():
            results.setdefault(name, []).append(value.item())
        if step + 1 in snapshots:
            for kind, tensors in (("params", params), ("ema", ema), ("table", {"weights": table.weights})):
                results |= {f"{step + 1}/{kind}/{n}": t.detach().numpy().copy() for n, t in tensors.items()}
    return results


def build_module(config, metadata, start):
    sizes = {name: getattr(metadata, name) for name in ("seq_len", "vocab_size", "num_puzzle_identifiers")}
    arch = dataclasses.replace(config.arch, batch_size=config.global_batch_size, **sizes)
    module = build(config.model, arch).train()
    if config.arch.forward_dtype == "float64":
        module.double()
    module.load_state_dict({name: torch.tensor(array) for name, array in start.items()}, strict=True)
    return module


@contextlib.contextmanager
def replayed(draws, step):
    """Patches `rand_like` and `randint_like` to return the values recorded for this step, each value once."""
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
    assert not any(given.values()), "the model drew fewer numbers than were recorded"


def read_config(path):
    """Reads the fields of a `RunConfig` from JSON, because its module imports JAX."""
    fields = json.loads(Path(path).read_text())
    arch = config_class(fields["model"])(**fields["arch"])
    optim = from_fields(fields["optim"])
    return SimpleNamespace(**(fields | {"arch": arch, "optim": optim}))


def main(jobs):
    torch.set_num_threads(1)
    for job in jobs:
        config = read_config(job["config"])
        torch.manual_seed(job["seed"])
        draws = dict(np.load(job["draws"])) if job.get("draws") else None
        np.savez(job["out"], **train(config, np.load(job["start"]), draws, job["snapshots"]))
    assert not {"jax", "torchax", "bridge"} & set(sys.modules), "this process must run PyTorch alone"


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
