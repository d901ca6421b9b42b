"""How exact float32 products are: PyTorch's setting decides, a setting of JAX's that the user made goes before it."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

import bridge


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


class Products(nn.Module):
    """A linear layer, attention, a convolution, and a product in a backward of the user's own."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8, dtype=dtype), nn.Conv1d(4, 4, 3, padding=1, dtype=dtype)

    def forward(self, x):
        h = self.conv(self.linear(x))
        return Square.apply(nn.functional.scaled_dot_product_attention(h, h, h))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x @ x.mT

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return (grad + grad.mT) @ x


def precisions(dtype="float32"):
    """Of every product in the forward and the backward program."""
    fn = bridge.export(Products(getattr(torch, dtype)))

    def objective(params, x):
        return fn(params, fn.buffers, x)[0].sum()

    program = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(fn.params, jnp.ones((2, 4, 8), dtype)).as_text()
    found = re.findall(r"stablehlo\.(?:dot_general|convolution).*", program)
    assert len(found) >= 12
    return {m for line in found for m in re.findall(r"DEFAULT|HIGHEST|HIGH", line)}


@pytest.mark.parametrize(("pytorch", "program"), [("highest", "HIGHEST"), ("high", "HIGH"), ("medium", "DEFAULT")])
def test_pytorchs_setting_is_that_of_every_product(pytorch, program):
    torch.set_float32_matmul_precision(pytorch)
    assert precisions() == {program}


@pytest.mark.parametrize(
    "switch", ["allow_tf32", "fp32_precision"], ids=["the older switch of CUDA", "the newer one beside the general one"]
)
def test_tf32_for_cuda_is_high(switch):
    torch.set_float32_matmul_precision("highest")
    setattr(torch.backends.cuda.matmul, switch, {"allow_tf32": True, "fp32_precision": "tf32"}[switch])
    assert precisions() == {"HIGH"}


def test_products_of_half_precision_are_left_as_they_are():
    assert precisions("bfloat16") == {"DEFAULT"}


@pytest.mark.parametrize("by_config", [False, True], ids=["context", "config"])
def test_a_setting_of_jax_goes_before_it(by_config):
    context = jax.default_matmul_precision("high")
    if by_config:
        context = contextlib.nullcontext()
        jax.config.update("jax_default_matmul_precision", "high")
    try:
        with context:
            assert precisions() == {"HIGH"}
    finally:
        jax.config.update("jax_default_matmul_precision", None)
