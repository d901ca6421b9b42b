"""Prints what is installed and which releases are tested, and runs `verify` on small modules for a minute at most."""

from __future__ import annotations

import importlib.metadata
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import torch
from torch import nn

from bridge._compat.torchax import installed, is_tested, tested_releases
from bridge.errors import BridgeError, BridgeWarning
from bridge.parity import Environment, verify

DISTRIBUTION = "trm-bridge"
SECONDS = 60
"""The self-test begins no further check after this processor time."""


class Module(nn.Module):
    """A function of the module and its input, with the parts that it uses."""

    def __init__(self, function: Callable[..., Any], **parts: Any):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


class Scaled(torch.autograd.Function):
    """A backward that is not the derivative, so that a lost one is seen."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


taken_early = Scaled.apply
"""As code takes it from the class, long before a call."""


def half_without_gradient(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        start = m.layer(x)
    return m.layer(start + x)


def written_in_place(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.layer(x).clone()
    y[:, 1:3] *= 2
    y.t()[0].add_(x[:, 0])
    return y


def counted(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.count += 1
    return m.norm(x) * m.count


def gradient_inside(m: Any, x: torch.Tensor) -> torch.Tensor:
    energy = m.layer(x).tanh().sum()
    return torch.autograd.grad(energy, m.layer.weight, create_graph=True)[0] * 2


def attention(m: Any, x: torch.Tensor) -> torch.Tensor:
    q = m.layer(x).view(2, 2, 2, 4)
    return nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)


CHECKS: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "gradient mode": lambda: (Module(half_without_gradient, layer=nn.Linear(4, 4)), torch.randn(4, 4)),
    "writes in place, views": lambda: (Module(written_in_place, layer=nn.Linear(4, 4)), torch.randn(4, 4)),
    "buffers": lambda: (Module(counted, norm=nn.BatchNorm1d(4), count=nn.Buffer(torch.zeros(()))), torch.randn(6, 4)),
    "custom functions": lambda: (
        Module(lambda m, x: taken_early(m.layer(x)) + Scaled.apply(x), layer=nn.Linear(4, 4)),
        torch.randn(4, 4),
    ),
    "gradients inside": lambda: (Module(gradient_inside, layer=nn.Linear(4, 4)), torch.randn(4, 4)),
    "random numbers": lambda: (Module(lambda m, x: m.drop(x), drop=nn.Dropout(0.5)), torch.randn(8, 8)),
    "attention": lambda: (Module(attention, layer=nn.Linear(16, 16)), torch.randn(2, 16)),
    "convolution": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.MaxPool2d(2)), torch.randn(1, 2, 8, 8)),
    "recurrence": lambda: (nn.GRU(4, 4), torch.randn(3, 2, 4)),
    "indices": lambda: (
        Module(lambda m, x: m.table(x)[x.argsort(-1)].cumsum(0), table=nn.Embedding(9, 4)),
        torch.tensor([1, 5, 5]),
    ),
}
"""Name -> a module and its input."""


def self_test(seconds: float = SECONDS) -> Iterator[tuple[str, str]]:
    """Yields the names of the checks, each with "" or what is wrong; not those that there is no time for."""
    end = time.process_time() + seconds
    for name, make in CHECKS.items():
        if time.process_time() > end:
            return
        torch.manual_seed(0)
        module, x = make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BridgeWarning)
            try:
                report = verify(module, x)
            except BridgeError as error:
                yield name, " ".join(str(error).split())
                continue
        yield name, "" if report.ok else str(report.worst)


def other_owners(package: str = "bridge") -> list[str]:
    """Returns the other distributions that install a top-level package of this name."""
    owners = importlib.metadata.packages_distributions().get(package, [])
    return sorted(set(owners) - {DISTRIBUTION})


def doctor() -> int:
    """Prints the page of `python -m bridge doctor`; returns 1 if a check fails."""
    try:
        version = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        version = "not installed, imported from a folder"
    print(f"{DISTRIBUTION} {version} in {Path(__file__).parent}")
    for name, found in installed().items():
        note = "" if is_tested(name, found) else "   untested"
        print(f"{name:<10} {found:<22} tested: {tested_releases(name)}{note}")
    print(Environment.here().device, f"x {jax.device_count()}, {jax.default_backend()}")
    for other in other_owners():
        print(
            f"warning: the distribution {other} installs a package `bridge`, too, and the one that was installed last "
            f"has replaced files of the other; install {DISTRIBUTION} in an environment of its own, or with "
            "`pip install --target FOLDER`, and put FOLDER first in PYTHONPATH where it is used"
        )
    verdicts = []
    for name, wrong in self_test():
        print(f"{'wrong' if wrong else 'ok':<6} {name}{f': {wrong}' if wrong else ''}", flush=True)
        verdicts.append(not wrong)
    left_out = len(CHECKS) - len(verdicts)
    late = f", {left_out} left out after {SECONDS} s" if left_out else ""
    print(f"self-test: {sum(verdicts)} of {len(CHECKS)} ok{late}, compared with PyTorch {torch.__version__}")
    return 0 if all(verdicts) else 1
