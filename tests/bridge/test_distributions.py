"""`torch.distributions` with validation on: densities and gradients are PyTorch's, a check not made is said."""

import warnings

import jax
import jax.numpy as jnp
import pytest
import torch
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


def twice(x):
    for _ in range(2):
        total = d.Normal(x, x.exp()).log_prob(x).sum()
    return total


def test_a_check_that_is_not_made_is_said_once_for_each_place():
    fn = bridge.export(Call(twice))
    (text,) = said(jax.jit(lambda x: fn({}, {}, x)[0]), jnp.ones(3))
    assert "not checked" in text and "test_distributions.py" in text and "validate_args=False" in text


def test_values_that_are_known_are_checked():
    fn = bridge.export(Call(lambda x: d.Normal(x, -1.0).log_prob(x)))
    with pytest.raises(ValueError, match="parameter scale"):
        jax.jit(lambda x: fn({}, {}, x)[0])(jnp.ones(3))
    fn = bridge.export(Call(lambda x: d.Normal(0.0, x).log_prob(x)))
    assert not said(lambda x: fn({}, {}, x), jnp.ones(3))
    with pytest.raises(ValueError, match="parameter scale"):
        fn({}, {}, -jnp.ones(3))


def test_no_warning_without_validation():
    fn = bridge.export(Call(lambda x: d.Normal(x, x.exp(), validate_args=False).log_prob(x)))
    assert not said(jax.jit(lambda x: fn({}, {}, x)[0]), jnp.ones(3))


def test_the_remedy_holds_for_a_distribution_inside_another():
    fn = bridge.export(Call(lambda x: d.StudentT(x.exp(), validate_args=False).log_prob(x)))
    (text,) = said(jax.jit(lambda x: fn({}, {}, x)[0]), jnp.ones(3))  # StudentT makes a Chi2 without the argument
    assert "Distribution.set_default_validate_args(False)" in text
    d.Distribution.set_default_validate_args(False)
    try:
        assert not said(jax.jit(lambda x: fn({}, {}, x)[0]), jnp.ones(3))
    finally:
        d.Distribution.set_default_validate_args(True)


def test_a_check_that_is_made_without_validation_too():
    wishart = Call(
        lambda x: d.Wishart(x.exp() + 2, scale_tril=torch.eye(3), validate_args=False).log_prob(torch.eye(3))
    )
    compare(wishart, [randn(2)], 5e-5)
    fn = bridge.export(wishart)
    said_of_it = said(jax.jit(lambda x: fn({}, {}, x)[0]), jnp.ones(2))
    assert any("degrees of freedom" in text for text in said_of_it)
    with pytest.raises(ValueError, match="expected to be greater than ndim"):
        fn({}, {}, jnp.full(2, -jnp.inf))


def test_a_branch_of_one_s_own_is_still_refused():
    fn = bridge.export(Call(lambda x: x if (x > 0).all() else d.Normal(x, 1.0).mean))
    with pytest.raises(bridge.BridgeError, match="value of a traced tensor"):
        jax.jit(lambda x: fn({}, {}, x)[0])(jnp.ones(3))
