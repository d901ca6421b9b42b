"""References for the optimizers and schedules of nanochat, in plain PyTorch, one parameter after the other."""

import math
from typing import Any

import torch

SHAPES = {
    "transformer.wte.weight": (20, 8),
    "transformer.h.0.attn.c_q.weight": (8, 8),
    "transformer.h.0.mlp.c_fc.weight": (32, 8),
    "transformer.h.0.mlp.c_proj.weight": (8, 32),
    "lm_head.weight": (20, 8),
}
MATRICES = [name for name in SHAPES if ".h." in name]


def warmdown(step, warmup, share, floor, steps):
    """Returns the learning rate of step 0, 1, … as a share of its peak."""
    length = round(share * steps)
    if step < warmup:
        return (step + 1) / warmup
    return 1.0 if step <= steps - length else floor + (1 - floor) * (steps - step) / length


def momentum(step, start, warmup, peak, end, share, steps):
    length = round(share * steps)
    if step < warmup:
        return start + (peak - start) * step / warmup
    return peak if step < steps - length else peak + (end - peak) * (step - steps + length) / length


class Muon2025:
    """A running mean of gradients, Nesterov, Newton-Schulz; the learning rate grows with the root of rows / columns."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.mean = {}

    def step(self, name, p, lr, momentum):
        mean = self.mean.setdefault(name, torch.zeros_like(p))
        mean += (1 - momentum) * (p.grad - mean)
        x = (p.grad + momentum * (mean - p.grad)).to(self.dtype)
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            x = quintic(x, 3.4445, -4.7750, 2.0315)
        p -= lr * math.sqrt(max(1, p.shape[0] / p.shape[1])) * x


def quintic(x, a, b, c):
    """a x + b x x' x + c (x x')² x, by the smaller product."""
    if x.shape[0] > x.shape[1]:
        return quintic(x.T, a, b, c).T
    gram = x @ x.T
    return a * x + (b * gram + c * gram @ gram) @ x


POLAR = """
8.156554524902461  -22.48329292557795  15.878769915207462
4.042929935166739  -2.808917465908714  0.5000178451051316
3.8916678022926607 -2.772484153217685  0.5060648178503393
3.285753657755655  -2.3681294933425376 0.46449024233003106
2.3465413258596377 -1.7097828382687081 0.42323551169305323
"""


class Muon2026:
    """Muon2025 with rows of equal norm before, a fixed norm after, NorMuon and cautious decay."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.mean = {}
        self.square = {}

    def step(self, name, p, lr, momentum, weight_decay):
        mean = self.mean.setdefault(name, torch.zeros_like(p))
        mean += (1 - momentum) * (p.grad - mean)
        x = (p.grad + momentum * (mean - p.grad)).to(self.dtype)
        rows, columns = x.shape
        norms = x.float().norm(dim=1, keepdim=True)
        x = x * (x.float().norm() / math.sqrt(rows) / norms).to(self.dtype)
        x = x / (1.01 * x.norm() + 1e-6)
        for line in POLAR.split("\n")[1:-1]:
            x = quintic(x, *map(float, line.split()))
        x = x.to(p.dtype)
        x = x * math.sqrt(min(rows, columns)) / x.norm()
        squares = (x**2).mean(1 if rows >= columns else 0, keepdim=True)
        running = self.square.setdefault(name, torch.zeros_like(squares))
        running += 0.1 * (squares - running)
        y = x / running.clamp_min(1e-10).sqrt()
        y = y * x.norm() / y.norm()
        lr = lr * math.sqrt(max(1, rows / columns))
        p -= lr * (y + weight_decay * p * (y * p >= 0))


@torch.no_grad()
def trajectory(version, start, gradients, *, dtype=torch.float32):
    """Yields the parameters after each step with the published settings; `dtype` is that of Newton-Schulz."""
    steps = len(gradients)
    params = {name: torch.nn.Parameter(torch.tensor(array)) for name, array in start.items()}
    muon: Any = (Muon2025 if version == 2025 else Muon2026)(dtype)
    adamw = torch.optim.AdamW([{"params": [params[name]], **fields} for name, fields in ADAMW[version].items()])
    peaks = [group["lr"] for group in adamw.param_groups]
    for step, gradient in enumerate(gradients):
        for name, p in params.items():
            p.grad = torch.tensor(gradient[name])
        if version == 2025:
            torch.nn.utils.clip_grad_norm_(list(params.values()), 1.0)
            rate = warmdown(step, 0, 0.2, 0.0, steps)
            now = momentum(step, 0.85, 30, 0.95, 0.95, 0.2, steps)
        else:
            rate = warmdown(step, 10, 0.65, 0.05, steps)
            now = momentum(step, 0.85, 15, 0.97, 0.90, 0.65, steps)
        for group, peak in zip(adamw.param_groups, peaks, strict=True):
            group["lr"] = peak * rate
        adamw.step()
        for name in MATRICES:
            if version == 2025:
                muon.step(name, params[name], 0.02 * rate, now)
            else:
                decay = 0.28 * 0.5 * (1 + math.cos(math.pi * step / steps))
                muon.step(name, params[name], 0.02 * rate, now, decay)
        yield {name: p.detach().numpy().copy() for name, p in params.items()}


ADAMW = {
    2025: {
        "transformer.wte.weight": {"lr": 0.2, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0},
        "lm_head.weight": {"lr": 0.004, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0},
    },
    2026: {
        "transformer.wte.weight": {"lr": 0.3, "betas": (0.8, 0.995), "eps": 1e-10, "weight_decay": 0.001},
        "lm_head.weight": {"lr": 0.008, "betas": (0.8, 0.96), "eps": 1e-10, "weight_decay": 0.01},
    },
}
