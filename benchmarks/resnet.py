"""ResNet-18 in training, forward and backward: PyTorch, the bridge, and the same network written in JAX by hand.

python -m benchmarks.resnet [batch] [size of an image]

The network by hand has the weights of the PyTorch module under its names. The three losses and gradients are compared
before they are timed: medians of wall time, and the floating-point operations and convolutions of both programs of XLA.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch import nn

import bridge

REPEATS = 5
CLASSES = 10
WIDTHS = (64, 128, 256, 512)
Params = Mapping[str, jax.Array]


class Block(nn.Module):
    """Two convolutions and a shortcut, as in "Deep Residual Learning for Image Recognition", figure 5, left."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.relu(self.bn1(self.conv1(x)))
        shortcut = x if self.downsample is None else self.downsample(x)
        return torch.relu(self.bn2(self.conv2(out)) + shortcut)


class ResNet18(nn.Module):
    """The network of torchvision with its names; returns the mean cross-entropy."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        sizes = zip((64, *WIDTHS), WIDTHS, strict=False)
        self.layers = nn.ModuleList(
            nn.Sequential(Block(inputs, outputs, 1 if index == 0 else 2), Block(outputs, outputs, 1))
            for index, (inputs, outputs) in enumerate(sizes)
        )
        self.fc = nn.Linear(512, CLASSES)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(images))), 3, 2, 1)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.fc(x.mean((2, 3))), labels)


def by_hand(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the loss of `ResNet18`; running statistics are not kept."""

    def conv(name: str, x: jax.Array, stride: int) -> jax.Array:
        weight = params[f"{name}.weight"]
        pads = [(size // 2, size // 2) for size in weight.shape[2:]]
        return lax.conv_general_dilated(x, weight, (stride, stride), pads, dimension_numbers=("NCHW", "OIHW", "NCHW"))

    def norm(name: str, x: jax.Array) -> jax.Array:
        scale, shift = (params[f"{name}.{each}"][:, None, None] for each in ("weight", "bias"))
        mean = x.mean((0, 2, 3), keepdims=True)
        variance = jnp.square(x - mean).mean((0, 2, 3), keepdims=True)
        return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift

    def block(name: str, x: jax.Array, stride: int) -> jax.Array:
        out = jax.nn.relu(norm(f"{name}.bn1", conv(f"{name}.conv1", x, stride)))
        if f"{name}.downsample.0.weight" in params:
            x = norm(f"{name}.downsample.1", conv(f"{name}.downsample.0", x, stride))
        return jax.nn.relu(norm(f"{name}.bn2", conv(f"{name}.conv2", out, 1)) + x)

    x = jax.nn.relu(norm("bn1", conv("conv1", images, 2)))
    pads = ((0, 0), (0, 0), (1, 1), (1, 1))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 3, 3), (1, 1, 2, 2), pads)
    for index in range(len(WIDTHS)):
        x = block(f"layers.{index}.0", x, 1 if index == 0 else 2)
        x = block(f"layers.{index}.1", x, 1)
    logits = x.mean((2, 3)) @ params["fc.weight"].T + params["fc.bias"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def median_seconds(calls: Mapping[str, Callable[[], Any]], settle: float = 0.0) -> dict[str, float]:
    """Returns the median wall time of each call; the calls take turns, and each waits `settle` seconds before it."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(REPEATS + 1):
        for name, call in calls.items():
            time.sleep(settle)
            start = time.perf_counter()
            call()
            if number:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    batch, size = [*map(int, sys.argv[1:]), *(4, 224)[len(sys.argv) - 1 :]]
    torch.manual_seed(0)
    module = ResNet18()
    images = torch.randn(batch, 3, size, size)
    labels = torch.arange(batch) % CLASSES
    weights = [parameter for _, parameter in module.named_parameters()]

    def by_torch() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(module(images, labels), weights)

    fn = bridge.export(module)
    params = fn.params
    buffers = fn.buffers
    arrays = jnp.asarray(images.numpy()), jnp.asarray(labels.numpy(), jnp.int32)

    def by_bridge(params: Params, *arrays: jax.Array) -> jax.Array:
        return fn(params, buffers, *arrays)[0]

    programs = {
        name: jax.jit(jax.value_and_grad(loss)).lower(params, *arrays).compile()
        for name, loss in (("the bridge", by_bridge), ("JAX by hand", by_hand))
    }
    wanted = dict(zip((name for name, _ in module.named_parameters()), by_torch(), strict=True))
    for name, program in programs.items():
        _, gradients = program(params, *arrays)
        for leaf, gradient in wanted.items():
            error = np.linalg.norm(gradients[leaf] - gradient.numpy()) / float(gradient.norm())
            assert error < 2e-2, f"{name}: {leaf} is off by {error:.1e}"  # roundings decide at the corners of ReLUs
    calls: dict[str, Callable[[], Any]] = {"PyTorch": by_torch}
    for name, program in programs.items():
        calls[name] = lambda program=program: jax.block_until_ready(program(params, *arrays))
    seconds = median_seconds(calls)
    print("| ResNet-18, forward and backward | time | / PyTorch | FLOPs | convolutions |\n|---|---|---|---|---|")
    for name, took in seconds.items():
        counts = "| |"
        if name in programs:
            flops = programs[name].cost_analysis()["flops"]  # pyright: ignore[reportOptionalSubscript]
            convolutions = str(programs[name].as_text()).count(" convolution(")
            counts = f"| {flops / 1e9:.2f} G | {convolutions} |"
        print(f"| {name} | {1e3 * took:.0f} ms | {took / seconds['PyTorch']:.2f} {counts}")


if __name__ == "__main__":
    main()
