"""Images of bytes, shifts of masks, and other operations on narrow types, against PyTorch eager."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call
from support.markers import slow_unless

import bridge

IMAGE = torch.randint(0, 256, (2, 3, 23, 17), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def in_both(function, x):
    """PyTorch's result, and that of the bridge under `jit`, of the same dtype."""
    fn, expected = bridge.export(Call(function)), function(x)
    result = jax.jit(lambda a: fn({}, {}, a)[0])(jnp.asarray(x.numpy()))
    assert str(result.dtype).removeprefix("u") == str(expected.dtype)[6:].removeprefix("u").replace("64", "32")
    return np.asarray(result, np.float64), expected.double().numpy()


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
    np.testing.assert_array_equal(
        *in_both(lambda x: F.interpolate(x, mode=mode, antialias=True, **RESIZED[name]), IMAGE)
    )


@pytest.mark.parametrize("name", slow_unless("smaller".__eq__, ["smaller", "larger", "factor"]))
def test_images_of_bytes_without_antialias_differ_by_one(name):
    """From the exact value the bridge is half a level away, PyTorch more."""
    settings = {"mode": "bilinear", **RESIZED[name]}
    ours, theirs = in_both(lambda x: F.interpolate(x, **settings), IMAGE)
    exact = F.interpolate(IMAGE.double(), **settings).numpy()
    assert np.abs(ours - exact).max() <= 0.5 + 1e-3 and np.abs(ours - theirs).max() <= 1


SHIFTS = {
    "by a number": lambda m, n: (m << 1, m >> 0, m << 3),
    "of a number": lambda m, n: (2 << m, 5 >> m),
    "by a tensor": lambda m, n: (m << n, m >> n, m << n.to(torch.uint8), m << torch.tensor(2)),
    "of a tensor": lambda m, n: (n << m, n.to(torch.int8) >> m, n << m[0]),
    "packed": lambda m, n: ((m << n).sum(), torch.bitwise_left_shift(m, 2), torch.bitwise_right_shift(m, n)),
}


@pytest.mark.parametrize("name", slow_unless("packed".__eq__, SHIFTS))
def test_shifts_of_masks(name):
    x = torch.tensor([1.0, -1.0, 2.0])
    for i in range(len(SHIFTS[name](x > 0, torch.arange(3)))):
        np.testing.assert_array_equal(*in_both(lambda x, i=i: SHIFTS[name](x > 0, torch.arange(3))[i], x))


def test_a_mask_by_a_mask_is_pytorchs_error():
    with pytest.raises(NotImplementedError, match=r"lshift_cpu.*Bool"):
        bridge.export(Call(lambda x: (x > 0) << (x > 1)))({}, {}, jnp.ones(3))


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", slow_unless({torch.uint8}.__contains__, INTEGERS), ids=str)
def test_the_largest_of_integers(dtype):
    """With padding, which is smaller than all integers also where these are the least there are."""
    x = torch.full((1, 2, 5, 4, 4), torch.iinfo(dtype if dtype != torch.int64 else torch.int32).min, dtype=dtype)
    x[0, 1] = torch.arange(80).view(5, 4, 4).flip(1)
    for i in range(2):
        np.testing.assert_array_equal(*in_both(lambda x, i=i: F.max_pool3d(x, 2, 2, 1, return_indices=True)[i], x))
        np.testing.assert_array_equal(*in_both(lambda x, i=i: F.max_pool2d(x[0], 3, 2, 1, return_indices=True)[i], x))


@pytest.mark.parametrize("dtype", slow_unless({torch.float16}.__contains__, [torch.float16, torch.bfloat16]), ids=str)
def test_renorm_of_narrow_floats(dtype):
    x = torch.tensor([[3.0, 4.0], [0.3, 0.4]]).to(dtype)
    given = jnp.asarray(x.float().numpy(), str(dtype)[6:])
    result, _ = bridge.export(Call(lambda x: x.renorm(2, 0, 1.0)))({}, {}, given)
    np.testing.assert_allclose(result.astype(jnp.float32), x.renorm(2, 0, 1.0).float(), rtol=2**-8)


@pytest.mark.parametrize("dilation", slow_unless({2}.__contains__, [1, 2]))
def test_windows_of_minus_infinity_beside_padding(dilation):
    x = torch.full((1, 1, 5, 5), -torch.inf)
    x[0, 0, 0, 0] = 3
    for i in range(2):
        np.testing.assert_array_equal(
            *in_both(lambda x, i=i: F.max_pool2d(x, 3, 2, 1, dilation, return_indices=True)[i], x)
        )


def test_of_several_nan_in_a_window_the_last_is_the_largest():
    nan = torch.nan
    x = torch.tensor([[[[1, nan, 3, nan], [nan, 2, 4, 5], [1, 2, nan, nan], [3, nan, nan, 0]]]])
    for i in range(2):
        np.testing.assert_array_equal(*in_both(lambda x, i=i: F.max_pool2d(x, 2, return_indices=True)[i], x))
        np.testing.assert_array_equal(*in_both(lambda x, i=i: F.max_pool2d(x, 3, 1, 1, return_indices=True)[i], x))
