"""CPU time of single convolutions of ResNet-18 and of their gradients, in PyTorch and in XLA.

python -m benchmarks.convolutions [batch] [size of an image]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

REPEATS = 3
LAYERS = (
    (3, 64, 7, 2, 1), (64, 64, 3, 1, 4), (64, 128, 3, 2, 4),
    (64, 128, 1, 2, 4), (256, 256, 3, 1, 16), (256, 512, 3, 2, 16),
)  # fmt: skip
"""Channels in and out, width of the kernel, stride, and the fraction of the image's side that the layer sees."""


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Returns the least CPU time of a call in seconds, of all threads together, after one call that is not counted."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def products(batch: int, layer: tuple[int, int, int, int, int], size: int) -> dict[str, tuple[float, float]]:
    """Returns CPU seconds in PyTorch and XLA of a convolution's forward and its two gradients, which are compared."""
    inputs, outputs, kernel, stride, fraction = layer
    x, padding = torch.randn(batch, inputs, size // fraction, size // fraction), kernel // 2
    weight = torch.randn(outputs, inputs, kernel, kernel)
    y = torch.nn.functional.conv2d(x, weight, None, stride, padding)
    arrays = [jnp.asarray(array.numpy()) for array in (x, weight, y)]

    def conv(x: jax.Array, weight: jax.Array) -> jax.Array:
        dimensions, pads = ("NCHW", "OIHW", "NCHW"), [(padding, padding)] * 2
        return lax.conv_general_dilated(x, weight, (stride, stride), pads, dimension_numbers=dimensions)

    def backward(input_: bool, weight_: bool) -> torch.Tensor:
        rest = None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [input_, weight_, False]
        return torch.ops.aten.convolution_backward(y, x, weight, *rest)[0 if input_ else 1]

    sides: dict[str, tuple[Callable[[], torch.Tensor], Callable[..., jax.Array]]] = {
        "forward": (lambda: torch.nn.functional.conv2d(x, weight, None, stride, padding), lambda x, w, y: conv(x, w)),
        "by the input": (lambda: backward(True, False), lambda x, w, y: jax.vjp(lambda x: conv(x, w), x)[1](y)[0]),
        "by the weight": (lambda: backward(False, True), lambda x, w, y: jax.vjp(lambda w: conv(x, w), w)[1](y)[0]),
    }
    seconds: dict[str, tuple[float, float]] = {}
    for name, (by_torch, function) in sides.items():
        step, wanted = jax.jit(function).lower(*arrays).compile(), by_torch().numpy()
        np.testing.assert_allclose(step(*arrays), wanted, atol=1e-5 * abs(wanted).max(), err_msg=name)
        seconds[name] = cpu_seconds(by_torch), cpu_seconds(lambda step=step: jax.block_until_ready(step(*arrays)))
    return seconds


def main() -> None:
    batch, size = [*map(int, sys.argv[1:]), *(4, 224)[len(sys.argv) - 1 :]]
    torch.set_num_threads(1)
    print("| convolution | product | PyTorch | XLA | XLA / PyTorch |\n|---|---|---|---|---|")
    for inputs, outputs, kernel, stride, fraction in LAYERS:
        layer = f"{inputs} to {outputs}, {kernel}x{kernel}, stride {stride}, on {size // fraction} x {size // fraction}"
        for name, (theirs, xla) in products(batch, (inputs, outputs, kernel, stride, fraction), size).items():
            print(f"| {layer} | {name} | {1e3 * theirs:.1f} ms | {1e3 * xla:.1f} ms | {xla / theirs:.1f} |", flush=True)


if __name__ == "__main__":
    main()
