"""A script: runs the training step on eight virtual devices, with gradients given by the batch.

python -m support.toy_training OUT.npz CASE …

The state is saved in the shapes of the parameters, also in a case that begins with `sharded `.
"""

import dataclasses
import os
import sys

import numpy as np
import torch
from torch import nn

from models_torch.sparse_embedding import SparseEmbedding
from tests.references.torch_optimizers import SHAPES
from train_jax.core.optim.config import OptimConfig, ParameterGroup

DEVICES = 8
BATCH = 16
ROWS = 12
WIDTH = 4
STEPS = 50
BAD = 20
ALL_GOOD = "frozen"
"""The only case in which no batch with a NaN precedes step BAD."""
BASE = OptimConfig(lr=1e-2, sparse_lr=5e-3, warmup_steps=5, lr_min_ratio=0.1, weight_decay=0.3, ema_decay=0.9)
CASES = {
    "adamw": BASE,
    "adam_atan2": dataclasses.replace(BASE, optimizer="adam_atan2"),
    "lion": dataclasses.replace(BASE, optimizer="lion", lr=1e-3),
    "muon": dataclasses.replace(BASE, optimizer="muon"),
    "clipped": dataclasses.replace(BASE, clip_norm=0.5),
    "frozen": dataclasses.replace(BASE, freeze=".*"),
}
NOT_IN_PYTORCH = {
    "frozen head": dataclasses.replace(BASE, freeze=".*lm_head.*"),
    "groups": dataclasses.replace(
        BASE,
        optimizer="muon_2026",
        cautious_decay=True,
        clip_norm=0.5,
        momentum_start=0.85,
        momentum_warmup_steps=10,
        groups=(ParameterGroup(".*embed.*", optimizer="adam_atan2"), ParameterGroup(".*head.*", optimizer="lion")),
    ),
    "muon_2025": dataclasses.replace(BASE, optimizer="muon_2025", ema_decay=0.0),
    "without epsilon": dataclasses.replace(BASE, eps=0.0),
}
SHARDED = "sharded "
"""The prefix of the name of a case with sharded parameters, averages and optimizer state."""
TABLE = "puzzle_emb.weights"


@dataclasses.dataclass
class Carry:
    """A term that each row adds to the loss, and the fields of an ACT carry."""

    value: torch.Tensor
    steps: torch.Tensor
    halted: torch.Tensor


class Toy(nn.Module):
    """A loss that is linear in every parameter: its gradient is the sum over the batch of the array of that name.

    It keeps a running mean and a running maximum, as buffers.
    """

    def __init__(self, local_batch):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            *path, last = name.split(".")
            owner = self
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(0.3 * torch.randn(shape, generator=generator)))
        self.puzzle_emb = SparseEmbedding(ROWS, WIDTH, local_batch, 0.0, torch.float32)
        self.puzzle_emb.weights.copy_(0.3 * torch.randn(ROWS, WIDTH, generator=generator))
        self.average = nn.Buffer(torch.zeros(WIDTH))
        self.largest_id = nn.Buffer(torch.tensor(0, dtype=torch.int32))

    def initial_carry(self, batch):
        ids = batch["ids"]
        return Carry(torch.zeros(ids.shape), torch.zeros_like(ids), torch.ones(ids.shape, dtype=torch.bool))

    def forward(self, carry, batch, return_keys=()):
        loss = (self.puzzle_emb(batch["ids"]) * batch["rows"]).sum() + carry.value.sum()
        for name, parameter in self.named_parameters():
            loss = loss + (parameter * batch[name]).sum()
        self.average.lerp_(batch["rows"].mean(0), 0.1)
        self.largest_id.copy_(torch.maximum(self.largest_id, batch["ids"].max()))
        steps = torch.where(carry.halted, 0, carry.steps) + 1
        carry = Carry(carry.value, steps, steps >= 1 + batch["ids"] % 2)
        metrics = {"lm_loss": loss.detach(), "count": carry.halted.sum(), "drawn": torch.rand(batch["ids"].shape).sum()}
        return carry, loss, metrics


def batches():
    """Returns batches whose rows repeat within a device and across devices."""
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        scale = 10 ** -(step % 4)
        batch = {n: (scale * rng.normal(size=(BATCH, *s))).astype(np.float32) for n, s in SHAPES.items()}
        batch["ids"] = rng.integers(1, 6, size=BATCH).astype(np.int32)
        batch["rows"] = rng.normal(size=(BATCH, WIDTH)).astype(np.float32)
        yield batch


def main(out, *cases):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    import bridge
    from train_jax.core.objective import LossSums, Objective, sparse_tables
    from train_jax.core.optim.chain import dense_optimizer, matrices_alike, trainable
    from train_jax.core.sharding import Replicated, Sharded
    from train_jax.core.state import new_state
    from train_jax.core.step import StepOptions, make_train_step
    from train_jax.puzzles.metrics import halting_histogram
    from train_jax.runtime.devices import Devices
    from train_jax.runtime.placement import Placement, ShardedState

    class ToyTask:
        keeps_unreached = False

        def initial_carry(self, call, batch):
            return call(batch, method="initial_carry")[0]

        def loss(self, call, carry, batch):
            (carry, loss, metrics), buffers = call(carry=carry, batch=batch)
            return LossSums(loss, None, metrics | halting_histogram(carry, 2), carry, buffers)

    devices = Devices(DEVICES)
    fn = bridge.export(Toy(BATCH // DEVICES))
    objective = Objective(fn, ToyTask(), sparse_tables(fn))
    results = {}
    compiled = []
    note = lambda event, _, **__: compiled.append(event) if "backend_compile" in event else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(note)
    for case in cases:
        config = (CASES | NOT_IN_PYTORCH)[case.removeprefix(SHARDED)]
        if case.startswith(SHARDED):
            given = objective.params
            sharded = Sharded(given, trainable(given, config), matrices_alike(given, config), DEVICES)
            placement = ShardedState(devices, sharded)
        else:
            placement = Placement(devices, Replicated())
        sharding = placement.sharding
        options = StepOptions(total_steps=STEPS, global_batch_size=BATCH, device_count=DEVICES, sharding=sharding)
        optimizer = dense_optimizer(config, STEPS, sharding.norm)
        # copies, because the steps donate their state
        params, buffers = jax.tree.map(jnp.copy, (objective.params, objective.buffers))
        trained = trainable(params, config)
        state = new_state(params, buffers, optimizer, trainable=trained, keeps_ema=config.ema_decay > 0)
        step = devices.parallel_train_step(make_train_step(objective, optimizer, config, options), placement.axes)
        first = devices.split_batch(next(batches()))
        carry = devices.shard(devices.parallel_map(objective.initial_carry)(state.params, state.buffers, first))
        state = placement.place(state)
        key = devices.random_key(0)
        for number, batch in enumerate(batches()):
            if number == BAD and case != ALL_GOOD:
                results |= named(f"{case}/before", placement.to_checkpoint(state))
                state, carry, metrics = step(state, carry, devices.split_batch(with_nan(batch)), key)
                results |= named(f"{case}/bad", (placement.to_checkpoint(state), carry, metrics))
            state, carry, metrics = step(state, carry, devices.split_batch(batch), key)
            results |= named(f"{case}/{number}", (placement.to_checkpoint(state), carry, metrics))
            if number == 0:
                compiled.clear()
        results[f"{case}/compiled"] = np.asarray(len(compiled))
    np.savez(out, **results)


def named(prefix, tree):
    import jax

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{prefix}/{jax.tree_util.keystr(path, simple=True, separator='/')}": np.asarray(x) for path, x in leaves}


def with_nan(batch):
    """Sets one number of one example on one device to NaN."""
    batch = {name: array.copy() for name, array in batch.items()}
    batch["model.inner.q_head.bias"][11, 0] = np.nan
    return batch


if __name__ == "__main__":
    main(*sys.argv[1:])
