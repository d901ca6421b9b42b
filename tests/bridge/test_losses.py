"""Losses and distributions."""

import copy
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, in_jax, raises, randn, verified
from torch import distributions as d
from torch import nn

import bridge

# ---- Losses with weights

X = randn(4, 3)
TARGET = randn(4, 3, seed=2)
WEIGHT = randn(4, 3, seed=3).abs()


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss])
def test_weighted_losses(loss, reduction):
    compare(lambda x, t, w: loss(x, t, weight=w, reduction=reduction), [X, TARGET, WEIGHT])
    compare(lambda x, t: loss(x, t, reduction=reduction), [X, TARGET])


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
    compare(lambda x, w: LOSSES[name](x, w.detach()), [X, WEIGHT])


# ---- Cross-entropy of classes: picked by a mask, so that no array of log-probabilities or of their gradient is needed

LOGITS = randn(6, 5, seed=0)
IMAGE = randn(2, 5, 3, 4, seed=1)
LABELS = torch.tensor([0, 4, -100, 2, 1, 3])
MAP = torch.arange(24).view(2, 3, 4) % 5
MAP[0, 0] = -100
WEIGHTS = randn(5, seed=2).abs()
ENTROPIES = {
    "mean": lambda x, y: F.cross_entropy(x, y),
    "sum of weighted": lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS, reduction="sum"),
    "none": lambda x, y: F.cross_entropy(x, y, reduction="none"),
    "smoothed": lambda x, y: F.cross_entropy(x, y, weight=WEIGHTS, label_smoothing=0.1),
    "another label ignored": lambda x, y: F.nll_loss(x.log_softmax(1), y.clamp(min=0), ignore_index=4),
    "impossible classes": lambda x, y: F.cross_entropy(x.masked_fill(x < -0.5, -torch.inf), y, reduction="none"),
}


@pytest.mark.parametrize("name", ENTROPIES)
@pytest.mark.parametrize(("x", "labels"), [(LOGITS, LABELS), (IMAGE, MAP)], ids=["rows", "image"])
def test_values_and_gradients(name, x, labels):
    verified(ENTROPIES[name], x.clone().requires_grad_(), labels)


def test_of_nothing():
    """The mean over no label is nan and has a gradient of zero, as in PyTorch."""
    call = bridge.export(Call(ENTROPIES["mean"]))
    labels = jnp.full((6,), -100)
    value, gradient = jax.value_and_grad(lambda x: call({}, {}, x, labels)[0])(jnp.asarray(LOGITS))
    assert jnp.isnan(value) and not gradient.any()


def test_no_class_is_looked_up_by_its_position():
    call = bridge.export(Call(ENTROPIES["mean"]))
    gradient = jax.jit(jax.grad(lambda x, y: call({}, {}, x, y)[0]))
    text = gradient.lower(jnp.asarray(LOGITS), jnp.zeros(6, jnp.int32)).as_text()
    assert "gather" not in text and "scatter" not in text


# ---- `torch.distributions` with validation on: densities and gradients are PyTorch's, a check not made is said

CALLS = {
    "Normal": lambda x: d.Normal(x, x.exp()).log_prob(x + 1),
    "Categorical": lambda x: (
        d.Categorical(logits=x).entropy() + d.Categorical(probs=x.softmax(-1)).log_prob(x.argmax(-1))
    ),
    "Bernoulli": lambda x: d.Bernoulli(logits=x).log_prob((x > 0).float()),
    "Beta": lambda x: d.Beta(x.exp(), x.exp() + 1).log_prob(x.sigmoid()),
    "Gamma": lambda x: d.Gamma(x.exp(), x.exp() + 1).log_prob(x.exp()),
    "Dirichlet": lambda x: d.Dirichlet(x.exp()).log_prob(x.softmax(-1)),
    "Geometric": lambda x: d.Geometric(x.sigmoid()).log_prob(torch.ones(3, 4)),
    "Uniform": lambda x: d.Uniform(x - 1, x + 1).log_prob(x),
    "StudentT": lambda x: d.StudentT(x.exp() + 1, x, x.exp()).log_prob(x * 2),
    "MultivariateNormal": lambda x: d.MultivariateNormal(x, x.T @ x + torch.eye(4)).log_prob(x * 2),
    "LowRankMultivariateNormal": lambda x: d.LowRankMultivariateNormal(x[0], x.T, x[1].exp()).log_prob(x),
    "Independent": lambda x: d.Independent(d.Normal(x, 1.0), 1).log_prob(x * 2),
    "transformed": lambda x: d.TransformedDistribution(d.Normal(x, 1.0), [d.TanhTransform()]).log_prob(x.tanh() * 0.9),
    "MixtureSameFamily": lambda x: d.MixtureSameFamily(d.Categorical(logits=x), d.Normal(x, x.exp())).log_prob(x[:, 0]),
    "kl": lambda x: d.kl_divergence(d.Normal(x, x.exp()), d.Normal(0.0, 1.0)),
    "rsample": lambda x: d.Normal(x, 0.0 * x.exp() + 1e-30, validate_args=True).rsample(),
}


@pytest.mark.parametrize("name", CALLS)
def test_distributions(name):
    compare(CALLS[name], [randn(3, 4)], 5e-5, rng=jax.random.key(0))


def said(function, *inputs):
    """Returns the warnings of a compiled call."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        in_jax(function, *inputs, jit=True)
    return [str(w.message) for w in seen if issubclass(w.category, bridge.BridgeWarning)]


CHECKED = {
    "told to": lambda x: d.Normal(x, x.exp(), validate_args=True).log_prob(x),
    "of PyTorch's default": lambda x: d.Normal(x, x.exp()).log_prob(x),
    "of matrices": lambda x: d.MultivariateNormal(x, torch.diag(x.exp())).log_prob(x),
    "of a condition": lambda x: torch._check_tensor_all(x.exp() > 0) or x * 2,
}


@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_traced_values_are_left_out(name):
    compare(CHECKED[name], [randn(3)], 5e-5)
    assert not said(CHECKED[name], jnp.ones(3))
    with pytest.raises(ValueError, match="of distribution Normal"):
        d.Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))  # PyTorch's own default is as it was


def test_values_that_are_known_are_checked_where_the_code_says_so():
    def log_prob(x):
        return d.Normal(x, -1.0, validate_args=True).log_prob(x)

    raises("parameter scale", log_prob, jnp.ones(3), error=ValueError)
    with pytest.raises(ValueError, match="parameter scale"):
        in_jax(lambda x: d.Normal(0.0, x, validate_args=True).log_prob(x), -jnp.ones(3))


def test_calls_that_overlap_in_two_threads_restore_the_default():
    inside = threading.Event()
    both = threading.Event()

    def wait(x):
        inside.set()
        both.wait(10)
        return d.Normal(x, x.exp()).log_prob(x)

    first = threading.Thread(target=lambda: in_jax(wait, jnp.ones(3)))
    first.start()
    inside.wait(10)

    def second(x):
        both.set()
        first.join(10)
        return d.Normal(x, x.exp()).log_prob(x)

    in_jax(second, jnp.ones(3), jit=True)
    with pytest.raises(ValueError, match="of distribution Normal"):
        d.Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))


def test_variances_are_not_checked_and_that_is_said():
    call = Call(lambda x, v: F.gaussian_nll_loss(x, x * 2, v.exp()))
    compare(call, [randn(3), randn(3)])
    (text,) = said(call, jnp.ones(3), jnp.ones(3))
    assert "a check of traced values is not made" in text and "test_losses.py" in text


def test_a_branch_of_one_s_own_is_still_refused():
    raises("value of a traced tensor", lambda x: x if (x > 0).all() else d.Normal(x, 1.0).mean, jnp.ones(3))


# ---- Gradients where values are extreme: saturated attention, and norms of inputs that are large


def attention(masked):
    mask = torch.zeros(4, 4) if masked else None
    return Call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def gradients_in_pytorch(module, inputs, dtype):
    module = copy.deepcopy(module).to(dtype)
    inputs = [x.clone().to(dtype).requires_grad_() for x in inputs]
    out = module(*inputs)
    (out * weights_of(out.shape).to(dtype)).sum().backward()
    return out.detach().numpy(), [x.grad.double().numpy() for x in inputs]


def weights_of(shape):
    return randn(*shape, seed=9)


def gradients_in_jax(module, inputs):
    fn = bridge.export(module)

    def loss(inputs):
        out, _ = fn(fn.params, fn.buffers, *inputs)
        return jnp.sum(out * weights_of(out.shape).numpy()), out

    gradients, out = jax.jit(jax.grad(loss, has_aux=True))([jnp.asarray(x.numpy()) for x in inputs])
    return np.asarray(out), [np.asarray(g, np.float64) for g in gradients]


def numbers(*shape, seed=1):
    """Rounded, because the last bit of `randn` depends on the machine, and scores of 1e12 on the last bit."""
    return randn(*shape, seed=seed).mul(256).round() / 256


@pytest.mark.parametrize("masked", [False, True], ids=["plain", "additive mask"])
@pytest.mark.parametrize("scale", [1e3, 1e6])
def test_saturated_attention(scale, masked):
    """One key has all the weight: queries and keys have hardly a gradient, where rounding times their size gave 8e5.

    The reference is float64, because PyTorch's own kernel rounds like that in float32.
    """
    module = attention(masked)
    inputs = [scale * numbers(2, 2, 4, 6, seed=s) for s in range(3)]
    expected_out, expected = gradients_in_pytorch(module, inputs, torch.float64)
    out, found = gradients_in_jax(module, inputs)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-5 * scale)
    largest = max(np.abs(e).max() for e in expected)
    for name, e, f in zip("qkv", expected, found, strict=True):
        assert np.abs(f - e).max() <= 1e-4 * largest, name


@pytest.mark.parametrize("scale", [1.0, 1e14, 1e17])
@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(2, 16)], ids=["layer norm", "group norm"])
def test_norm_of_large_inputs(norm, scale):
    """The cube of the inverse deviation is below float32's smallest number from 1e13 on; the result is not."""
    inputs = [scale * numbers(3, 16)]
    _, (expected,) = gradients_in_pytorch(norm, inputs, torch.float64)
    _, (found,) = gradients_in_jax(norm, inputs)
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("module", "shapes"),
    [(nn.LayerNorm(4), [(2, 4)]), (attention(False), [(1, 1, 3, 4)] * 3)],
    ids=["layer norm", "attention"],
)
def test_second_derivatives(module, shapes):
    """The rules above are written by hand; a gradient of the gradient goes through them."""
    inputs = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        value = (module(*leaves) * weights_of(shapes[0])).sum()
    first = torch.autograd.grad(value, leaves, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    fn = bridge.export(module)

    def squares(inputs):
        def loss(inputs):
            return jnp.sum(fn(fn.params, fn.buffers, *inputs)[0] * weights_of(shapes[0]).numpy())

        return sum(jnp.sum(g**2) for g in jax.grad(loss)(inputs))

    found = jax.jit(jax.grad(squares))([jnp.asarray(x.numpy()) for x in inputs])
    for e, f in zip(second, found, strict=True):
        np.testing.assert_allclose(f, e.numpy(), rtol=0, atol=1e-5 * max(g.abs().max().item() for g in second))


def test_ctc_loss_of_one_sequence():
    def forward(h):
        return F.ctc_loss(h.log_softmax(-1), torch.tensor([1, 1]), torch.tensor(4), torch.tensor(2), reduction="sum")

    compare(forward, [randn(4, 5, seed=0)], 1e-5)
