"""Operations with arguments that few use, and results that carry names, against PyTorch eager."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import bridge

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def bytes_of(x):
    return (x > 0).byte() * 5 + torch.arange(90, 102, dtype=torch.uint8).reshape(3, 4)


def factors_beside_narrow(x, small, half):
    return (
        x.add(small, alpha=3),
        x.sub(small, alpha=2),
        torch.rsub(small, x, alpha=0.1),
        (x * 2).add_(small, alpha=3).sub_(half, alpha=200),
        torch._foreach_add([x * 2], [small], alpha=3)[0],
        torch.addcmul(x, small, small, value=3),
        torch.addcdiv(x, half, half.abs() + 1, value=3),
        small.long().add(small, alpha=300),
        torch.add(x, x.bfloat16() / 3, alpha=0.1),
    )


def factors_of_few_bits(x, small, half):
    """Results only: a gradient in float16 is a sum of rounded terms, whose order is PyTorch's own."""
    return (
        x * 2,
        small.add(small, alpha=3),
        small.char().sub(small.char(), alpha=-7),
        torch.add(half, half, alpha=0.1),
        torch.addmm(half[:, :3], half, half.T, beta=0.3, alpha=1e-4),
    )


def negative_powers(n):
    """Of bases that are arrays and numbers, of 8 bits and of 32."""
    bases = n * 0 + torch.tensor([[3, 2, -3, 5], [1, -1, 0, -1], [-1, 1, -1, 0]], dtype=torch.int32)
    return bases**n, bases.char() ** n.char(), 2**n, 3 ** n.char(), (-1) ** n, bases ** n.clamp(-128, -127).char()


FUNCTIONS = {
    "results with names": lambda x: (torch.max(x, 1), {"slogdet": torch.linalg.slogdet(x[:, :3])}),
    "put, negative": lambda x: (x * 2).put(torch.tensor([-1, 0, 0]), x[0, :3], accumulate=True),
    "put, set": lambda x: (x * 2).put(torch.tensor([-1, 0]), x[0, :2]),
    "put, bools": lambda x: ((x > 0).put(torch.tensor([0, 0, 5]), x[0, :3] > -9, accumulate=True), x * 2),
    "fractions beside integers": lambda x: [
        x * 2,
        torch.addmv(x[0].long(), x.T.long(), x[:, 0].long(), beta=0.5, alpha=1.6),
        torch.addmm(x.T[:, :3].long(), x.T.long() + 2, x[:, :3].long() + 2, beta=1.6, alpha=0.5),
        torch.baddbmm(x[None, :, :3].long(), x[None].long() + 2, x.T[None].long() + 2, beta=1.6, alpha=2.7),
    ],
    "factors beside a narrower dtype": lambda x: factors_beside_narrow(x, bytes_of(x), x.half() * 200),
    "factors of a few bits": lambda x: factors_of_few_bits(x, bytes_of(x), x.detach().half() * 200),
    "negative powers of integers": lambda x: (x * 2, *negative_powers((x * 0).int() + torch.tensor([-1, -2, -32, 3]))),
    "factors of no matrices": lambda x: (
        x * 2,
        torch.linalg.cholesky(x.new_zeros(0, 3, 3) + x[0, 0]),
        torch.linalg.cholesky_ex(x[:0, :0]),
    ),
    "multilabel margin": lambda x: F.multilabel_margin_loss(x[:2], torch.tensor([[1, 2, -1, 0], [-1, 0, 0, 0]])),
    "multilabel margin, one": lambda x: F.multilabel_margin_loss(x[0], torch.tensor([3, 0, -1, 1]), reduction="none"),
    "large numbers": lambda x: [f(x + 200.0) for f in (F.softplus, F.elu, F.celu, F.selu, F.mish)],
    "floats to small integers": lambda x: (
        *((x * 1000).to(d) for d in (torch.int8, torch.uint8, torch.int16)),
        torch.zeros(3, 4, dtype=torch.int8).copy_(x * 300) + x,
    ),
    "sign of nan": lambda x: torch.where(x > 0, x, float("nan")).sign() + x,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function(name):
    report = bridge.verify(
        Calls(FUNCTIONS[name]), X, int64="wrap", steps=1
    )  # of these numbers: half precision rounds others otherwise
    assert report.ok, f"\n{report}"


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (
            lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2),
            (2, 4, 5, 6),
        ),
        (lambda: nn.ConvTranspose1d(4, 2, 4, stride=3), (2, 4, 7)),
        (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=3, bias=False), (1, 2, 4, 4, 4)),
        (lambda: nn.Conv2d(4, 4, 3, padding=2, padding_mode="circular", groups=4, dilation=2), (2, 4, 5, 6)),
        (lambda: nn.Conv1d(4, 2, 4, padding="same", bias=False), (2, 4, 7)),
        (lambda: weight_norm(weight_norm(nn.Linear(4, 3), "bias"), "weight", 1), (2, 4)),
    ],
    ids=["transposed, all", "transposed, stride", "transposed, dilation", "circular", "same, even kernel", "norms"],
)
def test_module(module, shape):
    torch.manual_seed(0)
    report = bridge.verify(module(), torch.randn(shape))
    assert report.ok, f"\n{report}"


def test_hooks_and_the_call_of_the_module_itself():
    class Called(nn.Linear):
        def __call__(self, x):
            return super().__call__(x * 2) + 1

    torch.manual_seed(0)
    for hooked in (nn.Linear(4, 3), Called(4, 3)):
        hooked.register_forward_hook(lambda module, args, out: out + 100)
        hooked.register_forward_pre_hook(lambda module, args: (args[0] * 10,))
        out, _ = (fn := bridge.export(hooked))(fn.params, fn.buffers, X.numpy())
        torch.testing.assert_close(torch.tensor(out.tolist()), hooked(X).detach())
        assert bridge.verify(hooked, X).ok


BESIDE = [torch.maximum, torch.minimum, torch.lt, torch.ge, torch.eq, torch.floor_divide, torch.remainder, torch.fmod]
BESIDE += [torch.clamp_min, torch.add, torch.mul, torch.bitwise_and, torch.div]


@pytest.mark.parametrize("function", BESIDE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_an_integer_without_dimensions_beside_narrow_ones(function, dtype):
    """PyTorch converts it to their dtype before it computes, so that 300 beside uint8 is 44."""
    narrow = torch.tensor([250, 3, 100]).to(dtype)
    pairs = [(narrow, torch.tensor(n)) for n in (-1, 300, 40000)]
    if function is not torch.div:
        pairs += [(wide, narrow) for _, wide in pairs]

    class Pairs(nn.Module):
        def forward(self, *inputs):
            return [function(x, y) for x, y in zip(inputs[::2], inputs[1::2], strict=True)]

    flat = [tensor for pair in pairs for tensor in pair]
    fn = bridge.export(Pairs())
    for result, expected in zip(fn({}, {}, *(jnp.asarray(t.numpy()) for t in flat))[0], Pairs()(*flat), strict=True):
        assert str(result.dtype) == str(expected.dtype).removeprefix("torch.")
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-6)


BITS = {torch.bfloat16: 2**-8, torch.float16: 2**-11}

NARROW = {
    "plus a number": lambda x, y: (x + 0.1, x - 0.1, x + 1001),
    "scaled sum": lambda x, y: (torch.add(x, y, alpha=0.3), torch.sub(x, 0.1, alpha=0.3), torch.rsub(x, y, alpha=0.3)),
    "times a number": lambda x, y: (x * 1001, x * 0.3),
    "quotient rounded down": lambda x, y: (x // 0.3, torch.div(x, 0.3, rounding_mode="floor")),
    "slopes": lambda x, y: (F.leaky_relu(x, 0.1), F.softshrink(x, 0.1)),
}


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("name", NARROW)
def test_numbers_beside_narrow_floats_are_rounded_where_pytorch_does(name, dtype):
    """Bit for bit."""
    x, y = (torch.randn(32, 32, generator=torch.Generator().manual_seed(s)).to(dtype) * 3 for s in (1, 2))
    fn = bridge.export(Pair(NARROW[name]))
    results, _ = jax.jit(lambda *inputs: fn({}, {}, *inputs))(
        *(jnp.asarray(t.float().numpy()).astype(str(dtype)[6:]) for t in (x, y))
    )
    for result, expected in zip(results, NARROW[name](x, y), strict=True):
        np.testing.assert_array_equal(np.asarray(result, np.float32), expected.float().numpy())


class Pair(Calls):
    def forward(self, x, y):
        return self.function(x, y)


PRODUCTS = {
    "addr": lambda x, y: torch.addr(x, x[0], y[0], alpha=0.7, beta=0.3),
    "baddbmm": lambda x, y: torch.baddbmm(x, x.view(4, 32, 8), y.view(4, 8, 32), alpha=0.7, beta=0.3),
}


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_scaled_products_of_narrow_floats_are_rounded_once(name, dtype):
    """PyTorch rounds after each product of a batch."""
    x, y = (torch.randn(32, 32, generator=torch.Generator().manual_seed(s)).to(dtype) for s in (1, 2))
    result, _ = bridge.export(Pair(PRODUCTS[name]))(
        {}, {}, *(jnp.asarray(t.float().numpy()).astype(str(dtype)[6:]) for t in (x, y))
    )
    exact = PRODUCTS[name](x.double(), y.double()).numpy()
    scale = np.maximum(np.abs(exact), 1)
    assert np.max(np.abs(np.asarray(result, np.float64) - exact) / scale) < 1.01 * BITS[dtype]


@pytest.mark.parametrize("name", ["addr", "addbmm"])
def test_a_beta_of_zero_leaves_nan_out(name):
    y = torch.ones(32, 32)
    operands = (y[0], y[0]) if name == "addr" else (y.view(4, 32, 8), y.view(4, 8, 32))
    module = Calls(lambda x: getattr(torch, name)(x, *operands, beta=0))
    result, _ = bridge.export(module)({}, {}, jnp.full((32, 32), jnp.nan))
    np.testing.assert_array_equal(np.asarray(result), module(y).numpy())
