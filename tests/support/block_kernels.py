"""Helpers of the tests of the Pallas kernels: derivatives of a function, and a model whose blocks have kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import bridge
from models_torch.blocks import ReasoningModule
from models_torch.layers import RotaryEmbedding
from models_torch.trm import TRMConfig
from train_jax.run.config import ComputeConfig
from train_jax.run.kernels import kernels


def values_and_gradients(function, dtype, given):
    """Returns the values and gradients of a function of `x` in `dtype` and two weights, in float32."""
    cotangent = np.random.default_rng(1).normal(size=given[0].shape).astype(np.float32)

    def call(x, *weights):
        out = function(x.astype(dtype), *weights).astype(jnp.float32)
        return jnp.sum(out * cotangent), out

    gradients, out = jax.jit(jax.grad(call, (0, 1, 2), has_aux=True))(*given)
    return [np.asarray(each, np.float32) for each in (out, *gradients)]


class Cycles(nn.Module):
    """Two passes through the blocks of a TRM; only the last one has gradients."""

    def __init__(self, config):
        super().__init__()
        rotary = config.pos_encodings == "rope"
        self.rope = RotaryEmbedding(config.head_dim, config.positions, 10_000.0) if rotary else None
        self.level = ReasoningModule(config, 1)

    def forward(self, x):
        cos_sin = self.rope() if self.rope else None
        with torch.no_grad():
            start = self.level(x, cos_sin)
        return self.level(x + start, cos_sin)


def cycles(**fields):
    """Returns the module, and an input for it; `fields` are those of `TRMConfig`."""
    config = TRMConfig(vocab_size=6, num_puzzle_identifiers=2, hidden_size=128, **{"num_heads": 2} | fields)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Cycles(config)
    return module, np.random.default_rng(0).normal(size=(config.batch_size, config.positions, 128)).astype(np.float32)


def exported(module, platform, recompute="", **compute):
    """Exports with the kernels of a platform, of a TPU in interpret mode; `compute` are fields of `ComputeConfig`."""
    options = kernels(ComputeConfig(**compute), platform)
    if platform == "tpu":
        options["lowerings"] = {n: functools.partial(f, interpret=True) for n, f in options["lowerings"].items()}
    return bridge.export(module, recompute=recompute, **options)


def text_and_gradients(fn, x, dtype):
    """Returns the text of a step with `x` in `dtype`, and its gradients by the parameters and `x`."""

    def loss(params, x):
        return jnp.sum(jnp.square(fn(params, fn.buffers, x.astype(dtype))[0].astype(jnp.float32)[..., :5]))

    gradients = jax.jit(jax.grad(loss, (0, 1)))(fn.params, x)
    return str(jax.make_jaxpr(jax.grad(loss))(fn.params, x)), jax.tree.leaves(gradients)
