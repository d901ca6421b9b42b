"""CPU time of 3x3 convolutions and their gradients in PyTorch and in XLA, at the shapes of ResNet-18's four stages.

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


def cpu_seconds(call: Callable[[], Any]) -> float:
    """Returns the least CPU time of a call, all threads together, after one that is not counted."""
    call()
    times = []
    for _ in range(REPEATS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def products(batch: int, width: int, size: int) -> dict[str, tuple[float, float]]:
    """Returns CPU seconds in PyTorch and XLA of a convolution's forward and its two gradients, which are compared."""
    x, weight = torch.randn(batch, width, size, size), torch.randn(width, width, 3, 3)
    arrays = jnp.asarray(x.numpy()), jnp.asarray(weight.numpy())

    def conv(x: jax.Array, weight: jax.Array) -> jax.Array:
        dimensions = ("NCHW", "OIHW", "NCHW")
        return lax.conv_general_dilated(x, weight, (1, 1), [(1, 1)] * 2, dimension_numbers=dimensions)

    def backward(input_: bool, weight_: bool) -> torch.Tensor:
        rest = None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [input_, weight_, False]
        return torch.ops.aten.convolution_backward(x, x, weight, *rest)[0 if input_ else 1]

    sides: dict[str, tuple[Callable[[], torch.Tensor], Callable[..., jax.Array]]] = {
        "forward": (lambda: torch.nn.functional.conv2d(x, weight, padding=1), conv),
        "by the input": (lambda: backward(True, False), lambda x, w: jax.vjp(lambda x: conv(x, w), x)[1](x)[0]),
        "by the weight": (lambda: backward(False, True), lambda x, w: jax.vjp(lambda w: conv(x, w), w)[1](x)[0]),
    }
    seconds: dict[str, tuple[float, float]] = {}
    for name, (by_torch, function) in sides.items():
        step, wanted = jax.jit(function).lower(*arrays).compile(), by_torch().numpy()
        np.testing.assert_allclose(step(*arrays), wanted, atol=1e-5 * abs(wanted).max(), err_msg=name)
        seconds[name] = cpu_seconds(by_torch), cpu_seconds(lambda step=step: jax.block_until_ready(step(*arrays)))
    return seconds


def main() -> None:
    batch, size = [*map(int, sys.argv[1:]), *(4, 112)[len(sys.argv) - 1 :]]
    torch.set_num_threads(1)
    print("| convolution 3x3 | product | PyTorch | XLA | XLA / PyTorch |\n|---|---|---|---|---|")
    for stage in range(4):
        width, side = 64 << stage, -(-size // (4 << stage))
        for name, (theirs, xla) in products(batch, width, side).items():
            cells = f"{1e3 * theirs:.1f} ms | {1e3 * xla:.1f} ms | {xla / theirs:.1f}"
            print(f"| {width} channels, {side} x {side} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
