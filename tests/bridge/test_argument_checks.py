"""What PyTorch refuses by values that are known while tracing, or by dtype: the same error, before anything runs."""

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn

import bridge

X = randn(3, 4)
long = torch.tensor

REFUSED = {
    "gather": lambda x: x.gather(1, long([[7]])),
    "gather, negative": lambda x: x.gather(1, long([[-1]])),
    "embedding": lambda x: F.embedding(long([3]), x),
    "embedding bag": lambda x: F.embedding_bag(long([[0, 3]]), x),
    "index_select": lambda x: x.index_select(1, long([0, 4])),
    "index_add": lambda x: x.index_add(0, long([3]), x[:1]),
    "index_add in place": lambda x: (x * 1).index_add_(0, long([3]), x[:1]),
    "index_copy": lambda x: x.index_copy(0, long([3]), x[:1]),
    "index_fill": lambda x: x.index_fill(0, long([3]), 1.0),
    "index_reduce": lambda x: x.index_reduce(0, long([5]), x[:1], "amax"),
    "scatter": lambda x: x.scatter(1, long([[4]]), 1.0),
    "scatter a tensor": lambda x: x.scatter(1, long([[4]]), x[:1, :1]),
    "scatter_add": lambda x: x.scatter_add(0, long([[3]]), x),
    "scatter_reduce": lambda x: x.scatter_reduce(0, long([[3]]), x, "amax"),
    "brackets": lambda x: x[:, long([0, 4])],
    "brackets, negative": lambda x: x[long([-4])],
    "brackets written": lambda x: (x * 1).index_put_((long([3]),), x[0]),
    "mask": lambda x: x[long([True, False])],
    "mask of columns": lambda x: x[:, long([True, False, True])],
    "mask written": lambda x: (x * 1).masked_fill_(long([True, False]), 0.0),
    "mask set": lambda x: (x * 1).__setitem__(long([True, False]), 0.0),
    "one_hot": lambda x: F.one_hot(long([4]), 4) + x,
    "one_hot, negative": lambda x: F.one_hot(long([-1]), 4) + x,
    "matmul of two dtypes": lambda x: x.half() @ x.T,
    "matmul of two dtypes, bmm": lambda x: x[None].half() @ x.T[None],
    "linear of two dtypes": lambda x: F.linear(x.bfloat16(), x),
    "conv of two dtypes": lambda x: F.conv1d(x[None].bfloat16(), x[:, :3, None]),
    "integers times floats in place": lambda x: torch.ones(4, dtype=torch.int32).mul_(x[0]),
    "integers plus floats in place": lambda x: x.int().add_(0.5),
    "bools plus integers in place": lambda x: (x > 0).add_(1),
    "bits of floats": lambda x: x | x,
    "mean of integers": lambda x: x.long().mean(),
    "largest of none": lambda x: x[:0].max(),
    "place of the largest of none": lambda x: x[:0].argmax(0),
    "cholesky of integers": lambda x: torch.linalg.cholesky(x.long()[:3, :3]),
    "norm of integers": lambda x: x.long().norm(),
    "dropout probability": lambda x: F.dropout(x, 1.5),
    "embedding by floats": lambda x: F.embedding(x, x),
    "gather by 32 bits and bool": lambda x: x.gather(1, x > 0),
    "integers to a negative power": lambda x: x.long() ** -1,
    "softmax of a dimension": lambda x: F.softmax(x, dim=4),
    "log_softmax of a dimension": lambda x: F.log_softmax(x, dim=-4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_by_pytorch(name):
    with pytest.raises(Exception) as expected:
        REFUSED[name](X)
    fn = bridge.export(Call(REFUSED[name]))
    with pytest.raises(type(expected.value)) as ours:
        jax.eval_shape(lambda x: fn({}, {}, x, rng=jax.random.key(0))[0], X.numpy())
    assert not isinstance(ours.value, bridge.BridgeError)
    assert any("in the module itself (Call)" in note for note in ours.value.__notes__)


def test_what_pytorch_takes_is_let_through():
    def function(x):
        ignored = F.cross_entropy(x, long([0, -100, 3])) + F.nll_loss(x, long([7, 1, 2]), ignore_index=7)
        return (
            ignored,
            x[long([-3, 2])],
            torch.take_along_dim(x, long([[-1, 4, 9]]), 1),
            x.take(long([-12, 11])),
            x[long([True, False, True])],
            x[:, None, long([0, -4])],
            x[x.new_ones(3, 4).bool()],
            x.half() * x,
            x.sum().gather(0, long(0)),
            x.long().softmax(0, dtype=torch.float32),
        )

    compare(Call(function), [X])


@pytest.mark.parametrize(
    "forward",
    [
        lambda h, y: F.cross_entropy(h, torch.zeros_like(y)),
        lambda h, y: F.nll_loss(h, y.new_full((3,), 1)),
    ],
    ids=["zeros_like", "new_full"],
)
def test_a_constant_like_an_integer_input_counts_as_one_of_64_bits(forward):
    h, y = randn(3, 5), long([0, 2, 1])
    result, _ = bridge.export(Call(forward))({}, {}, jnp.asarray(h.numpy()), jnp.asarray(y.numpy()))
    assert float(result) == pytest.approx(float(forward(h, y)), rel=1e-6)
