"""A process of its own for `test_isolation.py`: what PyTorch's compiler does beside the bridge."""

import copy
import sys

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 7


class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        x = torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)
        return Doubled.apply(x)

    def branch(self, x):
        return x if self.inner(x).mean() > 0 else -x


def compiled(module: nn.Module, x: torch.Tensor) -> None:
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        gradients = []
        for call in (module, torch.compile(module, backend=backend, fullgraph=True)):
            leaf = x.clone().requires_grad_()
            call(leaf).sum().backward()
            gradients.append(leaf.grad)
        torch.testing.assert_close(*gradients)


def attention() -> None:
    torch._dynamo.reset()
    q = torch.randn(1, 2, 128, 16)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    expected = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=mask), expected)


def everything(module: nn.Module, x: torch.Tensor) -> tuple:
    compiled(module, x)
    attention()
    decompositions = sorted((str(op), f.__module__) for op, f in torch._decomp.decomposition_table.items())
    return torch._C._get_privateuse1_backend_name(), torch.backends.mha.get_fastpath_enabled(), decompositions


def beside_the_bridge(module: nn.Module, x: torch.Tensor, before: tuple) -> None:
    import jax
    import jax.numpy as jnp

    import bridge

    fn = bridge.export(module)
    array = jnp.asarray(x.numpy())
    fn(fn.params, fn.buffers, array)
    assert everything(module, x) == before
    # A branch on a traced value converts the method for the time of the call.
    jax.jit(lambda x: fn(fn.params, fn.buffers, x, method="branch"))(array)
    assert everything(copy.deepcopy(module), x) == before
    torch.testing.assert_close(torch.jit.script(module.inner)(x), module.inner(x))


if __name__ == "__main__":
    torch.manual_seed(0)
    made = Module()
    given = torch.randn(2, 4)
    printed = everything(made, given)
    if "without the bridge" not in sys.argv:
        beside_the_bridge(made, given, printed)
    print(printed)
