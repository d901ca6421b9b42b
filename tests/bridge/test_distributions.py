"""`torch.distributions` with validation on: densities and gradients are PyTorch's, a check not made is said."""

import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import distributions as d

import bridge

CALLS = {
    "Normal": lambda x: d.Normal(x, x.exp()).log_prob(x + 1),
    "Categorical": lambda x: (
        d.Categorical(logits=x).entropy() + d.Categorical(probs=x.softmax(-1)).log_prob(x.argmax(-1))
    ),
    "Bernoulli": lambda x: d.Bernoulli(logits=x).log_prob((x > 0).float()),
    "Beta": lambda x: d.Beta(x.exp(), x.exp() + 1).log_prob(x.sigmoid()),
    "Gamma": lambda x: d.Gamma(x.exp(), x.exp() + 1).log_prob(x.exp()),
    "Dirichlet": lambda x: d.Dirichlet(x.exp()).log_prob(x.softmax(-1)),
    "Laplace": lambda x: d.Laplace(x, x.exp()).log_prob(x * 2 + 1),
    "Geometric": lambda x: d.Geometric(x.sigmoid()).log_prob(torch.ones(3, 4)),
    "Poisson": lambda x: d.Poisson(x.exp()).log_prob(torch.ones(3, 4)),
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
@pytest.mark.filterwarnings("ignore::bridge.BridgeWarning")
def test_values_and_gradients(name):
    compare(Call(CALLS[name]), [randn(3, 4)], 5e-5, rng=jax.random.key(0))


def said(function, x):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        function(x)
    return [str(w.message) for w in seen if issubclass(w.category, bridge.BridgeWarning)]


CHECKED = {
    "told to": lambda x: d.Normal(x, x.exp(), validate_args=True).log_prob(x),
    "of PyTorch's default": lambda x: d.Normal(x, x.exp()).log_prob(x),
    "of matrices": lambda x: d.MultivariateNormal(x, torch.diag(x.exp())).log_prob(x),
    "inside another": lambda x: d.StudentT(x.exp(), validate_args=True).log_prob(x),
    "of a condition": lambda x: torch._check_tensor_all(x.exp() > 0) or x * 2,
}


@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_traced_values_are_left_out(name):
    compare(Call(CHECKED[name]), [randn(3)], 5e-5)
    fn = bridge.export(Call(CHECKED[name]))
    assert not said(jax.jit(lambda x: fn({}, {}, x)[0]), jnp.ones(3))
    with pytest.raises(ValueError, match="of distribution Normal"):
        d.Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))  # PyTorch's own default is as it was


def test_values_that_are_known_are_checked_where_the_code_says_so():
    fn = bridge.export(Call(lambda x: d.Normal(x, -1.0, validate_args=True).log_prob(x)))
    with pytest.raises(ValueError, match="parameter scale"):
        jax.jit(lambda x: fn({}, {}, x)[0])(jnp.ones(3))
    fn = bridge.export(Call(lambda x: d.Normal(0.0, x, validate_args=True).log_prob(x)))
    with pytest.raises(ValueError, match="parameter scale"):
        fn({}, {}, -jnp.ones(3))


def test_calls_that_overlap_in_two_threads_restore_the_default():
    inside, both = threading.Event(), threading.Event()

    def wait(x):
        inside.set()
        both.wait(10)
        return d.Normal(x, x.exp()).log_prob(x)

    first = threading.Thread(target=lambda: bridge.export(Call(wait))({}, {}, jnp.ones(3)))
    first.start()
    inside.wait(10)

    def second(x):
        both.set()
        first.join(10)
        return d.Normal(x, x.exp()).log_prob(x)

    jax.jit(lambda x: bridge.export(Call(second))({}, {}, x)[0])(jnp.ones(3))
    with pytest.raises(ValueError, match="of distribution Normal"):
        d.Normal(torch.zeros(2), torch.tensor([1.0, -1.0]))


def test_variances_are_not_checked_and_that_is_said():
    call = Call(lambda x, v: F.gaussian_nll_loss(x, x * 2, v.exp()))
    compare(call, [randn(3), randn(3)])
    (text,) = said(jax.jit(lambda x: bridge.export(call)({}, {}, x, x)[0]), jnp.ones(3))
    assert "the variances are traced and not checked" in text and "test_distributions.py" in text


def test_a_branch_of_one_s_own_is_still_refused():
    fn = bridge.export(Call(lambda x: x if (x > 0).all() else d.Normal(x, 1.0).mean))
    with pytest.raises(bridge.BridgeError, match="value of a traced tensor"):
        jax.jit(lambda x: fn({}, {}, x)[0])(jnp.ones(3))
