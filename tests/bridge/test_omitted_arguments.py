"""Arguments that functions of PyTorch do not hand to a mode, and numbers that they ask traced tensors for."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import nn

import bridge

X, TARGET, WEIGHT = randn(4, 3), randn(4, 3, seed=2), randn(4, 3, seed=3).abs()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.l1_loss, F.mse_loss, F.huber_loss])
def test_weighted_losses(loss, reduction):
    compare(Call(lambda x, t, w: loss(x, t, weight=w, reduction=reduction)), [X, TARGET, WEIGHT])
    compare(Call(lambda x, t: loss(x, t, weight=WEIGHT, reduction=reduction)), [X, TARGET])
    compare(Call(lambda x, t: loss(x, t, reduction=reduction)), [X, TARGET])


LOSSES = {
    "binary cross entropy": lambda x, w: F.binary_cross_entropy(x.sigmoid(), WEIGHT / 9, weight=w),
    "with logits": lambda x, w: F.binary_cross_entropy_with_logits(x, WEIGHT / 9, weight=w, pos_weight=w[:1]),
    "cross entropy": lambda x, w: F.cross_entropy(x, torch.tensor([0, 2, 1, 1]), weight=w[0], label_smoothing=0.1),
    "nll": lambda x, w: F.nll_loss(x, torch.tensor([0, 2, 1, 1]), weight=w[0]),
    "multi margin": lambda x, w: F.multi_margin_loss(x, torch.tensor([0, 2, 1, 1]), weight=w[0]),
    "multilabel soft margin": lambda x, w: F.multilabel_soft_margin_loss(x, WEIGHT.round(), weight=w),
}


@pytest.mark.parametrize("name", LOSSES)
def test_other_losses_with_weights(name):
    compare(Call(lambda x, w: LOSSES[name](x, w.detach())), [X, WEIGHT])


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_module_does_not_get_the_weight_in_pytorch_either():
    def forward(x, t, w):
        with Passing():
            return F.l1_loss(x, t, weight=w)

    compare(Call(forward), [X, TARGET, WEIGHT])
    assert forward(X, TARGET, WEIGHT) == F.l1_loss(X, TARGET)


def test_product_of_matrices_into_a_tensor():
    def forward(x, y):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = torch.empty(4, 4)
            with torch.no_grad():
                torch.chain_matmul(x, y.T, x @ x.T, out=out)
        return out * x.sum()

    compare(Call(forward), [X, TARGET])


class Averaged(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3, momentum=None), nn.BatchNorm2d(2, momentum=None, affine=False)

    def forward(self, x):
        return self.second(self.first(x).view(2, 2, 3, 1)).flatten() + self.first(x * 2 + 1).flatten()


def test_cumulative_average_of_batch_statistics():
    torch.manual_seed(0)
    module = Averaged()
    fn = bridge.export(module)
    step = jax.jit(
        jax.value_and_grad(
            lambda p, b, x: (lambda o: (jnp.sum(o[0] ** 3), o[1]))(fn(p, b, x, train=True)), has_aux=True
        )
    )
    buffers = fn.buffers
    for seed in range(3):
        x = randn(4, 3, seed=seed)
        module.zero_grad()
        loss = module(x).pow(3).sum()
        loss.backward()
        (value, buffers), gradients = step(fn.params, buffers, jnp.asarray(x.numpy()))
        np.testing.assert_allclose(value, loss.detach(), rtol=1e-4)
        for name, parameter in module.named_parameters():
            np.testing.assert_allclose(gradients[name], parameter.grad, atol=1e-4)
        for name, buffer in module.named_buffers():
            np.testing.assert_allclose(buffers[name], buffer, atol=1e-5)
    out, unchanged = jax.jit(lambda b, x: fn(fn.params, b, x, train=False))(buffers, X.numpy())
    np.testing.assert_allclose(out, module.eval()(X).detach(), atol=1e-5)
    assert unchanged["first.num_batches_tracked"] == buffers["first.num_batches_tracked"] == 6


def test_a_counter_that_other_code_asks_for_is_refused():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return super().forward(x) * float(self.num_batches_tracked)

    fn = bridge.export(Own(3, momentum=None))
    with pytest.raises(bridge.BridgeError, match="asks for the value of a traced tensor"):
        jax.eval_shape(lambda b: fn(fn.params, b, X.numpy(), train=True), fn.buffers)
