"""Integers and floats of 8 and 16 bits, and the precision of sums and products."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import array, in_jax, same
from support.markers import slow_unless
from torch import nn

import bridge

# ---- Images of bytes, shifts of masks, and other operations on narrow types, against PyTorch eager

IMAGE = torch.randint(0, 256, (2, 3, 23, 17), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


RESIZED = {
    "smaller": {"size": (7, 5)},
    "larger": {"size": (31, 40)},
    "both": {"size": (40, 5)},
    "one side": {"size": (23, 9)},
    "factor": {"scale_factor": (0.37, 1.6)},
    "corners": {"size": (9, 6), "align_corners": True},
}


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("name", slow_unless("both".__eq__, RESIZED))
def test_antialiased_images_of_bytes_are_pytorchs(name, mode):
    """Bit for bit: its kernels compute in fixed point and round after each dimension."""
    same(lambda x: F.interpolate(x, mode=mode, antialias=True, **RESIZED[name]), IMAGE)


@pytest.mark.parametrize("name", slow_unless("smaller".__eq__, ["smaller", "larger", "factor"]))
def test_images_of_bytes_without_antialias_differ_by_one(name):
    """The bridge is half a level away from the exact value, PyTorch more."""
    settings = {"mode": "bilinear", **RESIZED[name]}
    ours = np.asarray(in_jax(lambda x: F.interpolate(x, **settings), IMAGE, jit=True), np.float64)
    exact = F.interpolate(IMAGE.double(), **settings).numpy()
    assert np.abs(ours - exact).max() <= 0.5 + 1e-3
    assert np.abs(ours - F.interpolate(IMAGE, **settings).double().numpy()).max() <= 1


def test_windows_of_minus_infinity_beside_padding():
    x = torch.full((1, 1, 5, 5), -torch.inf)
    x[0, 0, 0, 0] = 3
    same(lambda x: [F.max_pool2d(x, 3, 2, 1, dilation, return_indices=True) for dilation in (1, 2)], x)


# ---- Sums of float16, bfloat16 and integers: the dtype that they are computed in, against PyTorch eager

N = 3001
FIRST = torch.zeros(N, dtype=torch.long)
HALVES = torch.tensor([[60000.0, 60000.0], [60000.0, float("nan")]]).half()
INTEGERS_SUMMED = torch.tensor([[2_000_000_000, 2_000_000_000], [-3, 2]])
WIDE: dict[str, Any] = {"dtype": torch.float32}


WIDER = {
    "sum": lambda x: x.sum(**WIDE),
    "sum along a dimension": lambda x: x.sum(0, keepdim=True, **WIDE),
    "nansum": lambda x: x.nansum(**WIDE),
    "nanmean": lambda x: x.nanmean(1, **WIDE),
    "mean": lambda x: x.mean(1, **WIDE),
    "prod": lambda x: x.prod(1, **WIDE),
    "norm": lambda x: torch.norm(x, dim=1, **WIDE),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=1, **WIDE),
    "sum, out=": lambda x: torch.sum(x, 1, out=torch.zeros(2)),
    "mean, out=": lambda x: torch.mean(x, 1, out=torch.zeros(2)),
    "sum of a selection": lambda x: (x[x > 0].sum(**WIDE), torch.sum(x[x > 0], **WIDE), x[x > 0].mean(**WIDE)),
}

OF_FLOATS = {"mean, out=", "nanmean", "norm", "linalg.norm"}


@pytest.mark.parametrize("name", slow_unless({"sum, out=", "sum of a selection"}.__contains__, WIDER))
def test_a_sum_is_computed_in_the_dtype_it_is_asked_for(name):
    """f16 would overflow, and 32 bits of integers."""
    for x in (HALVES,) if name in OF_FLOATS else (HALVES, INTEGERS_SUMMED):
        same(WIDER[name], x, rtol=1e-6)


@pytest.mark.slow
def test_the_gradient_of_a_sum_in_a_wider_dtype():
    weights = jnp.array([2.0, 3.0])
    x = jnp.asarray(HALVES.numpy())
    slopes = jax.grad(lambda a: (in_jax(lambda x: x.sum(0, dtype=torch.float32), a) * weights).sum())(x)
    assert slopes.dtype == jnp.float16 and slopes.tolist() == [[2, 3], [2, 3]]


def written(zeros, where, x):
    out = zeros.clone()
    out[where] = x
    return out


def start(x):
    return torch.zeros(1, 1, dtype=x.dtype)


MANY = {
    "index_add": lambda x: start(x).index_add(0, FIRST, x),
    "scatter_add": lambda x: start(x).scatter_add(0, FIRST[:, None], x),
    "scatter_reduce, sum": lambda x: start(x).scatter_reduce(0, FIRST[:, None], x, "sum"),
    "scatter_reduce, mean": lambda x: start(x).scatter_reduce(0, FIRST[:, None], x, "mean", include_self=False),
    "embedding_bag, sum": lambda x: F.embedding_bag(torch.arange(N), x, torch.tensor([0]), mode="sum"),
    "embedding_bag, mean": lambda x: F.embedding_bag(torch.arange(N), x, torch.tensor([0]), mode="mean"),
    "embedding_bag, weights": lambda x: F.embedding_bag(
        torch.arange(N), x, torch.tensor([0]), mode="sum", per_sample_weights=x[:, 0].detach() / 3
    ),
    "embedding by frequency": lambda x: F.embedding(FIRST, x[:1], scale_grad_by_freq=True),
    "index_select": lambda x: x[:1].index_select(0, FIRST),
    "gather": lambda x: x[:1].gather(0, FIRST[:, None]),
    "repeat_interleave": lambda x: x[:1].repeat_interleave(torch.tensor([N]), 0),
    "index_reduce, mean": lambda x: start(x).index_reduce(0, FIRST, x, "mean", include_self=False),
    "indexing": lambda x: x[:1][FIRST],
    "take": lambda x: torch.take(x[:1], FIRST),
} | {
    name: lambda x, copies=copies: copies(x[:1], torch.zeros(N, 1, dtype=x.dtype))
    for name, copies in {
        "add": lambda x, zeros: zeros + x,
        "multiply": lambda x, zeros: (zeros + 1) * x,
        "where": lambda x, zeros: torch.where(zeros == 0, x, zeros),
        "maximum": lambda x, zeros: torch.maximum(zeros, x),
        "repeat": lambda x, zeros: x.repeat(N, 1),
        "repeat_interleave of a number": lambda x, zeros: x.repeat_interleave(N, 0),
        "linear": lambda x, zeros: F.linear(zeros, torch.ones(1, 1, dtype=x.dtype), x[0]),
        "addmm": lambda x, zeros: torch.addmm(x[0], zeros, torch.ones(1, 1, dtype=x.dtype)),
        "baddbmm": lambda x, zeros: torch.baddbmm(x, zeros[:, None], torch.ones(N, 1, 1, dtype=x.dtype)),
        "matmul": lambda x, zeros: (zeros[..., None] + 1) @ x,
        "conv1d": lambda x, zeros: F.conv1d(zeros.T, torch.ones(1, 1, 1, dtype=x.dtype), x[0]),
        "masked_fill": lambda x, zeros: zeros.masked_fill(zeros == 0, x[0, 0]),
        "fill_": lambda x, zeros: zeros.clone().fill_(x[0, 0]),
        "an index that is written": lambda x, zeros: written(zeros, torch.arange(N), x),
        "a mask that is written": lambda x, zeros: written(zeros, zeros[:, 0] == 0, x),
        "replicate": lambda x, zeros: F.pad(x, (0, N - 1), mode="replicate"),
        "instance_norm": lambda x, zeros: F.instance_norm(zeros.T[None], weight=x[0], bias=x[0]),
    }.items()
}
"""Sums of N terms, of values or of gradients."""


def weights(shape):
    """Eight bits each, so that both types hold them; of a sum, the same for all."""
    size = torch.Size(shape).numel()
    return (torch.arange(size) * 37 % 255 / 256 + 1 / 256).reshape(shape)


@pytest.mark.parametrize("dtype", slow_unless({torch.bfloat16}.__contains__, [torch.bfloat16, torch.float16]), ids=str)
@pytest.mark.parametrize("name", slow_unless({"scatter_reduce, mean", "gather", "add", "linear"}.__contains__, MANY))
def test_many_terms_are_added_in_float32(name, dtype):
    """Rounded once, against float64: ones that were added one by one stop at 256 or 2048."""
    function = MANY[name]
    x = (torch.arange(N) % 3 + 1)[:, None].to(dtype)

    def in_pytorch(x):
        x = x.clone().requires_grad_()
        out = function(x)
        return [out, *torch.autograd.grad(out, x, weights(out.shape).to(out))]

    out, pull = jax.vjp(lambda a: in_jax(function, a, jit=True), array(x))
    pulled = jax.jit(pull)(array(weights(out.shape).to(dtype)))
    for ours, exact in zip((out, *pulled), in_pytorch(x.double()), strict=True):
        assert str(ours.dtype) == str(dtype)[6:]
        kind = torch.finfo(dtype)
        bound = kind.eps * max(exact.abs().max(), kind.smallest_normal) / 2 * 1.01
        assert np.abs(np.asarray(ours, np.float64) - exact.detach().numpy()).max() <= bound


@pytest.mark.parametrize("name", slow_unless("gather".__eq__, ["index_select", "gather"]))
def test_what_is_picked_in_float32_gains_no_operations(name):
    def casts(dtype):
        pull = jax.make_jaxpr(lambda a: jax.vjp(lambda a: in_jax(MANY[name], a), a)[1](jnp.ones((N, 1), dtype)))
        return str(pull(jnp.ones((N, 1), dtype))).count("new_dtype=float32")

    assert casts(jnp.float32) == 0 < casts(jnp.bfloat16)


@pytest.mark.slow
def test_what_is_picked_in_bfloat16_has_derivatives_in_both_directions():
    first = torch.tensor([[0, 0, 1]])
    second = torch.tensor([1, 2])

    def call(x):
        return in_jax(lambda x: (x * x).gather(1, first).index_select(1, second), x)

    x = jnp.array([[2.0, 3.0]], jnp.bfloat16)
    assert jax.jvp(call, (x,), (jnp.ones_like(x),))[1].tolist() == [[4, 6]]
    rows = jax.vmap(jax.grad(lambda a: call(a).sum()))(jnp.stack([x, x + 1]))
    assert rows.tolist() == [[[4, 6]], [[6, 8]]]


# ---- Precision of float32 products: PyTorch's setting decides, unless the user has made one of JAX's


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.backends.cuda.matmul.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")


class Products(nn.Module):
    """A linear layer, attention, a convolution, and a product in a backward of the user's own."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=dtype)
        self.conv = nn.Conv1d(4, 4, 3, padding=1, dtype=dtype)

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
    """Returns the precision of every product in the forward and the backward program."""
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


@pytest.mark.parametrize(("switch", "value"), [("allow_tf32", True), ("fp32_precision", "tf32")])
def test_tf32_for_cuda_is_high(switch, value):
    """The older switch of CUDA counts, and so does the newer one beside the general one."""
    torch.set_float32_matmul_precision("highest")
    setattr(torch.backends.cuda.matmul, switch, value)
    assert precisions() == {"HIGH"}


def test_products_of_half_precision_are_left_as_they_are():
    assert precisions("bfloat16") == {"DEFAULT"}


@pytest.mark.parametrize("by_config", [False, True], ids=["context", "config"])
def test_a_setting_of_jax_goes_before_it(by_config):
    if not by_config:
        with jax.default_matmul_precision("high"):
            assert precisions() == {"HIGH"}
        return
    jax.config.update("jax_default_matmul_precision", "high")
    try:
        assert precisions() == {"HIGH"}
    finally:
        jax.config.update("jax_default_matmul_precision", None)
