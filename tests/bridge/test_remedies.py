"""Remedies of errors: each one is named by the error of one module and works in the next module."""

import operator
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from eager import Call, Calls, compare, in_jax, raises, randn, verified
from torch import distributions as d
from torch import nn
from torch.optim import swa_utils

import bridge

X = randn(4, 8)
TARGET = randn(4, 8, seed=2)
WEIGHT = randn(4, 8, seed=3).abs()


def queue(position, *shape):
    def forward(m, x):
        p = position(m.place)
        m.queue[p : p + 2] = x
        m.place.copy_((m.place + 2) % 8)
        return x @ m.queue.clone().T @ torch.eye(8, 3) @ m.w

    return Calls(forward, queue=nn.Buffer(randn(8, 3)), place=nn.Buffer(torch.zeros(shape, dtype=torch.long)))


def within(place):
    return min(max(place.item(), 0), 6)


def test_a_position_that_is_known_to_lie_inside():
    raises(r"i\.clamp\(0, 6\), for a number min\(max\(i, 0\), 6\)", queue(torch.Tensor.item), randn(2, 3))
    verified(queue(lambda place: place.clamp(0, 6)), randn(2, 3), steps=2)
    verified(queue(within), randn(2, 3), steps=2)
    raises("a tensor without dimensions works as", queue(int), randn(2, 3))
    raises("a tensor without dimensions works as", queue(lambda place: place, 1), randn(2, 3))
    verified(queue(lambda place: place[0].clamp(0, 6), 1), randn(2, 3), steps=2)


def test_the_only_true_element_of_a_mask():
    """Scripts that train diffusion models look up the noise of each time step in this way."""
    steps = torch.arange(1000).flip(0)
    noise = torch.linspace(1, 0, 1000)
    times = torch.tensor([7, 990])

    def by_numbers(times):
        return noise[[(steps == each).nonzero().item() for each in times]], noise[steps == times[0]].item()

    def by_tensors(times):
        places = [(steps == each).to(torch.uint8).argmax() for each in times]
        return noise[torch.stack(places)], torch.where(steps == times[0], noise, 0).sum()

    remedy = r"needs in .* mask\.to\(torch\.uint8\)\.argmax\(\) is the place"
    raises(f"`item` {remedy}", by_numbers, times)
    for ours, theirs in zip(in_jax(by_tensors, times, jit=True), by_numbers(times), strict=True):
        np.testing.assert_array_equal(ours, np.float32(theirs))
    for number in (int, float, complex, bool, operator.index, torch.is_nonzero, lambda x: x.is_nonzero()):
        raises(remedy, lambda x, number=number: x * number((x > 0).nonzero()), X[0])


def test_numbers_drawn_before_the_call():
    draw = d.VonMises(0.5, 2.0)
    raises("draw the numbers before the call", lambda x: x * d.VonMises(x, 2.0).sample(), X, rng=jax.random.key(0))
    compare(lambda x, numbers: x * numbers, [X, draw.sample((8,))])


def test_a_branch_inside_a_library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    folder.joinpath("branching_library.py").write_text(
        "def cleaned(x):\n    for _ in range(int(x.isnan().sum())):\n        x = x.nan_to_num()\n    return x\n\n\n"
        "def double(x):\n    return cleaned(x) * 2\n\n\n"
        "def ranked(x):\n    if x.sum() > 0:\n        for _ in range(int(x.isnan().sum())):\n"
        "            x = x.nan_to_num()\n    return x\n\n\n"
        "def counts(x):\n    return [list(range(int(row.isnan().sum()))) for row in x]\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    import branching_library  # pyright: ignore[reportMissingImports]

    module = Call(lambda x: branching_library.double(x))
    raises(r'bridge.export\(module, functions={"branching_library:cleaned": replacement}\)', module, X)
    fn = bridge.export(module, functions={"branching_library:cleaned": lambda x: x})
    assert jnp.allclose(jax.jit(lambda x: fn({}, {}, x)[0])(X.numpy()), X.numpy() * 2)
    raises(r'functions={"branching_library:ranked": replacement}\)', lambda x: branching_library.ranked(x), X)
    raises(r'functions={"branching_library:counts": replacement}\)', lambda x: branching_library.counts(x), X * 2)
    del sys.modules["branching_library"]


class Initialised(Calls):
    """Its first batch initialises it, as in ActNorm and in vector quantizers; `write` sets the flag."""

    def __init__(self, write):
        super().__init__(lambda m, x: None, ready=nn.Buffer(torch.tensor(False)), mean=nn.Buffer(torch.zeros(3)))
        self.write = write

    def forward(self, x):
        if not self.ready:
            self.mean.copy_(x.mean(0))
            self.write(self)
        return (x - self.mean) @ self.w


@pytest.mark.parametrize("write", [
    lambda m: m.ready.fill_(True),
    lambda m: setattr(m, "ready", torch.tensor(True)),
])  # fmt: skip
def test_a_flag_that_the_first_call_sets(write):
    module = Initialised(write)
    x = randn(4, 3)
    verified(module, x)
    with pytest.raises(bridge.BridgeError, match="call the module once before `export` if only the first call"):
        bridge.verify(module, x, static="ready")
    module(x)
    verified(module, x, static="ready")


def test_an_average_of_weights():
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(3, 3)
            self.average = swa_utils.AveragedModel(self.net)

        def forward(self, x):
            self.average.update_parameters(self.net)
            return self.average(x)

    verified(Averaged(), randn(4, 3), tolerance=1e-5)


def test_positions_among_distinct_numbers():
    module = Calls(lambda m, i: m.w[torch.unique(i, return_inverse=True)[1]])
    x = torch.tensor([0, 2, 2])
    text = raises(
        r"shape that depends on data in the module itself .*known_inputs=r\"0\".*index_fill\(0, i, 1\)", module, x
    )
    verified(module, x, known_inputs="0")
    inverse = Calls(lambda m, i: m.w[(torch.zeros(3).index_fill(0, i, 1).cumsum(0).long() - 1)[i]])
    assert "(torch.zeros(n).index_fill(0, i, 1).cumsum(0).long() - 1)[i]" in text
    verified(inverse, x)
    np.testing.assert_allclose(in_jax(inverse, x), module(x).detach())


@pytest.mark.parametrize("lost", [
    lambda x, t, w: F.l1_loss(x, t, weight=w),
    lambda x, t, w: F.l1_loss(x, t, reduction="none", weight=w),
    lambda x, t, w: torch.chain_matmul(x, t.T, w[:, :4], out=torch.empty(4, 4)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arguments_that_pytorch_hands_to_no_mode(lost):
    raises("write the function in operations", lost, X, TARGET, WEIGHT)
    compare(lambda x, t, w: ((x - t).abs() * w).mean(), [X, TARGET, WEIGHT])


def test_a_distribution_that_checks_in_any_case():
    matrix = torch.eye(3)
    compare(lambda x: d.Wishart(x.exp() + 2, matrix).log_prob(matrix), [X], 5e-5)


def test_a_distribution_that_is_told_to_check():
    def likelihood(x):
        return d.Geometric(x.sigmoid(), validate_args=True).log_prob(torch.ones(4, 8))

    with pytest.warns(bridge.BridgeWarning, match="a check of traced values is not made"):
        compare(likelihood, [X], 5e-5)
