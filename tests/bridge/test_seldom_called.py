"""Operations that were refused, or gave results another dtype, `requires_grad` or warning, against PyTorch eager."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn, verified
from support.markers import slow_unless
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

import bridge

X = randn(4, 4, seed=0)
LABELS = torch.tensor([0, 2, 1, 2])
SAMPLES = torch.tensor([[[0.3, 0.8], [0.6, 0.1]]])


def volume(x):
    return x.view(1, 1, 4, 2, 2).repeat(2, 2, 2, 3, 3)


def resized(x, y):
    """Of a tensor without traced values to any size, of another one to a smaller one."""
    new, empty, smaller = x.new(), torch.empty(0), x.detach() * 2
    new.resize_as_(x).copy_(x * x)
    empty.resize_(2, 4).copy_(x[:2])
    return new, empty, smaller.resize_(2, 3), torch.ones(2).resize_(2, 2)[0] * x[0, :2]


CASES = {
    "resize_": resized,
    "mean": lambda x, y: (x.half().mean(0, dtype=torch.float32), x.mean(dtype=x.dtype), y.mean(dtype=x.dtype)),
    "lu": lambda x, y: (*torch.linalg.lu(x), *torch.linalg.lu(x[:2])[1:], *torch.linalg.lu(torch.stack([x, x + 1]))),
    "lu_unpack": lambda x, y: torch.lu_unpack(*torch.linalg.lu_factor(x[:, :3])),
    "householder_product": lambda x, y: torch.linalg.householder_product(torch.stack([x[:, :3]] * 2), x[2:, :2]),
    "householder_product, complex": lambda x, y: (
        torch.linalg.householder_product(torch.complex(x, x.flip(0))[:, :3], torch.complex(x, x)[0, :3]).abs()
    ),
    "fractional_max_pool2d": lambda x, y: F.fractional_max_pool2d(
        x.repeat(2, 2, 2), (2, 3), output_size=(3, 5), return_indices=True, _random_samples=SAMPLES
    ),
    "adaptive_avg_pool": lambda x, y: (
        F.adaptive_avg_pool2d(x.repeat(2, 3, 2, 2)[..., :7], (3, 5)),
        F.adaptive_avg_pool1d(x, 3),
        F.adaptive_avg_pool3d(volume(x), (3, 1, 2)),
        F.adaptive_avg_pool2d(x[None], (2, 2)),
    ),
    "order": lambda x, y: (*torch.kthvalue(x, 2, 0), torch.kthvalue(y + x.argmax(1) * 3, 2, keepdim=True)[0]),
    "cov": lambda x, y: (
        torch.cov(x, aweights=x[0].detach().exp()),
        torch.cov(x[1], correction=0, fweights=y + 1),
        x.cov(fweights=y + 1, aweights=x[2].exp(), correction=2),
        torch.cov(torch.complex(x, x.flip(0)), aweights=x[3].exp()).abs(),
        torch.cov(x, fweights=y * 0 + 1, correction=9) > 0,
        torch.cov(x, aweights=torch.tensor([1.0, 2.0, 0.0, 1.0])),
    ),
    "bucketize": lambda x, y: (
        torch.bucketize(y, torch.tensor([0, 1])),
        torch.bucketize(x, x[0].detach().sort().values, right=True),
    ),
    "cumprod": lambda x, y: (x.cumprod(1), (y % 3).cumprod(0), (y > 0).cumprod(0), x.half().cumprod(0).detach()),
    "integers divided": lambda x, y: (
        torch.div(y + 2**24 + 1, 1, rounding_mode="trunc"),
        torch.div(-y * 0 - 7, y + 2, rounding_mode="trunc"),
        torch.div(-7, y + 2, rounding_mode="floor"),
        torch.div(y > 1, y + 1, rounding_mode="trunc"),
        torch.div(x, 0.3, rounding_mode="trunc") * x,
    ),
    "polynomial": lambda x, y: torch.special.laguerre_polynomial_l(x.detach(), y) * x,
    "bincount": lambda x, y: (
        torch.bincount(y.clamp(0, 2), minlength=3),
        torch.bincount(x.argmax(1), minlength=4) * x,
        torch.bincount(y.clamp(0, 2), x[0].detach(), minlength=5),
        torch.bincount(y % 3, y, minlength=3),
    ),
    "flags": lambda x, y: [
        float(t.requires_grad) * x
        for t in (
            *torch.native_layer_norm(x * torch.ones(4, requires_grad=True), (4,), None, None, 1e-5),
            *torch.linalg.lu(x * torch.ones(4, requires_grad=True)),
        )
    ],
}  # fmt: skip


@pytest.mark.filterwarnings("error:Explicitly requested dtype")
@pytest.mark.parametrize("name", slow_unless(["mean", "integers divided", "bincount"].__contains__, CASES))
def test_values_and_gradients(name):
    verified(Call(CASES[name]), X, LABELS, known_zero=".*")


@pytest.mark.slow
def test_random_slopes_and_windows():
    def forward(x):
        pooled = F.fractional_max_pool3d(volume(x), 2, output_size=(3, 3, 2), return_indices=True)
        return F.rrelu(x, training=True) + F.rrelu(x * 2, 0.1, 0.3, training=True, inplace=True) + F.rrelu(x), pooled

    verified(Call(forward), X)
    fn = bridge.export(nn.RReLU(0.2, 0.9))
    slopes, _ = fn({}, {}, -jnp.ones(4000), rng=jax.random.key(0), train=True)
    np.testing.assert_allclose([-slopes.max(), -slopes.min(), -slopes.mean()], [0.2, 0.9, 0.55], atol=0.01)


@pytest.mark.slow
def test_orthogonal_by_reflections():
    torch.manual_seed(0)
    compare(orthogonal(nn.Linear(4, 3), orthogonal_map="householder"), [X])


def seeded_slopes(x, y):
    torch.manual_seed(0)
    return F.rrelu(x, training=True)


def enlarged(x, y):
    z = x * 2
    return z.resize_(5, 4)


REFUSED = {
    "resize_": (enlarged, "it makes a tensor larger; make one of the new size"),
    "bincount": (lambda x, y: torch.bincount(y, minlength=3), r"not known to be less than `minlength`.*one_hot"),
    "lstsq": (lambda x, y: torch.linalg.lstsq(x, x)[0], r"only where the matrix has full rank.*pinv\(A\) @ B"),
    "rrelu, seeded": (seeded_slopes, "a seeded generator gives slopes to negative entries only"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_for_the_right_reason(name):
    function, message = REFUSED[name]
    fn = bridge.export(Call(function))
    with pytest.raises(bridge.BridgeError, match=message):
        jax.eval_shape(lambda x, y: fn({}, {}, x, y, rng=jax.random.key(0))[0], X.numpy(), LABELS.numpy())


@pytest.mark.parametrize("x64", [False, True])
def test_numbers_that_were_clamped_are_counted(x64):
    with jax.enable_x64(x64):
        fn = bridge.export(Call(lambda y: torch.bincount(y.clamp(0, 2), minlength=3)))
        counts = jax.jit(lambda y: fn({}, {}, y)[0])(LABELS.numpy())
    assert counts.tolist() == torch.bincount(LABELS.clamp(0, 2), minlength=3).tolist()


def with_grad(size):
    return torch.ones(size, requires_grad=True)


ZERO = torch.zeros(4, dtype=torch.int32)
NOT_DIFFERENTIABLE = {
    "running_mean": lambda x: F.batch_norm(x, with_grad(4), torch.ones(4)),
    "running_var": lambda x: F.batch_norm(x, torch.ones(4), with_grad(4), training=True),
    "scale": lambda x: torch.fake_quantize_per_tensor_affine(x, with_grad(()), ZERO[0], -8, 7),
    "scale, channels": lambda x: torch.fake_quantize_per_channel_affine(x, with_grad(4), ZERO, 0, -8, 7),
}


@pytest.mark.parametrize("name", NOT_DIFFERENTIABLE)
def test_an_argument_that_requires_grad_is_pytorch_s_error(name):
    with pytest.raises(RuntimeError, match="is not differentiable with respect to argument") as expected:
        NOT_DIFFERENTIABLE[name](X)
    fn = bridge.export(Call(NOT_DIFFERENTIABLE[name]))
    with pytest.raises(RuntimeError) as raised:
        jax.eval_shape(lambda x: fn({}, {}, x)[0], X.numpy())
    assert str(expected.value) in str(raised.value)


def test_a_mask_that_is_multiplied_hides_what_it_masks():
    """XLA makes a selection of the product with a mask, so infinity times False is 0."""

    def loss(x):
        p = x.softmax(-1)
        return F.kl_div(x.log_softmax(-1), p.roll(1, 0) * (p > 0.2), reduction="batchmean")

    leaf = X.clone().requires_grad_()
    loss(leaf).backward()
    fn = bridge.export(Call(loss))
    gradient = jax.jit(jax.grad(lambda x: fn({}, {}, x)[0]))(X.numpy())
    assert leaf.grad is not None and leaf.grad.isnan().any() and np.isfinite(gradient).all()
