"""Draws of `torch.distributions`: PyTorch's numbers replayed with their gradients, and those of a key by quantiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from eager import Call, in_jax, raises, verified
from support.markers import slow_unless
from torch import distributions as d

import bridge
from bridge.lowerings.derivatives import dirichlet_grad

A = torch.tensor([0.6, 1.4, 2.5])
EXACT = {
    "Bernoulli": lambda a: d.Bernoulli(a.sigmoid()),
    "Binomial": lambda a: d.Binomial(9, a.sigmoid()),
    "Categorical": lambda a: d.Categorical(a[None]),
    "Cauchy": lambda a: d.Cauchy(a, a),
    "ContinuousBernoulli": lambda a: d.ContinuousBernoulli(a.sigmoid()),
    "Exponential": d.Exponential,
    "GeneralizedPareto": lambda a: d.GeneralizedPareto(a, a, a),
    "Geometric": lambda a: d.Geometric(a.sigmoid()),
    "Gumbel": lambda a: d.Gumbel(a, a),
    "HalfCauchy": d.HalfCauchy,
    "HalfNormal": d.HalfNormal,
    "Independent": lambda a: d.Independent(d.Normal(a, a), 1),
    "Kumaraswamy": lambda a: d.Kumaraswamy(a, a),
    "LKJCholesky": lambda a: d.LKJCholesky(3, a[0]),
    "Laplace": lambda a: d.Laplace(a, a),
    "LogNormal": lambda a: d.LogNormal(a, a),
    "LogisticNormal": lambda a: d.LogisticNormal(a, a),
    "LowRankMultivariateNormal": lambda a: d.LowRankMultivariateNormal(a, a[:, None], a),
    "MixtureSameFamily": lambda a: d.MixtureSameFamily(d.Categorical(a), d.Normal(a, a)),
    "Multinomial": lambda a: d.Multinomial(5, a),
    "MultivariateNormal": lambda a: d.MultivariateNormal(a, torch.diag(a)),
    "NegativeBinomial": lambda a: d.NegativeBinomial(a, a.sigmoid()),
    "OneHotCategoricalStraightThrough": d.OneHotCategoricalStraightThrough,
    "Pareto": lambda a: d.Pareto(a, a + 2),
    "Poisson": d.Poisson,
    "RelaxedBernoulli": lambda a: d.RelaxedBernoulli(a[0], a.sigmoid()),
    "RelaxedOneHotCategorical": lambda a: d.RelaxedOneHotCategorical(a[0], a),
    "Uniform": lambda a: d.Uniform(a, a + 1),
    "Weibull": lambda a: d.Weibull(a, a),
}
BY_GAMMAS = {
    "Beta": lambda a: d.Beta(a, a + 1),
    "Dirichlet": d.Dirichlet,
    "Chi2": d.Chi2,
    "FisherSnedecor": lambda a: d.FisherSnedecor(a, a + 1),
    "Gamma": lambda a: d.Gamma(a, a + 1),
    "InverseGamma": lambda a: d.InverseGamma(a + 2, a),
    "StudentT": lambda a: d.StudentT(a + 2, a, a),
}
"""PyTorch's implicit gradients of these are approximations to 1e-3."""
MADE = EXACT | BY_GAMMAS
BY_DEFAULT = {"Bernoulli", "Categorical", "Dirichlet", "Gamma", "MultivariateNormal", "Poisson", "StudentT"}


@pytest.mark.parametrize("name", slow_unless(BY_DEFAULT.__contains__, MADE))
def test_numbers_and_gradients(name):
    def draws(a):
        made = MADE[name](a)
        return made.rsample((7,)) if made.has_rsample else made.sample((7,))

    verified(draws, A, steps=1, tolerance=1e-4 if name in EXACT else 2e-3)


@pytest.mark.parametrize(
    "name", slow_unless("Gamma".__eq__, ["Beta", "Binomial", "Dirichlet", "Gamma", "LKJCholesky", "NegativeBinomial"])
)
def test_numbers_of_a_key(name):
    torch.manual_seed(0)
    expected = MADE[name](A).sample((20_000,))
    ours = in_jax(lambda a: MADE[name](a).sample((20_000,)), A, rng=jax.random.key(0))
    for moment in (1, 2):
        np.testing.assert_allclose((ours**moment).mean(0), expected.pow(moment).mean(0), rtol=0.05, atol=0.02)
    assert not jnp.allclose(ours, in_jax(lambda a: MADE[name](a).sample((20_000,)), A, rng=jax.random.key(1)))


def test_numbers_of_two_replicas_are_those_of_the_batch():
    rates = torch.full((4, 3), 2.0)

    def draw(rng, rows):
        return in_jax(lambda a: d.Gamma(a, 1.0).sample(), rates[:rows], rng=rng)

    keys = [bridge.ShardedKey(jax.random.key(0), i, 2, 2) for i in range(2)]
    np.testing.assert_array_equal(jnp.concatenate([draw(key, 2) for key in keys]), draw(jax.random.key(0), 4))


@pytest.mark.parametrize("size", [0.1, 2.0, 60.0, 3000.0])
def test_the_gradient_of_a_beta(size):
    """Against differences of the cumulative probability in float64."""
    special = pytest.importorskip("scipy.special")
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    a = rng.gamma(2, size, 100) + 0.01
    b = rng.gamma(2, size, 100) + 0.01
    x = np.clip(rng.beta(a, b), 1e-6, 1 - 1e-6)
    step = 1e-5 * a
    change = (special.betainc(a - step, b, x) - special.betainc(a + step, b, x)) / (2 * step)
    ours = dirichlet_grad(*(jnp.asarray(v, jnp.float32) for v in (x, a, a + b)))
    np.testing.assert_allclose(ours, change / stats.beta.pdf(x, a, b) / (1 - x), rtol=1e-3)


def test_what_has_no_derivative():
    for draw in (lambda a: torch._sample_dirichlet(a), lambda a: torch.binomial(a.detach() + 9, a.sigmoid())):
        fn = bridge.export(Call(draw))
        with pytest.raises(bridge.BridgeError, match="PyTorch has no derivative"):
            jax.grad(lambda a, fn=fn: fn({}, {}, a, rng=jax.random.key(0))[0].sum())(A.numpy())


def test_a_seeded_gamma_around_traced_values():
    def seeded(a):
        torch.manual_seed(0)
        return d.Gamma(a, 1.0).sample()

    raises("numbers of a seeded generator around traced values", seeded, A)
