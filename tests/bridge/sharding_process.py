"""Run in a process of its own: 20 steps of a GPT on 2 x 4 virtual devices beside one device, in float32.

python sharding_process.py OUT.json

OUT has the largest difference of a loss, by layout. docs/jax.md does the same with a Llama.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

import jax
import optax
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from torch import nn

import bridge
from models_torch.gpt import GPT, GPTConfig

STEPS = 20
VOCABULARY = 64
MESH = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
WIDER = r".*\.c_(q|k|v|fc)\.weight|.*(wte|lm_head)\.weight"
NARROWER = r".*\.c_proj\.weight"
LAYOUTS = {
    "tensor parallel": ({WIDER: P("model"), NARROWER: P(None, "model")}, P("data")),
    "FSDP": ({r".*": P(("data", "model"))}, P(("data", "model"))),
    "both": ({WIDER: P("model", "data"), NARROWER: P("data", "model")}, P("data")),
}
"""Patterns of the parameters, and the sharding of a batch."""


def exported() -> bridge.Functional:
    sizes = {"n_layer": 2, "n_head": 4, "n_kv_head": 4, "n_embd": 32}
    module = GPT(GPTConfig(seq_len=12, vocab_size=VOCABULARY, forward_dtype="float32", **sizes))
    for parameter in module.parameters():  # some are zeros at first
        nn.init.normal_(parameter, std=0.05)
    return bridge.export(module)


def losses(fn: bridge.Functional, patterns: Any, batch: Any) -> list[float]:
    """Returns the losses of the steps; without patterns, on one device."""
    optimizer = optax.adam(1e-2)

    def step(params, opt_state, ids):
        loss, gradients = jax.value_and_grad(lambda p: fn(p, fn.buffers, ids[:, :-1], ids[:, 1:])[0])(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    state = (fn.params, optimizer.init(fn.params))
    out_shardings = None
    if patterns is not None:
        where = bridge.shardings(state, MESH, patterns)
        state = jax.device_put(state, where)
        out_shardings = (*where, NamedSharding(MESH, P()))
    step = jax.jit(step, out_shardings=out_shardings)
    values = []
    for i in range(STEPS):
        ids = jax.random.randint(jax.random.key(i), (8, 13), 0, VOCABULARY)
        ids = ids if patterns is None else jax.device_put(ids, NamedSharding(MESH, batch))
        *state, loss = step(*state, ids)
        values.append(float(loss))
    split = [array for array in state[0].values() if not array.is_fully_replicated]
    assert bool(split) == (patterns is not None)
    return values


def differences() -> dict[str, float]:
    torch.manual_seed(0)
    fn = exported()
    alone = losses(fn, None, None)
    return {
        name: max(abs(a - b) for a, b in zip(alone, losses(fn, *layout), strict=True))
        for name, layout in LAYOUTS.items()
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(differences()))
