"""What PyTorch refuses by values that are known while tracing, or by dtype: the same error, before anything runs."""

import contextlib
import itertools

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F
from eager import Call, compare, randn
from torch import nn

import bridge
from benchmarks import op_survey
from bridge import kernel_checks
from bridge._compat.torch import DispatchMode, tree_map_only
from bridge.tensors import blank, fresh

X = randn(3, 4)
long = torch.tensor

NUMBER = jnp.zeros(())
SIGNATURES = 8
"""Calls of each operation in the database that are checked."""

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
    "take": lambda x: x.take(long([12])),
    "put": lambda x: x.put(long([-13]), x[0, :1]),
    "brackets": lambda x: x[:, long([0, 4])],
    "brackets, negative": lambda x: x[long([-4])],
    "brackets written": lambda x: (x * 1).index_put_((long([3]),), x[0]),
    "mask": lambda x: x[long([True, False])],
    "mask of columns": lambda x: x[:, long([True, False, True])],
    "mask written": lambda x: (x * 1).masked_fill_(long([True, False]), 0.0),
    "mask set": lambda x: (x * 1).__setitem__(long([True, False]), 0.0),
    "nll_loss": lambda x: F.nll_loss(x, long([0, 4, 1])),
    "nll_loss, negative": lambda x: F.nll_loss(x, long([0, -1, 1])),
    "cross_entropy": lambda x: F.cross_entropy(x, long([0, 1, 9])),
    "cross_entropy, smoothed": lambda x: F.cross_entropy(x, long([0, 1, 9]), label_smoothing=0.1),
    "cross_entropy of images": lambda x: F.cross_entropy(x[None, :, :, None], long([[[0], [3], [1], [2]]])),
    "one_hot": lambda x: F.one_hot(long([4]), 4) + x,
    "one_hot, negative": lambda x: F.one_hot(long([-1]), 4) + x,
    "matmul of two dtypes": lambda x: x.half() @ x.T,
    "matmul of two dtypes, bmm": lambda x: x[None].half() @ x.T[None],
    "linear of two dtypes": lambda x: F.linear(x.bfloat16(), x),
    "conv of two dtypes": lambda x: F.conv1d(x[None].bfloat16(), x[:, :3, None]),
    "attention of two dtypes": lambda x: F.scaled_dot_product_attention(x[None], x[None].half(), x[None]),
    "integers times floats in place": lambda x: torch.ones(4, dtype=torch.int32).mul_(x[0]),
    "integers plus floats in place": lambda x: x.int().add_(0.5),
    "bools plus integers in place": lambda x: (x > 0).add_(1),
    "softmax of integers": lambda x: x.long().softmax(0),
    "log_softmax of integers": lambda x: x.int().log_softmax(0),
    "bits of floats": lambda x: x | x,
    "mean of integers": lambda x: x.long().mean(),
    "largest of none": lambda x: x[:0].max(),
    "place of the largest of none": lambda x: x[:0].argmax(0),
    "cholesky of integers": lambda x: torch.linalg.cholesky(x.long()[:3, :3]),
    "norm of integers": lambda x: x.long().norm(),
    "dropout probability": lambda x: F.dropout(x, 1.5),
    "interpolated integers": lambda x: F.interpolate(x.long()[None], size=8, mode="linear"),
    "embedding by floats": lambda x: F.embedding(x, x),
    "gather by 32 bits and bool": lambda x: x.gather(1, x > 0),
    "deviation of integers": lambda x: x.long().std(),
    "index_add of two dtypes": lambda x: x.index_add(0, long([0]), x[:1].double()),
    "brackets written in another dtype": lambda x: (x * 1).index_put_((long([0]),), x[0].double()),
    "brackets of floats": lambda x: x[x],
    "lerp of two dtypes": lambda x: torch.lerp(x, x.double(), 0.5),
    "polar of two dtypes": lambda x: torch.polar(x, x.double()),
    "one_hot of floats": lambda x: F.one_hot(x, 3),
    "complex relu": lambda x: torch.complex(x, x).relu(),
    "complex max": lambda x: torch.complex(x, x).max(),
    "complex clamp": lambda x: torch.complex(x, x).clamp(max=1.0),
    "complex order": lambda x: torch.complex(x, x) < 1,
    "out that requires grad": lambda x: torch.add(nn.Parameter(torch.ones(4)), x[0], out=torch.empty(4)),
    "attention, a mask of integers": lambda x: attention(x, x.new_ones(3, 3).long()),
    "attention, a mask and causal": lambda x: attention(x, x.new_ones(3, 3), is_causal=True),
    "attention, a mask and causal, dropout": lambda x: attention(x, x.new_ones(3, 3), 0.5, True),
    "ctc, labels missing": lambda x: F.ctc_loss(x.log_softmax(-1), long([1, 2, 3, 1]), (3,), (2,)),
    "ctc, too long": lambda x: F.ctc_loss(x[:, None].log_softmax(-1), long([[1, 2]]), (9,), (2,)),
    "ctc, blank": lambda x: F.ctc_loss(x[:, None].log_softmax(-1), long([[1, 2]]), (3,), (2,), blank=9),
    "smooth l1, beta": lambda x: F.smooth_l1_loss(x, x, beta=-1.0),
    "unpooled": lambda x: F.max_unpool1d(x[None], torch.full((1, 3, 4), 99), 2),
    "integers filled with inf": lambda x: x.long().fill_(float("inf")),
    "integers to a negative power": lambda x: x.long() ** -1,
    "buckets of two dimensions": lambda x: torch.bucketize(x, x),
    "softmax of a dimension": lambda x: F.softmax(x, dim=4),
    "log_softmax of a dimension": lambda x: F.log_softmax(x, dim=-4),
    "square of integers as a loss": lambda x: F.mse_loss(x.long(), x.long()),
}


def attention(x, mask, dropout=0.0, is_causal=False):
    return F.scaled_dot_product_attention(x[None], x[None], x[None], mask, dropout, is_causal)


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # samples of deprecated functions
def test_no_kernel_is_said_to_refuse_what_it_takes(monkeypatch):
    """Every operation inside the samples of PyTorch's database, with traced tensors."""
    database, threads = op_survey.database(), torch.get_num_threads()
    monkeypatch.setattr(kernel_checks, "_FITTING", set())
    refused = {}

    class Watch(DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = tree_map_only(torch.Tensor, as_from_jax, (args, kwargs or {}))
            out = func(*args, **(kwargs or {}))  # raises what PyTorch does not take
            calls = refused.setdefault(func, [])
            if len(calls) < SIGNATURES and "sparse" not in func.name():
                calls.append(kernel_checks.refused_by_kernel(func, *given))
            return out

    torch.set_num_threads(1)
    for entry in database:
        torch.manual_seed(0)
        for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
            with contextlib.suppress(Exception):  # samples that PyTorch itself cannot make or compute
                samples = entry.sample_inputs_func(entry, "cpu", dtype, requires_grad=False)  # as `sample_inputs` asks
                for sample in itertools.islice(samples, 2 * (dtype in entry.dtypes)):
                    with contextlib.suppress(Exception), Watch():
                        entry.op(sample.input, *sample.args, **sample.kwargs)
    torch.set_num_threads(threads)
    assert len(refused) > 400
    assert not {func.name(): errors for func, errors in refused.items() if any(errors)}


def as_from_jax(tensor):
    """A traced tensor; nobody reads its values."""
    return fresh(NUMBER, blank(tensor.shape, None, tensor.dtype))
