"""The gradient trap: one step of a tiny TRM in PyTorch, through torchax alone, and through the bridge.

    python -m benchmarks.gradient_trap [--mlp-t]

Prints each loss, and the error of each gradient against PyTorch's, relative to its largest entry.
"""

import dataclasses
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torchax
from torchax.interop import JittableModule, jax_view, torch_view

import bridge
from models_torch.registry import architecture, build, example_batch

Gradients = dict[str, np.ndarray]


def setting(mlp_t: bool) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    config = dataclasses.replace(
        architecture("trm").tiny_config,
        mlp_t=mlp_t,
        pos_encodings="none" if mlp_t else "rope",
        H_cycles=3,
        L_cycles=6,
        halt_exploration_prob=0.0,
    )
    return build("trm", config).train(), example_batch(config, config.batch_size, seed=1)


def in_pytorch(module: torch.nn.Module, batch: dict) -> tuple[float, Gradients]:
    _, loss, *_ = module(carry=module.initial_carry(batch), batch=batch)  # pyright: ignore[reportCallIssue]
    loss.backward()
    return loss.item(), {n: p.grad.numpy().copy() for n, p in module.named_parameters() if p.grad is not None}


def through_torchax(module: torch.nn.Module, batch: dict) -> tuple[float, Gradients]:
    env = torchax.default_env()
    with env:
        wrapped = JittableModule(module.to("jax"))
    # pyright: ignore
    params = jax_view(wrapped.params)
    buffers = jax_view(wrapped.buffers)
    arrays = {k: jnp.asarray(v.numpy()) for k, v in batch.items()}

    def loss(params: Any) -> Any:
        with env, env.override_property(prng=jax.random.key(0)):
            inputs = torch_view(arrays)
            carry = module.initial_carry(inputs)  # pyright: ignore[reportCallIssue]
            state = torch_view(params), torch_view(buffers)
            outputs: Any = wrapped.functional_call("forward", *state, carry=carry, batch=inputs)
            return jax_view(outputs[1])

    value, gradients = jax.value_and_grad(loss)(params)
    return float(value), {n: np.asarray(g) for n, g in gradients.items()}


def through_bridge(module: torch.nn.Module, batch: dict) -> tuple[float, Gradients]:
    fn = bridge.export(module)
    arrays = {k: jnp.asarray(v.numpy()) for k, v in batch.items()}

    def loss(params: Any) -> jax.Array:
        carry, _ = fn(params, fn.buffers, arrays, method="initial_carry")
        (_, value, *_), _ = fn(params, fn.buffers, carry=carry, batch=arrays, rng=jax.random.key(0))
        return value

    value, gradients = jax.value_and_grad(loss)(fn.params)
    return float(value), {n: np.asarray(g) for n, g in gradients.items()}


def main() -> None:
    mlp_t = "--mlp-t" in sys.argv[1:]
    rows = {}
    for name, run in (("PyTorch", in_pytorch), ("torchax alone", through_torchax), ("bridge", through_bridge)):
        rows[name] = run(*setting(mlp_t))
    print(f"{'':<40}" + "".join(f"{name:>16}" for name in rows))
    print(f"{'loss':<40}" + "".join(f"{loss:>16.7f}" for loss, _ in rows.values()))
    expected = rows["PyTorch"][1]
    for leaf, gradient in expected.items():
        errors = [np.abs(g[leaf] - gradient).max() / np.abs(gradient).max() for _, g in rows.values()]
        short = leaf.removeprefix("model.inner.")
        print(f"{'error of d/d ' + short:<40}" + "".join(f"{error:>16.1e}" for error in errors))
    for name, (_, gradients) in rows.items():
        norm = np.sqrt(sum(float((gradients[leaf] ** 2).sum()) for leaf in expected))
        print(f"{'norm of all gradients, ' + name:<40}{norm:>16.4f}")


if __name__ == "__main__":
    main()
