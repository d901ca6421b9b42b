"""References for the optimizers: those of PyTorch if they exist, otherwise the paper's algorithm in PyTorch."""

import contextlib
import math
from typing import Any
from unittest import mock

import torch

HIDDEN = ("layers.0.self_attn.qkv_proj.weight", "layers.0.mlp.down_proj.weight")
SHAPES = {
    "model.inner.embed_tokens.embedding_weight": (6, 8),
    "model.inner.lm_head.weight": (6, 8),
    "model.inner.q_head.weight": (2, 8),
    "model.inner.q_head.bias": (2,),
    "model.inner.L_level.layers.0.self_attn.qkv_proj.weight": (24, 8),  # taller than wide, and the other way round
    "model.inner.L_level.layers.0.mlp.down_proj.weight": (8, 16),
}
"""Parameters with names and shapes as in TRM."""


def rate(step, peak, config, total_steps):
    """Returns the published schedule at step `step`, counted from 1, in float64."""
    if step < config.warmup_steps:
        return peak * step / config.warmup_steps
    progress = (step - config.warmup_steps) / (total_steps - config.warmup_steps)
    return peak * (config.lr_min_ratio + (1 - config.lr_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


class Lion:
    """arXiv 2302.06675, algorithm 2: the sign of an interpolation of momentum and gradient, then the momentum."""

    def __init__(self, params, config):
        self.params = params
        self.config = config
        self.momentum = [torch.zeros_like(p) for p in params]

    def step(self, lr):
        b1 = self.config.beta1
        b2 = self.config.beta2
        decay = self.config.weight_decay
        for p, m in zip(self.params, self.momentum, strict=True):
            direction = torch.sign(b1 * m + (1 - b1) * p.grad)
            p -= lr * (direction + decay * p)
            m.copy_(b2 * m + (1 - b2) * p.grad)


class AdamATan2:
    """arXiv 2407.05872: theta -= lr * a * atan2(m_hat, b * sqrt(v_hat)) with a = b = 1, and decoupled decay."""

    def __init__(self, params, config):
        self.params = params
        self.config = config
        self.count = 0
        self.mean = [torch.zeros_like(p) for p in params]
        self.square = [torch.zeros_like(p) for p in params]

    def step(self, lr):
        b1 = self.config.beta1
        b2 = self.config.beta2
        self.count += 1
        for p, m, v in zip(self.params, self.mean, self.square, strict=True):
            m.mul_(b1).add_((1 - b1) * p.grad)
            v.mul_(b2).add_((1 - b2) * p.grad**2)
            p.mul_(1 - lr * self.config.weight_decay)
            p.sub_(lr * torch.atan2(m / (1 - b1**self.count), torch.sqrt(v / (1 - b2**self.count))))


class TorchOptimizers:
    """PyTorch's optimizers with one learning rate."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def step(self, lr):
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()


def adamw(params, config):
    return torch.optim.AdamW(params, betas=(config.beta1, config.beta2), eps=1e-8, weight_decay=config.weight_decay)


def muon(params, config):
    options = {"momentum": config.muon_momentum, "weight_decay": config.weight_decay}
    return torch.optim.Muon(params, **options, adjust_lr_fn="match_rms_adamw")


def counterpart(config, params):
    """Returns an object with `step(lr)` that reads the `.grad` of `params`, tensors by name."""
    every = list(params.values())
    match config.optimizer:
        case "adamw":
            return TorchOptimizers(adamw(every, config))
        case "adam_atan2":
            return AdamATan2(every, config)
        case "lion":
            return Lion(every, config)
        case "muon":
            hidden = [p for name, p in params.items() if name.endswith(HIDDEN)]
            others = [p for name, p in params.items() if not name.endswith(HIDDEN)]
            return TorchOptimizers(muon(hidden, config), adamw(others, config))


@contextlib.contextmanager
def muon_in_float32():
    """Removes the rounding to bfloat16 in `torch.optim.Muon`, which is much larger than the tolerance."""
    method = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)
    dtype = mock.patch.object(torch, "bfloat16", torch.float32)  # PyTorch 2.15 calls `Tensor.to`
    with method, dtype:
        yield


@torch.no_grad()
def trajectory(config, start, gradients, *, peak, total_steps):
    """Returns the parameters after each step as NumPy arrays; `gradients` has one dict per step, like `start`."""
    params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in start.items()}
    optimizer: Any = counterpart(config, params)
    for number, step in enumerate(gradients, 1):
        for name, p in params.items():
            p.grad = torch.tensor(step[name])
        if config.clip_norm:
            torch.nn.utils.clip_grad_norm_(list(params.values()), config.clip_norm)
        with muon_in_float32():
            optimizer.step(rate(number, peak, config, total_steps))
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


@torch.no_grad()
def sparse_sign_sgd(table, ids, gradients, lr, weight_decay):
    """The published rule for the puzzle table, row by row: sum, sign, and decay of the rows that occur."""
    table = torch.tensor(table)
    for row in sorted(set(ids.tolist())):
        total = torch.tensor(gradients[ids == row]).sum(0)
        table[row] = table[row] * (1 - lr * weight_decay) - lr * torch.sign(total)
    return table.numpy()
