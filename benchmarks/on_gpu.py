"""Forward and backward of GPT d12 and ResNet-18 on a GPU: PyTorch, `torch.compile` and the bridge, the same weights.

python -m benchmarks.on_gpu [rows of tokens] [images]

The losses are compared before the times, which are medians of wall time. PyTorch and JAX run in processes of their own,
since each keeps the memory of the GPU that it has taken.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.resnet import ResNet18, median_seconds
from models_torch.gpt import GPT, GPTConfig

SEQUENCE = 1024
SIDES = ("PyTorch", "torch.compile", "bridge")


def gpt(rows: int) -> tuple[nn.Module, list[torch.Tensor]]:
    """Returns nanochat's model of 12 layers, which computes in bfloat16, tokens and targets."""
    module = GPT(GPTConfig(seq_len=SEQUENCE))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.02)
    return module, list(torch.randint(0, 50304, (2, rows, SEQUENCE)))


def resnet(images: int) -> tuple[nn.Module, list[torch.Tensor]]:
    return ResNet18(), [torch.randn(images, 3, 224, 224), torch.arange(images) % 10]


def measured(side: str, model: str, size: int) -> dict[str, Any]:
    """Returns the loss, the seconds of the first and of a later call, and the largest memory in GB."""
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    module, inputs = {"gpt": gpt, "resnet": resnet}[model](size)
    call, memory = (_in_jax if side == "bridge" else _in_torch)(side, module, inputs)
    start = time.perf_counter()
    loss = call()
    first = time.perf_counter() - start
    return {"loss": loss, "first": first, "seconds": median_seconds({side: call})[side], "memory": memory() / 1e9}


def _in_torch(side: str, module: nn.Module, inputs: list[torch.Tensor]) -> tuple[Callable, Callable]:
    module = module.cuda()
    inputs = [each.cuda() for each in inputs]
    run = torch.compile(module) if side == "torch.compile" else module
    torch.backends.cudnn.allow_tf32 = True
    parameters = [*module.parameters()]

    def call() -> float:
        loss = run(*inputs)
        torch.autograd.grad(loss, parameters)
        torch.cuda.synchronize()
        return float(loss.detach())

    return call, torch.cuda.max_memory_allocated


def _in_jax(_side: str, module: nn.Module, inputs: list[torch.Tensor]) -> tuple[Callable, Callable]:
    import jax
    import jax.numpy as jnp

    import bridge

    fn = bridge.export(module)
    arrays = [jnp.asarray(each.numpy()) for each in inputs]

    @jax.jit
    @jax.value_and_grad
    def step(params, *arrays):
        return fn(params, fn.buffers, *arrays)[0]

    def call() -> float:
        return float(jax.block_until_ready(step(fn.params, *arrays))[0])

    return call, lambda: (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)


def main() -> None:
    sizes = dict(zip(("gpt", "resnet"), [*map(int, sys.argv[1:]), *(16, 128)[len(sys.argv) - 1 :]], strict=True))
    for model, size in sizes.items():
        print(f"\n| {model}, {size} | loss | first call, s | ms | / PyTorch | GB |\n|---|---|---|---|---|---|")
        ours = 0.0
        for side in SIDES:
            code = (
                f"import json; from benchmarks import on_gpu as o; print(json.dumps(o.measured{(side, model, size)}))"
            )
            ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
            if ran.returncode:
                print(f"| {side} | failed | | | | |", flush=True)
                continue
            row = json.loads(ran.stdout.splitlines()[-1])
            ours = ours or row["seconds"]
            cells = f"{row['loss']:.5f} | {row['first']:.1f} | {1e3 * row['seconds']:.1f} | {row['seconds'] / ours:.2f}"
            print(f"| {side} | {cells} | {row['memory']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
