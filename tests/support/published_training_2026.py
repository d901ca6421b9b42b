"""A script: trains the published language model of 2026, and gives its gradients to the optimizer of the presets too.

Two free trainings part within some steps: before the first one, the gradients of resid_lambdas, x0_lambdas and
backout_lambda are zero up to rounding, because a norm follows, and AdamW makes whole steps of the rounding errors.

NANOCHAT_DIR=/path/to/nanochat python -m support.published_training_2026 STEPS
"""

import dataclasses
import math
import sys

import jax
import numpy as np
import optax
import torch

from models_torch.gpt_2026 import GPT2026, GPT2026Config
from support.published_gpt import published_gpt
from tests.references import nanochat_optimizers as reference
from tests.references.torch_optimizers import muon_in_float32
from train_jax.core.optim.chain import dense_optimizer
from train_jax.language.presets import optimizer_2026, scaling_parameters

SIZES = {"vocab_size": 61, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32}
ROWS = 4
SEQ = 140
WARMUP = 3
MOMENTUM_WARMUP = 5
ARCH = GPT2026Config(seq_len=SEQ, forward_dtype="float32", **SIZES)


def batches(steps):
    """Tokens of unequal frequency. Of gradients of lower rank, Muon would orthogonalize the rounding errors as well."""
    rng = np.random.default_rng(0)
    frequencies = 1 / np.arange(1, 62)
    for _ in range(steps):
        tokens = torch.tensor(rng.choice(61, size=(ROWS, SEQ + 1), p=frequencies / frequencies.sum()))
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def published_steps(weights, steps, reference_parameters):
    """Yields the gradients of each step and the parameters after it."""
    gpt = published_gpt()
    module = gpt.GPT(gpt.GPTConfig(sequence_len=SEQ, **SIZES))
    module.load_state_dict(weights)
    counts = module.num_scaling_params()
    parameters = counts["transformer_matrices"] + counts["lm_head"]
    assert parameters == scaling_parameters(ARCH)
    scale = math.sqrt(ROWS * SEQ / 2**19)
    decay = 0.28 * scale * reference_parameters / parameters
    rates = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "scalar_lr": 0.5, "matrix_lr": 0.02}
    optimizer = module.setup_optimizer(**{name: rate * scale for name, rate in rates.items()}, weight_decay=decay)
    for step, (inputs, targets) in enumerate(batches(steps)):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * reference.warmdown(step, WARMUP, 0.65, 0.05, steps)
            if group["kind"] == "muon":
                group["momentum"] = reference.momentum(step, 0.85, MOMENTUM_WARMUP, 0.97, 0.90, 0.65, steps)
                group["weight_decay"] = decay * 0.5 * (1 + math.cos(math.pi * step / steps))
        module(inputs, targets).backward()
        gradients = {name: p.grad.numpy().copy() for name, p in module.named_parameters()}
        with muon_in_float32():
            optimizer.step()
        module.zero_grad()
        yield gradients, {name: p.detach().numpy().copy() for name, p in module.named_parameters()}


def our_optimizer(steps):
    config = optimizer_2026(ARCH, ROWS * SEQ)
    groups = (dataclasses.replace(config.groups[0], momentum_warmup_steps=MOMENTUM_WARMUP), *config.groups[1:])
    config = dataclasses.replace(config, warmup_steps=WARMUP, groups=groups, newton_schulz_dtype="float32")
    return dense_optimizer(config, steps)


if __name__ == "__main__":
    steps = int(sys.argv[1])
    torch.manual_seed(0)
    weights = GPT2026(ARCH).state_dict()
    reference_arch = dataclasses.replace(ARCH, n_layer=12, n_embd=768, n_head=6, n_kv_head=6)
    optimizer = our_optimizer(steps)
    params = {name: jax.numpy.asarray(tensor.numpy()) for name, tensor in weights.items()}
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    differences = {}
    worst = ""
    for gradients, expected in published_steps(weights, steps, scaling_parameters(reference_arch)):
        params, state = step(params, state, gradients)
        differences = {name: float(np.abs(params[name] - array).max()) for name, array in expected.items()}
        worst = max(differences, key=lambda name: differences[name])
        assert differences[worst] <= 1e-5, f"{worst} differs by {differences[worst]:.1e}"
    print(f"{steps} steps, largest difference after the last one {differences[worst]:.1e}, of {worst}")
