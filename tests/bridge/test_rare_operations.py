"""Operations whose values or gradients were not PyTorch's, each against PyTorch eager, inputs' gradients included."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import nn

import bridge

MASKED = randn(3, 4).masked_fill(torch.tensor([[1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool(), float("-inf"))
IMAGE = randn(1, 2, 6, 6)
LABELS = torch.tensor([[1, 1, 2], [3, 4, 1], [2, 2, 2]])
_, PLACES = F.max_pool2d(IMAGE, 3, 2, return_indices=True)


def pool_backward(gradient):
    return torch.ops.aten.max_pool2d_with_indices_backward(
        gradient, IMAGE, [3, 3], [2, 2], [0, 0], [1, 1], False, PLACES
    )


def symmetric_pinv(x):
    return torch.linalg.pinv(x + x.mT, hermitian=True)


CASES = {
    "pdist": (F.pdist, randn(5, 3)),
    "pdist, p=1": (lambda x: F.pdist(x, 1), randn(5, 3)),
    "pdist, p=inf": (lambda x: F.pdist(x, float("inf")), randn(5, 3)),
    "pdist, equal rows": (F.pdist, randn(1, 3).expand(3, 3).clone()),
    "as_strided_scatter of a constant": (
        lambda y: torch.as_strided_scatter(torch.arange(9.0).view(3, 3), y, (2, 2), (3, 1), 1),
        randn(2, 2),
    ),
    "safe softmax": (lambda x: torch.ops.aten._safe_softmax(x, -1), MASKED),
    "pinv, hermitian": (symmetric_pinv, randn(4, 4)),
    "pinv, wide": (torch.linalg.pinv, randn(3, 5)),
    "pinv, singular, hermitian": (lambda x: torch.linalg.pinv(x.mT @ x, hermitian=True, atol=1e-3), randn(2, 4)),
    "pinv, one triangle": (lambda x: torch.linalg.pinv(x, hermitian=True), randn(4, 4)),
    "polygamma of negative numbers": (lambda x: torch.polygamma(1, x), -randn(6).abs() - 0.1),
    "polygamma 1": (lambda x: torch.polygamma(1, x), randn(6).abs() + 0.5),
    "polygamma 2": (lambda x: torch.polygamma(2, x), randn(6).abs() + 0.5),
    "polygamma 0": (lambda x: torch.polygamma(0, x), randn(6).abs() + 0.5),
    "quotient of small numbers": (torch.div, 1e-22 * (randn(4).abs() + 1), 1e-22 * (randn(4, seed=2).abs() + 1)),
    "ctc": (
        lambda x: F.ctc_loss(x.log_softmax(-1), LABELS, (7, 5, 6), (3, 2, 0), reduction="none"),
        randn(7, 3, 5),
    ),
    "ctc, lengths in tensors": (
        lambda x: F.ctc_loss(x.log_softmax(-1), LABELS, torch.tensor([7, 5, 6]), torch.tensor([3, 2, 1])),
        randn(7, 3, 5),
    ),
    "ctc, impossible": (
        lambda x: F.ctc_loss(x.log_softmax(-1), LABELS, (3, 5, 6), (3, 2, 1), zero_infinity=True),
        randn(7, 3, 5),
    ),
    "ctc, labels in a row, blank last": (
        lambda x: F.ctc_loss(x.log_softmax(-1), LABELS.ravel()[:6] - 1, (7, 5, 6), (3, 2, 1), blank=4),
        randn(7, 3, 5),
    ),
    "ctc of what is no log_softmax": (lambda x: F.ctc_loss(x, LABELS, (7, 5, 6), (3, 2, 1)), -randn(7, 3, 5).abs()),
    "max_unpool1d": (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), randn(2, 2, 6)),
    "max_unpool2d": (
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(7, 6)),
        randn(2, 2, 7, 6),
    ),
    "max_unpool3d": (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), randn(1, 2, 2, 4, 4)),
    "antialiased, bilinear": (lambda x: F.interpolate(x, (3, 11), mode="bilinear", antialias=True), IMAGE),
    "antialiased, corners": (
        lambda x: F.interpolate(x, (2, 5), mode="bilinear", antialias=True, align_corners=True),
        IMAGE,
    ),
    "antialiased, bicubic": (
        lambda x: (
            F.interpolate(x, (4, 3), mode="bicubic", antialias=True),
            F.interpolate(x, scale_factor=(0.6, 1.3), mode="bicubic", antialias=True),
        ),
        IMAGE,
    ),
    "eigenvalues": (lambda x: torch.linalg.eigvals(x + torch.diag(torch.arange(4.0) * 5)).abs().sort()[0], randn(4, 4)),
    "likelihood of a normal": (lambda x: F.gaussian_nll_loss(x, x * 2, x.square(), full=True), randn(3, 4)),
    "max_pool2d backward": (pool_backward, randn(1, 2, 2, 2, seed=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_operation(name):
    function, *inputs = CASES[name]
    compare(Call(function), inputs, 2e-5)


@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_scales_by_frequency(padding):
    torch.manual_seed(0)
    module = nn.Embedding(5, 3, padding_idx=padding, scale_grad_by_freq=True)
    compare(module, [torch.tensor([[0, 1, 1], [2, 1, 2]])], 1e-5)


class Unmaterialized(torch.autograd.Function):
    """Its backward tells an output that nobody used from one whose gradient is zero."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        if second is None:
            return first * 100
        return first * 2 + second * 3


def test_gradients_that_are_not_materialized_are_refused():
    fn = bridge.export(Call(lambda x: Unmaterialized.apply(x)[0]))
    with pytest.raises(bridge.BridgeError, match="Unmaterialized has several results"):
        jax.grad(lambda x: fn({}, {}, x)[0].sum())(jnp.ones(3))


def test_as_strided_scatter_into_what_has_a_gradient_is_refused():
    """PyTorch gives the gradient of the elements that are replaced, and none for those that stay."""
    fn = bridge.export(Call(lambda x: torch.as_strided_scatter(x, torch.zeros(2), (2,), (1,), 0)))
    with pytest.raises(bridge.BridgeError, match=r"as_strided_scatter.*own gradient of it is wrong"):
        fn({}, {}, jnp.ones((2, 2)))
