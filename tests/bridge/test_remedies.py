"""What an error advises, done: each remedy is named by the error of one module and works in the next one."""

import sys

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import distributions as d
from torch import nn

import bridge

X, TARGET, WEIGHT = randn(4, 8), randn(4, 8, seed=2), randn(4, 8, seed=3).abs()
LABELS = torch.tensor([0, 5, 13, 19])


def refused(module, *inputs, **settings):
    """The error of a call, in training and under `jit`."""
    fn = bridge.export(module)
    with pytest.raises(bridge.BridgeError) as caught:
        jax.eval_shape(lambda p, b, *x: fn(p, b, *x, train=True, **settings)[0], fn.params, fn.buffers, *inputs)
    return str(caught.value)


def arrays(*tensors):
    return [jnp.asarray(t.numpy()) for t in tensors]


class Queue(nn.Module):
    def __init__(self, position):
        super().__init__()
        self.register_buffer("queue", randn(8, 3))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))
        self.position = position

    def forward(self, x):
        p = self.position(self.place)
        self.queue[p : p + 2] = x
        self.place.copy_((self.place + 2) % 8)
        return x @ self.queue.clone().T


def test_a_position_as_a_tensor():
    assert "a slice's bound without `int()`" in refused(Queue(int), *arrays(randn(2, 3)))
    assert bridge.verify(Queue(lambda place: place.clamp(0, 6)), randn(2, 3), steps=2).ok


@pytest.mark.parametrize(
    "draw",
    [
        lambda: d.Beta(0.8, 0.8).sample((4, 1)),
        lambda: d.Gamma(2.0, 1.0).sample((4, 1)),
        lambda: d.Dirichlet(torch.ones(8)).sample(),
        lambda: torch.binomial(torch.full((8,), 5.0), torch.full((8,), 0.3)),
    ],
)
def test_numbers_drawn_before_the_call(draw):
    text = refused(Call(lambda x: x * draw()), *arrays(X), rng=jax.random.key(0))
    assert "draw the numbers before the call and pass them as an argument" in text
    compare(Call(lambda x, numbers: x * numbers), [X, draw()])


def test_adaptive_softmax_by_its_logarithms():
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [4, 10])
    text = refused(adaptive, *arrays(X, LABELS))
    assert '`method="log_prob"`' in text and "gather the targets" in text
    assert bridge.verify(adaptive, X, method="log_prob").ok
    module = Call(lambda loss, x, y: -loss.log_prob(x).gather(1, y[:, None]).mean(), adaptive)
    assert bridge.verify(module, X, LABELS).ok
    expected = adaptive(X, LABELS).loss.detach()
    assert torch.allclose(module(X, LABELS), expected)


def test_a_check_inside_a_library(tmp_path, monkeypatch):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    folder.joinpath("checking_library.py").write_text(
        "def check(x):\n    if x.isnan().any():\n        raise ValueError('not a number')\n\n\n"
        "def double(x):\n    check(x)\n    return x * 2\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    import checking_library  # pyright: ignore[reportMissingImports]

    module = Call(lambda x: checking_library.double(x))
    assert 'register_function("package.module:function", replacement)' in refused(module, *arrays(X))
    fn = bridge.export(module, functions={"checking_library:check": lambda x: None})
    assert jnp.allclose(jax.jit(lambda x: fn({}, {}, x)[0])(X.numpy()), X.numpy() * 2)
    del sys.modules["checking_library"]


def test_batch_norm_with_a_number_as_its_momentum():
    assert "give the layer a number as its momentum" in refused(nn.BatchNorm1d(8, momentum=None), *arrays(X))
    assert bridge.verify(nn.BatchNorm1d(8, momentum=0.2), X, train=True, steps=2).ok
    fn = bridge.export(nn.BatchNorm1d(8, momentum=None))
    jax.eval_shape(lambda b: fn(fn.params, b, X.numpy(), train=False), fn.buffers)


@pytest.mark.parametrize("lost", [
    lambda x, t, w: F.l1_loss(x, t, weight=w),
    lambda x, t, w: F.l1_loss(x, t, reduction="none", weight=w),
    lambda x, t, w: torch.chain_matmul(x, t.T, w[:, :4], out=torch.empty(4, 4)),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arguments_that_pytorch_hands_to_no_mode(lost):
    assert "write the function in operations" in refused(Call(lost), *arrays(X, TARGET, WEIGHT))
    compare(Call(lambda x, t, w: ((x - t).abs() * w).mean()), [X, TARGET, WEIGHT])


def test_a_distribution_that_checks_in_any_case():
    matrix = torch.eye(3)
    text = refused(Call(lambda x: d.Wishart(x.exp() + 2, matrix).log_prob(matrix)), *arrays(X))
    assert "write the formula in operations of PyTorch" in text
    geometric = Call(lambda x: d.Geometric(x.sigmoid(), validate_args=True).log_prob(torch.ones(4, 8)))
    assert "leave validate_args=True out" in refused(geometric, *arrays(X))
    compare(Call(lambda x: d.Geometric(x.sigmoid()).log_prob(torch.ones(4, 8))), [X], 5e-5)
