"""Trains a language model of November 2025 in plain PyTorch, on the batches and from the weights of a run in JAX."""

import dataclasses

import numpy as np
import torch

import bridge
from tests.references.nanochat_optimizers import Muon2025, momentum, warmdown
from train_jax.run.model import build_module


@dataclasses.dataclass(frozen=True)
class Rates:
    """Peaks of the learning rates, and the share of the steps in which they fall to 0."""

    blocks: float
    wte: float
    lm_head: float
    decay_share: float = 0.2


def train(training, rates, steps):
    """Returns the trained module and the loss of every step; AdamW for embedding and head, Muon for the blocks."""
    model = initial_module(training)
    muon = Muon2025(torch.float32)
    adamw = torch.optim.AdamW(
        [
            {"params": [model.get_parameter("transformer.wte.weight")], "lr": rates.wte},
            {"params": [model.get_parameter("lm_head.weight")], "lr": rates.lm_head},
        ],
        betas=(0.8, 0.95),
        eps=1e-10,
        weight_decay=0.0,
    )
    peaks = [group["lr"] for group in adamw.param_groups]
    losses = []
    for step in range(steps):
        model.zero_grad()
        loss = model(*on_host(training.task.batch(step, (0, 1))))
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rate = warmdown(step, 0, rates.decay_share, 0.0, steps)
        now = momentum(step, 0.85, 300, 0.95, 0.95, rates.decay_share, steps)
        for group, peak in zip(adamw.param_groups, peaks, strict=True):
            group["lr"] = peak * rate
        adamw.step()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if ".h." in name:
                    muon.step(name, p, rates.blocks * rate, now)
    return model, np.array(losses)


def initial_module(training):
    """Returns the module with the weights that the run in JAX starts from."""
    fn = training.objective.fn
    model = build_module(training.config, training.task, training.config.global_batch_size)
    model.load_state_dict(bridge.state_dict(fn, fn.params, fn.buffers), strict=True)
    return model


def on_host(batch):
    """Inputs and targets as PyTorch tensors."""
    return tuple(torch.from_numpy(batch[name].astype(np.int64)) for name in ("inputs", "targets"))
